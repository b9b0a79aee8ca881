"""By kind of task: the device function that does it, and what that is given.

A kind that is not here has no task in the persistent kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.ir.kinds import GATED_PRODUCTS
from weft.ir.shapes import ACTIVATIONS, GATED, ROWS
from weft.megakernel.records import COPY, GATHER, REDUCE, REDUCE_ADD, SEND


class Form(NamedTuple):
    """The device function of tasks/ that does a kind, what its operands are called, and its
    arguments where they are more than those.

    {0}, {1}, .. are the buffers that the operation reads, {last} the last of them, {made} is the
    value and {write} the buffer that it makes.
    """

    function: str
    names: dict[str, str]
    arguments: tuple[str, ...] = ()

    def called_with(self) -> tuple[str, ...]:
        return self.arguments or tuple(f"{{{name}}}" for name in self.names)


_EXTENTS = {"m": "s.{made}_m", "n": "s.{made}_n"}
_ONE = {"x": "v.{0}", **_EXTENTS, "stride_x": "s.{0}_stride"}
_TWO = {
    "x": "v.{0}", "y": "v.{last}", **_EXTENTS, "stride_x": "s.{0}_stride",
    "stride_y": "s.{last}_stride",
}  # fmt: skip
_WITH_ROW = {name: one for name, one in _TWO.items() if name != "stride_y"}


def _activated(function: str, epilogue: str) -> Form:
    return Form(
        f"elementwise.{function}", _ONE, (*(f"{{{name}}}" for name in _ONE), f"epilogue.{epilogue}")
    )


_MOVE = Form("move.move", {"x": "v.{0}", "n": "s.{0}_n", "stride_x": "s.{0}_stride"})
_SUMMANDS = {
    "own": "v.{0}", "own_stride": "s.{0}_stride", "partials": "v.{last}",
    "partials_stride": "s.{last}_stride", "slab": "s.{last}_slab", "n": "s.{made}_n",
}  # fmt: skip
_SUM = "move.Summands({own}, {own_stride}, {partials}, {partials_stride}, {slab})"
MOVES = {
    GATHER: _MOVE, SEND: _MOVE, COPY: _MOVE,
    REDUCE: Form("move.reduce", _SUMMANDS, (_SUM, "{split_k}", "rank", "{n}")),
    REDUCE_ADD: Form(
        "move.reduce_add", {**_SUMMANDS, "other": "v.{1}", "stride_other": "s.{1}_stride"},
        (_SUM, "{split_k}", "{other}", "{stride_other}", "rank", "{n}"),
    ),
}  # fmt: skip
_PRODUCT = {
    "x": "v.{0}", "w": "v.{1}", **_EXTENTS, "k": "s.{0}_n", "stride_x": "s.{0}_stride",
    "stride_w": "s.{1}_stride",
}  # fmt: skip


def _gated(gate: str) -> Form:
    shape = "gemm.Shape({m}, {wide}, {k}, {stride_x}, {stride_w}, {stride})"
    names = {**_PRODUCT, "wide": "s.{1}_n"}
    return Form("matmul.gated", names, ("{x}", "{w}", shape, f"epilogue.{gate}"))


COMPUTES = {
    "matmul": Form(
        "matmul.matmul", _PRODUCT,
        ("{x}", "{w}", "gemm.Shape({m}, {n}, {k}, {stride_x}, {stride_w}, {stride})", "{split_k}"),
    ),
    **{kind: _gated(kind.removeprefix("matmul_")) for kind in GATED_PRODUCTS},
    **{kind: _activated("activated", kind) for kind in ACTIVATIONS},
    **{kind: _activated("in_pairs", kind) for kind in GATED},
    **{f"{kind}_mul_halves": _activated("in_halves", kind) for kind in ACTIVATIONS},
    **{kind: Form(f"elementwise.{kind}", _TWO) for kind in ROWS},
    **{row: Form(f"elementwise.{kind}", _WITH_ROW, (*(f"{{{name}}}" for name in _WITH_ROW), "0"))
       for kind, row in ROWS.items()},
    "columns": Form("elementwise.columns", _ONE, (*(f"{{{name}}}" for name in _ONE), "{first}")),
    "rms_norm": Form(
        "norm.rms_norm",
        {"x": "v.{0}", "weight": "v.{1}", **_EXTENTS, "stride_x": "s.{0}_stride"},
        ("{x}", "{weight}", "{m}", "{n}", "{stride_x}", "{eps}"),
    ),
    "embedding": Form(
        "decode.embedding",
        {"table": "v.{0}", "ids": "v.{1}", **_EXTENTS, "rows": "s.{0}_m",
         "stride_x": "s.{0}_stride"},
        ("{table}", "{ids}", "{m}", "{n}", "{rows}", "{stride_x}", "rank * {part}"),
    ),
    "head_norm": Form(
        "norm.head_norm",
        {"x": "v.{0}", "weight": "v.{1}", **_EXTENTS, "stride_x": "s.{0}_stride"},
        ("{x}", "{weight}", "{m}", "{n}", "{stride_x}", "{eps}", "{head}"),
    ),
    "rope_by_table": Form(
        "decode.rope_by_table",
        {"x": "v.{0}", "positions": "v.{1}", "table": "v.{2}", **_EXTENTS,
         "stride_x": "s.{0}_stride"},
        ("{x}", "{positions}", "{table}", "{m}", "{n}", "{stride_x}", "{head}"),
    ),
    "rope": Form(
        "decode.rope",
        {"x": "v.{0}", "lengths": "v.{1}", **_EXTENTS, "stride_x": "s.{0}_stride"},
        ("{x}", "{lengths}", "{m}", "{n}", "{stride_x}", "{head}", "{log2_base}"),
    ),
    "kv_append": Form(
        "decode.kv_append",
        {"cache": "v.{0}", "x": "v.{1}", "lengths": "v.{2}", "max_kv": "s.{0}_m // s.{1}_m",
         "n": "s.{1}_n", "stride_x": "s.{1}_stride", "stride": "s.{0}_stride"},
    ),
    "decode_attention": Form(
        "decode.attention",
        {"q": "v.{0}", "keys": "v.{1}", "values": "v.{2}", "lengths": "v.{3}", **_EXTENTS,
         "kv_n": "s.{1}_n", "max_kv": "s.{1}_m // s.{made}_m", "out": "v.{write}"},
        ("{q}", "{keys}", "{values}", "{lengths}", "{m}", "{n}", "{kv_n}", "{max_kv}", "{head}",
         "{out}"),
    ),
    "attention_parts": Form(
        "decode.attention_parts",
        {"q": "v.{0}", "keys": "v.{1}", "values": "v.{2}", "lengths": "v.{3}", "m": "s.{0}_m",
         "n": "s.{0}_n", "kv_n": "s.{1}_n", "max_kv": "s.{1}_m // s.{0}_m",
         "splits": "s.{made}_m // s.{0}_m", "out": "v.{write}"},
        ("{q}", "{keys}", "{values}", "{lengths}", "{m}", "{n}", "{kv_n}", "{max_kv}", "{splits}",
         "{head}", "{out}"),
    ),
    "merge_parts": Form(
        "decode.merge_parts",
        {"means": "v.{0}", **_EXTENTS, "splits": "s.{0}_m // s.{made}_m",
         "stride_x": "s.{0}_stride"},
        ("{means}", "{splits}", "{stride_x}", "{head}"),
    ),
}  # fmt: skip
KINDS = MOVES | COMPUTES
