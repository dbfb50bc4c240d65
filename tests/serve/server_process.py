"""Run a real server, `python -m jpaged.serve`, in a separate process."""

import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

ARGUMENTS = (
    *("--port", "0", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    *("--max-model-len", "256", "--num-blocks", "129"),
)


STUB = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "stub"), os.getcwd()])}
"""Environment variables that let a server use `StubEngine`, which starts without JAX."""


class ServerProcess:
    """Start a server and wait until it is ready.

    Attributes:
        url: Address of the server.
        process: The server's process.
        log: Output of the server so far.
    """

    def __init__(
        self,
        cache: Path,
        *arguments: str,
        wait: bool = True,
        num_files: int | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        command = [sys.executable, "-m", "jpaged.serve", *ARGUMENTS]
        command += ["--compilation-cache-dir", str(cache), *arguments]
        around = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=around)
        if num_files is not None:  # the server reads its limit on open files when it starts
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (num_files, num_files))
        self.log = ""
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self._ready.wait(120)
            assert self.url, self.log

    def wait(self, seconds: float = 30) -> int:
        """Wait for the server to exit and return the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        self._close()
        return code

    def end(self) -> None:
        """Stop the server if it runs."""
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)  # the engine process may keep the pipe open for a moment
        self._close()

    def _close(self) -> None:
        if self.process.stderr is not None and not self._reader.is_alive():
            self.process.stderr.close()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.log += line
            found = re.search(r"serving .* at (http://\S+)", line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()
