"""The host side of collectives: results, arguments by name, and a kernel launched again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton

import weft
import weft.ops
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.plan.exchanges import Launches


class Pair(NamedTuple):
    table: Any
    count: int


class Kernel:
    """Stands for what Triton compiled; keeps what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple] = []

    def _init_handles(self) -> None:
        pass

    def launch_metadata(self, grid, stream, *arguments):
        return "about"

    def run(self, *arguments) -> None:
        self.launched.append(arguments)


class Driver:
    def get_current_device(self) -> int:
        return 3

    def get_current_stream(self, device: int) -> str:
        return f"stream of {device}"


class Function:
    """Stands for a `@triton.jit` function."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.kernels.append(Kernel())
            return self.kernels[-1]

        return launch


NONE_RECORDED = SimpleNamespace(num_recorded=0)


class Mail:
    """A mailbox."""

    def __init__(self) -> None:
        self.is_outgrown = False


def launches(fn, channels, arguments, take=Mail, calls=NONE_RECORDED) -> Launches:
    return Launches(fn, channels, {"num_warps": 4}, take, arguments, calls)


def test_a_launch_like_one_before_hands_over_addresses(monkeypatch):
    monkeypatch.setattr(triton_api.driver_config, "_active", Driver())
    fn, table, store = Function(), torch.zeros(4), torch.zeros(65)
    start = launches(fn, 5, lambda mail, x, out: (x, out, table, Pair(table, 7), 512))
    x, out, later = store[:16], store[16:32], store[32:48]
    start(x, out)
    start(later, out)
    assert len(fn.kernels) == 1
    about_launch, arguments = fn.kernels[0].launched[0][:9], fn.kernels[0].launched[0][9:]
    assert about_launch == (5, 1, 1, "stream of 3", "function", "metadata", None, None, None)
    address = table.data_ptr()
    assert arguments == (later.data_ptr(), out.data_ptr(), address, Pair(address, 7), 512)


def test_other_alignment_is_another_kernel(monkeypatch):
    monkeypatch.setattr(triton_api.driver_config, "_active", Driver())
    fn, store = Function(), torch.zeros(64)
    start = launches(fn, 1, lambda mail, x, out: (x, out))
    for x, out in ((store[:8], store[8:16]), (store[1:9], store[16:24]), (store[:8], store[1:9])):
        start(x, out)
    assert len(fn.kernels) == 3
    start(store[5:13], store[32:40])  # as the second
    assert [len(kernel.launched) for kernel in fn.kernels] == [0, 1, 0]


def test_hooks_that_somebody_set_are_called(monkeypatch):
    monkeypatch.setattr(triton_api.driver_config, "_active", Driver())
    hooks = triton.knobs.runtime
    monkeypatch.setattr(hooks, "launch_enter_hook", lambda about: None)
    fn, store = Function(), torch.zeros(16)
    start = launches(fn, 1, lambda mail, x, out: (x, out))
    start(store[:8], store[8:])
    start(store[:8], store[8:])
    assert fn.kernels[0].launched[0][6:9] == ("about", hooks.launch_enter_hook, None)


def test_a_mailbox_that_was_outgrown_is_taken_again_and_with_it_the_arguments(monkeypatch):
    monkeypatch.setattr(triton_api.driver_config, "_active", Driver())
    fn, store, mails = Function(), torch.zeros(16), [Mail(), Mail()]
    taken = iter(mails)
    start = launches(fn, 1, lambda mail, x, out: (x, out, mails.index(mail)), lambda: next(taken))
    for _ in range(2):
        start(store[:8], store[8:])
    assert fn.kernels[0].launched[0][-1] == 0
    mails[0].is_outgrown = True
    for _ in range(2):
        start(store[:8], store[8:])
    assert fn.kernels[1].launched[0][-1] == 1 and next(taken, None) is None


def test_what_is_recorded_takes_the_mailbox_which_then_knows_of_it(monkeypatch):
    monkeypatch.setattr(triton_api.driver_config, "_active", Driver())
    fn, store, mail, taken = Function(), torch.zeros(16), Mail(), []
    calls = SimpleNamespace(num_recorded=0)

    def take() -> Mail:
        taken.append(calls.num_recorded)
        return mail

    start = launches(fn, 1, lambda mail, x, out: (x, out), take, calls)
    for calls.num_recorded in (0, 0, 1, 1):
        start(store[:8], store[8:])
    assert taken == [0, 1]
    assert len(fn.kernels) == 1, "the same mailbox: the launch is as before"


@pytest.mark.parametrize("shape", [(1,), (1, 1), (0, 3), (2, 3), (1, 5, 1)], ids=str)
def test_a_result_without_out_lies_as_torch_would_lay_it(ranks, shape):
    """Results are made like one element that is spread: also those of one element, or of none."""

    def main():
        world, x = weft.init(), torch.ones(shape)
        for call in (weft.ops.all_gather, weft.ops.all_reduce):
            out = call(x, world=world)
            assert out.stride() == torch.empty(out.shape).stride()
            assert out.untyped_storage().nbytes() == out.numel() * out.element_size()

    ranks(main, 1)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_programs_find_all_their_parameters(name):
    """Each transport's programs, by the names of their parameters; and few candidates."""
    op = weft.ops.card(name)
    problem = op.make_problem(4, op.default_shape, "bfloat16", (4,))
    target = TARGETS["cuda:90"]
    found = list(op.candidates(problem, target))
    assert 1 < len(found) <= 8
    assert {one.transport for one in found} <= {*problem.transports, "nccl"}
    for config in found:
        for fn, record in op.kernels(problem, config, target):
            assert set(record.signature) == set(fn.arg_names)
            constants = [x for x, kind in record.signature.items() if kind == "constexpr"]
            assert set(constants) <= set(record.constants), fn.arg_names
