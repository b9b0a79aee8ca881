"""The HTTP server of an engine: each ends with the other."""

from __future__ import annotations

import socket
from types import FrameType

import uvicorn

from weft.base.errors import UsageError
from weft.serve.api import Served, make_app
from weft.serve.engine import Engine

# Open requests have an error by then, and their connections so long to carry it away.
LAST_ANSWERS_S = 5


def bind(host: str, port: int) -> socket.socket:
    """Before a model is loaded. Raises  UsageError: somebody listens there, or it is nowhere"""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); pass another --host or "
            "--port, 0 for any that is free"
        ) from error


class Server(uvicorn.Server):
    """Serves until Ctrl-C or SIGTERM, which end the engine too, or until that has ended."""

    def __init__(self, engine: Engine, served: Served) -> None:
        self.engine = engine
        super().__init__(
            uvicorn.Config(
                make_app(engine, served), log_level="warning", access_log=False,
                timeout_graceful_shutdown=LAST_ANSWERS_S,
            )
        )  # fmt: skip

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.engine.close()
        self.force_exit = self.should_exit  # asked for a second time
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.engine.ended is not None
