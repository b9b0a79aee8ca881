"""What every machine's world does alike: its table, call order, trouble, names, bad input."""

import re
import threading
import time

import pytest
import torch
from fake_machine import run_ranks

import weft
from weft.base.errors import (
    CallOrderError,
    CapacityError,
    DtypeError,
    PoisonedError,
    ShapeError,
    TimeoutError,
    UnsupportedError,
    UsageError,
)
from weft.language import world_layout as layout
from weft.language.wait_report import WaitReport
from weft.language.world_arg import is_traced_version
from weft.runtime import registry


def test_the_table_says_who_and_where():
    def main(world):
        words = world.table.tolist()
        assert words[layout.RANK] == world.rank and words[layout.NUM_RANKS] == 2
        assert words[layout.TIMEOUT_NS] == 10_000_000_000
        assert words[layout.HEAP_BASE] == words[layout.peer_base(world.rank)]
        arrivals = words[layout.BARRIER_ARRIVALS] - words[layout.HEAP_BASE]
        assert world.arg.num_ranks.value == 2 and world.arg.table is world.table
        return arrivals

    first, second = run_ranks(main, 2)
    assert first == second, "a symmetric object has one offset"


@pytest.mark.parametrize(
    "meet",
    [
        lambda world: world.operator_call("gemm_rs"),
        lambda world: world.synchronize(),
        lambda world: world.empty(4, torch.float32),
    ],
    ids=["call", "synchronize", "empty"],
)
def test_calls_in_another_order_are_the_same_error_on_all_ranks(meet):
    """The later one's at once, the others' at their next look: nobody waits for a deadline."""
    called, ended = threading.Event(), threading.Event()

    def main(world):
        names = ["ag_gemm", "gemm_rs"] if world.rank == 0 else ["gemm_rs", "ag_gemm"]
        world._agree("start")
        if world.rank == 1:
            assert called.wait(30)
        try:
            world.operator_call(names[0], f"out of rank {world.rank}")
            called.set()
            assert ended.wait(30)
            with pytest.raises(CallOrderError) as caught:
                meet(world)
            error = caught.value
        except CallOrderError as late:
            assert world.rank == 1
            error = late
            ended.set()
        with pytest.raises(PoisonedError, match="calls that differ by rank"):
            world.operator_call(names[1])
        world.close()
        return str(error)

    early, late = run_ranks(main, 2)
    assert early == late, (early, late)
    told = "rank 0 calls ag_gemm (out of rank 0), but rank 1 calls gemm_rs (out of rank 1); "
    assert "call 0" in late and told in late


def test_a_rank_that_waits_for_the_others_on_the_host_learns_of_calls_that_differ():
    """It allocates, which its operator's first call does; the exchange ends without the others."""

    def main(world):
        if world.rank == 0:
            world.operator_call("ag_gemm")
            with pytest.raises(CallOrderError) as caught:
                world.empty(4, torch.float32)
        else:
            while not world._log._all[0][1][0]:  # until rank 0 has called
                time.sleep(0.001)
            with pytest.raises(CallOrderError) as caught:
                world.operator_call("gemm_rs")
        return str(caught.value)

    early, late = run_ranks(main, 2)
    assert early == late and "rank 0 calls ag_gemm, but rank 1 calls gemm_rs" in late


def test_a_call_that_a_rank_leaves_out_is_named_where_that_one_closes():
    """The others allocate for it, or whatever else they meet for."""

    def main(world):
        for name in ("ag_gemm", "gemm_rs")[: 2 - world.rank]:
            world.operator_call(name)
        with pytest.raises(CallOrderError) as caught:
            if world.rank == 0:
                world.empty(4, torch.float32)
            else:
                world.close()
        return str(caught.value)

    for told in run_ranks(main, 2):
        assert "operator call 1 on world 'test': rank 0 calls gemm_rs, which rank 1 has not" in told


def test_a_call_that_the_log_has_no_room_for_is_cut_short():
    def main(world):
        if world.rank == 1:
            world._agree("start")
        # They differ where there is no room for it.
        world.operator_call("ag_gemm " + "a" * 1000 + str(world.rank))
        if world.rank == 0:
            world._agree("start")

    late = run_ranks(main, 2)[1]
    assert isinstance(late, CallOrderError)
    assert f"ranks 0, 1 call ag_gemm {'a' * 485} ..; every rank" in str(late)


def test_calls_in_one_order_are_fine_whoever_runs_ahead():
    def main(world):
        for number in range(1000):
            assert world.operator_call("a" if number % 3 else "a" * 100) == number
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_a_deadline_raises_the_table_once_and_then_poisons(capfd):
    def main(world):
        flags = world.signals(4, torch.int64, name="rows_ready")
        meeting = world.backend.meeting
        if world.rank == 0:
            report = WaitReport(1, "gemm", 77, (5, 0, 0), 0, 3, 2, True)
            address = world.peer(flags, 1)[2:].data_ptr()
            report = WaitReport(**{**vars(report), "signal_address": address})
            meeting.reports.append(report)
            for x in range(40):
                meeting.reports.append(
                    WaitReport(**{**vars(report), "line": 80, "program": (x, 0, 0)})
                )
            meeting.abort_word = 1
        world._agree("aborted")
        world._watchdog.join()  # it has told what there is to tell
        with pytest.raises(TimeoutError) as caught:
            world.synchronize()
        with pytest.raises(PoisonedError, match=r"only close\(\) works"):
            world.empty(4, torch.int32)
        world.close()
        return str(caught.value)

    for text in run_ranks(main, 2, abort_address=64):
        assert "rank 1: gemm:77 program [5, 0, 0] waits for rows_ready[2] >= 3, seen 2" in text
        assert "gemm:80 40 programs, from [0, 0, 0] on, wait for rows_ready[2] >= 3" in text
        assert "no wait is reported by rank 0" in text
    assert "rows_ready[2] >= 3" in capfd.readouterr().err, "the watchdog prints it at once"


def test_what_a_kernel_says_is_raised_once_by_the_next_call_and_by_check():
    def main(world):
        word = world.error_word(lambda needed: CapacityError(f"{needed} rows"))
        other = world.error_word(lambda needed: CapacityError(f"{needed} columns"))
        world.operator_call("nothing yet")
        word.fill_(7)
        with pytest.raises(CapacityError, match="^7 rows"):
            world.operator_call("never made")
        other.fill_(9)
        with pytest.raises(CapacityError, match="^9 columns"):
            world.check()
        world.check()
        assert world.operator_call("goes on") == 1
        assert not word.any() and not other.any()
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_copies_convert_and_broadcast_nothing():
    def main(world):
        x = torch.zeros(4, 8)
        with pytest.raises(ShapeError, match=r"dst is \(4, 8\) but src is \(8, 4\)"):
            world.copy(x, torch.zeros(8, 4))
        with pytest.raises(DtypeError, match="float32 but src is torch.int32"):
            world.copy(x, torch.zeros(4, 8, dtype=torch.int32))
        with pytest.raises(ShapeError, match="unit inner stride"):
            world.copy(x, torch.zeros(8, 4).t())
        with pytest.raises(ShapeError, match="not one int64"):
            world.copy_word(x[0, :1], x[0, :1])
        word = world.signals(2, torch.int64)
        with pytest.raises(UsageError, match="on one device, where a copy is a kernel"):
            world.copy_word(word[:1], word[1:])
        with pytest.raises(UsageError, match=r"channel 64 is outside 0 \.\. 63"):
            world.barrier(64)
        word[world.rank] = 7
        world._agree("written")
        other = 1 - world.rank
        world.copy_word(word[other : other + 1], world.peer(word, other)[other : other + 1])
        assert word.tolist() == [7, 7]
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_tokens_are_words_of_the_own_heap():
    def main(world):
        words, other = world.signals(2, torch.int64), 1 - world.rank
        with pytest.raises(ShapeError, match="take_token: word is torch.int32.*, not one int64"):
            world.take_token(world.signals(1))
        with pytest.raises(ShapeError, match=r"word is torch.int64\(2,\), not one int64"):
            world.take_token(words)
        with pytest.raises(UsageError, match=f"the word is rank {other}'s; a stream takes what"):
            world.take_token(world.peer(words, other)[:1])
        with pytest.raises(UsageError, match="the word is on no symmetric heap"):
            world.take_token(torch.ones(1, dtype=torch.int64))
        for _ in range(2):
            words.fill_(1)
            world.take_token(words[1:])
            assert words.tolist() == [1, 0]
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_worlds_are_found_by_name_within_their_rank():
    def main(world):
        scope = world._scope
        assert registry.find(scope, "test") is world
        assert registry.free_name(scope, "test") == "test.2"
        world.close()
        world.close()
        with pytest.raises(UsageError, match="no world is called 'test'; none is open"):
            registry.find(scope, "test")
        with pytest.raises(UsageError, match="is closed"):
            world.check()
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_error_names_the_emulator():
    with pytest.raises(UnsupportedError, match="weft emulate"):
        weft.init()


def test_sizes_that_are_none_are_refused_with_the_value():
    def main(world):
        free = world.heap_free_bytes
        for what, said in [
            (lambda: world.empty((2.5, 4), torch.int32), r"dimension 0 of .* \(2.5, 4\) is 2.5"),
            (lambda: world.zeros((2, -4), torch.int32), "dimension 1 .* is -4; it must be 0"),
            (lambda: world.empty(4.0, torch.int32, "x"), "tensor 'x' is 4.0, not a whole number"),
            (lambda: world.empty("4", torch.int32), "'tensor.*' is '4', not a whole number"),
            (lambda: world.empty(-1, torch.int32), "is -1; it must be 0 or more"),
            (lambda: world.signals(-1), "the number of words of 'signals.*' is -1; it must be 0"),
            (lambda: world.signals(2.5), "is 2.5, not a whole number"),
            (lambda: world.signals((2, 3)), r"is \(2, 3\), not a whole number"),
        ]:  # fmt: skip
            with pytest.raises(ShapeError, match=said):
                what()
        assert world.heap_free_bytes == free
        assert world.empty(torch.Size((2, 3)), torch.int32).shape == (2, 3)
        assert world.empty([2, torch.tensor(3)], torch.int32).shape == (2, 3)
        with pytest.raises(UsageError, match="channel 2.5 is outside"):
            world.barrier(2.5)
        return "fine"

    assert run_ranks(main, 1) == ["fine"]
    for heap_bytes, said in ((-1, "is -1; it must be 1 or more"), (1e6, r"is 1000000\.0, not a")):
        (error,) = run_ranks(main, 1, heap_bytes=heap_bytes)
        assert isinstance(error, UsageError) and re.search(f"heap_bytes {said}", str(error))


def test_the_root_is_lazy_and_names_what_it_has():
    assert weft.TimeoutError is TimeoutError
    with pytest.raises(AttributeError, match="weft has no 'nonsense'; it has .*init"):
        _ = weft.nonsense


def test_a_trace_is_kept_where_it_is_asked_for(ranks):
    """What decides it is a constant of the world's argument: without it nothing is compiled in."""

    def main():
        plain, traced = weft.init(name="plain"), weft.init(name="traced", trace_tiles=3)
        assert plain.trace is None and not is_traced_version(plain.arg.version.value)
        assert is_traced_version(traced.arg.version.value)
        assert traced.arg.version.value & plain.arg.version.value == plain.arg.version.value
        words = traced.table.tolist()
        assert words[layout.TRACE_PTR] == traced.trace.data_ptr()
        assert words[layout.TRACE_TILES] == 3
        return traced.trace.tolist()

    assert ranks(main, 1) == [[[0] * layout.TRACE_WORDS] * 3]
    with pytest.raises(UsageError, match=r"trace_tiles is -1; it must be 0 or more"):
        ranks(lambda: weft.init(trace_tiles=-1), 1)
