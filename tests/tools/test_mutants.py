"""`weft verify SCRIPT --mutants`: what it prints, what it exits with."""

from __future__ import annotations

import json

from weft.tools.main import main

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


def test_a_signal_too_many_is_named_with_its_line(tmp_path, capsys):
    code, values = verified(tmp_path, capsys, AGAIN)
    assert code == 1 and not values["ok"]
    lines = SCRIPT.replace("{more}", AGAIN).splitlines()
    line = next(i + 1 for i, text in enumerate(lines) if "wl.wait(also_ready" in text)
    assert any(f"drop of wait in tell at tell.py:{line}" in one for one in values["missed"])


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
