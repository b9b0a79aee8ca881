"""The probe for multicast: an answer everywhere, also where there is no driver."""

from __future__ import annotations

import ctypes

import pytest

from weft.runtime.multicast import is_multicast_supported


def test_without_a_driver_there_is_none(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not is_multicast_supported(0)


@pytest.mark.parametrize("answer", [0, 1])
def test_it_is_what_the_driver_says(monkeypatch, answer):
    class Driver:
        def __init__(self, name):
            pass

        def cuInit(self, flags):
            return 0

        def cuDeviceGet(self, handle, device):
            return 0

        def cuDeviceGetAttribute(self, value, attribute, handle):
            assert attribute == 132
            value._obj.value = answer
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    assert is_multicast_supported(0) == bool(answer)
