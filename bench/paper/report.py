"""The output of a figure: a table on the terminal, a JSON file, and a picture.

matplotlib draws the pictures (`pip install "jpaged[bench]"`). It is imported only to draw.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import INSTALL
from bench.paper.published import LABELS, PLOT_ONLY, between
from bench.records import RESULTS, print_table, record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

PICTURES = Path(__file__).parent.parent.parent / "docs" / "paper"

COLOURS = {
    "ours": "#0072b2",
    "orca_oracle": "#d55e00",
    "orca_pow2": "#e69f00",
    "orca_max": "#a3242f",
    "fastertransformer": "#4d8f3c",
}
MARKERS = {
    "ours": "o",
    "orca_oracle": "s",
    "orca_pow2": "D",
    "orca_max": "^",
    "fastertransformer": "v",
}
GREY = "#7a7a7a"
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "figure.dpi": 110,
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of the paper, repeated with jpaged.

    Attributes:
        number: Name of the figure on the command line, such as "12", "18a" or "table1".
        title: Title of the figure.
        rows: Rows of the table: names and settings, then `paper`, `ours` and `ratio`.
        facts: Other recorded data: curves, definitions and the device.
        draw: Function that draws on an empty matplotlib figure; None if nothing was measured.
        size: Width and height of the picture in inches.
        notes: Sentences under the table.
        device: Device of the times: "simulated NVIDIA H200", "NVIDIA H200", "no device".
    """

    number: str
    title: str
    rows: list[dict[str, Any]]
    facts: dict[str, Any]
    draw: Callable[["Canvas"], None] | None
    size: tuple[float, float] = (8.0, 3.6)
    notes: tuple[str, ...] = ()
    device: str = "no device"


def compared(paper: float | Sequence[float | None] | None, ours: float | None) -> dict[str, Any]:
    """Return the cells `paper`, `ours` and `ratio` (ours / paper) of a table row.

    `paper` may be a range (low, high). The ratio is then 1 if `ours` is in the range; otherwise it
    is `ours` divided by the nearer end of the range. If `paper` is None, the paper has only a plot,
    and the ratio is None.
    """
    if paper is None:
        return {"paper": PLOT_ONLY, "ours": ours, "ratio": None}
    if isinstance(paper, int | float):
        ratio = None if ours is None or paper == 0 else ours / paper
        return {"paper": f"{paper:g}", "ours": ours, "ratio": ratio}
    low, high = paper
    if high is None:
        raise ValueError(f"the range {paper!r} has no upper end: pass (low, high)")
    return {"paper": between(low, high), "ours": ours, "ratio": _ratio(low, high, ours)}


def _ratio(low: float | None, high: float, ours: float | None) -> float | None:
    if ours is None:
        return None
    if ours > high:
        return ours / high
    return ours / low if low is not None and ours < low else 1.0


def require_matplotlib() -> None:
    """Check that pictures can be drawn. Call this before the measurements start.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"matplotlib is not installed: run {INSTALL}, or pass --no-pictures"
        ) from error


def show(figure: Figure, *, out: Path | None, pictures: bool, facts: Mapping[str, Any]) -> None:
    """Print the figure's table, write its JSON, and draw it.

    Args:
        figure: The figure.
        out: Folder for both files. None means `bench/results/` and `docs/paper/`.
        pictures: Whether to draw.
        facts: Settings of the run, to write into the JSON.
    """
    title = "Table 1" if figure.number == "table1" else f"Figure {figure.number}"
    print(f"\n{title}: {figure.title}")
    print_table(figure.rows)
    for note in figure.notes:
        print(f"  {note}")
    more = {"figure": figure.number, "title": figure.title, **facts, **figure.facts}
    more["notes"] = list(figure.notes)
    rows, more = _plain(figure.rows), _plain(more)
    name = f"paper_{figure.number}"
    print(" ", record(name, rows, device=figure.device, folder=out or RESULTS, **more))
    if pictures and figure.draw is not None:
        print(" ", save(figure, (out or PICTURES) / picture_name(figure.number, figure.device)))


def picture_name(number: str, device: str) -> str:
    """Return the file name of a figure's picture.

    The file name ends with "_measured.png" if the times were measured on a real device.
    """
    stem = f"figure_{number}" if number[0].isdigit() else number
    is_measured = not device.startswith(("simulated", "no device"))
    return f"{stem}_measured.png" if is_measured else f"{stem}.png"


def save(figure: Figure, path: Path) -> Path:
    """Draw a figure, and save it as a PNG file at `path`."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    if figure.draw is None:
        raise ValueError(f"figure {figure.number} has no measurements to draw")
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        FigureCanvasAgg(canvas)
        figure.draw(canvas)
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, metadata={"Software": None})
    return path


def draw_curves(
    axes: "Axes",
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str = "",
    threshold: float | None = None,
) -> None:
    """Draw normalised latency against request rate, with one line per system.

    The axis ends at 2.5 times the threshold, so higher latencies are not visible.

    Args:
        axes: The matplotlib axes.
        curves: For each system, pairs (requests per second, seconds per token).
        title: Title of the panel.
        threshold: Normalised latency up to which a rate counts as sustained, drawn as a dashed
            line.
    """
    top = 2.5 * threshold if threshold else max(y for c in curves.values() for _, y in c)
    for system, points in curves.items():
        xs, ys = zip(*sorted(points), strict=True)
        label, colour = LABELS.get(system, system), COLOURS.get(system)
        axes.plot(xs, ys, MARKERS.get(system, "o") + "-", color=colour, label=label)
    if threshold:
        axes.axhline(threshold, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(title=title, xlabel="requests a second", ylim=(0, top))
    axes.set_xlim(left=0)


def draw_bars(
    axes: "Axes",
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, str],
    number: str = "{:.1f}",
) -> None:
    """Draw groups of bars, with a number at each bar. For a value of None, draw no bar."""
    width = 0.8 / len(series)
    for place, (name, values) in enumerate(series.items()):
        at = [i + (place - (len(series) - 1) / 2) * width for i in range(len(groups))]
        pairs = [(x, y) for x, y in zip(at, values, strict=True) if y is not None]
        bars = axes.bar(
            [x for x, _ in pairs], [y for _, y in pairs], width * 0.92,
            label=name, color=colours.get(name),
        )  # fmt: skip
        labels = [number.format(y) for _, y in pairs]
        axes.bar_label(bars, labels, fontsize=7, padding=1, color="#444444")
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.14)


def legend_above(canvas: "Canvas", axes: "Axes", columns: int = 5) -> None:
    """Draw one legend for all panels, above the panels."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside upper center", ncols=columns)


def footnote(canvas: "Canvas", text: str) -> None:
    """Write a line of text under the panels, which names the source of the numbers."""
    canvas.supxlabel(text, fontsize=7.5, color=GREY)


def log_blocks(axes: "Axes", sizes: Sequence[int]) -> None:
    """Use a logarithmic axis for block sizes."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("block size, tokens")


def _plain(value: Any) -> Any:
    """Convert a value for JSON: round numbers to seven digits, and convert keys to strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        # JSON has no infinity and no NaN, so write null instead.
        return float(f"{value:.7g}") if value == value and abs(value) != float("inf") else None
    return value
