"""Measure the request rate that each system sustains with equal KV memory.

    python -m bench.headline [--system ours orca_max] [--keep FILE]

The systems are jpaged's engine, the engine with the other allocators of the paper, and the
contiguous decoder of `bench.contiguous` with both of its batching modes. All run on a device in
real time.

`bench.paper.traces` draws log-normal lengths and Poisson arrivals. The sustained rate is the
highest rate whose mean normalised latency stays below a threshold. The threshold is ten times the
latency of requests that jpaged's engine serves one at a time. A bisection finds the rate for each
seed; the results have the median and the range over the seeds. A trace ends before a long queue has
built up, so the rates of all systems may exceed the true ones. `may_be_above_%` bounds the excess.

The default is OPT-13B's shape with random weights and 12 GB of KV memory, as in the paper. A shape
with shorter steps needs shorter traces for the same bound. A run replaces the rows of the systems
in `--system` in `results/headline_<device>.json`. With `--keep FILE`, every served trace is
appended to the file, and an interrupted search resumes from it.
"""

import argparse
import dataclasses
import gc
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common import ALL_SHAPES, shape_folder
from bench.compare import parse_arguments
from bench.contiguous import Decoder, Request, load
from bench.paper import traces
from bench.paper.allocators import SYSTEMS
from bench.paper.engine_run import EngineWorkload, make_server, run_on_engine
from bench.paper.measures import Settings, most_excess, search
from bench.paper.published import SERVERS
from bench.paper.traces import MAX_MODEL_LEN, Source, TraceRequest
from bench.records import COMMIT, print_table, record, result_path
from jpaged.config import EMBEDDED_MODEL

CONTIGUOUS = {"contiguous_static": "static", "contiguous_slabs": "slabs"}
"""Maps the names of two systems to the batching mode of `bench.contiguous`."""

ALL_SYSTEMS = ("ours", *(system for system in SYSTEMS if system != "ours"), *CONTIGUOUS)
LENGTHS = tuple(traces.MEAN_LENGTHS)
MARKS = {"orca_max": 2.7, "orca_oracle": 1.7}
"""Target of (jpaged's sustained rate / the system's sustained rate), on ShareGPT-like lengths."""

MAX_BATCHED_TOKENS = 2048
GIVE_UP = 1.01
"""A run stops when its mean latency is certain to exceed this multiple of the threshold."""


class Served(NamedTuple):
    """Result of serving a request trace. The docstring of `bench.paper.simulator.Run` explains the
    fields."""

    normalized_latency: float
    output_tokens_per_s: float
    mean_batch: float
    seconds: float
    gave_up: bool


Serve = Callable[[Sequence[TraceRequest], float | None], Served]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model, the memory and the traces of a run.

    Attributes:
        shape: Name of the model's shape; None for the model that ships with jpaged.
        num_slots: Number of tokens that the KV memory holds.
        max_model_len: Maximum number of tokens of a sequence.
        max_num_seqs: Maximum number of sequences in a batch.
        seconds: Length of a trace in seconds. All systems get traces of this length, because above
            the sustained rate the latency grows with the length.
        num_alone: Number of requests that are served one at a time, to set the threshold.
        num_at_once: Number of requests that arrive together, to measure the maximum throughput.
    """

    shape: str | None = "opt-13b"
    num_slots: int = SERVERS["13b"].num_slots
    max_model_len: int = MAX_MODEL_LEN
    max_num_seqs: int = 256
    seconds: float = 120.0
    num_alone: int = 16
    num_at_once: int = 300


QUICK = Sizes(None, 512, 128, 8, 1.0, 2, 5)
QUICK_SETTINGS = Settings(seeds=(0,), tolerance=1.0)


def run_on_decoder(
    decoder: Decoder, trace: Sequence[TraceRequest], give_up_at: float | None = None
) -> Served:
    """Serve a trace with the contiguous decoder in real time.

    Stop early when the mean latency is certain to exceed `give_up_at` (seconds per token).
    `bench.paper.engine_run.run_on_engine` does the same with an engine.
    """
    work = EngineWorkload(trace, "contiguous", 1, None, decoder.model.config.vocab_size)
    given = [Request(work.prompt(i), trace[i].output_len) for i in range(len(trace))]
    places = {id(request): i for i, request in enumerate(given)}
    arrived, batch_seconds, busy, start = 0, 0.0, 0.0, time.monotonic()
    gave_up, now = False, 0.0
    while work.num_open and not gave_up:
        before, now = now, time.monotonic() - start
        while arrived < len(trace) and trace[arrived].arrival <= now:
            work.note_arrival(arrived)
            decoder.add(given[arrived])
            arrived += 1
        if not decoder.num_unfinished:
            time.sleep(max(trace[arrived].arrival - now, 0.0))
            now = time.monotonic() - start
            continue
        batch_seconds += decoder.batch_size * (now - before)
        busy += now - before
        for request in decoder.step():
            work.note_end(places[id(request)], time.monotonic() - start)
        gave_up = give_up_at is not None and work.least_latency(now) > give_up_at
    seconds = time.monotonic() - start - trace[0].arrival
    decoder.clear()
    num_tokens = sum(len(request.tokens) for request in given)
    waits = work.finishes - np.array([request.arrival for request in trace])
    latency = float(np.mean(waits / [request.output_len for request in trace]))
    return Served(
        normalized_latency=work.least_latency(now) if gave_up else latency,
        output_tokens_per_s=num_tokens / seconds,
        mean_batch=batch_seconds / max(busy, 1e-9),
        seconds=seconds,
        gave_up=gave_up,
    )


def start_system(system: str, sizes: Sizes) -> Serve:
    """Create a system and compile its programs; return a function that serves a trace."""
    dummy: dict[str, Any] = {} if sizes.shape is None else {"load_format": "dummy"}
    with ExitStack() as stack:
        folder = stack.enter_context(shape_folder(sizes.shape))
        if system not in CONTIGUOUS:
            server = make_server(
                system,
                folder,
                num_slots=sizes.num_slots,
                max_model_len=sizes.max_model_len,
                max_num_seqs=sizes.max_num_seqs,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                **dummy,
            )
            return lambda trace, limit: _served(run_on_engine(server, trace, give_up_at=limit))
        model, _ = load(folder or EMBEDDED_MODEL, **dummy)
    decoder = Decoder(
        model,
        CONTIGUOUS[system],
        num_slots=max(sizes.num_slots // sizes.max_model_len, 1),
        max_len=sizes.max_model_len,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        # One launch computes 1 or 4 decode steps. The host queues two more launches before reading
        # the tokens of a launch, so the tokens of longer launches would arrive later. Longer
        # launches would save no time, because computing a step takes longer than launching a step.
        launch_steps=(1, 4),
        arrivals=True,
    )
    decoder.warm_up()
    return partial(run_on_decoder, decoder)


def kept(serve: Serve, file: Path, label: str) -> Serve:
    """Return a function that serves a trace by `serve` and appends the result to `file`. If the
    file already has a result for the same trace, the function returns that result.

    Args:
        serve: The function that serves a trace.
        file: File with one JSON line per served trace. A line has a digest of `label`, the trace
            and the latency limit, followed by the result.
        label: Text that identifies the system and the `Sizes` of the run.
    """
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    known = {key: Served(*served) for key, served in map(json.loads, lines)}

    def serve_once(trace: Sequence[TraceRequest], limit: float | None) -> Served:
        text = f"{label} {limit} {[dataclasses.astuple(request) for request in trace]}"
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in known:
            known[key] = serve(trace, limit)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([key, known[key]]) + "\n")
        return known[key]

    return serve_once


def _served(run) -> Served:
    return Served(*(getattr(run, name) for name in Served._fields))


def make_trace(source: Source, sizes: Sizes, rate: float, seed: int) -> list[TraceRequest]:
    """Return requests that arrive at `rate` per second for `sizes.seconds`."""
    return traces.poisson(source, rate, sizes.seconds, seed)


def _at_once(source: Source, count: int) -> list[TraceRequest]:
    """Return `count` requests that all arrive at time 0."""
    found = traces.poisson(source, 1.0, 2.0 * count + 60, seed=0)[:count]
    return [dataclasses.replace(request, arrival=0.0) for request in found]


def latency_alone(serve: Serve, source: Source, sizes: Sizes) -> float:
    """Serve requests one at a time, and return their mean seconds per token."""
    alone = (serve([request], None) for request in _at_once(source, sizes.num_alone))
    return statistics.mean(served.normalized_latency for served in alone)


def sustained(
    serve: Serve, source: Source, sizes: Sizes, threshold: float, settings: Settings
) -> dict:
    """Search the sustained request rate for each seed. Return the results at the median of these
    rates."""
    burst = _at_once(source, sizes.num_at_once)
    full = serve(burst, None)
    rates, tried = [], {}
    for seed in settings.seeds:

        def latency_at(rate: float, seed: int = seed) -> float:
            found = serve(make_trace(source, sizes, rate, seed), GIVE_UP * threshold)
            print(f"  seed {seed}, {rate:.3g} requests/s: {found}", flush=True)
            tried[seed, rate] = found
            return found.normalized_latency

        guess = statistics.median(rates) if rates else len(burst) / full.seconds
        step = 1 + settings.tolerance * (1 if rates else 8)
        rates.append(search(latency_at, threshold, guess, step, settings.tolerance)[0])
    median = statistics.median_low(rates)
    at = tried[settings.seeds[rates.index(median)], median]
    return {
        "sustained_per_s": median,
        "lowest": min(rates),
        "highest": max(rates),
        "output_tokens_per_s": at.output_tokens_per_s,
        "sequences": at.mean_batch,
        "saturated_tokens_per_s": full.output_tokens_per_s,
        "saturated_sequences": full.mean_batch,
        "threshold_s": threshold,
        "may_be_above_%": most_excess(burst, threshold, sizes.seconds),
    }


def with_ratios(rows: list[dict]) -> list[dict]:
    """Add two columns: jpaged's rate divided by the row's rate, and the target of this ratio."""
    ours = {row["lengths"]: row["sustained_per_s"] for row in rows if row["system"] == "ours"}
    found = []
    for row in rows:
        ratio = ours[row["lengths"]] / row["sustained_per_s"] if row["lengths"] in ours else None
        mark = MARKS.get(row["system"]) if row["lengths"] == "sharegpt" else None
        found.append({**row, "ours_over_it": ratio, "to_reach": mark})
    return found


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", choices=ALL_SYSTEMS, nargs="+", default=[*ALL_SYSTEMS])
    parser.add_argument("--lengths", choices=LENGTHS, nargs="+", default=[*LENGTHS])
    parser.add_argument("--shape", choices=[*ALL_SHAPES], default=Sizes().shape)
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[Sizes().seconds],
        help="length of a trace: one value, or one for each of --lengths",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[*Settings().seeds])
    parser.add_argument("--tolerance", type=float, default=Settings().tolerance)
    parser.add_argument("--quick", action="store_true", help="a few short requests, for any device")
    parser.add_argument("--output", type=Path, help="folder of the results (bench/results)")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="record served traces, and resume from them"
    )
    return parser


def main() -> None:
    parser = _build_parser()
    args = parse_arguments(parser)
    if len(args.seconds) not in (1, len(args.lengths)):
        parser.error(
            f"--seconds {' '.join(map(str, args.seconds))}: give one value for all lengths, or one "
            f"for each of {' '.join(args.lengths)}"
        )
    if args.keep is not None and not args.keep.parent.is_dir():
        parser.error(f"--keep {args.keep}: create the folder {args.keep.parent} first")
    sizes = dataclasses.replace(Sizes(), shape=args.shape, seconds=args.seconds[0])
    settings = Settings(seeds=tuple(args.seeds), tolerance=args.tolerance)
    if args.quick:
        sizes, settings = QUICK, QUICK_SETTINGS
    where = {} if args.output is None else {"folder": args.output}
    path = result_path("headline", **where)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    sources = {name: _source(name, sizes) for name in args.lengths}
    given = args.seconds * (1 if len(args.seconds) > 1 else len(args.lengths))
    sizes_for = {
        name: sizes if args.quick else dataclasses.replace(sizes, seconds=seconds)
        for name, seconds in zip(args.lengths, given, strict=True)
    }
    known = {row["lengths"]: row["threshold_s"] for row in rows if row["system"] == "ours"}
    order = sorted(args.system, key=lambda system: system != "ours")
    missing = [name for name in sources if name not in known and order[0] != "ours"]
    if missing:
        parser.error(f"run --system ours first: it sets the threshold of {', '.join(missing)}")
    for system in order:
        print(f"{system}: starting", flush=True)
        serve = start_system(system, sizes)
        if args.keep is not None:
            serve = kept(serve, args.keep, f"{system} {dataclasses.astuple(sizes)}")
        for name, source in sources.items():
            if system == "ours":
                known[name] = settings.latency_factor * latency_alone(serve, source, sizes)
            figures = sustained(serve, source, sizes_for[name], known[name], settings)
            label = {"lengths": name, "system": system}
            figures |= {"trace_s": sizes_for[name].seconds, "commit": COMMIT}
            rows = [row for row in rows if not label.items() <= row.items()] + [label | figures]
            rows = with_ratios(rows)
            record("headline", rows, seeds=args.seeds, **dataclasses.asdict(sizes), **where)
        del serve
        gc.collect()
    print_table(rows)
    print(path)


def _source(name: str, sizes: Sizes) -> Source:
    if sizes.max_model_len == MAX_MODEL_LEN:
        return traces.of_dataset(name)
    means = [mean / 20 for mean in traces.MEAN_LENGTHS[name]]
    return traces.log_normal(name, (means[0] + 1, means[1] + 1), sizes.max_model_len)


if __name__ == "__main__":
    main()
