"""The functions of libdevice that kernels call through `tl.extra.libdevice`, in numpy."""

from __future__ import annotations

from weft.emulator.operations.functions import FUNCTIONS

# Symbol without "__nv_" and without the f that marks fp32: a template as in arithmetic.py.
LIBDEVICE = {
    name.removeprefix("math."): template
    for name, (_, template) in FUNCTIONS.items()
    if name.removeprefix("math.") in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "atan2",
        "tanh", "erf", "sqrt", "rsqrt", "fma", "floor", "ceil", "trunc", "copysign",
    )
}  # fmt: skip
LIBDEVICE |= {
    "exp10": "np.power({dtype}.type(10), {0})",
    "asin": "np.arcsin({0})",
    "acos": "np.arccos({0})",
    "atan": "np.arctan({0})",
    "sinh": "np.sinh({0})",
    "cosh": "np.cosh({0})",
    "asinh": "np.arcsinh({0})",
    "acosh": "np.arccosh({0})",
    "atanh": "np.arctanh({0})",
    "cbrt": "np.cbrt({0})",
    "hypot": "np.hypot({0}, {1})",
    "pow": "np.power({0}, {1})",
    "fmod": "np.fmod({0}, {1})",
    "fabs": "np.abs({0})",
    "abs": "np.abs({0})",
    "fmax": "np.fmax({0}, {1})",
    "fmin": "np.fmin({0}, {1})",
    "max": "np.maximum({0}, {1})",
    "min": "np.minimum({0}, {1})",
    "rint": "np.rint({0})",
    "nearbyint": "np.rint({0})",
    "fdim": "np.fmax({0} - {1}, {dtype}.type(0))",
    "saturate": "np.clip({0}, {dtype}.type(0), {dtype}.type(1))",
    "isnan": "np.isnan({0}).astype({dtype})",
    "isinf": "np.isinf({0}).astype({dtype})",
    "finite": "np.isfinite({0}).astype({dtype})",
    "signbit": "np.signbit({0}).astype({dtype})",
    "fdiv_rn": "{0} / {1}",
    "fsqrt_rn": "np.sqrt({0})",
    "fast_fdivide": "{0} / {1}",
    "umulhi": "mulhiui({0}, {1})",
    "mulhi": "mulhisi({0}, {1})",
    "clz": "clz({0}).astype({dtype})",
    "popc": "popcount({0}).astype({dtype})",
    "ffs": "ffs({0}).astype({dtype})",
    "llrint": "np.rint({0}).astype({dtype})",
    "float_as_int": "{0}.view({dtype})",
    "int_as_float": "{0}.view({dtype})",
    "float_as_uint": "{0}.view({dtype})",
    "uint_as_float": "{0}.view({dtype})",
    "longlong_as_double": "{0}.view({dtype})",
    "double_as_longlong": "{0}.view({dtype})",
    "erfc": "special('erfc', {0})",
    "erfinv": "special('erfinv', {0})",
    "erfcx": "special('erfcx', {0})",
    "erfcinv": "special('erfinv', {dtype}.type(1) - {0})",
    "normcdf": "special('ndtr', {0})",
    "normcdfinv": "special('ndtri', {0})",
    "lgamma": "special('gammaln', {0})",
    "tgamma": "gamma({0})",
    "j0": "special('bessel_j0', {0})",
    "j1": "special('bessel_j1', {0})",
    "y0": "special('bessel_y0', {0})",
    "y1": "special('bessel_y1', {0})",
    "cyl_bessel_i0": "special('i0', {0})",
    "cyl_bessel_i1": "special('i1', {0})",
    "sinpi": "np.sin({0}.astype(f64) % 2 * np.pi).astype({dtype})",
    "cospi": "np.cos({0}.astype(f64) % 2 * np.pi).astype({dtype})",
    "rcbrt": "{dtype}.type(1) / np.cbrt({0})",
    "rhypot": "{dtype}.type(1) / np.hypot({0}, {1})",
    "norm3d": "np.sqrt({0} * {0} + {1} * {1} + {2} * {2})",
    "norm4d": "np.sqrt({0} * {0} + {1} * {1} + {2} * {2} + {3} * {3})",
    "rnorm3d": "rsqrt({0} * {0} + {1} * {1} + {2} * {2})",
    "rnorm4d": "rsqrt({0} * {0} + {1} * {1} + {2} * {2} + {3} * {3})",
    "nextafter": "np.nextafter({0}, {1})",
    "remainder": "({0} - {1} * np.rint({0} / {1}))",
    "ldexp": "np.ldexp({0}, {1}).astype({dtype})",
    "scalbn": "np.ldexp({0}, {1}).astype({dtype})",
    "powi": "np.power({0}, {1}.astype({dtype}))",
    "round": "round_away({0})",
    "llround": "float_to_int(round_away({0}), {dtype})",
    "logb": "exponent({0}).astype({dtype})",
    "ilogb": "exponent({0}).astype({dtype})",
    "fmaf_rn": "fma({0}, {1}, {2})",
    "fma_rn": "fma({0}, {1}, {2})",
    "frsqrt_rn": "rsqrt({0})",
    "llabs": "np.abs({0})",
    "mul64hi": "mulhisi({0}, {1})",
    "umul64hi": "mulhiui({0}, {1})",
    "brev": "reverse_bits({0})",
    "hadd": "(({0}.astype(i64) + {1}) >> 1).astype({dtype})",
    "rhadd": "(({0}.astype(i64) + {1} + 1) >> 1).astype({dtype})",
    "uhadd": "(({u0}.astype(i64) + {u1}) >> 1).astype({dtype})",
    "urhadd": "(({u0}.astype(i64) + {u1} + 1) >> 1).astype({dtype})",
    "sad": "np.abs({0}.astype(i64) - {1}).astype({dtype}) + {2}",
}

for _name in ("exp", "log", "sin", "cos", "log2", "log10", "exp10", "tan", "pow"):
    LIBDEVICE[f"fast_{_name}"] = LIBDEVICE[_name]

# Arithmetic in a given direction: f32 is computed in f64 first, f64 only to nearest.
for _name, _text in {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}"}.items():
    LIBDEVICE |= {f"f{_name}_rn": _text, f"d{_name}_rn": _text}
LIBDEVICE |= {"ddiv_rn": "{0} / {1}", "dsqrt_rn": "np.sqrt({0})"}
LIBDEVICE |= {f"{_kind}rcp_rn": "{dtype}.type(1) / {0}" for _kind in "fd"}
for _direction in ("rz", "rd", "ru"):
    for _name, _text in {
        "fadd": "{0}.astype(f64) + {1}",
        "fsub": "{0}.astype(f64) - {1}",
        "fmul": "{0}.astype(f64) * {1}",
        "fdiv": "{0}.astype(f64) / {1}",
        "frcp": "1 / {0}.astype(f64)",
        "fsqrt": "np.sqrt({0}.astype(f64))",
        "fmaf": "{0}.astype(f64) * {1} + {2}",
        "double2float": "{0}",
        "int2float": "{0}.astype(f64)",
        "uint2float": "{u0}.astype(f64)",
    }.items():
        LIBDEVICE[f"{_name}_{_direction}"] = f"toward({_text}, {{dtype}}, '{_direction}')"
LIBDEVICE["double2float_rn"] = "{0}.astype({dtype})"
_WHOLE = {"rn": "np.rint", "rz": "np.trunc", "rd": "np.floor", "ru": "np.ceil"}
for _float in ("float", "double"):
    for _integer, _unsigned in {"int": "", "ll": "", "uint": ", True", "ull": ", True"}.items():
        for _direction, _function in _WHOLE.items():
            _text = f"float_to_int({_function}({{0}}), {{dtype}}{_unsigned})"
            LIBDEVICE[f"{_float}2{_integer}_{_direction}"] = _text
        _source = "{u0}" if _unsigned else "{0}"
        LIBDEVICE[f"{_integer}2{_float}_rn"] = f"{_source}.astype({{dtype}})"

_ALIASES = {"isnand": "isnan", "isinfd": "isinf", "isfinited": "finite", "signbitd": "signbit"}


def libdevice_template(symbol: str) -> str | None:
    """The template for `__nv_...`, whether the symbol is the fp32 or the fp64 one."""
    name = symbol.removeprefix("__nv_")
    name = _ALIASES.get(name, name)
    for candidate in (name, name.removesuffix("f"), name.removesuffix("ll")):
        if candidate in LIBDEVICE:
            return LIBDEVICE[candidate]
    return None
