"""Definitions of the measured quantities. They were written before the first run and have not
changed since.

*Normalised latency*: the mean over a trace's requests of (end - arrival) / output tokens, seconds a
token, as the paper has it (section 6.1). The end is when the last token of the last of a request's
sequences is read. With several samples or beams, the tokens of one of them count.

*Sustained rate*: the highest request rate at which the mean normalised latency stays under
`Settings.latency_factor` times that of requests served one at a time: same lengths, same device,
our own system for all systems alike. The factor is 10. Alone, OPT-13B takes 0.007 s a token
on an H200, so ten times that is 0.07 s a token, which is still faster than people read; and there
most of a request's latency is spent in the queue. `Sustained.sensitivity` has the rates for factors
of 5 and 20. In a short trace a queue has no time to grow, and rates above what could be served for
ever pass (`most_excess`; figures state it). The rate is found by bisection to
`Settings.tolerance` for each seed; the median of three seeds is reported, the lowest and the
highest beside it.

*Where the paper fixes a rate* (figures 13, 18b, 19b) ours is `FIXED_FRACTION` of our system's
sustained rate on these lengths, and both rates are printed. The paper's text does not say what
vLLM sustains, so the paper's own fraction is not known exactly; its ratios say that its rate
saturates every Orca system and not vLLM, which 0.9 does here.
"""

import dataclasses
import gc
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from bench.paper import traces
from bench.paper.device_model import DeviceModel, device_model
from bench.paper.progress import Progress
from bench.paper.published import SERVERS
from bench.paper.simulator import Run, simulate
from bench.paper.traces import MAX_MODEL_LEN, Source, TraceRequest

FIXED_FRACTION = 0.9

GPUS = {"13b": ("h200", 1), "66b": ("a100-40gb", 4), "175b": ("a100-80gb", 8)}
"""GPUs of each server of table 1 here: a measured one, and the paper's."""

T = TypeVar("T")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Case:
    """A system and a workload, without a rate.

    Attributes:
        workload: "sharegpt", "alpaca", "chat", "1-shot" or "5-shot".
        system: A key of `published.LABELS`.
        server: A key of `published.SERVERS`.
        block_size: Number of slots in a block of our system.
        width: Number of samples or beams per request.
        is_beam: Whether the request uses beam search.
        prefix_caching: Whether prompts with a common prefix share blocks.
        preemption: "recompute" or "swap".
        max_num_seqs: Maximum number of sequences in a batch.
    """

    workload: str
    system: str = "ours"
    server: str = "13b"
    block_size: int = 16
    width: int = 1
    is_beam: bool = False
    prefix_caching: bool = False
    preemption: str = "recompute"
    max_num_seqs: int = 256


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of one run; `Run` of `bench.paper.simulator` has the definitions.

    Attributes:
        rate: Arriving requests per second.
        latency: Mean normalised latency, seconds per token; a lower bound if `gave_up` is True.
        gave_up: Whether the run was stopped early because its latency was far too high.
        output_tokens_per_s: Generated tokens per second.
        batch: Requests in a batch, mean over time.
        memory: Shares of the KV slots under pressure, percent, mean over time: "tokens",
            "reserved", "internal", "external", "free".
        held: Percent of the KV slots that requests hold, mean over the time of all steps.
        waste: Percent of the held slots without a token, mean over time.
        waste_formula: Half a block per sequence, as a percentage of the held slots.
        saved: Blocks saved by sharing, percent.
        hit: Prompt tokens found in the prefix cache, percent.
        num_preemptions: Number of times that a running request lost its memory.
        num_requests: Number of requests of the trace.
        seconds: From the first arrival to the last end.
    """

    rate: float
    latency: float
    gave_up: bool
    output_tokens_per_s: float
    batch: float
    memory: dict[str, float]
    held: float
    waste: float
    waste_formula: float
    saved: float
    hit: float
    num_preemptions: int
    num_requests: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Sustained:
    """Result of `sustain`.

    Attributes:
        rate: Median rate of all seeds, in requests per second.
        low, high: Lowest and highest rate of all seeds.
        threshold: Maximum latency of a sustained rate, in seconds per token.
        curve: Pairs of rate and normalised latency of the first seed, by rate.
        sensitivity: Rates on this curve with half and with twice the threshold.
    """

    rate: float
    low: float
    high: float
    threshold: float
    curve: tuple[tuple[float, float], ...]
    sensitivity: tuple[float | None, float | None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and limits of a run.

    Attributes:
        how: "simulated" or "measured".
        quick: Whether the run only tests that the code works.
        seconds: Length of a trace, if at least `least_requests` arrive in this time.
        least_requests: Minimum mean number of requests in a trace.
        saturation: Number of requests for measuring the rate of a saturated server.
        seeds: Seeds of the traces.
        latency_factor: Factor of the latency limit that defines a sustained rate.
        tolerance: Relative width at which a bisection ends.
        fractions: Rates of a curve, as fractions of the sustained rate.
        processes: Number of concurrent runs.
        files: Pairs of a dataset and the user's file that replaces it.
        models: Keys of `published.SERVERS` to show in figure 12.
        lengths: Datasets to show in figure 12.
        keep: File with the sustained rates that a device has found so far, one per line. Later runs
            with the same settings reuse these rates.
    """

    how: str = "simulated"
    quick: bool = False
    seconds: float = 3600.0
    least_requests: int = 100
    saturation: int = 2000
    seeds: tuple[int, ...] = (0, 1, 2)
    latency_factor: float = 10.0
    tolerance: float = 0.03
    fractions: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.15)
    processes: int = 2
    files: tuple[tuple[str, str], ...] = ()
    models: tuple[str, ...] = tuple(SERVERS)
    lengths: tuple[str, ...] = tuple(traces.MEAN_LENGTHS)
    keep: Path | None = None


@cache
def source_of(workload: str, settings: Settings) -> Source:
    """Return the lengths of a dataset: the paper's lengths or the user's file."""
    files = dict(settings.files)
    return traces.from_file(files[workload]) if workload in files else traces.of_dataset(workload)


def make_trace(
    workload: str, rate: float, seconds: float, seed: int, settings: Settings
) -> list[TraceRequest]:
    """Return the requests of a workload."""
    if workload in traces.NUM_PREFIX_TOKENS:
        return traces.translation(workload, rate, seconds, seed)
    if workload == "chat":
        return traces.chat(rate, seconds, seed, source_of("sharegpt", settings))
    return traces.poisson(source_of(workload, settings), rate, seconds, seed)


def shape_of(case: Case) -> str:
    """Return the shape of the model: LLaMA-13B for translations, otherwise OPT."""
    is_translation = case.workload in traces.NUM_PREFIX_TOKENS
    return "llama-13b" if is_translation else f"opt-{case.server}"


def device_of(settings: Settings) -> str:
    """Return the device of OPT-13B's times, as in `Figure.device`."""
    if settings.how == "simulated":
        return "simulated NVIDIA H200"
    import jax

    return jax.local_devices()[0].device_kind


def run(
    case: Case, rate: float, seed: int, settings: Settings, give_up_at: float | None
) -> Outcome:
    """Serve a trace of the case's workload."""
    seconds = max(settings.seconds, settings.least_requests / rate)
    trace = make_trace(case.workload, rate, seconds, seed, settings)
    return _outcome(_serve(case, trace, settings, give_up_at), rate)


def saturate(case: Case, settings: Settings) -> Outcome:
    """Serve `settings.saturation` requests that are all there from the start."""
    trace = make_trace(case.workload, 10.0, settings.saturation / 10, settings.seeds[0], settings)
    served = _serve(case, [dataclasses.replace(r, arrival=0.0) for r in trace], settings, None)
    return _outcome(served, served.num_finished / served.seconds)


def modelled_recovery(num_tokens: int, block_size: int) -> tuple[float, float]:
    """Return the seconds to recompute, and to swap out and in, a sequence of OPT-13B."""
    device = _device("opt-13b", "13b")
    one_way = device.swap_seconds(-(-num_tokens // block_size), block_size)
    return device.prefill_seconds([num_tokens]), 2 * one_way


@cache
def _latency_alone(case: Case, settings: Settings) -> float:
    is_simulated = settings.how == "simulated"
    count = 10 if settings.quick else 200 if is_simulated else 20
    trace = make_trace(case.workload, 10.0, count / 10, settings.seeds[0], settings)
    # A long gap costs no time in a simulation. On a device, a short gap may let requests overlap.
    gap = 1e4 if is_simulated else 1.0
    spread = [dataclasses.replace(r, arrival=gap * i) for i, r in enumerate(trace)]
    return _serve(case, spread, settings, None).normalized_latency


def _latency(case: Case, seed: int, settings: Settings, give_up_at: float, rate: float) -> float:
    return run(case, rate, seed, settings, give_up_at).latency


def _serve(
    case: Case, trace: Sequence[TraceRequest], settings: Settings, give_up_at: float | None
) -> Run:
    group = {
        "num_samples": 1 if case.is_beam else case.width,
        "beam_width": case.width if case.is_beam else None,
        "give_up_at": give_up_at,
    }
    if settings.how != "simulated":
        return _serve_on_device(case, trace, settings, group)
    return simulate(
        trace,
        case.system,
        _device(shape_of(case), case.server),
        num_slots=SERVERS[case.server].num_slots,
        block_size=case.block_size,
        prefix_caching=case.prefix_caching,
        preemption=case.preemption,
        max_num_seqs=case.max_num_seqs,
        **group,
    )


def run_all(
    function: Callable[[T], R], jobs: Sequence[T], settings: Settings, what: str
) -> list[R]:
    """Run `settings.processes` jobs at a time, and return `function(job)` for each job, in order.

    Show on stderr how many jobs are done; `what` is the name of the jobs.
    """
    with Progress(what, len(jobs)) as progress:
        if settings.processes == 1 or len(jobs) < 2 or settings.how != "simulated":
            results = []
            for job in jobs:
                results.append(function(job))
                progress.show(len(results))
            return results
        with ProcessPoolExecutor(settings.processes, get_context("spawn")) as pool:
            try:
                futures = [pool.submit(function, job) for job in jobs]
                running = set(futures)
                while running:
                    done, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()  # raises what the job raised
                    progress.show(len(futures) - len(running))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in futures]


def sustain_all(cases: Sequence[Case], settings: Settings) -> dict[Case, Sustained]:
    """Return the sustained rate of each case. Each case is searched only once."""
    keep = settings.keep if settings.how == "measured" else None
    if keep is not None and keep.exists():
        for line in keep.read_text(encoding="utf-8").splitlines():
            case, how, rate = json.loads(line)
            if how == _how(settings):
                _sustained[Case(**case), settings] = _read_sustained(rate)
    left = [case for case in dict.fromkeys(cases) if (case, settings) not in _sustained]
    found = run_all(partial(_sustain, settings), left, settings, "sustained rates")
    for case, rate in zip(left, found, strict=True):
        _sustained[case, settings] = rate
    return {case: _sustained[case, settings] for case in cases}


_sustained: dict[tuple[Case, Settings], Sustained] = {}


def _sustain(settings: Settings, case: Case) -> Sustained:
    """Run `sustain`. Save a rate found on a device to a file, because the search takes minutes."""
    found = sustain(case, settings)
    if settings.how == "measured" and settings.keep is not None:
        line = json.dumps([dataclasses.asdict(case), _how(settings), dataclasses.asdict(found)])
        with settings.keep.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return found


def _how(settings: Settings) -> str:
    """Return the settings that affect a sustained rate, as JSON."""
    others = {"processes", "models", "lengths", "keep"}
    fields = dataclasses.asdict(settings).items()
    return json.dumps({name: it for name, it in fields if name not in others}, default=str)


def _read_sustained(fields: dict[str, Any]) -> Sustained:
    curve, sensitivity = fields.pop("curve"), fields.pop("sensitivity")
    return Sustained(curve=tuple(map(tuple, curve)), sensitivity=tuple(sensitivity), **fields)


def simulated_sustained(workloads: Sequence[str], settings: Settings) -> dict[str, Sustained]:
    """Return jpaged's sustained rates in simulation, with traces of the same length.

    A figure with fixed rates uses fractions of the simulated rates, on a device too: a search in
    real time would take hours. The figure `agreement` shows how close the simulation is.
    """
    simulated = dataclasses.replace(settings, how="simulated")
    found = sustain_all([Case(workload) for workload in workloads], simulated)
    return {workload: found[Case(workload)] for workload in workloads}


def run_cases(jobs: Sequence[tuple[Case, float]], settings: Settings) -> list[Outcome]:
    """Run each case at its rate, with the first seed."""
    return run_all(partial(_run_first_seed, settings=settings), jobs, settings, "runs at a rate")


def _run_first_seed(job: tuple[Case, float], settings: Settings) -> Outcome:
    case, rate = job
    return run(case, rate, settings.seeds[0], settings, None)


def saturate_all(cases: Sequence[Case], settings: Settings) -> list[Outcome]:
    """Run each case with all requests waiting from the start."""
    return run_all(partial(saturate, settings=settings), cases, settings, "saturated runs")


def threshold_of(case: Case, settings: Settings) -> float:
    """Return the maximum latency of a sustained rate of this workload, in seconds per token."""
    plain = Case(case.workload, server=case.server, width=case.width, is_beam=case.is_beam)
    return settings.latency_factor * _latency_alone(plain, settings)


def sustain(case: Case, settings: Settings) -> Sustained:
    """Search the highest rate that the case sustains.

    On a device, the search uses the threshold of the simulation and begins at the rate of the
    simulation, to save runs.
    """
    curve: dict[float, float] = {}
    rates: list[float] = []
    if settings.how == "simulated":
        threshold, first = threshold_of(case, settings), saturate(case, settings).rate
        first_step = 1 + 8 * settings.tolerance
    else:
        simulated = sustain(case, dataclasses.replace(settings, how="simulated"))
        threshold, first = simulated.threshold, simulated.rate
        first_step = 1 + settings.tolerance
    for seed in settings.seeds:
        # A run that is certain to miss the threshold ends there.
        latency_at = partial(_latency, case, seed, settings, 1.01 * threshold)
        guess = statistics.median(rates) if rates else first
        step = 1 + settings.tolerance if rates else first_step
        rate, points = search(latency_at, threshold, guess, step, settings.tolerance)
        rates.append(rate)
        curve = curve or {at: latency for at, latency in points.items() if latency < threshold}
    for fraction in settings.fractions:
        rate = fraction * rates[0]
        curve[rate] = _latency(case, settings.seeds[0], settings, 4 * threshold, rate)
    pairs = tuple(sorted(curve.items()))
    return Sustained(
        rate=statistics.median(rates),
        low=min(rates),
        high=max(rates),
        threshold=threshold,
        curve=pairs,
        sensitivity=(crossing(pairs, threshold / 2), crossing(pairs, threshold * 2)),
    )


def most_excess(trace: Sequence[TraceRequest], threshold: float, seconds: float) -> float:
    """Return the approximate excess of a sustained rate over the rate of an endless trace, percent.

    Let c be the highest rate that an endless trace can sustain. At a rate r above c, the requests
    of a trace of T seconds wait (1 - c / r) T / 2 seconds on average. The wait divided by the
    number of output tokens must be below the threshold on average. Thus
    1 - c / r < 2 threshold / (T x mean of 1 / output tokens).

    Args:
        trace: Requests with the output lengths that are served.
        threshold: Limit of the normalised latency, seconds per token.
        seconds: Length of the traces that were served.
    """
    inverse = statistics.mean(1 / request.output_len for request in trace)
    share = 2 * threshold / (seconds * inverse)
    return 100 * share / (1 - share) if share < 1 else math.inf


def search(
    latency_at: Callable[[float], float],
    threshold: float,
    guess: float,
    step: float,
    tolerance: float,
) -> tuple[float, dict[float, float]]:
    """Return the highest rate whose latency is below the threshold, and all tried rates.

    The rate moves up or down from `guess` until the latency crosses the threshold. The first factor
    is `step`; each later factor is the square of the previous factor. Bisection then halves the
    interval until its ends are within `tolerance`.

    Raises:
        ValueError: the latency does not cross the threshold within 8 steps.
    """
    tried = {guess: latency_at(guess)}
    up = tried[guess] < threshold
    low = high = guess
    for _ in range(8):
        if up:
            low, high = high, high * step
        else:
            low, high = low / step, low
        rate = high if up else low
        tried[rate] = latency_at(rate)
        if (tried[rate] < threshold) != up:
            break
        step **= 2
    else:
        raise ValueError(f"the latency never crosses {threshold:.3g} s a token, from {guess:.3g}/s")
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        tried[middle] = latency_at(middle)
        low, high = (middle, high) if tried[middle] < threshold else (low, middle)
    return low, tried


def crossing(curve: Iterable[tuple[float, float]], level: float) -> float | None:
    """Return the interpolated rate at which a curve first exceeds `level`, or None."""
    before: tuple[float, float] | None = None
    for rate, latency in curve:
        if latency >= level:
            if before is None:
                return None
            share = (math.log(level) - math.log(before[1])) / math.log(latency / before[1])
            return before[0] + share * (rate - before[0])
        before = (rate, latency)
    return None


@cache
def _device(shape: str, server: str) -> DeviceModel:
    """Return a server's device model: the measured GPU for 13B models, else the paper's GPUs."""
    gpu, num_gpus = GPUS[server]
    return device_model(shape, gpu, num_gpus)


def _outcome(served: Run, rate: float) -> Outcome:
    return Outcome(
        rate=rate,
        latency=served.normalized_latency,
        gave_up=served.gave_up,
        output_tokens_per_s=served.output_tokens_per_s,
        batch=served.mean_batch,
        memory=served.memory,
        held=served.memory_held,
        waste=served.allocated_waste,
        waste_formula=served.waste_formula,
        saved=served.shared_savings,
        hit=100 * served.num_hit_tokens / max(served.num_query_tokens, 1),
        num_preemptions=served.num_preemptions,
        num_requests=served.num_requests,
        seconds=served.seconds,
    )


_servers: dict[Case, Any] = {}
"""The last engine, by the case that it was made for: a GPU has room for one."""


def _serve_on_device(
    case: Case, trace: Sequence[TraceRequest], settings: Settings, group: dict[str, Any]
) -> Run:
    from bench.paper.engine_run import make_server, run_on_engine

    kind = dataclasses.replace(case, workload=shape_of(case), width=1, is_beam=False)
    if kind not in _servers:
        _servers.clear()
        gc.collect()
        with tempfile.TemporaryDirectory() as folder:
            config = json.dumps(_config_of(kind.workload, settings))
            Path(folder, "config.json").write_text(config, encoding="utf-8")
            _servers[kind] = make_server(
                case.system,
                folder,
                num_slots=SERVERS[case.server].num_slots,
                block_size=case.block_size,
                prefix_caching=case.prefix_caching,
                load_format="dummy",
                max_model_len=MAX_MODEL_LEN,
                preemption_mode=case.preemption,
                max_num_seqs=min(case.max_num_seqs, 32) if settings.quick else case.max_num_seqs,
            )
    return run_on_engine(_servers[kind], trace, **group)


def _config_of(shape: str, settings: Settings) -> dict[str, Any]:
    """Return a `config.json` of the shape; quick runs get a tiny model for the CPU."""
    from bench.common import ALL_SHAPES
    from bench.swap import TINY

    return TINY if settings.quick else ALL_SHAPES[shape]
