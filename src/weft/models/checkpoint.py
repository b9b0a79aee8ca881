"""A folder of safetensors files: which tensors it has, of what sizes, in which file.

One file, or several with an index. Headers are read at once, tensors by slices: what a rank does
not keep it does not read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.base.errors import UsageError
from weft.models.needed import needed

INDEX, ONE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Stored:
    """A tensor in `file`, an open one of this name."""

    name: str
    file: str
    opened: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.opened.get_slice(self.name).get_shape())

    def read(self, index: Sequence[slice]) -> Any:
        """A part of it, on the CPU."""
        return self.opened.get_slice(self.name)[tuple(index)]


def tensors_of(folder: Path) -> dict[str, Stored]:
    """All tensors by name.

    Raises  UsageError: there are no safetensors files, or a file that is named is none
    """
    if (folder / INDEX).is_file():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    elif (folder / ONE).is_file():
        files = [ONE]
    else:
        raise UsageError(
            f"{folder}: has neither {INDEX} nor {ONE}; weights are read from safetensors files, or "
            "drawn where random weights are asked for"
        )
    safetensors = needed("safetensors")
    found: dict[str, Stored] = {}
    for file in files:
        try:
            opened = safetensors.safe_open(str(folder / file), framework="pt")
        except (OSError, safetensors.SafetensorError) as error:
            raise UsageError(
                f"{folder / file}: cannot be read ({error}); copy it again: it is missing, cut off "
                "or a pointer to a large file"
            ) from error
        found |= {name: Stored(name, file, opened) for name in opened.keys()}
    return found
