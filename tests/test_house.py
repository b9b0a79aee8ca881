"""The house's rules, held against the source: who imports whom, and where the sharp tools lie."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "weft"

# Imports go down only; rooms on one level are strangers. `weft/__init__` is a lazy root outside.
LEVELS = {
    "base": 0,
    "language": 1,
    "ir": 1,
    "tiles": 2,
    "emulator": 2,
    "compiler": 3,
    "verify": 3,
    "runtime": 4,
    "tune": 5,
    "plan": 5,
    "ops": 6,
    "megakernel": 6,
    "manycore": 6,
    "layers": 7,
    "models": 8,
    "serve": 9,
    "tools": 10,
}
NO_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
VARIANTS = ("_v2", "_new", "_fast", "_old")

# Triton modules that its documentation does not offer to users.
PRIVATE_TRITON = (
    "triton._C",
    "triton._utils",
    "triton.backends",
    "triton.compiler",
    "triton.runtime",
    "triton.language.core",
    "triton.language.semantic",
    "triton.experimental.gluon._runtime",
)


def files(*rooms: str) -> list[Path]:
    paths = SOURCE.rglob("*.py") if not rooms else (p for r in rooms for p in room(r))
    return sorted(p for p in paths if "__pycache__" not in p.parts)


def room(name: str) -> Iterator[Path]:
    return (SOURCE / name).rglob("*.py")


def room_of(path: Path) -> str | None:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else None


@cache
def tree(path: Path) -> ast.Module:
    """What a file holds, by the grammar of the oldest Python; it is read once for all rules."""
    return ast.parse(path.read_text(), str(path), feature_version=(3, 10))


@cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Every module that `path` imports, and at which line."""
    return tuple(imported(path))


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that `path` imports, lazy ones and `importlib.import_module("...")` included."""
    package = ["weft", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, node.lineno
            # `from weft import x` may name a room, `from triton import knobs` a module.
            yield from ((f"{module}.{name.name}", node.lineno) for name in node.names)
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            if node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), node.lineno


def called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_room_has_a_level():
    rooms = {p.name for p in SOURCE.iterdir() if p.is_dir() and list(p.glob("*.py"))}
    assert rooms <= set(LEVELS), f"rooms without a level: {sorted(rooms - set(LEVELS))}"


def test_imports_go_down_only():
    upward = []
    for path in files():
        here = room_of(path)
        if here is None:  # weft/__init__.py, the lazy root, and weft/__main__.py
            continue
        for module, line in imports(path):
            parts = module.split(".")
            if parts[0] != "weft":
                continue
            if len(parts) == 1 or parts[1] not in LEVELS:
                if parts == ["weft"] and here != "tools":
                    upward.append(f"{where(path, line)}: {here} imports the root `weft`")
                continue
            there = parts[1]
            if there != here and LEVELS[there] >= LEVELS[here]:
                upward.append(f"{where(path, line)}: {here} imports {module}")
    assert not upward, "\n".join(sorted(set(upward)))


def file_of(module: str) -> Path | None:
    """The source of a module of weft's; None of a name that is no module."""
    path = SOURCE.parent.joinpath(*module.split("."))
    found = [path / "__init__.py", path.with_suffix(".py")]
    return next((one for one in found if one.is_file()), None)


def imported_files(path: Path) -> set[Path]:
    """Files of the same room that `path` imports, wherever in it, and be it for types alone."""
    found = {(module, line): file_of(module) for module, line in imports(path)}
    there = set()
    for (module, line), file in found.items():
        # `from a import b` is yielded as a and as a.b: where b is a module, that one is meant.
        inner = [one for one in found if one[1] == line and one[0].startswith(f"{module}.")]
        if file is not None and not any(found[one] for one in inner):
            there.add(file)
    return {one for one in there if one != path and room_of(one) == room_of(path)}


def in_circles() -> dict[str, list[Path]]:
    """By room the files that import themselves through others."""
    imported = {path: imported_files(path) for path in files()}
    found: dict[str, list[Path]] = {}
    for path in imported:
        reached: set[Path] = set()
        ahead = [path]
        while ahead:
            new = imported[ahead.pop()] - reached
            reached |= new
            ahead += new
        if path in reached:
            found.setdefault(room_of(path) or "", []).append(path)
    return found


def test_no_files_of_a_room_import_each_other():
    """What two files need of each other belongs below both, or is handed over as a value."""
    found = in_circles()
    told = [
        f"{room}: {', '.join(str(path.relative_to(SOURCE / room)) for path in circle)}"
        for room, circle in found.items()
    ]
    assert not told, "\n".join(["files that import each other", *told])


def test_the_host_cuts_ranks_parts_in_one_place():
    """Ceil(size / num_ranks) to a rank is `base/parts.py`; whoever spells it again may differ."""
    again = []
    for path in files():
        if "num_ranks" not in path.read_text():
            continue
        for node in ast.walk(tree(path)):
            # Each has a minus or a call of ceil outermost.
            is_one = isinstance(node, ast.UnaryOp) or (
                isinstance(node, ast.Call) and called(node) == "ceil"
            )
            text = ast.unparse(node) if is_one else ""
            if re.fullmatch(
                r"(?:math\.)?ceil\(.* / [\w.]*num_ranks\)|-\(-.* // [\w.]*num_ranks\)", text
            ):
                again.append(f"{where(path, node.lineno)}: {text}")
    assert [one for one in again if "base/parts.py" not in one] == []


def test_the_root_imports_nothing_until_asked():
    """`import weft` costs no torch and no Triton: `weft doctor` runs where neither does."""
    assert imported_of("weft, weft.tools.main", "torch", "triton", "numpy", "immutables") == []


def test_layers_and_models_import_what_serving_needs_when_it_is_needed():
    """Without the extra `serve` all but checkpoints and servers runs."""
    extra = ("transformers", "safetensors", "tokenizers", "fastapi", "uvicorn", "prometheus_client")
    rooms = "weft, weft.tools.main, weft.layers, weft.models, weft.serve.runner"
    assert imported_of(rooms, *extra) == []


def imported_of(modules: str, *names: str) -> list[str]:
    """Which of these a process has loaded once it has imported `modules`."""
    code = f"import sys, {modules}; print(*(m for m in {names} if m in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


def test_what_runs_on_gpus_leaves_the_emulator_alone():
    """A process with a GPU needs none of the emulator's packages, nor the time to import them."""
    emulating = SOURCE / "runtime" / "backends" / "emu.py"
    rooms = ("language", "ir", "tiles", "compiler", "runtime", "tune", "plan", "ops", "megakernel")
    sinners = [
        f"{where(path, line)}: {module}"
        for path in files(*rooms)
        if path != emulating
        for module, line in imports(path)
        if module == "weft.emulator" or module.startswith("weft.emulator.")
    ]
    assert not sinners, "\n".join(sinners)


def test_base_needs_only_the_standard_library():
    foreign = [
        f"{where(path, line)}: {module}"
        for path in files("base")
        for module, line in imports(path)
        if (top := module.split(".")[0]) != "weft" and top not in sys.stdlib_module_names
    ]
    assert not foreign, "\n".join(foreign)


def test_tritons_private_api_is_touched_in_one_folder():
    sinners = [
        f"{where(path, line)}: {module}"
        for path in files()
        if not path.is_relative_to(SOURCE / "language/triton_api")
        for module, line in imports(path)
        if any(module == private or module.startswith(f"{private}.") for private in PRIVATE_TRITON)
    ]
    assert not sinners, "\n".join(sinners)


def test_inline_assembly_lives_with_its_target():
    sinners = []
    for path in files():
        if path.is_relative_to(SOURCE / "language/cuda"):
            continue
        if path.is_relative_to(SOURCE / "language/hip.py"):
            continue
        if path == SOURCE / "language/triton_api/tracing.py":
            continue
        for node in ast.walk(tree(path)):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            of = getattr(getattr(node, "value", None), "id", "")
            if name == "inline_asm_elementwise" or (of, name) == ("api", "assembly"):
                sinners.append(where(path, node.lineno))
    assert not sinners, "\n".join(sinners)


def test_files_are_named_for_what_they_hold():
    for path in files():
        name = path.stem
        assert name not in NO_NAMES, f"{path}: say what is in it"
        assert not name.endswith(VARIANTS), f"{path}: name a variant by how it works"
        if path.parent == SOURCE or name.startswith("__"):
            continue
        assert name not in sys.stdlib_module_names, f"{path}: named like a standard module"


@pytest.mark.parametrize(("name", "most"), [
    ("ag_rms_gemm", 60), ("ag_gemm", 150), ("gemm_rs", 150), ("gemm_ar", 150),
])  # fmt: skip
def test_operators_are_short(name, most):
    assert len((SOURCE / "ops" / f"{name}.py").read_text().splitlines()) <= most


def test_no_two_test_files_have_one_name():
    """Pytest imports them by name: of two, the one that a worker comes to second is an error."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_private_module_is_imported_from_outside():
    """What tests, examples and pages ask is what users can; the rest may change without them."""
    found = {}
    for path in (p for room in ("tests", "examples", "benchmarks", "docs")
                 for p in sorted((ROOT / room).rglob("*.py"))):  # fmt: skip
        for node in ast.walk(tree(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                names = [f"{module}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Call) and called(node) == "import_module":
                names = [str(getattr(one, "value", "")) for one in node.args[:1]]
            for name in names:
                parts = name.split(".")
                if parts[0] == "weft" and any(re.match("_[^_]", part) for part in parts):
                    private = next(i for i, part in enumerate(parts) if re.match("_[^_]", part))
                    found[where(path, node.lineno)] = ".".join(parts[: private + 1])
    told = [f"{place}: {name}" for place, name in found.items()]
    assert not told, "\n".join(told)


# Of the standard library, what the oldest Python that weft asks for, 3.10, has not.
NEWER = {
    "tomllib", "asyncio.TaskGroup", "asyncio.timeout", "contextlib.chdir", "copy.replace",
    "datetime.UTC", "enum.StrEnum", "enum.verify", "enum.member", "enum.nonmember",
    "functools.Placeholder", "hashlib.file_digest", "itertools.batched", "math.cbrt", "math.exp2",
    "math.sumprod", "operator.call", "typing.LiteralString", "typing.Never", "typing.NotRequired",
    "typing.Required", "typing.Self", "typing.TypeAliasType", "typing.TypeVarTuple",
    "typing.Unpack", "typing.assert_never", "typing.assert_type", "typing.override",
    "typing.reveal_type", "warnings.deprecated",
}  # fmt: skip
NEWER_BUILTINS = {"BaseExceptionGroup", "ExceptionGroup", "PythonFinalizationError"}


def test_every_file_is_of_the_oldest_python():
    """By its grammar, and by the names that it takes from the standard library."""
    newer = []
    folders = (SOURCE, ROOT / "tests", ROOT / "examples", ROOT / "benchmarks")
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        for node in ast.walk(tree(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = [f"{node.value.id}.{node.attr}"]
            elif isinstance(node, ast.Name) and node.id in NEWER_BUILTINS:
                newer.append(f"{where(path, node.lineno)}: {node.id}")
            newer += [f"{where(path, node.lineno)}: {name}" for name in names if name in NEWER]
    assert not newer, "\n".join(newer)


PAGES = ("README.md", "CONTRIBUTING.md", "docs/system.md")


@cache
def all_paths() -> frozenset[str]:
    """Files and folders of the project, each also by every end of its path that a page may name."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "mkdocs.yml", ".ci/run")]
    for folder in ("src", "docs", "tests", "examples", "benchmarks"):
        found += [ROOT / folder, *(ROOT / folder).rglob("*")]
    parts = [p.relative_to(ROOT).parts for p in found]
    return frozenset("/".join(one[i:]) for one in parts for i in range(len(one)))


def names_of(page: str) -> set[str]:
    """What a page has in backticks, without its blocks of code."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`\s]+)`", text))


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_the_pages_name_exist(page: str):
    """A page that walks through the source must not walk through rooms that are gone."""
    of_user = {"neighbour.py", "kernels.py", "FILE.py"} if page == "README.md" else set()
    named = {one.split(":")[0] for one in names_of(page) if re.search(r"\.(py|md|yml)\b|/$", one)}
    named = {re.sub(r"[^/]*NAME.*", "", one).rstrip("/") for one in named - of_user}
    missing = sorted(named - {""} - all_paths())
    assert not missing, f"{page} names {missing}"


def test_tables_that_the_recipes_name_exist():
    """`KINDS`, say, to which a row is to be added."""
    tables = {name for name in names_of("CONTRIBUTING.md") if re.fullmatch(r"[A-Z_]{4,}", name)}
    source = "\n".join(path.read_text() for path in files())
    placeholders = {"NAME", "KIND", "CI_MINUTES"}
    missing = [name for name in tables - placeholders
               if not re.search(rf"^{name}\b.*=", source, re.MULTILINE)]  # fmt: skip
    assert not missing, f"CONTRIBUTING.md names {missing}"


def test_the_picture_of_a_call_is_true():
    """Ten files at most from the operator to the store, each with what the picture says of it."""
    picture = re.search(
        r"```text\n( a\n.*?)```", (ROOT / "docs" / "system.md").read_text(), re.DOTALL
    )
    rows = re.findall(r"^ [│▼]  (\w+)\S* .*? {2,}([\w/]+\.py)", picture[1] if picture else "", re.M)
    assert 5 <= len(rows) <= 10, rows
    for name, file in rows:
        assert re.search(rf"^(def|class) {name}\b", (SOURCE / file).read_text(), re.M), (name, file)
    named = re.findall(r"[\w/]+\.py", picture[1] if picture else "")
    assert not [file for file in named if not (SOURCE / file).exists()]


def test_the_tour_visits_every_room():
    tour = (ROOT / "docs" / "system.md").read_text()
    rooms = {room_of(path) for path in files() if path.read_text().strip()} - {None}
    forgotten = [name for name in rooms if f"`{name}/`" not in tour]
    assert not forgotten, f"docs/system.md does not speak of {forgotten}"
