"""What carries a collective's data: predicted, asked for, or refused."""

from __future__ import annotations

from dataclasses import fields, replace

import operators
import pytest
from operators import compiled, placed

from weft.base.errors import ConfigError
from weft.base.hardware import H200X4, Hardware
from weft.base.target import parse_target
from weft.compiler.cost import libraries, products, tasks
from weft.compiler.cost.choose import shape_together, staged_chunks, sums_of_rows, ways
from weft.compiler.cost.libraries import on_curve
from weft.compiler.cost.products import Product
from weft.compiler.facts import Facts, Settings
from weft.compiler.pipeline import overlap
from weft.ir import device
from weft.ir.tensor import Shard


def engine(function, name: str, **facts) -> str:
    return overlap(placed(function), Facts(**facts)).program.task(name).engine


def test_many_rows_are_carried_by_copy_engines_and_few_are_gathered_before():
    assert engine(operators.ag_gemm, "gathered", sizes={"m": 8192}) == "ce_push"
    assert engine(operators.ag_gemm, "gathered", sizes={"m": 64}) == ""


@pytest.mark.parametrize(
    ("function", "rows"), [(operators.gemm_rs, (1024, 2048)), (operators.mlp, (2048, 4096))]
)
def test_sums_of_many_rows_are_carried_by_copy_engines(function, rows):
    """From the size on at which the operator takes transport=sm_put."""
    few, many = ({"sizes": {"m": m}} for m in rows)
    assert engine(function, "scattered", **few) == "sm_push"
    assert engine(function, "scattered", **many) == "ce_push"
    # A graph's branches have no order: there each chunk is behind a launch of its own.
    assert engine(function, "scattered", **many, is_recorded=True) in ("sm_push", "ce_parts")


def test_what_engines_carry_is_predicted_as_the_operators_is():
    program = placed(operators.gemm_rs)
    scattered, facts = program.task("scattered"), Facts({"m": 8192})
    found = ways(program, [program.task("product")], scattered, facts)
    carried = [way for way in found if way.engine == "ce_push"]
    assert {way.chunks for way in carried} == {1, 2, 4}
    for way in carried:
        shape = product(8192, n=4096, k=3584, tile=way.tile)
        assert way.us == round(products.staged_us(shape, H200X4, way.chunks), 3)
    # Several chunks are alike and of whole tiles, at all sizes that a plan is of.
    odd = 4096 - 128
    assert [*staged_chunks(odd, 256)] == [1] and [*staged_chunks(odd, 128)] == [1]
    assert [*staged_chunks("n", 128)] == [1], "columns that are open"


@pytest.mark.parametrize("target", ["emu", "cuda:100", "hip:gfx942"])
def test_engines_carry_sums_unasked_by_the_template_that_was_read_alone(target):
    """As the operator does, which takes the template without Hopper's instructions by pushes."""
    facts = Facts({"m": 8192}, target=parse_target(target))
    found = overlap(placed(operators.gemm_rs), facts).program
    assert found.task("scattered").engine != "ce_push"
    settings = Settings(engines={"scattered": "ce_push"})
    for num_ranks in (1, 4):
        asked = overlap(placed(operators.gemm_rs), replace(facts, num_ranks=num_ranks), settings)
        assert asked.program.task("scattered").engine == "ce_push"


def test_engines_carry_no_sums_to_other_nodes_nor_in_recordings():
    settings = Settings(engines={"scattered": "ce_push"})
    for facts in (Facts({"m": 8192}, nodes=(2, 2)), Facts({"m": 8192}, is_recorded=True)):
        with pytest.raises(ConfigError, match="scattered has engine=ce_push; here it can have"):
            overlap(placed(operators.gemm_rs), facts, settings)
    with pytest.raises(ConfigError, match="scattered has engine=ce_push; here it can have"):
        compiled(operators.moe_rs, engines={"scattered": "ce_push"})


def test_chunks_of_carried_sums_are_alike_and_of_whole_tiles():
    asked = {"engines": {"scattered": "ce_push"}, "tiles": {"product": (128, 256, 64)}}
    stages = compiled(operators.gemm_rs, chunks={"scattered": 16}, **asked)
    assert stages.program.task("scattered").chunks == 16
    told = "chunks=3 of scattered, of 4096 columns in tiles of 256; .* take 1, or such that"
    with pytest.raises(ConfigError, match=told):
        compiled(operators.gemm_rs, chunks={"scattered": 3}, **asked)
    with pytest.raises(ConfigError, match="chunks=2 of scattered; it is 1 to 1024, of none"):
        compiled(operators.gemm_rs, engines={"scattered": "sm_push"}, chunks={"scattered": 2})


def test_a_recorded_call_has_a_plan_of_its_own_unless_the_engine_was_asked_for():
    program = operators.declared(operators.gemm_rs)
    stages = program.overlapped(Facts({"m": 8192}))
    assert stages.program.task("scattered").engine == "ce_push"
    assert stages.recorded.program.task("scattered").engine == "ce_parts"
    assert program.overlapped(Facts({"m": 8000})) is stages
    chunks = program.options(settings=Settings(chunks={"scattered": 2})).overlapped(
        Facts({"m": 8192})
    )
    assert chunks.recorded.program.task("scattered").engine == "ce_parts"
    asked = program.options(settings=Settings(engines={"scattered": "ce_push"}))
    assert asked.overlapped(Facts({"m": 8192})).recorded is None
    assert program.overlapped(Facts({"m": 64})).recorded is None


COLLECTIVES = ((operators.ag_gemm, "gathered"), (operators.gemm_rs, "scattered"),
               (operators.gemm_ar, "reduced"))  # fmt: skip


def over_nodes(function, name: str, m: int, nodes: tuple[int, ...]) -> dict[str, float]:
    """When each way would end, by its engine."""
    program, found = placed(function), {}
    facts = Facts({"m": m}, sum(nodes), nodes=nodes if len(nodes) > 1 else ())
    for way in ways(program, [program.task("product")], program.task(name), facts):
        found.setdefault(way.engine, way.us)
    return found


@pytest.mark.parametrize(("function", "name"), COLLECTIVES)
@pytest.mark.parametrize("m", [64, 2048, 16384])
def test_libraries_take_longer_the_more_nodes_there_are(function, name, m):
    """A ring passes from node to node by the ports of a node's ranks, of which there are fewer."""
    for num_ranks in (4, 8):
        counts = [n for n in (1, 2, 4, 8) if n <= num_ranks]
        times = [over_nodes(function, name, m, (num_ranks // n,) * n)["library"] for n in counts]
        assert times == sorted(set(times))


@pytest.mark.parametrize(("function", "name"), COLLECTIVES)
def test_what_is_put_takes_longer_the_more_of_it_leaves_the_node(function, name):
    times = [over_nodes(function, name, 8192, (8 // n,) * n)["sm_put"] for n in (2, 4, 8)]
    assert times == sorted(set(times))


def test_over_several_nodes_libraries_are_not_always_first():
    found = {
        (function, nodes, m): min(times := over_nodes(function, name, m, nodes), key=times.get)
        for function, name in COLLECTIVES for nodes in ((1, 1), (2, 2), (4, 4))
        for m in (1024, 8192, 32768)
    }  # fmt: skip
    for function in (operators.ag_gemm, operators.gemm_rs, operators.gemm_ar):
        assert found[function, (1, 1), 8192] == found[function, (1, 1), 32768] == "sm_put"
    for nodes in ((2, 2), (4, 4)):
        assert found[operators.ag_gemm, nodes, 8192] == found[operators.gemm_rs, nodes, 8192]
        assert found[operators.ag_gemm, nodes, 8192] == "relay"
        # With more ranks on a node each rank's sums would cross to many by one port: relayed, as in
        # a ring, they cross once.
        assert found[operators.gemm_ar, nodes, 8192] == "relay"
    stages = overlap(placed(operators.ag_gemm), Facts({"m": 8192}, 2, nodes=(1, 1)))
    assert stages.program.task("gathered").engine == "sm_put"


def test_other_nodes_are_reached_by_puts():
    facts = {"sizes": {"m": 8192}, "num_ranks": 4, "nodes": (2, 2)}
    assert engine(operators.ag_gemm, "gathered", **facts) == "relay"
    assert engine(operators.gemm_rs, "scattered", **facts) == "relay"
    # Sums that all ranks get are relayed to their owners, and gathered behind that.
    program = overlap(placed(operators.gemm_ar), Facts(**facts)).program
    total, sums = program.task("reduced"), program.task("reduced_scattered")
    assert (sums.kind, sums.engine, sums.type.placement) == ("reduce_scatter", "relay", Shard(0))
    assert (total.kind, total.kernel, total.operands) == ("all_gather", "", (sums.name,))
    assert program.results == (total.name,)
    # A row that is passed on has a signal more on its way than one that is put.
    assert engine(operators.ag_gemm, "gathered", **facts | {"sizes": {"m": 4}}) in ("sm_put", "")
    emulated = facts | {"target": parse_target("emu")}
    assert engine(operators.ag_gemm, "gathered", **emulated) == "relay"
    # Nobody is there to pass rows on to.
    alone = emulated | {"num_ranks": 2, "nodes": (1, 1)}
    assert engine(operators.ag_gemm, "gathered", **alone) == "sm_put"


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_rows_that_are_summed_are_relayed_where_that_is_predicted_to_end_first(kind):
    """Not of a few tokens; nor where work follows the sums, or nobody is near."""

    def first(m: int, nodes: tuple[int, ...], slots: int, target: str = "cuda:90") -> str:
        found = sums_of_rows(kind, m, 7168, 2, slots, sum(nodes), nodes, parse_target(target))
        times = [way.us for way in found if way.us]
        assert times == sorted(times)
        return found[0].engine

    assert first(32768, (4, 4), 8 * 32768) == first(64, (4, 4), 8 * 64) == "relay"
    assert first(8, (2, 2), 64) == first(32768, (4, 4), 0) == first(2048, (1, 1), 4096) == "sm_put"
    assert first(32768, (8,), 8 * 32768) == "sm_push"
    assert first(32768, (4, 4), 8 * 32768, "cuda:100") == "relay"  # of which nothing is known


def test_what_is_relayed_takes_longer_the_more_nodes_there_are():
    """A rank's port brings a part of each other node; near links what is passed on."""
    times = [over_nodes(operators.ag_gemm, "gathered", 8192, (8 // n,) * n) for n in (2, 4)]
    assert times[0]["relay"] < times[1]["relay"]
    assert all(one["relay"] < one["sm_put"] for one in times)
    assert "relay" not in over_nodes(operators.ag_gemm, "gathered", 8192, (1,) * 8)
    assert "relay" not in over_nodes(operators.ag_gemm, "gathered", 8192, (8,))


def test_rows_are_not_relayed_where_no_sm_is_to_spare():
    facts = Facts({"m": 64}, 4, replace(parse_target("emu"), num_sms=1), (2, 2))
    program = placed(operators.ag_gemm)
    found = ways(program, [program.task("product")], program.task("gathered"), facts)
    assert {way.engine for way in found} == {"sm_put"}


def test_one_rank_copies_nothing():
    for target in ("emu", "cuda:90"):
        facts = {"sizes": {"m": 8192}, "num_ranks": 1, "target": parse_target(target)}
        assert engine(operators.ag_gemm, "gathered", **facts) in ("sm_push", "")


@pytest.mark.parametrize("target", ["cuda:80", "cuda:100", "hip:gfx942"])
def test_where_no_machine_was_measured_nothing_is_predicted_and_the_choice_says_so(target):
    """It takes what SMs store, and no constant of another machine."""
    facts = Facts({"m": 8192}, target=parse_target(target))
    for function, name in COLLECTIVES:
        stages = overlap(placed(function), facts)
        assert stages.program.task(name).engine == "sm_push"
        found = ways(stages.tasks["fuse"], [stages.tasks["fuse"].task("product")],
                     stages.tasks["fuse"].task(name), facts)  # fmt: skip
        assert {way.us for way in found} == {None}
        told = {one.what: one.why for one in stages.program.choices if one.subject == name}
        assert told["engine"] == (
            f"nothing is predicted for {target}, of which no machine was measured"
        )
    far = overlap(placed(operators.ag_gemm), replace(facts, nodes=(2, 2)))
    assert far.program.task("gathered").engine == "relay"


def test_libraries_one_after_the_other_are_one_of_the_ways():
    (collective,) = [one for one in placed(operators.ag_gemm).tasks if one.kind == "all_gather"]
    program = placed(operators.ag_gemm)
    found = ways(program, [program.task("product")], collective, Facts({"m": 8192}))
    assert "library" in {way.engine for way in found}
    assert [way.us for way in found] == sorted(way.us for way in found)
    emulated = Facts({"m": 8192}, target=parse_target("emu"))
    found = ways(program, [program.task("product")], collective, emulated)
    assert "library" not in {way.engine for way in found}


def test_a_library_leaves_nothing_fused_of_the_kernels_that_it_replaces():
    stages = compiled(operators.mlp, engines={"gathered": "library"})
    kernels = {one.name: one.kernel for one in stages.program.tasks if one.kernel}
    assert kernels.pop("gated") == "mlp_rows"  # of rows alone, which are no epilogue any more
    assert set(kernels) == {"product_2", "scattered"}
    text = "call(all_gather, (x,), (gathered,), dim=0)"
    assert text in device.show(stages.plan, places=False)


def test_why_is_told_with_times():
    (choice,) = [one for one in compiled(operators.ag_gemm).program.choices
                 if one.what == "engine"]  # fmt: skip
    assert choice.taken == "ce_push"
    assert "sm_push" in choice.why and "library" in choice.why and " us" in choice.why


@pytest.mark.parametrize(
    ("engines", "told"),
    [
        (
            {"gathered": "two_shot_ll"},
            "all_gather gathered has engine=two_shot_ll; here it can have",
        ),
        ({"gathered": "sm_put"}, "engine=sm_put; here it can have ce_push, "),
        ({"product": "sm_push"}, "engines for product; collectives that kernels hide are gathered"),
    ],
)
def test_engines_that_cannot_be(engines, told: str):
    with pytest.raises(ConfigError, match=told):
        compiled(operators.ag_gemm, engines=engines)


# ---------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize(("columns", "us"), [
    (128, 49.73), (256, 49.06), (160, 59.82), (192, 55.26),
])  # fmt: skip
def test_a_narrow_product_beside_another_costs_more_than_its_columns(columns, us):
    """As read of the template alone, 1024 x 8192 x 2048: gemm_variants_h200x1.json."""
    one = product(1024, n=8192, k=2048, num_ranks=1, tile=(128, columns, 64))
    assert products.gathered_us(one, H200X4, "sm_push") == pytest.approx(us, rel=0.06)


def test_columns_of_the_sm90_variant_alone_are_for_kernels_that_signal_no_tile():
    """Ranks signal tiles of sums to each other; the generic variant may stand in on one of them."""
    for function, name, found in (
        (operators.ag_gemm, "gathered", {128, 160, 256}),
        (operators.gemm_rs, "scattered", {128, 256}),
    ):
        program = placed(function)
        shown = ways(program, [program.task("product")], program.task(name), Facts({"m": 1024}))
        assert {way.tile[1] for way in shown if way.tile} == found
        shown = ways(program, [program.task("product")], program.task(name),
                     Facts({"m": 1024}, nodes=(2, 2)))  # fmt: skip
        assert {way.tile[1] for way in shown if way.tile} == {128, 256}


def product(m: int, **changes) -> Product:
    fields = {"n": 7168, "k": 4096, "num_ranks": 4, "tile": (128, 256, 64)}
    return Product(m, **(fields | changes))


@pytest.mark.parametrize("way", [
    lambda one: products.gathered_us(one, H200X4, "ce_push"),
    lambda one: products.gathered_us(one, H200X4, "sm_push"),
    lambda one: products.scattered_us(one, H200X4),
    lambda one: products.reduced_us(one, H200X4),
    lambda one: libraries.product_us(one, H200X4),
])  # fmt: skip
def test_more_rows_take_longer(way):
    times = [way(product(m)) for m in (512, 1024, 2048, 4096, 8192)]
    assert times == sorted(times) and times[-1] > 2 * times[0]


def test_nothing_ends_before_its_data_has_arrived_or_left():
    one = product(8192)
    row_bytes = one.k * 2
    assert products.gathered_us(one, H200X4, "ce_push") > 6144 * row_bytes / 390e3
    assert products.scattered_us(one, H200X4) > 6144 * one.n * 2 / 300e3


@pytest.mark.parametrize(
    ("function", "collective", "sizes"),
    [
        (operators.ag_gemm, "gathered", (4096, 7168, 4096)),
        (operators.gemm_rs, "scattered", (4096, 4096, 3584)),
        (operators.gemm_ar, "reduced", (4096, 4096, 3584)),
    ],
)
def test_a_product_is_predicted_with_all_ranks_rows_and_its_own_columns(
    function, collective, sizes
):
    """The program's plan is made for as many rows, and its times are those of this product."""
    program, facts = placed(function), Facts({"m": 4096})
    (task,) = [one for one in program.tasks if one.kind == "matmul"]
    one = shape_together(program, [task], facts)
    assert (one.m, one.n, one.k, one.num_ranks, one.itemsize) == (*sizes, 4, 2)
    m, n, k = sizes
    found = {way.engine: way.us for way in ways(program, [task], program.task(collective), facts)}
    kind = program.task(collective).kind
    assert found["library"] == libraries.unfused_us(product(m, n=n, k=k), H200X4, kind)


def test_several_products_of_the_same_rows_are_predicted_as_one():
    program = placed(operators.ag_gemm)
    task = program.task("product")
    one, two = (shape_together(program, [task] * times, Facts({"m": 512})) for times in (1, 2))
    assert two == replace(one, n=2 * one.n)


SHAPES = (
    product(8192), product(8192, n=3584, k=8192, head=16, first_wave=2),
    product(512, tile=(64, 128, 64)), product(4096, tile=(128, 160, 64), num_ranks=2),
    product(1100, tile=(128, 192, 64)), product(8192, num_ranks=4, num_nodes=2),
    product(300, n=70000, k=8192), product(4096, n=2560),
)  # fmt: skip
FEW = (product(16), product(64))
WAYS = {
    **{f"gathered {engine} {chunks}": lambda one, machine, engine=engine, chunks=chunks:
       products.gathered_us(one, machine, engine, chunks=chunks)
       for engine in ("ce_push", "sm_push", "sm_put") for chunks in (1, 2)},
    "fed": lambda one, machine: products.gathered_us(one, machine, "sm_push", pushers=8),
    "scattered": lambda one, machine: products.scattered_us(one, machine),
    "by TMA": lambda one, machine: products.scattered_us(one, machine, by_tma=True),
    "carried": lambda one, machine: products.staged_us(one, machine, 2),
    "reduced": lambda one, machine: products.reduced_us(one, machine),
    "by packets": lambda one, machine: products.reduced_us(one, machine, "one_shot_ll"),
    **{f"rows by {engine}": lambda one, machine, engine=engine:
       products.summed_rows_us(one.m * one.n * 2, one.num_ranks, machine, engine)
       for engine in ("sm_push", "one_shot_ll", "two_shot_ll")},
    "few": lambda one, machine: products.few_rows_us(one, machine, True),
    "few by pushes": lambda one, machine: products.few_rows_us(one, machine, False),
    "tasks of products": lambda one, machine: tasks.rounds_us(
        tasks.product_us((128, 128), one.k, 64 * 128, 2, machine), one.n // 64 * one.num_ranks,
        machine.num_sms, machine,
    ),
    "tasks that move": lambda one, machine: tasks.move_us(one.m * one.n * one.k, machine),
    "library": libraries.product_us,
    **{f"library's {kind}": lambda one, machine, kind=kind:
       libraries.unfused_us(one, machine, kind)
       for kind in ("all_gather", "reduce_scatter", "all_reduce")},
}  # fmt: skip


def worse(machine: Hardware, name: str) -> Hardware:
    """The same, of which one number is half as good."""
    value = getattr(machine, name)
    if isinstance(value, tuple):
        return replace(machine, **{name: tuple((at, 2 * us) for at, us in value)})
    is_better_large = name.endswith(("_gbps", "_tflops", "_bytes")) or name == "num_sms"
    return replace(machine, **{name: value // 2 if is_better_large else 2 * value})


# The host's, whose time is told beside the device's.
ELSEWHERE = ("name", "library_host_us", "library_ranks")


@pytest.mark.parametrize(
    "name", [one.name for one in fields(Hardware) if one.name not in ELSEWHERE]
)
def test_each_number_of_the_machine_counts_and_a_worse_one_never_helps(name):
    longer = set()
    for way, us in WAYS.items():
        for one in FEW if way.startswith(("few", "rows")) else SHAPES:
            before, after = us(one, H200X4), us(one, worse(H200X4, name))
            assert after >= before * (1 - 1e-9), (way, one)
            if after > before * (1 + 1e-9):
                longer.add(way)
    assert longer


# Of these the model says nothing of the rows that other ranks have.
NEAR = ("few by pushes", "library", "library's reduce_scatter")


@pytest.mark.parametrize("way", sorted(WAYS))
def test_more_ranks_or_wider_products_never_end_sooner(way):
    """A rank's rows stay, more come from others and go to them."""
    shapes = ((2048, 4096, 4096, 128), (8192, 3584, 2048, 128), (64, 4096, 4096, 64))
    for m, n, k, tile_m in shapes:
        one = product(m, n=n, k=k, num_ranks=2, tile=(tile_m, 256, 64))
        us = WAYS[way](one, H200X4)
        more = WAYS[way](replace(one, m=2 * m, num_ranks=4), H200X4)
        assert more >= us if way in NEAR else more > us
        assert WAYS[way](replace(one, n=2 * n, k=2 * k), H200X4) > us


@pytest.mark.parametrize("engine", ["sm_push", "ce_push"])
def test_a_thin_product_takes_as_long_as_its_rows_to_arrive(engine):
    """Those of three peers, by the link."""
    one = product(8192, n=256, tile=(128, 128, 64))
    assert products.gathered_us(one, H200X4, engine) > 6144 * one.k * 2 / 400e3


def test_b_is_read_for_each_group_of_rows_unless_it_stays_in_l2():
    """A row of tiles multiplies faster than B comes from memory."""
    one = product(4096, n=7168, k=4096, group_m=1, num_ranks=1, head=32)
    times = [products.gathered_us(one, machine, "sm_push") for machine in
             (H200X4, replace(H200X4, cached_bytes=1e9, reread_gbps=1e9))]  # fmt: skip
    b_us = one.n * one.k * 2 / H200X4.memory_gbps / 1e3
    assert times[0] > 32 * b_us > times[1]


def test_what_a_gathered_product_loses_to_readings_of_b_is_in_its_time():
    one = product(4096, n=7168, k=4096, group_m=1, num_ranks=1, head=32)
    slow, fast = (products.gathered_us(one, machine, "sm_push") for machine in
                  (H200X4, replace(H200X4, reread_gbps=1e12)))  # fmt: skip
    lost_us = products.reread_us(one, H200X4)
    assert lost_us > 0 and slow - fast == pytest.approx(lost_us, rel=1e-3)


def test_a_curve_is_linear_between_what_was_read():
    curve = ((0, 10.0), (100, 20.0))
    assert [on_curve(curve, size) for size in (0, 50, 200)] == [10.0, 15.0, 40.0]


@pytest.mark.parametrize(("m", "can"), [(1024, True), (1025, False)])
def test_packets_are_for_few_rows(m, can):
    """Of many each rank would send all of its sums to all others."""
    program = placed(operators.gemm_ar)
    found = ways(program, [program.task("product")], program.task("reduced"), Facts({"m": m}))
    assert any(way.engine == "one_shot_ll" for way in found) is can


def test_settings_are_of_names_that_there_are():
    with pytest.raises(ConfigError, match="chunks=0 of gathered; it is 1 to 1024, of gathered"):
        compiled(operators.ag_gemm, chunks={"gathered": 0})
    stages = compiled(operators.ag_gemm, chunks={"gathered": 8})
    assert stages.program.task("gathered").chunks == 8
    assert Settings() == Settings({}, {}, {})
