"""What a generated kernel takes: a record for ahead-of-time compilation and the checks behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.base.dtypes import DTYPES
from weft.base.records import KernelRecord
from weft.compiler.lower import compose, source
from weft.ir import core
from weft.language.mapping import StaticMapping
from weft.language.world_arg import SlotArg, WorldArg, language_version
from weft.tiles import descriptors_sm90, gemm, gemm_sm90, own_rows, rows
from weft.tiles.hooks import partition, split_k, table, whole
from weft.tiles.hooks.scatter import MOST_PEERS


@dataclass(frozen=True)
class Specialised:
    """What is known of a kernel when it is compiled: dtypes by torch's names, extents of tiles,
    three of products, and of rows two."""

    dtype: str
    tile: tuple[int, ...]
    num_ranks: int
    b_is_nk: bool = False
    tma: bool = False
    num_warps: int = 4
    num_stages: int = 3


# The tuples that kernels take: runtime integers but for the tile's.
TUPLES = {
    "whole": StaticMapping,
    "slices": StaticMapping,
    "part": partition.Parts,
    "each": partition.Parts,
    "own": own_rows.Cut,
    "experts": table.Experts,
}
# Elements that a communication CTA moves at a time.
PUSHED = 8192
TABLES = tuple("*fp32" if name == "weight_of" else "*i32" for name in table.Tables._fields)


def record(kernel: core.Kernel, variant: str, given: Specialised) -> KernelRecord:
    """The record of a kernel's `plain` or `sm90` variant.

    Sizes are not known: a record compiles the general kernel, of rows that divide by 16 bytes.
    """
    (mapping,) = kernel.of(core.Mapping)
    cut = TUPLES[mapping.cuts]
    is_rows = kernel.of(core.Template)[0].function in core.OF_ROWS
    words = [list(TABLES) if one.sort == "tables" else _word(kernel, one, variant, given)
             for one in compose.params_of(kernel)]  # fmt: skip
    chunk = _descriptor(_chunk(given), given) if variant == "sm90" else ""
    signature, constants, aligned = arranged(kernel, variant, words, chunk)
    signature["slot"], constants["slot"] = ["*i64", "*i32", "*i64"], SlotArg(None, None, None)
    for name, kind in (*([] if is_rows else [("shape", gemm.Shape)]), ("mapping", cut)):
        signature[name] = ["i32"] * len(kind._fields)
        constants[name] = kind(*[None] * len(kind._fields))
    if compose.is_summed_over_rows(kernel):  # in one split
        signature["turns"] = ["i32", "constexpr", "i32", "i32", "i32", "i32"] + ["constexpr"] * 2
        constants["turns"] = split_k.Turns(None, 1, None, None, None, None, None, None)
    elif mapping.cuts in ("whole", "slices"):
        signature["turns"] = ["i32", "i32", "constexpr", "i32", "i32"]
        constants["turns"] = whole.Turns(None, None, 1, None, None)
    if not is_rows:
        signature["block"], constants["block"] = "constexpr", PUSHED
    _add_constants(signature, constants, variant, given)
    signature["world"] = ["*i64", "constexpr", "constexpr"]
    constants["world"] = WorldArg(None, given.num_ranks, language_version())
    options: dict[str, object] = {"num_warps": given.num_warps}
    if variant == "plain":
        options["num_stages"] = given.num_stages
    divide = [] if is_rows else [f"shape.{name}" for name in gemm.Shape._fields if name != "m"]
    if cut in (partition.Parts, own_rows.Cut):
        divide.append("mapping.n")
    suffix = "_sm90" if variant == "sm90" else ""
    return KernelRecord(
        f"{kernel.name}{suffix}", signature, constants, options, (*aligned, *divide)
    )


def arranged(
    kernel: core.Kernel, variant: str, words: Sequence[Any], chunk: str
) -> tuple[dict[str, object], dict[str, object], list[str]]:
    """(types, constants, what 16 divides) of a kernel's first arguments. `words` are the types of
    its parameters, `chunk` that of the descriptors by which tiles are sent to peers."""
    variants = source.load(kernel)
    peers = [chunk] * (MOST_PEERS * len(compose.peers_of(kernel)))
    hooks, *first = variants.arranged(words, peers if variant == "sm90" else None)
    fn, arrays = getattr(variants, variant), first[-1]
    signature: dict[str, object] = {
        name: "constexpr" if word is None else word for name, word in zip(fn.arg_names[1:], first)
    }
    named = tuple(_named(word) if isinstance(word, list) else None for word in arrays)
    aligned = [name for name, word in signature.items() if str(word).startswith("*")]
    aligned += [f"arrays.{i}" for i, word in enumerate(arrays) if str(word).startswith("*")]
    for i, word in enumerate(named):
        if isinstance(word, own_rows.View):
            aligned += [f"arrays.{i}.{name}" for name in word._fields]
    return signature | {"hooks": "constexpr"}, {"hooks": hooks, "arrays": named}, aligned


def _named(words: Sequence[str]) -> Any:
    """What a kernel is given as several values."""
    return table.Tables(*words) if words == [*TABLES] else own_rows.View(*words)


def _add_constants(
    signature: dict[str, object], constants: dict[str, object], variant: str, given: Specialised
) -> None:
    if len(given.tile) == 2:
        signature["tile"], constants["tile"] = ["constexpr"] * 2, rows.Tile(*given.tile)
        return
    tile_m, tile_n, tile_k = given.tile
    if variant == "plain":
        signature["tile"] = ["constexpr"] * len(gemm.Tile._fields)
        constants["tile"] = gemm.Tile(tile_m, tile_n, tile_k, given.b_is_nk, given.tma, True)
        return
    signature |= {"sums": "*fp32", "summed": "*i64"}
    values = {"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "stages": given.num_stages,
              "b_is_nk": given.b_is_nk}  # fmt: skip
    signature |= dict.fromkeys(values, "constexpr")
    constants |= values


_WORDS = {"signals": "*i64", "packets": "*i64", "number": "fp32", "count": "i32"}


def _word(kernel: core.Kernel, one: core.Param, variant: str, given: Specialised) -> Any:
    """Triton's type word of a pointer or a descriptor."""
    if one.sort in _WORDS:
        return _WORDS[one.sort]
    element = DTYPES[given.dtype].triton
    if one.sort == "view":
        return [f"*{element}", "i32"]
    is_described = variant == "sm90" or (given.tma and not leaves_by_pointers(kernel, one))
    if one.sort == "pointer" or not is_described:
        return f"*{element}"
    operands = [param.name for param in kernel.of(core.Param) if param.sort == "operand"]
    if compose.is_by_tables(kernel):  # results are not
        operands.append("")
    tile_m, tile_n, tile_k = given.tile
    block = (tile_m, tile_k)
    if one.name == operands[-2]:
        columns = gemm_sm90.block_columns(tile_n) if variant == "sm90" else tile_n
        block = (columns, tile_k) if given.b_is_nk else (tile_k, columns)
    if compose.is_summed_over_rows(kernel):
        block = compose.summed_block(kernel, one.name, given.tile)
    if one.name == operands[-1] or leaves_by_pointers(kernel, one):
        block = (tile_m, tile_n)
        if variant == "sm90":
            block = _chunk(given)
    if variant == "sm90":
        return _descriptor(block, given)
    return f"tensordesc<{element}[{block[0]}, {block[1]}]>"


def _chunk(given: Specialised) -> tuple[int, int]:
    """Rows and columns that the template for Hopper stores at once."""
    return gemm_sm90.chunk_of(*given.tile[:2])


def _descriptor(block: tuple[int, int], given: Specialised) -> str:
    """Of blocks as the template for Hopper has them in shared memory."""
    dtype = DTYPES[given.dtype]
    layout = descriptors_sm90.block_layout(block, dtype.itemsize)
    return f"tensordesc<{dtype.triton}[{block[0]}, {block[1]}],{layout!r}>"


def leaves_by_pointers(kernel: core.Kernel, one: core.Param) -> bool:
    """Is it a result that leaves the generic variant by pointers, since it is no whole tile?"""
    for hook in kernel.of(core.Hook):
        if hook.function in ("store_own", "store_value", "stage") and one.name in hook.args:
            return True
    return False
