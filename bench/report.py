"""Writes the README's table of figures from `bench/results/` (`python -m bench.report`)."""

import json
from pathlib import Path

from tabulate import tabulate

from bench.records import RESULTS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- figures: written by bench/report.py -->", "<!-- end of figures -->"
DEVICE = "nvidia-h200"


def rows_of(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}_{DEVICE}.json").read_text(encoding="utf-8"))["rows"]


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


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    tables = "\n\n".join((throughput(), latency(), kernels()))
    README.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
