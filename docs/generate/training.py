"""What docs/training.md shows: the passes of stages over time, one stage to a rank and several."""

from __future__ import annotations

from generate.blocks import code

from weft.layers.stages import BACKWARD, Stages, Times

RANKS, MICROBATCHES = 4, 8
# Of a pass through all stages of a rank, in columns.
FORWARD_COLUMNS, BACKWARD_COLUMNS = 2, 4


def one_stage() -> str:
    return code(_picture(1), "")


def interleaved() -> str:
    return code(_picture(2), "")


def _picture(chunks: int) -> str:
    """A digit is a forward's microbatch, a letter a backward's, from a on; . is waiting."""
    stages = Stages(RANKS, MICROBATCHES, chunks)
    times = Times(FORWARD_COLUMNS / chunks, BACKWARD_COLUMNS / chunks)
    found = stages.played(times)
    columns = round(found.end_us)
    lines = []
    for rank in range(RANKS):
        line = ["."] * columns
        turns = iter(stages.turns(rank))
        passes = [span for span in found.spans if span.rank == rank and span.kind == "work"]
        for span, turn in zip(passes, turns, strict=True):
            letters = "abcdefgh" if turn.what == BACKWARD else "01234567"
            for at in range(round(span.start_us), round(span.end_us)):
                line[at] = letters[turn.microbatch]
        lines.append(f"rank {rank}  |{''.join(line)}|")
    waits = f"{stages.waits(found):.1%} of the time"
    return "\n".join([*lines, f"{'waiting:':>{columns - len(waits) + 7}} {waits}"])
