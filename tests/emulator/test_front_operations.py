"""TTIR operations one by one against Python's integers and torch's floats."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from front_runtime import Runtime

from weft.base.errors import UnsupportedError
from weft.emulator.codegen import compile_ttir
from weft.emulator.numerics import DTYPES

N = 16


def run(statements, inputs, out_type, out_shape=(N,), shapes=None):
    """Load each input as %0, %1, ...; run `statements`; return what they leave in %out."""
    params, lines, arrays = [], [], []
    for index, (kind, data) in enumerate(inputs):
        dtype = DTYPES[kind]
        array = np.array(data, dtype) if dtype.kind != "V" else np.asarray(data).astype(dtype)
        arrays.append(array)
        shape = (shapes or {}).get(index, array.shape)
        extents = "x".join(map(str, shape))
        stored = "i8" if kind == "i1" else kind
        params.append(f"%p{index}: !tt.ptr<{stored}>")
        lines += _addresses(f"%p{index}", f"a{index}", stored, shape)
        lines.append(
            f"%{index}{'_' if kind == 'i1' else ''} = tt.load %a{index} "
            f": tensor<{extents}x!tt.ptr<{stored}>> loc(#loc)"
        )
        if kind == "i1":
            lines.append(
                f"%{index} = arith.trunci %{index}_ : tensor<{extents}xi8> "
                f"to tensor<{extents}xi1> loc(#loc)"
            )
    stored = "i8" if out_type == "i1" else out_type
    result = np.zeros(out_shape, DTYPES[stored])
    extents = "".join(f"{extent}x" for extent in out_shape)
    tail = _addresses("%po", "ao", stored, out_shape)
    value = "%out"
    if out_type == "i1":
        tail.append(
            f"%wide = arith.extui %out : tensor<{extents}i1> to tensor<{extents}i8> loc(#loc)"
        )
        value = "%wide"
    pointers = f"tensor<{extents}!tt.ptr<{stored}>>" if out_shape else f"!tt.ptr<{stored}>"
    tail.append(f"tt.store {'%ao' if out_shape else '%po'}, {value} : {pointers} loc(#loc)")
    params.append(f"%po: !tt.ptr<{stored}>")
    body = "\n".join([*lines, *statements.strip().splitlines(), *tail, "tt.return loc(#loc)"])
    text = (
        f"module {{\ntt.func public @kernel({', '.join(params)}) {{\n{body}\n}} loc(#loc)\n}} "
        f'loc(#loc)\n#loc = loc("somewhere.py":7:3)\n'
    )
    kernel = compile_ttir(text)
    addresses = [np.int64(array.ctypes.data) for array in (*arrays, result)]
    kernel.function(Runtime(), *addresses)
    return result.astype(bool) if out_type == "i1" else result


def _addresses(pointer, name, kind, shape):
    """Statements that make %name a contiguous tile of pointers."""
    if not shape:
        return []
    total = math.prod(shape)
    flat, tile = f"tensor<{total}x", f"tensor<{'x'.join(map(str, shape))}x"
    pointers = f"{flat}!tt.ptr<{kind}>>"
    lines = [
        f"%{name}r = tt.make_range {{end = {total} : i32, start = 0 : i32}} : {flat}i32> loc(#loc)",
        f"%{name}s = tt.splat {pointer} : !tt.ptr<{kind}> -> {flat}!tt.ptr<{kind}>> loc(#loc)",
        f"%{name}f = tt.addptr %{name}s, %{name}r : {flat}!tt.ptr<{kind}>>, {flat}i32> loc(#loc)",
    ]
    lines.append(f"%{name} = tt.reshape %{name}f : {pointers} -> {tile}!tt.ptr<{kind}>> loc(#loc)")
    return lines


def binary(op, kind, a, b, out=None):
    out = out or kind
    if " " in op:  # a comparison has its word
        name, word = op.split()
        text = f"%out = {name} {word}, %0, %1 : tensor<{N}x{kind}> loc(#loc)"
    else:
        text = f"%out = {op} %0, %1 : tensor<{N}x{kind}> loc(#loc)"
    return run(text, [(kind, a), (kind, b)], out)


def wrap(value, bits, signed=True):
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def trunc_div(a, b):
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


INTEGERS = {
    "addi": lambda a, b, n: a + b,
    "subi": lambda a, b, n: a - b,
    "muli": lambda a, b, n: a * b,
    "divsi": lambda a, b, n: trunc_div(a, b),
    "remsi": lambda a, b, n: a - b * trunc_div(a, b),
    "divui": lambda a, b, n: wrap(a, n, False) // wrap(b, n, False),
    "remui": lambda a, b, n: wrap(a, n, False) % wrap(b, n, False),
    "floordivsi": lambda a, b, n: a // b,
    "ceildivsi": lambda a, b, n: -(-a // b),
    "ceildivui": lambda a, b, n: -(-wrap(a, n, False) // wrap(b, n, False)),
    "andi": lambda a, b, n: a & b,
    "ori": lambda a, b, n: a | b,
    "xori": lambda a, b, n: a ^ b,
    "maxsi": lambda a, b, n: max(a, b),
    "minsi": lambda a, b, n: min(a, b),
    "maxui": lambda a, b, n: max(wrap(a, n, False), wrap(b, n, False)),
    "minui": lambda a, b, n: min(wrap(a, n, False), wrap(b, n, False)),
}
SHIFTS = {
    "shli": lambda a, b, n: a << b if b < n else 0,
    "shrsi": lambda a, b, n: a >> min(b, n - 1),
    "shrui": lambda a, b, n: wrap(a, n, False) >> b,
}


def integers(bits, seed=0):
    rng = np.random.default_rng(seed)
    info = np.iinfo(f"int{bits}")
    values = [info.min + 1, info.max, -1, 1, 7, -7, info.max // 2, 100]
    extra = rng.integers(info.min + 1, info.max, N - len(values), dtype=np.int64)
    values += [int(v) or 1 for v in extra]
    order = rng.permutation(N)
    return [values[i] for i in order]


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("name", [*INTEGERS])
def test_integer_arithmetic_wraps(name, bits):
    a, b = integers(bits, 1), integers(bits, 2)
    out = binary(f"arith.{name}", f"i{bits}", a, b)
    assert out.tolist() == [
        wrap(INTEGERS[name](x, y, bits), bits) for x, y in zip(a, b, strict=True)
    ]


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("name", [*SHIFTS])
def test_shifts(name, bits):
    a = integers(bits)
    amounts = [i % (bits + 3) for i in range(0, 5 * N, 5)]
    out = binary(f"arith.{name}", f"i{bits}", a, amounts)
    assert out.tolist() == [
        wrap(SHIFTS[name](x, y, bits), bits) for x, y in zip(a, amounts, strict=True)
    ]


SCALARS = """
%x = tt.unsplat %xt : tensor<1xi32> loc(#loc)
%y = tt.unsplat %yt : tensor<1xi32> loc(#loc)
%z = arith.{name} %x, %y : i32 loc(#loc)
%out = tt.splat %z : i32 -> tensor<1xi32> loc(#loc)
"""


@pytest.mark.parametrize("name", [*INTEGERS])
@pytest.mark.parametrize("a, b", [(7, 2), (-7, 2), (7, -2), (-7, -2), (2**31 - 1, 2**31 - 1)])
def test_scalar_arithmetic_wraps(name, a, b):
    text = SCALARS.format(name=name).replace("%xt", "%0").replace("%yt", "%1")
    out = run(text, [("i32", [a]), ("i32", [b])], "i32", (1,))
    assert out.tolist() == [wrap(INTEGERS[name](a, b, 32), 32)]


COMPARISONS = {
    "eq": lambda a, b, u: a == b, "ne": lambda a, b, u: a != b,
    "slt": lambda a, b, u: a < b, "sle": lambda a, b, u: a <= b,
    "sgt": lambda a, b, u: a > b, "sge": lambda a, b, u: a >= b,
    "ult": lambda a, b, u: u(a) < u(b), "ule": lambda a, b, u: u(a) <= u(b),
    "ugt": lambda a, b, u: u(a) > u(b), "uge": lambda a, b, u: u(a) >= u(b),
}  # fmt: skip


@pytest.mark.parametrize("word", [*COMPARISONS])
@pytest.mark.parametrize("bits", [1, 8, 32])
def test_integer_comparisons(word, bits):
    if bits == 1:
        a, b = [0, 0, 1, 1] * 4, [0, 1, 0, 1] * 4
        signed = [-x for x in a], [-x for x in b]  # true is -1 when signed
        out = binary(f"arith.cmpi {word}", "i1", a, b, "i1")
    else:
        a, b = integers(bits, 1), integers(bits, 2)
        b[:4] = a[:4]
        signed = a, b
        out = binary(f"arith.cmpi {word}", f"i{bits}", a, b, "i1")
    unsigned = lambda x: wrap(x, bits, False)  # noqa: E731
    assert out.tolist() == [COMPARISONS[word](x, y, unsigned) for x, y in zip(*signed, strict=True)]


@pytest.mark.parametrize("name, expected", [
    ("addi", [0, 1, 1, 0]), ("subi", [0, 1, 1, 0]), ("muli", [0, 0, 0, 1]),
    ("andi", [0, 0, 0, 1]), ("ori", [0, 1, 1, 1]), ("xori", [0, 1, 1, 0]),
    ("maxui", [0, 1, 1, 1]), ("minui", [0, 0, 0, 1]), ("maxsi", [0, 0, 0, 1]),
    ("minsi", [0, 1, 1, 1]),
])  # fmt: skip
def test_booleans_are_modulo_two(name, expected):
    out = binary(f"arith.{name}", "i1", [0, 0, 1, 1] * 4, [0, 1, 0, 1] * 4, "i1")
    assert out[:4].astype(int).tolist() == expected


def test_wide_products():
    for bits in (16, 32, 64):
        a, b = integers(bits, 1), integers(bits, 2)
        text = f"%out = tt.mulhiui %0, %1 : tensor<{N}xi{bits}> loc(#loc)"
        assert run(text, [(f"i{bits}", a), (f"i{bits}", b)], f"i{bits}").tolist() == [
            wrap((wrap(x, bits, False) * wrap(y, bits, False)) >> bits, bits)
            for x, y in zip(a, b, strict=True)
        ]


# ---------------------------------------------------------------------------------------------
# Conversions


def cast(op, source, target, values):
    text = f"%out = {op} %0 : tensor<{N}x{source}> to tensor<{N}x{target}> loc(#loc)"
    return run(text, [(source, values)], target)


def test_integers_grow_and_shrink():
    a = integers(8)
    assert cast("arith.extsi", "i8", "i32", a).tolist() == a
    assert cast("arith.extui", "i8", "i32", a).tolist() == [wrap(x, 8, False) for x in a]
    b = integers(64)
    assert cast("arith.trunci", "i64", "i16", b).tolist() == [wrap(x, 16) for x in b]
    assert cast("arith.trunci", "i64", "i1", b).tolist() == [bool(x & 1) for x in b]
    bits = [0, 1] * 8
    assert cast("arith.extsi", "i1", "i32", bits).tolist() == [-x for x in bits]
    assert cast("arith.extui", "i1", "i32", bits).tolist() == bits
    assert cast("arith.uitofp", "i1", "f32", bits).tolist() == bits
    assert cast("arith.index_cast", "i32", "index", integers(32)).tolist() == integers(32)


def test_integers_and_floats():
    a = integers(32)
    expected = torch.tensor(a, dtype=torch.int32).float()
    assert cast("arith.sitofp", "i32", "f32", a).tolist() == expected.tolist()
    unsigned = torch.tensor([wrap(x, 32, False) for x in a]).float()
    assert cast("arith.uitofp", "i32", "f32", a).tolist() == unsigned.tolist()
    inf, nan = float("inf"), float("nan")
    values = [1.9, -1.9, 0.5, -0.5, 3e9, -3e9, inf, -inf, nan, 7, -7, 2**31, 2**32, 255.7, 0, -0.0]
    top, low = 2**31 - 1, -(2**31)
    assert cast("arith.fptosi", "f32", "i32", values).tolist() == [
        1, -1, 0, 0, top, low, top, low, 0, 7, -7, top, top, 255, 0, 0,
    ]  # fmt: skip
    assert cast("arith.fptoui", "f32", "i32", values).view(np.uint32).tolist() == [
        1, 0, 0, 0, 3000000000, 0, 2**32 - 1, 0, 0, 7, 0, 2**31, 2**32 - 1, 255, 0, 0,
    ]  # fmt: skip
    assert cast("arith.fptosi", "f64", "i64", [2.0**53 + 2] * N).tolist() == [2**53 + 2] * N


def floats(seed=0, scale=10.0):
    values = np.random.default_rng(seed).standard_normal(N) * scale
    values[:5] = [0.0, -0.0, np.inf, -np.inf, np.nan]
    return values


TORCH = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "f8E4M3FN": torch.float8_e4m3fn, "f8E5M2": torch.float8_e5m2,
}  # fmt: skip


def same(out, expected):
    """Equal, with NaN equal to NaN."""
    a, b = np.asarray(out, np.float64), expected.to(torch.float64).numpy()
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_floats_round_to_nearest_even(target):
    values = floats().astype(np.float32)
    narrow = cast("arith.truncf", "f32", target, values)
    same(narrow, torch.tensor(values).to(TORCH[target]))
    same(cast("arith.extf", target, "f32", narrow), torch.tensor(values).to(TORCH[target]).float())


@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_rounding_toward_zero(target):
    values = np.linspace(-3, 3, N).astype(np.float32) * np.float32(1.2345)
    text = (
        f"%out = tt.fp_to_fp %0, rounding = rtz : tensor<{N}xf32> -> tensor<{N}x{target}> loc(#loc)"
    )
    out = run(text, [("f32", values)], target).astype(np.float64)
    near = values.astype(DTYPES[target]).astype(np.float64)
    assert (np.abs(out) <= np.abs(values)).all()
    assert (np.abs(out) <= np.abs(near)).all() and (out != near).any()
    ulp = float(ml_dtypes.finfo(DTYPES[target]).eps) * np.abs(values)
    assert (np.abs(out - values) <= ulp).all()


@pytest.mark.parametrize("kind", ["f8E4M3FN", "f8E5M2"])
def test_fp8_saturates(kind):
    largest = float(ml_dtypes.finfo(DTYPES[kind]).max)
    values = np.linspace(-1, 1, N).astype(np.float32) * np.float32(largest * 4)
    values[0], values[1] = np.nan, np.inf
    text = (
        f"%out = tt.fp_to_fp %0, rounding = rtne : tensor<{N}xf32> -> tensor<{N}x{kind}> loc(#loc)"
    )
    out = run(text, [("f32", values)], kind)
    clipped = torch.tensor(values).clamp(-largest, largest).to(TORCH[kind])
    same(out.astype(np.float32), clipped.float())


def test_bitcasts():
    values = floats().astype(np.float32)
    text = f"%out = tt.bitcast %0 : tensor<{N}xf32> -> tensor<{N}xi32> loc(#loc)"
    assert run(text, [("f32", values)], "i32").tolist() == values.view(np.int32).tolist()
    assert np.array_equal(
        cast("arith.bitcast", "i16", "bf16", integers(16)).view(np.int16), integers(16)
    )


# ---------------------------------------------------------------------------------------------
# Floats

FLOATS = {
    "addf": torch.add, "subf": torch.sub, "mulf": torch.mul, "divf": torch.div,
    "remf": torch.fmod, "maximumf": torch.maximum, "minimumf": torch.minimum,
    "maxnumf": torch.fmax, "minnumf": torch.fmin,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", [*FLOATS])
def test_float_arithmetic(name, kind):
    a, b = floats(1), floats(2)
    b[:5] = [1.0, np.nan, 2.0, np.inf, 3.0]
    x, y = (torch.tensor(v).to(TORCH[kind]) for v in (a, b))
    out = binary(f"arith.{name}", kind, x.double().numpy(), y.double().numpy())
    # bf16 and fp16 are computed in fp32 and rounded once.
    wide = torch.float64 if kind == "f64" else torch.float32
    same(out.astype(np.float64), FLOATS[name](x.to(wide), y.to(wide)).to(TORCH[kind]))


FLOAT_COMPARISONS = {
    "oeq": lambda a, b: a == b, "ogt": lambda a, b: a > b, "oge": lambda a, b: a >= b,
    "olt": lambda a, b: a < b, "ole": lambda a, b: a <= b, "une": lambda a, b: a != b,
    "one": lambda a, b: a < b or a > b, "ueq": lambda a, b: not (a < b or a > b),
    "ugt": lambda a, b: not a <= b, "uge": lambda a, b: not a < b,
    "ult": lambda a, b: not a >= b, "ule": lambda a, b: not a > b,
    "ord": lambda a, b: a == a and b == b, "uno": lambda a, b: a != a or b != b,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("word", [*FLOAT_COMPARISONS])
def test_float_comparisons(word, kind):
    a, b = np.array([1, 2, 3, np.nan] * 4), np.repeat([1.0, 2, 3, np.nan], 4)
    out = binary(f"arith.cmpf {word}", kind, a, b, "i1")
    assert out.tolist() == [FLOAT_COMPARISONS[word](x, y) for x, y in zip(a, b, strict=True)]


FUNCTIONS = {
    "math.exp": torch.exp, "math.exp2": torch.exp2, "math.log": torch.log,
    "math.log2": torch.log2, "math.sin": torch.sin, "math.cos": torch.cos,
    "math.sqrt": torch.sqrt, "math.rsqrt": torch.rsqrt, "math.erf": torch.erf,
    "math.floor": torch.floor, "math.ceil": torch.ceil, "math.absf": torch.abs,
    "math.tanh": torch.tanh, "tt.precise_sqrt": torch.sqrt, "arith.negf": torch.neg,
    "math.trunc": torch.trunc, "math.roundeven": torch.round, "math.log1p": torch.log1p,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", [*FUNCTIONS])
def test_functions_of_floats(name, kind):
    values = np.abs(np.random.default_rng(3).standard_normal(N)) + 0.1
    x = torch.tensor(values).to(TORCH[kind])
    text = f"%out = {name} %0 : tensor<{N}x{kind}> loc(#loc)"
    out = run(text, [(kind, x.double().numpy())], kind)
    expected = FUNCTIONS[name](x.double()).to(TORCH[kind])
    np.testing.assert_allclose(
        out.astype(np.float64), expected.double().numpy(),
        rtol=4 * float(ml_dtypes.finfo(DTYPES[kind]).eps),
    )  # fmt: skip


def test_fma_clamp_and_integer_functions():
    a, b, c = (floats(seed)[5:].tolist() + [1.0] * 5 for seed in (1, 2, 3))
    x, y, z = (np.array(v, np.float32) for v in (a, b, c))
    out = run(
        f"%out = math.fma %0, %1, %2 : tensor<{N}xf32> loc(#loc)",
        [("f32", x), ("f32", y), ("f32", z)], "f32",
    )  # fmt: skip
    exact = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    np.testing.assert_array_equal(out, exact.astype(np.float32))
    low, high = np.full(N, -1, np.float32), np.full(N, 1, np.float32)
    x[0] = np.nan
    for word, first in (("none", -1.0), ("all", np.nan)):
        out = run(
            f"%out = tt.clampf %0, %1, %2, propagateNan = {word} : tensor<{N}xf32> loc(#loc)",
            [("f32", x), ("f32", low), ("f32", high)], "f32",
        )  # fmt: skip
        np.testing.assert_array_equal(out[0], np.float32(first))
        np.testing.assert_array_equal(out[1:], np.clip(x[1:], -1, 1))
    values = integers(32)
    out = run(f"%out = math.absi %0 : tensor<{N}xi32> loc(#loc)", [("i32", values)], "i32")
    assert out.tolist() == [wrap(abs(v), 32) for v in values]


@pytest.mark.parametrize("symbol, function", [
    ("__nv_expf", np.exp), ("__nv_tanhf", np.tanh), ("__nv_rintf", np.rint),
    ("__nv_floorf", np.floor), ("__nv_sinf", np.sin), ("__nv_fast_expf", np.exp),
])  # fmt: skip
def test_libdevice(symbol, function):
    x = np.linspace(-2, 2, N).astype(np.float32)
    text = (
        '%out = tt.extern_elementwise %0 {libname = "", libpath = "", pure = true, '
        f'symbol = "{symbol}"}} : (tensor<{N}xf32>) -> tensor<{N}xf32> loc(#loc)'
    )
    np.testing.assert_allclose(run(text, [("f32", x)], "f32"), function(x), rtol=1e-6)


def test_rare_functions_of_libdevice_are_refused():
    text = (
        '%out = tt.extern_elementwise %0 {libname = "", libpath = "", pure = true, '
        f'symbol = "__nv_erfcinvf"}} : (tensor<{N}xf32>) -> tensor<{N}xf32> loc(#loc)'
    )
    with pytest.raises(UnsupportedError, match="__nv_erfcinvf"):
        run(text, [("f32", np.ones(N, np.float32))], "f32")


# ---------------------------------------------------------------------------------------------
# Constants and what is not known


def test_constants():
    for text, kind, value in (
        ("dense<0x7FC00000> : tensor<16xf32>", "f32", np.nan),
        ("dense<0xFF80> : tensor<16xbf16>", "bf16", -np.inf),
        ("dense<0x7C00> : tensor<16xf16>", "f16", np.inf),
        ("dense<-1.500000e+00> : tensor<16xbf16>", "bf16", -1.5),
        ("dense<-128> : tensor<16xi8>", "i8", -128),
        ("dense<true> : tensor<16xi1>", "i1", True),
    ):
        out = run(f"%out = arith.constant {text} loc(#loc)", [], kind)
        np.testing.assert_array_equal(out.astype(np.float64), np.full(16, value, np.float64))
    out = run(
        "%out = arith.constant dense<[[1, 2], [3, -4]]> : tensor<2x2xi32> loc(#loc)",
        [],
        "i32",
        (2, 2),
    )
    assert out.tolist() == [[1, 2], [3, -4]]


def test_unknown_operation_names_the_line():
    with pytest.raises(UnsupportedError, match=r"arith\.frobnicate[\s\S]*somewhere\.py:7"):
        run("%out = arith.frobnicate %0 : tensor<16xf32> loc(#loc)", [("f32", floats())], "f32")


def test_inline_assembly_and_foreign_functions_are_refused():
    asm = (
        '%out = tt.elementwise_inline_asm "ex2.approx.f64 $0, $1;" {constraints = "=r,r", '
        "packed_element = 1 : i32, pure = false} %0 : tensor<16xi32> -> tensor<16xi32> loc(#loc)"
    )
    with pytest.raises(UnsupportedError, match=r"ex2\.approx[\s\S]*somewhere\.py:7"):
        run(asm, [("i32", integers(32))], "i32")
    call = (
        '%out = tt.extern_elementwise %0 {libname = "", libpath = "", pure = true, '
        'symbol = "nvshmem_team_my_pe"} : (tensor<16xi32>) -> tensor<16xi32> loc(#loc)'
    )
    with pytest.raises(UnsupportedError, match=r"nvshmem_team_my_pe"):
        run(call, [("i32", integers(32))], "i32")


# ---------------------------------------------------------------------------------------------
# Reductions and products


REDUCTIONS = {
    ("addf", "f32"): np.sum, ("addi", "i32"): np.sum, ("maxnumf", "f32"): np.max,
    ("minsi", "i32"): np.min, ("xori", "i32"): np.bitwise_xor.reduce, ("muli", "i32"): np.prod,
    ("andi", "i32"): np.bitwise_and.reduce, ("ori", "i32"): np.bitwise_or.reduce,
}  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name, kind", [*REDUCTIONS])
def test_reductions(name, kind, axis):
    rng = np.random.default_rng(0)
    a = rng.integers(-50, 50, (4, 8)).astype(DTYPES[kind])
    shape = (8,) if axis == 0 else (4,)
    text = f"""
%out = "tt.reduce"(%0) <{{axis = {axis} : i32}}> ({{
^bb0(%x: {kind} loc(unknown), %y: {kind} loc(unknown)):
  %z = arith.{name} %x, %y : {kind} loc(#loc)
  tt.reduce.return %z : {kind} loc(#loc)
}}) : (tensor<4x8x{kind}>) -> tensor<{shape[0]}x{kind}> loc(#loc)
"""
    out = run(text, [(kind, a)], kind, shape)
    np.testing.assert_array_equal(out, REDUCTIONS[name, kind](a, axis=axis).astype(DTYPES[kind]))


@pytest.mark.parametrize("reverse", [False, True])
def test_scans(reverse):
    a = np.random.default_rng(0).integers(-50, 50, (4, 8)).astype(np.int32)

    def scan(body):
        return run(
            f"""
%out = "tt.scan"(%0) <{{axis = 1 : i32, reverse = {str(reverse).lower()}}}> ({{
^bb0(%x: i32 loc(unknown), %y: i32 loc(unknown)):
  {body}
  tt.scan.return %z : i32 loc(#loc)
}}) : (tensor<4x8xi32>) -> tensor<4x8xi32> loc(#loc)
""",
            [("i32", a)], "i32", (4, 8),
        )  # fmt: skip

    turned = a[:, ::-1] if reverse else a
    expected = np.cumsum(turned, axis=1)
    # Not recognised as numpy's: x + y + 0, by doubling.
    general = "%c = arith.constant 0 : i32 loc(#loc)\n%w = arith.addi %x, %c : i32 loc(#loc)\n"
    for body in ("%z = arith.addi %x, %y : i32 loc(#loc)",
                 general + "%z = arith.addi %w, %y : i32 loc(#loc)"):  # fmt: skip
        out = scan(body)
        np.testing.assert_array_equal(out[:, ::-1] if reverse else out, expected)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f8E4M3FN", "f64"])
def test_dot(kind):
    rng = np.random.default_rng(0)
    dtype = DTYPES[kind]
    a, b = (rng.standard_normal(s).astype(np.float32).astype(dtype) for s in ((4, 8), (8, 16)))
    out_kind = "f64" if kind == "f64" else "f32"
    c = rng.standard_normal((4, 16)).astype(DTYPES[out_kind])
    text = (
        f"%out = tt.dot %0, %1, %2, inputPrecision = ieee : tensor<4x8x{kind}> * "
        f"tensor<8x16x{kind}> -> tensor<4x16x{out_kind}> loc(#loc)"
    )
    out = run(text, [(kind, a), (kind, b), (out_kind, c)], out_kind, (4, 16))
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def to_tf32(x):
    """Ten bits of fraction, halves away from zero."""
    mantissa, exponent = math.frexp(abs(x))
    return math.copysign(math.floor(mantissa * 2**11 + 0.5) * 2.0 ** (exponent - 11), x)


@pytest.mark.parametrize("precision, rounded", [("tf32", True), ("tf32x3", False)])
def test_dot_rounds_operands_to_tf32(precision, rounded):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((4, 8), (8, 16)))
    a[0, :2] = 1 + 2.0**-11, 1 - 2.0**-12
    text = (
        f"%out = tt.dot %0, %1, %2, inputPrecision = {precision} : tensor<4x8xf32> * "
        "tensor<8x16xf32> -> tensor<4x16xf32> loc(#loc)"
    )
    zeros = np.zeros((4, 16), np.float32)
    out = run(text, [("f32", a), ("f32", b), ("f32", zeros)], "f32", (4, 16))
    if rounded:
        a, b = (np.vectorize(to_tf32)(x) for x in (a, b))
    np.testing.assert_allclose(out, a.astype(float) @ b.astype(float), rtol=1e-6, atol=1e-6)


def test_dot_of_int8_and_narrow_sums():
    rng = np.random.default_rng(0)
    a = rng.integers(-128, 128, (4, 8)).astype(np.int8)
    b = rng.integers(-128, 128, (8, 16)).astype(np.int8)
    c = rng.integers(-1000, 1000, (4, 16)).astype(np.int32)
    text = (
        "%out = tt.dot %0, %1, %2 : tensor<4x8xi8> * tensor<8x16xi8> -> tensor<4x16xi32> loc(#loc)"
    )
    out = run(text, [("i8", a), ("i8", b), ("i32", c)], "i32", (4, 16))
    np.testing.assert_array_equal(out, a.astype(np.int32) @ b.astype(np.int32) + c)
    x, y, z = (rng.standard_normal(s).astype(np.float16) for s in ((4, 8), (8, 16), (4, 16)))
    text = text.replace("i8", "f16").replace("i32", "f16")
    out = run(text, [("f16", x), ("f16", y), ("f16", z)], "f16", (4, 16))
    wide = x.astype(np.float32) @ y.astype(np.float32) + z.astype(np.float32)
    np.testing.assert_allclose(out, wide.astype(np.float16), rtol=2e-3, atol=2e-3)


def test_shapes():
    a = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    text = (
        "%out = tt.trans %0 {order = array<i32: 2, 0, 1>} "
        ": tensor<2x3x4xi32> -> tensor<4x2x3xi32> loc(#loc)"
    )
    np.testing.assert_array_equal(run(text, [("i32", a)], "i32", (4, 2, 3)), a.transpose(2, 0, 1))
    x, y = integers(32, 1), integers(32, 2)
    joined = f"%out = tt.join %0, %1 : tensor<{N}xi32> -> tensor<{N}x2xi32> loc(#loc)"
    out = run(joined, [("i32", x), ("i32", y)], "i32", (N, 2))
    np.testing.assert_array_equal(out, np.stack([x, y], -1))
    parts = f"%left, %out = tt.split %0 : tensor<{N}x2xi32> -> tensor<{N}xi32> loc(#loc)"
    np.testing.assert_array_equal(run(parts, [("i32", out)], "i32"), y)
    cat = f"%out = tt.cat %0, %1 : tensor<{N}xi32> -> tensor<{2 * N}xi32> loc(#loc)"
    assert run(cat, [("i32", x), ("i32", y)], "i32", (2 * N,)).tolist() == x + y
    # A splat that is transposed, reshaped and reduced is as full as any other tile.
    splat = """
%c = arith.constant dense<3> : tensor<4x8xi32> loc(#loc)
%t = tt.trans %c {order = array<i32: 1, 0>} : tensor<4x8xi32> -> tensor<8x4xi32> loc(#loc)
%r = tt.reshape %t : tensor<8x4xi32> -> tensor<2x16xi32> loc(#loc)
%out = "tt.reduce"(%r) <{axis = 0 : i32}> ({
^bb0(%x: i32 loc(unknown), %y: i32 loc(unknown)):
  %z = arith.addi %x, %y : i32 loc(#loc)
  tt.reduce.return %z : i32 loc(#loc)
}) : (tensor<2x16xi32>) -> tensor<16xi32> loc(#loc)
"""
    assert run(splat, [], "i32").tolist() == [6] * 16


def test_histogram_and_gather():
    a = np.array([0, 1, 1, 3, 3, 3, 7, 15] * 2, np.int32)
    text = f"%out = tt.histogram %0 : tensor<{N}xi32> -> tensor<8xi32> loc(#loc)"
    assert run(text, [("i32", a)], "i32", (8,)).tolist() == [2, 4, 0, 6, 0, 0, 0, 2]
    source = np.arange(32, dtype=np.int32).reshape(4, 8) * 10
    index = np.random.default_rng(0).integers(0, 4, (4, 8)).astype(np.int32)
    text = (
        "%out = tt.gather %0[%1] {axis = 0 : i32} : (tensor<4x8xi32>, tensor<4x8xi32>) "
        "-> tensor<4x8xi32> loc(#loc)"
    )
    out = run(text, [("i32", source), ("i32", index)], "i32", (4, 8))
    np.testing.assert_array_equal(out, np.take_along_axis(source, index, 0))


def test_atomic_loads_and_stores_are_wefts_own():
    class Words(Runtime):
        def extern(self, symbol, args, dtype, shape, loc):
            if symbol.startswith("weft.load"):
                return self.load(args[0], None, None, dtype, shape, loc)
            assert symbol == "weft.store:release.gpu"
            self.store(args[0], args[1], None, args[1].dtype, (), loc)
            return np.int32(0)

    x = np.arange(4, dtype=np.int64)
    kernel = compile_ttir(
        "tt.func public @k(%p: !tt.ptr<i64>) {\n"
        "%c = arith.constant 5 : i64 loc(#loc)\n"
        "%v = tt.atomic_load acquire, sys, %p : (!tt.ptr<i64>) -> i64 loc(#loc)\n"
        "%w = arith.addi %v, %c : i64 loc(#loc)\n"
        "tt.atomic_store release, gpu, %p, %w : !tt.ptr<i64> loc(#loc)\n"
        "%r = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32> loc(#loc)\n"
        "%s = tt.splat %p : !tt.ptr<i64> -> tensor<4x!tt.ptr<i64>> loc(#loc)\n"
        "%a = tt.addptr %s, %r : tensor<4x!tt.ptr<i64>>, tensor<4xi32> loc(#loc)\n"
        "%t = tt.atomic_load acquire, sys, %a : (tensor<4x!tt.ptr<i64>>) -> tensor<4xi64> "
        "loc(#loc)\n"
        "%u = arith.addi %t, %t : tensor<4xi64> loc(#loc)\n"
        "tt.atomic_store release, gpu, %a, %u : tensor<4x!tt.ptr<i64>> loc(#loc)\n"
        "tt.return loc(#loc)\n} loc(#loc)\n"
    )
    kernel.function(Words(), np.int64(x.ctypes.data))
    assert x.tolist() == [10, 2, 4, 6]
