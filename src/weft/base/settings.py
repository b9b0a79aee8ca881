"""Settings, read once per world from the environment; the one list of weft's variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from weft.base.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """Each field is read from WEFT_<NAME>.

    Units   timeout_s: seconds a wait may take; init_timeout_s: seconds that weft.init waits for the
            ranks that have not come; heap_bytes: symmetric heap of one rank;
            heap_limit: what it may grow to, segment by segment; 0 or less than it has: it does not;
            slots: of each workspace; one is slower than two, and takes half the memory;
            kept_calls: kinds of calls, by operator, sizes and layout, of which a world keeps how
            they are done; kept_recordings: their launches, recorded; the latest used of both;
            nodes: which ranks are near each other on GPUs, 2 or 3+1; "" is each host a node;
            share_gpus: ranks beyond a host's GPUs share them. They take turns on a GPU, so answers
            are right and times mean nothing; torch's own collectives go through Gloo;
            endless_turns: turns of an emulated loop without an access to memory
    trace_tiles: of how many tiles a product leaves a trace, see World.trace; 0 costs nothing
    strict: kernels that Triton's cache has not are errors; see weft.prepare
    cache_dir: where the source of persistent kernels is kept; "" is the user's cache folder
    choices: the folder of what `weft tune` measured; "" is weft_choices beside Triton's cache, for
    emulated ranks none; "off": nothing that was measured is taken
    """

    timeout_s: float = 10.0
    init_timeout_s: float = 60.0
    heap_bytes: int = 1 << 30
    heap_limit: int = 0
    bounded_waits: bool = True
    slots: int = 2
    kept_calls: int = 1024
    kept_recordings: int = 1024
    nodes: str = ""
    share_gpus: bool = False
    endless_turns: int = 10_000_000
    trace_tiles: int = 0
    cache_dir: str = ""
    choices: str = ""
    strict: bool = False

    @classmethod
    def from_environment(cls, **overrides: object) -> Settings:
        values: dict[str, object] = {}
        for field in fields(cls):
            text = os.environ.get(f"WEFT_{field.name.upper()}")
            if text is not None:
                values[field.name] = _parse(field.name, text, type(field.default))
        values.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**values)  # type: ignore[arg-type]


def _parse(name: str, text: str, kind: type) -> object:
    try:
        if kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise UsageError(f"WEFT_{name.upper()}={text!r} is not a {kind.__name__}") from None
