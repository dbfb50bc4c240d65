"""`python -m jpaged.serve`: serve a model over OpenAI's HTTP API.

Exit codes: 0 after a signal that let requests in flight end, 1 for an error, 2 for a mistake in the
command line, 130 or 143 after a second signal.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _exit_on_signal)
    # Loading these takes a while, in which a signal may come already.
    from jpaged.serve.errors import log_line
    from jpaged.serve.options import read_flags

    flags = read_flags(argv)
    if "model" in flags.engine:
        from jpaged import check_model

        try:
            check_model(flags.engine["model"])
        except ValueError as error:
            log_line(f"error: {error}")
            return 1

    from jpaged.serve.http.lifecycle import run_server

    return run_server(flags)


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    """What a signal does until the server knows better: nothing is in flight, nothing to end."""
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
