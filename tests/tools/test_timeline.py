"""`weft timeline` and `weft trace`: files that are written, totals, words without a meaning."""

from __future__ import annotations

import json

import pytest

from weft.tools.main import main

SMALL = ["--ranks", "2", "--shape", "m=64,n=32,k=32"]


def test_the_schedule_of_a_plan(tmp_path, capsys):
    path = tmp_path / "schedule.json"
    words = ["timeline", "gemm_rs", "-o", str(path), "--shape", "m=4096,n=4096,k=3584"]
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["from"] == "plan" and values["file"] == str(path)
    assert values["shape"] == {"m": 4096, "n": 4096, "k": 3584}
    assert [one["rank"] for one in values["totals"]] == [0, 1, 2, 3]
    assert 100 < values["end_us"] < 400
    text = path.read_text()
    assert "Predicted from the plan" in text and "partials_ready" in text
    assert main(words) == 0
    said = capsys.readouterr()
    assert "SMs wait" in said.out and str(path) in said.err.replace("\n", "")


PROGRAM = """
import weft
from weft.compiler import Shard, Tensor, all_gather

@weft.program(mesh="tp", x=Tensor("bfloat16", ("m", 64), Shard(0)),
              w=Tensor("bfloat16", (64, 128), Shard(1)))
def project(x, w):
    return all_gather(x) @ w
"""


def test_the_schedule_of_a_users_program(tmp_path, capsys):
    script, path = tmp_path / "model.py", tmp_path / "schedule.json"
    script.write_text(PROGRAM)
    words = ["timeline", f"{script}:project", "-o", str(path), "--ranks", "2", "--shape", "m=96"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["op"] == "project"
    assert "project on 2 ranks" in path.read_text()


def test_the_schedule_of_stages(tmp_path, capsys):
    """Without messages the bubble is the formula's; interleaved, it is smaller."""
    path = tmp_path / "stages.json"
    words = ["timeline", "pipeline", "-o", str(path), "--ranks", "4", "--shape"]
    bubbles = []
    for chunks in (1, 2):
        assert main([*words, f"microbatches=8,chunks={chunks}", "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["bubble"] == pytest.approx(values["least_bubble"])
        assert values["end_us"] == pytest.approx(24000 / (1 - values["bubble"]))
        assert [one["passes_us"] for one in values["totals"]] == [24000.0] * 4
        bubbles.append(values["bubble"])
    assert bubbles == pytest.approx([3 / 11, 3 / 19])
    events = json.loads(path.read_text())["traceEvents"]
    passes = [one for one in events if one.get("cat") == "work"]
    assert len(passes) == 4 * 2 * 2 * 8 and passes[0]["name"] == "forward 0 of chunk 0"
    arrows = [one for one in events if one.get("cat") == "signal"]
    assert arrows, "messages that held a pass up"
    assert main([*words, "microbatches=8,chunks=2,bytes=16777216", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["least_bubble"] == pytest.approx(3 / 19)
    assert values["least_bubble"] < values["bubble"] < 0.25
    assert all(one["sends_us"] > 0 for one in values["totals"])
    assert main([*words, "microbatches=8,chunks=2"]) == 0
    assert "ranks wait 15.8% of the time, 15.8% where" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("shape, said", [
    ("microbatches=6,chunks=2", "pass a multiple of 4"),
    ("microbatches=0", "microbatches is 0"),
    ("forward_us=0", "forward_us is 0"),
    ("m=4", "no size is called 'm'"),
])  # fmt: skip
def test_stages_that_are_refused(shape, said, capsys):
    assert main(["timeline", "pipeline", "-o", "x.json", "--ranks", "4", "--shape", shape]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words, said", [
    (["--hw", "abacus"], "abacus"),
    (["-o", "no/such/folder/x.json"], "no folder no/such/folder"),
    (["-o", "x.png"], "name a file that ends in"),
    (["-o", "x"], "name a file that ends in"),
    (["--ranks", "0"], "at least one"),
])  # fmt: skip
def test_misuse_is_refused(words, said, capsys):
    assert main(["timeline", "ag_gemm", "-o", "x.json", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_file_is_a_trace_for_perfetto(tmp_path, capsys):
    path = tmp_path / "schedule.json"
    assert main(["timeline", "ag_gemm", "-o", str(path), *SMALL]) == 0
    assert "https://ui.perfetto.dev" in capsys.readouterr().err
    trace = json.loads(path.read_text())
    assert trace["otherData"]["title"].startswith("ag_gemm on 2 ranks")
    events = trace["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in bars} == {0, 1} and "transfer" in {
        event["cat"] for event in bars
    }
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events} <= named
    assert min(event["ts"] for event in bars) == 0 < max(event["dur"] for event in bars)


def test_a_kernel_written_by_hand_has_no_plan(capsys):
    assert main(["timeline", "all_gather", "-o", "x.json", "--shape", "m=8,n=8"]) == 2
    assert "no plan to draw" in " ".join(capsys.readouterr().err.split())


def test_tiles_say_of_themselves_on_gpus_alone(capsys, monkeypatch):
    monkeypatch.setattr("weft.tools.run.count_gpus", lambda: 0)
    words = ["trace", "ag_gemm", "-o", "x.json", *SMALL]
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "weft trace: 2 GPUs needed" in said and "use weft timeline ag_gemm" in said
    assert "--target" not in said  # it has no such option
    assert main([*words, "-o", "x.png"]) == 2
    assert "name a file that ends in" in capsys.readouterr().err
