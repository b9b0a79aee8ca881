"""A process group of emulated ranks, under any backend's name.

Every collective is a `Meeting`: a rank leaves a copy of its input and, once all have come,
computes its own output with ordinary torch operations, so that the checker sees the reads and
writes of each rank as its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.base.errors import DtypeError, PeerError, ShapeError, UnsupportedError
from weft.base.user_place import user_place
from weft.emulator.meetings import Meeting, Meetings

ReduceOp = dist.ReduceOp

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

    def block_current_stream(self) -> None:
        self.wait()

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

    @property
    def pg_name(self) -> str:
        return self.emulated_name

    @property
    def group_name(self) -> str:
        return self.emulated_name

    @property
    def group_desc(self) -> str:
        return self.emulated_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def rank(self) -> int:
        return self.position

    def size(self) -> int:
        return len(self.members)

    def name(self) -> str:
        return "emulated"

    def getBackendName(self) -> str:
        return "emulated"

    def __repr__(self) -> str:
        return f"EmulatedGroup({self.emulated_name}, rank={self.position}, of {self.members})"

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    # ---- the frame of every collective

    def _enter(self, what: str, value: Any) -> Meeting:
        return self.meetings.enter(
            (self.emulated_name, self.members), self.members, self.position, what, value
        )

    def _collective(
        self,
        what: str,
        value: Any,
        finish: Callable[[Meeting, list[Any]], None],
        sources: Sequence[int] | None = None,
        opts: Any = None,
        outputs: Sequence[torch.Tensor] = (),
    ) -> EmulatedWork:
        meeting = self._enter(what, value)

        def complete() -> None:
            values = meeting.wait(self.position, sources)
            with torch.no_grad():
                finish(meeting, values)
            meeting.leave()

        needed = range(self.size()) if sources is None else sources
        work = EmulatedWork(complete, lambda: all(i in meeting.values for i in needed), outputs)
        if not getattr(opts, "asyncOp", True):
            work.wait()
        return work

    def _check_alike(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """The ranks' tensors must agree in dtype and in number of elements."""
        for i, tensor in enumerate(tensors):
            if tensor.dtype != tensors[0].dtype:
                raise DtypeError(
                    f"{what}: rank {self.members[0]} passes {tensors[0].dtype} and rank "
                    f"{self.members[i]} passes {tensor.dtype}",
                    place=user_place(),
                )
            if tensor.numel() != tensors[0].numel():
                raise ShapeError(
                    f"{what}: rank {self.members[0]} passes {tuple(tensors[0].shape)} and rank "
                    f"{self.members[i]} passes {tuple(tensor.shape)}; sizes must be equal",
                    place=user_place(),
                )

    def _check_root(self, what: str, root: int) -> None:
        if not 0 <= root < self.size():
            raise PeerError(
                f"{what}: root {root} of a group of {self.size()} ranks", place=user_place()
            )

    # ---- collectives

    def barrier(self, opts: Any = None) -> EmulatedWork:
        return self._collective("barrier", None, lambda meeting, values: None, opts=opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def allreduce(self, tensors: Any, opts: Any = None) -> EmulatedWork:
        tensors = _as_list(tensors)
        op = getattr(opts, "reduceOp", ReduceOp.SUM)

        def finish(meeting: Meeting, values: list[Any]) -> None:
            for i in range(len(tensors)):
                self._check_alike("all_reduce", [value[i] for value in values])
            results = meeting.once(
                lambda: [
                    reduce_tensors([value[i] for value in values], op) for i in range(len(tensors))
                ]
            )
            for tensor, result in zip(tensors, results, strict=True):
                _write(tensor, result)

        what = f"all_reduce({_reduce_name(op).lower()})"
        return self._collective(what, _copies(tensors), finish, opts=opts, outputs=tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> EmulatedWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> EmulatedWork:
        tensors = _as_list(tensors)
        root = opts.rootRank
        self._check_root("reduce", root)

        def finish(meeting: Meeting, values: list[Any]) -> None:
            if self.position == root:
                self._check_alike("reduce", [value[0] for value in values])
                _write(tensors[0], reduce_tensors([v[0] for v in values], opts.reduceOp))

        what = f"reduce({_reduce_name(opts.reduceOp).lower()} to {root})"
        sources = None if self.position == root else [self.position]
        return self._collective(what, _copies(tensors), finish, sources, opts)

    def broadcast(self, tensors: Any, opts: Any) -> EmulatedWork:
        tensors = _as_list(tensors)
        root = opts.rootRank
        self._check_root("broadcast", root)
        is_root = self.position == root

        def finish(meeting: Meeting, values: list[Any]) -> None:
            if not is_root:
                for tensor, value in zip(tensors, values[root], strict=True):
                    _check_size("broadcast", tensor, value)
                    _write(tensor, value)

        value = _copies(tensors) if is_root else None
        return self._collective(f"broadcast(from {root})", value, finish, [root], opts, tensors)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        inputs = _as_list(inputs)

        def finish(meeting: Meeting, values: list[Any]) -> None:
            for i, outputs in enumerate(output_lists):
                for tensor, value in zip(outputs, values, strict=True):
                    _check_size("all_gather", tensor, value[i])
                    _write(tensor, value[i])

        return self._collective("all_gather", _copies(inputs), finish, opts=opts)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        # torch hands over one list per rank here, not one per input.
        by_input = [[per_rank[i] for per_rank in output_lists] for i in range(len(inputs))]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> EmulatedWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> EmulatedWork:
        def finish(meeting: Meeting, values: list[Any]) -> None:
            for i, output in enumerate(outputs):
                parts = [value[i] for value in values]
                self._check_alike("all_gather_into_tensor", parts)
                gathered = torch.cat([part.reshape(-1) for part in parts])
                _check_size("all_gather_into_tensor", output, gathered)
                _write(output, gathered)

        return self._collective(
            "all_gather_into_tensor", _copies(inputs), finish, opts=opts, outputs=outputs
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_lists: Any, inputs: Any, opts: Any) -> EmulatedWork:
        root = opts.rootRank
        self._check_root("gather", root)
        is_root = self.position == root

        def finish(meeting: Meeting, values: list[Any]) -> None:
            if is_root:
                for tensor, value in zip(output_lists[0], values, strict=True):
                    _check_size("gather", tensor, value[0])
                    _write(tensor, value[0])

        sources = None if is_root else [self.position]
        return self._collective(f"gather(to {root})", _copies(inputs), finish, sources, opts)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> EmulatedWork:
        outputs = _as_list(outputs)
        root = opts.rootRank
        self._check_root("scatter", root)
        value = _copies(input_lists[0]) if self.position == root else None

        def finish(meeting: Meeting, values: list[Any]) -> None:
            _check_size("scatter", outputs[0], values[root][self.position])
            _write(outputs[0], values[root][self.position])

        return self._collective(f"scatter(from {root})", value, finish, [root], opts)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> EmulatedWork:
        outputs = _as_list(outputs)
        op = getattr(opts, "reduceOp", ReduceOp.SUM)

        def finish(meeting: Meeting, values: list[Any]) -> None:
            for i, output in enumerate(outputs):
                parts = [value[i][self.position] for value in values]
                self._check_alike("reduce_scatter", parts)
                _check_size("reduce_scatter", output, parts[0])
                _write(output, reduce_tensors(parts, op))

        value = [_copies(inputs) for inputs in input_lists]
        what = f"reduce_scatter({_reduce_name(op).lower()})"
        return self._collective(what, value, finish, opts=opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> EmulatedWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> EmulatedWork:
        op = getattr(opts, "reduceOp", ReduceOp.SUM)
        for output, input in zip(outputs, inputs, strict=True):
            if input.numel() != output.numel() * self.size():
                raise ShapeError(
                    f"reduce_scatter_tensor: input {tuple(input.shape)} is not {self.size()} "
                    f"times output {tuple(output.shape)}",
                    place=user_place(),
                )

        def finish(meeting: Meeting, values: list[Any]) -> None:
            for i, output in enumerate(outputs):
                self._check_alike("reduce_scatter_tensor", [value[i] for value in values])
                count = output.numel()
                begin = self.position * count
                parts = [value[i].reshape(-1)[begin : begin + count] for value in values]
                _write(output, reduce_tensors(parts, op))

        what = f"reduce_scatter_tensor({_reduce_name(op).lower()})"
        return self._collective(what, _copies(inputs), finish, opts=opts, outputs=outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> EmulatedWork:
        def finish(meeting: Meeting, values: list[Any]) -> None:
            for tensor, value in zip(outputs, values, strict=True):
                _check_size("all_to_all", tensor, value[self.position])
                _write(tensor, value[self.position])

        return self._collective("all_to_all", _copies(inputs), finish, opts=opts)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any,
        opts: Any = None,
    ) -> EmulatedWork:  # fmt: skip
        out_sizes = self._splits("all_to_all_single output", output, output_splits)
        in_sizes = self._splits("all_to_all_single input", input, input_splits)
        value = [part.detach().clone() for part in input.detach().split(in_sizes)]

        def finish(meeting: Meeting, values: list[Any]) -> None:
            for tensor, parts in zip(output.detach().split(out_sizes), values, strict=True):
                _check_size("all_to_all_single", tensor, parts[self.position])
                _write(tensor, parts[self.position])

        return self._collective("all_to_all_single", value, finish, opts=opts)

    alltoall_base = all_to_all_single

    def _splits(self, what: str, tensor: torch.Tensor, sizes: Any) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 0
        sizes = list(sizes) if sizes is not None else []
        if not sizes:
            if rows % self.size():
                raise ShapeError(
                    f"{what}: {rows} rows do not divide among {self.size()} ranks; pass the sizes",
                    place=user_place(),
                )
            sizes = [rows // self.size()] * self.size()
        if sum(sizes) != rows or len(sizes) != self.size():
            raise ShapeError(
                f"{what}: sizes {sizes} do not fit {rows} rows and {self.size()} ranks",
                place=user_place(),
            )
        return sizes

    # ---- point to point

    def _box(self, source: int, destination: int, tag: int) -> tuple:
        return (self.emulated_name, self.members, source, destination, tag)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> EmulatedWork:
        self._check_root("send", destination)
        box = self._box(self.position, destination, tag)
        self.meetings.post(box, _copies(_as_list(tensors)))
        return EmulatedWork(lambda: None, lambda: True)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> EmulatedWork:
        self._check_root("recv", source)
        return self._receive(_as_list(tensors), [source], tag, f"from rank {self.members[source]}")

    def recv_anysource(self, tensors: Any, tag: int = 0) -> EmulatedWork:
        others = [i for i in range(self.size()) if i != self.position]
        return self._receive(_as_list(tensors), others, tag, "from any rank")

    def _receive(
        self, tensors: list[torch.Tensor], sources: list[int], tag: int, words: str
    ) -> EmulatedWork:
        boxes = [self._box(source, self.position, tag) for source in sources]
        work: EmulatedWork

        def finish() -> None:
            chosen, values = self.meetings.collect(
                boxes, f"recv {words} (tag {tag}): nothing was sent"
            )
            work.source = sources[chosen]
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    _check_size("recv", tensor, value)
                    _write(tensor, value)

        work = _ReceiveWork(finish, lambda: any(self.meetings.letters.get(box) for box in boxes))
        return work


class _ReceiveWork(EmulatedWork):
    source = -1

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _copies(tensors: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in _as_list(tensors)]


def _write(destination: torch.Tensor, value: torch.Tensor) -> None:
    destination.detach().copy_(value.reshape(destination.shape))


def _check_size(what: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.dtype != value.dtype:
        raise DtypeError(
            f"{what}: {value.dtype} arrives for an output of {tensor.dtype}", place=user_place()
        )
    if tensor.numel() != value.numel():
        raise ShapeError(
            f"{what}: {tuple(value.shape)} arrives for an output of {tuple(tensor.shape)}",
            place=user_place(),
        )
