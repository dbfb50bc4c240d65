"""Compare two recorded runs of a benchmark.

    python -m bench.compare before.json after.json [--threshold 0.03]
    python -m bench.kernels --compare before.json after.json        every benchmark has --compare

Rows are matched by their names and settings (model, case, batch ...). Each figure of a row is a
line with the ratio after/before. A line is marked if the figure changed by more than the threshold.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from tabulate import tabulate

SETTINGS = {"batch", "blocks", "chunks", "context", "requests", "threads", "width", "tokens"}
SETTINGS |= {"block_size", "decode_seqs", "devices", "prompt_seqs", "prompt_tokens"}
"""Keys whose numbers are settings. Settings and all strings identify a row; others are results."""

MARKS = {"vllm", "vllm_prefill", "to_reach", "to_reach_prefill", "paper"}
"""Keys whose numbers are references: the benchmark did not measure them."""

THRESHOLD = 0.03

Key = tuple[str, int]


def figures(document: dict) -> dict[Key, dict[str, float]]:
    """Return a dict with the measured numbers of each row of a results document. The key of a row
    is (label, index): the label consists of the row's strings and settings, and the index counts
    the rows with the same label.
    """
    found, seen = {}, Counter()
    for row in document["rows"]:
        label = ", ".join(_part(name, value) for name, value in row.items() if _labels(name, value))
        found[label, seen[label]] = {
            name: value for name, value in row.items() if _measured(name, value)
        }
        seen[label] += 1
    return found


def compare(before: dict, after: dict, threshold: float = THRESHOLD) -> list[dict]:
    """Return one line per measured number, with the values of both documents.

    A value is None if the document lacks the number.

    Args:
        before, after: Documents as `bench.records.record` writes them.
        threshold: Relative change above which a line is marked.

    Raises:
        ValueError: the documents are of different benchmarks.
    """
    if before["benchmark"] != after["benchmark"]:
        raise ValueError(
            f"{before['benchmark']!r} and {after['benchmark']!r} are different benchmarks: "
            "compare two results of one benchmark"
        )
    old, new = figures(before), figures(after)
    return [
        _line(key, name, old.get(key, {}).get(name), new.get(key, {}).get(name), threshold)
        for key in {**old, **new}
        for name in {**old.get(key, {}), **new.get(key, {})}
    ]


def print_comparison(before: Path, after: Path, threshold: float = THRESHOLD) -> None:
    """Print the device, versions and dates of two files, then the lines of `compare`."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in (before, after)]
    for name in ("device", "jax", "commit", "date"):
        print(f"{name:8}{documents[0].get(name)}  ->  {documents[1].get(name)}")
    lines = compare(*documents, threshold=threshold)
    print(tabulate(lines, headers="keys", floatfmt=",.4g", missingval="-"))
    num_marked = sum(line["changed"] != "" for line in lines)
    print(f"{num_marked} of {len(lines)} figures changed by more than {threshold:.0%}")


def parse_arguments(
    parser: argparse.ArgumentParser, argv: list[str] | None = None
) -> argparse.Namespace:
    """Parse a benchmark's arguments; with `--compare`, print the comparison and exit.

    Args:
        parser: The benchmark's parser. The function adds `--compare` and `--threshold` to it.
        argv: Command-line arguments; None means the arguments of the process.
    """
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar="JSON", help="compare two results: before, after"
    )
    parser.add_argument(
        "--threshold", type=float, default=THRESHOLD, help="change that --compare marks (0.03)"
    )
    args = parser.parse_args(argv)
    if args.compare:
        print_comparison(*args.compare, threshold=args.threshold)
        parser.exit()
    return args


def _line(key: Key, name: str, old: float | None, new: float | None, threshold: float) -> dict:
    label, place = key
    ratio = new / old if old and new is not None else None
    if ratio is None:
        changed = (
            "" if old == new else "new" if old is None else "gone" if new is None else "from 0"
        )
    else:
        changed = f"{ratio - 1:+.1%}" if abs(ratio - 1) > threshold else ""
    return {
        "row": label + (f" #{place + 1}" if place else ""),
        "figure": name,
        "before": old,
        "after": new,
        "ratio": ratio,
        "changed": changed,
    }


def _labels(name: str, value: object) -> bool:
    return name not in MARKS | {"commit"} and (isinstance(value, str) or name in SETTINGS)


def _part(name: str, value: object) -> str:
    return value if isinstance(value, str) else f"{name} {value}"


def _measured(name: str, value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and name not in MARKS | SETTINGS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--threshold", type=float, default=THRESHOLD)
    args = parser.parse_args()
    print_comparison(args.before, args.after, args.threshold)


if __name__ == "__main__":
    main()
