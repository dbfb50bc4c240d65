"""The engine's process, as its parent sees it."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from jpaged.serve.client import EngineClient


class EngineProcess:
    """A running `python -m jpaged.serve.worker`, and the line to it.

    Attributes:
        client: Speaks with the engine.
    """

    def __init__(self, process: asyncio.subprocess.Process, client: EngineClient):
        self.client = client
        self._process = process

    @classmethod
    async def start(cls, options: Mapping[str, Any]) -> "EngineProcess":
        """Start a process that makes `Engine(**options)`."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "jpaged.serve.worker",
                str(theirs.fileno()),
                str(os.getpid()),
                pass_fds=[theirs.fileno()],
            )
        return cls(process, await EngineClient.connect(ours, options))

    async def stop(self, patience: float = 10.0) -> None:
        """End it: by asking, and after `patience` seconds by force."""
        await self.client.stop()
        try:
            await asyncio.wait_for(self._process.wait(), patience)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    async def how_it_ended(self, patience: float = 2.0) -> str:
        """In brackets, if a signal ended it of which nothing can be said over the line."""
        try:
            code = await asyncio.wait_for(self._process.wait(), patience)
        except TimeoutError:
            return ""
        if code >= 0:
            return ""
        hint = ": out of memory?" if code == -signal.SIGKILL else ""
        return f" (it was ended by {signal.Signals(-code).name}{hint})"

    def kill(self) -> None:
        """End it at once."""
        if self._process.returncode is None:
            self._process.kill()
