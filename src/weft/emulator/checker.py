"""What the accesses of one machine are checked against, and the watches of what happens."""

from __future__ import annotations

from collections.abc import Sequence

from weft.emulator.choices import Chooser, Sight
from weft.emulator.clocks import Agents
from weft.emulator.findings import Findings
from weft.emulator.ledger import Ledger
from weft.emulator.memory import Memory
from weft.emulator.observation import Observation, Observer, Watch
from weft.emulator.shadow import Shadow


class Checker:
    """Memory and its shadow, the agents' clocks, what was found.

    With `is_on` accesses are checked for races, bounds and uninitialised reads. `watches` are
    called for all that synchronises; `sight` says which value of a word an atomic load sees.
    """

    def __init__(
        self, name: str, num_ranks: int, is_on: bool, chooser: Chooser,
        observers: Sequence[Observer],
    ) -> None:  # fmt: skip
        self.is_on = is_on
        self.memory = Memory()
        self.agents = Agents()
        self.shadow = Shadow(self.agents)
        self.watches: list[Watch] = []
        self.findings = Findings(name, num_ranks, self.agents, self.watches)
        self.sight = chooser if isinstance(chooser, Sight) else None
        self.ledger: Ledger | None = None
        if isinstance(chooser, Watch):
            self.watches.append(chooser)
        if observers:
            self.watches.append(Observation(self.agents, list(observers)))
        if is_on:  # behind the observers: they hear of a signal before its fault
            self.ledger = Ledger(self.agents, self.shadow, self.findings)
            self.watches.append(self.ledger)
            self.findings.weak_link = self.ledger.weak_link
            self.findings.overwritten = self.shadow.overwritten.get
