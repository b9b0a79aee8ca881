"""Tokens drawn from logits: of each row by itself, by numbers of its request's own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.serve.step import Sampling

# A temperature below it may be 0 once it is rounded to the scores' dtype.
LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


def sampled(logits: Tensor, how: Sequence[tuple[Sampling, int]]) -> list[int]:
    """A token of each row of logits [rows, vocabulary].

    how: of each row its sampling, and the position of the token, which with the seed gives the one
    number that is drawn. What the other rows are changes nothing.
    """
    tokens = logits.argmax(-1)
    drawn = [i for i, (one, _) in enumerate(how) if one.temperature >= LEAST_TEMPERATURE]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _drawn(logits[rows].float(), [how[i] for i in drawn])
    return tokens.tolist()


def _drawn(logits: Tensor, how: Sequence[tuple[Sampling, int]]) -> Tensor:
    """The first token, from the most probable one on, where the sum of probabilities passes the
    number drawn."""
    size = logits.shape[1]
    numbers = torch.tensor(
        [
            (one.temperature, min(one.top_k, size) or size, one.top_p, number(one.seed, position))
            for one, position in how
        ],
        device=logits.device,
    )
    temperature, top_k, top_p, at = numbers.t()[:, :, None]
    scores, ids = logits.sort(descending=True, stable=True)
    # Scores of the largest are 0: none is too large, however small a temperature is.
    scores = (scores - scores[:, :1]) / temperature
    ranked = torch.arange(size, device=logits.device)
    shares = scores.masked_fill(ranked >= top_k, -torch.inf).softmax(-1)
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= top_p, 0)
    shares[:, 0].clamp_(min=torch.finfo(shares.dtype).tiny)  # one is left, whatever top_p is
    sums = shares.cumsum(-1)
    passed = (sums <= at * sums[:, -1:]).sum(-1)
    # Where logits are NaN, no share is more than 0.
    last = ((shares > 0).sum(-1) - 1).clamp(min=0)
    return ids.gather(1, torch.minimum(passed, last)[:, None])[:, 0]


def number(seed: int, position: int) -> float:
    """From 0 up to 1."""
    return random.Random(f"{seed} {position}").random()
