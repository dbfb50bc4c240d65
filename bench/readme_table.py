"""The README's tables of figures, made from `bench/results/`.

python -m bench.readme_table --write     put them between the markers
python -m bench.readme_table --check     exit with 1 if they are not what is there
"""

import argparse
import json
import sys
from pathlib import Path

from tabulate import tabulate

from bench.records import RESULTS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- figures: written by bench/readme_table.py -->", "<!-- end of figures -->"
DEVICE = "nvidia-h200"


def path_of(name: str) -> Path:
    return RESULTS / f"{name}_{DEVICE}.json"


def rows_of(name: str) -> list[dict]:
    return json.loads(path_of(name).read_text(encoding="utf-8"))["rows"]


def throughput() -> str:
    rows = [
        {
            "case": {"A": "A: 256 x (128 in, 128 out)", "B": "B: 512 x ShareGPT-like"}[row["case"]],
            "model": row["model"],
            "output tok/s": row["output_tokens_per_s"],
            "vLLM 0.24": row["vllm"],
            "share of the floor": f"{row['of_floor']:.0%}",
        }
        for row in rows_of("throughput")
    ]
    return tabulate(rows, headers="keys", tablefmt="github", floatfmt=",.0f", intfmt=",")


def latency() -> str:
    cases = {"C": "C: 1 x (128 in, 256 out)", "D": "D: 64 x (1,024 in, 128 out)"}
    rows = [
        {
            "case": cases[row["case"]],
            "model": row["model"],
            "ms a decode step": row["ms_a_step"],
            "vLLM 0.24": row["vllm"],
            "share of the floor": f"{row['of_floor']:.0%}",
        }
        for row in rows_of("latency")
    ]
    return tabulate(rows, headers="keys", tablefmt="github", floatfmt=",.2f")


def kernels() -> str:
    rows = [
        {
            "kernel": row["case"],
            "measured": f"{row['value']:,.3g} {row['unit']}",
            "to reach": f"{row['to_reach']:,g} {row['unit']}",
        }
        for row in rows_of("kernels")
    ]
    return tabulate(rows, headers="keys", tablefmt="github")


def startup() -> str:
    rows = [
        {
            "start to first token": row["start"],
            "model": row["model"],
            "s": row["first_token_s"],
            "to reach": row["to_reach"],
        }
        for row in rows_of("startup")
    ]
    return tabulate(rows, headers="keys", tablefmt="github", floatfmt=",.1f")


def serving() -> str:
    rows = rows_of("serving")
    ways = ("http", "engine")
    through = {way: {row["rate"]: row for row in rows if row["through"] == way} for way in ways}
    table = []
    for rate, http in through["http"].items():
        engine = through["engine"][rate]
        table.append(
            {
                "requests a second": "all at once" if rate == "inf" else f"{rate:g}",
                "output tok/s": http["output_tokens_per_s"],
                "engine alone": engine["output_tokens_per_s"],
                "first token, ms, p50": http["ttft_ms_p50"],
                "p99": http["ttft_ms_p99"],
                "engine alone, p99": engine["ttft_ms_p99"],
                "between tokens, ms, p99": http["inter_token_ms_p99"],
            }
        )
    formats = ("", ",.0f", ",.0f", ",.1f", ",.1f", ",.1f", ",.1f")
    return tabulate(table, headers="keys", tablefmt="github", floatfmt=formats)


TABLES = {
    "throughput": throughput,
    "latency": latency,
    "serving": serving,
    "kernels": kernels,
    "startup": startup,
}


def render(readme: str) -> str:
    """The README's text with the tables of all benchmarks that have results.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README lacks {BEGIN!r} or, after it, {END!r}")
    found = [make() for name, make in TABLES.items() if path_of(name).is_file()]
    tables = "\n\n".join(found)
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    rendered = render(text)
    if args.write:
        README.write_text(rendered, encoding="utf-8")
    elif rendered != text:
        sys.exit("the README's figures are not those of bench/results; run this with --write")


if __name__ == "__main__":
    main()
