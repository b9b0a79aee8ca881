"""One table of symbols: everything that is said, and everything that is understood, is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import weft.language
from weft.emulator.programs import EXTERNS
from weft.language import registry
from weft.language.symbols import QUIET_SYMBOLS, SYMBOLS, base_symbol, with_trait

LANGUAGE = Path(weft.language.__file__).parent


def test_the_emulator_gives_each_its_meaning_and_no_other():
    assert set(EXTERNS) == {*SYMBOLS, *QUIET_SYMBOLS}


def test_the_language_says_these_and_no_other():
    said = {
        symbol
        for path in (LANGUAGE / "emu.py", *(LANGUAGE / "portable").glob("*.py"))
        for symbol in re.findall(r'f?"(weft\.[a-z_]+)[:"]', path.read_text())
    }
    # Marks of a mutant's place come from verify's rewrites, not from the language.
    assert said == {*SYMBOLS, *QUIET_SYMBOLS} - {"weft.reached"}


@pytest.mark.parametrize("name", sorted(SYMBOLS))
def test_a_row_agrees_with_the_primitives_declaration(name):
    symbol = SYMBOLS[name]
    declared = registry.PRIMITIVES[symbol.name]
    assert symbol.waits == (name.startswith("weft.wait")), name
    assert ("order" in declared.signature.parameters) <= (symbol.order is not None)


def test_traits():
    assert with_trait("waits") < with_trait("looks")
    assert base_symbol("weft.notify:add.release.sys") == "weft.notify"
