"""send and recv: bit by bit, in every way they can be called, by two ranks of any world."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calling import COMPILED, Caller, cases, check_kernels, one_slot_for_all, transports

import weft
from weft.base.errors import (
    AllocationOrderError,
    ConfigError,
    DtypeError,
    PeerError,
    ShapeError,
    UsageError,
)
from weft.base.target import TARGETS
from weft.ops import recv, send
from weft.ops.recv import op as of_recv
from weft.ops.send import Config, Problem, candidates, op
from weft.plan.messages import MOST_PIECES, piece_bytes_of

SHAPES = [{"m": 37, "n": 6}, {"m": 3, "n": 16}, {"m": 24, "n": 35}, {"m": 1, "n": 1}]
# Two programs of little blocks: a message of 5 KB has some pieces for each.
FEW = Config("sm_push", channels=2, block=32, num_warps=4)
BY_ENGINE = replace(FEW, transport="ce_push")
WAYS = pytest.mark.parametrize("config", [FEW, BY_ENGINE], ids=lambda one: one.transport)


def rows(i, m=5, n=4, dtype=torch.float32):
    """Message i, no two alike."""
    return (torch.arange(m * n, dtype=torch.float32).view(m, n) + 1000 * i).to(dtype)


def opened(nbytes=1 << 12, **options):
    world = weft.init()
    weft.mailbox(nbytes, world=world, **options)
    return world


@pytest.mark.few(2)
@pytest.mark.parametrize(("nodes", "transport", "shape"), cases(op, SHAPES))
def test_every_way_of_calling(ranks, nodes, transport, shape):
    ranks(Caller(op, nodes, transport).every_way(shape, "bfloat16"), sum(nodes), nodes=nodes)


@pytest.mark.few(1)
@pytest.mark.parametrize("nodes", [(2,), (2, 1)], ids=str)
def test_one_box_twice_in_a_row_and_sizes_that_change(ranks, nodes, monkeypatch):
    one_slot_for_all(monkeypatch)
    for one in (op, of_recv):
        for transport in transports(one, nodes):
            shapes = [SHAPES[0], *SHAPES, SHAPES[0]]
            for seed in range(2):
                main = Caller(one, nodes, transport).in_turns(shapes, "float32")
                ranks(main, sum(nodes), nodes=nodes, seed=seed)


@pytest.mark.parametrize("dtype", ["bool", "int8", "float8_e5m2", "float64", "complex64"])
def test_any_dtype(ranks, dtype):
    def main():
        world = opened()
        x = torch.arange(30).view(6, 5).to(getattr(torch, dtype))
        if world.rank:
            send(x, 0, world=world)
        else:
            got = recv(x.to("meta"), 1, world=world)
            assert got.dtype == x.dtype and torch.equal(got.view(torch.uint8), x.view(torch.uint8))

    if dtype == "complex64":  # weft has no name for it
        with pytest.raises(DtypeError, match="complex64"):
            ranks(main, 2)
    else:
        ranks(main, 2)


@WAYS
def test_only_two_of_four_ranks_call(ranks, config):
    """The others make calls of their own meanwhile, which all ranks make."""

    def main():
        world = opened()
        if world.rank in (1, 3):
            for i in range(5):
                if world.rank == 3:
                    send(rows(i), 1, world=world, config=config)
                else:
                    assert torch.equal(recv(rows(0), 3, world=world), rows(i))
        total = weft.ops.all_reduce(torch.ones(3), world=world)
        assert total.tolist() == [4.0] * 3
        world.close()

    ranks(main, 4)


@WAYS
def test_a_sender_may_be_two_messages_ahead(ranks, config):
    """It ends its sends before the receiver has made a call: what comes of them is in boxes."""

    def main():
        world = opened()
        if world.rank == 0:
            for i in range(2):
                send(rows(i), 1, world=world, config=config)
            world.synchronize()
        world.backend.exchange(None, 10.0)  # the hosts meet
        if world.rank == 1:
            for i in range(2):
                assert torch.equal(recv(rows(0), 0, world=world), rows(i))

    ranks(main, 2)


@WAYS
@pytest.mark.parametrize("records", ["sender", "receiver", "both"])
def test_each_side_may_be_recorded_by_itself(ranks, config, records):
    """A replay sends what lies there then, be it received eager or replayed."""

    def main():
        world = opened()
        x, out, counts = rows(0).clone(), torch.empty(5, 4), range(1, 6)
        is_sender = world.rank == 0

        def call():
            if is_sender:
                send(x, 1, world=world, config=config)
            else:
                recv(out, 0, world=world, out=out)

        call()
        run = call
        if records in ("both", "sender" if is_sender else "receiver"):
            with world.record() as recording:
                call()
            run = recording.replay
        for i in counts:
            if is_sender:
                x.copy_(rows(i))
            run()
            if not is_sender:
                assert torch.equal(out, rows(i))

    ranks(main, 2)


@WAYS
def test_small_and_large_messages_by_turns_on_two_streams(ranks, config):
    """Those of one mailbox in order; those of another one pass them by."""

    def main():
        world = opened(1 << 17)
        weft.mailbox(64, world=world, name="small")
        large = [torch.randint(0, 99, (1, 9001 + 3000 * i)) for i in range(3)]
        if world.rank == 0:
            for x in (*large, *large):
                send(x, 1, world=world, config=replace(config, block=16))
                send(x[:, :3], 1, world=world, mailbox="small")
        else:
            small = []
            with world.stream("side"):
                for x in (*large, *large):
                    small.append(recv(x[:, :3], 0, world=world, mailbox="small"))
            for x in (*large, *large):
                assert torch.equal(recv(x, 0, world=world), x)
            world.current_stream().wait(world.stream("side"))
            for x, got in zip((*large, *large), small, strict=True):
                assert torch.equal(got, x[:, :3])

    ranks(main, 2)


@WAYS
def test_messages_of_one_rank_on_two_streams_come_in_order(ranks, config):
    """As their calls were made, whichever streams they were made on."""

    def main():
        world = opened()
        streams = [world.stream(name) for name in ("one", "other")]
        if world.rank == 0:
            kept = [rows(i) for i in range(6)]
            for i, x in enumerate(kept):
                with streams[i % 2]:
                    send(x, 1, world=world, config=config)
        else:
            got = []
            for i in range(6):
                with streams[i % 2]:
                    got.append(recv(rows(0), 0, world=world))
            for one in streams:
                world.current_stream().wait(one)
            for i, x in enumerate(got):
                assert torch.equal(x, rows(i))
        world.synchronize()

    ranks(main, 2)


def test_all_to_one_and_one_to_all(ranks):
    def main():
        world = opened(nbytes=80)
        rank, others = world.rank, range(1, world.num_ranks)
        if rank == 0:
            got = [recv(rows(0), src, world=world) for src in others]
            for dst, x in zip(others, got, strict=True):
                assert torch.equal(x, rows(dst))
                send(x + 1, dst, world=world)
        else:
            send(rows(rank), 0, world=world)
            assert torch.equal(recv(rows(0), 0, world=world), rows(rank) + 1)

    ranks(main, 5, nodes=(3, 2))


def test_nothing_but_a_header(ranks):
    def main():
        world = opened(0)
        for x in (torch.ones(0, 4), torch.ones(3, 0)):
            for _ in range(3):
                if world.rank == 0:
                    send(x, 1, world=world)
                else:
                    assert recv(x, 0, world=world).shape == x.shape

    ranks(main, 2)


@WAYS
def test_a_message_of_another_length_is_an_error_of_its_receiver(ranks, config):
    """It is out of the way then, and the next one comes."""

    def main():
        world = opened()
        for _ in range(2):
            if world.rank == 0:
                for x in (rows(1), rows(2)[:3], rows(3)):
                    send(x, 1, world=world, config=config)
                continue
            assert torch.equal(recv(rows(0), 0, world=world), rows(1))
            out = recv(rows(0), 0, world=world, out=torch.full((5, 4), 7.0))
            with pytest.raises(ShapeError, match="rank 0 sent 48 bytes, and rank 1 .* for 80"):
                world.synchronize()
            assert torch.equal(out, torch.full((5, 4), 7.0))
            assert torch.equal(recv(rows(0), 0, world=world), rows(3))
        world.close()

    ranks(main, 2)


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda w: send(rows(0), w.rank, world=w), PeerError, "this rank itself; .* x.clone"),
        (lambda w: send(rows(0), 4, world=w), PeerError, r"dst=4 is outside 0 \.\. 2"),
        (lambda w: recv(rows(0), -1, world=w), PeerError, r"src=-1 is outside 0 \.\. 2"),
        (lambda w: send(rows(0), 1.5, world=w), PeerError, "1.5, not a whole number"),
        (lambda w: send(rows(0), (w.rank + 2) % 3, world=w, mailbox="next"), PeerError,
         r"a hop of 2 .* is for hops \(1,\)"),
        (lambda w: send(rows(0), (w.rank + 1) % 3, world=w, mailbox="mine"), UsageError,
         "no mailbox 'mine'; it has '', 'next': .* weft.mailbox"),
        (lambda w: send(rows(0, 9, 9), (w.rank + 1) % 3, world=w), ShapeError,
         "324 bytes, and mailbox '' is for up to 256"),
        (lambda w: send(rows(0).t(), (w.rank + 1) % 3, world=w), ShapeError, r"x.contiguous\(\)"),
        (lambda w: send(torch.ones(()), (w.rank + 1) % 3, world=w), ShapeError, "is a scalar"),
        (lambda w: recv(torch.ones(()), (w.rank + 1) % 3, world=w), ShapeError, "is a scalar"),
        (lambda w: recv(rows(0), (w.rank + 1) % 3, world=w, out=rows(0, 4)), ShapeError,
         r"out has shape \(4, 4\); the result is \(5, 4\)"),
        (lambda w: send(rows(0), (w.rank + 1) % 3, world=w, config=Config("ll")), ConfigError,
         "one of sm_push, ce_push"),
        (lambda w: send(rows(0), (w.rank + 1) % 3, world=w, config=Config("nccl")), ConfigError,
         "one of sm_push, ce_push"),
        (lambda w: send(rows(0).requires_grad_(), (w.rank + 1) % 3, world=w), UsageError,
         r"x.detach\(\)"),
        (lambda w: send([1.0], 1, world=w), UsageError, "take torch tensors, not list"),
        (lambda w: send(rows(0), 1, world=None), UsageError, "pass what weft.init"),
        (lambda w: weft.mailbox(512, world=w), UsageError, "up to 256 bytes"),
        (lambda w: weft.mailbox(8, world=w, hops=(3,)), UsageError, "back to the sender"),
        (lambda w: weft.mailbox(8, world=w, name="next", hops=(2,)), UsageError, "over hops"),
        (lambda w: weft.mailbox(-1, world=w, name="x"), UsageError, "max_bytes is -1"),
    ],
)  # fmt: skip
def test_mistakes(ranks, call, error, words):
    def main():
        world = opened(256)
        weft.mailbox(256, world=world, name="next", hops=(1,))
        weft.mailbox(100, world=world)  # there is a larger one
        call(world)

    with pytest.raises(error, match=words):
        ranks(main, 3)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (torch.empty(20), ShapeError, r"out has shape \(20,\); the result is \(5, 4\)"),
        (rows(0).to(torch.int16), DtypeError, "recv: out is torch.int16, the result torch.float32"),
        (rows(0).to("meta"), ShapeError, "recv: out is on meta"),
        (torch.empty(5, 4, 2)[..., 0], ShapeError, r"recv: out .* has strides \(8, 2\)"),
    ],
)
def test_a_wrong_out(ranks, wrong, error, words):
    def main():
        world = opened()
        with pytest.raises(error, match=words):
            recv(rows(0), 1 - world.rank, world=world, out=wrong)

    ranks(main, 2)


@pytest.mark.parametrize(("nodes", "kernels"), [((2,), "begin push take"), ((1, 1), "push take")])
def test_a_mailbox_loads_what_messages_launch(ranks, monkeypatch, nodes, kernels):
    """All transports' kernels, for whole vectors: two words of 8 bytes."""
    loaded = []

    def note(world, kernel, *arguments, **options):
        given = dict(zip(kernel.arg_names, arguments, strict=True))
        assert given.get("vec", 2) == 2 and given.get("block", 1024) == 1024
        loaded.append(kernel.fn.__name__)

    monkeypatch.setattr(weft.runtime.World, "load", note)
    ranks(opened, 2, nodes=nodes)
    assert sorted(set(loaded)) == kernels.split()


def test_what_is_compiled_runs_messages_between_its_graphs(ranks):
    def main():
        world = opened()
        other = 1 - world.rank

        def passed_on(x):
            y = x * 2
            send(y, other, world=world)
            return recv(y, other, world=world) + 1

        compiled = torch.compile(passed_on, backend="aot_eager")
        for i in range(3):
            got = compiled(rows(i + 10 * world.rank))
            assert torch.equal(got, 2 * rows(i + 10 * other) + 1)

    ranks(main, 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["autocast", "subclass", "like that requires a gradient"])
def test_what_torch_would_look_at(ranks, how):
    """Nothing is cast, and a class of a user's own is a tensor."""

    class Named(torch.Tensor):
        pass

    def main():
        world = opened()
        x, other = rows(world.rank), 1 - world.rank
        if how == "subclass":
            x = x.as_subclass(Named)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            send(x, other, world=world)
            wanted = x.clone().requires_grad_() if how.startswith("like") else x
            got = recv(wanted, other, world=world)
        assert torch.equal(got, rows(other)) and not got.requires_grad

    ranks(main, 2)


def test_far_ranks_by_an_engine(ranks):
    def main():
        world = opened()
        if world.rank == 0:
            send(rows(0), 1, world=world, config=BY_ENGINE)  # near
            send(rows(0), 2, world=world, config=BY_ENGINE)
        elif world.rank == 1:
            recv(rows(0), 0, world=world)

    with pytest.raises(ConfigError, match="'ce_push' reaches into peers' memory"):
        ranks(main, 3, nodes=(2, 1))


def test_ranks_that_ask_for_other_mailboxes(ranks):
    def main():
        world = weft.init()
        weft.mailbox(128 << world.rank, world=world)

    with pytest.raises(AllocationOrderError, match="mailbox.0..boxes"):
        ranks(main, 2)


def test_a_closed_world_says_so(ranks):
    def main():
        world = opened()
        world.close()
        with pytest.raises(UsageError, match="is closed"):
            send(rows(0), 1 - world.rank, world=world)

    ranks(main, 2)


def test_a_message_that_nobody_sends_is_a_wait_for_a_signal_by_name(ranks):
    def main():
        world = opened(name="acts")
        if world.rank == 0:
            recv(rows(0), 1, world=world, mailbox="acts")

    report = ranks(main, 2, collect=True)
    assert [one.kind for one in report] == ["unsatisfiable wait"]
    assert "waits for mailbox acts[0].heads@rank0[header 1] >= 1, which is 0" in str(report)


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize(
    ("m", "first"), [(1, "sm_push"), (4096, "sm_push"), (4100, "ce_push"), (160_000, "ce_push")]
)
def test_choices_are_checked_and_large_messages_go_by_engines(target, m, first):
    problem = Problem(m, 4096, 4)
    found = list(candidates(problem, target))
    assert found[0].transport == first
    assert {one.transport for one in found} == {"sm_push", "ce_push"}
    assert {one.transport for one in candidates(replace(problem, nodes=(2, 2)), target)} == {
        "sm_push"
    }
    for config in found:
        config.check(problem, target)


@pytest.mark.parametrize("transport", ["sm_push", "ce_push"])
@pytest.mark.parametrize("num_bytes", [0, 1, 127, 4096, 1 << 20, (1 << 28) + 5, 1 << 40])
@pytest.mark.parametrize("channels", [1, 16, 132])
def test_pieces_cover_a_message_and_are_few(transport, num_bytes, channels):
    piece = piece_bytes_of(num_bytes, Config(transport, channels, 2048), 8)
    assert piece % 128 == 0 and piece > 0
    assert -(-num_bytes // piece) <= MOST_PIECES


@pytest.mark.parametrize(("target", "every"), COMPILED)
def test_compiles_everywhere_and_keeps_its_waits(target, every):
    check_kernels(op, target, every, {"m": 4096, "n": 4096}, "bfloat16")
