"""The documents: the site builds without a warning, and the code of the pages runs."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections import Counter
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


RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    "page, table, words",
    [
        ("environment.md", "gpu_suite_h200x1", "{passed} of {all} GPU tests passed so at {commit}"),
        (
            "results.md",
            "gpu_suite_h200x2",
            "Of {all} GPU tests {passed} passed at {commit} and just before it",
        ),
    ],
)
def test_a_page_counts_what_its_table_holds(page: str, table: str, words: str):
    values = json.loads((RESULTS / f"{table}.json").read_text())
    counts = Counter(row["outcome"] for row in values["rows"])
    said = words.format(all=counts.total(), commit=values["commit"], **counts)
    assert said in (DOCS / page).read_text()


def test_the_readme_compares_experts_with_the_fastest_rival():
    rows = json.loads((RESULTS / "experts_layer_h100x2.json").read_text())["rows"]
    shares: dict[str, list[float]] = {}
    for row in (one for one in rows if one["tokens"] == 4096):
        fastest = {name: min(us for way, us in row["us"].items() if way.startswith(f"{name},"))
                   for name in ("torch", "weft")}  # fmt: skip
        shares.setdefault(row["model"], []).append(fastest["weft"] / fastest["torch"])
    ends = min(shares["qwen3-30b-a3b"]), max(shares["mixtral-8x7b"])
    assert ends == (min(min(shares.values())), max(max(shares.values())))
    said = "takes {:.2f} (Qwen3-30B-A3B) to {:.2f} (Mixtral)".format(*ends)
    assert said in (ROOT / "README.md").read_text()


def test_files_that_pages_name_are_there():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    named = {
        (page.name, file)
        for page in pages
        for file in re.findall(r"`((?:tests|src/weft|examples)/[\w/]+\.py)`", page.read_text())
    }
    assert len(named) > 50
    assert not [one for one in sorted(named) if not (ROOT / one[1]).is_file()]
