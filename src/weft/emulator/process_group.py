"""A process group of emulated ranks, under any backend's name.

Every collective is a `Meeting`: a rank leaves a copy of its input and, once all have come,
computes its own output with ordinary torch operations, so that the checker sees the reads and
writes of each rank as its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.base.errors import DtypeError, PeerError, ShapeError, UnsupportedError
from weft.base.user_place import user_place
from weft.emulator.meetings import Meeting, Meetings

ReduceOp = dist.ReduceOp
# Outputs, each with what is written into it; made of the meeting and of everybody's values.
Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
Arrivals = Callable[[Meeting, list[Any]], Pairs]

_ELEMENTWISE = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _reduce_name(op: Any) -> str:
    op = getattr(op, "op", op)
    return str(op).rsplit(".", 1)[-1]


def reduce_tensors(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """The reduction of one tensor per rank, in rank order: the same bits on every rank."""
    name = _reduce_name(op)
    if name not in _ELEMENTWISE:
        raise UnsupportedError(
            f"torch.distributed reduction {name} is not emulated; there are "
            f"{', '.join(_ELEMENTWISE)}",
            place=user_place(),
        )
    total = tensors[0]
    for tensor in tensors[1:]:
        total = _ELEMENTWISE[name](total, tensor)
    if name == "AVG":
        total = total / len(tensors) if total.is_floating_point() else total // len(tensors)
    return total


class EmulatedWork(dist.Work):
    """A collective under way: `wait` blocks the rank's host and then writes the outputs."""

    def __init__(
        self, finish: Callable[[], None], is_ready: Callable[[], bool],
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._is_ready = is_ready
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        if self._finish is not None and self._is_ready():
            self.wait()
        return self._finish is None

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class EmulatedGroup(dist.ProcessGroup):
    """One rank's view of one group; `members` are ranks of the default group."""

    def __init__(
        self, meetings: Meetings, name: str, rank: int, members: Sequence[int], backend: str
    ) -> None:
        super().__init__(rank, len(members))
        self.meetings = meetings
        self.emulated_name = name
        self.position = rank
        self.members = tuple(members)
        self.backend = backend

    # ---- what torch asks of a group

    pg_name = group_name = group_desc = property(lambda self: self.emulated_name)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def rank(self) -> int:
        return self.position

    def size(self) -> int:
        return len(self.members)

    def name(self) -> str:
        return "emulated"

    getBackendName = name

    def __repr__(self) -> str:
        return f"EmulatedGroup({self.emulated_name}, rank={self.position}, of {self.members})"

    def shutdown(self, *_: Any) -> None:
        pass

    abort = set_timeout = shutdown

    # ---- the frame of every collective

    def _collective(
        self, what: str, value: Any, arrivals: Arrivals, sources: Sequence[int] | None = None,
        opts: Any = None, outputs: Sequence[torch.Tensor] = (),
    ) -> EmulatedWork:  # fmt: skip
        """Leave `value`; once those of `sources` are there, write what `arrivals` makes of all."""
        group = (self.emulated_name, self.members)
        meeting = self.meetings.enter(group, self.members, self.position, what, value)
        name = what.partition("(")[0]

        def complete() -> None:
            _write_all(name, arrivals(meeting, meeting.wait(self.position, sources)))
            meeting.leave()

        needed = range(self.size()) if sources is None else sources
        work = EmulatedWork(complete, lambda: all(i in meeting.values for i in needed), outputs)
        if not getattr(opts, "asyncOp", True):
            work.wait()
        return work

    def _reduced(self, what: str, parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
        """The reduction of one tensor per rank, which must agree in dtype and size."""
        self._check_alike(what, parts)
        return reduce_tensors(parts, op)

    def _check_alike(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """The ranks' tensors must agree in dtype and in number of elements."""
        first = tensors[0]
        for rank, tensor in zip(self.members, tensors, strict=True):
            if tensor.dtype != first.dtype:
                error, one, other, rule = DtypeError, first.dtype, tensor.dtype, ""
            elif tensor.numel() != first.numel():
                error, rule = ShapeError, "; sizes must be equal"
                one, other = tuple(first.shape), tuple(tensor.shape)
            else:
                continue
            raise error(
                f"{what}: rank {self.members[0]} passes {one} and rank {rank} passes {other}{rule}",
                place=user_place(),
            )

    def _root(self, what: str, opts: Any) -> tuple[int, bool]:
        """(the root, is it this rank)"""
        self._check_root(what, opts.rootRank)
        return opts.rootRank, self.position == opts.rootRank

    def _check_root(self, what: str, root: int) -> None:
        if not 0 <= root < self.size():
            raise PeerError(
                f"{what}: root {root} of a group of {self.size()} ranks", place=user_place()
            )

    # ---- collectives: each says what it leaves, and which of its outputs get what of all values

    def barrier(self, opts: Any = None) -> EmulatedWork:
        return self._collective("barrier", None, lambda meeting, values: (), opts=opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def allreduce(self, tensors: Any, opts: Any = None) -> EmulatedWork:
        tensors, op = _as_list(tensors), _op_of(opts)

        def arrivals(meeting: Meeting, values: list[Any]) -> Pairs:
            # The same bits for everybody: computed once.
            parts = zip(*values, strict=True)
            sums = meeting.once(lambda: [self._reduced("all_reduce", one, op) for one in parts])
            return zip(tensors, sums, strict=True)

        what = f"all_reduce({_reduce_name(op).lower()})"
        return self._collective(what, _copies(tensors), arrivals, opts=opts, outputs=tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> EmulatedWork:
        tensors, op = _as_list(tensors), opts.reduceOp
        root, is_root = self._root("reduce", opts)

        def arrivals(meeting: Meeting, values: list[Any]) -> Pairs:
            if is_root:
                yield tensors[0], self._reduced("reduce", [value[0] for value in values], op)

        what = f"reduce({_reduce_name(op).lower()} to {root})"
        sources = None if is_root else [self.position]
        return self._collective(what, _copies(tensors), arrivals, sources, opts)

    def broadcast(self, tensors: Any, opts: Any) -> EmulatedWork:
        tensors = _as_list(tensors)
        root, is_root = self._root("broadcast", opts)

        def arrivals(meeting: Meeting, values: list[Any]) -> Pairs:
            return () if is_root else zip(tensors, values[root], strict=True)

        value = _copies(tensors) if is_root else None
        return self._collective(f"broadcast(from {root})", value, arrivals, [root], opts, tensors)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        def arrivals(meeting: Meeting, values: list[Any]) -> Pairs:
            for outputs, parts in zip(output_lists, zip(*values, strict=True), strict=True):
                yield from zip(outputs, parts, strict=True)

        return self._collective("all_gather", _copies(inputs), arrivals, opts=opts)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        # torch hands over one list per rank here, not one per input.
        return self.allgather(list(zip(*output_lists, strict=True)), inputs, opts)

    def all_gather_single(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        what, outputs = "all_gather_into_tensor", _as_list(outputs)

        def arrivals(meeting: Meeting, values: list[Any]) -> Pairs:
            for output, parts in zip(outputs, zip(*values, strict=True), strict=True):
                self._check_alike(what, parts)
                yield output, torch.cat([part.reshape(-1) for part in parts])

        return self._collective(what, _copies(inputs), arrivals, opts=opts, outputs=outputs)

    _allgather_base = all_gather_single_coalesced = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single

    def gather(self, output_lists: Any, inputs: Any, opts: Any) -> EmulatedWork:
        root, is_root = self._root("gather", opts)

        def arrivals(meeting: Meeting, values: list[Any]) -> Pairs:
            parts = [value[0] for value in values if is_root]
            return zip(output_lists[0], parts, strict=True) if is_root else ()

        sources = None if is_root else [self.position]
        return self._collective(f"gather(to {root})", _copies(inputs), arrivals, sources, opts)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> EmulatedWork:
        root, is_root = self._root("scatter", opts)
        value = _copies(input_lists[0]) if is_root else None

        def arrivals(meeting: Meeting, values: list[Any]) -> Pairs:
            yield _as_list(outputs)[0], values[root][self.position]

        return self._collective(f"scatter(from {root})", value, arrivals, [root], opts)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> EmulatedWork:
        value = [_copies(inputs) for inputs in input_lists]
        return self._reduce_scatter("reduce_scatter", _as_list(outputs), value, opts)

    def reduce_scatter_single(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        outputs, value = _as_list(outputs), []
        for output, input in zip(outputs, _as_list(inputs), strict=True):
            if input.numel() != output.numel() * self.size():
                raise ShapeError(
                    f"reduce_scatter_tensor: input {tuple(input.shape)} is not {self.size()} "
                    f"times output {tuple(output.shape)}",
                    place=user_place(),
                )
            value.append(input.detach().clone().reshape(self.size(), output.numel()))
        return self._reduce_scatter("reduce_scatter_tensor", outputs, value, opts)

    _reduce_scatter_base = reduce_scatter_single_coalesced = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single

    def _reduce_scatter(
        self, what: str, outputs: list[torch.Tensor], value: list[Any], opts: Any
    ) -> EmulatedWork:
        """Into each output the reduction of what all have for this rank; `value` has a part for
        each rank, for each output."""
        op = _op_of(opts)

        def arrivals(meeting: Meeting, values: list[Any]) -> Pairs:
            for i, output in enumerate(outputs):
                parts = [one[i][self.position] for one in values]
                yield output, self._reduced(what, parts, op)

        what_of = f"{what}({_reduce_name(op).lower()})"
        return self._collective(what_of, value, arrivals, opts=opts, outputs=outputs)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        return self._all_to_all("all_to_all", outputs, _copies(inputs), opts)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any,
        opts: Any = None,
    ) -> EmulatedWork:  # fmt: skip
        what = "all_to_all_single"
        out_sizes = self._splits(f"{what} output", output, output_splits)
        in_sizes = self._splits(f"{what} input", input, input_splits)
        value = _copies(input.detach().split(in_sizes))
        return self._all_to_all(what, output.detach().split(out_sizes), value, opts)

    alltoall_base = all_to_all_single

    def _all_to_all(self, what: str, outputs: Any, value: Any, opts: Any) -> EmulatedWork:
        """Into each output what its rank has for this one."""

        def arrivals(meeting: Meeting, values: list[Any]) -> Pairs:
            return zip(outputs, [parts[self.position] for parts in values], strict=True)

        return self._collective(what, value, arrivals, opts=opts)

    def _splits(self, what: str, tensor: torch.Tensor, sizes: Any) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes:
            if rows % self.size():
                raise ShapeError(
                    f"{what}: {rows} rows do not divide among {self.size()} ranks; pass the sizes",
                    place=user_place(),
                )
            return [rows // self.size()] * self.size()
        if sum(sizes) != rows or len(sizes) != self.size():
            raise ShapeError(
                f"{what}: sizes {list(sizes)} do not fit {rows} rows and {self.size()} ranks",
                place=user_place(),
            )
        return list(sizes)

    # ---- point to point

    def _box(self, source: int, destination: int, tag: int) -> tuple:
        return (self.emulated_name, self.members, source, destination, tag)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> EmulatedWork:
        self._check_root("send", destination)
        self.meetings.post(self._box(self.position, destination, tag), _copies(tensors))
        return EmulatedWork(lambda: None, lambda: True)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> EmulatedWork:
        self._check_root("recv", source)
        return self._receive(tensors, [source], tag, f"from rank {self.members[source]}")

    def recv_anysource(self, tensors: Any, tag: int = 0) -> EmulatedWork:
        others = [i for i in range(self.size()) if i != self.position]
        return self._receive(tensors, others, tag, "from any rank")

    def _receive(self, tensors: Any, sources: list[int], tag: int, words: str) -> EmulatedWork:
        boxes = [self._box(source, self.position, tag) for source in sources]
        work: EmulatedWork

        def finish() -> None:
            chosen, values = self.meetings.collect(
                boxes, f"recv {words} (tag {tag}): nothing was sent"
            )
            work.source = sources[chosen]
            _write_all("recv", zip(_as_list(tensors), values, strict=True))

        work = _ReceiveWork(finish, lambda: any(self.meetings.letters.get(box) for box in boxes))
        return work


class _ReceiveWork(EmulatedWork):
    source = -1

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _copies(tensors: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in _as_list(tensors)]


def _op_of(opts: Any) -> Any:
    return getattr(opts, "reduceOp", ReduceOp.SUM)


@torch.no_grad()
def _write_all(what: str, pairs: Pairs) -> None:
    for tensor, value in pairs:
        if tensor.dtype != value.dtype:
            error, had, has = DtypeError, value.dtype, tensor.dtype
        elif tensor.numel() != value.numel():
            error, had, has = ShapeError, tuple(value.shape), tuple(tensor.shape)
        else:
            tensor.detach().copy_(value.reshape(tensor.shape))
            continue
        raise error(f"{what}: {had} arrives for an output of {has}", place=user_place())
