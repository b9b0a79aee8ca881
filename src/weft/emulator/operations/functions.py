"""math.* and Triton's precise forms: functions of floats, element by element."""

from __future__ import annotations

from typing import Any

from weft.emulator.operations.table import add, operation

FUNCTIONS = {
    "math.exp": ("e to the power", "np.exp({0})"),
    "math.exp2": ("2 to the power", "np.exp2({0})"),
    "math.expm1": ("e to the power, less 1", "np.expm1({0})"),
    "math.log": ("natural logarithm", "np.log({0})"),
    "math.log2": ("logarithm to base 2", "np.log2({0})"),
    "math.log10": ("logarithm to base 10", "np.log10({0})"),
    "math.log1p": ("natural logarithm of 1 plus", "np.log1p({0})"),
    "math.sin": ("sine", "np.sin({0})"),
    "math.cos": ("cosine", "np.cos({0})"),
    "math.tan": ("tangent", "np.tan({0})"),
    "math.tanh": ("hyperbolic tangent", "np.tanh({0})"),
    "math.erf": ("error function", "erf({0})"),
    "math.sqrt": ("square root", "np.sqrt({0})"),
    "math.rsqrt": ("reciprocal square root", "rsqrt({0})"),
    "math.absf": ("magnitude", "np.abs({0})"),
    "math.floor": ("rounded down", "np.floor({0})"),
    "math.ceil": ("rounded up", "np.ceil({0})"),
    "math.trunc": ("rounded toward zero", "np.trunc({0})"),
    "math.round": ("rounded, halves away from zero", "round_away({0})"),
    "math.roundeven": ("rounded, halves to even", "np.rint({0})"),
    "math.powf": ("power", "np.power({0}, {1})"),
    "math.atan2": ("angle", "np.arctan2({0}, {1})"),
    "math.copysign": ("magnitude of one, sign of the other", "np.copysign({0}, {1})"),
    "math.fma": ("a * b + c, rounded once", "fma({0}, {1}, {2})"),
    "math.isnan": ("is it NaN", "np.isnan({0})"),
    "math.isinf": ("is it infinite", "np.isinf({0})"),
    "math.isfinite": ("is it finite", "np.isfinite({0})"),
    "math.absi": ("magnitude of an integer, wrapping", "np.abs({0})"),
    "math.ctlz": ("leading zeros", "clz({0})"),
    "math.ctpop": ("how many bits are set", "popcount({0})"),
    "tt.precise_sqrt": ("square root, correctly rounded", "np.sqrt({0})"),
    "tt.approx_divf": ("quotient", "{0} / {1}"),
    "tt.precise_divf": ("quotient, correctly rounded", "{0} / {1}"),
    "tt.mulhiui": ("upper half of the unsigned product", "mulhiui({0}, {1})"),
}  # fmt: skip


for _name, (_summary, _template) in FUNCTIONS.items():
    add(_name, _summary, _template)


@operation("tt.clampf", "the first, kept between the two others")
def clamp(code: Any, op: Any) -> None:
    keeps_nan = "all" in str(op.attributes.get("propagateNan", "none"))
    name = "clampf_nan" if keeps_nan else "clampf"
    code.elementwise(op, name + "({0}, {1}, {2})")
