"""Start one process per GPU, run a function on each, and keep a stuck one from holding the rest."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("OUT", Path(__file__).parent / "results"))


def _child(local_rank: int, main: Callable, num_ranks: int, port: int, args: tuple) -> None:
    import torch

    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(num_ranks),
    )
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(local_rank)
    main(local_rank, *args)
    sys.stdout.flush()
    sys.stderr.flush()
    # Leave without teardown: a benchmark's answer must not hang in a library's destructor.
    os._exit(0)


def run_on_gpus(
    main: Callable, num_ranks: int, *args: Any, timeout_s: float = 300.0, tolerate: bool = False
) -> list[int | None]:
    """Run `main(rank, *args)` in `num_ranks` processes; returns their exit codes.

    What has not ended after `timeout_s` is killed and its exit code is None. A failure raises
    unless `tolerate` is set.
    """
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    children = [
        context.Process(target=_child, args=(rank, main, num_ranks, port, args))
        for rank in range(num_ranks)
    ]
    for child in children:
        child.start()
    deadline = time.monotonic() + timeout_s
    while any(child.is_alive() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
        if not tolerate and any(child.exitcode not in (None, 0) for child in children):
            # The others wait for the one that failed: a few seconds to say so, then enough.
            deadline = min(deadline, time.monotonic() + 5)
    codes = [child.exitcode for child in children]
    for child in children:
        if child.exitcode is None:
            child.kill()
        child.join()
    if not tolerate and any(code != 0 for code in codes):
        raise RuntimeError(f"the processes of {main.__name__} ended with {codes}")
    return codes


def provenance() -> dict[str, Any]:
    """What a result must say about where it comes from."""
    import torch
    import triton

    def output(*command: str) -> str:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=20
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": driver.splitlines()[0] if driver else "",
        "commit": os.environ.get("WEFT_COMMIT") or output("git", "rev-parse", "--short", "HEAD"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
    }


def save(name: str, results: dict[str, Any], num_ranks: int) -> Path:
    """Write `name_h200x4.json` beside the other results: one file per probe and hardware."""
    import torch

    device = torch.cuda.get_device_name(0).split()[-1].lower()
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}_{device}x{num_ranks}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path
