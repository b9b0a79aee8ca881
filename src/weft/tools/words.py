"""The command line's words as values: shapes, dtypes, targets, operators, a script's arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from typer.core import TyperCommand

from weft.base.card import Op
from weft.base.counts import counted
from weft.base.dtypes import Dtype, parse_dtype
from weft.base.errors import ShapeError, UsageError
from weft.base.target import Target, parse_target
from weft.base.topology import DEFAULT_RANKS, Topology, parse_nodes
from weft.manycore.record import NAME as MANYCORE
from weft.manycore.record import is_manycore


def parse_shape(text: str | None, default: Mapping[str, int]) -> dict[str, int]:
    """`m=256,n=256,k=256` over `default`; a size that is left out keeps the default's, which may be
    -1 where the operator then finds it.

    Raises  ShapeError: a word that is no size, a name that the operator has not, a negative size
    """
    shape = dict(default)
    for word in (text or "").replace(" ", "").split(","):
        if not word:
            continue
        name, equals, value = word.partition("=")
        if not equals or not value.lstrip("+-").isdigit():
            raise ShapeError(f"--shape: {word!r} is not NAME=SIZE; write {_example(default)}")
        if name not in default:
            raise ShapeError(f"--shape: no size is called {name!r}; write {_example(default)}")
        if int(value) < 0 and int(value) != default[name]:
            raise ShapeError(f"--shape: {name}={value} is negative")
        shape[name] = int(value)
    return shape


def _example(default: Mapping[str, int]) -> str:
    return "--shape " + ",".join(f"{name}={size}" for name, size in default.items())


def parse_some(option: str, text: str, known: Collection[str]) -> list[str]:
    """The words of `text`, with commas between them.

    Raises  UsageError: one that is not among those that are known
    """
    words = [word for word in text.replace(" ", "").split(",") if word]
    if unknown := [word for word in words if word not in known]:
        raise UsageError(f"{option} {text}: {unknown[0]!r} is none of {', '.join(known)}")
    return words


def shape_text(shape: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in shape.items())


def parse_topology(ranks: int | None, nodes: str) -> Topology:
    """`--ranks 4 --nodes 2`, or `--nodes 3+1` with the number of ranks left out or equal.

    Raises  UsageError: fewer ranks than nodes, or sizes that do not add up
    """
    known = parse_nodes(nodes)
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: at least one rank is needed")
    if isinstance(known, int) and not 1 <= known <= (ranks or DEFAULT_RANKS):
        most = ranks or DEFAULT_RANKS
        room = ("1 to " if most > 1 else "") + counted(most, "node")
        raise UsageError(f"--nodes {nodes}: {counted(most, 'rank')} can be on {room}")
    if not isinstance(known, int) and ranks not in (None, sum(known)):
        raise UsageError(
            f"--nodes {nodes}: these nodes hold {sum(known)} ranks, and --ranks says {ranks}"
        )
    return Topology.of(ranks, known)


def parse_targets(text: str, others: Sequence[str] = ()) -> list[Target]:
    """Raises  UsageError: none, or as find_target"""
    targets = [find_target(word, others) for word in text.split(",") if word.strip()]
    if not targets:
        raise UsageError("--target is empty; write for example cuda:90,hip:gfx942")
    return targets


def find_target(text: str, others: Sequence[str] = ()) -> Target:
    """One target; `others` are what the verb takes alone, in place of one.

    Raises  UsageError: an unknown one, a many-core machine where kernels are meant
    """
    if is_manycore(text.strip()):
        remedy = "name it alone" if MANYCORE in others else "weft compile writes its C"
        raise UsageError(f"--target {text.strip()}: Triton has no kernels for it; {remedy}")
    return parse_target(text, others)


def op_dtype(op: Op, text: str, default: str = "bf16") -> Dtype:
    """The dtype named `text`; "" is `default`, or of a program, whose dtypes are its own, these."""
    if not text:
        text = default if parse_dtype(default).name in op.dtypes else op.dtypes[0]
    dtype = parse_dtype(text)
    if dtype.name not in op.dtypes:
        raise UsageError(f"{op.name} takes {', '.join(op.dtypes)}, not {dtype.name}")
    return dtype


def is_file(word: str) -> bool:
    """A script, or what a file defines; not an operator."""
    return ".py" in word


def is_in_file(word: str) -> bool:
    """Is it a file's program or kernel, FILE.py:NAME?"""
    return ".py:" in word


def is_script(word: str) -> bool:
    return not is_in_file(word) and (word.endswith(".py") or "/" in word)


def find_script(path: str) -> Path:
    """Raises  UsageError: no such file; the message says what an operator is run by"""
    from weft.ops import names

    script = Path(path)
    if not script.is_file():
        file = path.partition(":")[0]
        hint = f"; {path} is an operator: weft run {path}" if path in names() else ""
        if file != path and Path(file).is_file():
            hint = f"; name all of it, {file}, or run the program by itself: weft run {path}"
        raise UsageError(f"there is no script {path}{hint}")
    return script


class ScriptCommand(TyperCommand):
    """A verb that takes a script: what follows `--` belongs to the script, unread."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            args, ctx.meta["script_args"] = args[:cut], args[cut + 1 :]
        return super().parse_args(ctx, args)
