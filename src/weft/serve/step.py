"""One step of an engine: what each sequence in it brings, as rank 0 decides and all ranks run it.

Plain frozen records of integers and floats, which travel from rank 0 to the others. A step is whole
in itself: of earlier ones a `Runner` knows nothing but the keys and values in its pages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits behind the last of a part's tokens.

    temperature 0           the largest logit; so does one that rounds to 0 in float32
    top_k                   of the k largest logits; 0: of all
    top_p                   of the most probable tokens that together reach this probability;
                            0: the most probable one
    seed                    with the token's position it gives the numbers that are drawn, so a
                            request repeats itself, whatever else is in a step
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Part:
    """The tokens of one sequence in a step: its next one, or a chunk of its prompt.

    tokens                  at positions first_position, first_position + 1, ...
    pages                   the sequence's pages in order, with room for these tokens too
    wants_token             the token that follows is sampled: not of a chunk that is not the
                            last of its prompt
    """

    tokens: tuple[int, ...]
    first_position: int
    pages: tuple[int, ...]
    wants_token: bool = True
    sampling: Sampling = Sampling()


@dataclass(frozen=True)
class Step:
    """Parts of different sequences, which are run as one batch.

    A runner's `run(step)` gives as many results: a token for each part that wants one, else None.
    A step without parts runs nothing.
    """

    parts: tuple[Part, ...]
