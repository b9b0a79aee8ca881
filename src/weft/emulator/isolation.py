"""What a process owns and emulated ranks must not share: environment, modules, random state,
lines on standard output.

Ranks are threads of one process and one runs at a time. `Isolation.switch(rank)` is called right
before a thread of another rank goes on; it puts the previous rank's state aside and the next
one's in place. Most of it is a change of references; only random states are copied.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from types import ModuleType
from typing import Any, TextIO

import numpy as np
import torch

from weft.base.topology import Topology
from weft.base.user_place import is_users

_MODULE_LOCKS: dict = getattr(importlib._bootstrap, "_module_locks", {})  # type: ignore

# In a CUDA build of torch 2.11, where there is no device, whatever traces first makes a guard that
# ends with its thread, and the next one falls over it: the first is made here, not by a rank.
if torch.backends.cuda.is_built() and not torch.cuda.is_available():
    getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)()

TORCH_DEFAULT_SEED = 67280421310721
MASTER_ADDRESS, MASTER_PORT = "127.0.0.1", "29500"


class _Lines:
    """A rank's standard output: what it prints comes in whole lines, as that of a process does,
    though another rank may go on while `print` makes text of a tensor."""

    def __init__(self, process: TextIO) -> None:
        self.process, self.text = process, ""

    def write(self, text: str) -> int:
        whole, newline, self.text = (self.text + text).rpartition("\n")
        if newline:
            self.process.write(whole + newline)
        return len(text)

    def flush(self) -> None:
        self.process.write(self.text)
        self.process.flush()
        self.text = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.process, name)


def process_stdout() -> TextIO:
    """The standard output that ranks share."""
    return getattr(sys.stdout, "process", sys.stdout)


class _RankState:
    """One rank's process-wide state while another rank runs."""

    def __init__(self, environment: dict, seed: int) -> None:
        self.environment = environment
        self.argv = sys.argv
        self.stdout: Any = sys.stdout
        self.modules: dict[str, ModuleType] = {}
        # A fresh process starts torch from one fixed seed, and the others from entropy: here
        # from the session's seed and the rank, so that a run can be repeated.
        self.torch_state = torch.Generator().manual_seed(TORCH_DEFAULT_SEED).get_state()
        self.numpy_generator = np.random.MT19937(seed)
        self.python_state = random.Random(seed).getstate()
        self.default_dtype = torch.get_default_dtype()


class Isolation:
    """The states of all ranks, and the process's own behind them.

    `local_root` is the script's folder: modules imported from below it, and from packages that are
    not installed, are kept per rank.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        seed: int = 0,
        local_root: str | None = None,
    ) -> None:
        self.local_root = None if local_root is None else os.path.join(local_root, "")
        base = dict(os.environ._data)  # type: ignore[attr-defined]
        self.ranks = [
            _RankState({**base, **_launcher_words(rank, topology)}, seed * 65537 + rank)
            for rank in range(topology.num_ranks)
        ]
        self.current: int | None = None
        self.num_modules = 0
        self.known_modules: set[str] = set()

    def start(self) -> None:
        """Put the process's own state aside; ends with `stop`."""
        self.own = _RankState(os.environ._data, 0)  # type: ignore[attr-defined]
        self.own.python_state = random.getstate()
        self.own.torch_state = torch.get_rng_state()
        self.own.numpy_generator = np.random.get_bit_generator()
        self.known_modules = set(sys.modules)
        self.num_modules = len(sys.modules)
        for state in self.ranks:
            state.stdout = _Lines(process_stdout())

    def stop(self) -> None:
        """Give the process its own state back."""
        if self.current is not None:
            self._put_aside(self.ranks[self.current])
            self._put_in_place(self.own)
            self.current = None
        for state in self.ranks:
            if getattr(state.stdout, "text", ""):
                state.stdout.flush()
        _repair_c_environment(self.own.environment, [rank.environment for rank in self.ranks])

    def switch(self, rank: int | None) -> None:
        """Make the process look like `rank`'s; None is the process itself."""
        if rank == self.current:
            return
        self._put_aside(self.own if self.current is None else self.ranks[self.current])
        self._put_in_place(self.own if rank is None else self.ranks[rank])
        self.current = rank

    def _put_aside(self, state: _RankState) -> None:
        state.torch_state = torch.get_rng_state()
        state.python_state = random.getstate()
        state.default_dtype = torch.get_default_dtype()
        state.argv, state.stdout = sys.argv, sys.stdout
        if state is not self.own:
            self._take_modules(state)

    def _put_in_place(self, state: _RankState) -> None:
        environment = state.environment
        os.environ._data = environment  # type: ignore[attr-defined]
        if hasattr(os, "environb"):
            os.environb._data = environment  # type: ignore[attr-defined]
        torch.set_rng_state(state.torch_state)
        np.random.set_bit_generator(state.numpy_generator)
        random.setstate(state.python_state)
        if torch.get_default_dtype() is not state.default_dtype:
            torch.set_default_dtype(state.default_dtype)
        sys.argv, sys.stdout = state.argv, state.stdout
        if state.modules:
            sys.modules.update(state.modules)
            self.num_modules = len(sys.modules)

    def _take_modules(self, state: _RankState) -> None:
        """Move the rank's own modules out of `sys.modules`."""
        if self.local_root is not None and len(sys.modules) != self.num_modules:
            for name in sys.modules.keys() - self.known_modules - state.modules.keys():
                file = getattr(sys.modules[name], "__file__", None) or ""
                if self._is_own(file):
                    state.modules[name] = sys.modules[name]
                else:
                    self.known_modules.add(name)
        for name in state.modules:
            if name == "__main__":
                sys.modules[name] = self.own_main
            else:
                sys.modules.pop(name, None)
                # A rank that waits in the middle of an import holds no other rank up.
                _MODULE_LOCKS.pop(name, None)
        self.num_modules = len(sys.modules)

    def _is_own(self, file: str) -> bool:
        """Is it a process's own module: of the script's folder, or of a package that is not
        installed (of PYTHONPATH, or editable), whose globals a process would have to itself?"""
        if not file or "site-packages" in file:
            return False
        return file.startswith(self.local_root or "\0") or is_users(file) is True

    def set_main(self, rank: int, module: ModuleType) -> None:
        """Make `module` what `rank` sees as `__main__`."""
        self.own_main = sys.modules["__main__"] if not hasattr(self, "own_main") else self.own_main
        self.ranks[rank].modules["__main__"] = module
        if self.current == rank:
            sys.modules["__main__"] = module


def _launcher_words(rank: int, topology: Topology) -> dict:
    """What torchrun puts into the environment of a rank, encoded as `os.environ` keeps it."""
    node, local_rank, local_size = topology.seat(rank)
    num_ranks = topology.num_ranks
    words = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": topology.num_nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": MASTER_ADDRESS,
        "MASTER_PORT": MASTER_PORT,
    }
    encode_key, encode_value = os.environ.encodekey, os.environ.encodevalue
    return {encode_key(key): encode_value(str(value)) for key, value in words.items()}


def _repair_c_environment(own: dict, others: list[dict]) -> None:
    """Ranks that set a variable also changed the C library's environment: undo that."""
    changed = {key for other in others for key in other if other[key] != own.get(key)}
    changed |= {key for other in others for key in own if key not in other}
    for key in changed:
        if key in own:
            os.putenv(key, own[key])
        else:
            os.unsetenv(key)
