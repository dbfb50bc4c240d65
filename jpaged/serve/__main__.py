"""The command `python -m jpaged.serve`, which serves a model over HTTP.

The exit code is 0 if a signal ended the server and requests in flight could finish. It is 1 for an
error, 2 for a mistake in the command line, and 130 or 143 after a second signal.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server with the arguments `argv` (default: `sys.argv`) and return the exit code."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _exit_on_signal)
    # Import after the signal handlers are installed, because the imports take a while.
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
    """Exit with code 0, because no request can be in flight before the server has started."""
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
