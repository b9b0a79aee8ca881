"""What weft doctor says of the libraries that are there."""

from __future__ import annotations

import pytest

from weft.tools.doctor import LIBRARIES, libraries

NEW = {name: f"{least}.0" for name, least in LIBRARIES.items()}


def test_what_is_new_enough_is_all_there():
    newer = {**NEW, "torch": "2.13.0+cpu", "triton": "3.10.1", "greenlet": "12.0"}
    for versions in (NEW, newer):
        found = libraries(versions)
        assert found.ok and not found.remedy


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.10.1"), ("torch", "2.9.1+cu130"), ("triton", "3.5.1"), ("greenlet", None)],
)
def test_a_library_that_is_too_old_is_named_with_the_remedy(name, version):
    """2.9 is older than 2.11, though it is not before it by its letters."""
    found = libraries({**NEW, name: version})
    assert not found.ok
    assert found.detail == f"{name} {version or 'missing'} (needs {LIBRARIES[name]})"
    assert found.remedy == f"pip install '{name}>={LIBRARIES[name]}'"
