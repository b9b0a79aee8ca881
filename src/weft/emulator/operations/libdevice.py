"""The functions of libdevice that kernels call through `tl.extra.libdevice`, in numpy."""

from __future__ import annotations

# Symbol without "__nv_" and without the f that marks fp32: a template as in arithmetic.py.
LIBDEVICE = {
    "exp": "np.exp({0})",
    "exp2": "np.exp2({0})",
    "exp10": "np.power({dtype}.type(10), {0})",
    "expm1": "np.expm1({0})",
    "log": "np.log({0})",
    "log2": "np.log2({0})",
    "log10": "np.log10({0})",
    "log1p": "np.log1p({0})",
    "sin": "np.sin({0})",
    "cos": "np.cos({0})",
    "tan": "np.tan({0})",
    "asin": "np.arcsin({0})",
    "acos": "np.arccos({0})",
    "atan": "np.arctan({0})",
    "atan2": "np.arctan2({0}, {1})",
    "sinh": "np.sinh({0})",
    "cosh": "np.cosh({0})",
    "tanh": "np.tanh({0})",
    "asinh": "np.arcsinh({0})",
    "acosh": "np.arccosh({0})",
    "atanh": "np.arctanh({0})",
    "erf": "erf({0})",
    "sqrt": "np.sqrt({0})",
    "rsqrt": "rsqrt({0})",
    "cbrt": "np.cbrt({0})",
    "hypot": "np.hypot({0}, {1})",
    "pow": "np.power({0}, {1})",
    "fmod": "np.fmod({0}, {1})",
    "fma": "fma({0}, {1}, {2})",
    "fabs": "np.abs({0})",
    "abs": "np.abs({0})",
    "fmax": "np.fmax({0}, {1})",
    "fmin": "np.fmin({0}, {1})",
    "max": "np.maximum({0}, {1})",
    "min": "np.minimum({0}, {1})",
    "floor": "np.floor({0})",
    "ceil": "np.ceil({0})",
    "trunc": "np.trunc({0})",
    "rint": "np.rint({0})",
    "nearbyint": "np.rint({0})",
    "copysign": "np.copysign({0}, {1})",
    "fdim": "np.fmax({0} - {1}, {dtype}.type(0))",
    "saturate": "np.clip({0}, {dtype}.type(0), {dtype}.type(1))",
    "isnan": "np.isnan({0}).astype({dtype})",
    "isinf": "np.isinf({0}).astype({dtype})",
    "finite": "np.isfinite({0}).astype({dtype})",
    "signbit": "np.signbit({0}).astype({dtype})",
    "fdiv_rn": "{0} / {1}",
    "fsqrt_rn": "np.sqrt({0})",
    "fast_exp": "np.exp({0})",
    "fast_log": "np.log({0})",
    "fast_sin": "np.sin({0})",
    "fast_cos": "np.cos({0})",
    "fast_fdivide": "{0} / {1}",
    "umulhi": "mulhiui({0}, {1})",
    "mulhi": "mulhisi({0}, {1})",
    "clz": "clz({0}).astype({dtype})",
    "popc": "popcount({0}).astype({dtype})",
    "ffs": "ffs({0}).astype({dtype})",
    "llrint": "np.rint({0}).astype({dtype})",
    "float_as_int": "{0}.view({dtype})",
    "int_as_float": "{0}.view({dtype})",
}

_ALIASES = {"isnand": "isnan", "isinfd": "isinf", "isfinited": "finite", "signbitd": "signbit"}


def libdevice_template(symbol: str) -> str | None:
    """The template for `__nv_...`, whether the symbol is the fp32 or the fp64 one."""
    name = symbol.removeprefix("__nv_")
    name = _ALIASES.get(name, name)
    for candidate in (name, name.removesuffix("f"), name.removesuffix("ll")):
        if candidate in LIBDEVICE:
            return LIBDEVICE[candidate]
    return None
