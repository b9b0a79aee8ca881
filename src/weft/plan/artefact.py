"""Calls of an operator or a program at all sizes of a set, compiled ahead of time.

    build("ag_gemm", {"m": range(1, 4097), "n": 7168, "k": 4096}, num_ranks=2,
          targets=["cuda:90"]).write("DIR")

No GPU is needed. Each call is made in a world without memory and written down (queued.py): rank by
rank, size by size, eager and recorded. What the same kernels are launched for, with other numbers,
is one table (columns.py). `weft.runtime.load` runs what lies in the folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from weft.base import artefacts, columns
from weft.base.card import Op
from weft.base.errors import UnsupportedError, UsageError, WeftError
from weft.base.providers import provider
from weft.base.target import Target, parse_target
from weft.base.versions import version_of
from weft.compiler import Compiled, Settings
from weft.compiler.passes.attend import attend
from weft.compiler.passes.engines import pairs
from weft.compiler.passes.fuse import fuse
from weft.language import triton_api
from weft.language.triton_api import LeftOut
from weft.language.world_arg import language_version
from weft.plan import prepare, program_cards
from weft.plan.described import KernelsOf, is_by_others
from weft.plan.queued import Kernels, Run, write_down

# The binary of each backend, and the warp that its threads are counted by.
ENDINGS = {"cuda": "cubin", "hip": "hsaco"}
SCRATCH = ("global_scratch_size", "profile_scratch_size")
# Of a descriptor what the driver is told when it is made.
OF_DESCRIPTORS = ("swizzle", "elem_size", "elem_type", "block_size", "fp4_padded")


@dataclass(frozen=True)
class BuiltKernel:
    """One kernel of an artefact: the launch that asked for it, and what Triton made of it."""

    id: str
    launch: LeftOut
    target: Target
    compiled: Any

    @property
    def code(self) -> bytes:
        return self.compiled.asm[ENDINGS[self.target.backend]]


@dataclass
class Built:
    """An artefact in memory: `files` by path, the manifest among them."""

    kernels: list[BuiltKernel] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    calls: int = 0

    def write(self, folder: str | Path) -> None:
        """Into a folder, the manifest last: what is interrupted leaves no artefact. Files of one
        that was there before go."""
        there = Path(folder)
        try:
            before = [one["file"] for one in artefacts.entries(artefacts.read_manifest(there))]
        except UsageError:
            before = []
        (there / artefacts.MANIFEST).unlink(missing_ok=True)
        for name in set(before) - self.files.keys():
            (there / name).unlink(missing_ok=True)
        by_name = sorted(self.files.items(), key=lambda one: one[0] == artefacts.MANIFEST)
        for name, content in by_name:
            path = there / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def build(
    what: str | Callable[..., Any] | Op | Compiled, sizes: prepare.Sizes, *, num_ranks: int,
    targets: Sequence[str | Target] = ("cuda:90",), dtype: str = "bfloat16", config: Any = None,
    processes: int | None = None,
) -> Built:  # fmt: skip
    """Compile what calls of these sizes launch, and write down what they queue.

    A call that names no configuration is done as it is chosen on the target, by the best that is
    weft's own where that would be a library's. Ranks are of one node.

    Shapes  sizes, `what`: as of `weft.prepare`
    Units   processes: of this host that compile, one for each core if left out
    Raises  UsageError: no such operator, sizes that are missing or unknown; UnsupportedError: a
            call that does what no artefact holds; CompileError
    """
    op, built = prepare.card_of(what), Built()
    several = {name: [one] if isinstance(one, int) else sorted(one) for name, one in sizes.items()}
    said = {}
    for one in targets:
        target = parse_target(one) if isinstance(one, str) else one
        if target.backend not in ENDINGS:
            raise UsageError(f"an artefact is for {' or '.join(ENDINGS)}, not for {target}")
        said[target.name] = _of_target(
            built, op, several, num_ranks, target, dtype, config, processes
        )
    manifest = {
        "format": artefacts.FORMAT, "op": op.name, "dtype": dtype, "ranks": num_ranks,
        "sizes": {name: columns.merge(extents) if len(extents) > 1 else extents[0]
                  for name, extents in several.items()},
        "counts": {name: len(extents) for name, extents in several.items()},
        "language": language_version(), "targets": said,
        "constants": [{"file": name, "sha256": artefacts.digest(content)}
                      for name, content in built.files.items() if name.startswith("constants/")],
        "versions": {name: version_of(name) for name in ("weft", "triton", "torch")},
    }  # fmt: skip
    text = artefacts.text_of(artefacts.sealed(manifest))
    built.files[artefacts.MANIFEST] = text.encode()
    return built


def _of_target(
    built: Built, op: Op, sizes: Mapping[str, Sequence[int]], num_ranks: int, target: Target,
    dtype: str, config: Any, processes: int | None,
) -> dict[str, Any]:  # fmt: skip
    """What the manifest says of a target."""
    kernels = Kernels()
    trees: list[list[dict[str, Any]]] = [[] for _ in range(num_ranks)]
    problems = list(_problems(op, sizes, num_ranks, dtype))
    with provider("console").bar("writing calls down", len(problems)) as bar:
        for extents, problem in problems:
            for is_recorded in (False, True):
                for rank, tree in enumerate(
                    _on_all_ranks(built, op, problem, target, config, is_recorded, kernels)
                ):
                    trees[rank].append({"sizes": extents, "recorded": is_recorded, **tree})
            bar.advance()
    built.calls += sum(map(len, trees))
    ids, entries = _compiled(built, kernels, target, processes)
    return {
        "arch": str(target.arch), "num_sms": target.num_sms, "kernels": entries,
        "calls": [_kept(built, "calls", _merged(of_rank, ids), "json") for of_rank in trees],
    }  # fmt: skip


def _problems(
    op: Op, sizes: Mapping[str, Sequence[int]], num_ranks: int, dtype: str
) -> Iterator[tuple[dict[str, int], Any]]:
    for extents in itertools.product(*sizes.values()):
        named = dict(zip(sizes, extents, strict=True))
        for problem in prepare._in_layouts(
            [next(prepare.problems_of(op, named, num_ranks, (), dtype))]
        ):
            yield named, problem


def _on_all_ranks(
    built: Built, op: Op, problem: Any, target: Target, config: Any, is_recorded: bool,
    kernels: Kernels,
) -> list[dict[str, Any]]:  # fmt: skip
    """By rank what the call queues, done in the first way that is weft's own on all of them.

    Of a configuration that is named and cannot be recorded: nothing.

    Raises  UnsupportedError, ConfigError: none is; as the last one says
    """
    described = op.kernels
    assert isinstance(described, KernelsOf)
    take = lambda launch: kernels.number_of(launch, prepare.key_of)  # noqa: E731
    keep = lambda values: _kept(built, "constants", values, "bin")["file"]  # noqa: E731
    refused: WeftError | None = None
    for run in _ways(op, problem, target, config):
        try:
            return [
                write_down(run, problem, described.inputs(problem, rank), rank, target,
                           is_recorded, take, keep)
                for rank in range(problem.num_ranks)
            ]  # fmt: skip
        except (UnsupportedError, UsageError) as error:
            refused = error
    if is_recorded and config is not None and isinstance(refused, UsageError):
        return []
    raise refused or UnsupportedError(f"{op.name} has no configuration for {target} at {problem}")


def _ways(op: Op, problem: Any, target: Target, config: Any) -> Iterator[Run]:
    """How the call may be made, the best first: as it is chosen; where libraries would do a part of
    it, a program with kernels of its own for that; what else there is."""
    described: Any = op.kernels
    if config is not None:
        yield partial(described.run, config=config)
        return
    yield described.run
    if op.problem is program_cards.Problem:
        placed = problem.compiled.stages.tasks["place"]
        hidden = (one.name for one, _ in pairs(fuse(attend(placed))))
        engines = dict.fromkeys(hidden, "sm_push")
        fused = problem.compiled.options(
            lowering=program_cards.OVERLAPPED, settings=Settings(engines=engines)
        )
        yield lambda world, problem, inputs: fused(
            *inputs.values(), world=world, **problem.open_sizes
        )
    for one in op.candidates(problem, target):
        if not is_by_others(one):
            yield partial(described.run, config=one)


def _merged(trees: Iterable[dict[str, Any]], ids: Sequence[str]) -> bytes:
    """Calls of one form as one table each, in the order of their sizes."""
    forms: dict[str, list[Any]] = {}
    for tree in trees:
        for step in tree["steps"]:
            if step[0] == "launch":
                step[2] = ids[int(step[2].removeprefix("#"))]
        forms.setdefault(columns.form_of(tree), []).append(tree)
    tables = [{"count": len(alike), "call": columns.merge(alike)} for alike in forms.values()]
    return artefacts.text_of(tables).encode()


def _kept(built: Built, folder: str, content: bytes, ending: str) -> dict[str, str]:
    entry = artefacts.file_of(folder, content, ending)
    built.files[entry["file"]] = content
    return entry


def _compiled(
    built: Built, kernels: Kernels, target: Target, processes: int | None
) -> tuple[list[str], dict[str, Any]]:
    """By number a kernel's name, and by name what a loader must know."""
    prepare._compile(kernels.launches, target, processes, is_here=False)
    ids, entries = [], {}
    with triton_api.compiling_for(target):
        for launch in kernels.launches:
            compiled = triton_api.compile_launch(launch)
            entry = _entry(built, launch, compiled, target)
            name = (
                f"{launch.fn.__name__}-{artefacts.digest(artefacts.text_of(entry).encode())[:16]}"
            )
            if name not in entries:
                built.kernels.append(BuiltKernel(name, launch, target, compiled))
            ids.append(name)
            entries[name] = entry
    return ids, entries


def _entry(built: Built, launch: LeftOut, compiled: Any, target: Target) -> dict[str, Any]:
    told = compiled.metadata._asdict()
    name = launch.fn.__name__
    scratch = sum(told.get(one) or 0 for one in SCRATCH)
    for what, found, usual in (
        ("num_ctas", told.get("num_ctas", 1), 1), ("scratch memory of Triton's", scratch, 0),
        ("launch_pdl", bool(told.get("launch_pdl")), False),
    ):  # fmt: skip
        if found != usual:
            raise UnsupportedError(
                f"{name} is compiled with {what} {found}; artefacts take {usual}"
            )
    descriptors = [
        one and {key: one[key] for key in OF_DESCRIPTORS if key in one}
        for one in told.get("tensordesc_meta") or ()
    ]
    code = compiled.asm[ENDINGS[target.backend]]
    return {
        **_kept(built, "kernels", code, ENDINGS[target.backend]), "function": told["name"],
        "threads": told["num_warps"] * target.warp_size, "shared_bytes": told["shared"],
        "cooperative": bool(told.get("launch_cooperative_grid")), "descriptors": descriptors,
    }  # fmt: skip
