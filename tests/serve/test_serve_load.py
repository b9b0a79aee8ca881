"""benchmarks/serve_load.py against a server without a model: what it counts, and what it finds."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path

import pytest
from engines import LETTERS, PageRunner, listening, running

from weft.serve.api import Served
from weft.serve.scheduler import Scheduler

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGES, PAGE = 64, 8


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("serve_load")


def told(script, capsys, scheduler, words: str, on_step=lambda number: None) -> tuple[int, dict]:
    served = Served("letters", LETTERS, frozenset(), 400)
    with running(scheduler, PageRunner(PAGES, PAGE, on_step)) as engine:
        with listening(engine, served) as url:
            code = script.main(f"--url {url} --prompt 4..20 --warm 0 {words}".split())
    return code, json.loads(capsys.readouterr().out)


def test_a_trace_and_what_it_counts(script, capsys):
    scheduler = Scheduler(PAGES, PAGE, 8, 32)
    words = "--count 20 --rate 200 --tokens 20..40 --leave 0.3 --again"
    code, found = told(script, capsys, scheduler, words, lambda number: time.sleep(0.001))
    assert code == 0 and found["model"] == "letters"
    assert found["ended"] + found["left"] == 20 and found["left"] > 0
    assert found["wrong"] == found["differing"] == [] and found["left_over"] == {}
    assert 20 * found["ended"] <= found["generated_tokens"] <= 40 * found["ended"]
    assert found["first_token_ms"]["p50"] > 0 and found["between_tokens_ms"]["p99"] >= 1
    assert found["tokens_per_s"] == pytest.approx(
        found["generated_tokens"] / found["seconds"], rel=0.01
    )


def test_an_engine_that_fails_is_noticed(script, capsys):
    def on_step(number: int) -> None:
        if number == 30:
            raise RuntimeError("rank 1 waits for rank 0")

    code, found = told(
        script, capsys, Scheduler(PAGES, PAGE, 8, 32), "--count 8 --rate 500 --tokens 30", on_step
    )
    assert code == 1
    assert any("rank 1 waits for rank 0" in one["why"] for one in found["wrong"])


def test_what_stays_behind_is_noticed(script, capsys, monkeypatch):
    scheduler = Scheduler(PAGES, PAGE, 8, 32)
    monkeypatch.setattr(script, "SETTLE_S", 0.5)
    monkeypatch.setattr(scheduler, "_free_pages", lambda one: None)
    code, found = told(script, capsys, scheduler, "--count 2 --rate 500 --tokens 4")
    assert code == 1 and found["left_over"]["weft_pages_used"] > 0


def test_texts_that_depend_on_others_are_noticed(script, capsys):
    class Leaky(PageRunner):
        def _token(self, part):
            return (super()._token(part) + self.parts) % 97

        def run(self, step):
            self.parts = len(step.parts)
            return super().run(step)

    served, scheduler = Served("letters", LETTERS, frozenset(), 400), Scheduler(PAGES, PAGE, 8, 32)
    with running(scheduler, Leaky(PAGES, PAGE, lambda number: time.sleep(0.001))) as engine:
        with listening(engine, served) as url:
            words = f"--url {url} --count 6 --rate 500 --prompt 4..20 --tokens 20 --warm 0 --again"
            code = script.main(words.split())
    assert code == 1 and json.loads(capsys.readouterr().out)["differing"]
