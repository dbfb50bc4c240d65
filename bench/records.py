"""A benchmark's outcome: a table on the terminal, JSON in `bench/results/`."""

import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
from tabulate import tabulate

RESULTS = Path(__file__).parent / "results"


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return found.stdout.strip() or "unknown"


COMMIT = _commit()  # of the code that runs, which may be committed anew before a long run ends


def record(
    name: str,
    rows: list[dict],
    *,
    device: str | None = None,
    folder: Path | None = None,
    by: Sequence[str] = (),
    **more: object,
) -> Path:
    """Write a benchmark's rows with what they were measured on; returns the file.

    Args:
        name: Of the benchmark.
        rows: What was measured.
        device: What was measured, for a benchmark whose own process leaves the device alone.
        folder: Of the file (bench/results).
        by: What a row is known by. Rows of the earlier record that no new row has the place of are
            kept, so that a part can be measured again; each row tells its commit.
        more: The settings of the run.
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
    """The recorded rows, those measured anew replaced in their places; then what is new."""
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    found = {
        tuple(row.get(name) for name in by): {"commit": earlier.get("commit")} | row
        for row in earlier["rows"]
    }
    return [*(found | {tuple(row.get(name) for name in by): row for row in rows}).values()]


def result_path(name: str, device: str | None = None, folder: Path | None = None) -> Path:
    """Where `record` writes."""
    kind = (device or jax.local_devices()[0].device_kind).replace(" ", "-").lower()
    return (folder or RESULTS) / f"{name}_{kind}.json"


def print_table(rows: list[dict]) -> None:
    """Rows as an aligned table; the keys of the first are the columns."""
    print(tabulate(rows, headers="keys", floatfmt=",.4g", missingval="-"))
