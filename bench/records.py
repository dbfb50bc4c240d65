"""Print a benchmark's results as a table, and write them as JSON to `bench/results/`."""

import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
from tabulate import tabulate

RESULTS = Path(__file__).parent / "results"


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, with the suffix "-dirty" if it has uncommitted changes.

    Return "unknown" if the folder is in no git repository.
    """
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    return found.stdout.strip() or "unknown"


# Read the commit at import, because the repository may change during a long run.
COMMIT = commit_of(Path(__file__).parent)


def record(
    name: str,
    rows: list[dict],
    *,
    device: str | None = None,
    folder: Path | None = None,
    by: Sequence[str] = (),
    **more: object,
) -> Path:
    """Write a benchmark's rows, device, versions and settings to a file; return its path.

    Args:
        name: Name of the benchmark.
        rows: The measured rows.
        device: Name of the device; None for the first device of this process.
        folder: Folder of the file (bench/results).
        by: Keys that identify a row. If given, new rows replace only the recorded rows with the
            same values of these keys, so that some rows can be measured again without the others.
            Each row then records its commit.
        more: Settings of the run, which are added to the file.
    """
    path = result_path(name, device, folder)
    if by:
        rows = _with_earlier(path, [row | {"commit": COMMIT} for row in rows], by)
    document = {
        "benchmark": name,
        "device": device or jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": COMMIT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **more,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def _with_earlier(path: Path, rows: list[dict], by: Sequence[str]) -> list[dict]:
    """Return the rows recorded at `path`, with `rows` merged in.

    A new row replaces the recorded row with the same values of the keys `by`. Other new rows come
    last.
    """
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    found = {
        tuple(row.get(name) for name in by): {"commit": earlier.get("commit")} | row
        for row in earlier["rows"]
    }
    return [*(found | {tuple(row.get(name) for name in by): row for row in rows}).values()]


def result_path(name: str, device: str | None = None, folder: Path | None = None) -> Path:
    """Return the path of the file that `record` writes for this benchmark and device."""
    kind = (device or jax.local_devices()[0].device_kind).replace(" ", "-").lower()
    return (folder or RESULTS) / f"{name}_{kind}.json"


def print_table(rows: list[dict]) -> None:
    """Print rows as an aligned table; the keys of the first row are the columns."""
    print(tabulate(rows, headers="keys", floatfmt=",.4g", missingval="-"))
