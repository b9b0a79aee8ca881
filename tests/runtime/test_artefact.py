"""An artefact queues what the calls that were compiled would queue, and is not trusted."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_machine
import pytest
import torch
import written_launches
from effort import slow_but
from fake_machine import by_stream
from torchrun import environment

import weft.ops as ops
from weft.base import artefacts, columns
from weft.base.errors import DtypeError, ShapeError, UnsupportedError, UsageError
from weft.base.target import parse_target
from weft.compiler import (
    Replicate,
    Settings,
    Shard,
    Tensor,
    Times,
    all_gather,
    all_reduce,
    all_to_all,
    decode_attention,
    kv_append,
    program,
    reduce_scatter,
    rms_norm,
    rope,
    silu_mul,
)
from weft.language import triton_api
from weft.language.triton_api import LeftOut
from weft.ops import card
from weft.ops.ag_rms_gemm import PROGRAM
from weft.plan import artefact as ahead
from weft.plan import prepare
from weft.runtime import artefact as runtime
from weft.runtime import load
from weft.runtime.backends.modules import NUMBERS

N, K, RANKS = 256, 256, 2
HERE = Path(__file__).parent


@program(
    x=Tensor("bfloat16", ("m", K), Shard(0)), w1=Tensor("bfloat16", (K, 2 * N), Shard(1)),
    w2=Tensor("bfloat16", (N, K), Shard(0)), mesh="tp",
)  # fmt: skip
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


HEAD, CONTEXT = 32, 16


def _of(rows: Any, columns: Any, placement: Any = Replicate(), dtype: str = "bfloat16") -> Tensor:
    return Tensor(dtype, (rows, columns), placement)


@program(
    mesh="tp", x=_of("b", K), lengths=_of(1, "b", dtype="int32"), gain=_of(1, K),
    wq=_of(K, 8 * HEAD, Shard(1)), wk=_of(K, 4 * HEAD, Shard(1)), wv=_of(K, 4 * HEAD, Shard(1)),
    keys=_of(Times("b", CONTEXT), 4 * HEAD, Shard(1)),
    values=_of(Times("b", CONTEXT), 4 * HEAD, Shard(1)),
    wo=_of(8 * HEAD, K, Shard(0)), up=_of(K, 2 * N, Shard(1)), down=_of(N, K, Shard(0)),
)  # fmt: skip
def decode(x, lengths, gain, wq, wk, wv, keys, values, wo, up, down):
    h = rms_norm(x, gain)
    keys = kv_append(keys, rope(h @ wk, lengths, head=HEAD), lengths)
    values = kv_append(values, h @ wv, lengths)
    attended = decode_attention(rope(h @ wq, lengths, head=HEAD), keys, values, lengths, head=HEAD)
    x = all_reduce(attended @ wo) + x
    return all_reduce(silu_mul(rms_norm(x, gain) @ up) @ down) + x, keys, values


def engines(engine: str) -> Any:
    settings = Settings(engines={"gathered": engine, "scattered": engine})
    return mlp.options(lowering="overlapped", settings=settings)


@program(mesh="tp", x=_of("m", K, Shard(0)), w=_of(K, 2 * N), y=_of("m", K, Shard(1)))
def exchanges(x, w, y):
    """Columns that leave, columns that arrive."""
    return all_to_all(x @ w), all_to_all(y, dim=0) @ w


def normed() -> Any:
    """The program of an operator whose rows are normed before they travel."""
    of = PROGRAM.program_of("bfloat16", (("k", K), ("n", N)), RANKS, ())
    return of.options(settings=Settings(engines={"gathered": "sm_push"}))


SM90 = {"template": "sm90", "tile_n": 128, "num_warps": 4, "num_stages": 4}
AMD = {"template": "plain", "tile_n": 128, "num_warps": 4, "num_stages": 1, "tma": False}
# What is compiled, its configuration, its m, and for which target.
CASES = {
    "gathered by SMs": ("ag_gemm", {"transport": "sm_push", **SM90}, (63, 64, 65)),
    "gathered by engines": (
        "ag_gemm", {"transport": "ce_push", "chunks": 2, **SM90}, (191, 192),
    ),
    "gathered by packets": ("ag_gemm", {"transport": "ll", "tile_m": 64, "tile_n": 64,
                                        "tile_k": 128}, (1, 2, 31)),
    "summed by SMs": ("gemm_rs", {"transport": "sm_push", **SM90}, (512, 513)),
    "summed by engines": ("gemm_rs", {"transport": "ce_push", **SM90}, (512, 500)),
    "summed in parts": ("gemm_rs", {"transport": "ce_parts", "chunks": 2, **SM90}, (512, 500)),
    "reduced": ("all_reduce", None, (1, 7, 64)),
    "a program by SMs": (engines("sm_push"), None, (500, 512)),
    "a program by engines": (engines("ce_push"), None, (512,)),
    "columns of all ranks": (exchanges.options(settings=Settings(engines={
        "exchanged": "sm_push", "exchanged_2": "ce_push"})), None, (500, 512)),
    "a norm of rows that are gathered": (normed(), None, (1, 500, 512)),
    "a persistent program": (mlp.options(lowering="persistent"), None, (16,)),
    "a program, weights as [n, k]": (engines("sm_push"), None, (500,)),
    "a decode step": (decode.options(lowering="persistent"), None, (1, 3)),
    "a decode step, weights as [n, k]": (decode.options(lowering="persistent"), None, (3,)),
    "gathered on AMD": ("ag_gemm", {"transport": "sm_push", **AMD}, (63, 64)),
    "reduced on AMD": ("all_reduce", None, (1, 7, 64)),
}  # fmt: skip


def sizes_of(what: Any, rows: Any) -> dict[str, Any]:
    known = {"ag_gemm": ("m", "n", "k"), "gemm_rs": ("m", "n", "k"), "all_reduce": ("m", "n")}
    extents = {"m": rows, "b": rows, "n": N, "k": K}
    names = known[what] if isinstance(what, str) else prepare.card_of(what).default_shape
    return {name: extents[name] for name in names}


def target_of(case: str) -> str:
    return "hip:gfx942" if case.endswith("AMD") else "cuda:90"


def built(case: str, rows: Any = None) -> ahead.Built:
    what, config, all_rows = CASES[case]
    chosen = None if config is None else card(what).config(**config)
    return ahead.build(
        what, sizes_of(what, rows or all_rows), num_ranks=RANKS, targets=[target_of(case)],
        config=chosen,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """all_reduce at 1, 7 and 64 rows."""
    path = tmp_path_factory.mktemp("artefact")
    built("reduced").write(path)
    return path


class Machine(fake_machine.WritingBackend):
    def current_stream(self) -> Any:
        written_launches.NOW.log = self.log
        return super().current_stream()


class AmdMachine(Machine):
    target = parse_target("hip:gfx942")


@pytest.fixture
def machine(monkeypatch):
    """One slot, so that calls of both ways have the same; launches come to the rank's log."""

    def run(fn: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        backend = written_launches.NOW.backend
        launch = LeftOut(fn, args, options, grid)
        backend.log.append(("launch", launch, backend.current_stream().handle))

    drivers = {backend: written_launches.modules(backend) for backend in ("cuda", "hip")}
    monkeypatch.setenv("WEFT_SLOTS", "1")
    monkeypatch.setattr(triton_api.JITFunction, "run", run)
    monkeypatch.setattr(runtime, "modules", drivers.__getitem__)


def on_ranks(main: Any, kind: type[Machine] = Machine, num_ranks: int = RANKS) -> list[Any]:
    def on_machine(world: Any) -> Any:
        written_launches.NOW.backend = world.backend
        return main(world)

    found = fake_machine.run_ranks(on_machine, num_ranks, heap_bytes=1 << 26, kind=kind)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def tensors_of(case: str, rank: int, m: int) -> list[torch.Tensor]:
    what = CASES[case][0]
    if not isinstance(what, str):
        op = prepare.card_of(what)
        problem = op.make_problem(RANKS, sizes_of(what, m), "bfloat16")
        problem = replace(problem, b_is_nk=case.endswith("[n, k]"))
        return list(op.make_inputs(problem, rank).values())
    rows = max(0, min(m, (rank + 1) * -(-m // RANKS)) - rank * -(-m // RANKS))
    shapes = {
        "ag_gemm": [(rows, K), (K, N)], "gemm_rs": [(m, K), (K, N)], "all_reduce": [(m, N)],
    }[what]  # fmt: skip
    return [torch.zeros(one, dtype=torch.bfloat16) for one in shapes]


def called(what: Any, config: Any, world: Any, tensors: list[torch.Tensor], m: int) -> Any:
    """The ordinary way, launch by launch."""
    now, before = world.backend, world.backend.by_address
    now.by_address = None
    try:
        if not isinstance(what, str):
            return what(*tensors, world=world, **sizes_of(what, m))
        named = {"m": m} if what == "ag_gemm" else {}
        chosen = None if config is None else card(what).config(**config)
        return getattr(ops, what)(*tensors, world=world, config=chosen, **named)
    finally:
        now.by_address = before


# What engines carry is another call where it is recorded. What is exchanged takes as long to
# compile as all of these together.
QUICK = [
    ("gathered by SMs", False), ("gathered by packets", True), ("summed by engines", False),
    ("summed by engines", True), ("reduced", False), ("a norm of rows that are gathered", True),
    ("a persistent program", False), ("reduced on AMD", True),
]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("case", "is_recorded"),
    slow_but(QUICK, product(CASES, (False, True))),
    ids={False: "eager", True: "recorded"}.get,
)
def test_it_queues_what_the_call_queues(case, is_recorded, tmp_path, machine):
    what, config, rows = CASES[case]
    with pytest.MonkeyPatch.context() as unpatched:
        unpatched.setattr(triton_api.JITFunction, "run", RUN)
        built(case).write(tmp_path)
    compiled = load(tmp_path)

    def main(world):
        log, compared = world.backend.log, 0
        for m in rows:
            tensors = tensors_of(case, world.rank, m)
            given = sizes_of(what, m) if not isinstance(what, str) else {"m": m}
            given = {} if what == "all_reduce" else given
            ways = (
                lambda: called(what, config, world, tensors, m),
                lambda: compiled(*tensors, world=world, **given),
            )
            logs = []
            for way in ways:
                way()  # what a first call takes of memory is there then
            for way in ways:
                log.clear()
                if is_recorded:
                    with world.record():
                        out = way()
                else:
                    out = way()
                logs.append([("results", where(out), 0), *log])
            ordinary, written = map(by_stream, logs)
            assert ordinary.keys() == written.keys()
            for stream, steps in ordinary.items():
                assert len(steps) == len(written[stream])
                for step, other in zip(steps, written[stream], strict=True):
                    compare(step, other, compiled)
                    compared += step[0] == "launch"
        return compared

    kind = AmdMachine if case.endswith("AMD") else Machine
    if is_recorded and "engines" in case and case != "gathered by engines":
        # Copies that await tiles cannot be recorded: a call with such a configuration is refused.
        with pytest.raises(UsageError, match="can(not)? be recorded"):
            on_ranks(main, kind)
        return
    assert all(compared >= len(rows) for compared in on_ranks(main, kind))


RUN = triton_api.JITFunction.run


def where(out: Any) -> list[tuple[int, int]]:
    """Results are fresh: an address in them is known by its distance from where they begin."""
    results = [out] if isinstance(out, torch.Tensor) else out
    return [(one.data_ptr(), one.nbytes) for one in results]


def compare(step: tuple, other: tuple, compiled: Any) -> None:
    if step[0] == "results":
        written_launches.NOW.results = {"ordinary": step[1], "written": other[1]}
        return
    assert step[0] == other[0]
    if step[0] != "launch":
        assert step == other
        return
    launch, found = step[1], other[1]
    assert found.function == launch.fn.__name__
    assert found.grid == (*launch.grid, 1, 1)[:3]
    target = next(iter(compiled.manifest["targets"]))
    # A kernel whose warps are specialised has more than it was asked for.
    warps, rest = divmod(found.threads, parse_target(target).warp_size)
    assert warps >= launch.options["num_warps"] and not rest
    words = iter(found.words)
    take = lambda kind: kind.from_buffer_copy(next(words)).value  # noqa: E731
    for kind, value in launch.words():
        if kind.startswith("tensordesc"):
            same_descriptor(value, take, found.library, target)
        elif kind.startswith("*"):
            same_address(value, take(ctypes.c_uint64))
        else:
            packed = NUMBERS[kind](triton_api.unwrap(value)).value
            assert take(NUMBERS[kind]) == packed
    # Behind all others, Triton's scratch memory, of which there is none.
    assert [*words] == [bytes(8)] * 2


def placed(address: int, way: str) -> tuple:
    for i, (begin, nbytes) in enumerate(written_launches.NOW.results[way]):
        if begin <= address < begin + nbytes:
            return i, address - begin
    return -1, address


def same_address(value: Any, address: int) -> None:
    expected = value.data_ptr() if hasattr(value, "data_ptr") else value
    if placed(expected, "ordinary") == placed(address, "written"):
        return
    # A table that the call has made on the host, and the artefact has as a file.
    assert value.dtype == torch.int32 and value.is_contiguous()
    assert ctypes.string_at(expected, value.nbytes) == ctypes.string_at(address, value.nbytes)


def same_descriptor(value: Any, take: Any, library: Any, target: str) -> None:
    shape, strides = tuple(value.shape), tuple(value.strides)
    if target.startswith("cuda"):
        address, *told = library.maps[take(ctypes.c_uint64)]
        size = value.base.element_size()
        assert told[0] == shape and told[1] == tuple(one * size for one in strides[:-1])
        # Of a swizzled row as much as the swizzle holds.
        assert told[2][0] == value.block_shape[0] and value.block_shape[1] % told[2][1] == 0
        assert told[3] == 9 and told[5] == (value.padding == "nan")  # bfloat16
    else:
        address = take(ctypes.c_uint64)
        assert tuple(take(ctypes.c_int64) for _ in (*shape, *strides)) == (*shape, *strides)
        assert take(ctypes.c_int8) == (value.padding == "nan")
    same_address(value.base, address)
    assert tuple(take(ctypes.c_int32) for _ in shape) == shape
    assert tuple(take(ctypes.c_int64) for _ in strides) == strides


def taken_by(assembly: dict[str, Any]) -> list[int]:
    """Bytes of each argument, as the entry of PTX or the notes of AMDGCN say; hidden ones are the
    runtime's."""
    if "amdgcn" in assembly:
        told = re.search(r"\.args:\n(.*?)\n    \.group_segment", assembly["amdgcn"], re.S)[1]
        args = [dict(re.findall(r"\.(\w+):\s+(\w+)", one)) for one in told.split("- ")[1:]]
        return [int(one["size"]) for one in args if not one["value_kind"].startswith("hidden")]
    entry = re.search(r"\.entry [\w$]+\((.*?)\)\n", assembly["ptx"], re.S)[1]
    arrays = re.compile(r"\.b8 \w+\[(\d+)\]")
    return [
        int(found[1]) if (found := arrays.search(one)) else int(re.search(r"\w(\d+)", one)[1]) // 8
        for one in entry.split(".param ")[1:]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    "summed by engines", "gathered by packets", "reduced", "a norm of rows that are gathered",
    "reduced on AMD",
])  # fmt: skip
def test_what_is_packed_is_what_the_assembly_takes(case):
    """As many words, each as wide: tensor maps whole, Triton's scratch memory last."""
    made = built(case)
    target = json.loads(made.files[artefacts.MANIFEST])["targets"][target_of(case)]
    kernels, compared = {one.id: one for one in made.kernels}, set()
    for table in json.loads(made.files[target["calls"][0]["file"]]):
        for kind, _, *step in columns.at(table["call"], 0)["steps"]:
            if kind == "launch":
                name, grid, words = step
                kernel = SimpleNamespace(
                    binary=None, descriptors=target["kernels"][name]["descriptors"]
                )
                driver: Any = SimpleNamespace(function=lambda *args: 1)
                one = runtime.Launch(driver, kernel, grid, words, lambda at: (0, 0), 0)
                sizes = [ctypes.sizeof(word) for word in one._packed]
                for number, *_ in one._maps:
                    sizes[number] = 128
                assert sizes == taken_by(kernels[name].compiled.asm)
                compared.add(name)
    assert compared == kernels.keys()


# ---------------------------------------------------------------------------------------------
# What is refused


def rewritten(folder: Path, change: Any) -> None:
    """As an artefact that was written so."""
    path = folder / artefacts.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(artefacts.sealed(manifest)))


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def test_every_file_is_checked(copied):
    """One bit of any of them, or a file that is gone, and nothing is loaded."""
    files = sorted(path for path in copied.rglob("*") if path.is_file())
    assert {path.parent.name for path in files} == {"copy", "kernels", "calls"}
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        with pytest.raises(UsageError, match=f"{path.name}(:.* the sha256| is no artefact)"):
            load(copied)
        path.unlink()
        with pytest.raises(UsageError, match="cannot be read: No such file|is no artefact"):
            load(copied)
        path.write_bytes(content)
    load(copied)


@pytest.mark.parametrize("text", ["[]", "{}", "7", "{", "null"])
def test_what_is_no_manifest_is_refused(tmp_path, text):
    (tmp_path / artefacts.MANIFEST).write_text(text)
    with pytest.raises(UsageError, match="is no artefact: .*weft compile OP --shape"):
        load(tmp_path)


def test_what_was_written_by_others_is_refused(copied, tmp_path):
    outside = tmp_path / "outside.cubin"
    outside.write_bytes(b"x")
    entry = {"file": "../outside.cubin", "sha256": artefacts.digest(b"x")}
    for change, said in (
        (lambda one: one.update(format=0), "has format 0, this weft reads 1: compile it again"),
        (lambda one: one.update(language=1), "language has the version 1; this weft's is"),
        (lambda one: one["constants"].append(entry), "outside.cubin is outside of the folder"),
    ):
        there = shutil.copytree(copied, tmp_path / "other")
        rewritten(there, change)
        with pytest.raises(UsageError, match=said):
            load(there)
        shutil.rmtree(there)


def test_the_wrong_world_is_refused(folder, machine):
    compiled = load(folder)

    def refused(world):
        with pytest.raises(UsageError) as error:
            compiled(torch.zeros(1, N, dtype=torch.bfloat16), world=world)
        return str(error.value)

    for said in on_ranks(refused, num_ranks=3):
        assert "all_reduce on 2 ranks, and this world has 3: compile it with --ranks 3" in said
    for said in on_ranks(refused, AmdMachine):
        assert "is compiled for cuda:90, and this is hip:gfx942: compile it with --target" in said

    class Smaller(Machine):
        target = replace(Machine.target, num_sms=100)

    for said in on_ranks(refused, Smaller):
        assert "up to 132 programs that wait for each other, and this GPU has 100 SMs" in said

    class WithoutAddresses(Machine):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.by_address = None

    def emulated(world):
        with pytest.raises(UnsupportedError, match="holds binaries, which run on GPUs alone"):
            compiled(torch.zeros(1, N, dtype=torch.bfloat16), world=world)

    on_ranks(emulated, WithoutAddresses)


def test_tensors_that_it_was_not_compiled_for_are_refused(folder, machine):
    compiled = load(folder)

    def main(world):
        right = torch.zeros(7, N, dtype=torch.bfloat16)
        with torch.no_grad():
            compiled(right.clone().requires_grad_(), world=world)
        compiled(right, world=world)
        world.backend.log.clear()
        for given, named, error, said in [
            ((torch.zeros(8, N, dtype=torch.bfloat16),), {}, ShapeError,
             rf"rank {world.rank} of 2 passes x \(8, 256\) .* compiled for m=1/7/64, n=256"),
            ((right,), {"m": 8}, ShapeError, "m=8, but .* m=1/7/64"),
            ((right.float(),), {}, DtypeError, "x is torch.float32, but .* for bfloat16"),
            ((right.to("meta"),), {}, UsageError, "x is on meta, the world on cpu"),
            ((7,), {}, UsageError, "x is a int, not a tensor"),
            ((), {}, UsageError, "all_reduce takes x; given are 0 by place"),
            ((right, right), {}, UsageError, "given are 2 by place"),
            ((right,), {"config": 1}, UsageError, "config is neither a tensor .x. nor"),
            ((right.clone().requires_grad_(),), {}, UsageError, "x requires a gradient"),
        ]:  # fmt: skip
            with pytest.raises(error, match=said):
                compiled(*given, world=world, **named)
        assert not world.backend.log

    on_ranks(main)


def test_shards_that_differ_ask_for_m(tmp_path, machine):
    """Of 63 and of 64 rows rank 0 has 32: who says nothing means 64."""
    with pytest.MonkeyPatch.context() as unpatched:
        unpatched.setattr(triton_api.JITFunction, "run", RUN)
        built("gathered by SMs").write(tmp_path)
    compiled = load(tmp_path)

    def main(world):
        a, b = torch.zeros(32, K, dtype=torch.bfloat16), torch.zeros(K, N, dtype=torch.bfloat16)
        whole = [compiled(a, b, world=world)]
        if world.rank:
            a = a[:31]
        whole.append(compiled(b=b, a=a, m=63, world=world))
        # Rows elsewhere than one behind the other; and at no multiple of 16 bytes.
        apart = torch.zeros(len(a), K + 1, dtype=torch.bfloat16)[:, 1:]
        shifted = torch.zeros(len(a) * K + 1, dtype=torch.bfloat16)[1:].view(len(a), K)
        for one in (apart, shifted):
            world.backend.log.clear()
            whole.append(compiled(one, b, m=63, world=world))
            words = [word for step in world.backend.log for word in step[1].words]
            assert one.data_ptr().to_bytes(8, "little") not in words
        return [len(one) for one in whole]

    assert on_ranks(main) == [[64, 63, 63, 63]] * 2


@pytest.mark.slow
def test_two_builds_are_equal_bit_by_bit(tmp_path):
    """By processes that hash strings otherwise, and with nothing in Triton's cache."""
    folders = []
    for seed in ("1", "2"):
        folders.append(tmp_path / seed)
        words = f"all_reduce --ranks 2 --target cuda:sm_90a,hip:gfx942 --shape m=1..40,n={N}"
        command = [sys.executable, "-m", "weft", "compile", *words.split(), "-o", folders[-1]]
        told = environment(PYTHONHASHSEED=seed, TRITON_CACHE_DIR=str(tmp_path / f"cache{seed}"))
        subprocess.run(command, env=told, check=True, capture_output=True, timeout=280)
    one, other = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
        for folder in folders
    ]
    assert one == other and len(one) >= 5
    assert {path.suffix for path in one} == {".json", ".cubin", ".hsaco"}


@pytest.mark.slow
def test_nothing_of_triton_is_imported(folder):
    """Calls on ranks whose driver is a stub, in a process to which Triton is not there."""
    script = HERE / "scripts" / "without_triton.py"
    command = [sys.executable, str(script), str(folder)]
    path = os.pathsep.join([str(HERE), environment()["PYTHONPATH"]])
    done = subprocess.run(command, env=environment() | {"PYTHONPATH": path}, capture_output=True,
                          text=True, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["2", "ranks,", "12", "launches"]


# ---------------------------------------------------------------------------------------------
# Columns


def test_what_is_merged_comes_out_as_it_was():
    trees = [
        {"m": m, "rows": [m // 2, -(-m // 128) * 128], "on": "main", "is": True, "of": None}
        for m in (1, 2, 3, 5, 127, 128, 129, 1000, 1001)
    ]
    assert len({columns.form_of(one) for one in trees}) == 1
    merged = json.loads(json.dumps(columns.merge(trees)))
    assert [columns.at(merged, i) for i in range(len(trees))] == trees
    assert merged["on"] == "main" and merged["rows"][1][columns.RUNS][0] == [0, 128, 0]
    assert columns.form_of({"m": 1}) != columns.form_of({"m": True})


def test_what_is_linear_is_one_run():
    merged = columns.merge([{"bytes": 3 * m + 4} for m in range(1000)])
    assert merged == {"bytes": {columns.RUNS: [[0, 4, 3]]}}
