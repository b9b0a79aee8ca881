"""`weft explain`: every part of it, for operators and users' programs, and words without sense."""

from __future__ import annotations

import json

import pytest

from weft.tools.explain import PARTS
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
        f"kept_ready[{owner}][{chunk}]" for owner in (0, 2, 3) for chunk in (0, 1)
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


@pytest.mark.parametrize("op", ["flash_decode", "ag_attention", "all_reduce_rms_norm"])
def test_what_a_call_takes_is_the_cards_first_choice(op, capsys):
    assert explained(capsys, op)["config"]["transport"]


@pytest.mark.parametrize("words", [
    ["--ranks", "1"], ["--target", "hip:gfx942"], ["--target", "emu"], ["--nodes", "2"],
    ["--nodes", "2", "--target", "emu"],
    ["--on-heap", "a", *LARGE], ["--shape", "m=0"], ["--shape", "m=3,n=40,k=24"],
    ["--dtype", "fp32"],
], ids=" ".join)  # fmt: skip
def test_other_calls(words, capsys):
    found = explained(capsys, "ag_gemm", *words)
    assert found["device"] and found["times"]["end_us"] >= 0
    if "emu" in words and "--nodes" in words:
        assert "order=hierarchical_gather" in found["device"]
        assert "whole.by_node(" in found["launch"][0]
    if "--on-heap" in words:
        assert "role=shared" in found["device"] and "ag_gemm_stage" not in found["device"]


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
    ([f"{__file__}:mlp"], "it has none"),
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


@pytest.mark.parametrize("op", ["ag_moe", "moe_rs"])
def test_a_mapping_that_the_device_alone_knows(op, capsys):
    found = explained(capsys, op, "--ranks", "4", "--shape", "m=64,n=64,k=64,experts=8,top_k=2")
    (tile,) = found["mapping"]
    assert tile["kernel"] == f"{op}_multiply" and tile["table"] == "routing"
    said = {
        "ag_moe": "after gathered_ready[lo … hi][0 … 7]",
        "moe_rs": "announced by their partials_",
    }
    assert said[op] in tile["text"] and "slots first … end - 1" in tile["text"]
    assert 1 < found["times"]["end_us"] < 1000
    assert "mapping(tables, (routing,), cuts=experts)" in found["core"][0]
    assert f"{op}_multiply" in found["launch"][0]
