"""Programs run as their plans say: every engine, eager, recorded, other sizes, on the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from effort import slow_but

import weft
import weft.ops
from weft.base.dtypes import tolerance
from weft.base.errors import CallOrderError, OutOfMemoryError, UnsupportedError, UsageError
from weft.base.target import TARGETS
from weft.base.topology import text_of
from weft.compiler import (
    Partial,
    Replicate,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    gelu,
    libraries,
    program,
    reduce_scatter,
    rms_norm,
    silu,
    silu_mul,
)
from weft.compiler.facts import Facts, Settings
from weft.compiler.frontend import trace
from weft.compiler.lower import kernels
from weft.compiler.passes.place import place
from weft.compiler.pipeline import overlap
from weft.emulator.recording import LaunchRecording
from weft.ir.device import Copy, Launch, is_relay
from weft.ir.schedule import Schedule
from weft.ops import card
from weft.plan import run_plan, runner
from weft.plan.memory import Memory
from weft.plan.runner import PlanRunner
from weft.plan.transfers import Transfers
from weft.runtime import replays

K, N = 32, 48


def ag_gemm(a, b):
    return all_gather(a) @ b


def gemm_rs(a, b):
    return reduce_scatter(a @ b)


def gemm_ar(a, b):
    return all_reduce(a @ b)


def all_reduce_rms_norm(x, residual, weight):
    total = all_reduce(x) + residual
    return rms_norm(total, weight), total


def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def of(*sizes) -> Tensor:
    return Tensor("float32", sizes[:-1], sizes[-1])


PARAMETERS = {
    ag_gemm: {"a": of("m", K, Shard(0)), "b": of(K, N, Shard(1))},
    gemm_rs: {"a": of("m", K, Shard(1)), "b": of(K, N, Shard(0))},
    gemm_ar: {"a": of("m", K, Shard(1)), "b": of(K, N, Shard(0))},
    all_reduce_rms_norm: {
        "x": of("m", N, Partial()),
        "residual": of("m", N, Replicate()),
        "weight": of(1, N, Replicate()),
    },
    mlp: {"x": of("m", K, Shard(0)), "w1": of(K, 2 * N, Shard(1)), "w2": of(N, K, Shard(0))},
}
TILES = {"product": (16, 32, 16), "product_2": (16, 16, 16)}


def part_of(whole: torch.Tensor, placement, rank: int, num_ranks: int) -> torch.Tensor:
    """What a rank has of a tensor."""
    if isinstance(placement, Partial):
        return whole / num_ranks
    if isinstance(placement, Replicate):
        return whole
    size = whole.shape[placement.dim]
    each = -(-size // num_ranks)
    first = min(rank * each, size)
    return whole.narrow(placement.dim, first, min(first + each, size) - first).contiguous()


class Program:
    """One program, compiled for some ranks, and its answer."""

    def __init__(
        self, function, num_ranks: int, m: int, engines=None, nodes: tuple[int, ...] = ()
    ) -> None:
        parameters = PARAMETERS[function]
        self.num_ranks = num_ranks
        self.placed = place(trace(function, "tp", parameters))
        tiles = {task.name: TILES[task.name] for task in self.placed.tasks if task.name in TILES}
        facts = Facts({"m": m}, num_ranks, TARGETS["cuda:90"], nodes)
        self.stages = overlap(self.placed, facts, Settings(tiles, engines or {}))
        self.placements = {name: one.placement for name, one in parameters.items()}
        self.sizes = {name: one.sizes for name, one in parameters.items()}

    def tensors(self, m: int, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(*[m if size == "m" else size for size in sizes], generator=generator)
            for name, sizes in self.sizes.items()
        }

    def mine(self, tensors, rank: int) -> dict[str, torch.Tensor]:
        return {
            name: part_of(whole, self.placements[name], rank, self.num_ranks)
            for name, whole in tensors.items()
        }

    def check(self, results, tensors, rank: int) -> None:
        expected = libraries.reference(self.placed, tensors)
        for name, result, whole in zip(self.placed.results, results, expected):
            placement = self.placed.task(name).type.placement
            wanted = part_of(whole, placement, rank, self.num_ranks)
            assert result.shape == wanted.shape
            assert (result - wanted).norm() <= tolerance("float32", 2 * K) * whole.norm()

    def main(self, m: int, other_m: int) -> None:
        """Eager, recorded and replayed, with other rows in between; where a stream waits for tiles,
        recordings have a plan of their own."""
        world = weft.init()

        def given(m: int, seed: int):
            tensors = self.tensors(m, seed)
            return tensors, self.mine(tensors, world.rank)

        for seed in range(2):
            tensors, mine = given(m, seed)
            results = run_plan(self.stages, mine, {"m": m}, world=world)
            self.check(results, tensors, world.rank)
        for _ in range(4):  # results lie where the last one's lay: the call becomes a replay
            del results
            results = run_plan(self.stages, mine, {"m": m}, world=world)
            self.check(results, tensors, world.rank)
        with world.record() as recording:
            results = run_plan(self.stages, mine, {"m": m}, world=world)
        if other_m:
            others, theirs = given(other_m, 2)
            again = run_plan(self.stages, theirs, {"m": other_m}, world=world)
            self.check(again, others, world.rank)
        for _ in range(2):
            for result in results:
                result.fill_(float("nan"))
            recording.replay()
            self.check(results, tensors, world.rank)
        world.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("function", "engines"),
    [
        (ag_gemm, {"gathered": "sm_push"}),
        (ag_gemm, {"gathered": "ce_push"}),
        (gemm_rs, {}),
        (gemm_ar, {"reduced": "sm_push"}),
        (all_reduce_rms_norm, {}),
        (mlp, {"gathered": "ce_push"}),
        pytest.param(mlp, {"gathered": "sm_push"}, marks=pytest.mark.slow),
    ],
    ids=lambda one: getattr(one, "__name__", None) or "-".join(one.values()) or "default",
)
@pytest.mark.parametrize(("num_ranks", "m"), slow_but([(3, 70)], [(4, 9)]))
def test_every_way_of_calling(ranks, function, engines, num_ranks, m):
    program = Program(function, num_ranks, m, engines)
    ranks(lambda: program.main(m, m // 2 + 1), num_ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("function", "engines"),
    [(ag_gemm, {"gathered": "sm_push"}), (gemm_rs, {"scattered": "sm_push"})],
    ids=["ag_gemm", "gemm_rs"],
)
def test_calls_that_come_again_have_their_own_operands_and_layouts(
    ranks, monkeypatch, function, engines
):
    """On one slot and, as a GPU's allocator does it, with results where the last call's lay: each
    call is recorded when it comes again, and replayed then, by its key."""
    monkeypatch.setattr(replays, "SIGHTINGS", 1)
    monkeypatch.setenv("WEFT_SLOTS", "1")
    fresh, results, seen = Memory.results, {}, []

    def results_where_they_lay(self):
        return results.setdefault(id(self), fresh(self))

    replay = LaunchRecording.replay
    monkeypatch.setattr(Memory, "results", results_where_they_lay)
    monkeypatch.setattr(LaunchRecording, "replay", lambda self: seen.append(self) or replay(self))
    m, num_ranks = 40, 2
    program = Program(function, num_ranks, m, engines)

    def main():
        world = weft.init()
        first, other = program.tensors(m, seed=0), program.tensors(m, seed=1)
        wholes = [first, {**first, "a": other["a"]}, {**first, "b": other["b"]}]
        calls = [(whole, program.mine(whole, world.rank)) for whole in wholes]
        calls.append((first, {**calls[0][1], "b": calls[0][1]["b"].t().contiguous().t()}))
        for _ in range(3):
            for whole, mine in calls:
                got = run_plan(program.stages, mine, {"m": m}, world=world)
                program.check(got, whole, world.rank)
        world.close()

    ranks(main, num_ranks)
    assert len(seen) == 2 * num_ranks * 4


CARRIED = {"scattered": "ce_push"}


def carried(function, num_ranks: int, m: int, **engines: str) -> Program:
    """Where engines carry sums, but for recorded calls."""
    program = Program(function, num_ranks, m, CARRIED | engines)
    pushed = Program(function, num_ranks, m, {"scattered": "sm_push"} | engines)
    program.stages = replace(program.stages, recorded=pushed.stages)
    return program


@pytest.mark.few(1)
@pytest.mark.parametrize(("function", "num_ranks", "m"), [(gemm_rs, 4, 9), (mlp, 3, 70)])
def test_sums_that_engines_carry(ranks, function, num_ranks, m):
    program = carried(function, num_ranks, m)
    (copy,) = [one for one in program.stages.plan.of(Copy) if one.awaits]
    assert copy.side == "owner"
    ranks(lambda: program.main(m, m // 2 + 1), num_ranks)


def test_both_ways_of_calling_lie_in_one_workspace(ranks):
    """Which is not made anew by the other's first call, and the outgrown one kept for ever."""
    program = carried(gemm_rs, 2, 40)

    def main():
        world = weft.init()
        mine = program.mine(program.tensors(40), world.rank)
        run_plan(program.stages, mine, {"m": 40}, world=world)
        free = world.heap_free_bytes
        with world.record() as recording:
            run_plan(program.stages, mine, {"m": 40}, world=world)
        recording.replay()
        run_plan(program.stages, mine, {"m": 40}, world=world)
        workspaces = world._workspaces.values()
        assert [one.key for one in workspaces] == ["shared", "program gemm_rs"]
        assert world.heap_free_bytes == free and not any(one._outgrown for one in workspaces)
        world.close()

    ranks(main, 2)


def test_what_was_prepared_for_larger_calls_is_there_for_smaller_ones(ranks, monkeypatch):
    """So a first call of fewer rows prepares nothing, and may still be recorded behind it."""
    program, prepared = carried(gemm_rs, 2, 40), []
    prepare = PlanRunner.prepare

    def noted(self, *given, **named):
        prepared.append((self.world.rank, self.sized.sizes["m"]))
        prepare(self, *given, **named)

    monkeypatch.setattr(PlanRunner, "prepare", noted)

    def main():
        world = weft.init()
        for m in (40, 24, 7, 56, 41):
            tensors = program.tensors(m)
            mine = program.mine(tensors, world.rank)
            results = run_plan(program.stages, mine, {"m": m}, world=world)
            program.check(results, tensors, world.rank)
            free = world.heap_free_bytes
            with world.record() as recording:
                results = run_plan(program.stages, mine, {"m": m}, world=world)
            recording.replay()
            program.check(results, tensors, world.rank)
            assert world.heap_free_bytes == free
        world.close()

    ranks(main, 2)
    assert sorted(prepared) == [(rank, m) for rank in range(2) for m in (40, 56)]


@pytest.mark.parametrize("by_libraries", [False, True])
def test_what_is_prepared_for_one_ranks_tensors_takes_no_turn(ranks, by_libraries):
    """Its weights lie otherwise, so calls that are new to it are not to the others."""
    program = carried(gemm_rs, 3, 40)
    if by_libraries:
        unfused = Program(gemm_rs, 3, 40, {"scattered": "library"})
        program.stages = replace(program.stages, recorded=unfused.stages)

    def main():
        world = weft.init()
        for seed, odd in enumerate([None, 1, 2, None, 0, 1]):
            tensors = program.tensors(40, seed)
            mine = program.mine(tensors, world.rank)
            if world.rank == odd:
                mine["b"] = mine["b"].t().contiguous().t()
            results = run_plan(program.stages, mine, {"m": 40}, world=world)
            program.check(results, tensors, world.rank)
        world.close()

    ranks(main, 3)


def test_where_determinism_is_asked_for_calls_are_done_as_recorded(ranks):
    program = carried(gemm_rs, 2, 40)

    def main():
        world = weft.init()
        taken, take = [], world.backend.take_token
        world.backend.take_token = lambda word: taken.append(word) or take(word)
        tensors = program.tensors(40)
        mine = program.mine(tensors, world.rank)

        def call():
            (result,) = run_plan(program.stages, mine, {"m": 40}, world=world)
            return result

        first = call().clone()
        with world.record() as recording:
            out = call()
        out.fill_(float("nan"))
        recording.replay()
        assert torch.equal(out, first) and torch.equal(call(), first) and not taken
        program.check((first,), tensors, world.rank)
        world.close()

    torch.use_deterministic_algorithms(True)
    try:
        ranks(main, 2)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_recorded_call_by_libraries_has_been_called_before(ranks):
    """All that libraries need for it is there since the first call."""
    program = carried(gemm_rs, 2, 40)
    unfused = Program(gemm_rs, 2, 40, {"scattered": "library"})
    program.stages = replace(program.stages, recorded=unfused.stages)
    assert not unfused.stages.plan.of(Launch)
    ranks(lambda: program.main(40, 7), 2)


def test_a_recording_of_what_was_asked_for_is_refused(ranks):
    program = Program(gemm_rs, 2, 40, CARRIED)

    def main():
        world = weft.init()
        tensors = program.tensors(40)
        mine = program.mine(tensors, world.rank)
        for _ in range(2):
            results = run_plan(program.stages, mine, {"m": 40}, world=world)
            program.check(results, tensors, world.rank)
        told = "gemm_rs: engine='ce_push' of sums cannot be recorded.*ask for 'sm_push'"
        with pytest.raises(UsageError, match=told) as error, world.record():
            run_plan(program.stages, mine, {"m": 40}, world=world)
        assert error.value.place.outermost.file == __file__

    ranks(main, 2)


def test_copies_are_queued_before_a_library_is_called(ranks, monkeypatch):
    """Its first call may hold the host until the device is idle; what multiplies waits for them."""
    program, order = Program(mlp, 2, 40, {"gathered": "ce_push"}), []
    queue, doing = Transfers.queue, runner.doing

    def noted(name, function):
        return lambda *args: (order.append(name), function(*args))[1]

    monkeypatch.setattr(Transfers, "queue", noted("copies", queue))
    monkeypatch.setattr(runner, "doing", lambda step: noted("library", doing(step)))

    def main():
        world = weft.init()
        run_plan(
            program.stages, program.mine(program.tensors(40), world.rank), {"m": 40}, world=world
        )

    ranks(main, 2)
    assert order[0] == "copies" and "library" in order


def test_a_kernel_runs_as_its_schedule_says(ranks):
    """Warps, stages, the groups of tiles and the end of the order: the executor finds no others."""
    program = Program(gemm_rs, 2, 160, {"scattered": "sm_push"})
    told = Schedule(last=1, tile_m=16, tile_n=32, tile_k=16, group_m=4, num_warps=2, num_stages=1)

    def main():
        world = weft.init()
        tensors = program.tensors(160)
        mine = program.mine(tensors, world.rank)
        stages = replace(program.stages, schedules={"gemm_rs_multiply": told})
        runner = PlanRunner(world, stages, mine, {"m": 160})
        launch = runner.starts.launches["gemm_rs_multiply"]
        assert launch.parts.group_m == 4
        usual = PlanRunner(world, program.stages, mine, {"m": 160})
        assert usual.starts.launches["gemm_rs_multiply"].parts.group_m == 5
        slot = runner.memory.slots.reserve()
        (step,) = runner.plan.of(Launch)
        bound = runner.memory.bind(mine, runner.memory.results(), slot)
        (start,) = runner.starts.of(step, bound, slot)
        assert start.options == {"num_warps": 2, "num_stages": 1}
        program.check(runner.run(mine), tensors, world.rank)

    ranks(main, 2)


def test_tensors_are_copied_to_where_the_only_kernel_can_read_them(ranks):
    """Ranks signal tiles to each other, and the generic variant has others of 160 columns, say."""
    program = Program(gemm_rs, 2, 40, {"scattered": "sm_push"})

    def main():
        world = weft.init()
        tensors = program.tensors(40)
        mine = program.mine(tensors, world.rank)
        a = torch.empty(mine["a"].numel() + 1)[1:].view(mine["a"].shape).copy_(mine["a"])
        runner = PlanRunner(world, program.stages, mine, {"m": 40})
        runner._needs_aligned = True
        taken, bind = [], runner.memory.bind

        def bound(given, results, slot):
            taken.extend(one.data_ptr() % 16 for one in (*given.values(), *results))
            return bind(given, results, slot)

        runner.memory.bind = bound
        program.check(runner.run({**mine, "a": a}), tensors, world.rank)
        assert taken and not any(taken)

    ranks(main, 2)


def test_what_a_stream_does_beside_a_plan_is_recorded_by_itself(ranks):
    """The product's launches as one, the engine's stream as another; what is behind it waits."""
    program = carried(mlp, 2, 40, gathered="ce_push")

    def main():
        world = weft.init()
        runner = PlanRunner(world, program.stages, {}, {"m": 40})
        together, beside = runner.recordings
        steps = program.stages.plan.steps
        assert [type(one) for one in beside["send"]] == [Copy]
        assert {one.stream for one in together} == {"main", "copy"}
        assert len(together) + 2 == len(steps), "all but the copy and the join behind it"
        # A plan in which something is behind that join is queued as it stands.
        plan = program.stages.plan
        plan = replace(
            plan, statements=(*plan.statements, replace(plan.of(Launch)[0], takes=False))
        )
        stages = replace(program.stages, plans={"changed": plan})
        assert PlanRunner(world, stages, {}, {"m": 40}).recordings is None
        world.close()

    ranks(main, 2)


def test_what_a_stream_does_beside_a_plan_is_queued_where_it_is_recorded(ranks, monkeypatch):
    """A recording is made on a stream of its own; what is queued elsewhere runs, and once only."""
    program, real, on = carried(gemm_rs, 2, 40), runner.run_beside, []

    def also_recorded(world, replays, streams, join, **named):
        real(world, replays, streams, join, **named)
        with monkeypatch.context() as instead, world.stream("recording"):
            for name in ("take_token", "copy", "copy_word"):
                instead.setattr(
                    world.backend, name,
                    lambda *_, name=name: on.append((name, world.current_stream().name)),
                )  # fmt: skip
            for one in streams:
                one.queue()

    monkeypatch.setattr(runner, "run_beside", also_recorded)
    ranks(lambda: program.main(40, 21), 2)
    assert {name for name, _ in on} == {"take_token", "copy", "copy_word"}
    assert {stream for _, stream in on} == {"recording"}


def _named(one) -> str:
    if isinstance(one, tuple):
        return text_of(one)
    return getattr(one, "__name__", None) or next(iter(one.values()), "sm_put")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("function", "engines", "nodes"),
    [
        (ag_gemm, {"gathered": "sm_put"}, (2, 1)),
        (ag_gemm, {"gathered": "relay"}, (2, 1)),
        (mlp, {"gathered": "relay"}, (2, 2)),
        (gemm_rs, {"scattered": "sm_put"}, (2, 1)),
        (gemm_rs, {"scattered": "relay"}, (2, 1)),
        (gemm_rs, {"scattered": "relay"}, (3, 2)),
        (mlp, {"gathered": "relay", "scattered": "relay"}, (2, 2)),
        (gemm_ar, {"reduced": "sm_put"}, (2, 1)),
        (all_reduce_rms_norm, {}, (2, 1)),
        pytest.param(gemm_ar, {"reduced": "sm_put"}, (1, 1), marks=pytest.mark.slow),
        pytest.param(ag_gemm, {"gathered": "sm_put"}, (2, 2), marks=pytest.mark.slow),
        pytest.param(mlp, {"gathered": "sm_put"}, (2, 2), marks=pytest.mark.slow),
        pytest.param(ag_gemm, {"gathered": "relay"}, (3, 2), marks=pytest.mark.slow),
    ],
    ids=_named,
)
def test_tiles_go_node_by_node(ranks, function, engines, nodes):
    """Of rows that nothing divides: tiles straddle ranks, and nodes."""
    num_ranks, m = sum(nodes), 61
    program = Program(function, num_ranks, m, engines, nodes=nodes)
    launches = [one for one in program.stages.plan.of(Launch) if not is_relay(one)]
    assert launches and all(one.order.startswith("hierarchical_") for one in launches)
    ranks(lambda: program.main(m, 9), num_ranks, nodes=nodes)


def test_without_rows_there_is_nothing_to_do(ranks):
    program = Program(mlp, 2, 16)

    def main():
        world = weft.init()
        mine = program.mine(program.tensors(0), world.rank)
        (result,) = run_plan(program.stages, mine, {"m": 0}, world=world)
        assert result.shape == (0, K)
        world.close()

    ranks(main, 2)


@pytest.mark.parametrize("engine", ["one_shot_ll", "two_shot_ll"])
def test_packets_carry_the_tiles_of_a_product_for_small_m(ranks, engine):
    """Calls of several sizes by turns, on one slot; a rank may have tensors TMA reads not."""
    program = Program(gemm_ar, 3, 40, {"reduced": engine})

    def main():
        world = weft.init()
        for turn, m in enumerate((40, 3, 40, 40, 17)):
            tensors = program.tensors(m, seed=turn)
            mine = program.mine(tensors, world.rank)
            if turn == world.rank:
                a = torch.empty(mine["a"].numel() + 1)[1:].view(mine["a"].shape)
                mine["a"] = a.copy_(mine["a"])
            program.check(
                run_plan(program.stages, mine, {"m": m}, world=world), tensors, world.rank
            )
        world.close()

    ranks(main, 3)


def test_a_step_without_a_kernel_is_told_with_its_line(ranks):
    program = Program(gemm_ar, 2, 16, {"reduced": "one_shot_ll"})
    plan = program.stages.plan
    # By packets there is a kernel of another template.
    statements = (replace(x, template="gemm") if isinstance(x, Launch) else x
                  for x in plan.statements)  # fmt: skip
    stages = replace(program.stages, plans={"changed": replace(plan, statements=tuple(statements))})

    def main():
        world = weft.init()
        mine = program.mine(program.tensors(16), world.rank)
        with pytest.raises(UnsupportedError, match="gemm_ar_multiply: no hooks are known") as error:
            run_plan(stages, mine, {"m": 16}, world=world)
        assert error.value.place.frames[0].file.endswith("test_runner.py")

    ranks(main, 2)


def test_ranks_that_disagree_on_sizes_are_told_with_the_programs_line(ranks):
    program = Program(ag_gemm, 2, 64, {"gathered": "sm_push"})

    def main():
        world = weft.init()
        m = 62 + 2 * world.rank
        mine = program.mine(program.tensors(m), world.rank)
        run_plan(program.stages, mine, {"m": m}, world=world)

    told = r"ag_gemm \(plan \w+\) with m=62, but rank 1 calls program ag_gemm .* with m=64; every"
    with pytest.raises(CallOrderError, match=told) as error:
        ranks(main, 2)
    assert error.value.place.outermost.file == __file__


@pytest.mark.parametrize("lowering", ["overlapped", "persistent"])
def test_ranks_whose_programs_differ_in_an_operation_alone(ranks, lowering):
    def with_(activation):
        def mlp(x, w):
            return activation(all_gather(x) @ w)

        return program(mesh="tp", x=of("m", K, Shard(0)), w=of(K, N, Shard(1)))(mlp)

    def main():
        world = weft.init()
        mlp = with_(gelu if world.rank else silu).options(lowering=lowering)
        mlp(torch.ones(4, K), torch.ones(K, N // 2), world=world)
        world.close()

    with pytest.raises(
        CallOrderError, match=r"program mlp \(\w+ (\w+)\).*program mlp \(\w+ (?!\1)"
    ):
        ranks(main, 2)


def two_products(x, w1, w2):
    gathered = all_gather(x)
    return gathered @ w1, gathered @ w2


PARAMETERS[two_products] = {
    "x": of("m", K, Shard(0)), "w1": of(K, N, Shard(1)), "w2": of(K, 2 * N, Shard(1)),
}  # fmt: skip


@pytest.mark.slow
def test_two_products_of_the_same_rows(ranks):
    """The second need not wait: what the first has waited for is there."""
    program = Program(two_products, 3, 70, {"gathered": "sm_push"})
    assert sorted(len(one.awaits) for one in program.stages.plan.of(Launch)) == [0, 0, 1]
    ranks(lambda: program.main(70, 20), 3)


def gated_and_added(x, w1, w2, residual):
    gathered = all_gather(x)
    gate = silu(gathered @ w1)
    return gathered @ w2 * gate + residual


PARAMETERS[gated_and_added] = {
    "x": of("m", K, Shard(0)), "w1": of(K, N, Shard(1)), "w2": of(K, N, Shard(1)),
    "residual": of("m", N, Shard(1)),
}  # fmt: skip


def test_products_are_worked_on_with_what_memory_holds(ranks):
    """In registers: silu behind a product, times another product, plus a residual."""
    program = Program(gated_and_added, 3, 70, {"gathered": "sm_push"})
    launches = program.stages.plan.of(Launch)
    assert [[do.kind for do in one.body] for one in launches[1:]] == [
        ["matmul"], ["matmul", "silu", "mul", "add"]
    ]  # fmt: skip
    ranks(lambda: program.main(70, 20), 3)


@pytest.mark.parametrize("asked", [False, True])
def test_where_the_heap_has_no_room_libraries_do_it_unless_the_way_was_asked_for(ranks, asked):
    """All ranks alike; smaller calls overlap as before."""

    def main():
        with weft.init(heap_bytes=128 << 10) as world:
            b = torch.ones(16, 8)

            def call(m: int) -> list[torch.Tensor]:
                problem = op.make_problem(2, {"m": m, "n": 8, "k": 16}, "float32")
                config = next(iter(op.candidates(problem, world.target))) if asked else None
                return [
                    weft.ops.ag_gemm(torch.ones(m // 2, 16), b, world=world, config=config),
                    weft.ops.gemm_rs(torch.ones(m, 16), b, world=world),
                ]

            op = card("ag_gemm")
            for m in (64, 2048, 64):
                if asked and m > 64:
                    with pytest.raises(OutOfMemoryError, match="'program ag_gemm' asks for"):
                        call(m)
                    continue
                gathered, summed = call(m)
                assert gathered.shape == (m, 8) and (gathered == 16).all()
                assert summed.shape == (m // 2, 8) and (summed == 32).all()
                with world.record() as recording:
                    gathered, summed = call(m)
                gathered.zero_(), summed.zero_()
                recording.replay()
                assert (gathered == 16).all() and (summed == 32).all()

    ranks(main, 2)


def test_a_new_size_of_a_class_lowers_nothing_again(ranks, monkeypatch):
    """Its plan is there, and so are its kernels: 1.2 of 2.1 ms of a runner, under a profiler."""
    lowered: list[str] = []
    own = kernels.lower_launch
    monkeypatch.setattr(
        kernels, "lower_launch", lambda plan, one: lowered.append(one.kernel) or own(plan, one)
    )

    def main():
        with weft.init() as world:
            for m in (34, 36, 38, 40):
                weft.ops.gemm_rs(torch.ones(m, 18), torch.ones(18, 34), world=world)
                if m == 34:
                    lowered.clear()

    ranks(main, 1)
    assert not lowered
