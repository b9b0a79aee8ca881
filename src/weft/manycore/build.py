"""The host's C compiler: a program's C to a binary, kept by what it was made of."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

from weft.base.errors import UnsupportedError, WeftError
from weft.base.settings import Settings

# The order of sums is the program's own: no contraction to fused multiply-adds, which round once.
FLAGS = ("-std=c11", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread")
SANITIZED = ("-fsanitize=thread", "-g")
BLAS = ("-DMC_BLAS", "-lcblas")
HEADER = "manycore.h"


def find_compiler() -> str:
    """The C compiler: $CC, or cc, gcc or clang.

    Raises  UnsupportedError: there is none
    """
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise UnsupportedError(
        "no C compiler: cc, gcc and clang are not on the path; install one (Debian: apt install "
        "gcc; macOS: xcode-select --install), or set CC"
    )


@cache
def has(*flags: str) -> bool:
    """Does the compiler make a program that runs with these flags?"""
    text = "#include <cblas.h>\n" if BLAS[0] in flags else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.c")
        path.write_text(f"{text}int main(void) {{ return 0; }}\n")
        binary = str(path.with_suffix(""))
        command = [find_compiler(), str(path), "-o", binary, *flags]
        if subprocess.run(command, capture_output=True).returncode:
            return False
        return subprocess.run([binary], capture_output=True).returncode == 0


def header() -> str:
    """The runtime's text."""
    return resources.files("weft.manycore").joinpath(HEADER).read_text()


def write(folder: Path, name: str, source: str) -> Path:
    """The program's C with the header beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).write_text(header())
    path = folder / f"{name}.c"
    path.write_text(source)
    return path


def compile_c(name: str, source: str, *, sanitize: bool = False) -> Path:
    """The binary of a program: made once for one text, compiler and set of flags.

    Raises  UnsupportedError: there is no compiler; WeftError: it refuses the program, a bug of weft
    """
    flags = (*FLAGS, *(SANITIZED if sanitize else ()))
    libraries = BLAS if "MC_BLAS" in source and not sanitize and has(*BLAS) else ()
    made_of = "\n".join([find_compiler(), *flags, *libraries, header(), source])
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    folder = cache_folder() / f"{name}_{digest}"
    binary = folder / name
    if binary.exists():
        return binary
    path = write(folder, name, source)
    # Made under another name: several processes may want it at once.
    fresh = folder / f"{name}.{os.getpid()}"
    command = [find_compiler(), *flags, str(path), "-o", str(fresh), *libraries, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise WeftError(f"{' '.join(command)}\n{done.stderr.strip()}")
    fresh.rename(binary)
    return binary


def cache_folder() -> Path:
    given = Settings.from_environment().cache_dir
    return Path(given or Path.home() / ".cache" / "weft") / "manycore"
