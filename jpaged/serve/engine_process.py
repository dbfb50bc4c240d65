"""The engine's process, as its parent sees it."""

import asyncio
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

    def kill(self) -> None:
        """End it at once."""
        if self._process.returncode is None:
            self._process.kill()
