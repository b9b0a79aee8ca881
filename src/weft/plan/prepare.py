"""Kernels that calls of some sizes launch, compiled before there is a call.

Calls are made in a world where nothing is launched (described.py), one for each bucket of m, in
each way in which a call may come: weights as [n, k] or [k, n], recorded or not, tensors on the
symmetric heap or not. What they would launch is compiled in several processes, into Triton's cache.
"""

from __future__ import annotations

import functools
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weft.base.card import Op
from weft.base.counts import counted
from weft.base.errors import CompileError, TimeoutError, UsageError
from weft.base.providers import provider
from weft.base.settings import Settings
from weft.base.target import Target, parse_target
from weft.compiler import Compiled
from weft.compiler.buckets import buckets_of
from weft.language import triton_api
from weft.language.triton_api import LeftOut
from weft.plan import program_cards
from weft.plan.described import DescribedWorld, KernelsOf
from weft.plan.problems import nodes_of
from weft.runtime import choices, compilations, kernels

# No kernel takes so long, on a machine that does nothing else.
PATIENCE_S = 300.0
# What a process says of a kernel; behind FAILED comes the error.
COMPILED, FOUND, FAILED = b"c", b"f", b"!"
Sizes = Mapping[str, int | Iterable[int]]


@dataclass(frozen=True)
class Prepared:
    """What `prepare` found: `kernels` that calls launch; the cache lacked `compiled` of them."""

    kernels: int
    compiled: int
    seconds: float

    def __str__(self) -> str:
        told = f"{counted(self.kernels, 'kernel')}, {self.compiled} of them compiled"
        return f"{told}, in {self.seconds:.1f} s"


def prepare(
    what: str | Callable[..., Any] | Op | Compiled,
    sizes: Sizes,
    *,
    world: Any = None,
    target: str | Target = "cuda:90",
    num_ranks: int | None = None,
    nodes: Sequence[int] = (),
    dtype: str = "bfloat16",
    config: Any = None,
    gradients: bool = False,
    processes: int | None = None,
) -> Prepared:
    """Compile what calls of an operator, or of a program, launch at these sizes. Collective where a
    world is given.

        weft.prepare(weft.ops.ag_gemm, {"m": range(1, 16385), "n": 7168, "k": 4096}, world=world)
        weft.prepare("gemm_rs", {"m": 512, "n": 4096, "k": 3584}, num_ranks=4, target="cuda:90")

    Calls find all their kernels then: on every rank of the world, which loads them too; without a
    world in Triton's cache (TRITON_CACHE_DIR), for a target that need not be here. One rank of each
    node compiles, in `processes` processes, the others wait. Calls are those that pass `config`, or
    none; with `gradients` also those that torch differentiates, and what these call on their way
    back. A program is prepared with the lowering that it has.

    Shapes  sizes: by name a number, or several: m of all ranks, n and k of one, as the operator's
            card has them; of a program all that its types name. `what`: an operator or its name, a
            card, a weft.program
    Dtypes  dtype: of operands, by torch's name; a program says its own
    Units   processes: of this host, one for each core that it may use if left out
    Raises  UsageError: no such operator, sizes that are missing or unknown, neither a world nor
            num_ranks; CompileError: a kernel that Triton cannot compile, on all ranks, or five
            minutes in which none was (without a world a TimeoutError)
    """
    begin = time.perf_counter()
    op = card_of(what)
    target = parse_target(target) if isinstance(target, str) else target
    if world is not None:
        of_nodes = world.backend.seats.nodes
        target, num_ranks = world.target, world.num_ranks
        nodes = [of_nodes.count(node) for node in sorted(set(of_nodes))]
    elif num_ranks is None:
        raise UsageError(f"prepare: {op.name} for how many ranks? Pass world=, or num_ranks=")
    version = None if world is None else triton_api.unwrap(world.arg.version)
    measured = world.choices if world is not None else choices.checked(
        choices.read(Settings.from_environment(), target, num_ranks)
    )  # fmt: skip
    calls = Calls(config, gradients, version, measured)
    products: set[tuple] = set()
    found = launches_of(op, sizes, num_ranks, target, tuple(nodes), dtype, calls, products)
    if world is not None:
        found["barrier"] = [LeftOut(kernels.barrier, (world.arg, 0), {"num_warps": 1})]
    with compilations.preparing():
        # Of launches that Triton's cache does not tell apart one is enough.
        compiled = _together(world, [alike[0] for alike in found.values()], target, processes)
        if world is not None and target.backend != "emu":
            for one in itertools.chain.from_iterable(found.values()):
                triton_api.load_kernel(one.fn, *one.arguments, **one.options)
            _multiply(products, world.device)
    return Prepared(len(found), compiled, time.perf_counter() - begin)


def card_of(what: Any) -> Op:
    """The card that is meant by an operator or its name, a card, or a weft.program.

    Raises  UsageError: there is none
    """
    operators = provider("collectives")
    if isinstance(what, Op):
        return what
    if isinstance(what, Compiled):
        return _card_of_program(what)
    name = what if isinstance(what, str) else getattr(what, "__name__", "")
    if name in operators.names():
        return operators.card(name)
    known = ", ".join(operators.names())
    raise UsageError(f"{what!r} is no operator and no weft.program; operators are {known}")


@functools.lru_cache(maxsize=256)
def _card_of_program(what: Compiled) -> Op:
    """One for each, however often it is asked for."""
    program = what.stages.program
    named = dict.fromkeys(program_cards.named_sizes(program), 1)

    def run(world: Any, problem: Any, inputs: Mapping[str, Any], config: Any = None) -> Any:
        lowered = what if config is None else what.options(lowering=config.transport)
        return lowered(*inputs.values(), world=world, **problem.open_sizes)

    return program_cards.card(
        program.name, lambda problem: what, run, summary="", default_shape=named
    )


# ---------------------------------------------------------------------------------------------
# What calls launch


@dataclass(frozen=True)
class Calls:
    """How calls come: with which configuration, or what was `measured`; differentiated or not; the
    language's `version`."""

    config: Any = None
    gradients: bool = False
    version: int | None = None
    measured: choices.Choices = field(default_factory=dict)


def launches_of(
    op: Op, sizes: Sizes, num_ranks: int, target: Target, nodes: tuple[int, ...] = (),
    dtype: str = "bfloat16", calls: Calls = Calls(), products: set[tuple] | None = None,
) -> dict[Any, list[LeftOut]]:  # fmt: skip
    """What calls of these sizes launch, by what Triton compiles: of functions that have the same
    text one each. What libraries multiply in them is added to `products`.

    Raises  UsageError: sizes that are missing or unknown
    """
    found: dict[Any, dict[Any, LeftOut]] = {}
    for problem in _in_layouts(problems_of(op, sizes, num_ranks, nodes, dtype)):
        described: Any = op.kernels
        on_heap = (False, True) if hasattr(problem, "in_place") else (False,)
        # Of tokens the last rank may have fewer, and one or none is compiled in.
        ranks = {0, num_ranks - 1} if hasattr(problem, "own_tokens") else {0}
        for is_on_heap, rank in itertools.product(on_heap, ranks):
            inputs = described.inputs(problem, rank)
            world = DescribedWorld(
                num_ranks, target, nodes, is_on_heap, False, calls.version, calls.measured
            )
            world.rank = rank
            if products is not None:
                world.products = products
            for world.is_recorded in (False, True):
                launches = described.launches(problem, world, inputs, calls.config)
                if calls.gradients:
                    launches += described.gradients_launches(problem, world, inputs, calls.config)
                for one in launches:
                    found.setdefault(key_of(one), {}).setdefault(one.fn, one)
    return {key: list(alike.values()) for key, alike in found.items()}


def _multiply(products: Iterable[tuple], device: torch.device) -> None:
    """The library's products, once, of any numbers: the first of some sizes loads kernels."""
    for m, k, strides, _, n, of_right, dtype in sorted(products, key=str):
        left = torch.empty_strided((m, k), strides, dtype=dtype, device=device)
        right = torch.empty_strided((k, n), of_right, dtype=dtype, device=device)
        torch.mm(left, right)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def key_of(launch: LeftOut) -> tuple:
    """What a binary depends on, for one target."""
    one = launch.record()
    told = (one.signature, one.constants, sorted(one.options.items()), one.divisible_by_16)
    return (launch.fn.__module__, one.name, repr(told))


def compile_call(world: Any, op: Op, problem: Any, config: Any) -> None:
    """Compile what such a call launches on this rank, and launch nothing.

    Raises  CompileError: a kernel that Triton cannot compile, and what else a call raises before it
            launches anything
    """
    described, version = op.kernels, triton_api.unwrap(world.arg.version)
    there = DescribedWorld(world.num_ranks, world.target, nodes_of(world), version=version)
    assert isinstance(described, KernelsOf)
    for word, error in _each(
        described.launches(problem, there, described.inputs(problem), config)
    ):  # fmt: skip
        if word == FAILED:
            raise CompileError(error)


def problems_of(
    op: Op, sizes: Sizes, num_ranks: int, nodes: tuple[int, ...], dtype: str
) -> Iterator[Any]:
    """One for each bucket of the sizes.

    Raises  UsageError: sizes that are missing or unknown
    """
    known, is_program = op.default_shape, op.problem is program_cards.Problem
    needed = known if is_program else [name for name in ("m", "n", "k") if name in known]
    for word, names in (
        ("has no", sizes.keys() - known.keys()), ("needs", set(needed) - sizes.keys())
    ):  # fmt: skip
        if names:
            told = f"{op.name} {word} {', '.join(sorted(names))}"
            raise UsageError(f"{told}; its sizes are {', '.join(known) or 'none'}")
    for name, one in sizes.items():
        if isinstance(one, str) or not (hasattr(one, "__index__") or hasattr(one, "__iter__")):
            raise UsageError(
                f"{op.name}: {name}={one!r}; pass a whole number, or several: range(1, 4097)"
            )
    several = [
        [one] if isinstance(one, int)
        else buckets_of(one, num_ranks) if is_program or name == "m" else list(one)
        for name, one in sizes.items()
    ]  # fmt: skip
    more = {"nodes": nodes} if op.takes_nodes and len(nodes) > 1 else {}
    for extents in itertools.product(*several):
        shape = {**op.default_shape, **dict(zip(sizes, extents, strict=True))}
        yield op.make_problem(num_ranks, shape, dtype, **more)


def _in_layouts(problems: Iterable[Any]) -> Iterator[Any]:
    """Each with B in both ways, where it may lie so."""
    for problem in problems:
        yield problem
        if hasattr(problem, "b_is_nk"):
            yield replace(problem, b_is_nk=not problem.b_is_nk)


# ---------------------------------------------------------------------------------------------
# Compiling them


def _together(
    world: Any, launches: Sequence[LeftOut], target: Target, processes: int | None
) -> int:
    """Compile them by the first rank of each node; how many were not in the cache there.

    Raises  CompileError: on every rank, what the first one met
    """
    if world is None:
        return _compile(launches, target, processes, is_here=False)
    count, error, on_nodes = 0, None, world.backend.seats.nodes
    if on_nodes.index(on_nodes[world.rank]) == world.rank:
        try:
            count = _compile(launches, target, processes, is_here=target.backend == "emu")
        except (CompileError, TimeoutError) as failed:
            error = failed.message
    told = world.backend.exchange((count, error), 2 * PATIENCE_S + len(launches))
    for rank, (_, error) in enumerate(told):
        if error is not None:
            raise CompileError(f"prepare, on rank {rank}: {error}")
    return sum(count for count, _ in told)


def _compile(
    launches: Sequence[LeftOut], target: Target, processes: int | None, is_here: bool
) -> int:
    """Compile them; how many were not in Triton's cache. `is_here`: for this process, which has an
    active driver."""
    processes = min(processes or len(os.sched_getaffinity(0)), len(launches))
    with provider("console").bar("compiling", len(launches)) as bar:
        if is_here:
            said = _each(launches)
        else:
            said = _by_processes([launches[i::processes] for i in range(processes)], target)
        count = 0
        for word, error in said:
            if word == FAILED:
                raise CompileError(error)
            count += word == COMPILED
            bar.advance()
    return count


def _each(launches: Iterable[LeftOut]) -> Iterator[tuple[bytes, str]]:
    """Compile one after the other; what became of each."""
    fresh: list[str] = []
    with triton_api.watched_compilations(fresh.append):
        for one in launches:
            fresh.clear()
            try:
                triton_api.compile_launch(one)
            except Exception as error:
                yield FAILED, f"{one.fn.__name__} does not compile: {error}"
                return
            yield COMPILED if fresh else FOUND, ""


def _by_processes(
    parts: Sequence[Sequence[LeftOut]], target: Target
) -> Iterator[tuple[bytes, str]]:
    """The same, of each part by a process of its own: a copy of this one, which touches no device.

    Raises  TimeoutError: none of them is through with a kernel within PATIENCE_S
    """
    children: dict[int, int] = {}  # by the pipe that each writes to, as is what it has to do
    left: dict[int, int] = {}
    try:
        with selectors.DefaultSelector() as pipes:
            for part in parts:
                read, write = os.pipe()
                if (child := os.fork()) == 0:
                    _be_a_child(part, target, write)
                os.close(write)
                children[read], left[read] = child, len(part)
                pipes.register(read, selectors.EVENT_READ)
            while children:
                ready = pipes.select(PATIENCE_S)
                if not ready:
                    raise TimeoutError(
                        f"prepare: {counted(len(children), 'process')} compiled nothing for "
                        f"{PATIENCE_S:.0f} s, where a kernel takes a few: too many processes?"
                    )
                for key, _ in ready:
                    text = os.read(key.fd, 1 << 16)
                    words, failed, error = text.partition(FAILED)
                    yield from ((words[i : i + 1], "") for i in range(len(words)))
                    left[key.fd] -= len(words)
                    if failed:
                        yield FAILED, error.decode(errors="replace")
                    if not text:
                        if left[key.fd]:
                            yield FAILED, f"a process that compiled ended, {left[key.fd]} to go"
                        pipes.unregister(key.fd)
                        os.close(key.fd)
                        os.waitpid(children.pop(key.fd), 0)
    finally:
        for read, child in children.items():
            os.close(read)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _be_a_child(launches: Sequence[LeftOut], target: Target, write: int) -> None:
    """Compile, say what became of each kernel, and end without what a process does at its end."""
    try:
        with triton_api.compiling_for(target):
            for word, error in _each(launches):
                os.write(write, word + error.encode()[: 1 << 15])
    finally:
        os._exit(0)
