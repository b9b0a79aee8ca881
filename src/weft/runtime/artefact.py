"""Operators and programs that `weft compile -o DIR` has compiled, run without a compiler.

    ag_gemm = weft.runtime.load("DIR")
    out = ag_gemm(a, b, world=world)            at any size that DIR was compiled for
    out = ag_gemm(a, b, world=world, m=997)     where shards differ, as of the operator itself

Neither Triton nor a compiler is imported. DIR holds binaries and JSON (base/artefacts.py), nothing
that would be run on the host; all of it is checked before any is used. What a call queues was
written down for each rank and size: here its addresses are put in, as in a command list.

Limits  ranks of one node on NVIDIA GPUs; results are fresh; no gradients
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from math import prod
from operator import or_
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weft.base import artefacts, columns
from weft.base.errors import DtypeError, ShapeError, UnsupportedError, UsageError
from weft.language.world_arg import SlotArg, language_version
from weft.runtime.backends.modules import Binary, modules
from weft.runtime.commands import Commands
from weft.runtime.packed_launch import Launch
from weft.runtime.world import World

# Kernels were compiled for tensors that begin at 16 bytes.
ALIGN = 16

# What was made in a call, and its tensors.
Result = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]


def load(folder: str | Path) -> Artefact:
    """What was compiled into a folder, once every file of it is as it was written.

    Raises  UsageError: no artefact there, of another format or version, damaged or changed
    """
    return Artefact(Path(folder))


class Artefact:
    """An operator or a program, compiled for ranks, sizes and targets that its manifest names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = artefacts.read_manifest(folder)
        self.op: str = self.manifest["op"]
        self.num_ranks: int = self.manifest["ranks"]
        versions, here = self.manifest["versions"], language_version()
        if self.manifest["language"] != here:
            raise UsageError(
                f"{folder} was compiled by weft {versions['weft']} whose kernels' language has the "
                f"version {self.manifest['language']}; this weft's is {here}: compile it again"
            )
        # All files, whichever rank and target this is: what is damaged is found when it is loaded.
        self._files = {
            entry["file"]: artefacts.read_file(folder, entry)
            for entry in artefacts.entries(self.manifest)
        }
        self._of_worlds: WeakKeyDictionary[World, _OnWorld] = WeakKeyDictionary()

    def __repr__(self) -> str:
        targets = ", ".join(self.manifest["targets"])
        return f"Artefact({self.op!r}, {self.num_ranks} ranks, {self.sizes}, for {targets})"

    @property
    def sizes(self) -> str:
        """The sizes that it was compiled for, in words."""
        return ", ".join(
            f"{name}={_in_words(extents, self.manifest['counts'][name])}"
            for name, extents in self.manifest["sizes"].items()
        )

    def prepare(self, world: World) -> None:
        """Load every kernel; the first call does, where this was not called before."""
        self._on(world)

    def __call__(self, *tensors: torch.Tensor, world: World, **named: Any) -> Any:
        """The operator's or the program's results. Collective.

        Tensors by place or by name, as the operator takes them; sizes by name where the tensors of
        this rank do not tell them.

        Sync    stream-ordered on the current stream; can be recorded once it was called with these
                sizes
        Raises  UsageError: another machine or world than it was compiled for, tensors that are
                missing or elsewhere; ShapeError, DtypeError: none of its calls takes such tensors
        """
        return self._on(world).call(tensors, named)

    def _on(self, world: World) -> _OnWorld:
        found = self._of_worlds.get(world)
        if found is None:
            target = self._fitting(world)
            content = self._files[target["calls"][world.rank]["file"]]
            found = self._of_worlds[world] = _OnWorld(self, world, target, json.loads(content))
        return found

    def _fitting(self, world: World) -> Mapping[str, Any]:
        """Raises  UsageError: the world is another than it was compiled for"""
        if world.num_ranks != self.num_ranks:
            raise UsageError(
                f"{self.folder} is {self.op} on {self.num_ranks} ranks, and this world has "
                f"{world.num_ranks}: compile it with --ranks {world.num_ranks}"
            )
        if (nodes := len(set(world.backend.seats.nodes))) > 1:
            raise UsageError(f"{self.folder} is for ranks of one node; this world has {nodes}")
        target = self.manifest["targets"].get(world.target.name)
        if target is None:
            known = ", ".join(self.manifest["targets"])
            raise UsageError(
                f"{self.folder} is compiled for {known}, and this is {world.target}: compile it "
                f"with --target {world.target}"
            )
        if world.target.num_sms < target["num_sms"]:
            raise UsageError(
                f"{self.folder} launches up to {target['num_sms']} programs that wait for each "
                f"other, and this GPU has {world.target.num_sms} SMs"
            )
        if world.backend.by_address is None:
            raise UnsupportedError(f"{self.folder} holds binaries, which run on GPUs alone")
        return target

    def refuse(self, words: str, world: World) -> ShapeError:
        return ShapeError(
            f"{self.op}: rank {world.rank} of {world.num_ranks} passes {words}, but {self.folder} "
            f"was compiled for {self.sizes} of {self.manifest['dtype']}; compile it for such sizes"
        )


def _in_words(extents: Any, count: int) -> str:
    every = [columns.at(extents, i) for i in range(count)]
    if count > 2 and every[-1] - every[0] == count - 1:
        return f"{every[0]}..{every[-1]}"
    return "/".join(map(str, every[:8])) + ("/.." if count > 8 else "")


def _kind(tensor: Any) -> tuple:
    """By what calls are found."""
    return str(tensor.dtype), tuple(tensor.shape), _lies(tensor.shape, tensor.stride())


def _kind_of(told: Mapping[str, Any]) -> tuple:
    shape = tuple(told["shape"])
    return f"torch.{told['dtype']}", shape, _lies(shape, told["strides"])


def _lies(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Steps along dimensions where a tensor has more than one element, else 0."""
    steps = (step if extent > 1 else 0 for extent, step in zip(shape, strides))
    return tuple(steps) if prod(shape) else ()


class _OnWorld:
    """An artefact's calls on one rank. It does not hold the world."""

    def __init__(
        self, artefact: Artefact, world: World, target: Mapping[str, Any], tables: Sequence[Any]
    ) -> None:  # fmt: skip
        self.artefact, self.tables = artefact, tables
        self._world = world._itself
        self.driver = modules(world.target.backend)
        self.device = world.device
        self.kernels = {name: _Kernel(artefact, one) for name, one in target["kernels"].items()}
        for kernel in self.kernels.values():
            self.driver.function(kernel.binary, world.device.index)
        # What a call's tensors are called: the same in all of them.
        self.names = [one["name"] for one in tables[0]["call"]["inputs"]]
        self._is_recordable = any(one["call"]["recorded"] for one in tables)
        self._sizes = set(artefact.manifest["sizes"])

    @cached_property
    def _found(self) -> dict[tuple, list[tuple[int, int]]]:
        """Tables and numbers in them, by what tensors of a call are like."""
        found: dict[tuple, list[tuple[int, int]]] = {}
        for number, table in enumerate(self.tables):
            call = table["call"]
            for i in range(table["count"]):
                kinds = tuple(map(_kind_of, columns.at(call["inputs"], i)))
                found.setdefault((call["recorded"], kinds), []).append((number, i))
        return found

    def call(self, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        world = self._world()
        assert world is not None
        tensors, sizes = self._bound(given, named)
        # As of operators: where torch is asked for deterministic algorithms eager calls are done as
        # recorded ones, so that both have the same bits.
        is_asked = self._is_recordable and torch.are_deterministic_algorithms_enabled()
        as_recorded = world.is_recording() or is_asked
        try:
            # As they are: words for them would take longer than all the rest.
            lie = [(one.dtype, one.shape, one.stride(), one.device, one.requires_grad)
                   for one in tensors]  # fmt: skip
        except AttributeError:
            self._check(tensors, world)  # something that is no tensor
            raise
        grads = torch.is_grad_enabled()
        key = (self.artefact.manifest["sha256"], grads, *lie, *sorted(sizes.items()))
        call = world.calls.get((as_recorded, *key))
        if call is None:
            self._check(tensors, world)
            kinds = tuple(map(_kind, tensors))
            call = self._new_call(world, tensors, kinds, sizes, as_recorded)
            world.calls[(as_recorded, *key)] = call
            if not as_recorded and self._is_recordable:
                # What a recorded call needs is had now: in a recording it cannot be.
                recorded = self._new_call(world, tensors, kinds, sizes, True)
                recorded.reserve()
                world.calls[(True, *key)] = recorded
        return call.run(tensors)

    def _bound(
        self, given: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, int]]:
        """Tensors in their order, and the sizes that are given."""
        names, op = self.names, self.artefact.op
        tensors = {**dict(zip(names, given)), **{n: one for n, one in named.items() if n in names}}
        sizes = {name: one for name, one in named.items() if name not in names and one is not None}
        if len(given) > len(names) or tensors.keys() != set(names):
            raise UsageError(
                f"{op} takes {', '.join(names)}; given are {len(given)} by place, and "
                f"{', '.join(named) or 'none'} by name"
            )
        if unknown := sorted(sizes.keys() - self._sizes):
            raise UsageError(
                f"{op}: {', '.join(unknown)} is neither a tensor ({', '.join(names)}) nor a size "
                f"({', '.join(self.artefact.manifest['sizes'])}) of {self.artefact.folder}; what "
                "else the operator takes was settled when it was compiled"
            )
        return [tensors[name] for name in names], sizes

    def _check(self, tensors: Sequence[Any], world: World) -> None:
        op = self.artefact.op
        for name, one, told in zip(self.names, tensors, self.tables[0]["call"]["inputs"]):
            if not isinstance(one, torch.Tensor):
                raise UsageError(f"{op}: {name} is a {type(one).__name__}, not a tensor")
            if one.device != world.device:
                raise UsageError(f"{op}: {name} is on {one.device}, the world on {world.device}")
            if str(one.dtype) != f"torch.{told['dtype']}":
                raise DtypeError(
                    f"{op}: {name} is {one.dtype}, but {self.artefact.folder} was compiled for "
                    f"{told['dtype']}"
                )
            if one.requires_grad and torch.is_grad_enabled():
                raise UsageError(
                    f"{op}: {name} requires a gradient, and artefacts compute none: call it under "
                    "torch.no_grad()"
                )

    def _new_call(
        self, world: World, tensors: Sequence[Any], kinds: tuple, sizes: Mapping[str, int],
        as_recorded: bool,
    ) -> _Call:  # fmt: skip
        if as_recorded and not self._is_recordable:
            raise UsageError(
                f"{self.artefact.folder} holds no calls that can be recorded: it was compiled with "
                "a configuration whose copy engines wait for tiles; name none, or another"
            )
        fitting = self._found.get((as_recorded, kinds), [])
        if not fitting:  # rows one behind the other are a way in which all may lie
            packed = tuple((dtype, shape, _packed(shape)) for dtype, shape, _ in kinds)
            fitting = self._found.get((as_recorded, packed), [])
        told = [(one, self._sizes_at(*one)) for one in fitting]
        told = [(one, has) for one, has in told if sizes.items() <= has.items()]
        if len({tuple(has.items()) for _, has in told}) > 1:
            # As operators do: where nobody says m, all ranks have as many rows.
            told = [(one, has) for one, has in told if has.get("m", 1) % world.num_ranks == 0]
        if len({tuple(has.items()) for _, has in told}) > 1:
            several = "; ".join(str(has) for _, has in told)
            raise ShapeError(f"{self.artefact.op}: these tensors are of {several}: say which")
        if not told:
            shapes = ", ".join(f"{name} {tuple(one.shape)} of strides {one.stride()}"
                               for name, one in zip(self.names, tensors))  # fmt: skip
            given = "".join(f", {name}={size}" for name, size in sizes.items())
            raise self.artefact.refuse(shapes + given, world)
        (number, i), has = told[0]
        return _Call(self, world, columns.at(self.tables[number]["call"], i), has, kinds)

    def _sizes_at(self, number: int, i: int) -> dict[str, int]:
        return columns.at(self.tables[number]["call"]["sizes"], i)

    def constant(self, name: str) -> torch.Tensor:
        """A table of a call's own, on the device."""
        values = bytearray(self.artefact._files[name])
        return torch.frombuffer(values, dtype=torch.uint8).to(self.device)


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    return _lies(shape, [prod(shape[axis + 1 :]) for axis in range(len(shape))])


class _Kernel:
    """One kernel of an artefact."""

    def __init__(self, artefact: Artefact, entry: Mapping[str, Any]) -> None:
        self.binary = Binary(
            artefact._files[entry["file"]], entry["function"], entry["threads"],
            entry["shared_bytes"], entry["cooperative"],
        )  # fmt: skip
        self.descriptors: Sequence[Any] = entry["descriptors"]


class _Call:
    """A call at given sizes: found once, run for any tensors of these `kinds`."""

    def __init__(
        self, of: _OnWorld, world: World, call: Mapping[str, Any], sizes: Mapping[str, int],
        kinds: Sequence[tuple],
    ) -> None:  # fmt: skip
        self.world, self.driver = world, of.driver
        inputs, results = call["inputs"], call["results"]
        # Inputs that lie otherwise than kernels read them.
        self._lie_apart = [i for i, told in enumerate(inputs) if kinds[i] != _kind_of(told)]
        said = ", ".join(f"{name}={size}" for name, size in sizes.items())
        # What all ranks must call alike: of one artefact.
        self._name = (
            f"{of.artefact.op} of {said}, compiled as {of.artefact.manifest['sha256'][:12]}"
        )
        self._slots = [_asked(world, one) for one in call["slots"]]
        self._scratch = [(one["key"], one["bytes"]) for one in call["scratch"]]
        self._constants = [of.constant(name) for name in call["constants"]]
        self._fixed = [0, world.table.data_ptr(), *(one.data_ptr() for one in self._constants)]
        self._made = [_like(i, size, results, world.device) for i, size in enumerate(call["made"])]
        self._places: dict[str, int] = {"null": 0, "table": 1}
        for kind, count in (("constant", len(self._constants)), ("made", len(self._made)),
                            ("scratch", len(self._scratch))):  # fmt: skip
            self._add(f"{kind}:{i}" for i in range(count))
        self._add(f"input:{one['name']}" for one in inputs)
        # Of each slot, its parts by name.
        self._parts = [
            [*(f"arg.{name}" for name in SlotArg._fields), *one["buffers"], *one["signals"],
             *(one["shared"] or ())]
            for one in call["slots"]
        ]  # fmt: skip
        for i, parts in enumerate(self._parts):
            self._add(f"slot:{i}:{part}" for part in parts)
        self._of_slots: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._distances = world.distances
        self._commands = Commands(world)
        for step in call["steps"]:
            self._add_step(of, *step)
        self._results = [self._result(one, inputs) for one in results]

    def _add(self, names: Iterator[str]) -> None:
        for name in names:
            self._places[name] = len(self._places)

    def _find(self, address: Sequence[Any]) -> tuple[int, int]:
        name, peer, distance = address
        return self._places[name], distance + (0 if peer < 0 else self._distances[peer])

    def reserve(self) -> None:
        """Have all that a call needs before one is recorded. Collective where memory is lacking."""
        for one in self._slots:
            one.reserve()
        for key, nbytes in self._scratch:
            self.world.scratch(key, nbytes)

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Queue the call; its results."""
        world = self.world
        if self._lie_apart:
            tensors = [one.contiguous() if i in self._lie_apart else one
                       for i, one in enumerate(tensors)]  # fmt: skip
        given = [one.data_ptr() for one in tensors]
        if reduce(or_, given, 0) % ALIGN:
            tensors = [one.clone() if one.data_ptr() % ALIGN else one for one in tensors]
            given = [one.data_ptr() for one in tensors]
        world.operator_call(self._name)
        is_recording = world.is_recording()
        slots = [one.take(is_recording) for one in self._slots]
        made = [torch.empty_like(one) for one in self._made]
        places = [*self._fixed, *(one.data_ptr() for one in made)]
        places += [world.scratch(key, nbytes).data_ptr() for key, nbytes in self._scratch]
        places += given
        for slot, parts in zip(slots, self._parts):
            places += self._of_slots.get(slot) or self._parts_of(slot, parts)
        self._commands.run(places)
        results = tuple(result(made, tensors) for result in self._results)
        return results[0] if len(results) == 1 else results

    def _parts_of(self, slot: Any, parts: Sequence[str]) -> list[int]:
        """Where a slot's parts are."""
        holders = [(slot.arg if one.startswith("arg.") else slot, one.removeprefix("arg."))
                   for one in parts]  # fmt: skip
        found = self._of_slots[slot] = [getattr(*one).data_ptr() for one in holders]
        return found

    def _result(self, told: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]]) -> Result:
        """What gives a result, of what was made in a call and what it was given."""
        (name, _, distance), dtype = told["at"], _dtype(told["dtype"])
        shape, strides, device = told["shape"], told["strides"], self.world.device
        if name == "null":
            return lambda made, tensors: torch.empty(shape, dtype=dtype, device=device)
        kind, _, which = name.partition(":")
        if kind == "input":
            number = [one["name"] for one in inputs].index(which)
            return lambda made, tensors: tensors[number]
        number, like = int(which), self._made[int(which)]
        if _is_whole(told, like):
            return lambda made, tensors: made[number]
        end = distance + prod(shape) * dtype.itemsize

        def view(made: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return made[number][distance:end].view(dtype).as_strided(shape, strides)

        return view

    def _add_step(self, of: _OnWorld, kind: str, stream: str, *what: Any) -> None:
        """Raises  UsageError: a step that is unknown here"""
        add, find = self._commands, self._find
        if kind == "launch":
            name, grid, words = what
            kernel = of.kernels[name]
            add.call(stream, Launch(of.driver, kernel, grid, words, find, of.device.index))
        elif kind == "copy":
            dst, src, nbytes = what
            add.copy(stream, find(dst), find(src), nbytes)
        elif kind == "copy_2d":
            dst, src, extent, pitches = what
            add.copy_rows(stream, find(dst), find(src), extent, pitches)
        elif kind == "token":
            add.take_token(stream, find(*what))
        elif kind == "wait":
            add.wait(stream, *what)
        else:
            raise UsageError(f"{of.artefact.folder} has a step {kind!r}, which is unknown here")


def _asked(world: World, told: Mapping[str, Any]) -> Any:
    """What a workspace is asked for at each call."""

    def parts(name: str) -> Any:
        found = told[name]
        return found if found is None else {
            part: (tuple(size) if isinstance(size, list) else size, _dtype(dtype))
            for part, (size, dtype) in found.items()
        }  # fmt: skip

    return world.asked(
        told["key"],
        parts("buffers"),
        parts("signals"),
        num_slots=told["num_slots"],
        shared=parts("shared"),
    )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"an artefact names the dtype {name!r}, which this torch has not")
    return found


def _like(
    number: int, nbytes: int, results: Sequence[Mapping[str, Any]], device: torch.device
) -> torch.Tensor:
    """What is made at each call is like this: the only result in it, or as many bytes."""
    inside = [told for told in results if told["at"][0] == f"made:{number}"]
    if len(inside) == 1:
        (told,) = inside
        dtype, shape = _dtype(told["dtype"]), tuple(told["shape"])
        is_packed = tuple(told["strides"]) == torch.empty(shape, device="meta").stride()
        if told["at"][2] == 0 and is_packed and prod(shape) * dtype.itemsize == nbytes:
            return _of_shape(shape, dtype, device)
    return _of_shape((nbytes,), torch.uint8, device)


def _of_shape(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of one element in memory, where there are more."""
    return torch.empty(shape if prod(shape) <= 1 else (), dtype=dtype, device=device).expand(shape)


def _is_whole(told: Mapping[str, Any], like: torch.Tensor) -> bool:
    """Is all of what is made the result?"""
    is_at_once = told["at"][2] == 0 and like.dtype == _dtype(told["dtype"])
    return is_at_once and like.shape == torch.Size(told["shape"])
