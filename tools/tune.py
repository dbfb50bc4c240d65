"""Sweeps the kernels' launch parameters on the device at hand (`python -m tools.tune`).

    python -m tools.tune                        every op; prints what was found
    python -m tools.tune --op decode --write    also writes pallas_kernels/tuned/<device kind>.json

A candidate is an entry of that table: fields that override the heuristic's choice for one op, head
size and item size, whatever the batch. So it has to give the reference's results on small inputs,
and to be faster by `MIN_GAIN` in the geometric mean of all cases, in none slower by more than
`MAX_LOSS`; else the heuristic stays.
Only what this tool writes is read while serving; nothing is tuned there.
"""

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels import Backend, select_backend, tuning
from tools.tune_cases import OPS, Case, Op, seconds_a_call

MIN_GAIN = 0.01
MAX_LOSS = 0.01
TABLES = Path(tuning.__file__).parent / "tuned"

Override = Mapping[str, int]
Timer = Callable[[Op, Case, Override], float]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a candidate.

    Attributes:
        ratios: Its time over the heuristic's, by case; empty if it was rejected.
        rejected: Why, or an empty string.
    """

    override: Override
    ratios: Mapping[str, float]
    rejected: str = ""

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios; infinite if it was rejected."""
        if not self.ratios:
            return math.inf
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))

    @property
    def eligible(self) -> bool:
        """Whether it may override the heuristic."""
        return self.mean < 1 - MIN_GAIN and max(self.ratios.values()) <= 1 + MAX_LOSS


def candidates(op: Op) -> list[Override]:
    """Every combination of the op's fields."""
    return [
        dict(zip(op.grid, values, strict=True)) for values in itertools.product(*op.grid.values())
    ]


def sweep(
    op: Op, tried: Iterable[Override], timer: Timer, check: Callable[[Op, Override], None]
) -> Iterator[Outcome]:
    """Check and time candidates.

    Args:
        op: What is tuned.
        tried: The candidates.
        timer: Seconds of a call in a case; raises if the device refuses the candidate.
        check: Raises if a candidate's results are wrong.
    """
    base = {case.name: timer(op, case, {}) for case in op.cases}
    for override in tried:
        try:
            check(op, override)
            ratios = {case.name: timer(op, case, override) / base[case.name] for case in op.cases}
        except (
            Exception
        ) as error:  # too much shared memory, a tile that does not lower, a wrong sum
            yield Outcome(override, {}, str(error).strip().split("\n")[0] or type(error).__name__)
        else:
            yield Outcome(override, ratios)


def best(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The fastest that may override the heuristic, if any may."""
    eligible = [outcome for outcome in outcomes if outcome.eligible]
    return min(eligible, key=lambda outcome: outcome.mean) if eligible else None


@contextmanager
def using(op: Op, override: Override) -> Iterator[None]:
    """Let the kernels see a table with this entry alone, as they will once it is written."""
    original, sizes = tuning._table, f"head_size={op.head_size},itemsize={op.itemsize}"
    tuning._table = lambda device_kind: {op.name: {sizes: override}} if override else {}  # type: ignore
    try:
        yield
    finally:
        tuning._table = original


def check_results(op: Op, override: Override, backend: Backend) -> None:
    """Compare a candidate with the reference on small inputs.

    Raises:
        ValueError: a result is wrong.
    """
    for case in op.checks:
        state, arguments = case.make(0)
        expected = case.reference(state, *arguments)
        with using(op, override):
            given = jax.jit(partial(case.run, backend=backend))(state, *arguments)
        compare_results(case.name, case.shown(given), expected, op.tolerance)


def compare_results(case: str, given: list, expected: list, tolerance: float) -> None:
    """Raise ValueError unless all values agree within `tolerance`, absolute or relative."""
    for one, other in zip(given, expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        worst = float(np.max(np.abs(one - other) / (1 + np.abs(other)), initial=0.0))
        if not worst <= tolerance:  # NaN is wrong as well
            raise ValueError(f"wrong results in {case!r}: off by {worst:.3g}")


def time_on_device(op: Op, case: Case, override: Override, backend: Backend) -> float:
    """Seconds of a call, with everything else as it is while serving."""
    with using(op, override):
        return seconds_a_call(case, backend)


def merge(table: dict, op: Op, found: Outcome | None) -> dict:
    """A device's table with what was found for an op; without an entry where nothing was."""
    sizes = f"head_size={op.head_size},itemsize={op.itemsize}"
    entries = {key: value for key, value in table.get(op.name, {}).items() if key != sizes}
    if found is not None:
        entries[sizes] = dict(found.override)
    merged = {**table, op.name: dict(sorted(entries.items()))}
    return {name: merged[name] for name in sorted(merged) if merged[name]}


def path_of(device_kind: str, folder: Path = TABLES) -> Path:
    """The table that `pallas_kernels.tuning` reads on such a device."""
    return folder / f"{device_kind.replace(' ', '_').replace('/', '_')}.json"


def write(path: Path, table: dict) -> None:
    """Write a table."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def report(op: Op, outcomes: list[Outcome], top: int = 10) -> Outcome | None:
    """Print the fastest candidates, and what is chosen."""
    rejected = [outcome for outcome in outcomes if outcome.rejected]
    print(f"{op.name}: {len(outcomes)} candidates, {len(rejected)} rejected")
    for outcome in sorted(outcomes, key=lambda o: o.mean)[:top]:
        ratios = "  ".join(f"{name} {ratio:.3f}" for name, ratio in outcome.ratios.items())
        print(f"  {outcome.mean:6.3f}  {dict(outcome.override)}  {ratios}")
    for outcome in rejected[:top]:
        print(f"  rejected {dict(outcome.override)}: {outcome.rejected[:100]}")
    chosen = best(outcomes)
    print(f"  chosen: {dict(chosen.override) if chosen else 'the heuristic'}", flush=True)
    return chosen


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
    table: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for name in args.op:
        op = OPS[name](args.head_size, args.dtype)

        def timer(op: Op, case: Case, override: Override) -> float:
            return time_on_device(op, case, override, backend)

        def check(op: Op, override: Override) -> None:
            check_results(op, override, backend)

        table = merge(table, op, report(op, list(sweep(op, candidates(op), timer, check))))
    if args.write:
        write(path, table)
        print(path)


if __name__ == "__main__":
    main()
