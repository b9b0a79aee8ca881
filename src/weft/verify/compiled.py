"""The post-compile check: did the compiler keep what makes a kernel correct between ranks?

`compiled(kernel, target, record)` reads every stage of one compiled kernel, TTIR to assembly, and
follows each wait, guarded load, store and release by its source place:

1. no wait is lost on the way;
2. no load that comes after a wait is issued before it;
3. before each release stands a block barrier, and bulk (TMA) stores are complete;
4. orders and scopes arrive as written;
5. stores that could be 16 bytes wide are.

What it reads is what was emitted, so it holds for any Triton kernel, with weft's primitives,
raw `tl.atomic_*` or inline assembly. `docs/post_compile_check.md` has the rules and their limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weft.base.errors import UsageError
from weft.base.records import KernelRecord
from weft.base.report import Finding, Side
from weft.base.target import Target, parse_target
from weft.verify import amdgcn, events, flow, llvm, machine, ptx, ttgir, widths
from weft.verify.places import NOWHERE, Key, Loc, coarse, is_known, key_of, place_of

LOST_WAIT = "lost wait"
PURE_WAIT = "pure wait"
UNORDERED_WAIT = "unordered wait"
HOISTED_LOAD = "hoisted load"
EARLY_WAIT = "early wait"
NO_BARRIER = "release without barrier"
UNFINISHED_STORE = "release before store is written"
DELETED_ATOMIC = "deleted atomic"
WEAK_ORDER = "weakened order"
NARROW_STORE = "narrow store"

SAFE_WAIT = (
    "wait with wl.wait, or `while tl.atomic_add(p, 0, sem='acquire', scope='sys') < v: pass` and "
    "tl.debug_barrier() after it, outside the K loop of a persistent loop with flatten=False"
)


@dataclass(frozen=True)
class StageFinding(Finding):
    """A finding with the stage at which it went wrong: "ttir", "ttgir", "ptx", "amdgcn"."""

    stage: str = ""

    def __str__(self) -> str:
        return f"[{self.stage}] {super().__str__()}"


@dataclass
class CompiledReport:
    """The verdict on one kernel for one target.

    `waits` counts waits per stage; `widths` maps a store's place to its bytes per instruction;
    `notes` say what was seen and is no defect by itself.
    """

    kernel: str
    target: str
    findings: list[StageFinding] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def of(self, kind: str) -> list[StageFinding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def add(self, finding: StageFinding) -> None:
        if all(known.key() != finding.key() for known in self.findings):
            self.findings.append(finding)

    def to_json(self) -> dict[str, object]:
        return {
            "kernel": self.kernel,
            "target": self.target,
            "waits": dict(self.waits),
            "widths": dict(self.widths),
            "findings": [
                {**one.to_json(), "stage": one.stage, "message": one.message, "remedy": one.remedy}
                for one in self.findings
            ],
            "ok": self.ok,
        }

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {count}" for stage, count in self.waits.items())
        head = f"{self.kernel} for {self.target} (waits: {stages or 'none'}): "
        if self.ok:
            return "\n".join([head + "as written", *(f"  note: {note}" for note in self.notes)])
        count = len(self.findings)
        head += f"{count} finding{'s' if count != 1 else ''}"
        return "\n\n".join([head, *map(str, self.findings)])


def compiled(kernel, target: Target | str | None = None, record: KernelRecord | None = None):
    """Check one kernel for one target; no device is needed.

    `kernel` is a `@triton.jit` function with its `record`, the pair (function, record) that a
    card's `kernels` yields, a kernel that Triton has compiled, or a mapping of stage texts.

    Raises  UsageError: a jit function without a record; CompileError: it does not compile
    """
    if isinstance(kernel, tuple) and len(kernel) == 2:
        kernel, record = kernel
    target = parse_target(target) if isinstance(target, str) else target
    if isinstance(kernel, Mapping):
        stages: Mapping[str, object] = kernel
    elif hasattr(kernel, "asm"):
        stages = kernel.asm
        target = target or _target_of(kernel)
    else:
        name = getattr(kernel, "__name__", repr(kernel))
        if record is None or target is None:
            raise UsageError(
                f"verify.compiled({name}) needs a target and a KernelRecord that says how "
                "the kernel is specialised, or a kernel that is compiled already"
            )
        from weft.language import triton_api

        stages = triton_api.compile_kernel(kernel, record, target).asm
    texts = {stage: text for stage, text in stages.items() if isinstance(text, str)}
    return _Check(texts, target).run()


def store_widths(kernel, target: Target | str | None = None, record: KernelRecord | None = None):
    """Bytes that one instruction stores, the narrowest per source line: {"gemm.py:31": 16}."""
    return compiled(kernel, target, record).widths


def _target_of(kernel) -> Target | None:
    gpu = kernel.metadata.target
    return parse_target(f"{gpu.backend}:{gpu.arch}")


_FILE = re.compile(r'loc\("([^"]+)":\d+:\d+')


class _Check:
    """One kernel's stages, and the findings so far."""

    def __init__(self, texts: Mapping[str, str], target: Target | None) -> None:
        # A Gluon kernel has no TTIR: what its author wrote is TTGIR.
        reference = texts.get("ttir") or texts.get("ttgir")
        if reference is None:
            raise UsageError(
                f"no TTIR or TTGIR among the stages {sorted(texts)}: nothing says what was written"
            )
        self.texts = texts
        self.files = {
            file.rsplit("/", 1)[-1]: file
            for text in (reference, texts.get("ttgir", ""))
            for file in _FILE.findall(text)
        }
        self.ttir = ttgir.parse(reference)
        self.written = "ttir" if "ttir" in texts else "ttgir"
        self.ttgir = self.ttir if self.written == "ttgir" else None
        if self.ttgir is None and "ttgir" in texts:
            self.ttgir = ttgir.parse(texts["ttgir"])
        self.assembly = "ptx" if "ptx" in texts else "amdgcn" if "amdgcn" in texts else ""
        self.is_amd = self.assembly == "amdgcn"
        self.program: machine.Program | None = None
        if self.assembly == "ptx":
            self.program = ptx.parse(texts["ptx"], self.files)
        elif self.is_amd:
            self.program = amdgcn.parse(texts["amdgcn"], self.files)
        name = target.name if target else self.assembly
        self.report = CompiledReport(self.ttir.kernel.name, name)
        self.lost: set[int] = set()

    def run(self) -> CompiledReport:
        self._group_waits()
        self._check_pure_assembly()
        self._check_unordered_waits()
        self._check_ttgir()
        if self.program is not None:
            self._check_assembly()
        return self.report

    # -----------------------------------------------------------------------------------------
    # Waits

    def _group_waits(self) -> None:
        """Number the source's waits; those with a poll in one place are one group."""
        self.waits = events.find_waits(self.ttir.kernel)
        self.groups: dict[Key, int] = {}
        self.members: list[list[events.Wait]] = []
        for wait in self.waits:
            known = {self.groups[key] for key in wait.keys if key in self.groups}
            group = min(known) if known else len(self.members)
            if not known:
                self.members.append([])
            self.members[group].append(wait)
            for key in wait.keys:
                self.groups[key] = group
        self.report.waits[self.written] = len(self.waits)
        self.grouped = events.GroupedWaits(self.waits, self.groups)
        for function in self.ttir.functions.values():
            if function is not self.ttir.kernel and events.find_waits(function):
                self.report.notes.append(
                    f"the waits of {function.name}, a noinline function, were not followed"
                )

    def _wait_loc(self, group: int) -> Loc:
        return self.members[group][0].loc

    def _check_pure_assembly(self) -> None:
        """Assembly that reads memory and calls itself pure may be dropped at any stage."""
        module = ttgir.parse(self.texts["source"]) if "source" in self.texts else self.ttir
        callers = _call_sites(module)
        for function in module.functions.values():
            for operation in function.walk():
                if not events.is_asm(operation) or not events.asm_is_pure(operation):
                    continue
                if not events.asm_memory(operation):
                    continue
                kept = events.asm_text(operation) in map(
                    events.asm_text, filter(events.is_asm, self.ttir.kernel.walk())
                )
                loc = operation.loc + callers.get(function.name, NOWHERE)
                self._add(
                    PURE_WAIT if events.asm_reads(operation) else DELETED_ATOMIC,
                    "assembly that accesses memory is declared pure"
                    + (": it may be dropped, repeated or moved" if kept else " and was dropped"),
                    self.written,
                    loc,
                    "is_pure=True",
                    remedy="pass is_pure=False to tl.inline_asm_elementwise, with ~{memory}",
                )

    def _check_unordered_waits(self) -> None:
        for group, members in enumerate(self.members):
            wait = members[0]
            if wait.ordered or any(events.base_name(poll) != "load" for poll in wait.polls):
                continue
            if self._acquires_later(wait):
                continue
            self._add(
                UNORDERED_WAIT,
                "a spin on tl.load orders nothing: what is read after it may be older than the "
                "signal",
                self.written,
                self._wait_loc(group),
                "spins on a plain load",
                remedy=SAFE_WAIT,
            )

    def _acquires_later(self, wait: events.Wait) -> bool:
        for operation in self.ttir.kernel.walk():
            if operation.index <= wait.at.index:
                continue
            ordered = events.order_of(operation)
            if ordered is not None and ordered.order in ("acquire", "acq_rel"):
                return True
            if events.is_asm(operation) and re.search(
                r"acquire|fence|membar|buffer_inv", events.asm_text(operation)
            ):
                return True
        return False

    def _lose(self, group: int, stage: str, message: str) -> None:
        self.lost.add(group)
        self._add(
            LOST_WAIT,
            message,
            stage,
            self._wait_loc(group),
            "waits",
            remedy=SAFE_WAIT + "; not in a loop with warp_specialize=True",
        )

    # -----------------------------------------------------------------------------------------
    # TTIR to TTGIR

    def _check_ttgir(self) -> None:
        """Waits are all there; loads are behind them; the next wait is behind the stores."""
        if self.ttgir is None or self.ttgir is self.ttir:
            return
        waits = events.find_waits(self.ttgir.kernel)
        grouped = events.GroupedWaits(waits, self.groups)
        self.report.waits["ttgir"] = len(waits)
        counts = _count(grouped.by_operation.values())
        unplaced = sum(not wait.keys for wait in waits)
        for group, members in enumerate(self.members):
            missing = len(members) - counts.get(group, 0)
            if missing > unplaced:
                self._lose(
                    group,
                    "ttgir",
                    f"{len(members)} in TTIR, {counts.get(group, 0)} in TTGIR: Triton's passes "
                    "dropped the wait",
                )
        before = self._required(self.ttir, self.grouped, precise=True)
        now = events.graph_of(self.ttgir, grouped, precise=True)
        self._compare_loads(before, now, "ttgir")
        self._check_early_waits(now)

    def _required(self, module, grouped, *, precise: bool) -> _Required:
        graph = events.graph_of(module, grouped, precise=precise, at_looks=not precise)
        loads = {
            node.key: node.origin for node in graph.nodes if node.kind == flow.LOAD and node.origin
        }
        return _Required(
            module.kernel, flow.waits_before(graph), flow.waits_between(graph), loads, graph
        )

    def _compare_loads(self, before: _Required, graph: flow.Graph, stage: str) -> None:
        passed = flow.waits_before(graph)
        between = flow.waits_between(graph)
        origins = {node.key: node.origin for node in graph.nodes if node.kind == flow.LOAD}
        for key, found in passed.items():
            origin = origins[key]
            required, again = before.of(key, origin, self.ttgir.kernel)
            for group in sorted(required - found - self.lost):
                self._hoisted(group, origin, stage, "a path leads to the load around the wait")
            if key in between:
                for group in sorted(again - between[key] - self.lost - (required - found)):
                    self._hoisted(
                        group, origin, stage, "the load of a later round runs before its wait"
                    )

    def _hoisted(self, group: int, origin, stage: str, how: str) -> None:
        names = self._argument_names(origin)
        what = f"of {names}" if names else "after the wait"
        verb = "is issued" if stage == "ttgir" else "may be issued"
        self._add(
            HOISTED_LOAD,
            f"the load {what} {verb} before the wait that guards it: {how}",
            stage,
            origin.loc,
            "reads",
            self._wait_loc(group),
            "the wait before it in the source",
            remedy=SAFE_WAIT,
            tensor=names or None,
        )

    def _argument_names(self, origin) -> str:
        if not isinstance(origin, ttgir.Operation):
            return ""
        for module in (self.ttgir, self.ttir):
            function = module.kernel if module is not None else None
            if function is not None and function.definitions and origin.operands:
                bases = function.bases(origin.operands[0])
                if bases:
                    return ", ".join(function.arguments[i].lstrip("%") for i in sorted(bases))
        return ""

    def _check_early_waits(self, graph: flow.Graph) -> None:
        """Does the next round's wait run before this round's stores? Then progress that
        depends on those stores never comes."""
        source = flow.stores_between(events.graph_of(self.ttir, self.grouped, precise=False))
        emitted = flow.stores_between(graph)
        for group, members in enumerate(self.members):
            if len(members) != 1 or group in self.lost:
                continue
            required = source.get(group, {}).get((members[0].at, members[0].at), frozenset())
            for (first, second), passed in emitted.get(group, {}).items():
                missing = sorted(required - passed)
                if first is second or not missing:
                    continue
                self._add(
                    EARLY_WAIT,
                    "the next round's wait runs before this round's store: a deadlock where the "
                    "signal depends on that store",
                    "ttgir",
                    self._wait_loc(group),
                    "waits a round ahead",
                    missing[0],
                    "the store that it overtakes",
                    remedy="write the persistent loop with flatten=False and the wait in it",
                )

    # -----------------------------------------------------------------------------------------
    # Assembly

    def _check_assembly(self) -> None:
        program = self.program
        if not program.has_lines:
            self.report.notes.append(
                f"the {self.assembly} has no line information (TRITON_DISABLE_LINE_INFO?): waits "
                "and loads were checked as far as TTGIR only"
            )
            return
        sources = self._sources()
        self._check_spins(sources)
        if self.ttgir is not None:
            self._check_machine_loads(sources)
        self._check_releases(sources)
        self._check_orders()
        self._check_widths()

    def _key(self, loc: Loc) -> Key:
        return coarse(key_of(loc)) if self.is_amd else key_of(loc)

    def _keys(self, operation: ttgir.Operation) -> set[Key]:
        """The places at which the assembly may have this atomic or asm.

        On AMD, Triton gives an atomic the place of its address, not its own.
        """
        key = key_of(operation.loc)
        return {coarse(key), *self.aliases.get(key, ())} if self.is_amd else {key}

    def _find_aliases(self) -> None:
        """For each atomic, by its place: the places of its address in TTIR and TTGIR."""
        self.aliases: dict[Key, set[Key]] = {}
        for module in filter(None, (self.ttir, self.ttgir)):
            function = module.kernel
            users: dict[str, list[ttgir.Operation]] = {}
            for operation in function.walk():
                for operand in operation.operands:
                    users.setdefault(operand, []).append(operation)
            for operation in function.walk():
                if events.order_of(operation) is None:
                    continue
                address = operation.operands[0]
                maker = function.definitions.get(address)
                # An argument has the place of whichever of its users is lowered first.
                makers = [maker] if maker is not None else users.get(address, [])
                self.aliases.setdefault(key_of(operation.loc), set()).update(
                    coarse(key_of(one.loc)) for one in makers
                )

    def _sources(self) -> machine.Sources:
        sources = machine.Sources(num_warps=_num_warps(self.texts.get("ttgir", "")))
        self._find_aliases()
        for group, members in enumerate(self.members):
            looks = {poll.index for wait in members for poll in wait.looks}
            for poll in (poll for wait in members for poll in wait.polls):
                if poll.index in looks:
                    sources.looks.update(self._keys(poll))
                for key in self._keys(poll):
                    sources.polls[key] = sources.polls.get(key, frozenset()) | {group}
                    if events.order_of(poll) is not None:
                        sources.atomic_polls.add(key)
        tiles: set[Key] = set()
        for module in (self.ttir, self.ttgir):
            for operation in module.kernel.walk() if module is not None else ():
                name = events.base_name(operation)
                key = self._key(operation.loc)
                ordered = events.order_of(operation)
                if ordered is not None or name in events.STORES:
                    is_tile = "tensor<" in operation.text or "memdesc" in operation.text
                    kept = tiles if is_tile else sources.scalars
                    kept.update(self._keys(operation) if ordered is not None else {key})
                if ordered is not None and ordered.order in ("release", "acq_rel"):
                    is_poll = key_of(operation.loc) in self.groups
                    if (not ordered.is_tile or ordered.scope == "sys") and not is_poll:
                        sources.releases.update(self._keys(operation))
                if events.is_asm(operation):
                    sources.assembly.add(key)
        sources.scalars -= tiles
        if self.is_amd:
            self._add_amd_releases(sources, tiles)
        return sources

    def _add_amd_releases(self, sources: machine.Sources, tiles: set[Key]) -> None:
        """An address that is an argument has no place of its own: LLVM IR knows the rest."""
        others: set[Key] = set()
        for one in llvm.atomics(self.texts.get("llir", ""), self.files):
            is_look = one.key in sources.looks and one.may_be_a_look
            if one.order in ("release", "acq_rel") and not is_look:
                if one.key not in tiles:
                    sources.releases.add(one.key)
            else:
                others.add(one.key)
        sources.mixed = others & sources.releases

    def _check_spins(self, sources: machine.Sources) -> None:
        spins = machine.spins(self.program, sources)
        self.report.waits[self.assembly] = sum(
            min(spins.get(group, 0), max(len(members), 1)) if spins.get(group) else 0
            for group, members in enumerate(self.members)
        )
        polls = _count(
            group
            for one in self.program.instructions
            if machine.is_poll(one, sources)
            for group in machine.groups_of(one, sources)
        )
        for group, members in enumerate(self.members):
            if group in self.lost or not members[0].keys:
                continue
            if any(events.is_library_wait(wait.at) for wait in members):
                continue
            if spins.get(group, 0) < len(members):
                if not spins.get(group) and polls.get(group):
                    how = "the poll is made once and no longer in a loop: it ends at once or never"
                else:
                    how = (
                        f"{len(members)} in {self.written.upper()}, {spins.get(group, 0)} in the "
                        f"{self.assembly.upper()}: the poll is gone, or was moved out of its loop"
                    )
                self._lose(group, self.assembly, how)

    def _check_machine_loads(self, sources: machine.Sources) -> None:
        grouped = events.GroupedWaits(events.find_waits(self.ttgir.kernel), self.groups)
        before = self._required(self.ttgir, grouped, precise=False)
        required: dict[Key, frozenset] = {}
        for key, found in before.before.items():
            key = coarse(key) if self.is_amd else key
            required[key] = required[key] & found if key in required else found
        graph = machine.graph_of(self.program, sources)
        passed = flow.waits_before(graph)
        origins = {node.key: node.origin for node in graph.nodes if node.kind == flow.LOAD}
        for keys, found in passed.items():
            each = [required[key] for key in keys if key in required]
            needs = frozenset.intersection(*each) if each else None
            is_lost = not any(map(is_known, keys))
            if needs is None and isinstance(self.program, ptx.Program) and is_lost:
                needs = self._required_by_parameters(before, origins[keys])
            for group in sorted((needs or frozenset()) - found - self.lost):
                self._hoisted(
                    group, origins[keys], self.assembly, "a path leads to the load around the wait"
                )

    def _required_by_parameters(self, before: _Required, one) -> frozenset:
        """For a load that lost its place: what all loads through the same arguments need."""
        types = self.ttgir.kernel.argument_types
        found = self.program.parameters(one)
        bases = {i for i in found if i < len(types) and types[i].startswith("!tt.ptr")}
        return before.of_bases(bases) if bases else frozenset()

    def _check_releases(self, sources: machine.Sources) -> None:
        graph = machine.graph_of(self.program, sources)
        scopes = {
            key: ordered.scope
            for operation in self.ttir.kernel.walk()
            if (ordered := events.order_of(operation)) is not None
            for key in self._keys(operation)
        }
        in_flight = machine.exposed_releases(
            graph, sources, lambda one: next((scopes[key] for key in one.keys if key in scopes), "")
        )
        for exposed in in_flight:
            loc = self._release_loc(exposed.release)
            if exposed.lacks == machine.OTHER_WAVES:
                self._note_other_waves(loc, exposed.store.loc)
                continue
            kind, message, remedy = _RELEASE_TEXTS[exposed.lacks]
            self._add(
                kind,
                message,
                self.assembly,
                loc,
                "publishes",
                exposed.store.loc,
                "the store that may still be unseen",
                remedy=remedy,
            )

    def _release_loc(self, one: machine.Instruction) -> Loc:
        """The source's place of a release; on AMD the instruction has its address's."""
        if not self.is_amd:
            return one.loc
        published = [
            operation
            for operation in self.ttir.kernel.walk()
            if (ordered := events.order_of(operation)) is not None
            and ordered.order in ("release", "acq_rel")
            and key_of(operation.loc) not in self.groups
        ]
        here = [operation for operation in published if one.keys & self._keys(operation)]
        if not here:
            present = {
                key for each in self.program.instructions if each.is_atomic for key in each.keys
            }
            here = [operation for operation in published if not self._keys(operation) & present]
        return here[0].loc if here else one.loc

    def _note_other_waves(self, release: Loc, store: Loc) -> None:
        places = [place_of(loc).outermost for loc in (store, release)]
        lines = [f"line {place.line}" if place else "an unknown line" for place in places]
        note = (
            f"s_barrier does not wait for the stores of {lines[0]}, and the release of {lines[1]} "
            "waits for its own wave's only: wl.notify waits in every wave"
        )
        if note not in self.report.notes:
            self.report.notes.append(note)

    def _check_orders(self) -> None:
        """Each ordered access of the source is there, at least as strong as written."""
        emitted: dict[Key, list] = {}
        unplaced = []
        if self.is_amd:
            atomics = llvm.atomics(self.texts.get("llir", ""), self.files)
        else:
            atomics = [
                one
                for one in self.program.instructions
                if (one.base in ("atom", "red", "ld", "st") and one.is_global)
                or one.base in ("fence", "membar")
            ]
        for one in atomics:
            for key in one.keys:
                emitted.setdefault(key, []).append(one)
            if not is_known(one.loc):
                unplaced.append(one)
        for operation in self.ttir.kernel.walk():
            ordered = events.order_of(operation)
            if ordered is not None:
                self._check_order(operation, ordered, emitted, unplaced)
            elif events.is_asm(operation):
                self._check_assembly_text(operation)

    def _check_order(self, operation, ordered, emitted, unplaced) -> None:
        found = [one for key in self._keys(operation) for one in emitted.get(key, [])]
        if self.is_amd:
            is_cas = operation.name.endswith("cas")
            found = [one for one in found if (one.name == "cmpxchg") == is_cas]
        if not found:
            if self.is_amd and ordered.is_tile and llvm.has_buffer_atomic(self.texts["llir"]):
                return
            everything = [one for atomics in emitted.values() for one in atomics]
            if self.is_amd and any(_at_least(one, ordered) for one in everything):
                return  # its place is lost, not the atomic
            if ordered.order != "relaxed" and not unplaced and is_known(operation.loc):
                self._add(
                    DELETED_ATOMIC,
                    f"{operation.name} ({ordered.order}, {ordered.scope}) is not in the "
                    f"{self.assembly.upper()}: the compiler deleted it, and its order with it",
                    self.assembly,
                    operation.loc,
                    "accesses",
                    remedy="use the result, in a wait or a condition, or use wl.load",
                )
            return
        if self.is_amd and ordered.is_tile and _is_covered(ordered, found):
            return
        fits = [_at_least(one, ordered) for one in found]
        if any(fits) if self.is_amd or "fence" in {_base(one) for one in found} else all(fits):
            return
        got = ", ".join(sorted({f"{one.order}.{one.scope or '?'}" for one in found}))
        self._add(
            WEAK_ORDER,
            f"{operation.name} is written {ordered.order}.{ordered.scope} and emitted as {got}",
            "llir" if self.is_amd else self.assembly,
            operation.loc,
            "accesses",
            remedy=(
                "on AMD use tl.atomic_add or tl.atomic_xchg: atomic_cas ignores order and scope"
                if "cas" in operation.name
                else "use wl.notify, wl.wait or wl.atomic_add"
            ),
        )

    def _check_assembly_text(self, operation) -> None:
        """Each memory instruction of inline assembly is still there."""
        wanted = _count(events.asm_memory(operation))
        key = self._key(operation.loc)
        here = _count(
            one.opcode for one in self.program.instructions if one.asm_block and key in one.keys
        )
        everywhere = _count(one.opcode for one in self.program.instructions if one.asm_block)
        for opcode, _ in wanted.items():
            if here.get(opcode, 0) or everywhere.get(opcode, 0):
                continue
            if self.groups.get(key_of(operation.loc)) in self.lost:
                continue
            self._add(
                DELETED_ATOMIC,
                f"{opcode} of inline assembly is not in the {self.assembly.upper()}",
                self.assembly,
                operation.loc,
                "accesses",
                remedy="pass is_pure=False, and constrain with ~{memory}",
            )

    def _check_widths(self) -> None:
        narrowest = widths.emitted(self.program)
        by_line: dict[str, int] = {}
        for loc, num_bytes in narrowest.items():
            place = place_of(loc).outermost
            if place is not None:
                name = f"{place.file}:{place.line}"
                by_line[name] = min(by_line.get(name, 16), num_bytes)
        self.report.widths = by_line
        by_key: dict[Key, int] = {}
        for loc, num_bytes in narrowest.items():
            key = self._key(loc)
            by_key[key] = min(by_key.get(key, 16), num_bytes)
        for store in widths.expected(self.ttir.kernel, self.ttgir):
            got = by_key.get(self._key(store.operation.loc))
            if got is None or got >= store.num_bytes:
                continue
            self._add(
                NARROW_STORE,
                f"a tile whose rows are contiguous and 16-byte aligned is stored {got} bytes at a "
                f"time, not {store.num_bytes}",
                self.assembly,
                store.operation.loc,
                "stores",
                remedy="translate with wl.at, or add offsets as tl.multiple_of(offset, 16)",
            )

    # -----------------------------------------------------------------------------------------

    def _add(
        self, kind, message, stage, loc, note, other: Loc = NOWHERE, other_note="", *, remedy,
        tensor: str | None = None,
    ) -> None:  # fmt: skip
        kernel = self.report.kernel
        other = _full(other, self.files)
        second = Side.at(place_of(other), kernel=kernel, note=other_note) if other else None
        first = Side.at(place_of(loc), kernel=kernel, note=note, tensor=tensor)
        self.report.add(StageFinding(kind, message, first, second, remedy, stage))


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


@dataclass
class _Required:
    """For each load of a stage: the waits that come before it on every path, and the waits
    between two runs of it."""

    function: ttgir.Function
    before: dict
    between: dict
    loads: dict
    graph: flow.Graph

    def of(self, key: Key, origin, function: ttgir.Function) -> tuple[frozenset, frozenset]:
        """What the load `key` of a later stage must keep; by its pointer's origin in the
        arguments where its place is not one of this stage."""
        if key in self.before:
            return self.before[key], self.between.get(key, frozenset())
        bases = function.bases(origin.operands[0]) if origin.operands else set()
        return self.of_bases(bases), frozenset()

    def of_bases(self, bases: set[int]) -> frozenset:
        """What every load of this stage through one of these arguments needs."""
        needed = [
            self.before.get(key, frozenset())
            for key, origin in self.loads.items()
            if origin.operands and self.function.bases(origin.operands[0]) & bases
        ]
        return frozenset.intersection(*needed) if needed and bases else frozenset()


_STRENGTH = {
    "relaxed": {"relaxed", "acquire", "release", "acq_rel", "sc", "volatile"},
    "acquire": {"acquire", "acq_rel", "sc"},
    "release": {"release", "acq_rel", "sc"},
    "acq_rel": {"acq_rel", "sc"},
}
_REACH = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}


def _at_least(one, ordered: events.Ordered) -> bool:
    """Is `one` as strong as written?"""
    reach = _REACH.get(one.scope, 3)
    return one.order in _STRENGTH.get(ordered.order, {one.order}) and reach >= _REACH.get(
        ordered.scope, 0
    )


def _is_covered(ordered: events.Ordered, found: list) -> bool:
    """AMD makes a tile's atomics one by one: the first releases, the last acquires."""
    reaches = all(_REACH.get(one.scope, 3) >= _REACH.get(ordered.scope, 0) for one in found)
    orders = {one.order for one in found}
    wanted = {"acq_rel": ("acquire", "release")}.get(ordered.order, (ordered.order,))
    return reaches and all(orders & _STRENGTH.get(order, {order}) for order in wanted)


def _base(one) -> str:
    return getattr(one, "base", "")


def _count(items: Iterable) -> dict:
    counts: dict = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def _num_warps(text: str) -> int:
    match = re.search(r'"ttg\.num-warps" = (\d+)', text)
    return int(match[1]) if match else 0


def _full(loc: Loc, files: Mapping[str, str]) -> Loc:
    """A key's files with their folders, as far as they are known."""
    return tuple((files.get(file, file), line, column) for file, line, column in loc)


def _call_sites(module: ttgir.Module) -> dict[str, Loc]:
    """For each function, the place of a chain of calls that leads to it."""
    direct: dict[str, tuple[str, Loc]] = {}
    for function in module.functions.values():
        for operation in function.walk():
            if operation.name == "tt.call" and (callee := module.callee(operation)):
                direct.setdefault(callee.name, (function.name, operation.loc))
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
