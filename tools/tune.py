"""Sweep the kernels' launch parameters on this machine's device (`python -m tools.tune`).

    python -m tools.tune                        sweep every op and print the results
    python -m tools.tune --op decode --write    also write pallas_kernels/tuned/<device kind>.json

A function of each kernel (the heuristic) computes the default launch parameters for a batch. The
JSON file contains a table of other launch parameters. An entry of the table is for one op, head
size and item size, and its values replace the defaults for all batches.

A candidate is a possible entry. With a candidate, the op must give the results of the reference on
small inputs. The candidate must be faster than the defaults by `MIN_GAIN` in the geometric mean of
all cases, and at most `MAX_LOSS` slower in any case. If no candidate qualifies, the entry is empty.
The server only reads the table, and never tunes.
"""

import argparse
import datetime
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import Backend, select_backend, tuning
from tools.tune_cases import OPS, Op
from tools.tune_programs import Override
from tools.tune_sweep import Outcome, sweep

TABLES = Path(tuning.__file__).parent / "tuned"
# Key in a table under which notes about the sweeps are stored. No code reads the notes.
SWEPT = "swept"


def candidates(op: Op) -> list[Override]:
    """Return every combination of the values that the op's launch parameters may have."""
    return [
        dict(zip(op.grid, values, strict=True)) for values in itertools.product(*op.grid.values())
    ]


def best(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the outcome of the fastest eligible candidate, or None if there is none."""
    eligible = [outcome for outcome in outcomes if outcome.eligible]
    return min(eligible, key=lambda outcome: outcome.mean) if eligible else None


def merge(table: dict, op: Op, outcomes: list[Outcome], day: datetime.date) -> dict:
    """Return a copy of a device's table in which the entry of one op is replaced.

    The new entry has the values of the best candidate. If no candidate is eligible, the new entry
    is empty. The copy also has a note about the sweep: the date, the JAX version and the number of
    candidates.

    Args:
        table: Table of launch parameters of one kind of device.
        op: The op, with its head size and item size.
        outcomes: Results of the sweep, one per candidate.
        day: Date of the sweep.
    """
    found = best(outcomes)
    num_rejected = sum(bool(outcome.rejected) for outcome in outcomes)
    note = f"{day}, JAX {jax.__version__}: {len(outcomes)} candidates, {num_rejected} rejected"
    merged = _with_entry(table, op, dict(found.override) if found else {})
    swept = _with_entry(table.get(SWEPT, {}), op, note)
    return {name: merged[name] for name in sorted(merged) if name != SWEPT} | {SWEPT: swept}


def _with_entry(entries: dict, op: Op, entry: Any) -> dict:
    sizes = {
        **entries.get(op.name, {}),
        f"head_size={op.head_size},itemsize={op.itemsize}": entry,
    }
    return dict(sorted({**entries, op.name: dict(sorted(sizes.items()))}.items()))


def path_of(device_kind: str, folder: Path = TABLES) -> Path:
    """Return the path of the table that `pallas_kernels.tuning` reads for a kind of device."""
    return folder / f"{device_kind.replace(' ', '_').replace('/', '_')}.json"


def write(path: Path, table: dict) -> None:
    """Write a table as JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def report(op: Op, outcomes: list[Outcome], top: int = 10) -> None:
    """Print up to `top` of the fastest and of the rejected candidates, and the chosen candidate."""
    rejected = [outcome for outcome in outcomes if outcome.rejected]
    print(f"{op.name}: {len(outcomes)} distinct candidates, {len(rejected)} rejected")
    for outcome in sorted(outcomes, key=lambda o: o.mean)[:top]:
        ratios = "  ".join(f"{name} {ratio:.3f}" for name, ratio in outcome.ratios.items())
        print(f"  {outcome.mean:6.3f}  {dict(outcome.override)}  {ratios}")
    for outcome in rejected[:top]:
        print(f"  rejected {dict(outcome.override)}: {outcome.rejected[:100]}")
    chosen = best(outcomes)
    print(f"  chosen: {dict(chosen.override) if chosen else 'the heuristic'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=[*OPS], nargs="+", default=[*OPS])
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--write", action="store_true", help="write the device's table")
    args = parser.parse_args()
    backend = select_backend(jax.default_backend())
    if backend is not Backend.TRITON:
        raise SystemExit(f"this needs an NVIDIA GPU; JAX sees only {jax.default_backend()!r}")
    path = path_of(jax.local_devices()[0].device_kind)
    for name in args.op:
        op = OPS[name](args.head_size, args.dtype)
        outcomes = sweep(op, candidates(op), backend)
        report(op, outcomes)
        # The list of outcomes is empty if the op has no launch parameters on this device.
        if args.write and outcomes:
            table: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
            write(path, merge(table, op, outcomes, datetime.date.today()))
            print(path)


if __name__ == "__main__":
    main()
