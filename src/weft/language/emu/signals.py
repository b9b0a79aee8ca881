"""Emulator: signals. What they mean is in weft.emulator; here they only get their symbols."""

from __future__ import annotations

import triton

from weft.language import signals as declared
from weft.language.addressing import translate
from weft.language.emu.extern import boolean, same_as_first, token
from weft.language.registry import implement


@implement(declared.notify, "emu")
@triton.jit
def notify(world, signal, value, to, op, order, scope):
    token(f"weft.notify:{op}.{order}.{scope}", translate(world, signal, to), value)


@implement(declared.notify_all, "emu")
@triton.jit
def notify_all(world, signal, value, op, order, scope):
    for peer in range(world.num_ranks):
        # weft: equivalent-mutant peer+1 of signal_at: all ranks get the signal, in another order
        notify(world, signal, value, peer, op, order, scope)


@implement(declared.wait, "emu")
@triton.jit
def wait(signal, at_least, count, world, order, scope, site):
    if world is None:
        return token(f"weft.wait:{order}.{scope}", signal, at_least, count)
    else:
        return token(f"weft.wait_bounded:{order}.{scope}", signal, at_least, count, world.table)


@implement(declared.test, "emu")
@triton.jit
def test(signal, at_least, count, order, scope):
    return boolean(f"weft.test:{order}.{scope}", signal, at_least, count)


@implement(declared.consume, "emu")
@triton.jit
def consume(value, token):
    return same_as_first("weft.consume", value, token)


@implement(declared.complete_stores, "emu")
@triton.jit
def complete_stores():
    token("weft.complete_stores")
