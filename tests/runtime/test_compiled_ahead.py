"""What `weft compile -o` wrote is read, compared and packed without a compiler."""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from weft.base.errors import DtypeError, ShapeError, UnsupportedError, UsageError
from weft.base.records import KernelRecord, plan_digest
from weft.base.target import parse_target
from weft.runtime.compiled_ahead import CompiledKernel, load
from weft.tools.binaries import build
from weft.tools.compile import write
from weft.tools.main import main

HOPPER = "cuda:90"
SCRIPT = """
import torch, triton, triton.language as tl, weft
import weft.language as wl

@triton.jit
def pull(world, row, out, n, scale, size: tl.constexpr):
    at = tl.arange(0, size)
    peer = (wl.rank(world) + 1) % wl.num_ranks(world)
    tl.store(out + at, scale * tl.load(wl.at(world, row + at, peer), mask=at < n))

world = weft.init()
row, out = world.zeros((64,), torch.float32), torch.zeros(64, device=world.device)
world.barrier()
pull[(1,)](world.arg, row, out, 7, 2.0, size=64)
"""


def kernel(signature, constants=None, divisible=()) -> CompiledKernel:
    record = KernelRecord("it", signature, constants or {}, {}, tuple(divisible))
    return CompiledKernel("it", HOPPER, "it", 4, 0, False, record, b"")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a script's kernel, which takes a world, numbers and constants."""
    path = tmp_path_factory.mktemp("plan")
    script = path / "pulls.py"
    script.write_text(SCRIPT)
    words = f"compile {script} --ranks 2 --target {HOPPER} -o {path} --json"
    assert main(words.split()) == 0
    return path


def test_what_is_packed_is_what_the_assembly_takes(folder):
    """As many words, each as wide, as the kernel's entry declares, the last two for Triton."""
    (entry,) = json.loads((folder / "plan.json").read_text())["kernels"]
    (loaded,) = load(folder, HOPPER).values()
    record = loaded.record
    arguments = {}
    for name, kind in record.signature.items():
        constants = record.constants.get(name)
        if isinstance(kind, list):
            arguments[name] = tuple(
                16 if inner != "constexpr" else constant
                for inner, constant in zip(kind, constants, strict=True)
            )
        else:
            arguments[name] = constants if kind == "constexpr" else 16
    packed = loaded.pack(arguments)
    text = (folder / entry["assembly"]).read_text()
    taken = re.search(rf"\.entry {loaded.function}\((.*?)\)", text, re.S)
    assert taken is not None
    widths = [int(bits) // 8 for bits in re.findall(r"\.param \.\w(\d+) ", taken[1])]
    assert [ctypes.sizeof(one) for one in packed] == widths
    assert loaded.code.startswith(b"\x7fELF") and loaded.num_warps == 4


def test_arguments_go_by_name_through_tuples_and_leave_constants_out():
    one = kernel(
        {
            "x": "*fp32",
            "shards": ["i32", ["i64", "constexpr"]],
            "block": "constexpr",
            "eps": "fp32",
        },
        {"shards": [None, [None, 7]], "block": 64},
    )
    assert [each.name for each in one.parameters()] == ["x", "shards.0", "shards.1.0", "eps"]
    x = torch.zeros(4)
    packed = one.pack({"eps": 0.5, "x": x, "shards": (3, (1 << 40, 7)), "block": 64})
    assert [each.value for each in packed] == [x.data_ptr(), 3, 1 << 40, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({}, UsageError, r"x is missing, \*fp32"),
        ({"x": 16, "y": 1}, UsageError, "takes no y; it takes x, block"),
        ({"x": 16, "block": 32}, UsageError, "block is 32, but 64 was compiled"),
        ({"x": 24}, UsageError, "x is 24, but was compiled as divisible by 16"),
        ({"x": torch.zeros(4, dtype=torch.int32)}, DtypeError, r"int32, but .* for \*fp32"),
        ({"x": torch.zeros(4, 4).t()}, ShapeError, r"x of .* strides \(1, 4\), .* pass a contig"),
        ({"x": torch.zeros(8)[::2]}, ShapeError, r"strides \(2,\).* data_ptr\(\) where strides"),
        ({"x": torch.zeros(4, device="meta")}, UsageError, "x is on meta, but .* launched on cpu"),
        ({"x": 1.5}, UsageError, r"x is 1\.5; it takes a tensor or an address, \*fp32"),
        ({"x": None}, UsageError, "x is None; it takes a tensor or an address"),
        ({"x": -16}, UsageError, r"x is -16, but \*fp32 holds 0 to 18446744073709551615"),
    ],
)
def test_what_does_not_fit_is_refused(given, error, said):
    one = kernel({"x": "*fp32", "block": "constexpr"}, {"block": 64}, ["x"])
    with pytest.raises(error, match=said):
        one.pack(given, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "fits", "too_small", "too_large"),
    [
        ("i32", (-(2**31), 2**31 - 1), -(2**31) - 1, 2**32 + 7),
        ("u32", (0, 2**32 - 1), -1, 2**32),
        ("i64", (-(2**63), 2**63 - 1), -(2**63) - 1, 2**63),
        ("u64", (0, 2**64 - 1), -1, 2**64),
        ("i8", (-128, 127), -129, 128),
        ("i16", (-(2**15), 2**15 - 1), -(2**15) - 1, 2**15),
        ("i1", (0, 1), -1, 2),
        ("fp32", (-3.4e38, 3.4e38), -3.5e38, 1e300),
    ],
)
def test_numbers_have_the_size_of_their_type(kind, fits, too_small, too_large):
    """A number that is too large would reach the kernel cut to its lowest bits."""
    one = kernel({"n": kind})
    for number in fits:
        assert one.pack({"n": number})[0].value == pytest.approx(number, rel=1e-6)
    for number in (too_small, too_large):
        with pytest.raises(UsageError, match=f"it: n is .*, but {kind} holds"):
            one.pack({"n": number})
    for number in ("4", None, *(() if kind == "fp32" else (2.5, 2.0))):
        with pytest.raises(UsageError, match=f"n is {number!r}; it takes a .*number, {kind}"):
            one.pack({"n": number})


def test_numbers_that_are_none_reach_a_kernel_as_they_are():
    one = kernel({"eps": "fp32", "scale": "fp64"})
    infinite, largest, *_ = one.pack({"eps": float("inf"), "scale": 1e300})
    assert (infinite.value, largest.value) == (float("inf"), 1e300)


class Cache(NamedTuple):
    k: Any
    v: Any
    pages: Any


def test_fields_of_a_named_tuple_are_known_by_their_places():
    """The loader has the plan alone: it names fields by numbers, and checks their addresses too."""
    record = KernelRecord(
        "it", {"cache": ["*fp32", "*fp32", "constexpr"]}, {"cache": Cache(None, None, (2, 3))}, {},
        ("cache.v",),
    )  # fmt: skip
    read = json.loads(json.dumps(record.to_plan()))
    assert read["divisible_by_16"] == ["cache.1"]
    one = kernel(read["signature"], read["constants"], read["divisible_by_16"])
    assert [each.value for each in one.pack({"cache": Cache(8, 32, (2, 3))})[:2]] == [8, 32]
    with pytest.raises(UsageError, match=r"cache\.1 is 8, but was compiled as divisible by 16"):
        one.pack({"cache": Cache(32, 8, (2, 3))})
    with pytest.raises(UsageError, match=r"cache\.2 is \(2, 4\), but \[2, 3\] was compiled"):
        one.pack({"cache": Cache(32, 32, (2, 4))})
    for wrong in ((32, 32), 7):
        with pytest.raises(UsageError, match=r"cache is .*, but takes a tuple of 3: \['\*fp32'"):
            one.pack({"cache": wrong})


def test_constants_are_compared_as_a_plan_has_them():
    one = kernel({"dtype": "constexpr", "n": "i32"}, {"dtype": "fp16"})
    assert one.pack({"dtype": tl.float16, "n": 3})[0].value == 3
    with pytest.raises(UsageError, match="dtype is fp32, but fp16 was compiled"):
        one.pack({"dtype": tl.float32, "n": 3})


def test_a_grid_has_one_to_three_axes():
    one = kernel({})
    assert one.programs((4,)) == (4, 1, 1) and one.programs([4, 5, 6]) == (4, 5, 6)
    for grid, said in [
        ((), "has no one to three axes"), ((1, 1, 1, 1), "has no one to three axes"),
        (4, "grid 4 has no one to three"), ((4, 0), "along axis 1 of the grid .* is 0; it must"),
        ((2.5,), "axis 0 .* is 2.5, not a whole number"), ((1, 1 << 16), "is more than"),
    ]:  # fmt: skip
        with pytest.raises(ShapeError, match=said):
            one.programs(grid)


def test_a_descriptor_is_left_to_triton():
    with pytest.raises(UnsupportedError, match=r"tensordesc.*launch the kernel through Triton"):
        kernel({"a": "tensordesc<fp16[128, 64]>"}).parameters()


def test_a_folder_without_the_plan_that_is_asked_for(folder, tmp_path):
    with pytest.raises(UsageError, match=r"is no plan: .*weft compile OP -o"):
        load(tmp_path, HOPPER)
    with pytest.raises(UsageError, match="no kernel for cuda:80, only for cuda:90"):
        load(folder, "cuda:80")
    plan = json.loads((folder / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "format": 1}))
    with pytest.raises(UsageError, match="has format 1, this weft reads 4: compile it again"):
        load(tmp_path, HOPPER)
    plan["kernels"][0]["num_ctas"] = 2
    rewrite(tmp_path, plan)
    with pytest.raises(UnsupportedError, match="num_ctas=2: Triton's launcher"):
        load(tmp_path, HOPPER)


def rewrite(folder, plan):
    """As a plan that was written so."""
    plan = {**plan, "sha256": plan_digest(plan["kernels"])}
    (folder / "plan.json").write_text(json.dumps(plan))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.update(num_warps=8), "its kernels are not those that its sha256 is of"),
        (lambda one: one.pop("record"), "its kernels are not those that its sha256 is of"),
    ],
)
def test_a_plan_that_was_changed_is_refused(folder, tmp_path, change, said):
    plan = json.loads((folder / "plan.json").read_text())
    change(plan["kernels"][0])
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UsageError, match=f"{said}.*the artefact is damaged or was changed"):
        load(tmp_path, HOPPER)


def test_a_binary_that_was_changed_is_refused(folder, tmp_path):
    plan = json.loads((folder / "plan.json").read_text())
    rewrite(tmp_path, plan)
    with pytest.raises(UsageError, match="cannot be read: "):
        load(tmp_path, HOPPER)
    (tmp_path / plan["kernels"][0]["binary"]).write_bytes(b"other")
    with pytest.raises(UsageError, match="its 5 bytes have the sha256 .*, but the manifest says"):
        load(tmp_path, HOPPER)


@pytest.mark.parametrize("text", ["[]", "{}", "7", "{"])
def test_what_is_no_plan_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UsageError, match="is no plan: "):
        load(tmp_path, HOPPER)


def test_kernels_of_other_machines_are_refused(folder, tmp_path):
    plan = json.loads((folder / "plan.json").read_text())
    rewrite(tmp_path, {**plan, "kernels": []})
    with pytest.raises(UsageError, match="has no kernel for cuda:90, only for none"):
        load(tmp_path, HOPPER)
    rewrite(tmp_path, {**plan, "kernels": [{**plan["kernels"][0], "target": "hip:gfx942"}]})
    with pytest.raises(UnsupportedError, match="kernels for hip:gfx942 are launched by Triton"):
        load(tmp_path, "hip:gfx942")


@triton.jit
def scaled(x, out, factor, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, factor * tl.load(x + at, mask=at < n), mask=at < n)


@pytest.mark.gpu(n=1)
def test_a_binary_is_launched(tmp_path):
    target = parse_target(f"cuda:{''.join(map(str, torch.cuda.get_device_capability()))}")
    signature = {"x": "*fp32", "out": "*fp32", "factor": "fp32", "n": "i32", "block": "constexpr"}
    record = KernelRecord("scaled", signature, {"block": 64}, {"num_warps": 2})
    write([build(scaled, record, target)], str(tmp_path), "scaled")
    (one,) = load(tmp_path, target.name).values()
    x = torch.arange(100, dtype=torch.float32, device="cuda")
    out = torch.zeros_like(x)
    one.launch((2,), x=x, out=out, factor=0.5, n=100)
    assert torch.equal(out, x / 2)
    one.launch((2,), x=x.cpu().pin_memory(), out=out, factor=4.0, n=100)
    assert torch.equal(out, 4 * x)
    with pytest.raises(UsageError, match="x is on cpu, but the kernel is launched on cuda:0"):
        one.launch((2,), x=x.cpu(), out=out, factor=0.5, n=100)
    with pytest.raises(UsageError, match="n is 4294967396, but i32 holds"):
        one.launch((2,), x=x, out=out, factor=0.5, n=(1 << 32) + 100)
