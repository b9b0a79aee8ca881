"""What every test shares: ranks without a launcher, and marks that say what a test needs."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import weft
from weft.base.settings import Settings

PAIR = 2
# A test is due in one of so many turns, always the same: then it runs, be the time over or not. A
# prime: whoever counts in other steps than one, such as several commits at a time, meets all turns
# too, unless they are 23.
TURNS = 23
END = pytest.StashKey[float]()
NO_TIME = "no time was left for it"

# Tests compile much and make many objects, hardly any of which become garbage in cycles.
gc.set_threshold(50_000, 20, 20)

# The same examples each time, or with --hypothesis-seed those of the seed. No deadline: how long
# one takes depends on who else is at work.
FIXED, SEEDED = "weft", "weft, by seed"
for profile in (FIXED, SEEDED):
    hypothesis.settings.register_profile(
        profile, deadline=None, derandomize=profile == FIXED, database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )  # fmt: skip
hypothesis.settings.load_profile(FIXED)

# What a terminal or a service says of itself would change what is printed.
TERMINAL = (
    "FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS", "LINES",
    "TTY_COMPATIBLE", "TTY_INTERACTIVE",
)  # fmt: skip

# Tests of serving wait where packages of the extra `serve` or of `dev` are not installed, as on a
# machine with GPUs alone; those that import none of these have no need of them.
PACKAGES = ("fastapi", "openai", "prometheus_client", "tokenizers", "uvicorn")
IMPORTS = ("from engines", "from weft.serve.engine", "from tokenizers", "import openai")
missing = [name for name in PACKAGES if find_spec(name) is None]
collect_ignore = [
    str(path)
    for path in Path(__file__).parent.glob("serve/test_*.py")
    if missing and any(one in path.read_text() for one in IMPORTS)
]


def pytest_report_header() -> str | None:
    return f"tests/serve waits for {', '.join(missing)}" if missing else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-tests",
        choices=("pairs", "larger"),
        help="pairs: GPU tests that two GPUs are enough for, each worker on two of its own; "
        "larger: those that need more. Left out: all, on all GPUs",
    )
    parser.addoption(
        "--seconds", type=float,
        help="tests that would begin after so many are skipped, but for those that are due",
    )  # fmt: skip
    parser.addoption(
        "--turn",
        type=int,
        help=f"a number: tests that are due in that turn come first. In any {TURNS} turns in a row "
        "each test is due once",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker its own two GPUs, before CUDA is asked for any, one thread, and no
    terminal; note when its time is over."""
    for name in TERMINAL:
        os.environ.pop(name, None)
    os.environ["WEFT_CHOICES"] = "off"  # what somebody measured here decides nothing in tests
    if config.getoption("--hypothesis-seed") is not None:
        hypothesis.settings.load_profile(SEEDED)
    if (seconds := config.getoption("--seconds")) is not None:
        config.stash[END] = time.monotonic() + seconds
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and not config.getoption("--gpu-tests"):
        # There is a worker for each CPU; torch's threads would take them from other workers.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.getoption("--gpu-tests") == "pairs" and worker:
        first = PAIR * int(worker.removeprefix("gw"))
        there = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = there.split(",") if there else [str(i) for i in range(first + PAIR)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + PAIR])


def turns_until_due(item: pytest.Item) -> int:
    """0 for a test that is due in this turn. By its name, so that other tests change nothing."""
    turn = item.config.getoption("--turn") or 0
    return (zlib.crc32(item.nodeid.encode()) - turn) % TURNS


def leave_few_cases(items: list[pytest.Item]) -> None:
    """Of a test marked `few(n)`, n cases that lie as far apart as can be are not slow."""
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault((item.path, getattr(item, "originalname", "")), []).append(item)
    for test in cases.values():
        (most,) = test[0].get_closest_marker("few").args
        kept = {i * len(test) // most for i in range(most)}
        for i, item in enumerate(test):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Before tests with other marks go, cases beyond a few become slow. Then what is due comes
    first, and `gpu(n)` tests are skipped where there are fewer GPUs; CUDA is asked once, and only
    if needed."""
    leave_few_cases(items)
    yield
    if config.getoption("--turn") is not None:
        items.sort(key=turns_until_due)
    if which := config.getoption("--gpu-tests"):
        kept = [item for item in items if (_gpus_of(item) > PAIR) == (which == "larger")]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there and Settings.from_environment().share_gpus:
        there = max(map(_gpus_of, wanted))
    for item in wanted:
        if there < _gpus_of(item):
            item.add_marker(pytest.mark.skip(reason=f"needs {_gpus_of(item)} GPUs, {there} here"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() <= item.config.stash.get(END, float("inf")):
        return
    if item.config.getoption("--turn") is None or turns_until_due(item):
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests the time was too short for."""
    if config.getoption("--seconds") is None:
        return
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = sum(NO_TIME in str(report.longrepr) for report in skipped)
    ran = sum(len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed"))
    terminalreporter.write_line(
        f"left out for want of time: {left_out} of {left_out + ran} tests"
        + (f"; each is due in one of {TURNS} turns in a row" if left_out else "")
    )


def _gpus_of(item: pytest.Item) -> int:
    """How many GPUs a test needs."""
    mark = item.get_closest_marker("gpu")
    return (mark.kwargs.get("n") or (*mark.args, 1)[0]) if mark else 0


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The folder of a tiny model of a kind, which is made once."""
    pytest.importorskip("transformers")

    @cache
    def made(kind: str) -> Any:
        folder = tmp_path_factory.mktemp("models") / kind
        weft.models.make_tiny(folder, kind)
        return folder

    return made


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    """Random data depends on the test alone, not on what ran before it, nor on the day."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    random.seed(0)


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`ranks(main, n, **options)` runs `main` on n emulated ranks and returns what each returned.

    With collect=True it returns the report instead of raising what was found.
    """

    def run(main: Callable[..., Any], num_ranks: int = 4, *, collect: bool = False, **options: Any):
        with weft.emulated(ranks=num_ranks, collect=collect, **options) as session:
            results = session.run(main)
        return session.report if collect else results

    return run


# NVSHMEM's device functions as it declares them: (name, types of its arguments).
NVSHMEM_FUNCTIONS = (
    ("nvshmem_quiet", ""),
    ("nvshmemx_putmem_block", "i64, i64, i64, i32"),
    ("nvshmemx_getmem_block", "i64, i64, i64, i32"),
    ("nvshmemx_signal_op", "i64, i64, i32, i32"),
    ("nvshmem_int32_atomic_add", "i64, i32, i32"),
    ("nvshmem_int32_atomic_set", "i64, i32, i32"),
    ("nvshmem_int32_test", "i64, i32, i32"),
    ("nvshmem_int64_test", "i64, i32, i64"),
    *((f"nvshmem_int{bits}_p", f"i64, i{bits}, i32") for bits in (8, 16, 32, 64)),
    *((f"nvshmem_int{bits}_g", "i64, i32") for bits in (8, 16, 32, 64)),
)


@pytest.fixture
def nvshmem_stand_in(tmp_path, monkeypatch):
    """Device code in place of NVSHMEM's, each function of which leaves its name in the assembly.

    Textual LLVM: the linker reads it as it reads bitcode.
    """
    from weft.language.cuda import nvshmem_library

    lines = ['target triple = "nvptx64-nvidia-cuda"']
    for name, types in NVSHMEM_FUNCTIONS:
        result = f"i{name[len('nvshmem_int') : -len('_g')]}" if name.endswith("_g") else "i32"
        lines += [
            f"define {result} @{name}({types}) alwaysinline {{",
            f'  call void asm sideeffect "// {name}", "~{{memory}}"()',
            f"  ret {result} 0",
            "}",
        ]
    (tmp_path / nvshmem_library.NAME).write_text("\n".join(lines))
    monkeypatch.setenv(nvshmem_library.FOLDER_VARIABLE, str(tmp_path))
    for turn in range(2):
        nvshmem_library.find.cache_clear()
        nvshmem_library.checksum.cache_clear()
        if turn == 0:
            yield
