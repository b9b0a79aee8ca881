"""`weft bench OP`: measured against its baselines, side by side; answers are checked first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from weft.base.card import Op
from weft.base.errors import UsageError
from weft.tools import console, options
from weft.tools.programs import find_op
from weft.tools.run import count_gpus
from weft.tools.words import op_dtype, parse_shape, shape_text

AUTO = "auto"


def bench(
    ops: Annotated[
        list[str],
        typer.Argument(
            metavar="OP|FILE.py:PROGRAM..",
            autocompletion=options.complete_subject,
            help="operators, e.g. ag_gemm, or programs, which are timed beside library calls",
        ),
    ],
    preset: Annotated[
        str,
        options.option("NAME", "which points: quick, full, or a layer's name, e.g. llama3-8b-mlp"),
    ] = "quick",
    m: Annotated[str, options.option("M,..", "rows of layers, in place of a preset's")] = "",
    shape: Annotated[
        str,
        options.option(
            "m=..,n=..", "one point in place of a preset's: m is global, n and k are per rank"
        ),
    ] = "",
    dtype: options.Dtype = "",
    ranks: options.Gpus = None,
    modes: Annotated[
        str,
        options.option(
            "MODES",
            "some of graph,queued,eager; auto is eager, and graph for small sizes or queued "
            "for large ones",
            "--modes",
        ),
    ] = AUTO,
    named: Annotated[
        str,
        options.option(
            "NAMES",
            "some of weft, weft/each, weft/FIELD=VALUE/.. and the baselines (default: all)",
            "--variants",
        ),
    ] = "",
    rounds: Annotated[int, options.option("N", "interleaved rounds, at least 7")] = 9,
    seconds: Annotated[float | None, options.option("S", "begin no point after S seconds")] = None,
    output: Annotated[
        str,
        options.option(
            "FILE|FOLDER",
            "write JSON: a file, or a folder where there are several operators",
            "-o",
            "--output",
        ),
    ] = "",
    keep: Annotated[
        bool, options.flag("keep points of an existing file that are not measured", "--keep")
    ] = False,
    json: options.AsJson = False,
) -> int:
    """Time operators and programs on this machine's GPUs, beside cuBLAS, NCCL and torch."""
    from weft.tune.bench import Plan
    from weft.tune.protocol import MIN_ROUNDS
    from weft.tune.results import Results
    from weft.tune.supervision import start_on_gpus, supervised

    cards = [find_op(name) for name in ops]
    if rounds < MIN_ROUNDS:
        raise UsageError(f"--rounds {rounds}: a median takes at least {MIN_ROUNDS}")
    num_ranks = find_gpus(ranks)
    points = tuple(
        point
        for card in cards
        for point in chosen_points(card, preset, shape, m, op_dtype(card, dtype).name, num_ranks)
    )
    plan = Plan(
        with_modes(points, modes),
        num_ranks,
        tuple(filter(None, named.split(","))),
        rounds,
        time.time() + seconds if seconds else float("inf"),
    )
    results = Results(num_ranks, output, many=len(cards) > 1, keeps=keep)
    notes = console.notes()

    for word, values in supervised(plan, start_on_gpus(find_op)):
        results.take(word, values)
        if word in ("row", "failed"):
            notes.print(line_of(word, values), markup=False)
    if json:
        documents = list(results.documents.values())
        console.print_json(documents[0] if len(documents) == 1 else documents)
    else:
        for document in results.documents.values():
            show(document)
        for path in results.paths():
            console.results().print(f"written: {path}", markup=False)
    return console.FINE if results.is_fine else console.PROBLEM


def find_gpus(ranks: int | None) -> int:
    """How many GPUs to use.

    Raises  UsageError: too few are here
    """
    there = count_gpus()
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: at least one rank is needed")
    if there < (ranks or 1):
        raise UsageError(
            f"times are measured on GPUs: {ranks or 'at least one'} needed, {there} here. The "
            "emulator checks answers, but its time says nothing of a GPU's: use weft run or weft "
            "verify, or a machine with GPUs"
        )
    return ranks or there


def chosen_points(
    card: Op, preset: str, shape: str, m: str, dtype: str, num_ranks: int
) -> list[Any]:
    """Raises  UsageError: rows that are no numbers, or beside a shape"""
    from dataclasses import fields, replace

    from weft.tune.presets import Point, points_of

    words = [word.strip() for word in m.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"--m {m!r}: rows of layers, as in --m 16,512")
    if words and shape:
        raise UsageError(f"--m {m} beside --shape {shape}: the shape says m")
    if not shape:
        found = points_of(card.name, preset, num_ranks, [int(word) for word in words])
        return [replace(one, dtype=dtype) for one in found]
    sizes = parse_shape(shape, card.default_shape)
    # Weights as layers keep them, as the presets have them.
    has_layout = any(field.name == "b_is_nk" for field in fields(card.problem))
    extra = {"b_is_nk": True} if has_layout else {}
    return [Point(card.name, "", sizes, ("graph", "queued", "eager"), dtype, extra)]


def with_modes(points: tuple[Any, ...], modes: str) -> tuple[Any, ...]:
    """`points` in the modes that the command line names.

    Raises  UsageError: a mode that there is not
    """
    from dataclasses import replace

    from weft.tune.variants import MODES

    if modes == AUTO:
        return points
    named = tuple(word for word in modes.split(",") if word)
    if not named or not set(named) <= set(MODES):
        raise UsageError(f"--modes {modes!r}: {AUTO}, or some of {', '.join(MODES)}")
    return tuple(replace(point, modes=named) for point in points)


def line_of(word: str, values: Mapping[str, Any]) -> str:
    """One row or failure, as progress shows it."""
    what = f"{values['op']} {values['label']} {shape_text(values['shape'])}"
    if word == "failed":
        return f"{what} {values['mode'] or ''} {values['variant']}: FAILED {values['error']}"
    return f"{what} {values['mode']} {values['variant']}: {values['median_us']} us"


def show(document: Mapping[str, Any]) -> None:
    """A table for each operator; what failed comes below it."""
    out = console.results()
    out.print(f"{document['op']} on {document['hardware']}, commit {document.get('commit', '')}")
    rows = [
        (
            f"{row['label']} {shape_text(row['shape'])}",
            row["mode"],
            row["variant"],
            f"{row['median_us']:.1f}",
            f"{row['p10_us']:.1f} .. {row['p90_us']:.1f}",
            *(_number(row[name]) for name in ("ratio_to_serial", "ceiling", "overlap_efficiency")),
            "yes" if row["checked"] else "no",
        )
        for row in document["rows"]
    ]
    if rows:
        header = ("point", "mode", "variant", "us", "p10 .. p90", "x serial", "ceiling", "E")
        console.print_table(rows, *header, "checked")
    for failure in document["failed"]:
        out.print(line_of("failed", {"op": document["op"], **failure}), markup=False)
    for name in document["skipped"]:
        out.print(f"{name}: not begun, the time was over", markup=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
