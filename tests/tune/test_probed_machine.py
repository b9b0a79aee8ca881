"""The probe of a machine: the fit finds rates that are known, on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.base.errors import WeftError
from weft.base.hardware import H200X4, Hardware, hardware_of
from weft.base.target import TARGETS
from weft.runtime.choices import EMULATED, MACHINE, file_name
from weft.tune import machine
from weft.tune.device import EmulatedDevice
from weft.tune.machine import CURVES, PROBES, READ, fitted, line, probe

# Of the machine that is probed.
KNOWN = {
    "copy_gbps": 180.0, "copy_us": 4.5, "push_gbps": 150.0, "push_us": 2.5, "pusher_gbps": 9.0,
    "signal_us": 2.2, "packet_gbps": 60.0, "packet_us": 6.0, "memory_gbps": 1800.0,
    "program_tflops": 3.5, "library_tflops": 420.0, "library_us": 5.0,
}  # fmt: skip
OF_PEERS = {name for name, one in PROBES.items() if one.has_peers}


def took_us(step: Any) -> float:
    """What a step takes on a machine of KNOWN."""
    one = PROBES[step.probe]
    rate = KNOWN[one.rate]
    if one.rate == "signal_us":
        return 8.0 + step.amount * rate  # a launch's start, which no field is
    rate *= TARGETS["emu"].num_sms if one.rate == "program_tflops" else 1
    return (KNOWN[one.start] if one.start else 0.0) + step.amount / rate / one.unit


class KnownDevice(EmulatedDevice):
    """Ranks do the work on the emulator; it takes what it would on that machine, and a first time
    twice as long."""

    def held_us(self, call: Callable[[], Any], host_us: float) -> float:
        super().held_us(call, host_us)
        return took_us(call)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(machine, "FACTORS", (1, 2, 4))
    monkeypatch.setattr(machine, "REPEATS", 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_fit_finds_the_rates_of_a_known_machine(ranks, quick, num_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))

    def main() -> Hardware:
        with weft.init() as world:
            return probe(world, KnownDevice(world))

    found = ranks(main, num_ranks)
    assert all(one == found[0] for one in found), "all ranks have one record"
    of_peers = {name for one in OF_PEERS for name in (PROBES[one].rate, PROBES[one].start)}
    for name, value in KNOWN.items():
        is_read = num_ranks > 1 or name not in of_peers
        pace = value / READ[name] if is_read else 1.0
        assert getattr(found[0], name) == pytest.approx(getattr(H200X4, name) * pace, rel=1e-3), (
            name
        )
    if num_ranks > 1:
        # What no probe reads goes along with what one does.
        pace = KNOWN["push_gbps"] / READ["push_gbps"]
        assert found[0].combine_gbps == pytest.approx(H200X4.combine_gbps * pace, rel=1e-3)
        (_, start), *_, (_, us) = H200X4.gather
        paces = KNOWN["signal_us"] / READ["signal_us"], READ["copy_gbps"] / KNOWN["copy_gbps"]
        right = start * paces[0] + (us - start) * paces[1]
        assert found[0].gather[-1][1] == pytest.approx(right, rel=1e-3)

    def later() -> Any:
        with weft.init() as world:
            return hardware_of(world.target)

    assert ranks(later, num_ranks) == found, "worlds that begin later reckon with it"
    monkeypatch.setenv("WEFT_CHOICES", "off")
    assert ranks(later, num_ranks) == [H200X4] * num_ranks


def test_a_line_is_found_among_readings_that_scatter():
    points = [(size, (3 + size / 200) * (1 + off))
              for size, off in zip((64, 256, 1024, 4096), (0.02, -0.02, 0.01, -0.01))]  # fmt: skip
    start, slope = line(points)
    assert start == pytest.approx(3, rel=0.1) and 1 / slope == pytest.approx(200, rel=0.05)
    assert line([(1, 0.5), (2, 2.0), (4, 4.5)])[0] == 0, "no start below 0"


def test_readings_that_no_line_fits_are_refused():
    with pytest.raises(WeftError, match="memory: more takes no longer"):
        fitted({"memory": [(1, 5.0), (4, 5.0), (16, 4.0)]}, H200X4)


def test_a_probe_fits_fields_that_there_are():
    names = {one.name for one in fields(Hardware)}
    along = {name for names_of in machine.ALONG.values() for name in names_of}
    read = {name for one in PROBES.values() for name in (one.rate, one.start) if name}
    assert read | along | set(CURVES) <= names and not read & along
    assert fitted({}, H200X4) == H200X4


def test_the_machine_of_the_record_has_that_record():
    """A probe says how it compares with those GPUs, not what single calls take."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "machine_h200x4.json"
    read = json.loads(path.read_text())["read"]
    assert read == pytest.approx(READ, rel=1e-3)
    points = {}
    for name, one in PROBES.items():
        rate = read[one.rate] * (H200X4.num_sms if one.rate == "program_tflops" else 1)
        slope = rate if one.rate.endswith("_us") else 1 / (rate * one.unit)
        start = read[one.start] if one.start else 3.0
        points[name] = [(amount, start + amount * slope) for amount in (1e3, 1e4, 1e5)]
    found = fitted(points, H200X4)
    for name, value in vars(H200X4).items():
        if isinstance(value, float):
            assert getattr(found, name) == pytest.approx(value, rel=1e-3), name
    assert [us for _, us in found.gather] == pytest.approx(
        [us for _, us in H200X4.gather], rel=1e-3
    )


def test_a_record_of_other_fields_is_refused(tmp_path, monkeypatch, ranks):
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    values = {**vars(replace(H200X4, name="x")), "speed": 1.0}
    path = tmp_path / file_name(MACHINE, EMULATED, 1)
    path.write_text(json.dumps({"op": MACHINE, "choices": [{"key": "hardware", "fields": values}]}))
    with pytest.raises(weft.UsageError, match=r"speed.*weft machine"):
        ranks(weft.init, 1)
