"""Steps of many sequences: each gets the tokens that transformers gives it alone."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from stepping import PAGES, PROMPTS, SIZES, Sequence, advance
from torchrun import on_two_and_four_gpus, once, torchrun

import weft
from weft import models
from weft.emulator.script import run_script
from weft.serve.runner import Runner
from weft.serve.sampling import sampled
from weft.serve.step import Part, Sampling, Step

SCRIPT = Path(__file__).parent / "scripts" / "tokens.py"
TOKENS = 5


@cache
def expected(folder, prompt, count=TOKENS):
    """transformers' own in one process."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(prompt)[None]
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
        do_sample=False,
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()


def on_ranks(ranks, num_ranks, folder, what, split_from=float("inf"), **options):
    """`what(runner)` on each rank; what it returns is the same on all."""

    def main():
        with weft.init() as world:
            model = models.load(folder, world, split_from=split_from)
            runner = Runner(model, world, **{**SIZES, **options})
            found = what(runner)
            runner.close()
            return found

    found = ranks(main, num_ranks)
    assert all(one == found[0] for one in found)
    return found[0]


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("llama", 4), ("qwen3_moe", 2), slow("llama", 2), slow("qwen3", 2), slow("qwen3", 4),
     slow("qwen3_moe", 4), slow("mixtral", 2), slow("mixtral", 4)],
)  # fmt: skip
def test_tokens_are_those_of_transformers(ranks, tiny, kind, num_ranks):
    """A prompt in chunks, of which the last has one token, then token by token."""
    folder, prompt = tiny(kind), PROMPTS[1]

    def what(runner):
        one = Sequence(prompt)
        while len(one.found) < TOKENS:
            advance(runner, one, most=4)
        return one.found

    assert on_ranks(ranks, num_ranks, folder, what) == expected(folder, prompt)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split_from", "by_kernel"),
    [(1, True), (float("inf"), False), slow(1, False), slow(float("inf"), True)],
)
def test_a_mixture_is_each_alone(ranks, tiny, split_from, by_kernel):
    """Prompts come while others are at their tokens; some are whole, some in chunks."""
    folder = tiny("qwen3")

    def what(runner):
        every = [Sequence(prompt, i) for i, prompt in enumerate(PROMPTS)]
        advance(runner, every[2], every[0])
        advance(runner, every[0], every[1], every[3], every[2], most=4)
        assert every[1].found == [] and len(every[3].found) == 1
        while shortest := [one for one in every if len(one.found) < TOKENS]:
            advance(runner, *shortest, most=4)
        return [one.found for one in every]

    found = on_ranks(ranks, 2, folder, what, split_from, by_kernel=by_kernel)
    assert found == [expected(folder, prompt) for prompt in PROMPTS]


@pytest.mark.slow
def test_decode_steps_are_recorded_once_for_a_bucket(ranks, tiny):
    """Three sequences in a bucket of four, then one; two of them wait for a step."""
    folder = tiny("llama")

    def what(runner):
        every = [Sequence(prompt, i) for i, prompt in enumerate(PROMPTS)]
        runner.prepare()
        recorded = dict(runner.recorded)
        assert list(recorded) == [1, 2, 4]
        advance(runner, *every)
        advance(runner, *every[:3])
        advance(runner, every[1])
        advance(runner, *every[:3])
        advance(runner, every[3], every[0])
        assert runner.recorded == recorded
        return [one.found for one in every]

    found = on_ranks(ranks, 2, folder, what, record=True, by_kernel=True)
    assert [len(one) for one in found] == [4, 4, 3, 2]
    for tokens, prompt in zip(found, PROMPTS, strict=True):
        assert tokens == expected(folder, prompt)[: len(tokens)]


@pytest.mark.slow
def test_what_is_drawn_does_not_depend_on_the_batch(ranks, tiny):
    folder, hot = tiny("llama"), partial(Sampling, 1.5, 50, 0.95)

    def what(runner):
        alone = [Sequence(PROMPTS[i % 2], i, hot(seed=i)) for i in range(3)]
        together = [Sequence(PROMPTS[i % 2], i, hot(seed=i)) for i in range(3)]
        for one in alone:
            while len(one.found) < TOKENS:
                advance(runner, one)
        while len(together[0].found) < TOKENS:
            advance(runner, *together, most=3)
        return [one.found for one in alone], [one.found[:3] for one in together]

    alone, together = on_ranks(ranks, 2, folder, what)
    assert [one[:3] for one in alone] == together
    assert alone[0] != alone[2]  # another seed
    assert alone[0] != expected(folder, PROMPTS[0])


def test_sampling_has_the_models_probabilities():
    """Of 6 tokens: all of them, the two largest, those that make up 0.8; at two temperatures."""
    logits = torch.tensor([0.1, 2.0, -torch.inf, 1.0, 1.5, 0.3])
    count = 4000

    def shares(**how):
        rows = [(Sampling(seed=seed, **how), 7) for seed in range(count)]
        return torch.tensor(sampled(logits.expand(count, -1), rows)).bincount(minlength=6) / count

    close = partial(torch.testing.assert_close, rtol=0, atol=0.03)
    for temperature in (1.0, 0.5):
        wanted = (logits / temperature).softmax(0)
        close(shares(temperature=temperature), wanted)
        two = torch.where(wanted >= wanted[4], wanted, 0)
        close(shares(temperature=temperature, top_k=2), two / two.sum())
    wanted = logits.softmax(0)  # 0.43, 0.26, 0.16: together more than 0.8
    three = torch.where(wanted >= wanted[3], wanted, 0)
    close(shares(temperature=1.0, top_p=0.8), three / three.sum())
    # Of the two largest, the larger one alone makes up a half.
    assert shares(temperature=1.0, top_k=2, top_p=0.5)[1] == 1
    for greedy in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1},
                   {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1e-30},
                   {"temperature": 1e-40}, {"temperature": 1e-46},
                   {"temperature": 1e-300}):  # fmt: skip
        assert shares(**greedy)[1] == 1, greedy


def test_a_token_is_one_of_the_vocabulary_whatever_logits_are():
    how = [(Sampling(temperature=0.8, top_k=2, top_p=0.5), 7)]
    for value in (torch.nan, torch.inf, -torch.inf):
        rows = torch.tensor([[value] * 5, [value, 0.0, 1.0, 2.0, 3.0]])
        assert all(0 <= token < 5 for token in sampled(rows, how * 2)), value


def test_a_row_is_drawn_by_its_seed_and_position():
    logits = torch.randn(1, 300)
    how = [(Sampling(temperature=2.0, seed=seed), at) for seed in (1, 2) for at in range(20)]
    together = sampled(logits.expand(len(how), -1), how)
    assert together == [sampled(logits, [one])[0] for one in how]
    assert together[:20] != together[20:] and len(set(together)) > 10
    mixed = sampled(logits.expand(3, -1), [how[0], (Sampling(), 3), how[1]])
    assert mixed == [together[0], int(logits.argmax()), together[1]]


def test_steps_that_do_not_fit(ranks, tiny):
    def what(runner):
        assert runner.run(Step(())) == []
        two = Part((1, 2), 0, (0,))
        for parts, match in (
            (
                (two,) * 5,
                "a step of 5 sequences with 10 tokens, made for max_sequences=4 and max_t",
            ),
            ((Part((1,) * 33, 0, tuple(range(9))),), "1 sequences with 33 tokens"),
            ((Part((1, 2), 3, (0,)),), "2 tokens from position 3 in 1 pages of 4"),
            ((Part((), 3, (0,)),), "0 tokens from position 3 .* one token at least"),
            ((Part((1,), 0, (PAGES,)),), r"pages \(24,\), of which there are 0 to 23"),
        ):
            with pytest.raises(weft.CapacityError, match=match):
                runner.run(Step(parts))
        runner.model.config.sliding_window = 8
        with pytest.raises(weft.UnsupportedError, match="sliding_window=8 of 512 positions"):
            Runner(runner.model, runner.world, **SIZES)
        runner.model.config.sliding_window = None
        with pytest.raises(weft.CapacityError, match="300 sequences in a step; 256 at most"):
            Runner(runner.model, runner.world, **{**SIZES, "max_sequences": 300})

    on_ranks(ranks, 1, tiny("llama"), what)


@on_two_and_four_gpus
def test_on_gpus(ranks):
    pytest.importorskip("transformers")
    said = once(torchrun(SCRIPT, ranks), r"rank (\d) of (\d): 32 sequences")
    assert said == [(str(rank), str(ranks)) for rank in range(ranks)]


@pytest.mark.slow
def test_the_script_emulated():
    pytest.importorskip("transformers")
    report = run_script(str(SCRIPT), [], ranks=2, nodes=1, seed=0)
    assert report.ok, str(report)
