"""`weft verify --mutants`: an operator's or a script's mutants, and what became of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import Any

from weft.base.card import Op
from weft.base.report import Report
from weft.base.target import TARGETS
from weft.base.topology import Topology
from weft.compiler.lower import source
from weft.emulator.observation import Observer, Recorder
from weft.emulator.rewriting import Rewrite
from weft.ir import core
from weft.tools.check import Work, one_slot, rel_err
from weft.tools.subjects import FEW_SMS, HOPPER, NUM_SMS, ScriptSubject, on_hopper
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, MutantReport, ProgramFails, Run, WrongAnswer, search
from weft.verify.mutants.core_ir import search_core_ir

Progress = Callable[[int, int], None]

# Calls of three sizes: what one leaves behind must not pass for the next one's.
CALLS = (0, 0, 1, 2, 0)
SMALL = {"block": 32, "tile_m": 16, "tile_n": 16, "tile_k": 16}
# Columns of 16 bits that TMA takes.
TMA_COLUMNS = 8
HOPPERS_RANKS = 2
# On Hopper several tiles of several steps for each of few programs, ragged at their ends (in k only
# where operands are not several): so many that each consumer has two own ones, one after the other.
HOPPERS_SIZES = ({"m": 300, "n": 520, "k": 136}, {"m": 150, "n": 520, "k": 192})
# So many communication CTAs that two share a chunk.
HOPPERS_CONFIG = {"num_stages": 2, "pushers": 2, "tile_n": 128}
# Columns of further tiles: an odd number of chunks, or an even one, for consumers in turns (up to
# 128) or with half of each tile; some have a rest. And with sizes and SMs of their own: the last
# tiles are shared, in turns by each consumer.
HOPPERS_TILES: tuple[tuple[int, dict[str, int], int], ...] = (
    (64, {}, FEW_SMS), (256, {}, FEW_SMS), (320, {}, FEW_SMS),
    (128, {"m": 150, "k": 1088}, 4), (128, {"m": 150, "n": 104, "k": 1088}, 6),
    (320, {"m": 150, "n": 264, "k": 1088}, 6),
)  # fmt: skip


def mutants_of_op(
    work: Work, bounds: Bounds, *, arch: int = 0, on_mutant: Progress | None = None
) -> MutantReport:
    """Every mutant of the operator of `work`, under each of its configurations, also those of
    Hopper; with `arch` under these alone.

    Raises  ProgramFails: the operator itself shows something
    """
    configs = () if arch else work.op.candidates(work.problem(), TARGETS["emu"])
    there, ways = on_hopper(work, FEW_SMS)
    runs = [op_run(work, [config] * 3) for config in configs]
    runs += [op_run(there, [way] * 3, arch=HOPPER) for way in ways]
    return searched(runs, bounds, work.op.name, work.num_ranks, on_mutant)


def mutants_in_trials(
    op: Op, bounds: Bounds, *, transport: str = "", dtype: str = "float32", arch: int = 0,
    on_mutant: Progress | None = None,
) -> MutantReport:  # fmt: skip
    """Every mutant of an operator in its card's trials; of one transport, or of all.

    Of a `dtype` that Hopper's template takes also what it does there, with `arch` that alone.

    Raises  ProgramFails: the operator itself shows something
    """
    subject = f"{op.name} {transport}".strip()
    runs = [] if arch else list(trial_runs(op, transport, dtype))
    runs += runs_on_hopper(op, transport, dtype)
    ranks = HOPPERS_RANKS if arch else max(sum(trial.nodes) for trial in op.trials)
    return searched(runs, bounds, subject, ranks, on_mutant)


def searched(
    runs: Sequence[Run], bounds: Bounds, subject: str, ranks: int, on_mutant: Progress | None
) -> MutantReport:
    """Mutants of what Triton and the hosts are told; of generated kernels also of their IR.

    A kernel's are tried in the runs that load it; kernels that differ in their tiles alone are one.
    """
    loaded: list[dict[core.Kernel, None]] = [{} for _ in runs]
    watching = [replace(run, run=_watched(run, seen)) for run, seen in zip(runs, loaded)]
    report = search(watching, bounds, subject=subject, ranks=ranks, on_mutant=on_mutant)
    limit_s = bounds.limit_s
    for kernel in dict.fromkeys(_cut(one, ()) for seen in loaded for one in seen):
        # The limit is for all.
        left = replace(bounds, limit_s=limit_s and max(limit_s - report.seconds, 0.0))
        of_ir = search_core_ir(
            kernel, partial(_runs_with, runs, loaded, kernel), left, subject=subject, ranks=ranks,
            steps=report.steps,
        )  # fmt: skip
        report.verdicts += of_ir.verdicts
        report.seconds += of_ir.seconds
        report.bound = report.bound or of_ir.bound
    return report


def _watched(run: Run, seen: dict[core.Kernel, None]) -> Callable[..., Report]:
    def watched(*args: Any, **rest: Any) -> Report:
        with source.watched() as kernels:
            try:
                return run.run(*args, **rest)
            finally:
                seen.update(kernels)

    return watched


def _cut(kernel: core.Kernel, tile: Sequence[int]) -> core.Kernel:
    """The same for tiles of these extents."""
    statements = (
        replace(one, tile=tuple(tile)) if isinstance(one, core.Template) else one
        for one in kernel.statements
    )
    return replace(kernel, statements=tuple(statements))


def _runs_with(
    runs: Sequence[Run], loaded: Sequence[Iterable[core.Kernel]], kernel: core.Kernel,
    mutant: core.Kernel,
) -> list[Run]:  # fmt: skip
    """The runs that load the kernel, of whatever tiles, with a mutant in its place."""
    found = []
    for run, seen in zip(runs, loaded):
        of_tiles = [(one, one.of(core.Template)[0].tile) for one in seen]
        instead = {one: _cut(mutant, tile) for one, tile in of_tiles if _cut(one, ()) == kernel}
        if instead:
            found.append(replace(run, run=_with(run, instead)))
    return found


def _with(run: Run, mutants: Mapping[core.Kernel, core.Kernel]) -> Callable[[int, Any], Report]:
    def with_mutants(seed: int, rewrite: Any) -> Report:
        with ExitStack() as stack:
            for kernel, mutant in mutants.items():
                stack.enter_context(source.replaced(kernel, by=mutant))
            return run.run(seed, rewrite)

    return with_mutants


def shown_again(error: ProgramFails, subject: str, ranks: int) -> tuple[Recorder, Report]:
    """The run of the program itself that shows something, with somebody looking on."""
    from weft.emulator.script import finding_of

    recorder = Recorder()
    run: Any = error.run.run
    try:
        report = run(error.seed, Rewrite(), observers=[recorder])
    except Exception as raised:
        report = Report(subject, ranks)
        report.add(getattr(raised, "finding", None) or finding_of(raised, None))
    report.bound = f"the program as it is, {error.run.name}, seed {error.seed}"
    return recorder, report


def runs_on_hopper(op: Op, transport: str, dtype: str) -> Iterator[Run]:
    """What the operator's kernels in Gluon do on two ranks: each way, and tiles of other widths."""
    work, ways = next(_fitting(op, dtype), (None, ()))
    cut = [
        _with_fields(way, HOPPERS_CONFIG)
        for way in ways
        if way.transport == (transport or way.transport)
    ]
    for config in cut:
        yield op_run(work, [config] * 3, arch=HOPPER)
    for config in cut[:1]:
        for tile_n, sizes, num_sms in HOPPERS_TILES:
            one = replace(work, shape={**work.shape, **sizes})
            of = [replace(config, tile_n=tile_n)] * 3
            yield op_run(one, of, arch=HOPPER, num_sms=num_sms)


def _fitting(op: Op, dtype: str) -> Iterator[tuple[Work, list[Any]]]:
    """The work and the ways of sizes that Hopper's template takes."""
    for sizes in HOPPERS_SIZES:
        shape = {name: sizes.get(name, size) for name, size in op.default_shape.items()}
        work, ways = on_hopper(Work(op, HOPPERS_RANKS, shape, dtype, (HOPPERS_RANKS,)), FEW_SMS)
        if ways:
            yield work, ways


def _with_fields(config: Any, values: Mapping[str, Any]) -> Any:
    """The configuration with those of `values` that it has."""
    known = {field.name for field in fields(config)}
    return replace(config, **{name: value for name, value in values.items() if name in known})


def trial_runs(op: Op, transport: str = "", dtype: str = "float32") -> Iterator[Run]:
    """What `op.trials` ask for, with blocks and tiles so small that there are several."""
    for trial in op.trials:
        work = Work(op, sum(trial.nodes), trial.shape, dtype, trial.nodes)
        # What differs in its tiles alone is the same now, and runs once.
        configs = map(in_small_tiles, op.candidates(work.problem(), TARGETS["emu"]))
        for config in dict.fromkeys(configs):
            if config.transport in op.composed:
                continue
            wanted = {trial.transport or config.transport, transport or config.transport}
            if wanted == {config.transport}:
                calls = trial.calls or CALLS
                turns = [replace(config, **trial.configs.get(which, {})) for which in range(3)]
                yield op_run(work, turns, on_heap=trial.on_heap, calls=calls)


def in_small_tiles(config: Any) -> Any:
    return _with_fields(config, SMALL)


def mutants_of_script(
    path: str, args: Sequence[str], topology: Topology, bounds: Bounds, *, arch: int = 0,
    on_mutant: Progress | None = None,
) -> MutantReport:  # fmt: skip
    """Every mutant of a script.

    Raises  ProgramFails: the script itself shows something
    """
    runs = [script_run(path, args, topology, arch)]
    return searched(runs, bounds, path, topology.num_ranks, on_mutant)


def op_run(
    work: Work, configs: Sequence[Any], *, on_heap: bool = False, calls: Sequence[int] = CALLS,
    arch: int = 0, num_sms: int = 0,
) -> Run:  # fmt: skip
    """Calls back to back, with other numbers each, on one slot: only signals keep them apart.

    `calls` are of the work itself (0), of about half of it (1), of one row (2); each of these
    sizes has its configuration.
    On Hopper few programs have several tiles each, so that a block's stages are used again.
    With `on_heap` inputs that are alike on all ranks lie on the symmetric heap, where the next
    call's replace those of the last.
    """
    import weft

    sizes = (work, smaller(work, _columns(configs[1], arch)), smallest(work))
    works = [sizes[which] for which in calls]
    problems = [one.problem() for one in works]
    expected = [one.reference(seed) for seed, one in enumerate(works)]

    def main() -> None:
        world = weft.init()
        heap: dict[tuple, Any] = {}
        outs = []
        for seed, (one, problem) in enumerate(zip(works, problems, strict=True)):
            inputs = dict(one.inputs(world.rank, seed))
            for name in alike(one) if on_heap else ():
                key = (name, inputs[name].shape)
                if key not in heap:
                    heap[key] = world.empty(tuple(inputs[name].shape), inputs[name].dtype)
                inputs[name] = heap[key].copy_(inputs[name])
            outs.append(work.op.run(world, problem, inputs, configs[calls[seed]]))
        for out, references, one in zip(outs, expected, works, strict=True):
            if (error := rel_err(out, references[world.rank])) > one.tolerance():
                raise WrongAnswer(f"rank {world.rank}: an error of {error:.2g}")
        world.close()

    def run(seed: int, rewrite: Any, observers: Sequence[Observer] = ()) -> Report:
        with one_slot(), weft.emulated(
            work.num_ranks, work.nodes or 1, seed, num_sms or (FEW_SMS if arch else NUM_SMS),
            collect=True, arch=arch, rewrite=rewrite, chooser=chooser_of(seed),
            observers=observers, name=work.op.name,
        ) as session:  # fmt: skip
            session.run(main)
        return session.report

    nodes = "+".join(map(str, work.nodes or (work.num_ranks,)))
    place = ", inputs on the heap" if on_heap else ""
    if arch:
        place += f", Hopper's tiles of {getattr(configs[0], 'tile_n', 'all')} columns"
    return Run(f"{getattr(configs[0], 'transport', 'default')} on {nodes}{place}", run)


def _columns(config: Any, arch: int) -> int:
    """Of which a size must be a multiple: chunks of whole tiles, or what TMA takes."""
    chunks = getattr(config, "chunks", 1)
    return chunks * config.tile_n if chunks > 1 else TMA_COLUMNS if arch else 1


def alike(work: Work) -> list[str]:
    """Inputs that have the same shape on all ranks."""
    everyone = [work.inputs(rank, 0) for rank in range(work.num_ranks)]
    return [name for name in everyone[0] if len({one[name].shape for one in everyone}) == 1]


def smaller(work: Work, even: int = 1) -> Work:
    """The same with about half the rows and half the columns, these a multiple of `even`."""
    sizes = {name: work.shape[name] // 2 + 1 for name in ("m", "n") if work.shape.get(name)}
    if "n" in sizes:
        sizes["n"] += -sizes["n"] % even
    return replace(work, shape={**work.shape, **sizes})


def smallest(work: Work) -> Work:
    """The same with one row: most ranks have none."""
    rows = {"m": 1} if work.shape.get("m") else {}
    return replace(work, shape={**work.shape, **rows})


def script_run(path: str, args: Sequence[str], topology: Topology, arch: int = 0) -> Run:
    """The script as it is, on one slot; what it says is not shown."""
    script = ScriptSubject(path, args, topology, slots=1, arch=arch)

    def run(seed: int, rewrite: Any, observers: Sequence[Observer] = ()) -> Report:
        chooser = chooser_of(seed)
        return script.run(chooser, seed=seed, rewrite=rewrite, observers=observers).report

    return Run("+".join(map(str, topology.sizes)), run)
