"""`weft check` and `weft compile` of users' own kernels: launched, and of programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.runtime.compiled_ahead import load
from weft.tools.main import main

SCRIPT = '''"""Launches kernels of its own."""
import sys
import torch, triton, triton.language as tl, weft
import weft.language as wl

@triton.jit
def pull(world, row, out, n, scale, size: tl.constexpr):
    at = tl.arange(0, size)
    peer = (wl.rank(world) + 1) % wl.num_ranks(world)
    tl.store(out + at, scale * tl.load(wl.at(world, row + at, peer), mask=at < n))

@triton.autotune([triton.Config({"size": 32}, num_warps=2)], key=[])
@triton.jit
def tuned(out, size: tl.constexpr):
    tl.store(out + tl.arange(0, size), 1.0)

@triton.jit
def spins(flag, out):
    while tl.load(flag, volatile=True) < 1:
        pass
    tl.store(out, tl.load(out + 1))  # may be older than the flag

@triton.jit
def swaps(flag):
    wl.atomic_cas(flag, 0, 1)

@triton.jit
def never(out):
    tl.store(out, 1.0)

world = weft.init()
row, out = world.zeros((64,), torch.float32), torch.zeros(65, device=world.device)
flag = torch.ones(1, dtype=torch.int32, device=world.device)
world.barrier()
what = sys.argv[1:] or ["pull"]
if "pull" in what:
    print("pulling")
    for _ in range(3):
        pull[(1,)](world.arg, row, out, 64, 2.0, size=64, num_warps=8)
    pull[(1,)](world.arg, row, out[1:], 1, 2.0, 32)
if "tuned" in what:
    tuned[(1,)](out)
if "spins" in what:
    spins[(1,)](flag, out)
if "swaps" in what:
    swaps[(1,)](flag)
if "races" in what:
    row.fill_(world.rank)
    pull[(1,)](world.arg, row, out, 64, 2.0, 64)
if "own operators" in what:
    weft.ops.all_reduce(row, world=world)
world.close()
'''


PROGRAM = Path(__file__).parents[2] / "examples" / "13_program.py"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "pulls.py"
    path.write_text(SCRIPT)
    return str(path)


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


def checked(capsys, *words: str) -> tuple[int, dict]:
    code = main(["check", *words[:1], "--ranks", "2", "--json", *words[1:]])
    return code, json.loads(capsys.readouterr().out)


def test_each_specialisation_that_is_launched_is_checked_once(script, capsys):
    code, values = checked(capsys, script, "--target", "cuda:90")
    assert code == 0 and values["ok"] and values["run"]["ok"]
    wide, narrow = values["kernels"]
    assert {one["kernel"] for one in values["kernels"]} == {"pull"}
    assert wide["place"] == f"{script}:{line_of('def pull')}"
    assert wide["record"]["signature"] == {
        "world": ["*i64", "constexpr", "constexpr"], "row": "*fp32", "out": "*fp32", "n": "i32",
        "scale": "fp32", "size": "constexpr",
    }  # fmt: skip
    assert wide["record"]["constants"]["size"] == 64 and wide["record"]["options"] == {
        "num_warps": 8
    }
    assert {"row", "out", "n"} <= set(wide["record"]["divisible_by_16"])
    # As a launch has it: 1 is a constant, and no address that 16 does not divide says that it does.
    assert narrow["record"]["constants"] | {"world": 0} == {"n": 1, "size": 32, "world": 0}
    assert "out" not in narrow["record"]["divisible_by_16"]


def test_what_a_kernel_is_wrapped_in_decides_its_constants(script, capsys):
    _, values = checked(capsys, script, "--target", "cuda:90", "--", "tuned")
    (only,) = values["kernels"]
    assert only["record"]["constants"] == {"size": 32}
    assert only["record"]["options"]["num_warps"] == 2


def test_a_wait_that_orders_nothing_is_found_in_a_users_kernel(script, capsys):
    assert main(["check", f"{script}:spins", "--ranks", "2", "--", "spins", "pull"]) == 1
    told = capsys.readouterr()
    assert "unordered wait" in told.out and f"{script}:{line_of('while tl.load')}" in told.out
    for target in ("cuda:90", "cuda:100", "hip:gfx942"):
        assert target in told.out
    assert "size=64" not in told.out and "pulling" in told.err


def test_a_copied_file_is_named_and_not_the_one_that_was_compiled_before(script, tmp_path, capsys):
    (tmp_path / "copied").mkdir()
    copied = tmp_path / "copied" / "pulled.py"
    copied.write_text(SCRIPT)
    for path in (script, str(copied)):
        main(["check", f"{path}:spins", "--ranks", "2", "--target", "cuda:90", "--", "spins"])
        told = capsys.readouterr().out
        assert f"at {path}:{line_of('while tl.load')}" in told
        assert "while tl.load(flag" in told


def test_a_kernel_that_one_target_has_not_is_still_checked_for_the_others(script, capsys):
    code, values = checked(capsys, script, "--target", "cuda:90,hip:gfx942", "--", "swaps")
    assert code == 1
    assert [(one["target"], one["ok"]) for one in values["kernels"]] == [
        ("cuda:90", True), ("hip:gfx942", False),
    ]  # fmt: skip
    error = values["kernels"][1]["error"]
    assert error["kind"] == "UnsupportedError"
    assert f"{Path(script).name}:{line_of('wl.atomic_cas')}" in error["message"]


def test_what_the_run_shows_fails_too(script, capsys):
    code, values = checked(capsys, script, "--target", "cuda:90", "--", "races")
    assert code == 1 and values["run"]["races"] and all(one["ok"] for one in values["kernels"])


def test_wefts_own_kernels_are_left_out(script, capsys):
    _, values = checked(capsys, script, "--target", "cuda:90", "--", "own operators", "tuned")
    assert [one["kernel"] for one in values["kernels"]] == ["tuned"]


@pytest.mark.parametrize(
    "words, told",
    [
        (["SCRIPT:never"], ("launches pull", "let the script launch never")),
        (["SCRIPT", "--", "nothing"], ("launches no kernel of its own", "launch pull or")),
        (["SCRIPT:pull", "--shape", "m=3"], ("a script has its own",)),
        (["no_such.py"], ("there is no script",)),
        (
            [str(PROGRAM)],
            (f"launches no kernel of its own; name its program, {PROGRAM}:mlp",),
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_misuse_says_what_to_do(script, capsys, words, told):
    assert main(["check", *(word.replace("SCRIPT", script) for word in words)]) == 2
    error = capsys.readouterr().err
    for word in told:
        assert word.replace("SCRIPT", script) in error


def test_a_programs_composed_kernels(capsys):
    words = ["check", f"{PROGRAM}:mlp", "--ranks", "4", "--target", "cuda:90", "--json"]
    assert main(words) == 0
    values = json.loads(capsys.readouterr().out)
    assert "mlp_multiply" in {one["kernel"] for one in values["kernels"]}
    assert any(note.startswith("mlp_push") for note in values["notes"])


def test_an_operator(capsys):
    assert main(["check", "all_reduce", "--target", "cuda:90"]) == 0
    assert "as written" in capsys.readouterr().out


def test_compiling_what_a_script_launches(script, tmp_path, capsys):
    folder = tmp_path / "build"
    words = ["compile", script, "--ranks", "2", "--target", "cuda:90", "-o", str(folder), "--json"]
    assert main(words) == 0
    values = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in values["kernels"]] == ["pull", "pull.2"]
    kernels = load(folder, "cuda:90")
    assert set(kernels) == {"pull", "pull.2"} and kernels["pull"].num_warps == 8
    assert [one.name for one in kernels["pull"].parameters()][-2:] == ["n", "scale"]
    assert (folder / "pull.2.cuda_90.cubin").stat().st_size
