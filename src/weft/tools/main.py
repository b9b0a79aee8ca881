"""`weft VERB`: the verbs joined into one program, and errors turned into exit codes.

0 fine, 1 found a problem, 2 misuse; 130 after Ctrl-C, as shells have it. Results go to stdout,
everything else to stderr.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.markup import escape
from typer.core import TyperCommand

from weft.base.errors import ConfigError, DtypeError, ShapeError, UsageError, WeftError
from weft.base.versions import version_of
from weft.ops import names
from weft.tools import console
from weft.tools.bench import bench
from weft.tools.check_verb import check
from weft.tools.compile import compile_kernels
from weft.tools.demo import demo
from weft.tools.doctor import doctor
from weft.tools.emulate import emulate
from weft.tools.explain import explain
from weft.tools.generate import generate
from weft.tools.lint import lint
from weft.tools.machine import machine
from weft.tools.make_tiny import make_tiny
from weft.tools.prepare import prepare
from weft.tools.run import run
from weft.tools.serve import serve
from weft.tools.simulate import simulate
from weft.tools.timeline import timeline, trace
from weft.tools.tune import tune
from weft.tools.verify import verify
from weft.tools.words import ScriptCommand

MISUSE = (UsageError, ShapeError, DtypeError, ConfigError)
# What typer raises for words that no verb understands; it does not name the class itself.
BadWords = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

ABOUT = (
    "Triton kernels that communicate between GPUs: run them on emulated ranks, find races and"
    " deadlocks, compile them, time them. Start with `weft demo` and docs/tutorial.md."
)

# Below each verb's help.
EXAMPLES = {
    "run": (
        "weft run ag_gemm --ranks 4",
        "weft run all_reduce --shape m=97,n=40 --dtype fp32 --target emu",
    ),
    "emulate": (
        "weft emulate examples/01_load.py --ranks 4",
        "weft emulate examples/05_find_the_bug.py --html bug.html",
        "weft emulate train.py --ranks 8 --nodes 2 -- --steps 3",
    ),
    "verify": (
        "weft verify ag_gemm --schedules 50",
        "weft verify all_reduce --exhaustive",
        "weft verify examples/06_all_gather.py --mutants",
        "weft verify --replay .weft/replays/FILE",
    ),
    "explain": (
        "weft explain ag_gemm --shape m=8192,n=7168,k=4096",
        "weft explain examples/13_program.py:mlp --show choices,times",
    ),
    "timeline": ("weft timeline ag_gemm --shape m=8192,n=7168,k=4096 -o plan.json",),
    "simulate": (
        "weft simulate examples/llama_mlp.py:mlp --ranks 8,64,512,4096 --shape m=65536",
        "weft simulate examples/llama_mlp.py:mlp --hw b200x8 --shape m=8192 --grow m -o weak.png",
    ),
    "trace": ("weft trace ag_gemm --transport ce_push -o tiles.json",),
    "bench": (
        "weft bench ag_gemm",
        "weft bench all_gather all_reduce --preset full -o results/",
    ),
    "lint": ("weft lint kernels.py", "weft lint src/"),
    "check": (
        "weft check neighbour.py --ranks 4",
        "weft check neighbour.py:read_neighbour --target cuda:90 -- --steps 3",
    ),
    "compile": (
        "weft compile ag_gemm --target cuda:90,hip:gfx942",
        "weft compile ag_gemm --shape m=1..4096,n=7168,k=4096 --target cuda:90 -o build",
        "weft compile neighbour.py --ranks 4 --target cuda:90 -o build",
        "weft compile examples/13_program.py:mlp --target cuda:90",
    ),
    "prepare": (
        "weft prepare ag_gemm --shape m=1..16384,n=7168,k=4096 --ranks 4",
        "weft prepare examples/13_program.py:mlp --shape m=1..4096 --ranks 2 --target cuda:90",
    ),
    "generate": (
        'weft generate --model tiny --prompt "The weft travels" --ranks 2',
        "weft generate --model tiny --prompt Hello --chat --temperature 0.8 --seed 7",
    ),
    "make-tiny": ("weft make-tiny tiny", "weft make-tiny tiny_moe --kind qwen3_moe"),
    "tune": (
        "weft tune gemm_rs --shape m=512..8192,n=4096,k=3584",
        "weft tune ag_gemm --shape m=64,n=32,k=48 --emulated 2",
    ),
    "machine": ("weft machine", "weft machine --ranks 2 --json"),
    "serve": ("weft serve --model tiny --ranks 2 --target emu",),
}
OF_OPERATORS = (
    "run", "verify", "explain", "timeline", "trace", "bench", "check", "compile", "prepare", "tune"
)  # fmt: skip

app = typer.Typer(
    name="weft",
    help=ABOUT,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        console.results().print(versions(), markup=False)
        raise typer.Exit(console.FINE)


@app.callback()
def weft(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True,
            metavar="", help="which weft, and which Triton and PyTorch it finds",
        ),
    ] = False,
) -> None:  # fmt: skip
    """What stands before a verb."""


def versions() -> str:
    """weft's version, and of what it stands on; "none" for what is not installed."""
    import weft as package

    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    found |= {name: version_of(name) or "none" for name in ("torch", "triton")}
    under = ", ".join(f"{name} {number}" for name, number in found.items())
    return f"weft {package.__version__} ({under})"


def _exiting(name: str, verb: Callable[..., int]) -> Callable[..., None]:
    """`verb` with the exit code it returns as the program's, and signs of life if it takes long."""

    @functools.wraps(verb)
    def command(*args, **options):
        try:
            with nullcontext() if name in LASTING else console.patience(name):
                code = verb(*args, **options)
        except KeyboardInterrupt as error:  # Ctrl-C
            what = f"interrupted: {error}" if error.args else "interrupted"
            console.notes().print(f"[bold red]weft:[/] {escape(what)}")
            code = console.INTERRUPTED
        raise typer.Exit(code)

    return command


def _epilog(verb: str) -> str:
    parts = []
    if verb in EXAMPLES:
        parts.append("\n".join(["Examples:", *(f"$ {example}" for example in EXAMPLES[verb])]))
    if verb in OF_OPERATORS:
        parts.append("Operators: " + ", ".join(names()))
    return escape("\n\n".join(parts))


VERBS: dict[str, tuple[Callable[..., int], type[TyperCommand]]] = {
    # A verb's function, and how its words are read.
    "doctor": (doctor, TyperCommand),
    "run": (run, TyperCommand),
    "emulate": (emulate, ScriptCommand),
    "verify": (verify, ScriptCommand),
    "lint": (lint, TyperCommand),
    "explain": (explain, TyperCommand),
    "timeline": (timeline, TyperCommand),
    "simulate": (simulate, TyperCommand),
    "trace": (trace, TyperCommand),
    "check": (check, ScriptCommand),
    "compile": (compile_kernels, ScriptCommand),
    "prepare": (prepare, TyperCommand),
    "tune": (tune, TyperCommand),
    "machine": (machine, TyperCommand),
    "bench": (bench, TyperCommand),
    "demo": (demo, TyperCommand),
    "serve": (serve, TyperCommand),
    "make-tiny": (make_tiny, TyperCommand),
    "generate": (generate, TyperCommand),
}
# Verbs that take as long as they are wanted, and say themselves that they live.
LASTING = ("serve",)
for _verb, (_function, _reads) in VERBS.items():
    app.command(_verb, cls=_reads, epilog=_epilog(_verb))(_exiting(_verb, _function))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; words that no verb understands give 2.

    With --json an error is JSON on stdout, too.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    is_json = "--json" in (words[: words.index("--")] if "--" in words else words)
    try:
        code = app(args=words, prog_name="weft", standalone_mode=not is_json)
        return code if isinstance(code, int) else console.FINE
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else console.FINE
    except BadWords as error:
        return _error_code(UsageError.__name__, error.format_message(), is_json, console.MISUSE)
    except WeftError as error:
        code = console.MISUSE if isinstance(error, MISUSE) else console.PROBLEM
        return _error_code(type(error).__name__, str(error), is_json, code)


def _error_code(kind: str, message: str, is_json: bool, code: int) -> int:
    if is_json:
        console.print_json({"ok": False, "error": {"kind": kind, "message": message}})
    console.notes().print(f"[bold red]weft:[/] {escape(message)}")
    return code


def entry() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
