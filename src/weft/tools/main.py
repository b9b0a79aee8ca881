"""`weft VERB`: the verbs joined into one program, and errors turned into exit codes.

0 fine, 1 found a problem, 2 misuse; 130 after Ctrl-C, as shells have it. Results go to stdout,
everything else to stderr.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.markup import escape

from weft.base.errors import ConfigError, DtypeError, ShapeError, UsageError, WeftError
from weft.tools import console
from weft.tools.bench import bench
from weft.tools.compile import compile_op
from weft.tools.doctor import doctor
from weft.tools.emulate import emulate
from weft.tools.explain import explain
from weft.tools.lint import lint
from weft.tools.run import run
from weft.tools.timeline import timeline
from weft.tools.tracing import trace
from weft.tools.verify import verify
from weft.tools.words import ScriptCommand

MISUSE = (UsageError, ShapeError, DtypeError, ConfigError)
# What typer raises for words that no verb understands; it does not name the class itself.
BadWords = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="weft",
    help="Distributed tile programs: run them on emulated ranks, prove them right, compile them.",
    no_args_is_help=True,
    add_completion=False,
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
            help="which weft, and which Triton and PyTorch it finds",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Distributed tile programs: run them on emulated ranks, prove them right, compile them."""


def versions() -> str:
    """weft's version, and of what it stands on; "none" for what is not installed."""
    import weft as package

    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    under = ", ".join(f"{name} {number}" for name, number in found.items())
    return f"weft {package.__version__} ({under})"


def _exiting(verb: Callable[..., int], *, emulates: bool = False) -> Callable[..., None]:
    """`verb` with the exit code it returns as the program's; of one that `emulates`, where a run
    is that takes long."""

    @functools.wraps(verb)
    def command(*args, **options):
        try:
            with console.patience() if emulates else nullcontext():
                code = verb(*args, **options)
        except KeyboardInterrupt as error:  # Ctrl-C
            what = f"interrupted: {error}" if error.args else "interrupted"
            console.notes().print(f"[bold red]weft:[/] {escape(what)}")
            code = console.INTERRUPTED
        raise typer.Exit(code)

    return command


app.command("doctor")(_exiting(doctor))
app.command("run")(_exiting(run, emulates=True))
app.command("emulate", cls=ScriptCommand)(_exiting(emulate, emulates=True))
app.command("verify", cls=ScriptCommand)(_exiting(verify, emulates=True))
app.command("explain")(_exiting(explain))
app.command("timeline")(_exiting(timeline))
app.command("trace")(_exiting(trace))
app.command("bench")(_exiting(bench))
app.command("lint")(_exiting(lint))
app.command("compile")(_exiting(compile_op))


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
        return _told(UsageError.__name__, error.format_message(), is_json, console.MISUSE)
    except WeftError as error:
        code = console.MISUSE if isinstance(error, MISUSE) else console.PROBLEM
        return _told(type(error).__name__, str(error), is_json, code)


def _told(kind: str, message: str, is_json: bool, code: int) -> int:
    if is_json:
        console.print_json({"ok": False, "error": {"kind": kind, "message": message}})
    console.notes().print(f"[bold red]weft:[/] {escape(message)}")
    return code


def entry() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
