"""Machines that nobody has measured here: constants of the measured one, scaled by public figures.

Rates go by what data sheets say of both, latencies stay: kernels are taken to attain what they
attain of the measured machine's rates. Good for comparing plans and numbers of ranks; a machine at
hand is measured by `weft machine`.

Sources  NVIDIA's data sheets of H100 SXM5, H200 SXM and HGX B200, AMD's of the Instinct MI300X
         platform: dense bf16, memory, links of one GPU in one direction; an H800 is an H100 with
         200 GB/s there. To other nodes each has a port of 400 Gb/s, as in the reference designs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.base.errors import UsageError
from weft.base.hardware import H200X4, Curve, Hardware


@dataclass(frozen=True)
class Figures:
    """Of one GPU, as its maker says."""

    num_sms: int
    tflops: float
    memory_gbps: float
    link_gbps: float
    far_gbps: float = 50.0


# What HARDWARE's record was measured on.
MEASURED = Figures(132, 989.0, 4800.0, 450.0)
PUBLIC = {
    "h100x8": Figures(132, 989.0, 3350.0, 450.0),
    "h200x8": MEASURED,
    "h800x8": Figures(132, 989.0, 3350.0, 200.0),
    "b200x8": Figures(148, 2250.0, 8000.0, 900.0),
    "mi300x8": Figures(304, 1307.0, 5300.0, 448.0),
}
OF_LINKS = (
    "copy_gbps", "push_gbps", "pusher_gbps", "packet_gbps", "combine_gbps", "sums_gbps",
    "wide_sums_gbps",
)  # fmt: skip
OF_MEMORY = ("memory_gbps", "library_gbps", "small_gbps", "few_gbps", "reread_gbps")
# Rates of one program.
OF_PROGRAMS = ("pusher_gbps", "combine_gbps", "sums_gbps", "wide_sums_gbps")


def scaled(name: str, to: Figures, base: Hardware = H200X4, of: Figures = MEASURED) -> Hardware:
    """`base`, which was measured on `of`, as it would be on `to`."""
    links, memory = to.link_gbps / of.link_gbps, to.memory_gbps / of.memory_gbps
    flops, programs = to.tflops / of.tflops, to.num_sms / of.num_sms
    fields = {one: getattr(base, one) * links for one in OF_LINKS}
    fields |= {one: getattr(base, one) * memory for one in OF_MEMORY}
    fields |= {one: fields[one] / programs for one in OF_PROGRAMS}
    return replace(
        base, name=name, num_sms=to.num_sms, far_gbps=to.far_gbps,
        program_tflops=base.program_tflops * flops / programs,
        library_tflops=base.library_tflops * flops, gather=_faster(base.gather, links),
        scatter=_faster(base.scatter, links), reduce=_faster(base.reduce, links), **fields,
    )  # fmt: skip


def _faster(curve: Curve, times: float) -> Curve:
    """What bytes cost goes by the links' rate, what each call costs stays."""
    least = curve[0][1]
    return tuple((nbytes, least + (us - least) / times) for nbytes, us in curve)


KNOWN = {name: scaled(name, figures) for name, figures in PUBLIC.items()} | {H200X4.name: H200X4}


def find_machine(name: str) -> Hardware:
    """A measured machine, or one of public figures.

    Raises  UsageError: there is none
    """
    if name not in KNOWN:
        raise UsageError(f"no machine is called {name!r}; there are {', '.join(KNOWN)}")
    return KNOWN[name]
