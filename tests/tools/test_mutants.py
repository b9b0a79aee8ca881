"""`weft verify SCRIPT --mutants`: what it prints, what it exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ir_reader import read

from weft.base.report import Report
from weft.base.target import TARGETS
from weft.compiler.lower import source
from weft.ir import core
from weft.ops import card
from weft.tools import mutants
from weft.tools.check import Work
from weft.tools.main import main
from weft.verify.mutants import Bounds, Mutant, MutantReport, Run, Site, Verdict
from weft.verify.mutants.records import KINDS, Line
from weft.verify.mutants.results import MISSED

SCRIPT = '''"""Everybody tells the next rank a number."""
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl


@triton.jit
def tell(world, box, ready, also_ready, out):
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    wl.put(world, box, wl.rank(world), to=right)
    wl.notify(world, ready, to=right)
{more}
    wl.wait(ready, at_least=1, world=world)
    tl.store(out, tl.load(box))


world = weft.init()
box, out = world.empty((1,), torch.int32), torch.zeros(1, dtype=torch.int32)
ready, also_ready = world.signals(1), world.signals(1)
tell[(1,)](world.arg, box, ready, also_ready, out)
assert out.item() == (world.rank - 1) % world.num_ranks
assert ready.item() == 1
'''
AGAIN = """
    wl.notify(world, also_ready, to=right)
    wl.wait(also_ready, at_least=1, world=world)
"""
NOTED = """
    # weft: equivalent-mutant drop, relax, value+1, swap of notify: nobody needs it
    wl.notify(world, also_ready, to=right)
    # weft: equivalent-mutant drop, relax, value-1, count of wait: nobody needs it
    wl.wait(also_ready, at_least=1, world=world)
"""


def verified(tmp_path, capsys, more: str) -> tuple[int, dict]:
    script = tmp_path / "tell.py"
    script.write_text(SCRIPT.replace("{more}", more))
    code = main(["verify", str(script), "--ranks", "2", "--mutants", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_all_are_caught(tmp_path, capsys):
    code, values = verified(tmp_path, capsys, "")
    assert code == 0 and values["ok"] and not values["missed"], values
    assert values["mutants"] == values["caught"] > 10 and values["ranks"] == 2


@pytest.mark.slow
def test_a_signal_too_many_is_named_with_its_line(tmp_path, capsys):
    code, values = verified(tmp_path, capsys, AGAIN)
    assert code == 1 and not values["ok"]
    lines = SCRIPT.replace("{more}", AGAIN).splitlines()
    line = next(i + 1 for i, text in enumerate(lines) if "wl.wait(also_ready" in text)
    missed = next(
        one for one in values["missed"] if f"drop of wait in tell at tell.py:{line}" in one
    )
    look = values["next"][missed]
    assert look.startswith("does anybody need it? If not, leave it out.")
    assert f"above tell.py:{line} why it changes nothing: # weft: equivalent-mutant drop of" in look
    assert set(values["next"]) == set(values["missed"])


def test_what_to_look_at_is_said_below_each_mutant_that_was_missed():
    kinds = list(KINDS)
    lines = (Line(str(Path(mutants.__file__)), 7), Line("/home/me/mine.py", 12))
    missed = [Mutant(Site("k", "wait", lines), kind) for kind in kinds]
    of_ir = Mutant(Site("k", "credit begin", lines), "drop")
    verdicts = [Verdict(one, MISSED) for one in (*missed, of_ir)]
    said = str(MutantReport("it", 2, verdicts)).splitlines()
    for at, mutant in enumerate(missed):
        first, second = said[1 + 2 * at : 3 + 2 * at]
        assert first == f"  missed: {mutant}" and second.startswith("    next: ")
        note = f"# weft: equivalent-mutant {mutant.kind} of wait: the reason"
        assert second.endswith(f"; or say above mine.py:12 why it changes nothing: {note}")
    assert said[-2] == f"  missed: {of_ir}" and "equivalent-mutant" not in said[-1]


@pytest.mark.slow
def test_an_argument_is_shown_and_a_wrong_one_is_refused(tmp_path, capsys):
    code, values = verified(tmp_path, capsys, NOTED)
    reasons = {one["reason"] for one in values["equivalent"]}
    assert reasons == {"nobody needs it"}
    # Without the second notify its wait never ends, so that dropping it is noticed.
    assert code == 1
    assert any("it is not equivalent: drop of notify" in one for one in values["mistakes"])


def test_a_note_that_says_nothing_is_misuse(tmp_path, capsys):
    more = "    # weft: equivalent-mutant forget of wait: I said so\n    pass"
    script = tmp_path / "tell.py"
    script.write_text(SCRIPT.replace("{more}", more))
    assert main(["verify", str(script), "--ranks", "2", "--mutants"]) == 2
    assert "no kind of mutant is called 'forget'" in capsys.readouterr().err


def test_a_program_that_fails_itself_is_reported_as_any_finding(tmp_path, capsys):
    script, page = tmp_path / "tell.py", tmp_path / "tell.html"
    text = SCRIPT.replace("{more}", "")
    waits = next(line for line in text.splitlines() if "wl.wait(" in line)
    script.write_text(text.replace(waits, "    pass"))
    words = ["verify", str(script), "--ranks", "2", "--mutants"]
    assert main([*words, "--html", str(page)]) == 1
    said = capsys.readouterr()
    line = 1 + text[: text.index("    tl.store(out")].count("\n")
    assert f"tell.py:{line} in tell" in said.out and "remedy: signal" in said.out
    assert "missing (dashed)" in said.out and "<html" in page.read_text()
    assert "no mutant was tried" in said.err
    assert main([*words, "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["races"] and values["mutants"] == 0
    assert values["bound"] == "the program as it is, 2, seed 0"


def test_an_operators_wrong_answer_is_reported_before_its_mutants(capsys, monkeypatch):
    monkeypatch.setattr(mutants, "rel_err", lambda got, want: 1.0)
    assert main("verify all_gather --ranks 2 --shape m=4,n=8 --mutants".split()) == 1
    assert "WrongAnswer: rank 0: an error of 1" in capsys.readouterr().out


def test_configurations_that_differ_in_their_tiles_run_once():
    op = card("moe_rs")
    problem = Work(op, 2, op.trials[0].shape, "float32").problem()
    assert len({config.transport for config in op.candidates(problem, TARGETS["emu"])}) == 1
    assert len(list(op.candidates(problem, TARGETS["emu"]))) > 1
    # Each by puts; between nodes by relay too.
    far = [one for one in op.trials if len(one.nodes) > 1]
    assert len(list(mutants.trial_runs(op))) == len(op.trials) + len(far)


def test_what_calls_other_operators_is_left_to_them():
    names = {run.name.partition(" ")[0] for run in mutants.trial_runs(card("gemm_rs"))}
    assert names == {"sm_push", "ce_push", "ce_parts", "relay"}


def test_of_composed_kernels_the_ir_has_mutants_too(monkeypatch):
    """Each run is asked for with every statement that orders ranks changed in turn."""
    kernel = read(core, KERNEL)
    loaded = []

    def run(seed, rewrite):
        loaded.append(source.load(kernel))
        if loaded[-1] is not loaded[0]:
            raise AssertionError  # another kernel was loaded in its place
        return Report("it", 1)

    monkeypatch.setattr(mutants, "search", searching)
    runs = [Run("it", run)]
    report = mutants.searched(runs, Bounds(schedules=1, census=1, jobs=1), "it", 1, None)
    assert {str(one.mutant).partition(" in ")[0] for one in report.verdicts} == {
        "drop of credit begin", "swap of credit begin",
        "drop of finish done", "swap of finish done", "double of finish done",
    }  # fmt: skip
    assert all(one.by == "wrong answer in it, seed 0" for one in report.verdicts)
    assert source.load(kernel) == loaded[0]


def test_a_kernels_ir_is_changed_in_the_runs_that_load_it(monkeypatch):
    kernel, tried = read(core, KERNEL), []

    def running(name, what):
        def run(seed, rewrite):
            if what:
                source.load(what)
            tried.append(name)
            return Report("it", 1)

        return Run(name, run)

    monkeypatch.setattr(mutants, "search", searching)
    runs = [running("multiplies", kernel), running("does not", None)]
    report = mutants.searched(runs, Bounds(schedules=1, census=1, jobs=1), "it", 1, None)
    assert tried[:2] == ["multiplies", "does not"] and report.verdicts
    assert set(tried[2:]) == {"multiplies"}


def test_kernels_that_differ_in_their_tiles_alone_are_one(monkeypatch):
    """Its mutants are tried in the runs of each, in that one's tiles."""
    tiles, asked, replaced = [(16, 16, 16), (32, 32, 32)], [], source.replaced
    kernels = [read(core, KERNEL.replace("(16, 16, 16)", str(tile))) for tile in tiles]

    def running(kernel):
        def run(seed, rewrite):
            source.load(kernel)
            return Report("it", 1)

        return Run("it", run)

    def spied(kernel, by):
        asked.append((kernel, by))
        return replaced(kernel, by)

    monkeypatch.setattr(mutants, "search", searching)
    monkeypatch.setattr(source, "replaced", spied)
    bounds = Bounds(schedules=1, census=1, jobs=1)
    report = mutants.searched([*map(running, kernels)], bounds, "it", 1, None)
    assert [one.runs for one in report.verdicts] == [2] * 5
    assert [kernel for kernel, _ in asked] == kernels * 5
    assert [by.of(core.Template)[0].tile for _, by in asked] == tiles * 5
    assert all(kernel != by for kernel, by in asked)


def searching(runs, bounds, *, subject, ranks, on_mutant):
    """A search that finds nothing to change, and runs everything once."""
    for one in runs:
        one.run(0, None)
    return MutantReport(subject, ranks)


KERNEL = """\
program(multiply)
a = param(operand)
b = param(operand)
c = param(operand)
slot = param(slot, by=kernel, to=kernel)
world = param(world)
split = mapping(static, (a,))
template(gemm, (16, 16, 16))
credit(begin, slot)
hook(order, grouped, ())
hook(ready, rows_of, (a,))
hook(emit, store, (c,))
finish(done, slot)
"""
