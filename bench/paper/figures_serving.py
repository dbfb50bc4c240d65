"""Figures 12, 14, 16 and 17: normalised latency against request rate, and the rates sustained."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.paper import report, traces
from bench.paper.measures import (
    Case,
    Settings,
    Sustained,
    device_of,
    make_trace,
    most_excess,
    run_cases,
    simulated_sustained,
    sustain_all,
)
from bench.paper.published import (
    BASIC_RATIO,
    BEAM_6_RATIO,
    CHAT_RATIO,
    LABELS,
    ORCAS,
    PREFIX_RATIOS,
    SERVERS,
    SUSTAINED_RATIOS,
    SYSTEMS,
    WIDTHS,
)
from bench.paper.report import COLOURS, Figure, compared

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

WITH_CACHE = "ours, prefix caching"
COLOURS[WITH_CACHE] = "#56b4e9"
LABELS[WITH_CACHE] = "jpaged, prefix caching"

QUICK_PANELS = (("sharegpt", "13b"), ("sharegpt", "175b"), ("alpaca", "13b"))
"""Panels (dataset, model) of figure 12 in a quick run."""

POINTS = (0.7, 1.0, 1.1)
"""Rates of the figure `agreement`, as fractions of the sustained rate."""

COMPARED = {
    "latency": "normalised latency, s/token",
    "output_tokens_per_s": "output tokens/s",
    "batch": "requests in a batch",
}
MOST_DISAGREEMENT = 0.15


@dataclass(frozen=True)
class Panel:
    """One plot of a figure.

    Attributes:
        title: Title of the plot.
        cases: Cases by system or by name in `LABELS`; "ours" is required.
        paper: For each other system, the paper's value of (vLLM's rate / the system's rate): a
            number or a range.
    """

    title: str
    cases: dict[str, Case]
    paper: dict[str, Any]


def figure_12(settings: Settings) -> Figure:
    """Show latency against rate with one sample per request: three OPT models, two datasets."""
    panels = []
    is_simulated = settings.how == "simulated"
    names = [name for name in settings.models if is_simulated or name == "13b"]
    servers = {name: SERVERS[name] for name in names}
    is_larger = is_simulated and names != ["13b"]
    for workload in settings.lengths:
        name = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}[workload]
        for server, shape in servers.items():
            if settings.quick and (workload, server) not in QUICK_PANELS:
                continue
            cases = {system: Case(workload, system, server) for system in SYSTEMS}
            paper = SUSTAINED_RATIOS if workload == "sharegpt" else {}
            if (workload, server) == ("alpaca", "13b"):
                paper = {"orca_oracle": BASIC_RATIO}
            panels.append(Panel(f"{shape.model}, {name}", cases, paper))
    return _rates(
        "12",
        "normalised latency against request rate, one sample a request",
        panels,
        settings,
        "the paper's ranges are over its three models; 1.3 is section 6.3's",
        *(("66B and 175B: modelled on the paper's 4 x A100 and 8 x A100-80GB",) * is_larger),
    )


def figure_14(settings: Settings) -> Figure:
    """Show latency against rate with several samples or beams per request: OPT-13B on Alpaca."""
    systems = ("orca_oracle", "ours") if settings.quick else (*ORCAS, "ours")
    panels = []
    for is_beam, name in ((False, "parallel sampling"), (True, "beam search")):
        for width in WIDTHS[:1] if settings.quick else WIDTHS:
            cases = {
                system: Case("alpaca", system, width=width, is_beam=is_beam) for system in systems
            }
            paper = {"orca_oracle": BEAM_6_RATIO} if is_beam and width == 6 else {}
            panels.append(Panel(f"{name}, {width}", cases, paper))
    return _rates("14", "parallel sampling and beam search, OPT-13B, Alpaca", panels, settings)


def figure_16(settings: Settings) -> Figure:
    """Show latency against rate for translations with a shared prefix, with LLaMA-13B.

    A KV slot of LLaMA-13B has as many bytes as a slot of OPT-13B.
    """
    panels = []
    for kind, num_tokens in traces.NUM_PREFIX_TOKENS.items():
        cases = {
            "orca_oracle": Case(kind, "orca_oracle"),
            "ours": Case(kind, "ours", prefix_caching=True),
        }
        title = f"{kind}, {num_tokens} tokens shared"
        panels.append(Panel(title, cases, {"orca_oracle": PREFIX_RATIOS[kind]}))
    prompt, output = traces.MEAN_TRANSLATION
    note = (
        f"the paper does not state WMT16's lengths: {prompt:g} prompt tokens of its own and "
        f"{output:g} output tokens are assumed here"
    )
    return _rates("16", "prompts that share a prefix, LLaMA-13B", panels, settings, note)


def figure_17(settings: Settings) -> Figure:
    """Show latency against rate for a chatbot.

    As in the paper, no KV is kept between the rounds of a conversation. One more curve shows jpaged
    with prefix caching.
    """
    cases = {system: Case("chat", system) for system in (*ORCAS, "ours")}
    cases[WITH_CACHE] = Case("chat", "ours", prefix_caching=True)
    panels = [Panel("chatbot, OPT-13B", cases, dict.fromkeys(ORCAS, CHAT_RATIO))]
    note = (
        "prompts are cut to their last 1,024 tokens; from then on a round's prompt does not begin "
        "as the last one's did, so prefix caching finds only the first rounds' history"
    )
    return _rates("17", "chatbot, prompts of up to 1,024 tokens", panels, settings, note)


def agreement(settings: Settings) -> Figure:
    """Compare the simulation with the engine on a device, at three points of figure 12.

    The model is OPT-13B, with ShareGPT-like lengths. The rates are below, at and above the rate
    that the simulation sustains. Simulation and engine serve the same requests.
    """
    sustained = simulated_sustained(["sharegpt"], settings)["sharegpt"].rate
    jobs = {f"{fraction:g}": (Case("sharegpt"), fraction * sustained) for fraction in POINTS}
    title = "simulated and measured, OPT-13B, ShareGPT"
    return _agreement("agreement", title, "of the sustained rate", jobs, settings)


def knees_sharegpt(settings: Settings) -> Figure:
    """Compare the simulation with the engine on a device, at one point of each curve of figure 12.

    Each system serves OPT-13B with ShareGPT-like lengths, at the rate that it sustains in
    simulation.
    """
    return _knees("sharegpt", settings)


def knees_alpaca(settings: Settings) -> Figure:
    """Make the same comparison as `knees_sharegpt`, with Alpaca-like lengths."""
    return _knees("alpaca", settings)


def _knees(workload: str, settings: Settings) -> Figure:
    cases = [Case(workload, system) for system in SYSTEMS]
    found = sustain_all(cases, dataclasses.replace(settings, how="simulated"))
    jobs = {LABELS[case.system]: (case, found[case].rate) for case in cases}
    title = f"every system at the rate that it sustains in simulation, OPT-13B, {workload}"
    return _agreement(f"knees_{workload}", title, "system", jobs, settings)


def _agreement(
    number: str,
    title: str,
    kind: str,
    jobs: dict[str, tuple[Case, float]],
    settings: Settings,
) -> Figure:
    """Run each job on the device and in simulation; return a figure that compares the results.

    `kind` is the heading of the column with the names of the jobs.
    """
    simulated = dataclasses.replace(settings, how="simulated")
    rows, worst = [], 0.0
    for label, job in jobs.items():
        (model,), (device,) = (run_cases([job], each) for each in (simulated, settings))
        for name, what in COMPARED.items():
            there, here = getattr(device, name), getattr(model, name)
            row = {kind: label, "req/s": job[1], "of": what}
            rows.append(row | {"measured": there, "simulated": here, "ratio": here / there})
            worst = max(worst, abs(here / there - 1))
            # Print each row immediately, so that it is not lost if the run is interrupted.
            print(rows[-1], flush=True)
    reached = "reached" if worst <= MOST_DISAGREEMENT else "NOT reached"
    note = f"within {MOST_DISAGREEMENT:.0%} is to be reached; the worst is {worst:.1%}: {reached}"

    def draw(canvas: "Canvas") -> None:
        for axes, what in zip(canvas.subplots(1, 3), COMPARED.values(), strict=True):
            own = [row for row in rows if row["of"] == what]
            series = {way: [row[way] for row in own] for way in ("measured", "simulated")}
            colours = {"measured": COLOURS["ours"], "simulated": "#b8b8b8"}
            report.draw_bars(axes, [*jobs], series, colours, "{:.3g}")
            axes.set(title=what, xlabel=kind)
        canvas.axes[0].legend()
        report.footnote(canvas, f"{title}, {device_of(settings)}")

    size = (9.0, 3.2) if len(jobs) <= 3 else (15.0, 3.4)
    return Figure(number, title, rows, {}, draw, size, (note,), device_of(settings))


def _rates(
    number: str, title: str, panels: Sequence[Panel], settings: Settings, *notes: str
) -> Figure:
    """Search the sustained rates; return a figure with a plot per panel and a curve per system."""
    cases = list(dict.fromkeys(case for panel in panels for case in panel.cases.values()))
    found = sustain_all(cases, settings)
    rows, facts = [], []
    for panel in panels:
        rows += _rows(panel, found)
        facts.append(
            {
                "panel": panel.title,
                "systems": {name: found[case] for name, case in panel.cases.items()},
            }
        )
    notes = (
        "rate: requests a second with a mean normalised latency under "
        f"{settings.latency_factor:g} times that of a request alone; traces of "
        f"{settings.seconds:g} s; median of seeds {', '.join(map(str, settings.seeds))}",
        _excess_note(panels, found, settings),
        *notes,
    )

    def draw(canvas: "Canvas") -> None:
        columns = min(len(panels), 3)
        grid = canvas.subplots(-(-len(panels) // columns), columns, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=True):
            curves = {name: found[case].curve for name, case in panel.cases.items()}
            threshold = found[panel.cases["ours"]].threshold
            report.draw_curves(axes, curves, title=panel.title, threshold=threshold)
        for axes in grid[:, 0]:
            axes.set_ylabel("normalised latency, s/token")
        report.legend_above(canvas, grid.flat[0], 5 if columns == 3 else 3)
        where = device_of(settings)
        if any(panel.cases["ours"].server != "13b" for panel in panels):
            where += " (13B), modelled 4 x A100 (66B) and 8 x A100-80GB (175B)"
        report.footnote(canvas, f"{where}; dashed: latency up to which a rate counts as sustained")

    columns = min(len(panels), 3)
    size = (3.1 * max(columns, 2), 2.5 * -(-len(panels) // columns) + 0.6)
    device = device_of(settings)
    return Figure(number, title, rows, {"panels": facts}, draw, size, notes, device)


def _excess_note(panels: Sequence[Panel], found: dict[Case, Sustained], settings: Settings) -> str:
    """Return a note for the figure about the error that short traces cause.

    The note says, for each panel, by how many percent its sustained rates may be too high.
    """
    excess = {}
    for panel in panels:
        case = panel.cases["ours"]
        trace = make_trace(case.workload, 10.0, 200.0, settings.seeds[0], settings)
        threshold = found[case].threshold
        excess[panel.title] = most_excess(trace, threshold, settings.seconds)
    parts = [
        f"{title}: {f'{percent:.1f} %' if math.isfinite(percent) else 'without bound'}"
        for title, percent in excess.items()
    ]
    return (
        "a queue needs time to grow, so with traces of this length rates of all systems can be "
        f"above what could be served for ever, by up to about: {', '.join(parts)}"
    )


def _rows(panel: Panel, found: dict[Case, Sustained]) -> list[dict[str, Any]]:
    """Return a row per system: the sustained rate, and (jpaged's rate / the system's rate).

    The paper's value of the ratio is in the same row.
    """
    ours = found[panel.cases["ours"]]
    rows = []
    for name, case in panel.cases.items():
        rate = found[case]
        row = {
            "panel": panel.title,
            "system": LABELS[name],
            "req/s": rate.rate,
            "seeds": f"{rate.low:.3g} to {rate.high:.3g}",
        }
        if name == "ours":
            row |= {"jpaged over it": None, "paper": None, "ratio": None}
        else:
            cells = compared(panel.paper.get(name), ours.rate / rate.rate)
            row |= {"jpaged over it": cells["ours"], "paper": cells["paper"]}
            row["ratio"] = cells["ratio"]
        rows.append(row)
    return rows
