"""What is said where a call was given something else than a world or a configuration.

Asked only where a call is new or has broken: a call's host time is microseconds.
"""

from __future__ import annotations

from typing import Any

from weft.base.errors import ConfigError, UsageError


def refuse(op: str, world: Any, config: Any) -> None:
    """Raises  UsageError: `world` is none; ConfigError: `config` is no operator's Config"""
    if not hasattr(world, "workspace"):
        raise UsageError(
            f"{op}: world={world!r} is of type {type(world).__name__}; pass what weft.init() "
            "returned"
        )
    if config is not None and not hasattr(config, "check"):
        raise ConfigError(
            f"{op}: config={config!r} is of type {type(config).__name__}; leave it out, or make "
            f"one: from weft.ops.{op} import Config"
        )
