"""What TTIR shows that a file's text does not; and that nothing of the file is run for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.verify.lint import Result, lint_file, lint_text

HEAD = "import triton\nimport triton.language as tl\n\nimport weft.language as wl\n\n\n"
# A loop whose options a launch decides.
RELAY = """@triton.jit
def relay(world, x, ready, n, FLATTEN: tl.constexpr, SPECIALISE: tl.constexpr):
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    for tile in tl.range(0, n, flatten=FLATTEN, warp_specialize=SPECIALISE):
        wl.wait(ready + tile, at_least=1)
        wl.put_signal(world, x + tile, tl.load(x + tile), ready + tile + 1, to=right)


def main(world, x, ready):
    relay[(1,)](world.arg, x, ready, 8, {flatten}, {specialise})
"""


def lower(text: str) -> Result:
    return lint_text(HEAD + text, "kernels.py", lower=True)


@pytest.mark.parametrize(
    "flatten, specialise, expected",
    [
        (False, False, []),
        (True, False, ["flattened-wait"]),
        (False, True, ["specialised-wait"]),
        (True, True, ["flattened-wait", "specialised-wait"]),
    ],
)
def test_options_that_a_launch_decides(flatten: bool, specialise: bool, expected: list[str]):
    text = RELAY.format(flatten=flatten, specialise=specialise)
    assert not lint_text(HEAD + text).problems  # not to be seen in the text alone
    result = lower(text)
    assert result.lowered == ["relay"] and not result.notes
    assert [problem.rule for problem in result.problems] == expected
    for problem in result.problems:
        assert problem.line == 11 and "line 10" in problem.message


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, triton, triton.language as tl, weft.language as wl",
        "import torch; import triton, triton.language as tl; import weft.language as wl",
    ],
)
def test_imports_that_share_a_line(imports: str):
    text = imports + "\n" + RELAY.format(flatten=True, specialise=False)
    result = lint_text(text, "kernels.py", lower=True)
    assert result.lowered == ["relay"] and not result.notes
    assert [problem.rule for problem in result.problems] == ["flattened-wait"]


def test_a_pipelined_loop_of_an_option():
    text = """
@triton.jit
def multiply(a, c, ready, k, STAGES: tl.constexpr):
    i = tl.arange(0, 16)
    total = tl.zeros((16, 16), tl.float32)
    for step in tl.range(0, k, num_stages=STAGES):
        wl.wait(ready + step, at_least=1)
        part = tl.load(a + i[:, None] * k + step * 16 + i[None, :])
        total = tl.dot(part, part, total)
    tl.store(c + i[:, None] * 16 + i[None, :], total)


def main(a, c, ready):
    multiply[(1,)](a, c, ready, 8, {})
"""
    assert [p.rule for p in lower(text.format(3)).problems] == ["wait-in-pipelined-loop"]
    assert not lower(text.format(1)).problems


def test_spins_and_scopes_behind_names_that_the_text_hides():
    text = """
@triton.jit
def kernel(world, x, ready, out, HOW: tl.constexpr):
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    scope: tl.constexpr = HOW
    tl.debug_barrier()
    tl.atomic_add(wl.at(world, ready, right), 1, sem="release", scope=scope)
    seen = tl.atomic_add(ready, 0, sem="acquire", scope="sys")
    while seen < 1:
        seen = tl.atomic_add(ready, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    tl.store(out, tl.load(x))


def main(world, x, ready, out):
    kernel[(1,)](world.arg, x, ready, out, {!r})
"""
    assert [p.rule for p in lower(text.format("gpu")).problems] == ["device-scope"]
    assert not lower(text.format("sys")).problems


def test_one_finding_where_text_and_ttir_agree():
    text = """
@triton.jit
def take(x, ready, out):
    while tl.load(ready, volatile=True) < 1:
        pass
    tl.store(out, tl.load(x))
"""
    result = lower(text)
    assert result.lowered == ["take"]
    assert [problem.rule for problem in result.problems] == ["volatile-wait"]


def test_a_comment_silences_what_ttir_shows():
    text = RELAY.format(flatten=True, specialise=False)
    wait = "wl.wait(ready + tile, at_least=1)"
    allowed = text.replace(wait, f"{wait}  # weft: allow flattened-wait: no store is waited for")
    assert not lower(allowed).problems


def test_nothing_of_the_file_is_run(tmp_path: Path):
    mark = tmp_path / "was_run"
    path = tmp_path / "script.py"
    path.write_text(
        HEAD.replace("import triton\n", "import no_such_module\nimport triton\n")
        + "from pathlib import Path\n"
        + f"Path({str(mark)!r}).touch()\n"
        + RELAY.format(flatten=True, specialise=False)
        + f"\nPath({str(mark)!r}).touch()\n"
    )
    result = lint_file(path, lower=True)
    assert result.lowered == ["relay"] and not mark.exists()
    assert [(p.rule, p.line) for p in result.problems] == [("flattened-wait", 14)]


def test_what_cannot_be_lowered_is_a_note(tmp_path: Path):
    text = """
@triton.jit
def of_a_record(task, x):
    wl.wait(task.ready, at_least=1)
    tl.store(x, missing_name)


@triton.jit
def of_a_missing_name(ready, x):
    wl.wait(ready, at_least=1)
    tl.store(x, missing_name)


def factory():
    @triton.jit
    def within(ready):
        wl.wait(ready, at_least=1)

    return within
"""
    result = lower(text)
    assert result.ok and not result.lowered
    told = "\n".join(result.notes)
    assert "of_a_record was not lowered: task is a record" in told
    assert "missing_name is not defined" in told
    assert "within was not lowered: it is defined within a function" in told


def test_a_kernel_without_synchronisation_is_not_lowered():
    text = "@triton.jit\ndef copy(x, out):\n    tl.store(out, tl.load(x))\n"
    result = lower(text)
    assert result.ok and not result.lowered and not result.notes


def test_programs_that_are_right_stay_clean():
    folder = Path(__file__).parents[1] / "right"
    names = ("barrier_by_counters", "lock_by_exchange", "raw_spin_with_acquire", "split_barrier")
    for name in names:
        result = lint_file(folder / f"{name}.py", lower=True)
        assert result.ok and result.lowered, (name, result.notes)


def test_a_counter_of_tickets_is_a_pointer():
    body = "    t = wl.next_task(counter, 3, 2)\n    wl.wait(x + t, 1)\n"
    text = "@triton.jit\ndef draw(counter, x):\n" + body
    result = lower(text)
    assert result.lowered == ["draw"] and not result.notes


def test_names_from_files_beside_it(tmp_path: Path):
    """A package that hands on a function, a module taken whole, a decorator with arguments."""
    package = tmp_path / "parts"
    package.mkdir()
    (package / "__init__.py").write_text("from .spins import spin\n")
    spin = "@triton.jit\ndef spin(p):\n    while tl.load(p, volatile=True) < 1:\n        pass\n"
    (package / "spins.py").write_text(HEAD + spin)
    kernel = (
        "from parts import spin\nfrom parts import spins\n"
        "def later(grid, kernel, args):\n    return {}\n"
        "@triton.jit(launch_metadata=later)\n"
        "def take(p, q, x):\n    spin(p)\n    spins.spin(q)\n    tl.store(x, tl.load(x))\n"
    )
    path = tmp_path / "user.py"
    path.write_text(HEAD + kernel)
    result = lint_file(path, lower=True)
    assert result.lowered == ["take"], result.notes
    first = path.read_text().splitlines().index("    spin(p)") + 1
    found = [(problem.rule, problem.line) for problem in result.problems]
    assert found == [("volatile-wait", first), ("volatile-wait", first + 1)]
