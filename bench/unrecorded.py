"""Measure how much a start without autotuning records slows serving (`python -m bench.unrecorded`).

For a shape without shipped autotuning records, XLA measures only a few GEMMs at the start
(`docs/decisions/0013`). This script compares such an engine ("few") with an engine for which XLA
measured all GEMMs and fusions ("all"). The second engine takes much longer to start. Both serve
cases A, C and D of `bench.throughput` and `bench.latency`. Each engine runs in a new process with
an empty compilation cache. The target: "few" is at most 2 % slower.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from unittest import mock

from bench import latency, throughput
from bench.common import UNRECORDED, make_engine
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged.compile import compilation
from jpaged.compile.gemm_autotuning import Compiler

MARK = 1.02
"""Target: maximum of (time with "few" / time with "all")."""

WAYS = ("few", "all")
CASES = {
    "A": ("seconds",),
    "C": ("ms_a_step", "prefill_s"),
    "D": ("ms_a_step", "prefill_s"),
}
"""Maps a case to the measured values that are compared."""


def serve(shape: str, way: str, repeats: int) -> dict[str, dict[str, float]]:
    """Start an engine that autotunes "few" or "all" operations (`way`), and serve the cases.

    Returns:
        The measured values of the start and of each case.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = {"compilation_cache_dir": folder, "verbose": True}
        if way == "all":
            everything = mock.Mock(return_value=Compiler())
            stack.enter_context(mock.patch.object(compilation, "make_compiler", everything))
            options["num_compile_workers"] = 0
        start = time.perf_counter()
        engine = make_engine(shape, **options)
        found = {"start": {"seconds": time.perf_counter() - start}}
        found["A"] = throughput.measure_often(engine, shape, "A", repeats=repeats)
        found |= {case: latency.measure(engine, shape, case, repeats) for case in ("C", "D")}
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*UNRECORDED], nargs="+", default=["qwen2.5-1.5b"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--way", choices=WAYS, help="measure one engine, and print JSON")
    args = parse_arguments(parser)
    if args.way:
        print(json.dumps(serve(args.model[0], args.way, args.repeats)))
        return
    rows = []
    for shape in args.model:
        few, everything = (_in_a_process(shape, way, args.repeats) for way in WAYS)
        for case, figures in {"start": ("seconds",), **CASES}.items():
            for name in figures:
                there, here = everything[case][name], few[case][name]
                row = {"model": shape, "case": case, "figure": name}
                row |= {"all_measured": there, "few_measured": here, "ratio": here / there}
                rows.append(row | {"to_reach": None if case == "start" else MARK})
    print_table(rows)
    print(record("unrecorded", rows, repeats=args.repeats))


def _in_a_process(shape: str, way: str, repeats: int) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "bench.unrecorded", "--model", shape, "--way", way]
    ran = subprocess.run(
        [*command, "--repeats", str(repeats)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
