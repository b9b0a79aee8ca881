"""The post-compile check from source to TTGIR: what Triton's own passes did to waits and loads."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from weft.ir.ttir import Op
from weft.verify import events, flow, kernel_flow, ttgir
from weft.verify.findings import (
    DELETED_ATOMIC,
    EARLY_WAIT,
    HOISTED_LOAD,
    LOST_WAIT,
    PURE_WAIT,
    SAFE_WAIT,
    UNORDERED_WAIT,
    CompiledReport,
)
from weft.verify.places import NOWHERE, Loc
from weft.verify.stages import Stages
from weft.verify.waits import GroupedWaits, Wait, find_waits


def check(stages: Stages, report: CompiledReport) -> None:
    """Waits are all there; loads are behind them; the next wait is behind the stores."""
    report.waits[stages.written] = len(stages.waits)
    for function in stages.source.functions.values():
        if function is not stages.source.kernel and find_waits(function):
            report.note(f"the waits of {function.name}, a noinline function, were not followed")
    _check_pure_assembly(stages, report)
    _check_unordered_waits(stages, report)
    if stages.lowered is None:
        return
    grouped = stages.grouped(stages.lowered)
    _check_lost_waits(stages, stages.lowered, grouped, report)
    graph = kernel_flow.graph_of(stages.lowered, grouped, precise=True)
    _check_loads(stages, stages.lowered, graph, report)
    _check_early_waits(stages, graph, report)


def lose(stages: Stages, group: int, stage: str, message: str, report: CompiledReport) -> None:
    """A wait is gone; nothing more is asked of it."""
    stages.lost.add(group)
    report.add(
        LOST_WAIT,
        stage,
        message,
        (stages.wait_loc(group), "waits"),
        remedy=SAFE_WAIT + "; not in a loop with warp_specialize=True",
    )


def hoisted(
    stages: Stages, group: int, stage: str, at: Loc, names: str, how: str, report: CompiledReport
) -> None:
    """A load is ahead of a wait. `names` are the arguments it reads from, where they are known."""
    what = f"of {names}" if names else "after the wait"
    verb = "is issued" if stage == "ttgir" else "may be issued"
    report.add(
        HOISTED_LOAD,
        stage,
        f"the load {what} {verb} before the wait that guards it: {how}",
        (at, "reads"),
        (stages.wait_loc(group), "the wait before it in the source"),
        remedy=SAFE_WAIT,
        tensor=names or None,
    )


@dataclass
class Guarded:
    """For each load of a stage: the waits that every path to it has passed (`before`), and those
    between two runs of it (`between`)."""

    function: ttgir.Function
    before: dict[Hashable, frozenset[int]]
    between: dict[Hashable, frozenset[int]]
    loads: dict[Hashable, Op]

    @classmethod
    def of(cls, module: ttgir.Module, waits: GroupedWaits, *, precise: bool = True) -> Guarded:
        graph = kernel_flow.graph_of(module, waits, precise=precise, at_looks=not precise)
        return cls(
            module.kernel, flow.waits_before(graph), flow.waits_between(graph), load_origins(graph)
        )

    def through(self, bases: set[int]) -> frozenset[int]:
        """What every load of this stage through one of these arguments has passed."""
        needed = [
            self.before.get(key, frozenset())
            for key, origin in self.loads.items()
            if origin.operands and self.function.bases(origin.operands[0]) & bases
        ]
        return frozenset.intersection(*needed) if needed and bases else frozenset()


def load_origins(graph: flow.Graph) -> dict:
    """One operation, or instruction, for each key of a load."""
    return {node.key: node.origin for node in graph.nodes if node.kind == flow.LOAD}


def _check_pure_assembly(stages: Stages, report: CompiledReport) -> None:
    """Assembly that reads memory and calls itself pure may be dropped at any stage."""
    module = ttgir.parse(stages.texts["source"]) if "source" in stages.texts else stages.source
    callers = _call_sites(module)
    kept = {events.asm_text(one) for one in stages.source.kernel.walk() if events.is_asm(one)}
    for function in module.functions.values():
        for operation in function.walk():
            if not events.is_asm(operation) or not events.asm_is_pure(operation):
                continue
            if not events.asm_memory(operation):
                continue
            is_there = events.asm_text(operation) in kept
            report.add(
                PURE_WAIT if events.asm_reads(operation) else DELETED_ATOMIC,
                stages.written,
                "assembly that accesses memory is declared pure"
                + (": it may be dropped, repeated or moved" if is_there else " and was dropped"),
                (operation.chain + callers.get(function.name, NOWHERE), "is_pure=True"),
                remedy="pass is_pure=False to tl.inline_asm_elementwise, with ~{memory}",
            )


def _call_sites(module: ttgir.Module) -> dict[str, Loc]:
    """For each function, the place of a chain of calls that leads to it."""
    direct: dict[str, tuple[str, Loc]] = {}
    for function in module.functions.values():
        for operation in function.walk():
            callee = module.callee(operation) if operation.name == "tt.call" else None
            if callee is not None:
                direct.setdefault(callee.name, (function.name, operation.chain))
    found: dict[str, Loc] = {}
    for name in direct:
        chain: Loc = NOWHERE
        current, seen = name, set()
        while current in direct and current not in seen:
            seen.add(current)
            current, loc = direct[current]
            chain += loc
        found[name] = chain
    return found


def _check_unordered_waits(stages: Stages, report: CompiledReport) -> None:
    for group, members in enumerate(stages.members):
        wait = members[0]
        is_plain = all(events.base_name(poll) == "load" for poll in wait.polls)
        if wait.ordered or not is_plain or _acquires_after(stages.source.kernel, wait):
            continue
        report.add(
            UNORDERED_WAIT,
            stages.written,
            "a spin on tl.load orders nothing: what is read after it may be older than the signal",
            (stages.wait_loc(group), "spins on a plain load"),
            remedy=SAFE_WAIT,
        )


def _acquires_after(function: ttgir.Function, wait: Wait) -> bool:
    behind = itertools.dropwhile(lambda one: one is not wait.at, function.walk())
    for operation in itertools.islice(behind, 1, None):
        ordered = events.order_of(operation)
        if ordered is not None and ordered.order in ("acquire", "acq_rel"):
            return True
        if events.is_asm(operation) and re.search(
            r"acquire|fence|membar|buffer_inv", events.asm_text(operation)
        ):
            return True
    return False


def _check_lost_waits(
    stages: Stages, lowered: ttgir.Module, grouped: GroupedWaits, report: CompiledReport
) -> None:
    waits = find_waits(lowered.kernel)
    report.waits["ttgir"] = len(waits)
    counts = Counter(grouped.by_operation.values())
    unplaced = sum(not wait.keys for wait in waits)
    for group, members in enumerate(stages.members):
        if len(members) - counts[group] > unplaced:
            seen = f"{len(members)} in TTIR, {counts[group]} in TTGIR"
            lose(stages, group, "ttgir", f"{seen}: Triton's passes dropped the wait", report)


def _check_loads(
    stages: Stages, lowered: ttgir.Module, graph: flow.Graph, report: CompiledReport
) -> None:
    before = Guarded.of(stages.source, stages.grouped(stages.source))
    between = flow.waits_between(graph)
    origins = load_origins(graph)
    for key, found in flow.waits_before(graph).items():
        origin = origins[key]
        bases = lowered.kernel.bases(origin.operands[0]) if origin.operands else set()
        # A load whose place the source does not know is followed by the address it reads.
        required = before.before[key] if key in before.before else before.through(bases)
        again = before.between.get(key, frozenset()) - required.difference(found)
        ahead = [(group, "a path leads to the load around the wait") for group in required - found]
        if key in between:
            ahead += [
                (group, "the load of a later round runs before its wait")
                for group in again - between[key]
            ]
        names = ", ".join(lowered.kernel.arguments[i].name for i in sorted(bases))
        for group, how in sorted(ahead):
            if group not in stages.lost:
                hoisted(stages, group, "ttgir", origin.chain, names, how, report)


def _check_early_waits(stages: Stages, graph: flow.Graph, report: CompiledReport) -> None:
    """Does the next round's wait run before this round's stores? Then progress that depends on
    those stores never comes."""
    source = flow.stores_between(
        kernel_flow.graph_of(stages.source, stages.grouped(stages.source), precise=False)
    )
    emitted = flow.stores_between(graph)
    for group, members in enumerate(stages.members):
        if len(members) != 1 or group in stages.lost:
            continue
        required = [
            passed for (first, second), passed in source.get(group, {}).items() if first is second
        ]
        for (first, second), passed in emitted.get(group, {}).items():
            missing = sorted(required[0] - passed) if required else []
            if first is second or not missing:
                continue
            report.add(
                EARLY_WAIT,
                "ttgir",
                "the next round's wait runs before this round's store: a deadlock where the "
                "signal depends on that store",
                (stages.wait_loc(group), "waits a round ahead"),
                (missing[0], "the store that it overtakes"),
                remedy="write the persistent loop with flatten=False and the wait in it",
            )
