"""`weft timeline` and `weft trace`: files that are written, totals, words without a meaning."""

from __future__ import annotations

import json

import pytest

from weft.tools.main import main

SMALL = ["--ranks", "2", "--shape", "m=64,n=32,k=32"]


def test_the_schedule_of_a_run_is_a_page(tmp_path, capsys):
    path = tmp_path / "schedule.html"
    words = ["timeline", "ag_gemm", "-o", str(path), *SMALL, "--transport", "ce_push"]
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["from"] == "run"
    assert values["shape"] == {"m": 64, "n": 32, "k": 32} and values["file"] == str(path)
    assert [one["rank"] for one in values["totals"]] == [0, 1] and values["end_us"] > 0
    text = path.read_text()
    assert "transport=ce_push" in text and "copy engine 0" in text and "multiply" in text
    assert "signal program ag_gemm[" in text, "signals are named"
    assert main(words) == 0
    said = capsys.readouterr()
    assert "SMs wait" in said.out and str(path) in said.err.replace("\n", "")


def test_the_schedule_of_a_plan_needs_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("weft.tools.schedule.runs.timed_call", None)
    path = tmp_path / "schedule.html"
    words = ["timeline", "gemm_rs", "-o", str(path), "--shape", "m=4096,n=4096,k=3584", "--json"]
    assert main(words) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["from"] == "plan" and len(values["totals"]) == 4
    assert 100 < values["end_us"] < 400
    text = path.read_text()
    assert "Predicted from the plan" in text and "partials_ready" in text


PROGRAM = """
import weft
from weft.compiler import Shard, Tensor, all_gather

@weft.program(mesh="tp", x=Tensor("bfloat16", ("m", 64), Shard(0)),
              w=Tensor("bfloat16", (64, 128), Shard(1)))
def project(x, w):
    return all_gather(x) @ w
"""


def test_the_schedule_of_a_users_program(tmp_path, capsys):
    script, path = tmp_path / "model.py", tmp_path / "schedule.html"
    script.write_text(PROGRAM)
    words = ["timeline", f"{script}:project", "-o", str(path), "--ranks", "2", "--shape", "m=96"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["op"] == "project"
    assert "project on 2 ranks" in path.read_text()
    assert main([*words, "--run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["from"] == "run"
    text = path.read_text()
    assert "What happened on the emulator" in text and "project_multiply" in text
    assert main([*words, "--transport", "ce_push"]) == 2
    assert "is for operators" in capsys.readouterr().err


def test_the_queues_of_a_program_as_one_kernel(tmp_path, capsys):
    script, path = tmp_path / "model.py", tmp_path / "schedule.html"
    script.write_text(PROGRAM)
    words = ["timeline", f"{script}:project", "-o", str(path), "--ranks", "2", "--shape", "m=300"]
    words += ["--num-sms", "2"]
    assert main([*words, "--persistent", "balanced", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["from"] == "plan" and [one["sms"] for one in values["totals"]] == [2, 2]
    text = path.read_text()
    assert "product[2, 0]@1" in text and "queues (balanced)" in text and "counter 0" in text
    assert main(["timeline", "gemm_rs", "-o", str(path), *SMALL, "--persistent", "dynamic"]) == 0
    assert "scattered send[0, 0] of 1@0" in path.read_text()
    capsys.readouterr()
    assert main([*words, "--persistent", "greedy"]) == 2
    assert "it is round_robin or balanced or dynamic" in capsys.readouterr().err.replace("\n", " ")
    assert main([*words, "--persistent", "balanced", "--run"]) == 2
    assert "leave out --run" in capsys.readouterr().err


def test_the_trace_of_a_run(tmp_path, capsys):
    path = tmp_path / "trace.json"
    assert main(["trace", "ag_gemm", "-o", str(path), *SMALL]) == 0
    assert capsys.readouterr().out.count("would overlap") == 2
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"kernel", "program"}
    assert main(["trace", "ag_gemm", "-o", str(path), *SMALL, "--json"]) == 0
    assert [line["rank"] for line in json.loads(capsys.readouterr().out)["timeline"]] == [0, 1]


@pytest.mark.parametrize("verb", ["timeline", "trace"])
@pytest.mark.parametrize("words, said", [
    (["--transport", "pigeon"], "pigeon"),
    (["--hw", "abacus"], "abacus"),
    (["-o", "no/such/folder/x.json"], "no folder no/such/folder"),
    (["-o", "x.png"], ".png names no format; write"),
    (["-o", "x"], "no ending names no format; write"),
    (["--ranks", "0"], "at least one"),
])  # fmt: skip
def test_misuse_is_refused_before_anything_runs(verb, words, said, capsys, monkeypatch):
    monkeypatch.setattr("weft.tools.schedule.runs.timed_call", None)
    assert main([verb, "ag_gemm", "-o", "x.json", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_page_is_no_trace(capsys):
    assert main(["trace", "ag_gemm", "-o", "x.html"]) == 2
    assert "write a trace for Perfetto (.json)" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    "words, kind",
    [
        (["--traced", "--target", "emu", "--transport", "ce_push"], "wait"),
        (["--run"], "program"),
        ([], "transfer"),
        (["--persistent", "balanced"], "work"),
    ],
    ids=["traced", "run", "plan", "tasks"],
)
def test_a_json_file_is_a_trace_for_perfetto_whatever_is_drawn(words, kind, tmp_path, capsys):
    path = tmp_path / "schedule.json"
    assert main(["timeline", "ag_gemm", "-o", str(path), *SMALL, *words]) == 0
    assert "https://ui.perfetto.dev" in capsys.readouterr().err
    trace = json.loads(path.read_text())
    assert trace["otherData"]["title"].startswith("ag_gemm on 2 ranks")
    events = trace["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in bars} == {0, 1} and kind in {event["cat"] for event in bars}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events} <= named
    assert min(event["ts"] for event in bars) == 0 < max(event["dur"] for event in bars)


def test_an_operator_without_transports(tmp_path, capsys):
    path = tmp_path / "x.html"
    words = ["timeline", "all_gather", "-o", str(path), "--ranks", "2", "--shape", "m=8,n=8"]
    assert main(words) == 0


def test_what_tiles_say_of_themselves(tmp_path, capsys):
    path = tmp_path / "tiles.html"
    words = ["timeline", "ag_gemm", "-o", str(path), *SMALL, "--traced", "--target", "emu"]
    words += ["--transport", "ce_push"]
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["from"], values["target"]) == ("trace", "emu")
    assert [one["rank"] for one in values["totals"]] == [one["rank"] for one in values["clocks"]]
    for one in values["totals"]:
        assert one["waiting_us"] > 1 > one["busy"] > 0 and one["longest_waits"][0]["waited_us"] > 1
    text = path.read_text()
    assert "its operands are not there yet" in text and "tile 0, 0: multiply" in text
    assert "in simulated time of h200x4" in text
    assert main(words) == 0
    said = capsys.readouterr()
    assert "longest wait" in " ".join(said.out.split()) and "on the emulator" in said.err
    assert main([*words, "--run"]) == 2
    assert "leave out --run" in capsys.readouterr().err
