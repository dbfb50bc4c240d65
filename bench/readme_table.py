"""The tables of figures in the README and in docs/benchmarks.md, made from `bench/results/`.

python -m bench.readme_table --write     put them between the markers
python -m bench.readme_table --check     exit with 1 if they are not what is there
"""

import argparse
import json
import re
import sys
from pathlib import Path

from tabulate import tabulate

from bench.paper.report import picture_name
from bench.records import RESULTS

ROOT = Path(__file__).parent.parent
README, BENCHMARKS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: written by bench/readme_table.py -->", "<!-- end of figures -->"
PAPER_BEGIN = "<!-- the paper's figure 12: written by bench/readme_table.py -->"
PAPER_END = "<!-- end of the paper's figure 12 -->"
FIGURE = re.compile(r"<!-- figure (\w+) -->\n.*?<!-- end of figure \1 -->", re.DOTALL)
"""A figure of docs/benchmarks.md: its number as `python -m bench.paper --figure` takes it, or the
name of one of `COMPARISONS`."""

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
"""Of `bench.headline`."""


def path_of(name: str) -> Path:
    return RESULTS / f"{name}_{DEVICE}.json"


def rows_of(name: str) -> list[dict]:
    return json.loads(path_of(name).read_text(encoding="utf-8"))["rows"]


def model_of(row: dict) -> str:
    """A row's model, with its format and its GPUs where it has them."""
    form = f", {row['format']}" if "format" in row else ""
    return row["model"] + form + (f" on {row['devices']} GPUs" if "devices" in row else "")


def throughput() -> str:
    rows = [
        {
            "case": {"A": "A: 256 x (128 in, 128 out)", "B": "B: 512 x ShareGPT-like"}[row["case"]],
            "model": model_of(row),
            "output tok/s": row["output_tokens_per_s"],
            "vLLM": row["vllm"],
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
            "ms a decode step": row["ms_a_step"],
            "vLLM": row["vllm"],
            "share of the floor": f"{row['of_floor']:.0%}",
        }
        for row in [*rows_of("latency"), *_rows_on_more("latency")]
    ]
    return tabulate(rows, headers="keys", tablefmt="github", floatfmt=",.2f")


def _rows_on_more(name: str) -> list[dict]:
    """The benchmark's rows on several GPUs that share a model, whose number ends a file's name."""
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
    found = [make() for name, make in TABLES.items() if path_of(name).is_file()]
    readme = _between(readme, BEGIN, END, "\n\n".join(found))
    path = RESULTS / "paper_12_simulated-nvidia-h200.json"
    if PAPER_BEGIN in readme and path.is_file():
        readme = _between(readme, PAPER_BEGIN, PAPER_END, paper(json.loads(path.read_text())))
    return readme


def _between(text: str, begin: str, end: str, inside: str) -> str:
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the README lacks {begin!r} or, after it, {end!r}")
    return f"{before}{begin}\n{inside}\n{end}{after}"


def paper(document: dict) -> str:
    """Sustained rates of figure 12, and ours over each baseline."""
    panels: dict[str, dict[str, dict]] = {}
    for row in document["rows"]:
        panels.setdefault(row["panel"], {})[row["system"]] = row
    table = []
    for panel, systems in panels.items():
        cells = {"": panel, "jpaged, requests/s": f"{systems['jpaged']['req/s']:.3g}"}
        for system in ("Orca (Oracle)", "Orca (Pow2)", "Orca (Max)", "FasterTransformer-like"):
            row = systems[system]
            stated = "" if row["paper"] == "plot only" else f" (paper: {row['paper']})"
            cells[f"over {system}"] = f"{row['jpaged over it']:.2f}{stated}"
        table.append(cells)
    return tabulate(table, headers="keys", tablefmt="github", disable_numparse=True)


def render_benchmarks(text: str) -> str:
    """The text of docs/benchmarks.md with each figure's tables and how they came about.

    Raises:
        ValueError: it has no place for a figure.
    """
    if not FIGURE.search(text):
        raise ValueError("docs/benchmarks.md lacks <!-- figure N --> ... <!-- end of figure N -->")
    return FIGURE.sub(lambda found: _figure(found[1]), text)


def headline(document: dict) -> list[dict]:
    """Each system's sustained rate at equal KV memory, and ours over it."""
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
    """Seconds end to end where memory is plenty, and the engine's over the faster batching's."""
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
"""Benchmarks against other systems that are not figures of the paper."""


def _figure(number: str) -> str:
    if number in COMPARISONS:
        inside = _compared(number)
        return f"<!-- figure {number} -->\n{inside}\n<!-- end of figure {number} -->"
    paths = sorted(RESULTS.glob(f"paper_{number}_*.json"), reverse=True)  # simulated ones first
    parts = [_recorded(json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    inside = "\n\n".join(parts) or "*Not run yet.*"
    return f"<!-- figure {number} -->\n{inside}\n<!-- end of figure {number} -->"


def _compared(name: str) -> str:
    """One of `COMPARISONS` as it was recorded."""
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
    """One recorded figure: its picture, its table, its notes."""
    picture = f"paper/{picture_name(document['figure'], document['device'])}"
    lines = []
    if (BENCHMARKS.parent / picture).is_file():
        lines += [f"![{document['title']}]({picture})", ""]
    names = dict.fromkeys(name for row in document["rows"] for name in row)
    rows = [{name: _cell(row.get(name)) for name in names} for row in document["rows"]]
    # Cells are texts by now, which tabulate would read as numbers again.
    table = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
    lines += [table, ""]
    lines += [f"- {note}" for note in document["notes"]]
    date, took = document["date"][:10], document["took_s"]
    lines.append(
        f"- {document['device']}{_requests_of(document)}; commit {document['commit']}, {date}, "
        f"took {took:,.0f} s; Python {document['python']}, JAX {document['jax']}"
    )
    model = document.get("device_model")
    if model and document["device"] != "no device":
        lines.append(
            f"- step times: fitted to {model['num_points']} recorded points, mean error "
            f"{model['mean_error_%']:.1f} %, worst {model['worst_error_%']:+.1f} %"
        )
    return "\n".join(lines)


def _requests_of(document: dict) -> str:
    """Which requests were served."""
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
    """Three digits, and all of a number's before its point."""
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
    for path, make in ((README, render), (BENCHMARKS, render_benchmarks)):
        text = path.read_text(encoding="utf-8")
        rendered = make(text)
        if args.write:
            path.write_text(rendered, encoding="utf-8")
        elif rendered != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"figures are not those of bench/results in {stale}; run this with --write")


if __name__ == "__main__":
    main()
