"""One compiled kernel's stages, parsed, with the source's waits numbered through all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.base.errors import UsageError
from weft.verify import ptx, ttgir
from weft.verify.places import Key, Loc, key_of
from weft.verify.waits import GroupedWaits, Wait, find_waits

_FILE = re.compile(r'loc\("([^"]+)":\d+:\d+')


class Stages:
    """The stages of one kernel.

    `source` is what was written, in the stage named `written`: TTIR, or TTGIR for Gluon. `lowered`
    is what Triton made of TTIR, None for Gluon or where it is missing. `groups` numbers the waits
    of the source by the place of their looks; `members` are the waits of each number: several
    where one line was unrolled. `lost` are the numbers that some stage has dropped.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.written = "ttir" if "ttir" in texts else "ttgir"
        if self.written not in texts:
            raise UsageError(
                f"no TTIR or TTGIR among the stages {sorted(texts)}: nothing says what was written"
            )
        self.source = ttgir.parse(texts[self.written])
        self.lowered: ttgir.Module | None = None
        if self.written == "ttir" and "ttgir" in texts:
            self.lowered = ttgir.parse(texts["ttgir"])
        self.files: dict[str, str] = {
            file.rsplit("/", 1)[-1]: file
            for stage in ("ttir", "ttgir")
            for file in _FILE.findall(texts.get(stage, ""))
        }
        self.program: ptx.Program | None = None
        if "ptx" in texts:
            modules = (self.source, self.latest)
            known = {key_of(one.chain) for module in modules for one in module.kernel.walk()}
            self.program = ptx.parse(texts["ptx"], self.files, known)
        self.waits = find_waits(self.source.kernel)
        self.groups: dict[Key, int] = {}
        self.members: list[list[Wait]] = []
        self._number_waits()
        self.lost: set[int] = set()

    @property
    def latest(self) -> ttgir.Module:
        """The last stage before LLVM."""
        return self.lowered or self.source

    @property
    def num_warps(self) -> int:
        match = re.search(r'"ttg\.num-warps" = (\d+)', self.texts.get("ttgir", ""))
        return int(match[1]) if match else 0

    def _number_waits(self) -> None:
        for wait in self.waits:
            known = {self.groups[key] for key in wait.keys if key in self.groups}
            group = min(known) if known else len(self.members)
            if not known:
                self.members.append([])
            self.members[group].append(wait)
            self.groups.update((key, group) for key in wait.keys)

    def grouped(self, module: ttgir.Module) -> GroupedWaits:
        """The waits of one stage, by the source's numbers."""
        return GroupedWaits(find_waits(module.kernel), self.groups)

    def wait_loc(self, group: int) -> Loc:
        return self.members[group][0].loc
