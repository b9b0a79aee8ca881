"""The runtime on real GPUs: slots in all uses; ranks that die, stall or forget.

The probes in benchmarks/ check themselves; here they run briefly. What streams wait for by
themselves is `scripts/tokens.py`, which `tests/emulator/test_tokens.py` runs emulated.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import environment, once, torchrun

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
TOKENS = SCRIPTS / "tokens.py"


def run(tmp_path, script, *options):
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    done = subprocess.run(command, env=environment(OUT=str(tmp_path)), capture_output=True,
                          text=True, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.gpu(n=2)
@pytest.mark.parametrize("part", ["toy", "ag_gemm"])
def test_slots_are_right_eager_captured_replayed_and_mixed(tmp_path, part):
    run(tmp_path, "slots.py", "--ranks", "2", "--replays", "300", "--part", part)
    results = json.loads(next(tmp_path.glob("slots_*.json")).read_text())
    uses = {
        (name, use): row["wrong"]
        for name, rows in results.items()
        if name.startswith(part)
        for use, row in rows.items()
    }
    assert len(uses) >= 7 and not any(uses.values()), uses


MOVED = "all_reduce,all_gather,reduce_scatter,all_to_all,ag_gemm"
PRODUCTS = "gemm_rs,gemm_ar,ag_wgrad,all_reduce_rms_norm,persistent"
EXPERTS = "ag_moe,moe_rs,moe_ar,moe_route,ep_dispatch,ep_combine,ag_attention,flash_decode"


@pytest.mark.gpu(n=2)
@pytest.mark.parametrize(("ops", "num_ways"), [(MOVED, 4), (PRODUCTS, 3), (EXPERTS, 3)])
def test_operators_are_right_under_stress(tmp_path, ops, num_ways):
    """Stragglers, shapes and seeds that change, two worlds at once, eager and replayed."""
    options = ("--ops", ops, "--calls", "400", "--replays", "200", "--timeout", "240")
    run(tmp_path, "stress.py", *options)
    found = json.loads(next(tmp_path.glob("stress_*.json")).read_text())
    for of_rank in (found["stress"], *found["by_rank"]):
        ways = {way: row for way, row in of_rank.items() if "calls" in row}
        assert not of_rank["first"]
        wrong = {way: row["wrong"] for way, row in ways.items() if row["wrong_elements"]}
        assert len(ways) == num_ways and not wrong, wrong


@pytest.mark.gpu(n=2)
def test_streams_take_tokens_and_carry_what_kernels_have_stored():
    said = once(torchrun(TOKENS, 2), r"rank (\d) of 2: tokens carried 54 calls")
    assert said == ["0", "1"]


@pytest.mark.gpu(n=2)
def test_memory_that_went_back_to_the_device_is_not_copied_to_by_old_recordings():
    """Results are right in every round, and allocations are told apart, where an address comes
    again or not: that is the driver's choice."""
    said = once(
        torchrun(SCRIPTS / "memory_comes_again.py", 2),
        r"rank (\d) of 2: right (\d+) of (\d+) times; addresses that came again: (\d+)",
    )
    assert [rank for rank, *_ in said] == ["0", "1"]
    assert all(right == calls and int(calls) > 0 for _, right, calls, _ in said), said


@pytest.mark.gpu(n=4)
def test_every_rank_that_is_left_raises_with_the_table(tmp_path):
    run(tmp_path, "bounded_waits.py", "--part", "trouble")
    trouble = json.loads(next(tmp_path.glob("bounded_waits_*.json")).read_text())["trouble"]
    for scene, rows in trouble.items():
        for row in rows:
            if row["raised"] == "killed":
                continue
            assert row["raised"] == "TimeoutError", (scene, row)
            assert "token[0] >= " in row["table"] and row["poisoned"]
            assert row["raised_after_s"] < 8 and "teardown_s" in row
