"""Scripts as the field writes them for CUDA GPUs, unchanged on emulated ranks: right in one form,
and with a fault in the other, which is found at its line."""

import pathlib

import pytest

from weft.emulator.script import run_script
from weft.tools.main import main as weft_cli

SCRIPTS = pathlib.Path(__file__).parent / "scripts" / "foreign"
# By script: what kind its fault is.
FAULTS = {
    "compare_and_swap_barrier": "race",
    "compiled_collectives": "race",
    "copy_engine_ag_gemm": "race",
    "cuda_graph": "race",
    "device_scope_progress": "race",
    "grid_barrier": "race",
    "host_barriers": "race",
    "host_signals": "race",
    "nvshmem_ring": "race",
    "one_shot_all_reduce": "race",
    "plain_wait": "plain spin",
    "producer_consumer": "race",
    "progress_reused": "race",
    "recycled_words": "race",
    "relaxed_spin": "race",
    "shared_heap": "race",
    "signals_by_thread": "deadlock",
    "stream_waits": "race",
    "streams_and_events": "race",
    "volatile_and_membar": "race",
    "workspace_pipeline": "race",
}
# Where not every schedule shows it: copies that come in time leave nothing to find.
SHOWN_BY = {"progress_reused": 1}
RANKS = {"one_shot_all_reduce": 4, "compare_and_swap_barrier": 4, "signals_by_thread": 4}


def run(name, *args, seed=0):
    path = SCRIPTS / f"{name}.py"
    return run_script(str(path), args, ranks=RANKS.get(name, 2), seed=seed)


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_right(name, seed):
    report = run(name, seed=seed)
    assert report.ok, str(report)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", FAULTS)
def test_its_fault_is_found_at_its_line(name):
    report = run(name, "--fault", seed=SHOWN_BY.get(name, 0))
    lines = (SCRIPTS / f"{name}.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith("# FAULT")]
    finding = next((one for one in report.findings if one.kind == FAULTS[name]), None)
    assert f"{name}.py:{line}" in str(finding), str(report)


def test_a_spin_that_sees_an_old_value_sees_the_new_one_in_the_end(capfd):
    path = str(SCRIPTS / "relaxed_spin.py")
    assert weft_cli(["verify", path, "--exhaustive", "--ranks", "2"]) == 0
    assert "complete: no other could show more" in capfd.readouterr().out


def test_all_are_run_and_none_knows_weft():
    texts = {path.stem: path.read_text() for path in SCRIPTS.glob("*.py")}
    assert {name for name, text in texts.items() if "__main__" in text} == set(FAULTS)
    assert not any("weft" in text for text in texts.values())
