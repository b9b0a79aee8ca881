"""What a launch decides: loop options and scopes that are constants of a kernel."""

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


def lint(text: str) -> Result:
    return lint_text(HEAD + text, "kernels.py")


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
    result = lint(text)
    assert [problem.rule for problem in result.problems] == expected
    for problem in result.problems:
        assert problem.line == 11 and "line 10" in problem.message


def test_launches_that_disagree_decide_nothing():
    text = RELAY.format(flatten=True, specialise=False)
    assert not lint(text + "    relay[(1,)](world.arg, x, ready, 8, False, False)\n").problems


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
    assert [p.rule for p in lint(text.format(3)).problems] == ["wait-in-pipelined-loop"]
    assert not lint(text.format(1)).problems


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
    assert [p.rule for p in lint(text.format("gpu")).problems] == ["device-scope"]
    assert not lint(text.format("sys")).problems


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
    result = lint_file(path)
    first = path.read_text().splitlines().index("    spin(p)") + 1
    found = [(problem.rule, problem.line) for problem in result.problems]
    assert found == [("volatile-wait", first), ("volatile-wait", first + 1)]
