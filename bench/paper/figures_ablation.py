"""Figures 18 and 19: the attention kernel, block sizes, and swapping against recomputation."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bench.paper import report
from bench.paper.figures_memory import DATASETS, TITLES
from bench.paper.measures import (
    FIXED_FRACTION,
    Case,
    Outcome,
    Settings,
    device_of,
    modelled_recovery,
    run_cases,
    simulated_sustained,
)
from bench.paper.published import (
    BATCHED_RATE,
    BEST_BLOCK_SIZES,
    BLOCK_SIZES,
    KERNEL_BATCHES,
    KERNEL_CONTEXTS,
    KERNEL_OVERHEAD_PERCENT,
    RECOMPUTE_OVER_SWAP,
    RECOMPUTE_WINS,
    SWAP_WINS,
)
from bench.paper.report import COLOURS, Figure, compared
from bench.records import RESULTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

LONGER_CONTEXTS = (512, 1024, 2048)
"""Context lengths that figure 18a shows in addition to the paper's; today's prompts are longer."""

RECOVERED_TOKENS = 1024
"""Number of tokens of the preempted sequence in figure 19a. The paper does not state its number."""

QUICK_BLOCK_SIZES = (1, 16, 256)
RECOVERY_COLOURS = {"recompute": "#0072b2", "swap": "#d55e00"}


def figure_18a(settings: Settings) -> Figure:
    """Compare the speed of paged attention with kernels for contiguous keys and values.

    The measurement needs a GPU. If `settings.how` is "simulated", the figure shows the last
    measurement that was recorded on a GPU. If `settings.quick` is true, tiny sizes are measured on
    any device.
    """
    title = "attention kernel: paged against contiguous, a decode step of OPT-13B's heads"
    if settings.how != "simulated" or settings.quick:
        return _kernels_measured(title, settings)
    found = sorted(RESULTS.glob("paper_18a_nvidia-*.json"))
    if not found:
        note = "NOT MEASURED: this figure needs an NVIDIA GPU; run it with --device on one"
        low, high = KERNEL_OVERHEAD_PERCENT
        cells = compared((low, high), None)
        rows = [{"batch": batch, "of": "overhead, %"} | cells for batch in KERNEL_BATCHES]
        return Figure("18a", title, rows, {"measured": False}, None, notes=(note,))
    document = json.loads(found[-1].read_text(encoding="utf-8"))
    note = f"as measured on {document['device']}, {document['date']}, commit {document['commit']}"
    return _kernels_figure(title, document["rows"], document["device"], (note,))


def _kernels_measured(title: str, settings: Settings) -> Figure:
    import jax

    device = jax.local_devices()[0].device_kind
    contexts = (64,) if settings.quick else (*KERNEL_CONTEXTS, *LONGER_CONTEXTS)
    rows = []
    for batch in KERNEL_BATCHES[:1] if settings.quick else KERNEL_BATCHES:
        for context in contexts:
            seconds = _attention_seconds(batch, context, 2 if settings.quick else 40, settings)
            name, contiguous = min(seconds["contiguous"].items(), key=lambda item: item[1])
            overhead = 100 * (seconds["paged"] / contiguous - 1)
            row = {"batch": batch, "context": context, "paged us": 1e6 * seconds["paged"]}
            row |= {"contiguous us": 1e6 * contiguous, "by": name, "of": "overhead, %"}
            print(f"  {batch} x {context}: {overhead:.1f} % over {name}", flush=True)
            rows.append(row | compared(KERNEL_OVERHEAD_PERCENT, overhead))
    notes = ("contiguous: the faster of the kernels that JAX offers here, lengths known to it",)
    if jax.default_backend() == "cpu":
        notes = (f"plain XLA on a CPU ({device}) at tiny sizes, only as a smoke test",)
    return _kernels_figure(title, rows, device, notes)


def _kernels_figure(
    title: str, rows: list[dict[str, Any]], device: str, notes: tuple[str, ...]
) -> Figure:
    def draw(canvas: "Canvas") -> None:
        batches = sorted({row["batch"] for row in rows})
        panels = canvas.subplots(1, len(batches), squeeze=False)[0]
        for axes, batch in zip(panels, batches, strict=True):
            own = [row for row in rows if row["batch"] == batch]
            contexts = [str(row["context"]) for row in own]
            series = {kind: [row[f"{kind} us"] for row in own] for kind in ("paged", "contiguous")}
            colours = {"paged": COLOURS["ours"], "contiguous": "#b8b8b8"}
            report.draw_bars(axes, contexts, series, colours)
            axes.set(title=f"batch {batch}", xlabel="context, tokens")
        canvas.axes[0].set_ylabel("us a call")
        canvas.axes[0].legend()
        report.footnote(canvas, device)

    return Figure("18a", title, rows, {"measured": True}, draw, (8.0, 3.2), notes, device)


def _attention_seconds(
    batch: int, context: int, num_heads: int, settings: Settings
) -> dict[str, Any]:
    """Return the seconds per call of paged attention and of each contiguous kernel, by name."""
    import jax
    import jax.numpy as jnp

    from bench import kernels
    from pallas_kernels import select_backend

    backend = select_backend(jax.default_backend())
    case = kernels.Case("", batch, context, 0, (num_heads, num_heads), 16, 0.0, "us")
    queries, pools, indices = kernels.build(case, max_pools=2 if settings.quick else None)
    time_call = _median_call if settings.quick else kernels.seconds_per_call
    dtype_scale = kernels.HEAD_SIZE**-0.5
    paged = time_call(kernels.attention(case, backend), queries, pools, indices, 7)
    slabs = [
        jax.tree.map(lambda x: x[1:].reshape(batch, -1, *x.shape[2:])[:, :context], pool)
        for pool in pools
    ]
    lens = (jnp.full((batch,), context, jnp.int32),)
    found = {}
    for name in ("xla",) if jax.default_backend() == "cpu" else ("cudnn", "xla"):

        def contiguous(query: Any, slab: Any, lens: Any, name: Any = name) -> Any:
            return jax.nn.dot_product_attention(
                query[:, None], slab.k, slab.v, key_value_seq_lengths=lens,
                scale=dtype_scale, implementation=name,
            )  # fmt: skip

        # `jax.nn.dot_product_attention` mixes dtypes, and JAX may be configured to refuse that.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            found[name] = time_call(contiguous, queries, slabs, lens, 7)
    return {"paged": paged, "contiguous": found}


def _median_call(
    op: Callable, queries: Sequence, pools: Sequence, indices: tuple, repeats: int
) -> float:
    """Return the median seconds of a jitted call of `op`.

    Quick runs use this function, because `kernels.seconds_per_call` compiles more programs.
    """
    import jax

    step = jax.jit(op)
    jax.block_until_ready(step(queries[0], pools[0], *indices))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(queries[0], pools[0], *indices))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def figure_18b(settings: Settings) -> Figure:
    """Show the normalised latency of jpaged by block size, at a fixed request rate."""
    sizes = QUICK_BLOCK_SIZES if settings.quick else BLOCK_SIZES
    sustained = simulated_sustained(DATASETS, settings)
    rates = {w: FIXED_FRACTION * sustained[w].rate for w in DATASETS}
    jobs = [(Case(w, block_size=size), rates[w]) for w in DATASETS for size in sizes]
    found = dict(zip([case for case, _ in jobs], run_cases(jobs, settings), strict=True))
    rows = []
    for workload in DATASETS:
        best = min(found[Case(workload, block_size=size)].latency for size in sizes)
        low, high = BEST_BLOCK_SIZES[workload]
        for size in sizes:
            outcome = found[Case(workload, block_size=size)]
            row = {"lengths": workload, "block size": size, "req/s": rates[workload]}
            row |= {"batch": outcome.batch, "waste, %": outcome.waste}
            row["paper"] = "among the best" if low <= size <= high else "worse"
            rows.append(row | {"ours": outcome.latency, "ratio": outcome.latency / best})
    notes = (
        "`ours` is normalised latency, s/token; the ratio is to our best; the paper states which "
        "sizes did best",
        _fixed_rates(rates),
    )

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots()
        for workload, colour in zip(DATASETS, ("#0072b2", "#d55e00"), strict=True):
            ys = [found[Case(workload, block_size=size)].latency for size in sizes]
            label = f"{TITLES[workload]}, {rates[workload]:.3g} req/s"
            axes.plot(sizes, ys, "o-", color=colour, label=label)
        report.log_blocks(axes, sizes)
        # Use a logarithmic axis: with large blocks, short requests waste so much memory that the
        # server is overloaded, and the latency is a hundred times higher.
        axes.set(ylabel="normalised latency, s/token", yscale="log")
        axes.legend()
        report.footnote(canvas, f"OPT-13B, {device_of(settings)}")

    facts = {"outcomes": _pairs(found), "sustained": sustained}
    title = "normalised latency by block size, OPT-13B"
    return Figure("18b", title, rows, facts, draw, (6.0, 3.4), notes, device_of(settings))


def figure_19a(settings: Settings) -> Figure:
    """Compare two ways to recover a preempted sequence: times of recomputing and of swapping."""
    sizes = QUICK_BLOCK_SIZES if settings.quick else BLOCK_SIZES
    found = _recovery_seconds(sizes, settings)
    rows = []
    for size, (recompute, swap) in found.items():
        row = {"block size": size, "recompute ms": 1e3 * recompute, "swap out + in ms": 1e3 * swap}
        row |= {"of": "recompute over swap", "paper": _recovery_in_the_paper(size)}
        limit = RECOMPUTE_OVER_SWAP
        rows.append(row | {"ours": recompute / swap, "ratio": recompute / swap / limit})
    notes = [
        f"{RECOVERED_TOKENS:,} tokens of OPT-13B; the paper's times are plotted only; the ratio is "
        f"to its bound, recomputation at most {RECOMPUTE_OVER_SWAP:g} of swapping's time",
    ]
    if settings.how == "simulated":
        notes.append("from the device model: block sizes that were not recorded are extrapolated")
    else:
        notes.append("recomputing was timed with blocks of 16 and stands for all sizes")

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots()
        for name, which in (("recompute", 0), ("swap", 1)):
            label = "recompute" if name == "recompute" else "swap out + in"
            ys = [1e3 * found[size][which] for size in sizes]
            axes.plot(sizes, ys, "o-", color=RECOVERY_COLOURS[name], label=label)
        report.log_blocks(axes, sizes)
        axes.set(ylabel="ms", ylim=(0, None))
        axes.legend()
        report.footnote(canvas, f"OPT-13B, {RECOVERED_TOKENS:,} tokens, {device_of(settings)}")

    title = "recovering a preempted sequence, by block size"
    device = device_of(settings)
    return Figure("19a", title, rows, {}, draw, (6.0, 3.2), tuple(notes), device)


def _recovery_seconds(sizes: Sequence[int], settings: Settings) -> dict[int, tuple[float, float]]:
    """Return the seconds to recompute and to swap `RECOVERED_TOKENS`, by block size.

    On a device, recomputing is timed only with blocks of 16 slots, because every block size needs
    other compiled programs. With blocks of fewer than 8 slots, recomputing may take longer, because
    the prefill kernel for Hopper GPUs does not support such blocks.
    """
    if settings.how == "simulated":
        return {size: modelled_recovery(RECOVERED_TOKENS, size) for size in sizes}
    import jax
    import jax.numpy as jnp

    from bench import swap
    from bench.common import ALL_SHAPES
    from jpaged.models.registry import read_model_config
    from jpaged.runtime.preemption_timing import measure_preemption_costs

    num_tokens, repeats = (256, 2) if settings.quick else (RECOVERED_TOKENS, 7)
    model = read_model_config(swap.TINY if settings.quick else ALL_SHAPES["opt-13b"])
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    swaps = {size: swap.swap_seconds(model, dtype, size, num_tokens, repeats) for size in sizes}
    runs = swap.Sizes((), (num_tokens,), 2 * num_tokens, 8, num_tokens, repeats)
    recompute_cost = measure_preemption_costs(*swap.make_runner(model, dtype, runs)).recompute_cost(
        num_tokens
    )
    return {size: (recompute_cost, seconds) for size, seconds in swaps.items()}


def _recovery_in_the_paper(size: int) -> str:
    if size <= RECOMPUTE_WINS[1]:
        return "recompute better"
    return "swap better" if size >= SWAP_WINS[0] else "alike"


def figure_19b(settings: Settings) -> Figure:
    """Show the normalised latency by block size, with recomputing and with swapping."""
    sizes = QUICK_BLOCK_SIZES if settings.quick else BLOCK_SIZES
    base = Case("sharegpt")
    sustained = simulated_sustained(["sharegpt"], settings)["sharegpt"]
    rate = FIXED_FRACTION * sustained.rate
    jobs = [
        (dataclasses.replace(base, block_size=size, preemption=way), rate)
        for way in ("recompute", "swap")
        for size in sizes
    ]
    outcomes = run_cases(jobs, settings)
    found = dict(zip([case for case, _ in jobs], outcomes, strict=True))
    rows = []
    for size in sizes:
        pair = {
            way: found[dataclasses.replace(base, block_size=size, preemption=way)]
            for way in ("recompute", "swap")
        }
        row = {"block size": size, "req/s": rate}
        row |= {f"{way}, s/token": outcome.latency for way, outcome in pair.items()}
        row |= {f"{way}s": outcome.num_preemptions for way, outcome in pair.items()}
        row |= {"of": "recompute over swap", "paper": _recovery_in_the_paper(size)}
        over = pair["recompute"].latency / pair["swap"].latency
        rows.append(row | {"ours": over, "ratio": None})
    notes = (
        "`ours` is recompute's normalised latency over swap's; the paper's curves are plotted "
        "only, its text says which was better at the same rate",
        _fixed_rates({"sharegpt": rate}),
    )

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots()
        for way, colour in RECOVERY_COLOURS.items():
            ys = [
                found[dataclasses.replace(base, block_size=size, preemption=way)].latency
                for size in sizes
            ]
            axes.plot(sizes, ys, "o-", color=colour, label=way)
        report.log_blocks(axes, sizes)
        axes.set(ylabel="normalised latency, s/token", ylim=(0, None))
        axes.legend()
        text = f"OPT-13B, ShareGPT-like, {rate:.3g} req/s, {device_of(settings)}"
        report.footnote(canvas, text)

    facts = {"outcomes": _pairs(found), "sustained": sustained}
    title = "swapping against recomputation end to end, OPT-13B, ShareGPT"
    return Figure("19b", title, rows, facts, draw, (6.0, 3.2), notes, device_of(settings))


def _fixed_rates(rates: dict[str, float]) -> str:
    each = ", ".join(
        f"{rate:.3g} on {w} (the paper: {BATCHED_RATE[w]:g})" for w, rate in rates.items()
    )
    of = "what our system sustains in simulation with blocks of 16"
    return f"rate: {FIXED_FRACTION:g} of {of}: {each}"


def _pairs(found: dict[Case, Outcome]) -> list[dict[str, Any]]:
    return [{"case": case, "outcome": outcome} for case, outcome in found.items()]
