"""Faults planted in the source, one by one: a test fails of each. The list is in faults.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import faults
import pytest
from faults import FAULTS, CannotPlant, Copy, Fault

ROOMS = ("emulator", "verify", "ir", "compiler", "runtime", "ops", "tune", "megakernel", "tools")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_noticed(copy: Copy, fault: Fault) -> None:
    verdict = copy.try_fault(fault)
    assert verdict.killed, f"{fault.breaks}, and these pass: {', '.join(fault.tests)}"


@pytest.mark.slow
def test_without_a_fault_the_same_tests_pass(copy: Copy) -> None:
    """So what fails with one fails for it."""
    verdict = copy.run(*dict.fromkeys(test for fault in FAULTS for test in fault.tests))
    assert not verdict.killed, verdict.output


def test_faults_are_where_the_list_says() -> None:
    """Each text is there once: a change of the source finds the faults that it has to carry on."""
    for fault in FAULTS:
        text = (faults.ROOT / "src" / "weft" / fault.file).read_text()
        assert text.count(fault.old) == 1, f"{fault.file} holds {fault.old!r} not once"
        assert fault.new not in (fault.old, "") or not fault.new, fault
        for test in fault.tests:
            file = faults.ROOT / "tests" / test.split("::")[0]
            name = test.split("::")[1].split("[")[0]
            assert f"def {name}(" in file.read_text(), f"{file.name} has no test {name}"


def test_faults_are_of_all_rooms() -> None:
    rooms = Counter(fault.file.split("/")[0] for fault in FAULTS)
    assert len(FAULTS) >= 65 and not [room for room in ROOMS if rooms[room] < 2], rooms
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


SOUND = """
def test_sound():
    from weft.base.counts import counted
    assert counted(1, "fault") == "1 fault"
"""


@pytest.mark.slow
def test_a_fault_is_killed_or_survives_and_the_source_stays(tmp_path: Path) -> None:
    test = tmp_path / "test_sound.py"
    test.write_text(SOUND)
    before = (faults.ROOT / "src/weft/base/counts.py").read_text()
    (tmp_path / "copy").mkdir()
    copy = Copy(tmp_path / "copy")
    here = str(test)
    assert not copy.run(here).killed
    text = next(line for line in before.splitlines() if "return" in line)
    assert copy.try_fault(Fault("base/counts.py", text, "    return ''", "", here)).killed
    assert not copy.try_fault(Fault("base/counts.py", text, f"{text}  # same", "", here)).killed
    with pytest.raises(CannotPlant, match="'nowhere' 0 times, not once"):
        copy.try_fault(Fault("base/counts.py", "nowhere", "", "", here))
    with pytest.raises(CannotPlant, match="with the fault is no Python"):
        copy.try_fault(Fault("base/counts.py", text, "(", "", here))
    with pytest.raises(CannotPlant, match="the tests did not run"):
        copy.run(f"{here}::test_that_is_not_there")
    assert (faults.ROOT / "src/weft/base/counts.py").read_text() == before
    assert (copy.source / "weft/base/counts.py").read_text() == before
