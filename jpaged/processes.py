"""How this process starts another Python, and how a child process ended."""

import json
import signal
import sys

_BEFORE = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this
sys.path[:] = json.loads(sys.argv[1])
"""


def python_command(code: str) -> list[str]:
    """The command line of a Python that runs `code`: it finds modules where this process does, and
    is not interrupted by Ctrl-C."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return [sys.executable, "-P", "-c", _BEFORE + code, json.dumps(path)]


def describe_exit(code: int) -> str:
    """Return the exit code of a child process in words, a signal by its name."""
    if code >= 0:
        return f"exit code {code}"
    hint = ": out of memory?" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


def has_python() -> bool:
    """Whether there is a Python to start; a frozen program is the caller's own."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)
