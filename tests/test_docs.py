"""The documents: the site builds without a warning, and the code of the pages runs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from weft.base.settings import Settings
from weft.emulator.script import run_script

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def code_of(page: str) -> str:
    """All Python of a page, as one script."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL))


def test_the_site_builds_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]


@pytest.mark.few(1)
@pytest.mark.parametrize("page", ["host.md", "layers.md", "models.md", "programs.md", "torch.md"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path):
    script = tmp_path / "page.py"
    script.write_text(code_of(page))
    report = run_script(str(script), [], ranks=2, nodes=1, seed=0)
    assert report.ok, str(report)


def test_the_page_on_tests_runs(tmp_path: Path):
    script = tmp_path / "page.py"
    script.write_text(code_of("testing.md"))
    runpy.run_path(str(script))


def test_every_setting_is_on_its_page_with_its_default():
    page = (DOCS / "environment.md").read_text()
    rows = dict(re.findall(r"^\| `(WEFT_\w+)` \| ([^|]*?) \|", page, re.MULTILINE))
    expected = {}
    for field in fields(Settings):
        default = int(field.default) if isinstance(field.default, bool) else field.default
        shown = int(default) if isinstance(default, float) else default
        expected[f"WEFT_{field.name.upper()}"] = str(shown)
    assert rows == expected
