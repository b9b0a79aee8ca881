"""`weft explain`: every part of it, for operators and users' programs, and words without sense."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import weft
import weft.ops
from weft.base.hardware import H200X4
from weft.base.target import TARGETS
from weft.compiler.buckets import key_of
from weft.ir import device
from weft.plan.runner import PlanRunner
from weft.runtime.choices import EMULATED, HARDWARE, MACHINE, file_name
from weft.tools import options
from weft.tools.explain import PARTS, subject_of
from weft.tools.main import main

LARGE = ["--shape", "m=8192,n=7168,k=4096"]

PROGRAM = """
import weft
from weft.compiler import Shard, Tensor, all_gather, reduce_scatter, silu_mul

@weft.program(mesh="tp", x=Tensor("bfloat16", ("m", 1024), Shard(0)),
              w1=Tensor("bfloat16", (1024, 4096), Shard(1)),
              w2=Tensor("bfloat16", (2048, 1024), Shard(0)))
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)

@weft.program(mesh="tp", x=Tensor("bfloat16", ("m", 1024), Shard(0)))
def gather(x):
    return all_gather(x)
"""

FEW = """
import weft
from weft.compiler import Partial, Tensor, all_reduce, silu

@weft.program(mesh="tp", x=Tensor("bfloat16", ("m", 1024), Partial()))
def few(x):
    return silu(all_reduce(x))
"""


def explained(capsys, *words: str) -> dict:
    assert main(["explain", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_an_operator_at_all_levels(op, capsys):
    found = explained(capsys, op, *LARGE)
    assert set(PARTS) <= set(found) and found["target"] == "cuda:90"
    ways = found["choices"]["alternatives"]
    assert [way["us"] for way in ways] == sorted(way["us"] for way in ways)
    assert {"library"} < {way["engine"] for way in ways}
    engine = next(one for one in found["choices"]["choices"] if one["what"] == "engine")
    assert engine["taken"] in {way["engine"] for way in ways} and "us" in engine["why"]
    assert list(found["task"])[0] == "place" and "matmul(" in found["task"]["place"]
    assert found["device"].startswith(f"program({op}") and "launch(" in found["device"]
    assert "choice(" not in found["device"], "choices are told once"
    assert 100 < found["times"]["end_us"] < 2000
    assert any(
        one["engine"] == "programs" and one["busy_us"] > 100 for one in found["times"]["engines"]
    )
    (core,), (launch,) = found["core"], found["launch"]
    assert "template(gemm" in core
    assert launch.startswith(f"{op}_multiply") and "composed.product(hooks, " in launch
    assert "on Hopper composed.product_sm90" in launch


def test_the_mapping_names_rows_ranks_and_words(capsys):
    """A line for each owner of rows, in the kernel's order."""
    own, *others = explained(capsys, "ag_gemm", *LARGE)["mapping"]
    assert own["rank"] == own["owner"] == 1 and own["awaits"] == []
    assert [one["owner"] for one in others] == [2, 3, 0]
    assert others[0]["awaits"] == ["gathered_ready[2][0]"]
    assert others[0]["text"].startswith("rows 4096 … 6143 of rank 2: after")
    carried = explained(capsys, "gemm_rs", *LARGE)["mapping"]
    words = [word for one in carried for word in one.get("announces", [])]
    assert set(words) == {
        f"staged_ready[{owner}][{chunk}]" for owner in (0, 2, 3) for chunk in (0, 1)
    }
    assert carried[-1]["awaits"][:3] == [f"partials_ready[{peer}][0]" for peer in (2, 3, 0)]
    *others, own = explained(capsys, "gemm_ar", *LARGE)["mapping"]
    assert [one["owner"] for one in others] == [2, 3, 0]
    assert all(one["announces"] == ["partials_ready[1][i, j]"] for one in others)
    assert own["awaits"] == [f"partials_ready[{peer}][i, j]" for peer in (2, 3, 0)]


def test_tiles_that_straddle_ranks_wait_for_both(capsys):
    shape = ["--shape", "m=100,n=64,k=64", "--ranks", "2", "--show", "mapping"]
    assert main(["explain", "ag_gemm", *shape]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "a tile across two ranks' rows waits for both" in said and "rows 0 … 49 of rank 0" in said
    )
    assert main(["explain", "ag_gemm", *LARGE, "--show", "mapping"]) == 0
    assert "waits for both" not in capsys.readouterr().out


def test_rows_by_packets(tmp_path, capsys):
    path = tmp_path / "few.py"
    path.write_text(FEW)
    few, some, many = (
        explained(capsys, f"{path}:few", "--shape", f"m={m}") for m in (8, 128, 8192)
    )
    (choice,) = [one for one in few["choices"]["choices"] if one["what"] == "engine"]
    assert choice["taken"] == "one_shot_ll" and "sm_push" in choice["why"]
    assert all("packets to partials of all ranks" in tile["text"] for tile in few["mapping"])
    ways = [tile["text"].split(": ")[1][:8] for tile in some["mapping"]]
    assert ways == ["packets "] * 3 + ["its own,"]
    assert "advance(end, slot)" in few["core"][0] and "finish(end, slot)" in many["core"][0]
    assert few["times"]["end_us"] < many["times"]["end_us"]


def test_for_people(capsys):
    assert main(["explain", "ag_gemm", *LARGE, "--show", "choices,times"]) == 0
    told = capsys.readouterr().out
    assert "Predicted time, engine by engine" in told and "What is launched" not in told
    assert "  *" in told and "is behind computation" in told


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
def test_a_collective_says_which_transport_and_why(op, capsys):
    found = explained(capsys, op, "--shape", "m=16,n=64")
    assert found["config"]["transport"].startswith(("ll", "one_shot_ll"))
    assert "was fastest on 4 H200s for up to" in found["reason"]
    assert main(["explain", op]) == 0 and "written by hand" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["ep_dispatch", "ep_combine"])
def test_rows_between_nodes_are_relayed_where_that_is_predicted_to_end_first(op, capsys):
    shape = "m=32768,n=7168,experts=256,top_k=8"
    found = explained(capsys, op, "--nodes", "4+4", "--shape", shape)
    assert found["config"]["transport"] == "relay" and found["choice"]["from"] == "predicted"
    assert "if all experts are chosen alike often: relay" in found["reason"]
    assert "reason" not in explained(capsys, op)


@pytest.mark.parametrize("m", [2048, 8192])
@pytest.mark.parametrize("nodes", ["2+2", "4+4"])
def test_relayed_sums_are_mapped_to_partners_and_drawn_as_they_were_predicted(nodes, m, capsys):
    found = explained(capsys, "gemm_rs", "--nodes", nodes, "--shape", f"m={m},n=4096,k=4096")
    assert found["config"]["transport"] == "relay"
    assert found["times"]["end_us"] == pytest.approx(found["choice"]["us"]["eager"], rel=0.05)
    here = range(int(nodes[0]))
    *others, own = found["mapping"]
    for tiles in others:
        owner, (word,) = tiles["owner"], tiles["announces"]
        partner = owner % len(here)
        is_relayed = f"stored in relayed of rank {partner}, which sends on" in tiles["text"]
        assert is_relayed == (owner not in here)
        assert word.startswith("relayed_ready" if is_relayed else "partials_ready")
    sources = [word.split("[")[1] for word in own["awaits"]]
    assert sources == [f"{peer}]" for peer in (*(one for one in here if one != 1), len(here) + 1)]


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar", "ag_moe", "ag_rms_gemm"])
def test_sizes_left_out_are_those_of_a_model_whose_plan_is_fused(op, capsys):
    found = explained(capsys, op)
    assert found["core"] and found["shape"]["m"] >= 8192
    assert explained(capsys, op, "--shape", "m=4096")["shape"] == found["shape"] | {"m": 4096}


@pytest.mark.parametrize("op", ["flash_decode", "ag_attention", "all_reduce_rms_norm"])
def test_what_a_call_takes_is_the_cards_first_choice(op, capsys):
    assert explained(capsys, op)["config"]["transport"]


@pytest.mark.parametrize("words", [
    ["--ranks", "1"], ["--target", "hip:gfx942"], ["--target", "emu"], ["--nodes", "2"],
    ["--nodes", "2", "--target", "emu"],
    ["--shape", "m=0"], ["--shape", "m=3,n=40,k=24"],
    ["--dtype", "fp32"],
], ids=" ".join)  # fmt: skip
def test_other_calls(words, capsys):
    found = explained(capsys, "ag_gemm", *words)
    assert ("device" in found) == (words[-1] != "m=0")  # without rows nothing is launched
    assert found["mode"] == "eager" and found["config"]["transport"]


def test_a_users_program(tmp_path, capsys):
    script = tmp_path / "model.py"
    script.write_text(PROGRAM)
    found = explained(capsys, f"{script}:mlp", "--ranks", "2", "--shape", "m=2048")
    assert found["program"] == "mlp" and found["shape"] == {"m": 2048}
    assert len(found["core"]) >= 1 and "silu_mul" in found["task"]["place"]
    assert explained(capsys, f"{script}:gather")["times"]["end_us"] > 0


@pytest.mark.parametrize("words, said", [
    (["ag_gem"], "did you mean ag_gemm"),
    (["ag_gemm", "--hw", "abacus"], "abacus"),
    (["ag_gemm", "--show", "choices,novel"], "'novel' is none of choices"),
    (["ag_gemm", "--target", "cuda:7"], "cuda:7"),
    (["no_such.py:mlp"], "no file no_such.py"),
    ([f"{__file__}:mlp"], "test_explain.py has no program 'mlp', as FILE.py:NAME; it has none"),
])  # fmt: skip
def test_misuse(words, said, capsys):
    assert main(["explain", *words]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_file_that_runs_when_it_is_imported(tmp_path, capsys):
    script = tmp_path / "runs.py"
    script.write_text("import os\nos.no_such_thing()\n")
    assert main(["explain", f"{script}:mlp"]) == 2
    told = capsys.readouterr().err
    assert "runs.py:2: " in told and "AttributeError" in told and "__main__" in told


def test_a_mistake_in_a_program_is_no_matter_of_importing_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # named as a user names it: by a relative path
    Path("wrong.py").write_text(PROGRAM.replace("bfloat16", "bfloat61"))
    line = next(n for n, text in enumerate(PROGRAM.splitlines(), 1) if "bfloat16" in text)
    assert main(["explain", "wrong.py:mlp"]) == 2
    told = capsys.readouterr().err
    assert f"wrong.py:{line}: " in told and "'bfloat61'" in told and "__main__" not in told


def test_times_of_a_machine_that_was_not_measured_say_whose_they_are(capsys):
    times = ["explain", "ag_gemm", "--show", "times", "--target"]
    assert main([*times, "hip:gfx942"]) == 0
    assert "no machine of hip:gfx942 was measured" in capsys.readouterr().out
    assert main([*times, "cuda:90"]) == 0
    assert "was measured" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_operator_is_found_without_the_others():
    asked = "import sys; from weft.tools.programs import find_op; find_op('ag_gemm')"
    never = (
        "assert 'torch._dynamo' not in sys.modules and 'weft.ops.ep_dispatch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", f"{asked}; {never}"], check=True)


@pytest.mark.parametrize("op", ["ag_moe", "moe_rs"])
def test_a_mapping_that_the_device_alone_knows(op, capsys):
    found = explained(capsys, op, "--ranks", "4", "--shape", "m=64,n=64,k=64,experts=8,top_k=2")
    tile, *_ = found["mapping"]
    assert tile["kernel"] == f"{op}_multiply" and tile["table"] == "routing"
    said = {"ag_moe": "after gathered_ready[lo … hi][0 … 7]", "moe_rs": "there from the start"}
    assert said[op] in tile["text"] and "slots first … end - 1" in tile["text"]
    assert 1 < found["times"]["end_us"] < 1000
    assert "mapping(tables, (routing,), cuts=experts)" in found["core"][0]
    assert f"{op}_multiply" in found["launch"][0]


CALLED = [
    ("ag_gemm", {"n": 32, "k": 32}, (1, 7, 64, 200)),
    ("gemm_rs", {"n": 32, "k": 32}, (2, 64, 130, 256)),
    ("gemm_ar", {"n": 32, "k": 32}, (1, 16, 64)),
    ("ag_rms_gemm", {"n": 32, "k": 32}, (9, 64)),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("name, shape, rows", CALLED)
def test_the_plan_is_the_one_that_the_call_runs(
    ranks, monkeypatch, name: str, shape: dict, rows: tuple
):
    """Made by an emulated call, without a configuration, on two ranks."""
    card, made = weft.ops.card(name), {}
    make = PlanRunner.__init__

    def noted(self, world, stages, *rest):
        if world.rank == 0:  # the first is that of eager calls
            made.setdefault(dict(rest[1])["m"], stages.plan)
        make(self, world, stages, *rest)

    def main():
        world = weft.init()
        for m in rows:
            problem = card.make_problem(2, {"m": m, **shape}, "float32")
            card.run(world, problem, card.make_inputs(problem, world.rank))
        world.close()

    monkeypatch.setattr(PlanRunner, "__init__", noted)
    ranks(main, 2)
    monkeypatch.undo()
    for m in rows:
        plan = made.get(m)
        sizes = ",".join(f"{key}={value}" for key, value in {"m": m, **shape}.items())
        subject = subject_of(options.work_of(name, 2, "1", sizes, "fp32"), "emu", "h200x4")
        assert subject is not None
        if plan is None:
            assert subject.called is None, m
        else:
            assert subject.called is not None, m
            assert device.show(subject.plan, places=False) == device.show(plan, places=False)


def test_a_recorded_call_may_run_another_plan(capsys):
    words = ["explain", "gemm_rs", "--shape", "m=4096,n=4096,k=3584", "--show", "device", "--json"]
    found = {}
    for mode in ("eager", "recorded"):
        assert main([*words, "--mode", mode]) == 0
        found[mode] = json.loads(capsys.readouterr().out)
    assert found["eager"]["config"]["transport"] == "ce_push"
    assert found["recorded"]["config"]["transport"] == "ce_parts"
    assert "awaits=staged_ready" in found["eager"]["device"]
    assert "piece=(" in found["recorded"]["device"]
    assert main([*words, "--mode", "often"]) == 2


def test_it_says_where_a_choice_comes_from(tmp_path, monkeypatch, capsys):
    """Rules, a prediction, or a file; and how far eager and recorded calls are apart."""
    words = ("gemm_rs", "--ranks", "2", "--shape", "m=32,n=16,k=32", "--target", "emu")
    found = explained(capsys, *words, "--show", "choices")
    assert found["choice"]["from"] == "rules" and "file" not in found["choice"]
    on_hopper = explained(capsys, "gemm_rs", *LARGE, "--show", "choices")["choice"]
    assert on_hopper["from"] == "predicted" and on_hopper["us"]["eager"] > 0
    eager, recorded = on_hopper["us"].values()
    apart = abs(eager - recorded) / min(eager, recorded)
    assert (f"{apart:.0%} apart" in on_hopper["text"]) == (apart > 0.02)

    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    op = weft.ops.card("gemm_rs")
    problem = op.make_problem(2, {"m": 32, "n": 16, "k": 32}, "bfloat16")
    config = {**vars(next(iter(op.candidates(problem, TARGETS["emu"])))), "last": 7}
    record = {"key": key_of(problem), "eager": {"config": config, "us": 100.0},
              "recorded": {"config": config, "us": 112.0}}  # fmt: skip
    path = tmp_path / file_name("gemm_rs", EMULATED, 2)
    path.write_text(json.dumps({"op": "gemm_rs", "choices": [record]}))
    found = explained(capsys, *words, "--show", "choices")
    assert found["config"]["last"] == 7 and found["choice"]["file"] == str(path)
    assert "12% apart" in found["choice"]["text"]


def test_predictions_are_for_the_machine_that_was_probed(tmp_path, monkeypatch, capsys):
    known = explained(capsys, "gemm_rs", *LARGE, "--show", "choices")["choice"]
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    monkeypatch.setattr("weft.runtime.choices.machine_of", lambda target: "NVIDIA H100")
    slower = vars(replace(H200X4, name="NVIDIA H100x4", push_gbps=H200X4.push_gbps / 4,
                          program_tflops=H200X4.program_tflops / 2,
                          library_tflops=H200X4.library_tflops / 2))  # fmt: skip
    document = {"op": MACHINE, "choices": [{"key": HARDWARE, "fields": slower}]}
    (tmp_path / file_name(MACHINE, "NVIDIA H100", 4)).write_text(json.dumps(document))
    found = explained(capsys, "gemm_rs", *LARGE, "--show", "choices")["choice"]
    assert found["us"]["eager"] > 1.5 * known["us"]["eager"]
    assert "by what weft machine has read here" in found["text"]


def test_an_unfused_choice_is_said_to_call_libraries(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    shape = {"m": 2, "n": 20, "k": 16, "heads": 2, "kv_heads": 1, "variable": 1}
    op = weft.ops.card("flash_decode")
    one = {"config": vars(op.unfused[0]), "us": 9.0}
    key = key_of(op.make_problem(2, shape, "bfloat16"))
    record = {"key": key, "eager": one, "recorded": one}
    path = tmp_path / file_name("flash_decode", EMULATED, 2)
    path.write_text(json.dumps({"op": "flash_decode", "choices": [record]}))
    words = ",".join(f"{name}={size}" for name, size in shape.items())
    call = ["flash_decode", "--ranks", "2", "--shape", words, "--target", "emu"]
    assert main(["explain", *call]) == 0
    assert "calls libraries: nothing is fused" in capsys.readouterr().out
