"""Products by tables, played through: which rows are whose the device alone knows, so each rank is
given as many of every other's tokens as of its own."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from weft.ir.device import Launch

if TYPE_CHECKING:
    from weft.tools.schedule.predicted import Played

PROGRAMS, LINKS = "programs", "transfers of SMs"


def play(played: Played, rank: int, now: float, step: Launch) -> Any:
    """One launch on one rank, a rank's tokens after the other's; gives the time of its end."""
    (channel,) = step.announces
    is_fed = any(do.kind == "all_gather" for do in step.body)
    each = product_us(played, rank, step) / played.num_ranks
    if is_fed:
        nbytes = prod(played.extents(step.reads[0], rank)) * played.itemsize(step.reads[0])
        for peer in reversed(played.peers(rank)):
            end = played.push(rank, peer, nbytes, now)
            played.tell_word((channel, peer, rank), end, rank, LINKS)
    order = [rank, *played.peers(rank)] if is_fed else [*played.peers(rank), rank]
    for other in order:
        if is_fed and other != rank:
            now = yield from played.wait(rank, PROGRAMS, now, ((channel, rank, other),), channel)
        name = f"products of rank {other}'s tokens"
        played.span(rank, PROGRAMS, name, now, now + each, "work", other)
        now, _ = yield now + each
        if not is_fed and other != rank:
            left = played.push(rank, other, share_bytes(played, step), now)
            played.tell_word((channel, other, rank), left, rank, PROGRAMS)
    if not is_fed:
        keys = tuple((channel, rank, peer) for peer in played.peers(rank))
        now = yield from played.wait(rank, PROGRAMS, now, keys, channel)
        nbytes = share_bytes(played, step) * played.num_ranks
        end = now + nbytes / (played.machine.memory_gbps * 1e3)
        played.span(rank, PROGRAMS, "sums of own tokens", now, end, "work", rank)
        now, _ = yield end
    return now + played.machine.end_us


def mapped(played: Played, step: Launch) -> dict[str, Any]:
    """What the tables say of a tile: the same text for all, since the device alone knows more."""
    (name,) = step.announces
    channel = played.channels[name]
    (m, top_k, _), columns = played.extents(channel.table, 0), f"columns j * {step.tile[1]} …"
    text = f"row t of {channel.table}.tiles: slots first … end - 1 of one expert, of {m * top_k}, "
    text += f"in turn {channel.table}.turns; {columns}: "
    if any(do.kind == "all_gather" for do in step.body):
        words = [f"{name}[lo … hi][0 … {played.number(channel.chunks) - 1}]"]
        return {"table": channel.table, "awaits": words,
                "text": f"{text}after {words[0]}, of the ranks whose tokens it has"}  # fmt: skip
    word = f"{name}[t][rank][j]"
    return {"table": channel.table, "announces": word,
            "text": f"{text}weighted rows stored in {step.pushes[0]} of ranks lo … hi, told by "
                    f"their {word}; a rank waits for all ranks' words of tiles with its tokens"
            }  # fmt: skip


def product_us(played: Played, rank: int, step: Launch) -> float:
    """All tiles' products, or reading all experts' matrices where that takes longer."""
    product = next(do for do in step.body if do.kind == "grouped_matmul")
    _, weights, table = product.operands
    m, top_k, _ = played.extents(table, rank)
    experts, k, n = played.extents(weights, rank)
    machine = played.machine
    flops_us = 2e-6 * m * top_k * n * k / (machine.program_tflops * machine.num_sms)
    nbytes = experts * n * k * played.itemsize(weights)
    return max(flops_us, nbytes / (machine.memory_gbps * 1e3))


def share_bytes(played: Played, step: Launch) -> float:
    """What one rank sends another: a row for each choice of its tokens."""
    return prod(played.extents(step.pushes[0], 0)[1:]) * played.itemsize(step.pushes[0])
