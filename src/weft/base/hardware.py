"""What a machine can do, in numbers: the emulator's simulated clock reckons with them."""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.errors import UsageError


@dataclass(frozen=True)
class Hardware:
    """One rank of a machine, and its links.

    Units   tflops: of the whole device, dense, by the operands' width; *_gbps: 10^9 bytes per
            second and direction; sm_*: what one program gets; *_us: from the start of a thing
            until its first byte, or its signal, is there
    """

    name: str
    num_sms: int
    fp8_tflops: float
    fp16_tflops: float
    tf32_tflops: float
    fp64_tflops: float
    memory_gbps: float
    sm_memory_gbps: float
    link_gbps: float
    sm_link_gbps: float
    far_gbps: float
    copy_engines: int
    launch_us: float
    copy_us: float
    signal_us: float
    token_us: float
    far_us: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "name" and not (value > 0 or (name.endswith("_us") and value == 0)):
                raise UsageError(f"hardware {self.name!r}: {name}={value!r} must be positive")

    def sm_flops_per_us(self, operand_bytes: int) -> float:
        """What one SM does in a microsecond to operands of this width."""
        tflops = {1: self.fp8_tflops, 2: self.fp16_tflops, 4: self.tf32_tflops}.get(
            operand_bytes, self.fp64_tflops
        )
        return tflops * 1e6 / self.num_sms


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            # Measured on 4 x H200: cuBLAS at its best, the copy rate of its memory, one copy to a
            # peer, and 20 SMs pushing. Not measured, and typical: the rates of fp8, tf32 and fp64
            # by their ratio to fp16, one SM's rate from L2 (64 bytes a clock), one port of
            # 400 Gb/s to other nodes, and all latencies but that of tokens, which is fitted to
            # gemm_rs (docs/performance/gemm_rs.md).
            "h200x4", num_sms=132,
            fp8_tflops=1588.0, fp16_tflops=794.0, tf32_tflops=397.0, fp64_tflops=54.0,
            memory_gbps=4300.0, sm_memory_gbps=100.0,
            link_gbps=388.0, sm_link_gbps=14.6, far_gbps=50.0, copy_engines=3,
            launch_us=2.0, copy_us=3.0, signal_us=1.0, token_us=8.0, far_us=5.0,
        ),
    )
}  # fmt: skip


def find_hardware(name: str) -> Hardware:
    """The record called `name`.

    Raises  UsageError: there is none
    """
    if name not in HARDWARE:
        raise UsageError(f"no hardware is called {name!r}; there are {', '.join(HARDWARE)}")
    return HARDWARE[name]
