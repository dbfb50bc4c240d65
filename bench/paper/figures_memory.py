"""Figures 1 (right), 2, 11, 13 and 15 and table 1: what the KV memory holds."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.paper import report, traces
from bench.paper.measures import (
    FIXED_FRACTION,
    Case,
    Settings,
    device_of,
    run_cases,
    saturate_all,
    simulated_sustained,
    source_of,
)
from bench.paper.published import (
    BATCHED,
    BATCHED_RATE,
    LABELS,
    MEMORY,
    ORCAS,
    SAVED,
    SAVED_RANGE,
    SERVERS,
    WASTE_PERCENT,
    WIDTHS,
    Server,
)
from bench.paper.report import COLOURS, Figure, compared

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

DATASETS = ("sharegpt", "alpaca")
TITLES = {"sharegpt": "ShareGPT-like", "alpaca": "Alpaca-like"}
MOST_WASTE_PERCENT = 4.0
SHARING_FRACTION = 0.3
"""Request rate of figure 15, as a fraction of the rate that saturates the server.

At a higher rate, requests are often preempted just after they have joined. At that time their
sequences still share almost all blocks, so the savings would look half as large again.
"""

SHARES = {"tokens": "#0072b2", "reserved": "#56b4e9", "internal": "#e69f00", "external": "#d9d9d9"}
SHARE_LABELS = {
    "tokens": "token states",
    "reserved": "reserved",
    "internal": "internal fragmentation",
    "external": "external fragmentation",
}


def table_1(settings: Settings) -> Figure:
    """Compute model sizes and KV slots from OPT's shapes."""
    rows = []
    for server in SERVERS.values():
        slot_bytes = 2 * server.num_layers * server.hidden_size * 2
        ours = {
            "parameters, GB": (server.weights_gb, _num_parameters(server) * 2 / 1e9),
            "KV cache slots": (server.num_slots, server.kv_gb * 2**30 / slot_bytes),
        }
        for name, (paper, value) in ours.items():
            rows.append({"model": server.model, "of": name, **compared(paper, value)})
    note = "slots: the paper's memory for the KV cache, in GiB, over 2 x layers x hidden x 2 bytes"

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots()
        models = [server.model for server in SERVERS.values()]
        slots = [row for row in rows if row["of"] == "KV cache slots"]
        series = {
            "paper": [float(row["paper"]) for row in slots],
            "here": [row["ours"] for row in slots],
        }
        colours = {"paper": "#b8b8b8", "here": COLOURS["ours"]}
        report.draw_bars(axes, models, series, colours, "{:,.0f}")
        axes.set_ylabel("KV cache slots, tokens")
        axes.legend()

    return Figure("table1", "model sizes and KV memory", rows, {}, draw, (5.0, 3.0), (note,))


def _num_parameters(server: Server) -> int:
    """Return the number of parameters of an OPT model: embeddings, layers and final norm."""
    width = server.hidden_size
    return (50272 + 2050) * width + server.num_layers * (12 * width**2 + 13 * width) + 2 * width


def figure_1(settings: Settings) -> Figure:
    """Show held memory and throughput by batch size (right half of figure 1)."""
    limits = (1, 2, 4, 8) if settings.quick else (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    systems = ("orca_max", "ours")
    jobs = [Case("sharegpt", system, max_num_seqs=n) for system in systems for n in limits]
    found = dict(zip(jobs, saturate_all(jobs, settings), strict=True))
    rows, curves = [], {}
    for system in systems:
        curves[system] = [
            (found[case].batch, found[case].held, found[case].output_tokens_per_s)
            for case in jobs
            if case.system == system
        ]
        for limit, (batch, held, speed) in zip(limits, curves[system], strict=True):
            row = {"system": LABELS[system], "seats": limit, "batch": batch}
            rows.append(row | {"KV memory held, %": held, **compared(None, speed)})
    gain = max(c[2] for c in curves["ours"]) / max(c[2] for c in curves["orca_max"])
    note = (
        f"`ours` is output tokens a second; ours over Orca (Max) at the largest batch: {gain:.2f}; "
        "the existing system stops growing when no range of 2,048 slots is left"
    )

    def draw(canvas: "Canvas") -> None:
        above, below = canvas.subplots(2, 1, sharex=True)
        for system, points in curves.items():
            batches, held, speeds = zip(*points, strict=True)
            style = {"color": COLOURS[system], "marker": report.MARKERS[system]}
            above.plot(batches, held, label=LABELS[system], **style)
            below.plot(batches, speeds, **style)
        above.set(ylabel="KV memory held, %", ylim=(0, 105))
        below.set(xlabel="requests in a batch", ylabel="output tokens/s", ylim=(0, None))
        above.legend(loc="lower right")
        report.footnote(canvas, f"OPT-13B, ShareGPT-like lengths, {device_of(settings)}")

    title = "memory and throughput against batch size, OPT-13B, ShareGPT"
    device = device_of(settings)
    return Figure("1", title, rows, {"gain": gain}, draw, (5.2, 4.6), (note,), device)


def figure_2(settings: Settings) -> Figure:
    """Show how many KV slots of each system are in each state while requests wait for memory."""
    cases = [Case(workload, system) for workload in DATASETS for system in (*ORCAS, "ours")]
    found = dict(zip(cases, saturate_all(cases, settings), strict=True))
    rows: list[dict[str, Any]] = []
    for case, outcome in found.items():
        paper = MEMORY[case.system] if case.workload == "sharegpt" else {}
        for share in SHARES:
            row = {"lengths": case.workload, "system": LABELS[case.system]}
            row["share"] = SHARE_LABELS[share]
            rows.append(row | compared(paper.get(share), outcome.memory[share]))
    for workload in DATASETS:
        ours = found[Case(workload, "ours")]
        row = {"lengths": workload, "system": LABELS["ours"]}
        paper = WASTE_PERCENT if workload == "sharegpt" else None
        rows.append(row | {"share": "waste of held blocks"} | compared(paper, ours.waste))
        name = "the same by formula, half a block a sequence"
        rows.append(row | {"share": name, "paper": None, "ours": ours.waste_formula})
    waste = found[Case("sharegpt", "ours")].waste
    reached = "reached" if waste <= MOST_WASTE_PERCENT else "NOT reached"
    notes = (
        "percent of all KV slots, mean over time while requests wait; all requests are there from "
        "the start, so that memory is what limits the batch",
        f"waste of held blocks: at most {MOST_WASTE_PERCENT:g} % on ShareGPT-like lengths is to be "
        f"reached; it is {waste:.2f} %: {reached}",
    )

    def draw(canvas: "Canvas") -> None:
        for axes, workload in zip(canvas.subplots(1, 2, sharey=True), DATASETS, strict=True):
            systems = (*ORCAS, "ours")
            bottom = np.zeros(len(systems))
            for share, colour in SHARES.items():
                heights = np.array([found[Case(workload, s)].memory[share] for s in systems])
                label = SHARE_LABELS[share]
                bars = axes.bar([LABELS[s] for s in systems], heights, 0.66, bottom, color=colour)
                bars.set_label(label)
                dark = share == "tokens"
                texts = [f"{h:.1f}" if h >= 3 else "" for h in heights]
                axes.bar_label(
                    bars, texts, label_type="center", fontsize=7.5,
                    color="white" if dark else "black",
                )  # fmt: skip
                bottom += heights
            axes.set_title(TITLES[workload])
            axes.grid(visible=False, axis="x")
            axes.tick_params(axis="x", labelsize=8)
            axes.set_ylim(0, 100)
        canvas.axes[0].set_ylabel("KV memory, %")
        report.legend_above(canvas, canvas.axes[0], 4)
        report.footnote(canvas, f"OPT-13B, 15.7 K slots, {device_of(settings)}")

    title = "what the KV memory holds, OPT-13B"
    facts = {"outcomes": [{"case": case, "outcome": found[case]} for case in cases]}
    return Figure("2", title, rows, facts, draw, (9.0, 3.8), notes, device_of(settings))


def figure_11(settings: Settings) -> Figure:
    """Show the distributions of the lengths of prompts and outputs."""
    rows, drawn = [], {}
    for workload in DATASETS:
        source = source_of(workload, settings)
        rng = np.random.default_rng(settings.seeds[0])
        drawn[workload] = source.draw(2_000 if settings.quick else 100_000, rng)
        names = ("prompt", "output")
        papers = traces.MEAN_LENGTHS[workload]
        for name, lengths, paper in zip(names, drawn[workload], papers, strict=True):
            row = {"lengths": source.name, "of": name, **compared(paper, float(lengths.mean()))}
            row |= {"median": float(np.median(lengths)), "longest": int(lengths.max())}
            rows.append(row)

    def draw(canvas: "Canvas") -> None:
        for axes, workload in zip(canvas.subplots(1, 2), DATASETS, strict=True):
            longest = 2048 if workload == "sharegpt" else 400
            bins = np.linspace(0, longest, 65)
            colours = ("#d55e00", "#0072b2")
            for name, lengths, colour in zip(
                ("prompt", "output"), drawn[workload], colours, strict=True
            ):
                mean = lengths.mean()
                label = f"{name}, mean {mean:.1f}"
                axes.hist(lengths, bins, density=True, alpha=0.55, color=colour, label=label)
                axes.axvline(mean, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.set(title=TITLES[workload], xlabel="tokens", xlim=(0, longest))
            axes.legend()
        canvas.axes[0].set_ylabel("density")

    note = "log-normal, sigma 1, clipped so that a sequence has at most 2,048 tokens"
    return Figure("11", "lengths of prompts and outputs", rows, {}, draw, (8.0, 3.0), (note,))


def figure_13(settings: Settings) -> Figure:
    """Show each system's mean number of requests in a batch, at a fixed request rate."""
    sustained = simulated_sustained(DATASETS, settings)
    rates = {w: FIXED_FRACTION * sustained[w].rate for w in DATASETS}
    systems = (*ORCAS, "ours")
    jobs = [(Case(w, system), rates[w]) for w in DATASETS for system in systems]
    found = dict(zip([case for case, _ in jobs], run_cases(jobs, settings), strict=True))
    rows = []
    for case, outcome in found.items():
        paper, ours = BATCHED[case.workload], found[Case(case.workload)]
        row: dict[str, Any] = {"lengths": case.workload, "system": LABELS[case.system]}
        row |= {"req/s": outcome.rate, "paper's req/s": BATCHED_RATE[case.workload]}
        row |= compared(paper[case.system], outcome.batch)
        row["jpaged over it"] = ours.batch / outcome.batch
        row["paper: vLLM over it"] = paper["ours"] / paper[case.system]
        rows.append(row)
    note = (
        f"rate: {FIXED_FRACTION:g} of what our system sustains in simulation, "
        + ", ".join(f"{sustained[w].rate:.3g} on {w}" for w in DATASETS)
        + " requests a second"
    )

    def draw(canvas: "Canvas") -> None:
        for axes, workload in zip(canvas.subplots(1, 2), DATASETS, strict=True):
            labels = [LABELS[system] for system in systems]
            series = {
                "paper": [BATCHED[workload][system] for system in systems],
                "here": [found[Case(workload, system)].batch for system in systems],
            }
            colours = {"paper": "#b8b8b8", "here": COLOURS["ours"]}
            report.draw_bars(axes, labels, series, colours)
            fixed = f"{rates[workload]:.3g} req/s (the paper: {BATCHED_RATE[workload]:g})"
            axes.set_title(f"{TITLES[workload]}, {fixed}")
            axes.tick_params(axis="x", labelsize=8)
        canvas.axes[0].set_ylabel("requests in a batch")
        canvas.axes[0].legend(loc="upper left")
        report.footnote(canvas, f"OPT-13B, {device_of(settings)}")

    facts = {"sustained": sustained}
    title = "requests in a batch, OPT-13B"
    return Figure("13", title, rows, facts, draw, (9.0, 3.4), (note,), device_of(settings))


def figure_15(settings: Settings) -> Figure:
    """Show the percentage of blocks that sharing saves, on both datasets."""
    widths = WIDTHS[::2] if settings.quick else WIDTHS
    cases = [
        Case(workload, width=width, is_beam=is_beam)
        for workload in DATASETS
        for is_beam in (False, True)
        for width in widths
    ]
    # Use a quarter of the usual number of requests, because each request has up to six sequences.
    fewer = dataclasses.replace(settings, saturation=-(-settings.saturation // 4))
    rates = [SHARING_FRACTION * full.rate for full in saturate_all(cases, fewer)]
    jobs = list(zip(cases, rates, strict=True))
    found = dict(zip(cases, run_cases(jobs, settings), strict=True))
    rows = []
    for case in cases:
        kind = (case.workload, "beam" if case.is_beam else "parallel")
        paper = SAVED[kind][WIDTHS.index(case.width)] if kind in SAVED else SAVED_RANGE[kind]
        row = {"lengths": case.workload, "decoding": kind[1], "width": case.width}
        row["req/s"] = found[case].rate
        rows.append(row | compared(paper, found[case].saved))
    notes = (
        "percent of the blocks it would take not to share, both summed over steps",
        f"rate: {SHARING_FRACTION:g} of what is served when all requests are there from the start",
        "beams: made-up next tokens, Zipf's law with an exponent of each context's own; how sure a "
        "model is decides how long its beams stay apart (bench/synthetic_beams.py); "
        "`python -m bench.memory_savings --engine` has a model's own",
    )

    def draw(canvas: "Canvas") -> None:
        for axes, is_beam in zip(canvas.subplots(1, 2), (False, True), strict=True):
            groups = [f"{TITLES[w].split('-')[0]}\n{n}" for w in DATASETS for n in widths]
            kind = "beam" if is_beam else "parallel"
            papers = dict(zip(WIDTHS, SAVED["alpaca", kind], strict=True))
            # For ShareGPT, the paper gives the savings only for the smallest and the largest number
            # of samples or beams.
            ends: dict[int, float] = dict(
                zip((WIDTHS[0], WIDTHS[-1]), SAVED_RANGE["sharegpt", kind], strict=True)
            )
            series = {
                "paper": [ends.get(n) for n in widths] + [papers[n] for n in widths],
                "here": [found[Case(w, width=n, is_beam=is_beam)].saved
                         for w in DATASETS for n in widths],
            }  # fmt: skip
            colours = {"paper": "#b8b8b8", "here": COLOURS["ours"]}
            report.draw_bars(axes, groups, series, colours)
            axes.tick_params(axis="x", labelsize=7.5)
            axes.set_title("beam search" if is_beam else "parallel sampling")
        canvas.axes[0].set_ylabel("blocks saved, %")
        canvas.axes[0].legend(loc="upper right")
        report.footnote(canvas, f"OPT-13B, blocks of 16, {device_of(settings)}")

    title = "KV blocks saved by sharing, OPT-13B"
    facts = {"outcomes": [{"case": case, "outcome": found[case]} for case in cases]}
    return Figure("15", title, rows, facts, draw, (9.0, 3.4), notes, device_of(settings))
