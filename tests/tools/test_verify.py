"""`weft verify --exhaustive` and `--replay`: complete or bounded, and what failed runs again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.base.topology import Topology
from weft.emulator.observation import Recorder
from weft.tools.check import CALLS, Work
from weft.tools.main import main
from weft.tools.programs import find_op
from weft.tools.subjects import ScriptSubject, subject_of, subjects_of_op, subjects_on_hopper

# Rank 1 looks once: only where the signal comes later does it read what was never written.
IMPATIENT = """
import torch, triton
import triton.language as tl
import weft
import weft.language as wl

@triton.jit
def hand_over(world, x, ready, out, tile: tl.constexpr):
    at = tl.arange(0, tile)
    if wl.rank(world) == 0:
        wl.put(world, x + at, at.to(tl.float32), to=1)
        wl.notify(world, ready, to=1)
    else:
        came = wl.test(ready, at_least=1)
        if came == {seen}:
            tl.store(out + at, tl.load(x + at))

world = weft.init()
x = world.zeros(8, torch.float32)
ready = world.signals(1)
out = torch.zeros(8)
hand_over[(1,)](world.arg, x, ready, out, 8)
world.close()
"""


# Right in a slot's first call: with two slots, two calls show nothing.
COUNTS = """
import torch, triton
import triton.language as tl
import weft
import weft.language as wl

@triton.jit
def tell(world, slot, box, ready, out):
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    e = wl.slot_epoch(slot)
    wl.slot_wait_free(world, slot, e)
    wl.put(world, box, wl.rank(world), to=right)
    wl.notify(world, ready, to=right)
    wl.wait(ready, at_least=2 * e - 1, world=world)  # each call signals once
    tl.store(out, tl.load(box))
    wl.slot_close(world, slot, e)

world = weft.init()
for turn in range(2):
    slot = world.workspace(
        "tell", buffers={"box": ((1,), torch.int32)}, signals={"ready": (1, torch.int64)}
    )
    out = torch.zeros(1, dtype=torch.int32)
    tell[(1,)](world.arg, slot.arg, slot.box, slot.ready, out)
    assert out.item() == (world.rank - 1) % world.num_ranks
world.close()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values_of(words: str, capsys, code: int = 0) -> dict:
    assert main([*words.split(), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_smallest_world_of_an_operator(here: Path, capsys):
    values = values_of("verify all_reduce --exhaustive", capsys)
    assert values["complete"] is True and values["bound"] == "" and values["ok"] is True
    assert values["ranks"] == 2
    assert values["executions"] == values["schedules"] >= 4  # one at least for each transport
    assert not list(here.iterdir()), "nothing is saved where nothing fails"


def test_a_bound_is_not_completeness(here: Path, capsys):
    words = "verify ag_gemm --exhaustive --max-executions 2"
    values = values_of(words, capsys)
    assert values["complete"] is False and values["bound"].startswith("1 of 2 executions")
    assert values["executions"] == 2
    assert main(words.split()) == 0
    told = capsys.readouterr()
    assert "not all" in told.out and "stopped at" in told.err


def test_of_several_ways_each_says_its_share_and_none_that_was_cut_is_left_out(here: Path, capsys):
    words = "verify all_reduce --exhaustive --max-executions"
    values = values_of(f"{words} 2", capsys)
    assert values["bound"] == (
        "1 of 2 executions (one_shot); not begun (two_shot, two_shot_ll, sm_pull, relay)"
    )
    assert main(f"{words} 2".split()) == 0
    assert "stopped at 1 of 2 executions\n" in capsys.readouterr().err
    words = "verify ag_gemm --exhaustive --max-executions 5"
    assert values_of(words, capsys)["bound"] == "1 of 5 executions (sm_push, ce_push)"


def test_a_way_alone_gets_all_that_was_asked_for(here: Path, capsys):
    (here / "impatient.py").write_text(IMPATIENT.format(seen=1))
    words = "verify impatient.py --exhaustive --max-executions 1"
    bound = values_of(words, capsys)["bound"]
    assert bound.startswith("1 execution (") and " of " not in bound


def test_a_failing_execution_is_saved_and_runs_again(here: Path, capsys):
    script = here / "impatient.py"
    script.write_text(IMPATIENT.format(seen=0))
    values = values_of(f"verify {script} --exhaustive --save kept", capsys, 1)
    assert [race["kind"] for race in values["races"]] == ["race"] and values["complete"] is True
    path = Path(next(p for p in values["replays"] if p.endswith("race.json")))
    assert path.parent == Path("kept") and path.stat().st_size < 4000
    again = values_of(f"verify --replay {path}", capsys, 1)
    assert again["races"] == values["races"] and again["executions"] == 1
    assert again["complete"] is False
    assert main(["verify", "--replay", str(path)]) == 1
    assert "race" in capsys.readouterr().out

    script.write_text(IMPATIENT.format(seen=1))
    assert main(["verify", "--replay", str(path)]) == 2
    assert "recorded with another impatient.py" in capsys.readouterr().err
    assert values_of(f"verify {script} --exhaustive", capsys)["complete"] is True


def test_of_a_failing_execution_only_what_matters_is_kept(here: Path, capsys):
    script = here / "impatient.py"
    script.write_text(IMPATIENT.format(seen=0))
    values = values_of(f"verify {script} --exhaustive", capsys, 1)
    path = next(p for p in values["replays"] if p.endswith("race.json"))
    assert len(json.loads(Path(path).read_text())["turns"]) <= 1


@pytest.mark.parametrize(
    "words, told",
    [
        ("verify", "name an operator"),
        ("verify all_reduce --replay x.json", "give one, a replay knows its subject"),
        ("verify all_reduce --exhaustive --schedules 3", "one at a time"),
        ("verify all_reduce --exhaustive --max-executions 0", "at least one"),
        ("verify all_reduce --exhaustive --max-seconds 0", "more than no time"),
        ("verify all_reduce --calls twice", "none of once"),
        ("verify script.py --shape m=3", "--shape m=3: script.py is a script"),
        ("verify script.py --calls again", "--calls again: script.py is a script"),
        ("verify script.py --dtype bf16", "--dtype bf16: script.py is a script"),
        ("verify script.py --arch 80", "arch=80: the emulator runs what weft runs on 90"),
        ("verify all_reduce --arch 90", "all_reduce of float32 has no kernels of its own there"),
        ("verify --replay none.json", "cannot read the replay"),
        ("verify --replay broken.json", "is no replay"),
        ("verify --replay other.json", "is no replay of format"),
    ],
)
def test_misuse(here: Path, capsys, words: str, told: str):
    (here / "broken.json").write_text("{")
    (here / "script.py").write_text("import weft\n")
    (here / "other.json").write_text('{"format": 99}')
    assert main(words.split()) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_every_way_of_calling_is_sampled(here: Path, capsys):
    words = "verify reduce_scatter --ranks 2 --schedules 20 --shape m=6,n=8 --json"
    assert main(words.split()) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["executions"] == 20 and values["bound"] == "drawn from seeds"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "shape", "ways"),
    [
        ("ag_gemm", {"m": 140, "n": 80, "k": 72}, ["ce_push", "sm_push"]),
        (
            "gemm_rs",
            {"m": 140, "n": 128, "k": 72},
            ["sm_push", "ce_push", "ce_parts", "sm_push by TMA"],
        ),
        pytest.param(
            "gemm_ar",
            {"m": 140, "n": 80, "k": 72},
            ["sm_push", "sm_push by TMA"],
            marks=pytest.mark.slow,
        ),  # its tiles leave as those of gemm_rs
        ("ag_moe", {"m": 20, "n": 72, "k": 64}, ["sm_push", "ce_push"]),
        ("ag_rms_gemm", {"m": 140, "n": 72, "k": 64}, ["overlapped"]),
        ("moe_rs", {"m": 20, "n": 72, "k": 64}, ["sm_push"]),
    ],
)
def test_of_sixteen_bits_hoppers_kernels_are_verified_too(op, shape, ways):
    card = find_op(op)
    work = Work(card, 2, {**card.default_shape, **shape}, "bfloat16", (2,))
    subjects = subjects_on_hopper(work, num_sms=3)
    assert [one.variant for one in subjects] == [f"{way} on Hopper" for way in ways]
    for there in subjects:
        recorder = Recorder()
        assert subject_of(there.to_json()).run(seed=1, observers=[recorder]).report.ok
        assert f"kernel {op}_multiply_sm90" in {event.party.what for event in recorder.events}


@pytest.mark.slow
def test_hoppers_kernels_in_full(here: Path, capsys):
    """Two ranks, two tiles of each, stages that are used again."""
    values = values_of("verify ag_gemm --exhaustive --dtype bf16 --arch 90", capsys)
    assert values["complete"] is True and values["ok"] is True
    assert values["executions"] < 20 and values["abandoned"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "num_sms"),
    [
        # With more SMs programs of several launches run at once, in thousands of executions; with
        # one whoever waits must not keep out what it waits for.
        ("gemm_rs", 1),
        ("gemm_ar", 132),
        ("ag_moe", 132),
        ("ag_rms_gemm", 132),
    ],
)
def test_all_of_hoppers_kernels_in_full(here: Path, capsys, op: str, num_sms: int):
    words = f"verify {op} --exhaustive --dtype bf16 --arch 90 --num-sms {num_sms}"
    values = values_of(f"{words} --max-seconds 3600", capsys)
    assert values["complete"] is True and values["ok"] is True


# Operators whose programs let each other in on one SM; the others take two, which they say.
ON_ONE_SM = ("ag_attention", "ag_gemm", "ag_moe", "ag_rms_gemm", "ag_wgrad", "all_reduce_rms_norm",
             "flash_decode", "gemm_ar", "gemm_rs", "moe_ar", "moe_rs")  # fmt: skip
ON_TWO_SMS = ("all_gather", "all_reduce", "all_to_all", "ep_combine", "ep_dispatch", "moe_route",
              "recv", "reduce_scatter", "send")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "num_sms"), [*((op, 1) for op in ON_ONE_SM), *((op, 2) for op in ON_TWO_SMS)]
)
def test_whoever_waits_keeps_nobody_out(here: Path, capsys, op: str, num_sms: int):
    """On the smallest machine, each configuration in every way of calling."""
    card = find_op(op)
    work = Work(card, 2, card.default_shape, "float32", (2,))
    count = len(subjects_of_op(work, CALLS, num_sms))
    words = f"verify {op} --ranks 2 --num-sms {num_sms} --schedules {count}"
    assert values_of(words, capsys)["ok"] is True


@pytest.mark.parametrize("arch", [0, 90])
def test_what_cannot_be_recorded_is_called_in_all_other_ways(arch: int):
    card = find_op("gemm_rs")
    work = Work(card, 2, {**card.default_shape, "k": 256}, "bfloat16", (2,))
    subjects = subjects_on_hopper(work, CALLS) if arch else subjects_of_op(work, CALLS)
    ways = {(one.config.transport, one.calls) for one in subjects}
    assert {("ce_push", how) for how in CALLS if how != "recorded"} <= ways
    assert ("ce_push", "recorded") not in ways and ("sm_push", "recorded") in ways


# On a machine of Hopper's it runs Gluon.
MULTIPLIES = """
import torch
import weft
from weft.ops import ag_gemm

world = weft.init()
a, b = torch.ones(128, 64).bfloat16(), torch.ones(64, 64).bfloat16()
assert ag_gemm(a, b, world=world).shape == (256, 64)
world.close()
"""


def test_a_script_on_a_machine_of_hoppers(here: Path, capsys):
    script = here / "multiplies.py"
    script.write_text(MULTIPLIES)
    for arch in (0, 90):
        subject = ScriptSubject(str(script), [], Topology.of(2), num_sms=3, arch=arch)
        recorder = Recorder()
        assert subject_of(subject.to_json()).run(seed=1, observers=[recorder]).report.ok
        ran = {event.party.what for event in recorder.events}
        assert ("kernel ag_gemm_multiply_sm90" in ran) == bool(arch)
    words = "verify multiplies.py --ranks 2 --arch 90 --schedules 1 --num-sms 3"
    assert values_of(words, capsys)["ok"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", ["ag_gemm", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
)
def test_every_operator_in_full(here: Path, capsys, op: str):
    values = values_of(f"verify {op} --exhaustive --max-seconds 3600", capsys)
    assert values["complete"] is True and values["ok"] is True


@pytest.mark.slow
def test_three_ranks_in_full(here: Path, capsys):
    values = values_of("verify all_reduce --ranks 3 --exhaustive --max-seconds 3600", capsys)
    assert values["complete"] is True and values["ok"] is True and values["ranks"] == 3


# Their kernels are gone through one by one, with their operators.
LARGE = ("15_training", "16_megakernel", "17_experts", "18_train_model", "19_pipeline")
EXAMPLES = [path for path in sorted(Path(__file__).parents[2].joinpath("examples").glob("[01]*.py"))
            if path.stem not in LARGE]  # fmt: skip

# What makes an example small, where it is not: its own arguments.
SMALL = {"11_workers": ["2 1 2", "1 2 2"], "13_program": ["4 1"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, args",
    [(path, args) for path in EXAMPLES for args in SMALL.get(path.stem, [""])],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_every_example_in_full(here: Path, capsys, path: Path, args: str):
    words = f"verify {path} --ranks 2 --nodes {2 if 'two_nodes' in path.stem else 1} --exhaustive"
    assert main([*words.split(), "--max-seconds", "3600", "--json", "--", *args.split()]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["complete"] is True and values["ok"] is True


def test_calls_as_few_as_slots_are_tried_on_one_slot_as_well(here: Path, capsys, monkeypatch):
    script = here / "counts.py"
    script.write_text(COUNTS)
    values = values_of(f"verify {script} --ranks 2 --schedules 2", capsys, code=1)
    assert values["bound"] == "drawn from seeds, every other one on one slot (WEFT_SLOTS=1)"
    (stuck,) = values["deadlocks"]
    assert stuck["kind"] == "unsatisfiable wait"
    assert stuck["first"]["line"] == 1 + COUNTS[: COUNTS.index("    wl.wait(")].count("\n")
    assert main(["verify", str(script), "--ranks", "2", "--schedules", "1"]) == 0
    assert main(["verify", str(script), "--ranks", "2", "--seed", "1", "--schedules", "1"]) == 1
    assert "see it again with --seed 1 --schedules 1" in capsys.readouterr().err
    monkeypatch.setenv("WEFT_SLOTS", "3")
    assert values_of(f"verify {script} --schedules 2", capsys, code=1)["deadlocks"]
    monkeypatch.setenv("WEFT_SLOTS", "1")
    assert (
        values_of(f"verify {script} --schedules 1", capsys, code=1)["bound"] == "drawn from seeds"
    )


def test_on_one_slot_to_the_end_and_again_from_its_file(here: Path, capsys):
    (here / "counts.py").write_text(COUNTS)
    values = values_of("verify counts.py --ranks 2 --exhaustive --max-executions 8", capsys, code=1)
    (path,) = values["replays"]
    assert "one_slot" in path and values["deadlocks"]
    assert values_of(f"verify --replay {path}", capsys, code=1)["deadlocks"]


def test_what_has_no_slots_is_not_explored_twice(here: Path, capsys):
    script = here / "patient.py"
    script.write_text(IMPATIENT.replace("{seen}", "1"))
    words = ["verify", str(script), "--ranks", "2", "--exhaustive"]
    assert main(words) == 0
    assert "one slot" not in capsys.readouterr().err
