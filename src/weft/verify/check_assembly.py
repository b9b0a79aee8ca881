"""The post-compile check of PTX and AMDGCN: spins, loads, releases, orders, widths of stores."""

from __future__ import annotations

from collections import Counter

from weft.ir.ttir import Op
from weft.verify import amdgcn, events, flow, llvm, machine, ptx, ttgir, widths
from weft.verify.check_triton import Guarded, hoisted, load_origins, lose
from weft.verify.findings import (
    DELETED_ATOMIC,
    NARROW_STORE,
    NO_BARRIER,
    UNFINISHED_STORE,
    WEAK_ORDER,
    CompiledReport,
)
from weft.verify.places import Key, Loc, is_known, key_of, place_of
from weft.verify.stages import Stages
from weft.verify.waits import is_library_wait

Ordered = ptx.Instruction | llvm.Atomic


def check(stages: Stages, report: CompiledReport) -> None:
    """Everything that is asked of the assembly."""
    program = stages.program
    if program is None:
        return
    if not program.has_lines:
        report.note(
            f"the {stages.assembly} has no line information (TRITON_DISABLE_LINE_INFO?): waits "
            "and loads were checked as far as TTGIR only"
        )
        return
    sources = _sources(stages)
    graph = machine.graph_of(program, sources)
    _check_spins(stages, program, sources, report)
    _check_loads(stages, program, graph, report)
    _check_releases(stages, program, graph, sources, report)
    _check_orders(stages, program, report)
    _check_widths(stages, program, report)


# ---------------------------------------------------------------------------------------------
# Places of the source in the assembly


def _sources(stages: Stages) -> machine.Sources:
    sources = machine.Sources(num_warps=stages.num_warps)
    for group, members in enumerate(stages.members):
        looks = {poll for wait in members for poll in wait.looks}
        for poll in (poll for wait in members for poll in wait.polls):
            for key in stages.keys(poll):
                sources.polls[key] = sources.polls.get(key, frozenset()) | {group}
                if poll in looks:
                    sources.looks.add(key)
                if events.order_of(poll) is not None:
                    sources.atomic_polls.add(key)
    tiles: set[Key] = set()
    for operation in [*stages.source.kernel.walk(), *stages.latest.kernel.walk()]:
        ordered = events.order_of(operation)
        keys = {stages.key(operation.chain)} if ordered is None else stages.keys(operation)
        if events.is_asm(operation):
            sources.assembly.update(keys)
        if ordered is None and events.base_name(operation) not in events.STORES:
            continue
        is_tile = any(one.is_tensor or "memdesc" in one.text for one in operation.types)
        (tiles if is_tile else sources.scalars).update(keys)
        if ordered is not None and _publishes(stages, operation, ordered):
            sources.releases.update(keys)
    sources.scalars -= tiles
    if stages.is_amd:
        _add_amd_releases(stages, sources, tiles)
    return sources


def _publishes(stages: Stages, operation: Op, ordered: events.Ordered) -> bool:
    """Is this a signal? A tile of atomics with Triton's default order adds up partial sums."""
    if ordered.order not in ("release", "acq_rel") or key_of(operation.chain) in stages.groups:
        return False
    return not ordered.is_tile or ordered.scope == "sys"


def _add_amd_releases(stages: Stages, sources: machine.Sources, tiles: set[Key]) -> None:
    """An address that is an argument has no place of its own: LLVM IR knows the rest."""
    words: dict[Key, tuple[set[str], set[str]]] = {}
    for one in llvm.atomics(stages.texts.get("llir", ""), stages.files):
        is_look = one.key in sources.looks and one.may_be_a_look
        is_release = one.order in ("release", "acq_rel") and not is_look and one.key not in tiles
        publishing, other = words.setdefault(one.key, (set(), set()))
        (publishing if is_release else other).update(one.instructions)
        if is_release:
            sources.releases.add(one.key)
    for key in sources.releases & words.keys():
        publishing, other = words[key]
        if other:
            sources.mixed[key] = (publishing - other, other - publishing)


# ---------------------------------------------------------------------------------------------
# Waits and loads


def _check_spins(
    stages: Stages, program: machine.Program, sources: machine.Sources, report: CompiledReport
) -> None:
    spins = machine.spins(program, sources)
    polls = Counter(
        group
        for one in program.instructions
        if machine.is_poll(one, sources)
        for group in machine.groups_of(one, sources)
    )
    report.waits[stages.assembly] = sum(
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
                f"{stages.assembly.upper()}: the poll is gone, or was moved out of its loop"
            )
        lose(stages, group, stages.assembly, how, report)


def _check_loads(
    stages: Stages, program: machine.Program, graph: flow.Graph, report: CompiledReport
) -> None:
    before = Guarded.of(stages.latest, stages.grouped(stages.latest), precise=False)
    required: dict[Key, frozenset[int]] = {}
    for place, load in before.loads.items():
        key = stages.key(load.chain)
        found = before.before.get(place, frozenset())
        required[key] = required[key] & found if key in required else found
    origins = load_origins(graph)
    for keys, found in flow.waits_before(graph).items():
        one = origins[keys]
        each = [required[key] for key in one.keys if key in required]
        needs: frozenset[int] = frozenset.intersection(*each) if each else frozenset()
        if not any(map(is_known, one.keys)) and isinstance(program, ptx.Program):
            # It lost its place: it needs what all loads through the same arguments need.
            needs = before.through(_pointer_arguments(stages.latest.kernel, program, one))
        for group in sorted(needs - found - stages.lost):
            how = "a path leads to the load around the wait"
            hoisted(stages, group, stages.assembly, one.loc, "", how, report)


def _pointer_arguments(
    function: ttgir.Function, program: ptx.Program, one: ptx.Instruction
) -> set[int]:
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
    machine.IN_FLIGHT: (
        UNFINISHED_STORE,
        "stores may still be in flight when the release is made: no s_waitcnt vmcnt(0) between",
        "publish with wl.notify, or with an atomic whose sem is 'release'",
    ),
    machine.NOT_WRITTEN_BACK: (
        UNFINISHED_STORE,
        "the L2 cache is not written back before the release: other devices read old data",
        "publish with wl.notify, or with an atomic whose sem is 'release' and scope 'sys'",
    ),
}


def _check_releases(
    stages: Stages,
    program: machine.Program,
    graph: flow.Graph,
    sources: machine.Sources,
    report: CompiledReport,
) -> None:
    scopes = {
        key: ordered.scope
        for operation in stages.source.kernel.walk()
        if (ordered := events.order_of(operation)) is not None
        for key in stages.keys(operation)
    }

    def scope_of(one: machine.Instruction) -> str:
        return next((scopes[key] for key in one.keys if key in scopes), "")

    for exposed in machine.exposed_releases(graph, sources, scope_of):
        loc = _release_loc(stages, program, exposed.release)
        if exposed.lacks == machine.OTHER_WAVES:
            lines = [_line(place) for place in (exposed.store.loc, loc)]
            report.note(
                f"s_barrier does not wait for the stores of {lines[0]}, and the release of "
                f"{lines[1]} waits for its own wave's only: wl.notify waits in every wave"
            )
            continue
        kind, message, remedy = _RELEASE_TEXTS[exposed.lacks]
        store = (exposed.store.loc, "the store that may still be unseen")
        report.add(kind, stages.assembly, message, (loc, "publishes"), store, remedy=remedy)


def _line(loc: Loc) -> str:
    frame = place_of(loc).outermost
    return f"line {frame.line}" if frame else "an unknown line"


def _release_loc(stages: Stages, program: machine.Program, one: machine.Instruction) -> Loc:
    """The source's place of a release; on AMD the instruction has its address's."""
    if not isinstance(program, amdgcn.Program):
        return one.loc
    published = [
        operation
        for operation in stages.source.kernel.walk()
        if (ordered := events.order_of(operation)) is not None
        and ordered.order in ("release", "acq_rel")
        and key_of(operation.chain) not in stages.groups
    ]
    here = [operation for operation in published if one.keys & stages.keys(operation)]
    if not here:
        present = {key for each in program.instructions if each.is_atomic for key in each.keys}
        here = [operation for operation in published if not stages.keys(operation) & present]
    return here[0].chain if here else one.loc


# ---------------------------------------------------------------------------------------------
# Orders and scopes

_STRENGTH = {
    "relaxed": {"relaxed", "acquire", "release", "acq_rel", "sc", "volatile"},
    "acquire": {"acquire", "acq_rel", "sc"},
    "release": {"release", "acq_rel", "sc"},
    "acq_rel": {"acq_rel", "sc"},
}
_REACH = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}


def _check_orders(stages: Stages, program: machine.Program, report: CompiledReport) -> None:
    """Each ordered access of the source is there, at least as strong as written."""
    atomics: list[Ordered] = []
    if isinstance(program, ptx.Program):
        atomics += [
            one
            for one in program.instructions
            if one.is_global and one.base != "multimem" or one.base in ("fence", "membar")
        ]
    else:
        atomics += llvm.atomics(stages.texts.get("llir", ""), stages.files)
    emitted: dict[Key, list[Ordered]] = {}
    for one in atomics:
        for key in one.keys:
            emitted.setdefault(key, []).append(one)
    for operation in stages.source.kernel.walk():
        ordered = events.order_of(operation)
        if ordered is not None:
            found = [one for key in stages.keys(operation) for one in emitted.get(key, [])]
            if stages.is_amd:
                _check_order_on_amd(stages, operation, ordered, found, atomics, report)
            elif not found and all(is_known(one.loc) for one in atomics):
                _deleted(stages, operation, ordered, report)
            elif found and not _is_kept(ordered, found):
                _weakened(stages.assembly, operation, ordered, found, report)
        elif events.is_asm(operation):
            _check_assembly_text(stages, program, operation, report)


def _is_kept(ordered: events.Ordered, found: list[Ordered]) -> bool:
    """On NVIDIA every access of the place is as strong as written, or a fence of it is."""
    fences = [one for one in found if getattr(one, "base", "") in ("fence", "membar")]
    if any(_at_least(one, ordered) for one in fences):
        return True
    return all(_at_least(one, ordered) for one in found)


def _check_order_on_amd(
    stages: Stages,
    operation: Op,
    ordered: events.Ordered,
    found: list[Ordered],
    atomics: list[Ordered],
    report: CompiledReport,
) -> None:
    """On AMD some access of the place, which several may share, is as strong as written."""
    is_cas = operation.name.endswith("cas")
    found = [
        one for one in found if isinstance(one, llvm.Atomic) and (one.name == "cmpxchg") == is_cas
    ]
    if not found:
        in_buffer = ordered.is_tile and llvm.has_buffer_atomic(stages.texts.get("llir", ""))
        # Where its place is lost, another atomic of its strength may be it.
        if not in_buffer and not any(_at_least(one, ordered) for one in atomics):
            _deleted(stages, operation, ordered, report)
        return
    is_covered = ordered.is_tile and _together(ordered, found)
    if not is_covered and not any(_at_least(one, ordered) for one in found):
        _weakened("llir", operation, ordered, found, report)


def _at_least(one: Ordered, ordered: events.Ordered) -> bool:
    """Is `one` as strong as written?"""
    reaches = _REACH.get(one.scope, 3) >= _REACH.get(ordered.scope, 0)
    return reaches and one.order in _STRENGTH.get(ordered.order, {one.order})


def _together(ordered: events.Ordered, found: list[Ordered]) -> bool:
    """AMD makes a tile's atomics one by one: the first releases, the last acquires."""
    reaches = all(_REACH.get(one.scope, 3) >= _REACH.get(ordered.scope, 0) for one in found)
    orders = {one.order for one in found}
    wanted = {"acq_rel": ("acquire", "release")}.get(ordered.order, (ordered.order,))
    return reaches and all(orders & _STRENGTH.get(order, {order}) for order in wanted)


def _deleted(
    stages: Stages, operation: Op, ordered: events.Ordered, report: CompiledReport
) -> None:
    if ordered.order == "relaxed" or not is_known(operation.chain):
        return
    report.add(
        DELETED_ATOMIC,
        stages.assembly,
        f"{operation.name} ({ordered.order}, {ordered.scope}) is not in the "
        f"{stages.assembly.upper()}: the compiler deleted it, and its order with it",
        (operation.chain, "accesses"),
        remedy="use the result, in a wait or a condition, or use wl.load",
    )


def _weakened(
    stage: str,
    operation: Op,
    ordered: events.Ordered,
    found: list[Ordered],
    report: CompiledReport,
) -> None:
    got = ", ".join(sorted({f"{one.order}.{one.scope or '?'}" for one in found}))
    use_another = "on AMD use tl.atomic_add or tl.atomic_xchg: atomic_cas ignores order and scope"
    is_cas_on_amd = stage == "llir" and operation.name.endswith("cas")
    report.add(
        WEAK_ORDER,
        stage,
        f"{operation.name} is written {ordered.order}.{ordered.scope} and emitted as {got}",
        (operation.chain, "accesses"),
        remedy=use_another if is_cas_on_amd else "use wl.notify, wl.wait or wl.atomic_add",
    )


def _check_assembly_text(
    stages: Stages, program: machine.Program, operation: Op, report: CompiledReport
) -> None:
    """Each memory instruction of inline assembly is still there."""
    if stages.groups.get(key_of(operation.chain)) in stages.lost:
        return
    there = {one.opcode for one in program.instructions if one.asm_block}
    for opcode in sorted(set(events.asm_memory(operation)) - there):
        report.add(
            DELETED_ATOMIC,
            stages.assembly,
            f"{opcode} of inline assembly is not in the {stages.assembly.upper()}",
            (operation.chain, "accesses"),
            remedy="pass is_pure=False, and constrain with ~{memory}",
        )


# ---------------------------------------------------------------------------------------------
# Widths


def _check_widths(stages: Stages, program: machine.Program, report: CompiledReport) -> None:
    by_key: dict[Key, int] = {}
    for loc, num_bytes in widths.emitted(program).items():
        key = stages.key(loc)
        by_key[key] = min(by_key.get(key, widths.FULL), num_bytes)
        frame = place_of(loc).outermost
        if frame is not None:
            name = f"{frame.file}:{frame.line}"
            report.widths[name] = min(report.widths.get(name, widths.FULL), num_bytes)
    for store in widths.without_hint(stages.source.kernel, stages.lowered):
        got = by_key.get(stages.key(store.chain))
        if got is not None and got < widths.FULL:
            report.add(
                NARROW_STORE,
                stages.assembly,
                f"a tile is stored {got} bytes at a time, not {widths.FULL}: its address is made "
                "of a distance between heaps, and no hint says what divides that",
                (store.chain, "stores"),
                remedy="translate with wl.at, or add offsets as tl.multiple_of(offset, 16)",
            )
