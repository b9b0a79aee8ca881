"""Functions of numbers, element by element: math.*, Triton's precise forms, libdevice's."""

from __future__ import annotations

from typing import Any

from weft.emulator.operations.table import operation, templates

# Symbols of libdevice without "__nv_" and without the f that marks fp32: templates as in
# arithmetic.py.
LIBDEVICE = {
    name: f"np.{name}({{0}})"
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh",
        "sqrt", "floor", "ceil", "trunc",
    )
}  # fmt: skip
LIBDEVICE |= {
    "copysign": "np.copysign({0}, {1})",
    "atan2": "np.arctan2({0}, {1})",
    "erf": "erf({0})",
    "rsqrt": "rsqrt({0})",
    "fma": "fma({0}, {1}, {2})",
}

templates({f"math.{name}": template for name, template in LIBDEVICE.items()})
templates(
    {
        "math.isnan": "np.isnan({0})",
        "math.isinf": "np.isinf({0})",
        "math.isfinite": "np.isfinite({0})",
        "math.absf": "np.abs({0})",
        "math.absi": "np.abs({0})",
        "math.roundeven": "np.rint({0})",
        "math.powf": "np.power({0}, {1})",
        "tt.precise_sqrt": "np.sqrt({0})",
        "tt.approx_divf": "{0} / {1}",
        "tt.precise_divf": "{0} / {1}",
        "tt.mulhiui": "mulhiui({0}, {1})",
    }
)


@operation("tt.clampf")
def clamp(code: Any, op: Any) -> None:
    """The first, kept between the two others; a NaN becomes a bound, or stays."""
    keeps_nan = "all" in str(op.attributes.get("propagateNan", "none"))
    larger, smaller = ("np.maximum", "np.minimum") if keeps_nan else ("np.fmax", "np.fmin")
    code.elementwise(op, f"{smaller}({larger}({{0}}, {{1}}), {{2}})")


# ---------------------------------------------------------------------------------------------
# Functions that only libdevice has: what kernels call through `tl.extra.libdevice`

_NAMES = {
    "np.{}({{0}})": {
        "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh",
        "acosh": "arccosh", "atanh": "arctanh", "sinh": "sinh", "cosh": "cosh", "cbrt": "cbrt",
        "fabs": "abs", "abs": "abs", "llabs": "abs", "rint": "rint", "nearbyint": "rint",
    },
    "np.{}({{0}}, {{1}})": {
        "hypot": "hypot", "pow": "power", "fmod": "fmod", "fmax": "fmax", "fmin": "fmin",
    },
    "np.{}({{0}}).astype({{dtype}})": {
        "isnan": "isnan", "isinf": "isinf", "finite": "isfinite", "isnand": "isnan",
        "isinfd": "isinf", "isfinited": "isfinite",
    },
}  # fmt: skip
for _form, _row in _NAMES.items():
    LIBDEVICE |= {_name: _form.format(_function) for _name, _function in _row.items()}
LIBDEVICE["exp10"] = "np.power(10.0, {0})"
for _name in ("exp", "log", "sin", "cos", "log2", "log10", "tan", "pow"):
    LIBDEVICE[f"fast_{_name}"] = LIBDEVICE[_name]

# Instructions on pairs of f32, which Gluon has for sm_100: templates of their results.
PAIRS = {
    f"{name}.f32x2 $0, $1, $2;": (f"in_pairs(np.{function}, {{0}}, {{1}})",)
    for name, function in (("add", "add"), ("sub", "subtract"), ("mul", "multiply"))
}
PAIRS |= {
    "fma.rn.f32x2 $0, $1, $2, $3;": ("in_pairs(fma, {0}, {1}, {2})",),
    "mov.b64 $0, { $1, $2 };": ("paired({0}, {1})",),
    "mov.b64 { $0, $1 }, $2;": ("low_of({0})", "high_of({0})"),
}


def libdevice_template(symbol: str) -> str | None:
    """The template for `__nv_...`, whether the symbol is the fp32 or the fp64 one."""
    name = symbol.removeprefix("__nv_")
    names = (name, name.removesuffix("f"), name.removesuffix("ll"))
    return next((LIBDEVICE[one] for one in names if one in LIBDEVICE), None)
