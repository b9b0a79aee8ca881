"""The post-compile check of PTX: spins, loads, releases and orders."""

from __future__ import annotations

from collections import Counter

from weft.ir.ttir import Op
from weft.verify import events, flow, machine, ttgir
from weft.verify.check_triton import Guarded, hoisted, load_origins, lose
from weft.verify.findings import (
    DELETED_ATOMIC,
    NO_BARRIER,
    UNFINISHED_STORE,
    WEAK_ORDER,
    CompiledReport,
)
from weft.verify.places import Key, is_known, key_of
from weft.verify.ptx import Instruction, Program
from weft.verify.stages import Stages
from weft.verify.waits import is_library_wait


def check(stages: Stages, report: CompiledReport) -> None:
    """Everything that is asked of the assembly."""
    program = stages.program
    if program is None:
        return
    if not program.has_lines:
        report.note(
            "the ptx has no line information (TRITON_DISABLE_LINE_INFO?): waits and loads were "
            "checked as far as TTGIR only"
        )
        return
    sources = _sources(stages)
    graph = machine.graph_of(program, sources)
    _check_spins(stages, program, sources, report)
    _check_loads(stages, program, graph, report)
    _check_releases(graph, report)
    _check_orders(stages, program, report)


# ---------------------------------------------------------------------------------------------
# Places of the source in the assembly


def _sources(stages: Stages) -> machine.Sources:
    sources = machine.Sources(num_warps=stages.num_warps)
    for group, members in enumerate(stages.members):
        looks = {poll for wait in members for poll in wait.looks}
        for poll in (poll for wait in members for poll in wait.polls):
            key = key_of(poll.chain)
            sources.polls[key] = sources.polls.get(key, frozenset()) | {group}
            if poll in looks:
                sources.looks.add(key)
    tiles: set[Key] = set()
    for operation in [*stages.source.kernel.walk(), *stages.latest.kernel.walk()]:
        ordered, key = events.order_of(operation), key_of(operation.chain)
        if events.is_asm(operation):
            sources.assembly.add(key)
        if ordered is None and events.base_name(operation) not in events.STORES:
            continue
        is_tile = any(one.is_tensor or "memdesc" in one.text for one in operation.types)
        (tiles if is_tile else sources.scalars).add(key)
        if ordered is not None and _publishes(stages, operation, ordered):
            sources.releases.add(key)
    sources.scalars -= tiles
    return sources


def _publishes(stages: Stages, operation: Op, ordered: events.Ordered) -> bool:
    """Is this a signal? A tile of atomics with Triton's default order adds up partial sums."""
    if ordered.order not in ("release", "acq_rel") or key_of(operation.chain) in stages.groups:
        return False
    return not ordered.is_tile or ordered.scope == "sys"


# ---------------------------------------------------------------------------------------------
# Waits and loads


def _check_spins(
    stages: Stages, program: Program, sources: machine.Sources, report: CompiledReport
) -> None:
    spins = machine.spins(program, sources)
    polls = Counter(
        group
        for one in program.instructions
        if machine.is_poll(one, sources)
        for group in machine.groups_of(one, sources)
    )
    report.waits["ptx"] = sum(
        min(spins.get(group, 0), len(members)) for group, members in enumerate(stages.members)
    )
    for group, members in enumerate(stages.members):
        count = spins.get(group, 0)
        is_followed = members[0].keys and not any(is_library_wait(wait.at) for wait in members)
        if group in stages.lost or not is_followed or count >= len(members):
            continue
        if not count and polls[group]:
            how = "the poll is made once and no longer in a loop: it ends at once or never"
        else:
            how = (
                f"{len(members)} in {stages.written.upper()}, {count} in the "
                f"PTX: the poll is gone, or was moved out of its loop"
            )
        lose(stages, group, "ptx", how, report)


def _check_loads(
    stages: Stages, program: Program, graph: flow.Graph, report: CompiledReport
) -> None:
    before = Guarded.of(stages.latest, stages.grouped(stages.latest), precise=False)
    required: dict[Key, frozenset[int]] = {}
    for place, load in before.loads.items():
        key = key_of(load.chain)
        found = before.before.get(place, frozenset())
        required[key] = required[key] & found if key in required else found
    origins = load_origins(graph)
    for keys, found in flow.waits_before(graph).items():
        one = origins[keys]
        each = [required[key] for key in one.keys if key in required]
        needs: frozenset[int] = frozenset.intersection(*each) if each else frozenset()
        if not any(map(is_known, one.keys)):
            # It lost its place: it needs what all loads through the same arguments need.
            needs = before.through(_pointer_arguments(stages.latest.kernel, program, one))
        for group in sorted(needs - found - stages.lost):
            how = "a path leads to the load around the wait"
            hoisted(stages, group, "ptx", one.loc, "", how, report)


def _pointer_arguments(function: ttgir.Function, program: Program, one: Instruction) -> set[int]:
    kinds = [argument.type for argument in function.arguments]
    return {i for i in program.parameters(one) if i < len(kinds) and kinds[i].is_pointer}


# ---------------------------------------------------------------------------------------------
# Releases

_RELEASE_TEXTS = {
    machine.NO_BARRIER: (
        NO_BARRIER,
        "one thread releases, with no block barrier after the block's stores: only that "
        "thread's own stores are ordered",
        "publish with wl.notify, or put tl.debug_barrier() before the releasing atomic",
    ),
    machine.NOT_COMPLETE: (
        UNFINISHED_STORE,
        "a TMA store is not complete when the release is made: the signal overtakes the data",
        "publish with wl.notify, which waits with cp.async.bulk.wait_group 0 first",
    ),
}


def _check_releases(graph: flow.Graph, report: CompiledReport) -> None:
    for exposed in machine.exposed_releases(graph):
        kind, message, remedy = _RELEASE_TEXTS[exposed.lacks]
        store = (exposed.store.loc, "the store that may still be unseen")
        report.add(kind, "ptx", message, (exposed.release.loc, "publishes"), store, remedy=remedy)


# ---------------------------------------------------------------------------------------------
# Orders and scopes

_STRENGTH = {
    "relaxed": {"relaxed", "acquire", "release", "acq_rel", "sc", "volatile"},
    "acquire": {"acquire", "acq_rel", "sc"},
    "release": {"release", "acq_rel", "sc"},
    "acq_rel": {"acq_rel", "sc"},
}
_REACH = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}


def _check_orders(stages: Stages, program: Program, report: CompiledReport) -> None:
    """Each ordered access of the source is there, at least as strong as written."""
    atomics = [
        one
        for one in program.instructions
        if one.is_global and one.base != "multimem" or one.base in ("fence", "membar")
    ]
    emitted: dict[Key, list[Instruction]] = {}
    for one in atomics:
        for key in one.keys:
            emitted.setdefault(key, []).append(one)
    for operation in stages.source.kernel.walk():
        ordered = events.order_of(operation)
        if ordered is not None:
            found = emitted.get(key_of(operation.chain), [])
            if not found and all(is_known(one.loc) for one in atomics):
                _deleted(operation, ordered, report)
            elif found and not _is_kept(ordered, found):
                _weakened(operation, ordered, found, report)
        elif events.is_asm(operation):
            _check_assembly_text(stages, program, operation, report)


def _is_kept(ordered: events.Ordered, found: list[Instruction]) -> bool:
    """Every access of the place is as strong as written, or a fence of it is."""
    fences = [one for one in found if one.base in ("fence", "membar")]
    if any(_at_least(one, ordered) for one in fences):
        return True
    return all(_at_least(one, ordered) for one in found)


def _at_least(one: Instruction, ordered: events.Ordered) -> bool:
    """Is `one` as strong as written?"""
    reaches = _REACH.get(one.scope, 3) >= _REACH.get(ordered.scope, 0)
    return reaches and one.order in _STRENGTH.get(ordered.order, {one.order})


def _deleted(operation: Op, ordered: events.Ordered, report: CompiledReport) -> None:
    if ordered.order == "relaxed" or not is_known(operation.chain):
        return
    report.add(
        DELETED_ATOMIC,
        "ptx",
        f"{operation.name} ({ordered.order}, {ordered.scope}) is not in the PTX: the compiler"
        " deleted it, and its order with it",
        (operation.chain, "accesses"),
        remedy="use the result, in a wait or a condition, or use wl.load",
    )


def _weakened(
    operation: Op, ordered: events.Ordered, found: list[Instruction], report: CompiledReport
) -> None:
    got = ", ".join(sorted({f"{one.order}.{one.scope or '?'}" for one in found}))
    report.add(
        WEAK_ORDER,
        "ptx",
        f"{operation.name} is written {ordered.order}.{ordered.scope} and emitted as {got}",
        (operation.chain, "accesses"),
        remedy="use wl.notify, wl.wait or wl.atomic_add",
    )


def _check_assembly_text(
    stages: Stages, program: Program, operation: Op, report: CompiledReport
) -> None:
    """Each memory instruction of inline assembly is still there."""
    if stages.groups.get(key_of(operation.chain)) in stages.lost:
        return
    there = {one.opcode for one in program.instructions if one.asm_block}
    for opcode in sorted(set(events.asm_memory(operation)) - there):
        report.add(
            DELETED_ATOMIC,
            "ptx",
            f"{opcode} of inline assembly is not in the PTX",
            (operation.chain, "accesses"),
            remedy="pass is_pure=False, and constrain with ~{memory}",
        )
