"""Faults planted in a copy of the source, one at a time: do the tests nearest to them notice?

    python tests/faults.py [WORD ...]     those whose file or words hold one of these; all, without

A fault is one text of one file replaced by another that still runs: a comparison turned round, a
part of a key left out, a check that is gone. It is killed if one of its tests fails, and survives
if all pass. The list below grows with what users found that no test had held: plant it, see it
survive, write the test. `tests/test_faults.py` runs all of it; the working tree is never changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_S = 120


@dataclass(frozen=True)
class Fault:
    """`old` occurs once in `file` (below src/weft) and becomes `new`; `breaks` is what is wrong
    then; `tests` are the nodes (below tests) of which one must fail."""

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    def __init__(self, file: str, old: str, new: str, breaks: str, *tests: str) -> None:
        for name, value in zip(self.__annotations__, (file, old, new, breaks, tests)):
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "-", f"{Path(self.file).stem} {self.breaks}").strip("-")


class CannotPlant(Exception):
    """The fault does not fit the source any more, or the tests could not be run with it."""


@dataclass(frozen=True)
class Verdict:
    killed: bool
    seconds: float
    output: str


class Copy:
    """A copy of the source tree in `folder`, in which one fault is planted at a time."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "src"
        shutil.copytree(ROOT / "src" / "weft", self.source / "weft")

    def run(self, *tests: str) -> Verdict:
        """Run these tests with the copy's source, until one fails."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                   "-p", "no:xdist", f"--timeout={LIMIT_S}"]  # fmt: skip
        # Compiled modules are known by size and second: a fault could be taken for what it mends.
        environment = {**os.environ, "PYTHONPATH": str(self.source), "PYTHONDONTWRITEBYTECODE": "1"}
        start = time.monotonic()
        done = subprocess.run(
            [*command, *(str(ROOT / "tests" / test) for test in tests)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S * 5,
        )  # fmt: skip
        output = done.stdout + done.stderr
        ran = re.search(r"\b(\d+) (passed|failed)\b", output)
        if done.returncode not in (0, 1) or not ran:
            raise CannotPlant(f"the tests did not run (pytest ended with {done.returncode}; name "
                              f"tests that exist, are not skipped, and a fault that can be "
                              f"imported):\n{output[-3000:]}")  # fmt: skip
        return Verdict(done.returncode == 1, time.monotonic() - start, output)

    def try_fault(self, fault: Fault) -> Verdict:
        path = self.source / "weft" / fault.file
        text, status = path.read_text(), path.stat()
        if (count := text.count(fault.old)) != 1:
            raise CannotPlant(
                f"src/weft/{fault.file} holds {fault.old!r} {count} times, not once: "
                "give the fault its new text, or drop it if it cannot happen any more"
            )
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            stale.unlink()
        path.write_text(text.replace(fault.old, fault.new))
        try:
            return self.run(*fault.tests)
        finally:
            path.write_text(text)
            os.utime(path, (status.st_atime, status.st_mtime))


SHADOW = "emulator/test_shadow.py::test_the_one_access_that_is_not_ordered_is_found_whichever_it_is"
WRONG = "verify/test_wrong.py::test_found"
REPLAYED = (
    "ops/test_replayed_calls.py::test_a_replay_has_the_operands_and_the_result_of_its_own_call"
)
PROGRAMS = "ops/test_plan.py::test_calls_that_come_again_have_their_own_operands_and_layouts"

FAULTS = [
    # ---- accesses and their order
    Fault("emulator/shadow.py", "if reads is not None and modifies:", "if False and modifies:",
          "an addition behind a plain read is not checked", f"{WRONG}[word_read_plainly]"),
    Fault("emulator/shadow.py", "narrow = Scope.BLOCK in (scope, reach[0])", "narrow = False",
          "block scope taken for device scope", f"{WRONG}[block_scoped_counter]"),
    Fault("emulator/shadow.py",
          "unordered = self._unordered(accesses, clock, own)\n            if len(unordered)",
          "unordered = self._unordered(accesses, clock, own)[:1]\n            if len(unordered)",
          "of several unordered reads the latest alone is kept", f"{SHADOW}[3-False]"),
    Fault("emulator/synchronising.py", "if replaces:\n            word.published.clear()",
          "if False:\n            word.published.clear()",
          "a store to a word does not end what releases of it publish",
          f"{WRONG}[set_over_a_release]"),
    Fault("verify/exploration/partial_order.py", "gone = ends or not passes",
          "gone = not passes", "a store to a word before or behind a wait is one case",
          "verify/exploration/test_exploration_search.py::"
          "test_a_store_to_a_word_ends_what_its_releases_hand_on"),
    # ---- what is checked of compiled kernels, and of plans
    Fault("verify/widths.py", "mask = self.of(store.operands[2])",
          "mask = self.of(store.operands[1])", "a store's value taken for its mask",
          "verify/test_compiled.py::test_a_translation_without_hint_falls_to_two_bytes"
          "[no hint, mask-cuda:90]"),
    Fault("ir/device_rules.py", 'joins.get(stream, -1) < i:', 'stream not in joins:',
          "a join before a stream's last step is enough",
          "ir/test_legality.py::test_a_copy_takes_tokens_of_the_kernel_that_it_is_queued_behind"),
    # ---- memory, and what a wait in vain leaves behind
    Fault("runtime/slots.py", " and have.counts[name][1] == dtype", "",
          "words of 32 bits serve for 64",
          "runtime/test_slots.py::test_words_of_another_size_are_other_words"),
    Fault("runtime/heap.py", "if self._signal_bottom - size < self._data_top:",
          "if self._signal_bottom - size < 0:", "signals grow into data",
          "runtime/test_heap.py::test_blocks_never_overlap_and_signals_are_never_reused"),
    Fault("language/portable/give_up.py", "tl.atomic_xchg(abort, 1,", "tl.atomic_xchg(abort, 0,",
          "a wait that gives up does not tell others to",
          "language/test_give_up.py::test_who_gives_up_says_so_and_ends_every_other_wait"),
    # ---- keys by which calls are replayed
    Fault("ops/_products.py", "self.replays.run(\n            (a.data_ptr(), b.data_ptr(),",
          "self.replays.run(\n            (a.data_ptr(),",
          "a product's replays without b's address", f"{REPLAYED}[gemm_rs-push]"),
    Fault("ops/_ag_gemm_call.py", "(a.data_ptr(), b.data_ptr(), out.data_ptr(), *addresses, slot)",
          "(b.data_ptr(), out.data_ptr(), *addresses, slot)",
          "AG+GEMM's replays without a's address", f"{REPLAYED}[ag_gemm-push]"),
    Fault("ops/_plan.py", "given = (*tensors, *self.plan.results)", "given = self.plan.results",
          "a program's replays without the addresses of what it is given", f"{PROGRAMS}[ag_gemm]"),
    Fault("ops/_plan.py", "return tensor.shape, tensor.stride(), tensor.dtype",
          "return tensor.shape, tensor.dtype", "a program is one for all strides",
          f"{PROGRAMS}[gemm_rs]"),
    Fault("ops/flash_decode.py", "(*addresses, scale, slot), lambda", "(*addresses, slot), lambda",
          "a decoding call's replays without the scale",
          "ops/test_replayed_calls.py::test_a_replay_has_the_scale_of_its_own_call"),
]  # fmt: skip


def chosen(words: list[str]) -> Iterator[Fault]:
    for fault in FAULTS:
        if not words or any(word in f"{fault.file} {fault.name}" for word in words):
            yield fault


def main(words: list[str]) -> int:
    survived = 0
    with tempfile.TemporaryDirectory(prefix="weft-faults-") as folder:
        copy = Copy(Path(folder))
        for fault in chosen(words):
            try:
                verdict = copy.try_fault(fault)
                said = "killed  " if verdict.killed else "SURVIVED"
                seconds = f"{verdict.seconds:5.1f} s"
            except CannotPlant as error:
                verdict, said, seconds = None, "NO RUN  ", f"\n{error}\n"
            survived += verdict is None or not verdict.killed
            print(f"{said} {seconds}  {fault.file}: {fault.breaks}", flush=True)
    print(f"{sum(1 for _ in chosen(words))} faults, {survived} not killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
