"""What a folder of compiled calls holds: its format, its files by their contents, its checks.

    DIR/artefact.json       the manifest: operator, sizes, versions, targets, kernels, checksums
    DIR/kernels/HASH.cubin  (or .hsaco) one binary each
    DIR/calls/HASH.json     what calls of one rank queue at each size, merged (columns.py)

A file is called by the beginning of its contents' sha256, so equal contents are one file. The
manifest has the sha256 of each and one of itself. All of it is plain JSON and GPU binaries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.base.errors import UsageError

FORMAT = 1
MANIFEST = "artefact.json"
# Of a sha256's digits those that name a file.
DIGITS = 32


def text_of(value: Any) -> str:
    """As JSON, always the same for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_of(folder: str, content: bytes, ending: str) -> dict[str, str]:
    """Where a manifest says that such contents lie."""
    found = digest(content)
    return {"file": f"{folder}/{found[:DIGITS]}.{ending}", "sha256": found}


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """With the sha256 of everything else in it."""
    rest = {name: one for name, one in manifest.items() if name != "sha256"}
    return {**rest, "sha256": digest(text_of(rest).encode())}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises  UsageError: there is none, of another format, or changed since it was written"""
    path = folder / MANIFEST
    manifest = read_format(path, FORMAT, "artefact", f"weft compile OP --shape .. -o {folder}")
    found, said = sealed(manifest)["sha256"], manifest.get("sha256")
    if found != said:
        raise damaged(path, f"its contents have the sha256 {found}, but it says {said}")
    return manifest


def read_format(path: Path, number: int, kind: str, verb: str) -> dict[str, Any]:
    """JSON that says of which format it is. Raises  UsageError: none there, or of another"""
    try:
        values = json.loads(path.read_text())
        found = values["format"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is no {kind}: {error!r}; `{verb}` writes one") from error
    if found != number:
        raise UsageError(f"{path} has format {found}, this weft reads {number}: compile it again")
    return values


def entries(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    """Of each file, what it is called and its sha256."""
    for target in manifest["targets"].values():
        yield from target["kernels"].values()
        yield from target["calls"]
    yield from manifest["constants"]


def read_file(folder: Path, entry: Mapping[str, str]) -> bytes:
    """Raises  UsageError: it is not there, elsewhere than in the folder, or was changed"""
    path = folder / entry["file"]
    if folder.resolve() not in path.resolve().parents:
        raise damaged(folder / MANIFEST, f"{entry['file']} is outside of the folder")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise damaged(path, f"it cannot be read: {error.strerror}") from error
    if (found := digest(content)) != entry["sha256"]:
        raise damaged(
            path, f"its {len(content)} bytes have the sha256 {found}, but the manifest says "
            f"{entry['sha256']}"
        )  # fmt: skip
    return content


def damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path}: {why}; the artefact is damaged or was changed: copy it anew, or write it again "
        "by `weft compile`"
    )
