"""Helpers by inline assembly, as kernels of the field have them; imported by the scripts here."""

import triton
import triton.language as tl


@triton.jit
def get_flat_tid():
    tid_x, tid_y, tid_z = tl.inline_asm_elementwise(
        """
        mov.u32 $0, %tid.x;
        mov.u32 $1, %tid.y;
        mov.u32 $2, %tid.z;
        """,
        "=r,=r,=r", [], dtype=(tl.uint32, tl.uint32, tl.uint32), is_pure=True, pack=1,
    )  # fmt: skip
    ntid_x, ntid_y = tl.inline_asm_elementwise(
        "mov.u32 $0, %ntid.x; mov.u32 $1, %ntid.y;",
        "=r,=r", [], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
    )  # fmt: skip
    return tid_z * ntid_y * ntid_x + tid_y * ntid_x + tid_x


@triton.jit
def send_signal(words, sem: tl.constexpr):
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .u32   %seen<1>;
            .reg .pred  %p<1>;
            send_signal:
                atom.global.{sem}.sys.cas.b32 %seen0, [$1], 0, 1;
                setp.eq.u32 %p0, %seen0, 0;
                @!%p0 bra send_signal;
        }}
        """,
        "=r, l", [words], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_signal(words, sem: tl.constexpr):
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .u32   %seen<1>;
            .reg .pred  %p<1>;
            wait_signal:
                atom.global.sys.{sem}.cas.b32 %seen0, [$1], 1, 0;
                setp.eq.u32 %p0, %seen0, 1;
                @!%p0 bra wait_signal;
        }}
        """,
        "=r, l", [words], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def symm_mem_sync(
    signal_pad_ptrs, block, rank: tl.constexpr, world_size: tl.constexpr,
    wrote: tl.constexpr, reads: tl.constexpr,
):  # fmt: skip
    """Blocks of one number on all ranks meet, by a word on each other's signal pad."""
    peers = tl.arange(0, world_size)
    pads = signal_pad_ptrs.to(tl.pointer_type(tl.uint64))
    there = tl.load(pads + peers).to(tl.pointer_type(tl.uint32)) + block * world_size + rank
    here = tl.load(pads + rank).to(tl.pointer_type(tl.uint32)) + block * world_size + peers
    if wrote:
        tl.debug_barrier()
    if get_flat_tid() < world_size:
        send_signal(there, "release" if wrote else "relaxed")
        wait_signal(here, "acquire" if reads else "relaxed")
    if reads:
        tl.debug_barrier()
