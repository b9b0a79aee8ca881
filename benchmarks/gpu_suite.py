"""Every GPU test of the project, several at a time, at one commit.

    PYTHONPATH=src python benchmarks/gpu_suite.py [--seconds 580] [--rest [COMMIT]]

`make test-gpu` runs them one after the other, each on GPUs of its own; most of that time goes into
compiling. Here tests share GPUs, in processes of their own: contexts take turns on a device, so
what waits for a peer still comes to its end, and only times mean nothing. What took long the last
time begins first. On a single GPU ranks share it, too (WEFT_SHARE_GPUS): answers are checked; what
takes NCCL fails there. Writes results/gpu_suite_<gpus>.json as it goes, a row for each test; with
--rest those stay that have passed at this commit, or at the one named, which their rows then say,
and the others run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from weft.tune.provenance import provenance, results_name, write_json

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAIR = 2
# Processes beside each other: on all GPUs, on each pair of them, and on a pair that has no others.
ON_ALL, ON_PAIR, ON_LONE_PAIR = 3, 5, 9
# Short tests share a process, up to so many seconds; of one that was never run nothing is known.
TOGETHER_S, UNKNOWN_S = 60.0, 20.0
# How long what is stopped may take to stop its own.
GRACE_S = 15.0
# Less is not worth beginning one for.
LEAST_S = 15.0


def collected(which: str) -> list[str]:
    """The GPU tests that `pairs` of GPUs are enough for, or that need `larger` numbers."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q"]
    command += ["--gpu-tests", which]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if "::" in line]


def jobs_of(tests: Iterable[str], seconds: dict[str, float]) -> list[list[str]]:
    """Tests that share a process, the longest first: what is long has one of its own."""
    jobs: list[tuple[float, list[str]]] = []
    open_jobs: dict[str, tuple[float, list[str]]] = {}
    for test in tests:
        file, took = test.partition("::")[0], seconds.get(test, UNKNOWN_S)
        total, together = open_jobs.pop(file, (0.0, []))
        if together and total + took > TOGETHER_S:
            jobs.append((total, together))
            total, together = 0.0, []
        open_jobs[file] = (total + took, [*together, test])
    return [job for _, job in sorted([*jobs, *open_jobs.values()], key=lambda one: -one[0])]


def stop(process: subprocess.Popen) -> None:
    """With the ranks that its tests have started, which would keep the GPUs busy: torchrun ends its
    own when it is told to, and they have sessions of their own."""
    with contextlib.suppress(ProcessLookupError):  # there is none of the group any more
        os.killpg(process.pid, signal.SIGTERM)
        until = time.time() + GRACE_S
        while time.time() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows_of(report: Path, job: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each test of a job; what the report does not tell of did not end."""
    cases = xml.parse(report).getroot().iter("testcase") if report.exists() else ()
    told = {case.get("name"): case for case in cases}
    for test in job:
        case = told.get(test.rpartition("::")[2])
        row: dict[str, Any] = {"test": test, "outcome": "not ended"}
        if case is not None:
            bad = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
            row["outcome"] = "passed"
            row["seconds"] = round(float(case.get("time", 0)), 1)
            if bad is not None:
                row["outcome"] = "skipped" if bad.tag == "skipped" else "failed"
                why = bad.text or bad.get("message") or ""
                why = why.replace(str(ROOT), "")
                row["why"] = why if len(why) < 6000 else f"{why[:3000]}\n..\n{why[-3000:]}"
        yield row


class Suite:
    """Jobs that wait, and rows of those that have ended."""

    def __init__(self, seconds: float, path: Path, whiches: Iterable[str], rest: str) -> None:
        self.until, self.path = time.time() + seconds, path
        where_from = provenance()
        passed, took = [], {}
        for file in sorted(RESULTS.glob("gpu_suite_*.json")):
            last = json.loads(file.read_text())
            took |= {row["test"]: row["seconds"] for row in last["rows"] if "seconds" in row}
            at = last.get("commit")
            if rest and file.name == path.name and at in (rest, where_from["commit"]):
                passed = [row for row in last["rows"] if row["outcome"] == "passed"]
                if at != where_from["commit"]:
                    passed = [{"commit": at, **row} for row in passed]
        there = {row["test"] for row in passed}
        self.jobs = {
            which: jobs_of((test for test in collected(which) if test not in there), took)
            for which in whiches
        }
        self.document: dict[str, Any] = {
            "what": "every GPU test at one commit, several at a time on the same GPUs, so seconds "
            "are no measure",
            **where_from, "rows": passed,
        }  # fmt: skip
        self._lock = threading.Lock()

    def work(self, which: str, gpus: str) -> None:
        """One worker: job after job on these GPUs."""
        while True:
            with self._lock:
                if not self.jobs[which]:
                    return
                job = self.jobs[which].pop(0)
            left = self.until - time.time()
            rows = [{"test": test, "outcome": "not begun"} for test in job]
            if left > LEAST_S:
                rows = self._run(job, gpus, left)
            with self._lock:
                self.document["rows"] += rows
                write_json(self.path, self.document)
            counts = Counter(row["outcome"] for row in rows)
            told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
            print(f"{gpus:8} {told:20} {job[0][-80:]}", flush=True)

    def _run(self, job: list[str], gpus: str, left: float) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += [f"--junitxml={report}", *job]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                stop(process)
            return list(rows_of(report, job))


def main() -> None:
    parser = argparse.ArgumentParser(description="every GPU test, several at a time")
    parser.add_argument("--seconds", type=float, default=580.0, help="begin nothing after these")
    parser.add_argument("--rest", metavar="COMMIT", nargs="?", const="this", default="",
                        help="what has not passed at this commit, or at that one")  # fmt: skip
    options = parser.parse_args()
    count = torch.cuda.device_count()
    if count < 1:
        parser.error("it takes a GPU; none is here")
    if count < PAIR:
        os.environ["WEFT_SHARE_GPUS"] = "1"
    gpus = [str(i) for i in range(count)]
    name = results_name("gpu_suite", torch.cuda.get_device_name(0), count)
    places = [("larger", ",".join(gpus))] * (ON_ALL if count > PAIR else 0)
    beside = ON_PAIR if count > PAIR else ON_LONE_PAIR
    for first in range(0, max(1, count - 1), PAIR):
        places += [("pairs", ",".join(gpus[first : first + PAIR]))] * beside
    path = Path(os.environ.get("OUT", RESULTS)) / name
    suite = Suite(options.seconds, path, dict.fromkeys(which for which, _ in places), options.rest)
    workers = [threading.Thread(target=suite.work, args=place) for place in places]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    counts = Counter(row["outcome"] for row in suite.document["rows"])
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    sys.exit(set(counts) != {"passed"})


if __name__ == "__main__":
    main()
