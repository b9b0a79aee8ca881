"""Wrong calls of primitives: error class, values, the remedy, and the user's line."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton
import triton.language as tl
from language_kernels import compare_and_swap, compiled

import weft
import weft.language as wl
from weft.base.errors import (
    CompileError,
    DtypeError,
    PeerError,
    ShapeError,
    UnsupportedError,
    UsageError,
)


@triton.jit
def wrong_order(world, flags):
    wl.notify(world, flags, to=0, order=wl.Order.ACQUIRE)  # here


@triton.jit
def order_of_another_kind(flags):
    wl.wait(flags, 1, order=wl.Scope.SYSTEM)  # here


@triton.jit
def scope_as_number(flags):
    wl.wait(flags, 1, scope=3)  # here


@triton.jit
def no_target(world, flags):
    wl.notify(world, flags, 1)  # here


@triton.jit
def positional_target(world, flags):
    wl.notify(world, flags, 1, 0)  # here


@triton.jit
def fraction(world, flags):
    wl.notify(world, flags, 1.5, to=0)  # here


@triton.jit
def too_large(flags):
    wl.wait(flags, 1 << 40)  # here


@triton.jit
def no_such_peer(world, flags):
    wl.notify(world, flags, to=4)  # here


@triton.jit
def negative_peer(world, x):
    wl.at(world, x, -1)  # here


@triton.jit
def peer_as_tile(world, x):
    wl.at(world, x, tl.arange(0, 4))  # here


@triton.jit
def world_left_out(flags, x):
    wl.notify(flags, flags, to=1)  # here


@triton.jit
def world_to_a_wait(world, flags):
    wl.wait(world, flags, 1)  # here


@triton.jit
def world_and_all_to_a_wait(world, flags):
    wl.wait(world, flags, 1, 1)  # here


@triton.jit
def world_to_a_test(world, flags):
    wl.test(world, flags)  # here


@triton.jit
def tile_of_signals(flags):
    wl.wait(flags + tl.arange(0, 4), 1)  # here


@triton.jit
def signal_of_floats(x):
    wl.wait(x, 1)  # here


@triton.jit
def signal_by_value(flags):
    wl.wait(tl.load(flags), 1)  # here


@triton.jit
def half_word(x):
    wl.load(x.to(tl.pointer_type(tl.float16), bitcast=True))  # here


@triton.jit
def no_such_channel(world, flags):
    wl.barrier(world, 64)  # here


@triton.jit
def unlike_pointers(world, x, flags):
    wl.put(world, x, flags, to=0)  # here


@triton.jit
def cas_on_amd(flags):
    wl.atomic_cas(flags, 0, 1)  # here


CASES = [
    (wrong_order, UsageError, ("order", "ACQUIRE", "wl.Order.RELEASE")),
    (order_of_another_kind, UsageError, ("order", "SYSTEM", "wl.Order.ACQUIRE")),
    (scope_as_number, UsageError, ("scope is 3", "wl.Scope.SYSTEM")),
    (no_target, UsageError, ("'to'", "notify(world, signal, value=1, *, to")),
    (positional_target, UsageError, ("positional", "notify(world, signal, value=1, *, to")),
    (fraction, DtypeError, ("value is 1.5", "integer")),
    (too_large, DtypeError, ("at_least", "1099511627776", "32 bits")),
    (no_such_peer, PeerError, ("to is 4", "0 to 3")),
    (negative_peer, PeerError, ("peer is -1", "0 to 3")),
    (peer_as_tile, UsageError, ("peer is a tile (4,)", "scalar")),
    (world_left_out, UsageError, ("world is a scalar pointer<int32>", "world.arg")),
    (
        world_to_a_wait,
        UsageError,
        (
            "wl.wait takes no world: its first argument is signal",
            "by name, world=",
            "wait(signal, at_least, count=1",
        ),
    ),
    (world_and_all_to_a_wait, UsageError, ("wl.wait takes no world",)),
    (world_to_a_test, UsageError, ("wl.test takes no world: its first argument is signal; it is",)),
    (tile_of_signals, ShapeError, ("signal is a tile (4,)", "one word")),
    (signal_of_floats, DtypeError, ("pointer<fp32>", "int32 or int64")),
    (signal_by_value, UsageError, ("signal is a scalar int32", "pointer")),
    (half_word, DtypeError, ("pointer<fp16>", "32 or 64")),
    (no_such_channel, UsageError, ("channel is 64", "0 to 63")),
    (unlike_pointers, DtypeError, ("src", "pointer<int32>", "fp32")),
]


def line_of(kernel) -> int:
    source = Path(__file__).read_text().splitlines()
    start = next(n for n, line in enumerate(source) if line.startswith(f"def {kernel.__name__}("))
    return next(n for n in range(start, len(source)) if source[n].endswith("# here")) + 1


@pytest.mark.parametrize(
    "kernel, error, words", CASES, ids=lambda case: getattr(case, "__name__", "")
)
def test_wrong_calls(kernel, error, words):
    with pytest.raises(error) as caught:
        compiled(kernel, "emu")
    for word in (*words, f"{Path(__file__).name}:{line_of(kernel)}", kernel.__name__):
        assert word in str(caught.value)


@triton.jit
def misspelt(world, flags):
    wl.notfy(world, flags, to=1)  # here


def python_function():
    """No kernel can call it."""


@triton.jit
def calls_python(flags):
    tl.store(flags, 1)
    python_function()  # here


@triton.jit
def _misspelt_inside(world, flags):
    wl.wayt(flags, 1)


@triton.jit
def misspelt_in_a_helper(world, flags):
    _misspelt_inside(world, flags)  # here


@pytest.mark.parametrize(
    "kernel, words",
    [
        (misspelt, ("has no 'notfy'; did you mean wl.notify?",)),
        (calls_python, ("Unsupported function referenced",)),
        (misspelt_in_a_helper, ("has no 'wayt'", "wl.wayt(flags, 1)")),
    ],
)
@pytest.mark.parametrize("how", ["ahead", "launched"])
def test_what_is_wrong_before_a_kernel_is_traced_has_its_line_too(how, kernel, words):
    def launch():
        world = weft.init()
        flags = world.signals(1)
        both = [world.arg, flags] if "world" in kernel.arg_names else [flags]
        kernel[(1,)](*both)

    kernel.hash = None  # what Triton has met once, it does not look for again
    _misspelt_inside.hash = None
    with pytest.raises(CompileError) as caught:
        if how == "ahead":
            compiled.__wrapped__(kernel, "cuda:90")
        else:
            with weft.emulated(1) as ranks:
                ranks.run(launch)
    for word in (*words, f"{Path(__file__).name}:{line_of(kernel)}", kernel.__name__):
        assert word in str(caught.value)
    assert caught.value.place.outermost.line == line_of(kernel)


@triton.jit
def _inner(world, x):
    return wl.at(world, x, 9)


@triton.jit
def calls_a_helper(world, x):
    y = _inner(world, x)  # here
    tl.store(y, 1.0)


@pytest.mark.slow
def test_the_kernels_line_comes_before_the_helpers():
    with pytest.raises(PeerError) as caught:
        compiled(calls_a_helper, "cuda:90")
    place = caught.value.place
    assert place.outermost.line == line_of(calls_a_helper)
    assert place.innermost.source() == "return wl.at(world, x, 9)"


@pytest.mark.parametrize("kernel", [cas_on_amd, compare_and_swap])
def test_a_gap_says_why(kernel):
    with pytest.raises(UnsupportedError, match=r"(?s)wl.atomic_cas .* hip: .*order and scope"):
        compiled(kernel, "hip:gfx942")


def test_a_name_that_there_is_not():
    with pytest.raises(AttributeError, match=r"has no 'putt'; did you mean wl\.put\?"):
        wl.putt  # noqa: B018
