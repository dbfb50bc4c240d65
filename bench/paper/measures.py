"""Definitions of the measured quantities. The definitions were written before the first run and
have not changed since.

*Normalised latency*: the mean over a trace's requests of (end - arrival) / output tokens, in
seconds per token, as in the paper (section 6.1). A request ends when the host reads the last token
of its last sequence. With several samples or beams, only the tokens of one sequence are counted.

*Sustained rate*: the highest request rate at which the mean normalised latency is at most
`Settings.latency_factor` times the latency of requests that jpaged serves one at a time, with the
same lengths and on the same device. All systems have this threshold. The factor is 10. On an H200,
OPT-13B takes 0.007 s per token if requests run alone. At ten times this latency, 0.07 s per token,
tokens still arrive faster than people read. Most of a request's latency is then time in the queue.
`Sustained.sensitivity` has the rates for factors of 5 and 20. A short trace ends before a long
queue has built up. A rate that is slightly above the server's throughput may therefore count as
sustained. `most_excess` bounds this error, and the figures state the bound. For each seed,
bisection finds the rate to within `Settings.tolerance`. The result is the median of three seeds,
with the lowest and the highest rate.

*Figures with a fixed rate* (13, 18b and 19b) use `FIXED_FRACTION` of jpaged's sustained rate on the
same lengths, and print both rates. The paper does not state vLLM's sustained rate, so its fraction
is unknown. According to the paper's ratios, the fixed rate saturates all Orca systems, but not
vLLM. With a fraction of 0.9, jpaged's rate has the same effect here.
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
"""The GPU type and the number of GPUs that the device model assumes for each OPT model.

The H200 was measured. The A100s are the paper's GPUs.
"""

T = TypeVar("T")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Case:
    """A system and the workload that it serves, without a request rate.

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
    """Results of one run; `bench.paper.simulator.Run` has the definitions.

    Attributes:
        rate: Arriving requests per second.
        latency: Mean normalised latency, seconds per token; a lower bound if `gave_up` is True.
        gave_up: Whether the run was stopped early because its latency was far too high.
        output_tokens_per_s: Generated tokens per second.
        batch: Mean number of requests in a batch, weighted by time.
        memory: Percent of the KV slots in each state ("tokens", "reserved", "internal", "external",
            "free"), mean over the time in which requests wait for memory.
        held: Percent of the KV slots that requests hold, mean over the time of all steps.
        waste: Percent of the held slots without a token, mean over time.
        waste_formula: Half a block per sequence, as a percentage of the held slots.
        saved: Percent of the blocks that sharing saves.
        hit: Percent of the prompt tokens that are found in the prefix cache.
        num_preemptions: Number of times that a running request lost its memory.
        num_requests: Number of requests of the trace.
        seconds: Seconds from the first arrival to the end of the last request.
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
        curve: Pairs (rate, normalised latency) of the first seed, sorted by rate.
        sensitivity: Rates at which this curve reaches half and twice the threshold.
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
        least_requests: Minimum of the expected number of requests in a trace; at a low rate, the
            trace is longer than `seconds`.
        saturation: Number of requests that arrive together to measure a saturated server.
        seeds: Seeds of the traces.
        latency_factor: Factor of the latency limit that defines a sustained rate.
        tolerance: Relative width of the interval at which a bisection ends.
        fractions: Rates at which curves are drawn, as fractions of the sustained rate.
        processes: Number of concurrent runs.
        files: Pairs (dataset, path of the user's file with lengths that replace the dataset's).
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
    """Return the source of a workload's lengths: the user's file if given, else the paper's."""
    files = dict(settings.files)
    return traces.from_file(files[workload]) if workload in files else traces.of_dataset(workload)


def make_trace(
    workload: str, rate: float, seconds: float, seed: int, settings: Settings
) -> list[TraceRequest]:
    """Return the requests of a workload, with random arrivals and lengths."""
    if workload in traces.NUM_PREFIX_TOKENS:
        return traces.translation(workload, rate, seconds, seed)
    if workload == "chat":
        return traces.chat(rate, seconds, seed, source_of("sharegpt", settings))
    return traces.poisson(source_of(workload, settings), rate, seconds, seed)


def shape_of(case: Case) -> str:
    """Return the name of the model shape: LLaMA-13B for translations, otherwise an OPT model."""
    is_translation = case.workload in traces.NUM_PREFIX_TOKENS
    return "llama-13b" if is_translation else f"opt-{case.server}"


def device_of(settings: Settings) -> str:
    """Return the name of the device on which OPT-13B runs or is simulated, for `Figure.device`."""
    if settings.how == "simulated":
        return "simulated NVIDIA H200"
    import jax

    return jax.local_devices()[0].device_kind


def run(
    case: Case, rate: float, seed: int, settings: Settings, give_up_at: float | None
) -> Outcome:
    """Serve a trace of the case's workload at `rate` requests per second.

    Stop early when the mean latency is certain to exceed `give_up_at` (seconds per token).
    """
    seconds = max(settings.seconds, settings.least_requests / rate)
    trace = make_trace(case.workload, rate, seconds, seed, settings)
    return _outcome(_serve(case, trace, settings, give_up_at), rate)


def saturate(case: Case, settings: Settings) -> Outcome:
    """Serve `settings.saturation` requests that all arrive at time 0."""
    trace = make_trace(case.workload, 10.0, settings.saturation / 10, settings.seeds[0], settings)
    served = _serve(case, [dataclasses.replace(r, arrival=0.0) for r in trace], settings, None)
    return _outcome(served, served.num_finished / served.seconds)


def modelled_recovery(num_tokens: int, block_size: int) -> tuple[float, float]:
    """Return the modelled seconds to recompute a sequence of OPT-13B, and to swap it out and in."""
    device = _device("opt-13b", "13b")
    one_way = device.swap_seconds(-(-num_tokens // block_size), block_size)
    return device.prefill_seconds([num_tokens]), 2 * one_way


@cache
def _latency_alone(case: Case, settings: Settings) -> float:
    is_simulated = settings.how == "simulated"
    count = 10 if settings.quick else 200 if is_simulated else 20
    trace = make_trace(case.workload, 10.0, count / 10, settings.seeds[0], settings)
    # The requests should run one at a time. In a simulation, a long gap between arrivals costs no
    # time. On a device the gap is 1 s, so a request that takes longer than 1 s overlaps with the
    # next one.
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
    """Return `function(job)` for each job, in order; run `settings.processes` jobs concurrently.

    Show on stderr how many jobs are done. `what` is the name of the jobs in that message.
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
                        # If the job failed, this call raises the exception of the job.
                        future.result()
                    progress.show(len(futures) - len(running))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in futures]


def sustain_all(cases: Sequence[Case], settings: Settings) -> dict[Case, Sustained]:
    """Return the sustained rate of each case. Rates that are already known are reused."""
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
    """Run `sustain`. On a device, append the rate to the file `settings.keep`, because a search
    takes minutes."""
    found = sustain(case, settings)
    if settings.how == "measured" and settings.keep is not None:
        line = json.dumps([dataclasses.asdict(case), _how(settings), dataclasses.asdict(found)])
        with settings.keep.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return found


def _how(settings: Settings) -> str:
    """Return the settings on which a sustained rate depends, as JSON."""
    others = {"processes", "models", "lengths", "keep"}
    fields = dataclasses.asdict(settings).items()
    return json.dumps({name: it for name, it in fields if name not in others}, default=str)


def _read_sustained(fields: dict[str, Any]) -> Sustained:
    curve, sensitivity = fields.pop("curve"), fields.pop("sensitivity")
    return Sustained(curve=tuple(map(tuple, curve)), sensitivity=tuple(sensitivity), **fields)


def simulated_sustained(workloads: Sequence[str], settings: Settings) -> dict[str, Sustained]:
    """Return the request rate that jpaged sustains in simulation, for each workload.

    Figures with a fixed rate use a fraction of the simulated rate, even if the figure is measured
    on a device, because a search for the rate in real time would take hours. The simulation uses
    all `settings` except `settings.how`, so its traces are as long as the traces on a device. The
    figure `agreement` compares the simulation with a device.
    """
    simulated = dataclasses.replace(settings, how="simulated")
    found = sustain_all([Case(workload) for workload in workloads], simulated)
    return {workload: found[Case(workload)] for workload in workloads}


def run_cases(jobs: Sequence[tuple[Case, float]], settings: Settings) -> list[Outcome]:
    """Serve a trace for each pair (case, rate), with the first seed."""
    return run_all(partial(_run_first_seed, settings=settings), jobs, settings, "runs at a rate")


def _run_first_seed(job: tuple[Case, float], settings: Settings) -> Outcome:
    case, rate = job
    return run(case, rate, settings.seeds[0], settings, None)


def saturate_all(cases: Sequence[Case], settings: Settings) -> list[Outcome]:
    """Run each case with requests that all arrive at time 0."""
    return run_all(partial(saturate, settings=settings), cases, settings, "saturated runs")


def threshold_of(case: Case, settings: Settings) -> float:
    """Return the normalised latency (seconds per token) up to which a rate counts as sustained."""
    plain = Case(case.workload, server=case.server, width=case.width, is_beam=case.is_beam)
    return settings.latency_factor * _latency_alone(plain, settings)


def sustain(case: Case, settings: Settings) -> Sustained:
    """Search the highest request rate that the case sustains.

    A rate is sustained if the mean normalised latency is at most a threshold (`threshold_of`). To
    save runs on a device, the function first simulates the case. The search on the device uses the
    threshold from the simulation, and begins at the highest rate that the simulation sustained.
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
        # A run stops early when its mean latency is certain to exceed 1.01 times the threshold.
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
    """Estimate by how many percent a measured rate may exceed the server's throughput.

    Let c be the throughput in requests per second. If a trace of T seconds has a request rate r
    above c, the mean waiting time is

        (1 - c / r) * T / 2

    The mean of (waiting time / output tokens) must be below the threshold. This gives the limit

        1 - c / r < 2 * threshold / (T * mean(1 / output tokens))

    Args:
        trace: Requests whose output lengths are representative.
        threshold: Limit of the normalised latency, in seconds per token.
        seconds: Length T of the traces in seconds.
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
    """Return the highest rate with a latency below the threshold, and the latencies by rate.

    The search multiplies or divides the rate, starting from `guess`, until the latency crosses the
    threshold. The first factor is `step`; each later factor is the square of the previous factor.
    Bisection then narrows the interval until its relative width is at most `tolerance`.

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
        raise ValueError(
            f"the latency does not cross {threshold:.3g} s per token at rates around {guess:.3g} "
            "requests/s"
        )
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        tried[middle] = latency_at(middle)
        low, high = (middle, high) if tried[middle] < threshold else (low, middle)
    return low, tried


def crossing(curve: Iterable[tuple[float, float]], level: float) -> float | None:
    """Return the rate at which a curve first exceeds `level`, by interpolation between its points.
    Return None if the curve never exceeds `level`."""
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
    """Return the `DeviceModel` that predicts the step times of a server.

    The server of a 13B LLM has an H200. The servers of larger LLMs have the GPUs of the paper.
    """
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
"""Maps a case to the engine that was made for it. A GPU has room for one engine only."""


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
    """Return the fields of `config.json` for the shape; quick runs get a tiny model instead."""
    from bench.common import ALL_SHAPES
    from bench.swap import TINY

    return TINY if settings.quick else ALL_SHAPES[shape]
