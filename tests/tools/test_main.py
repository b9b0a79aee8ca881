"""The verbs from the outside: exit codes, what goes where, and the JSON that others rely on."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.main import get_command
from typer.models import OptionInfo

import weft
from weft.tools import console
from weft.tools.main import EXAMPLES, app, main

RUN_KEYS = {"op", "target", "ranks", "shape", "dtype", "ok", "rel_err", "tolerance", "seconds"}
VERIFY_KEYS = {
    "op",
    "ranks",
    "schedules",
    "complete",
    "races",
    "deadlocks",
    "ok",
    "executions",
    "bound",
}
KERNEL_KEYS = {"name", "target", "format", "bytes", "registers", "shared_bytes"}
SIDE_KEYS = {"rank", "kernel", "program", "file", "line", "tensor", "index"}

RACY = '''"""Writes a peer's memory without telling it."""
import sys
import typing
import torch, triton, triton.language as tl, weft
import weft.language as wl

@triton.jit
def shout(world, x, value):
    for peer in range(wl.num_ranks(world)):
        tl.store(wl.at(world, x, peer), value)

world = weft.init()
x = world.zeros(1, torch.int32)
print("arguments", sys.argv[1:])
if "quiet" not in sys.argv:
    shout[(1,)](world.arg, x, 7)
world.close()
'''


@pytest.fixture
def racy(tmp_path: Path) -> str:
    path = tmp_path / "racy.py"
    path.write_text(RACY)
    return str(path)


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-verb"],
        ["run"],
        ["run", "no_such_op"],
        ["run", "ag_gemm", "--ranks", "0"],
        ["run", "ag_gemm", "--ranks", "many"],
        ["run", "ag_gemm", "--shape", "m"],
        ["run", "ag_gemm", "--dtype", "fp7"],
        ["run", "ag_gemm", "--target", "abacus"],
        ["run", "ag_gemm", "--target", "cuda", "--ranks", "512"],
        ["emulate", "no_such_script.py", "--ranks", "2"],
        ["emulate", __file__, "stray", "--ranks", "2"],
        ["verify", "ag_gemm", "--schedules", "0"],
        ["compile", "ag_gemm", "--target", "cuda:7"],
        ["compile", "ag_gemm"],
        ["compile", "ag_gemm", "--target", "cuda:90", "-o", __file__],
        ["run", "ag_gemm", "--seed", "-1"],
        ["emulate", __file__, "--seed", "-1"],
    ],
    ids=" ".join,
)
def test_misuse_gives_2_and_says_so_on_stderr(words: list[str], capsys):
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.strip()


GPUS = "cuda:80, cuda:90, cuda:100, hip:gfx942, hip:gfx950"
C = "Triton has no kernels for it; weft compile writes its C"


@pytest.mark.parametrize(
    "words, target, said",
    [
        ("run ag_gemm", "abacus", "one of auto, cuda, emu, manycore\n"),
        ("generate --model MODEL --prompt x", "manycore", "one of auto, cuda, emu\n"),
        ("compile ag_gemm", "abacus", f"there are emu, {GPUS}, manycore\n"),
        ("compile ag_gemm", "cuda:90,manycore", "no kernels for it; name it alone\n"),
        ("explain ag_gemm", "abacus", f"there are emu, {GPUS}, manycore\n"),
        ("check ag_gemm", "abacus", f"there are emu, {GPUS}\n"),
        ("check ag_gemm", "manycore", C),
        ("prepare ag_gemm --shape m=8,n=8,k=8", "manycore:sw26010", C),
        ("timeline ag_gemm -o FOLDER/x.json", "manycore", C),
        ("simulate examples/llama_mlp.py:mlp --ranks 2", "manycore", C),
    ],
)
def test_an_unknown_target_is_told_which_the_verb_takes(
    words, target, said, tiny, tmp_path, capsys
):
    words = words.replace("examples", str(Path(__file__).parents[2] / "examples"))
    if "MODEL" in words:
        pytest.importorskip("transformers")
        words = words.replace("MODEL", str(tiny("llama")))
    assert main([*words.replace("FOLDER", str(tmp_path)).split(), "--target", target]) == 2
    assert said in capsys.readouterr().err


def test_help_promises_no_target_that_is_refused(capsys):
    for verb, takes in (("compile", True), ("check", False), ("prepare", False)):
        assert main([verb, "--help"]) == 0
        options = capsys.readouterr().out.partition("--target")[2].partition("--ranks")[0]
        assert ("manycore" in options) == takes, verb


@pytest.mark.parametrize(
    "words",
    [
        ["run", "ag_gemm", "--ranks", "many"],
        ["run"],
        ["no-such-verb"],
        ["run", "ag_gemm", "--no-such-option"],
        ["run", "no_such_op"],
        ["run", "ag_gemm", "--dtype", "fp7"],
    ],
    ids=" ".join,
)
def test_misuse_is_json_where_json_is_asked_for(words: list[str], capsys):
    assert main([*words, "--json"]) == 2
    told = capsys.readouterr()
    values = json.loads(told.out)
    assert values["ok"] is False and set(values["error"]) == {"kind", "message"}
    assert values["error"]["message"]
    assert told.err.startswith("weft: ")


def test_a_scripts_own_json_is_none_of_ours(capsys):
    assert main(["emulate", "no_such.py", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_version(capsys):
    assert main(["--version"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"weft {weft.__version__} (python 3.") and "triton 3." in told


@pytest.mark.slow
def test_ctrl_c_says_where_a_rank_was(tmp_path: Path):
    script = tmp_path / "endless.py"
    script.write_text(
        "import weft\nworld = weft.init()\nprint('on', flush=True)\nwhile 1:\n    pass\n"
    )
    words = [sys.executable, "-m", "weft", "emulate", str(script), "--ranks", "2"]
    run = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Tests that run in a shell's background have it ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert run.stdout is not None and run.stdout.readline() == "on\n"
    run.send_signal(signal.SIGINT)
    _, told = run.communicate(timeout=600)
    assert run.returncode == 130
    assert "interrupted: rank" in told and "endless.py:" in told


def test_help_is_no_misuse(capsys):
    assert main(["--help"]) == 0
    assert "emulate" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [one.callback for one in app.registered_commands])
def test_no_option_is_called_by_its_metavar(verb: Callable[..., None]):
    """typer 0.27.0 makes a name of a metavar that is the parameter's in capitals."""
    for name, hint in typing.get_type_hints(verb, include_extras=True).items():
        for told in getattr(hint, "__metadata__", ()):
            if isinstance(told, OptionInfo) and (told.metavar or "").lower() == name:
                # Of an annotated option, typer keeps the first of its names where a default goes.
                assert told.default == f"--{name}"


def test_help_has_examples_and_no_types_for_flags(capsys):
    assert main(["run", "--help"]) == 0
    told = capsys.readouterr().out
    assert "$ weft run ag_gemm" in told and "reduce_scatter" in told
    assert not any("--json" in line and "bool" in line for line in told.splitlines())


@pytest.mark.parametrize("verb, example", [(v, e) for v, es in EXAMPLES.items() for e in es])
def test_examples_in_the_help_are_understood(verb: str, example: str):
    weft_, said, *words = shlex.split(example)
    assert (weft_, said) == ("weft", verb)
    get_command(app).commands[verb].make_context(verb, words)


def test_an_operator_is_no_script(capsys):
    assert main(["emulate", "ag_gemm"]) == 2
    assert "weft run ag_gemm" in capsys.readouterr().err


def test_doctor(capsys):
    assert main(["doctor", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    able = {ability["name"]: ability for ability in values["abilities"]}
    assert able["emulate"]["ok"] and able["compile for cuda:90"]["ok"]
    assert "reach GPUs of other nodes" in able
    assert all(ability["ok"] or ability["remedy"] for ability in able.values())
    assert main(["doctor"]) == 0
    assert "compile for hip:gfx942" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_run_against_the_reference(dtype: str, capsys):
    words = f"run ag_gemm --ranks 3 --target emu --shape m=29,n=24,k=40 --dtype {dtype} --json"
    assert main(words.split()) == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values) == RUN_KEYS
    assert values["ok"] is True and values["rel_err"] <= values["tolerance"]
    assert values["shape"] == {"m": 29, "n": 24, "k": 40} and values["target"] == "emu"


def test_run_for_people(capsys):
    assert main("run ag_gemm --ranks 2 --target emu --shape m=9,n=8,k=16".split()) == 0
    told = capsys.readouterr().out
    assert "ok" in told and "replay 3" in told and "eager again" in told


def test_verify_an_operator(capsys):
    words = "verify ag_gemm --ranks 3 --schedules 3 --shape m=20,n=16,k=16 --json"
    assert main(words.split()) == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values) == VERIFY_KEYS
    assert values["schedules"] == 3 and values["ok"] is True and values["complete"] is False


def test_verify_a_script(racy: str, capsys):
    assert main(["verify", racy, "--ranks", "2", "--schedules", "3", "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["races"] and values["ok"] is False and values["schedules"] == 3


def test_verify_says_how_to_see_it_again(racy: str, capsys):
    assert main(["verify", racy, "--ranks", "2", "--schedules", "2"]) == 1
    told = capsys.readouterr()
    assert "race" in told.out and "--seed" in told.err


def test_emulate_reports_the_race_with_its_line(racy: str, capsys):
    assert main(["emulate", "--ranks", "2", racy, "--json"]) == 1
    told = capsys.readouterr()
    values = json.loads(told.out)
    race = values["races"][0]
    line = RACY.splitlines().index("        tl.store(wl.at(world, x, peer), value)") + 1
    assert set(race) == {"kind", "message", "first", "second", "remedy"}
    assert "wait for it" in race["remedy"] and race["message"]
    for side in ("first", "second"):
        assert set(race[side]) == SIDE_KEYS
        assert (race[side]["file"], race[side]["line"]) == (racy, line)
        assert race[side]["kernel"] == "shout"
    assert "arguments" in told.err, "with --json what the script prints goes to stderr"


def test_emulate_hands_a_script_its_own_arguments(racy: str, capsys):
    assert main(["emulate", racy, "--ranks", "2", "--", "quiet", "--ranks", "9"]) == 0
    told = capsys.readouterr().out
    assert told.count("arguments ['quiet', '--ranks', '9']") == 2


def test_a_seed_is_a_schedule(racy: str, capsys):
    for _ in range(2):
        main(["emulate", racy, "--ranks", "4", "--seed", "5", "--json"])
    first, second = capsys.readouterr().out.split("}\n{")
    assert first.lstrip("{") == second.rstrip().removesuffix("}")


def test_a_script_that_fails_gives_1(tmp_path: Path, capsys):
    path = tmp_path / "fails.py"
    path.write_text("import weft\nworld = weft.init()\nassert world.rank < 1, 'not me'\n")
    assert main(["emulate", str(path), "--ranks", "2"]) == 1
    told = capsys.readouterr()
    assert "not me" in told.out + told.err and "fails.py" in told.out + told.err
    assert main(["emulate", str(path), "--ranks", "2", "--json"]) == 1
    (other,) = json.loads(capsys.readouterr().out)["others"]
    assert other["first"]["line"] == 3 and "not me" in other["message"]


@pytest.mark.slow
def test_compile_lists_binaries_for_all_targets(tmp_path: Path, capsys):
    words = "compile ag_gemm --target cuda:90,cuda:100,hip:gfx942 --json -o".split()
    assert main([*words, str(tmp_path)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values) == {"op", "kernels", "ok"} and values["ok"] is True
    assert {k["target"] for k in values["kernels"]} == {"cuda:90", "cuda:100", "hip:gfx942"}
    for kernel in values["kernels"]:
        assert set(kernel) == KERNEL_KEYS
        assert kernel["bytes"] > 0 and kernel["registers"] > 0
    manifest = json.loads((tmp_path / "artefact.json").read_text())
    told = {(k["target"], k["name"]): k["bytes"] for k in values["kernels"]}
    for target, one in manifest["targets"].items():
        for name, kernel in one["kernels"].items():
            assert (tmp_path / kernel["file"]).stat().st_size == told.pop((target, name))
    assert not told


@pytest.mark.parametrize("verb", [one.name for one in app.registered_commands])
def test_every_verb_has_a_short_word_for_help(verb: str, capsys):
    assert main([verb, "-h"]) == 0
    assert f"weft {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["weft", "ver"], {"verify"}),
        (["weft", "verify", "ag_g"], {"ag_gemm"}),
        (["weft", "check", "examples/01"], {"examples/01_load.py"}),
        (["weft", "compile", "ag_gemm", "--target", "cuda:90,hip:gfx94"], {"cuda:90,hip:gfx942"}),
        (["weft", "emulate", "exa"], {"examples/"}),
    ],
    ids=lambda case: " ".join(sorted(case)) if isinstance(case, set) else "",
)
def test_completion_in_a_shell(words: list[str], wanted: set[str], capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("_WEFT_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(words))
    main([])
    told = capsys.readouterr().out.replace("\\", "")
    assert all(f'"{word}"' in told for word in wanted)


SLOW = """
import time, weft
world = weft.init()
time.sleep(0.7)
world.close()
"""


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(tmp_path, capsys, monkeypatch):
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    monkeypatch.setattr(console, "LIFE_S", 0.2)
    assert main(["verify", str(script), "--ranks", "1", "--schedules", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["ok"]
    lines = [line for line in said.err.splitlines() if line.startswith("weft: verify: ")]
    assert 3 <= len(lines) <= 20
    done = [f"{script}: schedules {count} of 2" for count in (0, 1)]
    assert any(done[0] in line for line in lines) and any(done[1] in line for line in lines)


IDLE = """
import weft
world = weft.init()
world.close()
"""


@pytest.mark.parametrize(
    "words, code",
    [("emulate --ranks 2", 0), ("emulate --ranks 2 --json", 0), ("verify --schedules 2", 0),
     ("verify --exhaustive --max-executions 5", 0), ("verify --mutants --ranks 2", 1)],
)  # fmt: skip
def test_a_script_that_launches_nothing_is_told_so(words, code, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("idle.py").write_text(IDLE)
    verb, *rest = words.split()
    assert main([verb, "idle.py", *rest]) == code
    assert capsys.readouterr().err.count("note: no kernel was launched\n") == 1


def test_a_script_that_launches_something_is_not_told_that_it_does_not(tmp_path, capsys):
    example = str(Path(__file__).parents[2] / "examples" / "01_load.py")
    words = [["emulate", "--ranks", "2"], ["verify", "--schedules", "2"]]
    for verb, *rest in words:
        assert main([verb, example, *rest]) == 0
        assert "no kernel was launched" not in capsys.readouterr().err


def test_a_bar_says_what_is_done_before_it_is_known_how_much_there_is():
    with console.bar("ag_gemm: mutants", before="ag_gemm: looking for mutants") as bar:
        assert bar.words == "ag_gemm: looking for mutants"
        bar.reach(1, 7)
        assert bar.words == "ag_gemm: mutants 1 of 7"


def test_what_is_quick_says_nothing(capsys):
    assert main(["lint", "--rules"]) == 0
    assert capsys.readouterr().err == ""
