"""All-gather and matmul: copies on a second stream say by progress words which shards are there.

The fault: a shard is announced before it is copied.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from launch import FAULT, start
from signals import get_flat_tid


@triton.jit
def wait_progress(word):
    if get_flat_tid() == 0:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred %p<1>;
                again:
                    ld.global.acquire.sys.u32 $0, [$1];
                    setp.eq.u32 %p0, $0, 1;
                    @!%p0 bra again;
            }
            """,
            "=r, l", [word], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.inline_asm_elementwise("bar.sync 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def gemm(a, b, c, progress, rank, ranks, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """One program per shard, the own one first."""
    shard = (rank + tl.program_id(0)) % ranks
    wait_progress(progress + shard)
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    rows = tl.load(a + (shard * M + m)[:, None] * K + k[None, :])  # FAULT
    columns = tl.load(b + k[:, None] * N + n[None, :])
    tile = tl.dot(rows, columns)
    tl.store(c + (shard * M + m)[:, None] * N + n[None, :], tile.to(c.type.element_ty))


def main():
    rank, ranks, device = start()
    m, n, k = 16, 32, 16
    torch.manual_seed(0)
    all_rows = torch.randn(ranks * m, k, dtype=torch.float16, device=device)
    b = torch.randn(k, n, dtype=torch.float16, device="cuda")
    shard = symm_mem.empty(m, k, dtype=torch.float16, device=device)
    handle = symm_mem.rendezvous(shard, dist.group.WORLD)
    shard.copy_(all_rows[rank * m : (rank + 1) * m])
    a = torch.empty(ranks * m, k, dtype=torch.float16, device=device)
    c = torch.empty(ranks * m, n, dtype=torch.float16, device=device)
    progress = torch.zeros(ranks, dtype=torch.uint32, device=device)
    copies = torch.cuda.Stream(priority=-1)
    handle.barrier()
    copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        for step in range(ranks):
            peer = (rank + step) % ranks
            if FAULT:
                handle.stream_write_value32(progress, peer, 1)
            a[peer * m : (peer + 1) * m].copy_(handle.get_buffer(peer, (m, k), torch.float16))
            if not FAULT:
                handle.stream_write_value32(progress, peer, 1)
        handle.barrier(channel=1)
    gemm[(ranks,)](a, b, c, progress, rank, ranks, m, n, k)
    torch.cuda.current_stream().wait_stream(copies)
    torch.testing.assert_close(c, all_rows @ b, atol=1e-2, rtol=1e-2)


if __name__ == "__main__":
    main()
