"""Benchmarks: each script prints a table and writes JSON to `bench/results/`."""

import sys
from importlib.util import find_spec

NEEDED = ("aiohttp", "tabulate")
"""Packages that the scripts import; `pip install "jpaged[bench]"` installs them."""

INSTALL = 'pip install "jpaged[bench]"'


def _require_extra() -> None:
    """Exit with an error unless the packages in `NEEDED` are installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"error: the benchmarks need {' and '.join(missing)}: {INSTALL}")


if sys.argv[0] == "-m":  # `python -m bench.NAME` imports this package before it runs the script.
    _require_extra()
