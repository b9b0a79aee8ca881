"""`weft doctor`: what is here, what will work and what not, with the remedy."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from typing import Any

from weft.base.counts import counted
from weft.base.target import TARGETS
from weft.base.versions import version_of
from weft.tools import console, options
from weft.tools.run import count_gpus

LIBRARIES = {
    "torch": "2.11",
    "triton": "3.6",
    "numpy": "2.0",
    "ml_dtypes": "0.4",
    "greenlet": "3.0",
}

# What a machine need not be able to do.
GPUS = "run on GPUs"
NODES = "reach GPUs of other nodes"
MANY_CORES = "run programs for many cores"


@dataclass(frozen=True)
class Ability:
    """Something weft can or cannot do here; `remedy` says what to do where it cannot."""

    name: str
    ok: bool
    detail: str = ""
    remedy: str = ""


def doctor(json: options.AsJson = False) -> int:
    """Show what works on this machine (versions, GPUs, links), and how to repair what does not."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: version_of(name) or None for name in LIBRARIES}
    abilities = [libraries(versions)]
    found: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    # What one library is missing for need not keep the others from being looked at.
    if versions["torch"] and versions["triton"]:
        found = gpus()
        links = peer_links(len(found))
        from weft.tools.probe import compile_one_kernel, emulate_one_kernel

        abilities.append(_try("emulate", emulate_one_kernel, "any number of ranks, all checks"))
        abilities += [_try(f"compile for {target}", partial(compile_one_kernel, target))
                      for target in TARGETS.values()]  # fmt: skip
        abilities += [cuda(found, links), far_nodes()]
    abilities.append(many_cores())
    essential = [one for one in abilities if one.name not in (GPUS, NODES, MANY_CORES)]
    values = {
        "versions": versions,
        "gpus": found,
        "links": links,
        "abilities": [asdict(ability) for ability in abilities],
        "ok": all(ability.ok for ability in essential),
    }
    console.print_json(values) if json else show(values)
    return console.FINE if values["ok"] else console.PROBLEM


def libraries(versions: dict[str, str | None]) -> Ability:
    """Every library that weft stands on, at least as new as it needs."""
    wrong = [
        f"{name} {versions[name] or 'missing'} (needs {least})"
        for name, least in LIBRARIES.items()
        if _numbers(versions[name] or "") < _numbers(least)
    ]
    remedy = "pip install " + " ".join(
        f"'{name}>={LIBRARIES[name]}'" for name in (word.split()[0] for word in wrong)
    )
    return Ability("libraries", not wrong, ", ".join(wrong) or "all there", remedy if wrong else "")


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split("+")[0].split(".")[:2]
    return tuple(int(word) for word in words if word.isdigit())


def _try(name: str, action: Callable[[], None], detail: str = "") -> Ability:
    remedy = "make setup, or reinstall triton and the libraries named above"
    try:
        action()
    except Exception as error:  # a doctor reports what is broken, whatever it is
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Ability(name, False, reason, remedy)
    return Ability(name, True, detail)


def gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for index in range(count_gpus()):
        info = torch.cuda.get_device_properties(index)
        arch = f"sm_{info.major}{info.minor}"
        if torch.version.hip:
            arch = info.gcnArchName.split(":")[0]
        found.append(
            {"index": index, "name": info.name, "memory_bytes": info.total_memory,
             "sms": info.multi_processor_count, "arch": arch}
        )  # fmt: skip
    return found


def peer_links(count: int) -> list[dict[str, Any]]:
    """Every ordered pair of GPUs: whether one reads the other's memory, and over what."""
    if count < 2:
        return []
    import torch

    kinds = _topology()
    return [
        {"from": a, "to": b, "peer_access": torch.cuda.can_device_access_peer(a, b),
         "link": kinds.get((a, b), "unknown")}
        for a, b in permutations(range(count), 2)
    ]  # fmt: skip


def _topology() -> dict[tuple[int, int], str]:
    """nvidia-smi's matrix of links (NV18, PIX, SYS ...) by pair; empty where there is none."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    links = {}
    for line in text.splitlines():
        gpu, *words = line.split() or [""]
        if gpu[:3] == "GPU" and gpu[3:].isdigit() and not words[0].startswith("GPU"):
            links |= {(int(gpu[3:]), b): word for b, word in enumerate(words)}
    return links


def cuda(found: list[dict[str, Any]], links: list[dict[str, Any]]) -> Ability:
    """Ranks on GPUs need one GPU each and peer access between all of them."""
    import torch

    if not found and (torch.version.cuda or torch.version.hip):
        remedy = "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
        return Ability(GPUS, False, "no GPU is visible", remedy)
    if not found:
        remedy = "install torch with CUDA; until then everything runs with --target emu"
        return Ability(GPUS, False, f"torch {torch.__version__} is a CPU build", remedy)
    deaf = [f"{link['from']}->{link['to']}" for link in links if not link["peer_access"]]
    if deaf:
        remedy = "use GPUs of one NVLink or PCIe domain"
        return Ability(GPUS, False, f"no peer access {', '.join(deaf)}", remedy)
    return Ability(GPUS, True, f"up to {counted(len(found), 'rank')}")


def far_nodes() -> Ability:
    """Worlds over several nodes need NVSHMEM, twice: torch's, and its device code."""
    from weft.runtime.backends import nvshmem

    if reason := nvshmem.why_not():
        return Ability(NODES, False, reason, nvshmem.REMEDY)
    return Ability(NODES, True, "through NVSHMEM")


def many_cores() -> Ability:
    """C programs need the host's compiler; their slow tests, its ThreadSanitizer."""
    from weft.base.errors import UnsupportedError
    from weft.manycore import build

    try:
        found = build.find_compiler()
    except UnsupportedError as error:
        return Ability(MANY_CORES, False, "no C compiler", str(error).partition("; ")[2])
    missing = [] if build.has(*build.SANITIZED) else ["without ThreadSanitizer"]
    missing += [] if build.has(*build.BLAS) else ["without BLAS: plain loops in its place"]
    return Ability(MANY_CORES, True, ", ".join([f"by {found}", *missing]))


def show(values: dict[str, Any]) -> None:
    out = console.results()
    out.print("[bold]versions[/]")
    console.print_table([(f"  {n}", v or "missing") for n, v in values["versions"].items()])
    out.print("[bold]GPUs[/]" + ("" if values["gpus"] else "  none"))
    if values["gpus"]:
        console.print_table([
            (f"  {gpu['index']}", gpu["name"], gpu["arch"],
             f"{gpu['memory_bytes'] / 2**30:.0f} GiB", f"{gpu['sms']} SMs")
            for gpu in values["gpus"]
        ])  # fmt: skip
    if values["links"]:
        out.print("[bold]links[/]")
        console.print_table([
            (f"  {link['from']} -> {link['to']}", link["link"],
             "peer access" if link["peer_access"] else "no peer access")
            for link in values["links"]
        ])  # fmt: skip
    out.print("[bold]what works[/]")
    for ability in values["abilities"]:
        mark = "[green]yes[/]" if ability["ok"] else "[red]no [/]"
        out.print(f"  {mark}  {ability['name']}  [dim]{ability['detail']}[/]")
        if ability["remedy"]:
            out.print(f"       remedy: {ability['remedy']}", markup=False)
