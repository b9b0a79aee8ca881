"""The emulator as a target that Triton compiles for: the binary is TTIR text with its locations.

Of Triton: `BaseBackend` and what it asks of a backend, the options that a launch may say, and the
passes over TTIR (`triton._C.libtriton`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any

import triton
from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.language import core


@dataclasses.dataclass(frozen=True)
class EmulatorOptions:
    """What a launch may say; everything that only shapes GPU code is accepted and ignored."""

    num_warps: int = 4
    num_ctas: int = 1
    num_stages: int = 3
    warp_size: int = 32
    maxnreg: int | None = None
    backend_name: str = "emu"
    arch: str = "emu"
    debug: bool = True
    sanitize_overflow: bool = False
    enable_fp_fusion: bool = True
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e5", "fp8e4nv", "fp8e4b15", "fp8e4b8", "fp8e5b16")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    extern_libs: tuple = ()
    instrumentation_mode: str = ""
    ignored: tuple[tuple[str, str], ...] = ()

    def hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


class EmulatorBackend(BaseBackend):
    """Stops after Triton's front end: the binary is optimised TTIR with its locations."""

    binary_ext = "emu"
    supports_native_tensor_specialization = True

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "emu"

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target)
        self.binary_ext = "emu"

    def hash(self) -> str:
        # The binary names source files, weft's own among them: another checkout's would mislead.
        return f"weft-emu-2-{triton.__version__}-{__file__}"

    def parse_options(self, opts: dict) -> EmulatorOptions:
        known = {f.name for f in dataclasses.fields(EmulatorOptions)}
        taken = {k: v for k, v in opts.items() if k in known and v is not None}
        # Triton says debug=False unless asked; device_assert is what an emulator is for.
        taken["backend_name"], taken["debug"] = "emu", True
        options = EmulatorOptions(**taken)
        for name in opts.keys() - known:
            # Triton refuses launch options that the record lacks; each version adds some. Arguments
            # by keyword are among them, and all is written down as JSON.
            object.__setattr__(options, name, _as_plain(opts[name]))
        return options

    @staticmethod
    def parse_attr(desc: str) -> list:
        # Alignment is a hint that only machine code is made from: without it a kernel is compiled
        # once for all numbers, except those that are 1.
        return []

    def pack_metadata(self, metadata: Any) -> tuple:
        return (metadata.num_warps, metadata.num_ctas, 0)

    def get_codegen_implementation(self, options: Any) -> dict:
        return {
            "min_dot_size": _min_dot_size,
            "convert_custom_types": _convert_custom_types,
        }

    def get_module_map(self) -> dict:
        from triton.language.extra.cuda import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def load_dialects(self, context: Any) -> None:
        pass

    def add_stages(self, stages: dict, options: Any, language: Any = None) -> None:
        stages["ttir"] = lambda module, metadata: _optimise_ttir(module)
        stages["emu"] = _to_text


def _as_plain(value: Any) -> Any:
    """A launch option as JSON has it; of a tensor its type alone, since its values are not read."""
    if isinstance(value, tuple):
        return tuple(map(_as_plain, value))
    is_plain = isinstance(value, str | int | float | None)
    return value if is_plain else type(value).__name__


def _min_dot_size(lhs: Any, rhs: Any) -> tuple[int, int, int]:
    """m, n and k at least, as on NVIDIA GPUs: what is right here must compile there."""
    return 1, 1, 32 if lhs.scalar.primitive_bitwidth == 8 else 16


def _convert_custom_types(arg, dst_ty, fp_downcast_rounding=None, _semantic=None):
    return core.tensor(
        _semantic.builder.create_fp_to_fp(arg.handle, dst_ty.to_ir(_semantic.builder), None), dst_ty
    )


def _optimise_ttir(module: Any) -> Any:
    """Inline and tidy; descriptors stay, since they are what tells an asynchronous store."""
    manager = ir.pass_manager(module.context)
    passes.common.add_inliner(manager)
    if rewrite := getattr(passes.ttir, "add_rewrite_tensor_pointer", None):
        rewrite(manager)
    passes.common.add_canonicalizer(manager)
    passes.common.add_cse(manager)
    passes.common.add_licm(manager)
    passes.common.add_symbol_dce(manager)
    manager.run(module, "weft_ttir")
    return module


def _to_text(module: Any, metadata: dict) -> bytes:
    metadata["name"] = re.search(r"tt\.func public @\"?([\w.$<>-]+)", str(module)).group(1)
    metadata["shared"] = 0
    return str(module).encode()
