"""Operators without a kernel: routines of the machine's vendor, on whole values in main memory.

    register("matmul_tn", SOURCE)      SOURCE defines vendor_matmul_tn(core, out, operands)

One core of the rank calls a routine, the others wait. A routine is C text with the function
`static void vendor_KIND(mc_core *core, mc_matrix out, const mc_matrix *operands)`, which moves the
core's clock by mc_compute. What is here takes BLAS where the program is compiled with one.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.errors import UnsupportedError
from weft.ir.task import Task
from weft.manycore.record import Machine
from weft.manycore.signals import Ready
from weft.manycore.traffic import Traffic
from weft.manycore.values import Value, View

_MATMUL_TN = """
/* x^T @ y: of fp32 by BLAS where there is one. */
static void vendor_matmul_tn(mc_core *core, mc_matrix out, const mc_matrix *operands)
{
    const mc_matrix x = operands[0], y = operands[1];
#if defined(MC_BLAS) && !defined(MC_BF16)
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, out.rows, out.columns, x.rows, 1.0f,
                x.data, (int)(x.pitch / sizeof(float)), y.data, (int)(y.pitch / sizeof(float)),
                0.0f, out.data, (int)(out.pitch / sizeof(float)));
#else
    for (int i = 0; i < out.rows; i++)
        for (int j = 0; j < out.columns; j++) {
            float sum = 0.0f;
            for (int l = 0; l < x.rows; l++)
                sum += mc_load(*mc_of(x, l, i)) * mc_load(*mc_of(y, l, j));
            *mc_of(out, i, j) = mc_store(sum);
        }
#endif
    mc_compute(core, 2.0 * out.rows * out.columns * x.rows);
}
"""

ROUTINES: dict[str, str] = {"matmul_tn": _MATMUL_TN}


def register(kind: str, source: str) -> None:
    """Tasks of this kind call `vendor_KIND` of this C text."""
    ROUTINES[kind] = source


@dataclass(frozen=True)
class Vendor:
    name: str
    text: str
    task: Task
    operands: tuple[View, ...]
    out: Value
    machine: Machine
    awaits: tuple[Ready, ...] = ()

    kind = "vendor"
    map = None
    active = 1

    def traffic(self, rank: int) -> Traffic:
        """What a routine moves is its own."""
        return Traffic()

    def ns(self, rank: int = 0) -> float:
        if self.task.kind != "matmul_tn":
            return self.machine.barrier_ns
        flops = 2 * self.out.rows.most * self.out.columns.most * self.operands[0].num_rows.most
        return flops / self.machine.gflops + self.machine.barrier_ns


def require(task: Task) -> str:
    """Raises  UnsupportedError: a kind that has neither a kernel nor a routine"""
    if task.kind not in ROUTINES:
        raise UnsupportedError(
            f"{task.name}: the many-core target has no kernel for {task.kind}, and no vendor's "
            "routine; give one with weft.manycore.register(kind, C text), or leave it outside of "
            "the program", place=task.place,
        )  # fmt: skip
    return ROUTINES[task.kind]
