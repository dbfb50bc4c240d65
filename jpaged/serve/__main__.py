"""`python -m jpaged.serve`: serve a model over OpenAI's HTTP API.

Exit codes: 0 after a signal that let requests in flight end, 1 for an error, 2 for a mistake in the
command line, 130 or 143 after a second signal.
"""

import sys
from collections.abc import Sequence

from jpaged.serve.flags import read_flags
from jpaged.serve.lifecycle import run_server


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code."""
    return run_server(read_flags(argv))


if __name__ == "__main__":
    sys.exit(main())
