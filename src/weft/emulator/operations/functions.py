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
        "math.round": "round_away({0})",
        "math.roundeven": "np.rint({0})",
        "math.powf": "np.power({0}, {1})",
        "math.ctlz": "clz({0})",
        "math.ctpop": "popcount({0})",
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
        "fsqrt_rn": "sqrt", "dsqrt_rn": "sqrt",
    },
    "np.{}({{0}}, {{1}})": {
        "hypot": "hypot", "pow": "power", "fmod": "fmod", "fmax": "fmax", "fmin": "fmin",
        "max": "maximum", "min": "minimum", "nextafter": "nextafter",
    },
    "np.{}({{0}}).astype({{dtype}})": {
        "isnan": "isnan", "isinf": "isinf", "finite": "isfinite", "signbit": "signbit",
        "isnand": "isnan", "isinfd": "isinf", "isfinited": "isfinite", "signbitd": "signbit",
        "llrint": "rint",
    },
    "{}({{0}}).astype({{dtype}})": {
        "clz": "clz", "popc": "popcount", "ffs": "ffs"
    },
    "special('{}', {{0}})": {
        "erfc": "erfc", "erfinv": "erfinv", "erfcx": "erfcx", "normcdf": "ndtr",
        "normcdfinv": "ndtri", "lgamma": "gammaln",
    },
    "{}({{0}}, {{1}})": {
        "umulhi": "mulhiui", "mulhi": "mulhisi", "mul64hi": "mulhisi", "umul64hi": "mulhiui",
    },
    "{}({{0}}, {{1}}, {{2}})": {"fmaf_rn": "fma", "fma_rn": "fma"},
    "{}({{0}})": {
        "round": "round_away", "frsqrt_rn": "rsqrt",
    },
    "{{0}} {} {{1}}": {
        f"{kind}{name}_rn": sign
        for kind in "fd"
        for name, sign in {"add": "+", "sub": "-", "mul": "*", "div": "/"}.items()
    },
    "np.sqrt({})": {
        f"norm{n}d": " + ".join(f"{{{i}}} * {{{i}}}" for i in range(n)) for n in (3, 4)
    },
    "rsqrt({})": {
        f"rnorm{n}d": " + ".join(f"{{{i}}} * {{{i}}}" for i in range(n)) for n in (3, 4)
    },
}  # fmt: skip
for _form, _row in _NAMES.items():
    LIBDEVICE |= {_name: _form.format(_function) for _name, _function in _row.items()}
LIBDEVICE |= dict.fromkeys(
    (
        "float_as_int", "int_as_float", "float_as_uint", "uint_as_float", "longlong_as_double",
        "double_as_longlong",
    ),
    "{0}.view({dtype})",
)  # fmt: skip
LIBDEVICE |= {
    "exp10": "np.power({dtype}.type(10), {0})",
    "fdim": "np.fmax({0} - {1}, {dtype}.type(0))",
    "saturate": "np.clip({0}, {dtype}.type(0), {dtype}.type(1))",
    "fast_fdivide": "{0} / {1}",
    "erfcinv": "special('erfinv', {dtype}.type(1) - {0})",
    "logb": "(np.frexp({0})[1] - 1).astype({dtype})",
    "ilogb": "(np.frexp({0})[1] - 1).astype({dtype})",
    "ldexp": "np.ldexp({0}, {1}).astype({dtype})",
    "scalbn": "np.ldexp({0}, {1}).astype({dtype})",
    "powi": "np.power({0}, {1}.astype({dtype}))",
    "llround": "float_to_int(round_away({0}), {dtype})",
    "fmaf_rn": "fma({0}, {1}, {2})",
    "fma_rn": "fma({0}, {1}, {2})",
    "frcp_rn": "{dtype}.type(1) / {0}",
    "drcp_rn": "{dtype}.type(1) / {0}",
}
for _name in ("exp", "log", "sin", "cos", "log2", "log10", "exp10", "tan", "pow"):
    LIBDEVICE[f"fast_{_name}"] = LIBDEVICE[_name]

# Of the directions of rounding, floats know the nearest alone.
for _name, _sign in {"add": "+", "sub": "-", "mul": "*", "div": "/"}.items():
    LIBDEVICE |= dict.fromkeys((f"f{_name}_rn", f"d{_name}_rn"), f"{{0}} {_sign} {{1}}")
LIBDEVICE["double2float_rn"] = "{0}.astype({dtype})"
_WHOLE = {"rn": "np.rint", "rz": "np.trunc", "rd": "np.floor", "ru": "np.ceil"}
for _float in ("float", "double"):
    for _integer, _unsigned in {"int": "", "ll": "", "uint": ", True", "ull": ", True"}.items():
        for _direction, _function in _WHOLE.items():
            _text = f"float_to_int({_function}({{0}}), {{dtype}}{_unsigned})"
            LIBDEVICE[f"{_float}2{_integer}_{_direction}"] = _text
        _source = "{u0}" if _unsigned else "{0}"
        LIBDEVICE[f"{_integer}2{_float}_rn"] = f"{_source}.astype({{dtype}})"


def libdevice_template(symbol: str) -> str | None:
    """The template for `__nv_...`, whether the symbol is the fp32 or the fp64 one."""
    name = symbol.removeprefix("__nv_")
    names = (name, name.removesuffix("f"), name.removesuffix("ll"))
    return next((LIBDEVICE[one] for one in names if one in LIBDEVICE), None)
