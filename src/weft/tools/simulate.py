"""`weft simulate FILE.py:PROGRAM`: how a program's time goes with the number of ranks, predicted.

Ranks that do alike are played once (compiler/cost/alike.py), so thousands cost what one costs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.base.errors import UsageError
from weft.tools import console, options, pictures
from weft.tools.explain import subject_in_file
from weft.tools.words import shape_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.base.fabric import Fabric

COUNTS = "8,16,32,64,128,256,512,1024,2048,4096"
HEAD = ("ranks", "nodes", "shape", "by", "a call", "computes", "data moves", "hidden",
        "efficiency")  # fmt: skip
PREDICTED = (
    "predicted for {hw} by the compiler’s cost model, nothing was run; {nodes} ranks to a node."
    " Efficiency: {kind}"
)
KINDS = {
    False: "speed-up over the first row, divided by how many more ranks there are",
    True: "the first row’s time by this one’s, as {size} grows with the ranks",
}


@dataclass(frozen=True)
class Row:
    """One number of ranks; `by` are the engines of its collectives. Of the slowest rank: how long
    it computes and data moves, and in which part of the data's time it computed (`hidden`)."""

    ranks: int
    nodes: int
    shape: str
    by: str
    us: float
    computed_us: float
    moved_us: float
    hidden: float
    efficiency: float

    def as_words(self) -> tuple[str, ...]:
        """Under HEAD."""
        return (
            str(self.ranks), str(self.nodes), self.shape, self.by, f"{self.us:,.0f} µs",
            f"{self.computed_us:,.0f} µs", f"{self.moved_us:,.0f} µs",
            f"{self.hidden:.0%}" if self.moved_us else "–", f"{self.efficiency:.0%}",
        )  # fmt: skip


def simulate(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:PROGRAM",
            help="a tensor program, e.g. examples/llama_mlp.py:mlp",
            autocompletion=options.complete_file,
        ),
    ],
    ranks: Annotated[
        str, options.option("N,N,..", "how many ranks, one number after the other")
    ] = COUNTS,
    per_node: Annotated[int, options.option("N", "ranks of a scale-up domain", min=1)] = 8,
    shape: options.Shape = "",
    grow: Annotated[
        str, options.option("SIZE", "a size that grows with the ranks: weak scaling")
    ] = "",
    target: options.PlanTarget = "cuda:90",
    hw: options.Machine = "h200x8",
    leaf: Annotated[
        int, options.option("N", "nodes on one switch of their rail; 0: all on one", min=0)
    ] = 0,
    oversubscription: Annotated[
        float, options.option("X", "so much slower is what passes the second level of switches")
    ] = 1.0,
    slow: Annotated[
        float, options.option("X", "products of each node's first GPU take X times as long")
    ] = 1.0,
    output: Annotated[
        str, options.option("FILE.png", "also draw it (needs matplotlib)", "-o", "--output")
    ] = "",
    json: options.AsJson = False,
) -> int:
    """Predict a program's time on up to thousands of ranks, node by node, without running it."""
    from weft.base.fabric import Fabric

    check_drawing(output)
    fabric = Fabric(leaf, oversubscription, slow=slow)
    found = rows(subject, _counts(ranks), per_node, shape, grow, target, hw, fabric)
    kind = KINDS[bool(grow)].format(size=grow)
    if json:
        console.print_json({"program": subject, "hw": hw, "rows": [asdict(one) for one in found]})
    else:
        console.print_table([one.as_words() for one in found], *HEAD)
    console.notes().print(f"[dim]{PREDICTED.format(hw=hw, nodes=per_node, kind=kind)}[/]")
    if output:
        draw(output, f"{subject}, {hw}", found)
        console.notes().print(f"[dim]drawn in {output}[/]")
    return console.FINE


def rows(
    subject: str, counts: Sequence[int], per_node: int, shape: str, grow: str, target: str,
    hw: str, fabric: Fabric,
) -> list[Row]:  # fmt: skip
    """One for each number of ranks.

    Raises  UsageError: a number that nodes of `per_node` ranks do not divide, a size that is none
    """
    from weft.base.machines import find_machine
    from weft.base.spans import total, union
    from weft.compiler.cost.plans import predict
    from weft.ir.choice import Choice
    from weft.tools.schedule import chart

    made: list[Row] = []
    machine = find_machine(hw)
    for count in counts:
        nodes = max(1, count // per_node)
        if count > per_node and count % per_node:
            raise UsageError(f"--ranks {count}: it is no multiple of the {per_node} of a node")
        given = _grown(shape, grow, count / counts[0])
        at = subject_in_file(subject, count, str(nodes), given, target, hw)
        # Engines and tiles are chosen for this machine, too.
        facts = replace(at.facts, target=replace(at.facts.target, machine=machine))
        plan = replace(at, facts=facts).plan
        played = predict(
            plan, facts.sizes, count, machine, facts.nodes, alike=True, fabric=fabric
        )  # fmt: skip
        slowest = max(chart.chart_of(played.spans).totals, key=lambda one: one.end_us)
        computed = [
            (one.start_us, one.end_us) for one in played.spans
            if one.rank == slowest.rank and one.kind in ("work", "torch")
        ]  # fmt: skip
        us, times = slowest.end_us, made[0].us / slowest.end_us if made else 1.0
        engines = [one.taken for one in plan.of(Choice) if one.what == "engine"]
        made.append(Row(
            count, nodes, shape_text(facts.sizes), ", ".join(dict.fromkeys(map(str, engines))), us,
            total(union(computed)), slowest.moved_us, slowest.hidden,
            times * (1.0 if grow else counts[0] / count),
        ))  # fmt: skip
    return made


def _counts(words: str) -> list[int]:
    try:
        counts = [int(word) for word in words.split(",")]
    except ValueError:
        raise UsageError(f"--ranks {words}: numbers with commas between them, e.g. 8,64") from None
    if any(one < 1 for one in counts) or counts != sorted(set(counts)):
        raise UsageError(f"--ranks {words}: numbers that rise, from 1 on")
    return counts


def _grown(shape: str, grow: str, times: float) -> str:
    """The sizes as words, with one of them as many times as large."""
    if not grow:
        return shape
    sizes = dict(word.partition("=")[::2] for word in shape.replace(" ", "").split(","))
    if not sizes.get(grow, "").isdigit():
        message = f"--grow {grow}: say how large it is on the first number of ranks"
        raise UsageError(f"{message}, --shape {grow}=..")
    sizes[grow] = str(int(int(sizes[grow]) * times))
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def check_drawing(path: str) -> None:
    """Refuse a picture that cannot be drawn, before the work. An empty path asks for none.

    Raises  UsageError: there is no matplotlib, an ending that it does not know; as
            pictures.check_path
    """
    if not path:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UsageError(f"-o {path}: pictures need matplotlib; pip install matplotlib") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if PurePath(path).suffix[1:].lower() not in known:
        raise UsageError(
            f"-o {path}: name a file that ends in .png, or in another of {', '.join(sorted(known))}"
        )
    pictures.check_path(path, "-o")


def draw(path: str, title: str, found: Sequence[Row]) -> None:
    """Time and efficiency over ranks, in a file that `check_drawing` has let pass.

    Raises  UsageError: the file cannot be written
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    ranks: list[Any] = [one.ranks for one in found]
    left.loglog(ranks, [one.us for one in found], "o-", base=2, label="a call")
    left.loglog(ranks, [one.computed_us for one in found], "s--", base=2, label="computes")
    left.set(xlabel="ranks", ylabel="µs", title=title)
    left.legend()
    right.semilogx(ranks, [100 * one.efficiency for one in found], "o-", base=2)
    right.set(xlabel="ranks", ylabel="efficiency, %", ylim=(0, 110), title="predicted")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UsageError(f"-o {path}: {error.strerror}") from None
    finally:
        plt.close(figure)
