"""The emulator as a target that Triton compiles for: the binary is TTIR text with its locations,
of a Gluon kernel TTGIR.

Of Triton: `BaseBackend` and what it asks of a backend, the options that a launch may say, and the
passes over TTIR and Gluon's TTGIR (`triton._C.libtriton`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any

import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import BaseBackend, GPUTarget, Language
from triton.language import core

HOPPER, BLACKWELL = 90, 100
PTX_VERSION = 87


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
    max_num_imprecise_acc_default: int = 1 << 30  # as on Hopper: how sums are rounded is not seen
    extern_libs: tuple = ()
    instrumentation_mode: str = ""
    enable_iisan: bool = False
    ignored: tuple[tuple[str, str], ...] = ()

    def hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


class EmulatorBackend(BaseBackend):
    """Stops after Triton's front end: the binary is optimised TTIR with its locations.

    Gluon's front end gives TTGIR and checks layouts; it compiles for Hopper where the target says
    no architecture.
    """

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
        return f"weft-emu-6-{triton.__version__}-{__file__}"

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

    def get_target_name(self, options: Any) -> str:
        return f"cuda:{self.target.arch or HOPPER}"

    def load_dialects(self, context: Any) -> None:
        nvidia.load_dialects(context)

    def add_stages(self, stages: dict, options: Any, language: Any = None) -> None:
        if language is Language.GLUON:
            stages["glir"] = lambda module, metadata: module  # what Gluon gives from Triton 3.9 on
            stages["ttgir"] = lambda module, metadata: _tidy_gluon(module)
        else:
            stages["ttir"] = _optimise_ttir
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


def _optimise_ttir(module: Any, metadata: dict) -> Any:
    """Inline and tidy; descriptors stay, since they are what tells an asynchronous store.

    Of a kernel with loops that may be waits, the metadata has `written` as well: its text before.
    """
    written = str(module)
    manager = ir.pass_manager(module.context)
    passes.common.add_inliner(manager)
    if rewrite := getattr(passes.ttir, "add_rewrite_tensor_pointer", None):
        rewrite(manager)
    passes.common.add_canonicalizer(manager)
    passes.common.add_cse(manager)
    passes.common.add_licm(manager)
    passes.common.add_symbol_dce(manager)
    manager.run(module, "weft_ttir")
    metadata["written"] = written if "scf.while" in written else ""
    return module


def _tidy_gluon(module: Any) -> Any:
    """Inline, and choose the layouts that the kernel leaves open; descriptors stay."""
    manager = ir.pass_manager(module.context)
    passes.gluon.add_inliner(manager)
    for name in ("infer_coalesced_encodings", "resolve_auto_encodings"):
        if add := getattr(passes.gluon, f"add_{name}", None):
            add(manager)
    passes.gluon.add_canonicalizer(manager)
    passes.ttir.add_loop_aware_cse(manager)
    passes.common.add_symbol_dce(manager)
    manager.run(module, "weft_gluon")
    return module


def _to_text(module: Any, metadata: dict) -> bytes:
    text = str(module)
    metadata["name"] = re.search(r"tt\.func public @\"?([\w.$<>-]+)", text).group(1)
    metadata["shared"] = metadata["tmem_size"] = 0
    if '"ttg.num-warps"' in text:
        metadata["shared"], metadata["tmem_size"] = _allocated(module)
    return text.encode()


def _allocated(module: Any) -> tuple[int, int]:
    """Bytes of shared memory and columns of tensor memory of a Gluon kernel's block, as Triton's
    own passes lay out what lives at the same time; the module is theirs then."""
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    try:
        passes.ttgpuir.add_allocate_warp_groups(manager)
    except TypeError:  # Triton 3.9 asks whether its sanitizer takes a warp
        passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, BLACKWELL, PTX_VERSION)
    nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(manager)
    manager.run(module, "weft_allocate")
    found = (module.get_int_attr(f"ttg.{name}") for name in ("shared", "tensor_memory_size"))
    return tuple(one or 0 for one in found)  # type: ignore[return-value]
