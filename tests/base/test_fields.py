"""Fields of a record that says how a call is done: told with the operator, the value, the rule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weft.base import fields
from weft.base.errors import ConfigError

CONFIG = SimpleNamespace(transport="sm_push", tile_m=64, stages=3)


def test_what_fits_is_accepted():
    fields.check_one_of("op", CONFIG, "transport", ("ce_push", "sm_push"))
    fields.check_powers_of_two("op", CONFIG, "tile_m", least=64)
    fields.check_ranges("op", CONFIG, stages=(3, 3), tile_m=(1, 64))


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (
            lambda: fields.check_one_of("op", CONFIG, "transport", ("ce_push",)),
            "op: transport='sm_push'; it must be one of ce_push",
        ),
        (
            lambda: fields.check_powers_of_two("op", CONFIG, "tile_m", "stages", least=2),
            "op: stages=3; it must be a power of two from 2 on",
        ),
        (
            lambda: fields.check_powers_of_two("op", CONFIG, "tile_m", least=128),
            "op: tile_m=64; it must be a power of two from 128 on",
        ),
        (
            lambda: fields.check_ranges("op", CONFIG, tile_m=(1, 64), stages=(4, 8)),
            "op: stages=3; it must be from 4 to 8",
        ),
    ],
)
def test_what_does_not_fit_is_refused(check, words):
    with pytest.raises(ConfigError, match=words):
        check()
