"""Scripts as Triton's users write them, in different styles, on two ranks, unchanged."""

import pathlib

import pytest

from weft.emulator.script import run_script
from weft.language.triton_api import TRITON_VERSION

# From this version on Triton has them no more.
GONE = {"block_pointers": (3, 9)}
SCRIPTS = pathlib.Path(__file__).parent / "scripts" / "unmodified"


@pytest.mark.few(4)
@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_script(script):
    if TRITON_VERSION >= GONE.get(script, (9, 0)):
        pytest.skip("Triton has removed what this script uses")
    report = run_script(str(SCRIPTS / f"{script}.py"), ranks=2)
    assert report.ok, str(report)


def test_there_are_ten_and_none_knows_weft():
    texts = [path.read_text() for path in SCRIPTS.rglob("*.py")]
    assert len(list(SCRIPTS.glob("*.py"))) >= 10
    assert not any("weft" in text for text in texts)
