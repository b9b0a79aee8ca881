"""What `weft compile -o` wrote is read, compared and packed without a compiler."""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from weft.base.errors import DtypeError, UnsupportedError, UsageError
from weft.base.records import KernelRecord
from weft.base.target import parse_target
from weft.runtime.compiled_ahead import CompiledKernel, load
from weft.tools.binaries import build
from weft.tools.compile import write
from weft.tools.main import main

HOPPER = "cuda:90"


def kernel(signature, constants=None, divisible=()) -> CompiledKernel:
    record = KernelRecord("it", signature, constants or {}, {}, tuple(divisible))
    return CompiledKernel("it", HOPPER, "it", 4, 0, False, record, b"")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan")
    words = f"compile all_gather --target {HOPPER} --shape m=64,n=64 -o {path} --json"
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
    ],
)
def test_what_does_not_fit_is_refused(given, error, said):
    one = kernel({"x": "*fp32", "block": "constexpr"}, {"block": 64}, ["x"])
    with pytest.raises(error, match=said):
        one.pack(given)


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
    with pytest.raises(UsageError, match="has format 1, this weft reads 2: compile it again"):
        load(tmp_path, HOPPER)
    plan["kernels"][0]["num_ctas"] = 2
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UnsupportedError, match="num_ctas=2: Triton's launcher"):
        load(tmp_path, HOPPER)


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
