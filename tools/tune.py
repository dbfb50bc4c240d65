"""Sweeps the kernels' launch parameters on the device at hand (`python -m tools.tune`).

    python -m tools.tune                        every op; prints what was found
    python -m tools.tune --op decode --write    also writes pallas_kernels/tuned/<device kind>.json

A candidate is an entry of that table: fields that override the heuristic's choice for one op, head
size and item size, whatever the batch. So it has to give the reference's results on small inputs,
and to be faster by `MIN_GAIN` in the geometric mean of all cases, in none slower by more than
`MAX_LOSS`; else the heuristic stays, and the entry is empty.
Only what this tool writes is read while serving; nothing is tuned there.
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
SWEPT = "swept"  # next to the ops, for people to read


def candidates(op: Op) -> list[Override]:
    """Every combination of the op's fields."""
    return [
        dict(zip(op.grid, values, strict=True)) for values in itertools.product(*op.grid.values())
    ]


def best(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The fastest that may override the heuristic, if any may."""
    eligible = [outcome for outcome in outcomes if outcome.eligible]
    return min(eligible, key=lambda outcome: outcome.mean) if eligible else None


def merge(table: dict, op: Op, outcomes: list[Outcome], day: datetime.date) -> dict:
    """A device's table with an op's sweep: its entry, empty if the heuristic stays, and when and
    with what it was swept."""
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
    """The table that `pallas_kernels.tuning` reads on such a device."""
    return folder / f"{device_kind.replace(' ', '_').replace('/', '_')}.json"


def write(path: Path, table: dict) -> None:
    """Write a table."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def report(op: Op, outcomes: list[Outcome], top: int = 10) -> None:
    """Print the fastest candidates, and what is chosen."""
    rejected = [outcome for outcome in outcomes if outcome.rejected]
    print(f"{op.name}: {len(outcomes)} candidates differ, {len(rejected)} rejected")
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
    parser.add_argument("--write", action="store_true", help="the device's table")
    args = parser.parse_args()
    backend = select_backend(jax.default_backend())
    if backend is not Backend.TRITON:
        raise SystemExit(f"needs an NVIDIA GPU; JAX sees {jax.default_backend()!r} only")
    path = path_of(jax.local_devices()[0].device_kind)
    for name in args.op:
        op = OPS[name](args.head_size, args.dtype)
        outcomes = sweep(op, candidates(op), backend)
        report(op, outcomes)
        if args.write and outcomes:  # none: what runs here has no parameters in the table
            table: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
            write(path, merge(table, op, outcomes, datetime.date.today()))
            print(path)


if __name__ == "__main__":
    main()
