"""What a generated kernel asks of its runtime, plainly: real addresses, no checks, one program."""

import ctypes

import numpy as np
import torch

from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.emulator.affine import box_tile
from weft.emulator.codegen import compile_ttir
from weft.emulator.numerics import DTYPES
from weft.language import triton_api

WORDS = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.bool: "i1", torch.uint32: "u32",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


def ttir(fn, args, **constants):
    """The TTIR of `fn` for `args`: tensors and numbers in order; Python ints are i32."""
    signature, names = {}, [name for name in fn.arg_names if name not in constants]
    for name, arg in zip(names, args, strict=True):
        if isinstance(arg, torch.Tensor):
            signature[name] = "*" + WORDS[arg.dtype]
        else:
            signature[name] = "fp32" if isinstance(arg, float) else "i32"
    signature = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    record = KernelRecord(fn.__name__, signature, constants)
    text = triton_api.compile_kernel(fn, record, TARGETS["emu"]).asm["emu"]
    return text if isinstance(text, str) else text.decode()


def launch(fn, *args, grid=(1,), runtime=None, **constants):
    """Run every program of `fn` in order; returns the compiled kernel."""
    kernel = compile_ttir(ttir(fn, args, **constants))
    values = []
    for arg, parameter in zip(args, kernel.parameters, strict=True):
        if isinstance(arg, torch.Tensor):
            values.append(np.int64(arg.data_ptr()))
        else:
            values.append(DTYPES[parameter.type].type(arg))
    grid = (*grid, 1, 1)[:3]
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                kernel.function((runtime or Runtime)((x, y, z), grid), *values)
    return kernel


class Descriptor:
    def __init__(self, base, sizes, strides, block_shape, dtype):
        self.base, self.sizes, self.strides = int(base), sizes, strides
        self.block_shape, self.dtype = block_shape, dtype

    def addresses(self, indices):
        """Addresses of a block's elements, and which lie inside."""
        total, inside = np.int64(self.base), np.bool_(True)
        rank = len(self.sizes)
        for axis, (index, size, stride) in enumerate(
            zip(indices, self.sizes, self.strides, strict=True)
        ):
            shape = [1] * rank
            shape[axis] = self.block_shape[axis]
            at = np.int64(index) + np.arange(self.block_shape[axis]).reshape(shape)
            total = total + at * np.int64(stride) * self.dtype.itemsize
            inside = inside & (at >= 0) & (at < size)
        return total, inside


class Runtime:
    """Loads and stores by address, atomics as they come, notes what externs were called."""

    def __init__(self, pid=(0, 0, 0), grid=(1, 1, 1)):
        self.pid = tuple(np.int32(i) for i in pid)
        self.grid = tuple(np.int32(i) for i in grid)
        self.printed, self.externs = [], []

    def load(self, ptr, mask, other, dtype, shape, loc, volatile=False):
        mask = box_tile(mask, shape) if isinstance(mask, tuple) else mask
        pointers = np.broadcast_to(ptr, shape).reshape(-1)
        masks = np.broadcast_to(True if mask is None else mask, shape).reshape(-1)
        result = np.zeros(pointers.shape, dtype)
        if other is not None:
            result[...] = np.broadcast_to(other, shape).reshape(-1)
        for i, (address, on) in enumerate(zip(pointers, masks, strict=True)):
            if on:
                result[i : i + 1] = np.frombuffer(
                    ctypes.string_at(int(address), dtype.itemsize), dtype
                )
        result = result.reshape(shape)
        return result if shape else result[()]

    def store(self, ptr, value, mask, dtype, shape, loc):
        mask = box_tile(mask, shape) if isinstance(mask, tuple) else mask
        pointers = np.broadcast_to(ptr, shape).reshape(-1)
        masks = np.broadcast_to(True if mask is None else mask, shape).reshape(-1)
        value = np.asarray(value)
        assert value.dtype == dtype, (value.dtype, dtype)
        values = np.broadcast_to(value, shape).reshape(-1)
        for address, one, on in zip(pointers, values, masks, strict=True):
            if on:
                ctypes.memmove(int(address), one.tobytes(), dtype.itemsize)

    def atomic_rmw(self, op, sem, scope, ptr, value, mask, dtype, shape, loc):
        old = self.load(ptr, mask, None, dtype, shape, loc)
        new = {
            "add": np.add, "fadd": np.add, "max": np.maximum, "min": np.minimum,
            "exch": lambda a, b: np.broadcast_to(b, np.shape(a)),
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        }[op](old, value)  # fmt: skip
        self.store(ptr, np.asarray(new, dtype), mask, dtype, shape, loc)
        return old

    def atomic_cas(self, sem, scope, ptr, compare, value, dtype, shape, loc):
        old = self.load(ptr, None, None, dtype, shape, loc)
        self.store(
            ptr, np.asarray(np.where(old == compare, value, old), dtype), None, dtype, shape, loc
        )
        return old

    def extern(self, symbol, args, dtype, shape, loc):
        self.externs.append((symbol, args))
        return dtype.type(0) if not shape else np.zeros(shape, dtype)

    def make_descriptor(self, base, sizes, strides, block_shape, dtype, padding, loc):
        return Descriptor(base, sizes, strides, block_shape, dtype)

    def descriptor_load(self, desc, indices, shape, loc):
        pointers, inside = desc.addresses(indices)
        return self.load(
            pointers, inside, desc.dtype.type(0), desc.dtype, desc.block_shape, loc
        ).reshape(shape)

    def descriptor_store(self, desc, indices, value, loc):
        pointers, inside = desc.addresses(indices)
        self.store(
            pointers, value.reshape(desc.block_shape), inside, desc.dtype, desc.block_shape, loc
        )

    def descriptor_reduce(self, kind, desc, indices, value, loc):
        pointers, inside = desc.addresses(indices)
        self.atomic_rmw(
            kind, "relaxed", "gpu", pointers, value, inside, desc.dtype, desc.block_shape, loc
        )

    def assert_(self, cond, message, loc):
        assert np.all(cond), message

    def print_(self, prefix, values, loc):
        self.printed.append((prefix, values))
