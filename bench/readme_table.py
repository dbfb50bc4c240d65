"""Write the tables of README.md, docs/figures.md and docs/benchmarks.md from `bench/results/`.

python -m bench.readme_table --write     write the tables between the markers
python -m bench.readme_table --check     exit with 1 if a table is out of date
"""

import argparse
import json
import re
import sys
from pathlib import Path

from tabulate import tabulate

from bench.common import ALL_SHAPES
from bench.paper.report import picture_name
from bench.records import RESULTS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
FIGURES, BENCHMARKS = ROOT / "docs" / "figures.md", ROOT / "docs" / "benchmarks.md"
SUMMARY_BEGIN = "<!-- jpaged and vLLM: written by bench/readme_table.py -->"
SUMMARY_END = "<!-- end of jpaged and vLLM -->"
BEGIN, END = "<!-- figures: written by bench/readme_table.py -->", "<!-- end of figures -->"
FIGURE = re.compile(r"<!-- figure (\w+) -->\n.*?<!-- end of figure \1 -->", re.DOTALL)
"""Matches a figure in docs/benchmarks.md with its markers.

The group of the pattern is the number of the figure, as in `python -m bench.paper --figure`, or a
name in `COMPARISONS`.
"""

DEVICE = "nvidia-h200"

SYSTEM_NAMES = {
    "ours": "jpaged",
    "orca_max": "Orca (Max)",
    "orca_pow2": "Orca (Pow2)",
    "orca_oracle": "Orca (Oracle)",
    "fastertransformer": "FasterTransformer-like",
    "contiguous_static": "contiguous decoder, static batches",
    "contiguous_slabs": "contiguous decoder, a slab a slot",
}
"""Display names of the systems of `bench.headline`."""


def path_of(name: str) -> Path:
    return RESULTS / f"{name}_{DEVICE}.json"


def rows_of(name: str) -> list[dict]:
    return json.loads(path_of(name).read_text(encoding="utf-8"))["rows"]


def model_of(row: dict) -> str:
    """Return the model name of a row, followed by the row's format and number of GPUs if they are
    recorded."""
    form = f", {row['format']}" if "format" in row else ""
    return row["model"] + form + (f" on {row['devices']} GPUs" if "devices" in row else "")


def vllm_version(row: dict) -> str:
    """Return the version of vLLM with which the reference numbers of a row were measured."""
    is_sparse = "num_experts" in ALL_SHAPES.get(row["model"], {})
    return "0.26" if is_sparse or row.get("format") == "fp8" else "0.24"


def throughput() -> str:
    rows = [
        {
            "case": {"A": "A: 256 x (128 in, 128 out)", "B": "B: 512 x ShareGPT-like"}[row["case"]],
            "model": model_of(row),
            "output tokens/s": row["output_tokens_per_s"],
            "vLLM, output tokens/s": row["vllm"],
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
            "model": model_of(row),
            "ms per decode step": row["ms_a_step"],
            "vLLM, ms per decode step": row["vllm"],
            "share of the floor": f"{row['of_floor']:.0%}",
        }
        for row in [*rows_of("latency"), *_rows_on_more("latency")]
    ]
    return tabulate(rows, headers="keys", tablefmt="github", floatfmt=",.2f")


def _rows_on_more(name: str) -> list[dict]:
    """Return the result rows of the tensor-parallel runs of a benchmark. The files have the names
    `<name>_on_<GPUs>`."""
    counts = [count for count in (2, 4, 8) if path_of(f"{name}_on_{count}").is_file()]
    return [row | {"devices": n} for n in counts for row in rows_of(f"{name}_on_{n}")]


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
            "model": model_of(row),
            "s": row["first_token_s"],
            "to reach, s": row["to_reach"],
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
                "requests/s": "all together" if rate == "inf" else f"{rate:g}",
                "output tokens/s": http["output_tokens_per_s"],
                "engine alone, output tokens/s": engine["output_tokens_per_s"],
                "first token, p50 ms": http["ttft_ms_p50"],
                "first token, p99 ms": http["ttft_ms_p99"],
                "engine alone, first token, p99 ms": engine["ttft_ms_p99"],
                "between tokens, p99 ms": http["inter_token_ms_p99"],
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


def render_readme(text: str) -> str:
    """Return the text of README.md with an up-to-date table of jpaged and vLLM.

    Raises:
        ValueError: a marker is missing, or the markers are in the wrong order.
    """
    return _between(text, SUMMARY_BEGIN, SUMMARY_END, summary())


def summary() -> str:
    """Return a table of the cases that were measured with both jpaged and vLLM."""
    rows = []
    cases = {
        "A": ("256 requests, 128 tokens in, 128 out", "output tokens/s", ",.0f"),
        "C": ("1 request, 128 in, 256 out", "ms per decode step", ".2f"),
        "D": ("64 requests, 1,024 in, 128 out", "ms per decode step", ".2f"),
    }
    for case, (title, unit, number_format) in cases.items():
        for row in (it for name in ("throughput", "latency") for it in rows_of(name)):
            if row["case"] != case or row["vllm"] is None:
                continue
            ours, theirs = (
                row["output_tokens_per_s" if case == "A" else "ms_a_step"],
                row["vllm"],
            )
            ratio = ours / theirs if case == "A" else theirs / ours
            rows.append(
                {
                    "load": title,
                    "model": model_of(row),
                    "unit": unit,
                    "jpaged": f"{ours:{number_format}}",
                    "vLLM": f"{theirs:{number_format}} (vLLM {vllm_version(row)})",
                    "speed-up": f"{ratio:.2f}x",
                }
            )
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def render_figures(text: str) -> str:
    """Return the text of docs/figures.md with up-to-date tables of all benchmarks with results.

    Raises:
        ValueError: a marker is missing, or the markers are in the wrong order.
    """
    found = [make() for name, make in TABLES.items() if path_of(name).is_file()]
    return _between(text, BEGIN, END, "\n\n".join(found))


def _between(text: str, begin: str, end: str, inside: str) -> str:
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the page lacks {begin!r} followed by {end!r}")
    return f"{before}{begin}\n{inside}\n{end}{after}"


def render_benchmarks(text: str) -> str:
    """Return the text of docs/benchmarks.md with up-to-date tables and settings of each figure.

    Raises:
        ValueError: the text has no markers of a figure.
    """
    if not FIGURE.search(text):
        raise ValueError("docs/benchmarks.md lacks <!-- figure N --> ... <!-- end of figure N -->")
    return FIGURE.sub(lambda found: _figure(found[1]), text)


def headline(document: dict) -> list[dict]:
    """Return a row per system: its sustained rate with equal KV memory, and jpaged's rate as a
    multiple of this rate."""
    return [
        {
            "lengths": row["lengths"],
            "system": SYSTEM_NAMES[row["system"]],
            "requests/s": row["sustained_per_s"],
            "range of the seeds": f"{row['lowest']:.3g} to {row['highest']:.3g}",
            "output tokens/s": row["output_tokens_per_s"],
            "sequences in a batch": row["sequences"],
            "jpaged over it": row["ours_over_it"],
            "to reach": row["to_reach"],
            "traces of": f"{row['trace_s']:g} s",
            "rates may be above by": f"{row['may_be_above_%']:.0f} %",
        }
        for row in document["rows"]
    ]


def paging_cost(document: dict) -> list[dict]:
    """Return a row per case: each system's seconds when memory suffices, and the cost of paging."""
    return [
        {
            "case": row["case"],
            "model": row["model"],
            "engine, s": row["engine_s"],
            "static batches, s": row["static_s"],
            "a slab a slot, s": row["slabs_s"],
            "paging costs": f"{row['paging_costs']:+.1%}",
            "at most": f"{row['to_reach']:+.0%}",
        }
        for row in document["rows"]
    ]


COMPARISONS = {"headline": headline, "paging_cost": paging_cost}
"""Benchmarks that compare jpaged with other systems, but are not figures of the paper.

Each benchmark has a function that makes the rows of the table.
"""


def _figure(number: str) -> str:
    if number in COMPARISONS:
        inside = _compared(number)
        return f"<!-- figure {number} -->\n{inside}\n<!-- end of figure {number} -->"
    # Sort the file names in reverse order, so that simulated figures come before measured figures.
    paths = sorted(RESULTS.glob(f"paper_{number}_*.json"), reverse=True)
    parts = [_recorded(json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    inside = "\n\n".join(parts) or "*Not run yet.*"
    return f"<!-- figure {number} -->\n{inside}\n<!-- end of figure {number} -->"


def _compared(name: str) -> str:
    """Return the recorded table of a benchmark in `COMPARISONS` as Markdown."""
    if not path_of(name).is_file():
        return "*Not run yet.*"
    document = json.loads(path_of(name).read_text(encoding="utf-8"))
    rows = [{key: _cell(cell) for key, cell in row.items()} for row in COMPARISONS[name](document)]
    table = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
    of = ""
    if name == "headline":
        seeds = ", ".join(map(str, document["seeds"]))
        of = f"; {document['shape']}, {document['num_slots']:,} slots, seeds {seeds}"
    return (
        f"{table}\n\n- {document['device']}{of}; commit {document['commit']}, "
        f"{document['date'][:10]}; Python {document['python']}, JAX {document['jax']}"
    )


def _recorded(document: dict) -> str:
    """Return a recorded figure as Markdown: the picture, the table and the notes."""
    picture = f"paper/{picture_name(document['figure'], document['device'])}"
    lines = []
    if (BENCHMARKS.parent / picture).is_file():
        lines += [f"![{document['title']}]({picture})", ""]
    names = dict.fromkeys(name for row in document["rows"] for name in row)
    rows = [{name: _cell(row.get(name)) for name in names} for row in document["rows"]]
    # The cells are formatted strings, which tabulate would parse as numbers.
    table = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
    lines += [table, ""]
    lines += [f"- {note}" for note in document["notes"]]
    date, took = document["date"][:10], document["took_s"]
    lines.append(
        f"- {document['device']}{_requests_of(document)}; commit {document['commit']}, {date}, "
        f"took {took:,.0f} s; Python {document['python']}, JAX {document['jax']}"
    )
    return "\n".join(lines)


def _requests_of(document: dict) -> str:
    """Return a phrase that describes a figure's requests; empty if the figure has no requests."""
    how, number = document["settings"], document["figure"]
    seed = f"seed {how['seeds'][0]}"
    if document["device"] == "no device" or number in ("18a", "19a"):
        return ""
    if number in ("1", "2"):
        return f"; all requests there from the start, {seed}"
    if number == "15":
        least = how["least_requests"]
        return f"; traces of {how['seconds']:g} s and {least} requests at least, {seed}"
    return f"; traces of {how['seconds']:g} s, seeds {', '.join(map(str, how['seeds']))}"


def _cell(value: object) -> str:
    """Format a number with three significant digits, but with all digits before the point."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    pages = {README: render_readme, FIGURES: render_figures, BENCHMARKS: render_benchmarks}
    for path, make in pages.items():
        text = path.read_text(encoding="utf-8")
        rendered = make(text)
        if args.write:
            path.write_text(rendered, encoding="utf-8")
        elif rendered != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"tables out of date in {', '.join(stale)}: run with --write")


if __name__ == "__main__":
    main()
