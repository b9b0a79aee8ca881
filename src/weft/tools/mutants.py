"""`weft verify --mutants`: an operator's or a script's mutants, and what became of each."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from weft.base.card import Op
from weft.base.report import Report
from weft.base.target import TARGETS
from weft.base.topology import Topology
from weft.compiler.lower import source
from weft.emulator.observation import Observer, Recorder
from weft.emulator.rewriting import Rewrite
from weft.tools.check import Work, one_slot, rel_err
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, MutantReport, ProgramFails, Run, WrongAnswer, search
from weft.verify.mutants.core_ir import search_core_ir

Progress = Callable[[int, int], None]

# Calls of three sizes: what one leaves behind must not pass for the next one's.
CALLS = (0, 0, 1, 2, 0)
SMALL = {"block": 32, "tile_m": 16, "tile_n": 16, "tile_k": 16}


def mutants_of_op(
    work: Work, bounds: Bounds, *, configs: Iterable[Any] | None = None,
    on_mutant: Progress | None = None,
) -> MutantReport:  # fmt: skip
    """Every mutant of the operator of `work`, under each of its configurations.

    Raises  ProgramFails: the operator itself shows something
    """
    if configs is None:
        configs = work.op.candidates(work.problem(), TARGETS["emu"])
    runs = [op_run(work, [config] * 3) for config in configs]
    return searched(runs, bounds, work.op.name, work.num_ranks, on_mutant)


def mutants_in_trials(
    op: Op, bounds: Bounds, *, transport: str = "", on_mutant: Progress | None = None
) -> MutantReport:
    """Every mutant of an operator in its card's trials; of one transport, or of all.

    Raises  ProgramFails: the operator itself shows something
    """
    subject = f"{op.name} {transport}".strip()
    runs = list(trial_runs(op, transport))
    ranks = max(sum(trial.nodes) for trial in op.trials)
    return searched(runs, bounds, subject, ranks, on_mutant)


def searched(
    runs: Sequence[Run], bounds: Bounds, subject: str, ranks: int, on_mutant: Progress | None
) -> MutantReport:
    """Mutants of what Triton and the hosts are told; of generated kernels also of their IR.

    A kernel's are tried in the runs that load it.
    """
    loaded: list[dict[Any, None]] = [{} for _ in runs]
    watching = [replace(run, run=_watched(run, seen)) for run, seen in zip(runs, loaded)]
    report = search(watching, bounds, subject=subject, ranks=ranks, on_mutant=on_mutant)
    for kernel in dict.fromkeys(kernel for seen in loaded for kernel in seen):
        found = [run for run, seen in zip(runs, loaded) if kernel in seen]

        def instead(mutant: Any, kernel: Any = kernel, found: list[Run] = found) -> list[Run]:
            return [replace(run, run=_with(run, kernel, mutant)) for run in found]

        of_ir = search_core_ir(
            kernel, instead, bounds, subject=subject, ranks=ranks, steps=report.steps
        )
        report.verdicts += of_ir.verdicts
        report.seconds += of_ir.seconds
        report.bound = report.bound or of_ir.bound
    return report


def _watched(run: Run, seen: dict[Any, None]) -> Callable[..., Report]:
    def watched(*args: Any, **rest: Any) -> Report:
        with source.watched() as kernels:
            try:
                return run.run(*args, **rest)
            finally:
                seen.update(kernels)

    return watched


def _with(run: Run, kernel: Any, mutant: Any) -> Callable[[int, Any], Report]:
    def with_mutant(seed: int, rewrite: Any) -> Report:
        with source.replaced(kernel, by=mutant):
            return run.run(seed, rewrite)

    return with_mutant


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


def trial_runs(op: Op, transport: str = "") -> Iterator[Run]:
    """What `op.trials` ask for, with blocks and tiles so small that there are several."""
    for trial in op.trials:
        work = Work(op, sum(trial.nodes), trial.shape, "float32", trial.nodes)
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
    known = {field.name for field in fields(config)}
    return replace(config, **{name: size for name, size in SMALL.items() if name in known})


def mutants_of_script(
    path: str, args: Sequence[str], topology: Topology, bounds: Bounds, *,
    on_mutant: Progress | None = None,
) -> MutantReport:  # fmt: skip
    """Every mutant of a script.

    Raises  ProgramFails: the script itself shows something
    """
    runs = [script_run(path, args, topology)]
    return searched(runs, bounds, path, topology.num_ranks, on_mutant)


def op_run(
    work: Work, configs: Sequence[Any], *, on_heap: bool = False, calls: Sequence[int] = CALLS
) -> Run:
    """Calls back to back, with other numbers each, on one slot: only signals keep them apart.

    `calls` are of the work itself (0), of about half of it (1), of one row (2); each of these
    sizes has its configuration.
    With `on_heap` inputs that are alike on all ranks lie on the symmetric heap, where the next
    call's replace those of the last.
    """
    import weft

    sizes = (work, smaller(work), smallest(work))
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
        with one_slot():
            with weft.emulated(
                work.num_ranks, work.nodes or 1, seed, collect=True, rewrite=rewrite,
                chooser=chooser_of(seed), observers=observers, name=work.op.name,
            ) as session:  # fmt: skip
                session.run(main)
        return session.report

    nodes = "+".join(map(str, work.nodes or (work.num_ranks,)))
    place = ", inputs on the heap" if on_heap else ""
    return Run(f"{getattr(configs[0], 'transport', 'default')} on {nodes}{place}", run)


def alike(work: Work) -> list[str]:
    """Inputs that have the same shape on all ranks."""
    everyone = [work.inputs(rank, 0) for rank in range(work.num_ranks)]
    return [name for name in everyone[0] if len({one[name].shape for one in everyone}) == 1]


def smaller(work: Work) -> Work:
    """The same with about half the rows and half the columns."""
    sizes = {name: work.shape[name] // 2 + 1 for name in ("m", "n") if work.shape.get(name)}
    return replace(work, shape={**work.shape, **sizes})


def smallest(work: Work) -> Work:
    """The same with one row: most ranks have none."""
    rows = {"m": 1} if work.shape.get("m") else {}
    return replace(work, shape={**work.shape, **rows})


def script_run(path: str, args: Sequence[str], topology: Topology) -> Run:
    """The script as it is; what it says is not shown."""
    from weft.tools.emulate import run_script_once

    def run(seed: int, rewrite: Any, observers: Sequence[Observer] = ()) -> Report:
        with one_slot():
            return run_script_once(
                path, list(args), topology, seed, said_to=io.StringIO(), rewrite=rewrite,
                chooser=chooser_of(seed), observers=observers,
            )  # fmt: skip

    return Run("+".join(map(str, topology.sizes)), run)
