"""Repeat the evaluation of the PagedAttention paper, with the same baseline systems.

    python -m bench.paper --figure 12               one figure, simulated on a CPU
    python -m bench.paper --figure all --quick      all figures at a tiny size, as a smoke test
    python -m bench.paper --figure 13 --device      the real engine, on this machine's GPU

For each figure, the script prints a table (the paper's value, jpaged's value, their ratio) and
writes JSON and a picture.

--simulate runs the real scheduler, block manager and allocators; a device model gives the times of
steps. The device model is fitted to steps recorded on a GPU (`python -m bench.paper.device_model`
shows the fit). --device serves shorter traces in real time by the engine, with OPT-13B's shape,
random weights, and the paper's 15.7 K slots of KV memory. `bench/paper/measures.py` defines the
measured quantities, `bench/paper/traces.py` the requests.
"""

import argparse
import dataclasses
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.paper import report, traces
from bench.paper.device_model import fit
from bench.paper.measures import FIXED_FRACTION, Settings
from bench.paper.published import SERVERS
from bench.paper.report import Figure
from jpaged.options import CommandLine

FIGURES = {
    "table1": "figures_memory:table_1",
    "1": "figures_memory:figure_1",
    "2": "figures_memory:figure_2",
    "11": "figures_memory:figure_11",
    "12": "figures_serving:figure_12",
    "13": "figures_memory:figure_13",
    "14": "figures_serving:figure_14",
    "15": "figures_memory:figure_15",
    "16": "figures_serving:figure_16",
    "17": "figures_serving:figure_17",
    "18a": "figures_ablation:figure_18a",
    "18b": "figures_ablation:figure_18b",
    "19a": "figures_ablation:figure_19a",
    "19b": "figures_ablation:figure_19b",
}
AGREEMENTS = ("agreement", "knees_sharegpt", "knees_alpaca")
"""Figures that the paper does not have: they compare the simulation with the engine.

They need --device, and `--figure all` leaves them out.
"""

QUICK = {
    "seconds": 2.0,
    "least_requests": 10,
    "saturation": 40,
    "seeds": (0,),
    "latency_factor": 3.0,
    "tolerance": 0.5,
    "fractions": (0.5, 2.0),
}
QUICK_NOTE = "a quick run, as a smoke test: sizes are tiny and the numbers mean nothing"
DEVICE = {"seconds": 120.0, "saturation": 300, "tolerance": 0.05, "fractions": (0.5,)}


def make(number: str, settings: Settings) -> Figure:
    """Run the measurements of a figure, and return the figure."""
    place = f"figures_serving:{number}" if number in AGREEMENTS else FIGURES[number]
    module, function = place.split(":")
    maker: Callable[[Settings], Figure] = getattr(import_module(f"bench.paper.{module}"), function)
    return maker(settings)


def build_parser() -> argparse.ArgumentParser:
    parser = CommandLine(prog="python -m bench.paper", description=__doc__)
    parser.add_argument(
        "--figure",
        nargs="+",
        required=True,
        metavar="N",
        help=f"figures to make: all, or some of {', '.join(FIGURES)}; with --device also "
        f"{', '.join(AGREEMENTS)}",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--simulate", action="store_true", help="use a device model (default)")
    how.add_argument("--device", action="store_true", help="use the engine on this machine's GPU")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument(
        "--seconds", type=_positive, help="length of a trace in seconds (3600; with --device 120)"
    )
    parser.add_argument("--seeds", type=_seeds, metavar="0,1,2", help="seeds of the traces")
    parser.add_argument(
        "--models", nargs="+", choices=[*SERVERS], help="sizes of OPT in figure 12 (all)"
    )
    parser.add_argument(
        "--lengths", nargs="+", choices=[*traces.MEAN_LENGTHS], help="datasets in figure 12 (both)"
    )
    parser.add_argument(
        "--tolerance", type=_share, help="relative error of sustained rates (0.03; --device 0.05)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE",
        help="with --device: store each sustained rate in this file, and reuse the stored rates",
    )  # fmt: skip
    parser.add_argument("--processes", type=_count, help="concurrent simulations (number of cores)")
    for name in traces.MEAN_LENGTHS:
        parser.add_argument(
            f"--{name}", metavar="FILE", help=f"JSON lines with lengths that replace {name}'s"
        )
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="folder of JSON and pictures (bench/results and docs/paper; --quick: a new folder)",
    )  # fmt: skip
    parser.add_argument("--no-pictures", action="store_true", help="write only tables and JSON")
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings that the command line asks for.

    Raises:
        ValueError: a figure is unknown, or a file of lengths is refused.
    """
    unknown = [number for number in args.figure if number not in (*FIGURES, "all", *AGREEMENTS)]
    if unknown:
        known = ", ".join(("all", *FIGURES))
        raise ValueError(f"--figure {' '.join(unknown)}: unknown figure; pass some of {known}")
    comparing = [number for number in args.figure if number in AGREEMENTS]
    if comparing and not args.device:
        raise ValueError(
            f"--figure {' '.join(comparing)} compares a device with its simulation: add --device"
        )
    if args.models is not None and "13b" not in args.models and (args.device or args.quick):
        raise ValueError(
            f"--models {' '.join(args.models)}: --device and --quick need 13b: add 13b"
        )
    if args.keep is not None and not args.device:
        raise ValueError(f"--keep {args.keep} needs rates measured on a device: add --device")
    if args.keep is not None and not args.keep.parent.is_dir():
        raise ValueError(
            f"--keep {args.keep}: there is no folder {args.keep.parent}; create it first"
        )
    files = {name: getattr(args, name) for name in traces.MEAN_LENGTHS}
    given = {name: path for name, path in files.items() if path is not None}
    for path in given.values():
        traces.from_file(path)
    options = (DEVICE if args.device else {}) | (QUICK if args.quick else {})
    names = ("seconds", "seeds", "processes", "tolerance", "keep", "models", "lengths")
    asked = {name: getattr(args, name) for name in names}
    asked = {name: tuple(it) if isinstance(it, list) else it for name, it in asked.items()}
    options |= {name: value for name, value in asked.items() if value is not None}
    return Settings(
        how="measured" if args.device else "simulated",
        quick=args.quick,
        files=tuple(given.items()),
        **{"processes": os.cpu_count() or 1, **options},
    )


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        settings = settings_of(args)
        if not args.no_pictures:
            report.require_matplotlib()
    except ValueError as error:
        parser.error(str(error))
    out = args.out
    if out is None and args.quick:
        out = Path(tempfile.mkdtemp(prefix="jpaged-paper-"))
    numbers = [*FIGURES] if "all" in args.figure else list(dict.fromkeys(args.figure))
    for i, number in enumerate(numbers):
        start = time.perf_counter()
        print(f"figure {number} ({i + 1} of {len(numbers)})", file=sys.stderr, flush=True)
        figure = make(number, settings)
        if args.quick:
            figure = dataclasses.replace(figure, notes=(*figure.notes, QUICK_NOTE))
        took = round(time.perf_counter() - start, 1)
        facts = {
            "how": settings.how,
            "settings": dataclasses.replace(settings, keep=None),
            "fixed_fraction": FIXED_FRACTION,
            "device_model": _fit_facts() if figure.device.startswith("simulated") else None,
            "took_s": took,
        }
        report.show(figure, out=out, pictures=not args.no_pictures, facts=facts)
        print(f"  {took} s", flush=True)


def _fit_facts() -> dict[str, Any]:
    """Return a record of the device model: the files it was fitted to, coefficients and errors."""
    found = fit()
    worst = max(found.points, key=lambda point: abs(point.error))
    return {
        "coefficients": found.coefficients,
        "num_points": len(found.points),
        "mean_error_%": 100 * found.mean_error,
        "worst_error_%": 100 * worst.error,
        "worst": worst.what,
    }


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be less than 1, not {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        seeds = (-1,)
    if min(seeds) < 0:
        raise argparse.ArgumentTypeError(
            f"must be integers of at least 0, separated by commas, not {text!r}"
        )
    return seeds


if __name__ == "__main__":
    sys.exit(main())
