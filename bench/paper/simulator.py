"""Serve a trace in simulated time: the real scheduler and allocators with modelled step times.

The simulator repeats the overlapped loop of `jpaged.engine.loop` without a device. A planned step
starts when the previous step ends. At that time the host reads the tokens of the previous step. An
arriving request is part of the next plan, and the blocks of a sequence are freed one step after its
last token. The host's work overlaps with the steps, except for `Coefficients.step`. Steps are
padded to the engine's buckets. Bursts are not simulated, because the engine uses bursts only for
models with less than 5 GB of weights.

A transfer to host memory overlaps with later steps. A step waits for the blocks that are swapped in
before it, because the transfer writes them to the pool. There is one link, so transfers do not
overlap with each other.

Orca and the FasterTransformer-like server cannot share blocks, so each sample or beam is a separate
request that computes the prompt again. In favour of these two systems, copying beams takes no time.
Tokens are synthetic, and the candidates of beams come from `bench.synthetic_beams`.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np

from bench.paper.allocators import OrcaMax, TokenStates, make_manager, token_states
from bench.paper.device_model import DeviceModel, StepWork
from bench.paper.traces import TraceRequest
from bench.synthetic_beams import candidates_of
from jpaged.core.beam import BeamSearch
from jpaged.core.plan import StepPlan
from jpaged.core.request import BeamCandidates, Request, RequestStatus, StopCriteria
from jpaged.core.request import Sequence as TokenSequence
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.core.swap import PreemptionMode, PreemptionPolicy
from jpaged.observe.pool_report import memory_report
from jpaged.runtime.buckets import Buckets, make_buckets, round_up

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN = 256, 2048, 2048
STEPS_PER_SAMPLE = 8
"""The memory is sampled every `STEPS_PER_SAMPLE` steps."""


@dataclass(frozen=True)
class Run:
    """Results of serving a trace of R requests.

    Attributes:
        system: One of `allocators.SYSTEMS`.
        arrivals, first_tokens, finishes: Time of each event in seconds since the trace began [R];
            nan if the event did not happen. A request finishes when its last sequence finishes.
        output_lens: Number of tokens of each output [R].
        gave_up: Whether the run was stopped early, because the mean latency of the whole trace was
            certain to exceed `give_up_at`.
        normalized_latency: Mean of (finish - arrival) / output tokens, in seconds per token. It is
            a lower bound if `gave_up` is True.
        seconds: Seconds from the first arrival to the last token.
        busy_seconds: Total seconds of all steps.
        num_steps: Number of steps.
        num_output_tokens: Number of output tokens of all samples, or of all beams.
        num_prompt_tokens: Number of prompt tokens of the arrived requests; a prompt counts once.
        num_computed_tokens: Number of tokens that the steps computed.
        num_recomputed_tokens: Number of tokens that were computed again after a preemption.
        mean_batch: Mean number of requests in the batch, weighted by the time of the steps. If the
            samples of a request are served as separate requests, each counts as a fraction.
        mean_batch_of_steps: The same mean with equal weights for all steps.
        memory: Percent of all KV slots in each state of `TokenStates`: "tokens", "reserved",
            "internal", "external", "free". Mean over the time in which a request waits for memory,
            or over the time of all steps if no request ever waits.
        memory_held: Percent of all KV slots that requests hold, mean over the time of all steps.
        allocated_waste: Percent of the held slots that have no token, from the sums over time of
            both numbers.
        waste_formula: Half a block per sequence, as a percentage of the held slots.
        num_logical_blocks, num_physical_blocks: Number of blocks that would be needed without
            sharing, and number of held blocks, both summed over the sampled steps.
        num_preemptions: Number of preemptions.
        swapped_bytes: Number of bytes moved to and from host memory.
        num_query_tokens, num_hit_tokens: Number of prompt tokens looked up in the prefix cache, and
            number of prompt tokens found there.
    """

    system: str
    arrivals: np.ndarray
    first_tokens: np.ndarray
    finishes: np.ndarray
    output_lens: np.ndarray
    gave_up: bool
    normalized_latency: float
    seconds: float
    busy_seconds: float
    num_steps: int
    num_output_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    mean_batch: float
    mean_batch_of_steps: float
    memory: dict[str, float]
    memory_held: float
    allocated_waste: float
    waste_formula: float
    num_logical_blocks: int
    num_physical_blocks: int
    num_preemptions: int
    swapped_bytes: int
    num_query_tokens: int
    num_hit_tokens: int

    @property
    def num_requests(self) -> int:
        """Number of requests of the trace."""
        return len(self.arrivals)

    @property
    def num_finished(self) -> int:
        """Number of requests whose answers are complete."""
        return int(np.isfinite(self.finishes).sum())

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second, over `seconds`."""
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def shared_savings(self) -> float:
        """Percent of the logical blocks that sharing saves."""
        return 100 * (1 - self.num_physical_blocks / max(self.num_logical_blocks, 1))


def simulate(
    trace: Sequence[TraceRequest],
    system: str,
    device: DeviceModel,
    *,
    num_slots: int,
    block_size: int = 16,
    num_samples: int = 1,
    beam_width: int | None = None,
    prefix_caching: bool = False,
    preemption: str = "recompute",
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    max_model_len: int = MAX_MODEL_LEN,
    give_up_at: float | None = None,
) -> Run:
    """Serve a trace in simulated time.

    Args:
        trace: Requests, sorted by arrival.
        system: One of `allocators.SYSTEMS`.
        device: Device model, which gives the times of steps.
        num_slots: Number of tokens that the KV memory holds, without the null block.
        block_size: Number of slots of a block; also the unit of contiguous ranges.
        num_samples: Number of samples of each request.
        beam_width: If set, each request is a beam search of this width.
        prefix_caching: Whether prompts with a common prefix share blocks; only with "ours".
        preemption: "recompute", or "swap" to host memory as large as the pool. Only "ours"
            preempts.
        max_num_seqs: Maximum number of sequences in a step.
        max_num_batched_tokens: Maximum number of tokens in a step.
        max_model_len: Maximum number of tokens of a sequence.
        give_up_at: Limit of the mean normalised latency in seconds per token. The run stops when
            the mean over the whole trace is certain to be higher.

    Raises:
        ValueError: an argument is out of range, the trace is not sorted by arrival, or a request
            is too large for the memory.
    """
    if any(a.arrival > b.arrival for a, b in pairwise(trace)):
        raise ValueError("trace is not in the order of arrival: sort the requests by arrival")
    if beam_width is not None and num_samples != 1:
        raise ValueError(f"num_samples={num_samples} and beam_width are both set: pass only one")
    work = Workload(trace, system, num_samples, beam_width, prefix_caching)
    num_blocks = 1 + num_slots // block_size
    manager = make_manager(
        system, num_blocks, block_size, max_model_len, prefix_caching=prefix_caching
    )
    mode = PreemptionMode(preemption)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len),
        manager,
        PreemptionPolicy(mode, num_blocks if mode is PreemptionMode.SWAP else 0),
    )
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    return _Simulation(work, scheduler, device, Padding(buckets), give_up_at).run()


class Workload:
    """Convert the requests of a trace to requests for the scheduler, and record their progress.

    Attributes:
        trace: The R requests of the trace.
        system: System that serves the requests.
        width: Number of samples or beams per request.
        is_search: Whether requests are beam searches.
        prefix_caching: Whether prefix caching is on, so that the values of token ids matter.
        first_tokens, finishes: Time of each event in seconds [R]; nan before the event.
    """

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        system: str,
        num_samples: int = 1,
        beam_width: int | None = None,
        prefix_caching: bool = False,
    ):
        self.trace, self.system = trace, system
        self.width = beam_width or num_samples
        self.first_tokens = np.full(len(trace), math.nan)
        self.finishes = np.full(len(trace), math.nan)
        self.num_open = len(trace)
        self.is_search = beam_width is not None and system == "ours"
        self.prefix_caching = prefix_caching
        self._seq_ids = count()
        self._num_left = [0] * len(trace)
        # `least_latency` needs three sums. `_sum_finished` is the sum of the normalised latencies
        # of the finished requests. The weight of a request is 1 / (number of output tokens).
        # `_sum_weights` is the sum of the weights of the unfinished requests that have arrived.
        # `_sum_arrivals` is the sum of (arrival time x weight) of the same requests.
        self._sum_finished = self._sum_weights = self._sum_arrivals = 0.0

    @property
    def num_apart(self) -> int:
        """Number of requests that the scheduler gets for each request of the trace."""
        return 1 if self.system == "ours" else self.width

    def requests(self, index: int) -> list[Request]:
        """Record an arrival, and return the scheduler's requests for it.

        Systems that share no blocks get one request per sample or beam, "ours" gets one request.
        """
        self.note_arrival(index)
        apart, stop = self.num_apart, StopCriteria(self.trace[index].output_len)
        return [
            Request.from_prompt(
                f"{index}.{each}",
                self.prompt(index),
                stop,
                seq_id_counter=self._seq_ids,
                num_samples=1 if self.is_search else self.width // apart,
                beam=BeamSearch(self.width) if self.is_search else None,
            )
            for each in range(apart)
        ]

    def prompt(self, index: int) -> list[int]:
        """Return the token ids of a prompt.

        The values of the ids matter only for prefix caching and beam search. Otherwise all ids are
        1.
        """
        given = self.trace[index]
        if not given.prompt:
            if self.prefix_caching or self.is_search:
                return stream_tokens(-1 - index, 0, given.prompt_len)
            return [1] * given.prompt_len
        return [token for piece in given.prompt for token in stream_tokens(*piece)]

    def outputs(self, index: int) -> list[int]:
        """Return the output tokens of a request.

        A prompt ends with a part of a pseudo-random token sequence (see `stream_tokens`). The
        output tokens are the next tokens of the same sequence.
        """
        given = self.trace[index]
        stream, _, stop = given.prompt[-1] if given.prompt else (-1 - index, 0, given.prompt_len)
        return stream_tokens(stream, stop, stop + given.output_len)

    def note_arrival(self, index: int) -> None:
        """Record that a request has arrived."""
        given = self.trace[index]
        self._num_left[index] = self.num_apart
        weight = 1 / given.output_len
        self._sum_weights += weight
        self._sum_arrivals += given.arrival * weight

    def note_first(self, index: int, now: float) -> None:
        """Record the time of a request's first token, unless it is recorded already."""
        self.first_tokens[index] = np.fmin(self.first_tokens[index], now)

    def note_end(self, index: int, now: float) -> None:
        """Record that the scheduler has completed one request.

        The scheduler gets `num_apart` requests for request `index` of the trace. The request of the
        trace ends when the scheduler has completed all these requests.
        """
        self._num_left[index] -= 1
        if not self._num_left[index]:
            given = self.trace[index]
            self.finishes[index] = now
            self.num_open -= 1
            weight = 1 / given.output_len
            self._sum_finished += (now - given.arrival) * weight
            self._sum_weights -= weight
            self._sum_arrivals -= given.arrival * weight

    def least_latency(self, now: float) -> float:
        """Return a lower bound of the trace's mean normalised latency at time `now`."""
        waited = now * self._sum_weights - self._sum_arrivals
        return (self._sum_finished + max(waited, 0.0)) / max(len(self.trace), 1)


def index_of(request: Request) -> int:
    """Return the index of a request in the trace."""
    return int(request.request_id.partition(".")[0])


def stream_tokens(stream: int, start: int, stop: int) -> list[int]:
    """Return the token ids from `start` to before `stop` of a pseudo-random token sequence.

    `stream` is the number of the sequence. A sequence has no end, and the ids have 31 bits.
    """
    places = np.arange(start, stop, dtype=np.uint64) + np.uint64(1)
    mixed = (places + np.uint64(stream % 2**40) * np.uint64(2**20)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(33)).astype(np.int64).tolist()


class Padding:
    """Compute the `StepWork` of a step plan, padded to the buckets of the engine."""

    def __init__(self, buckets: Buckets):
        self._buckets = buckets
        sizes = range(1, buckets.decode_batch_sizes[-1] + 1)
        self._decode = [0] + [round_up(buckets.decode_batch_sizes, size) for size in sizes]
        self._logits = [0] + [buckets.num_logits_rows(rows) for rows in self._decode[1:]]

    def work_of(self, plan: StepPlan) -> StepWork:
        """Return the work of a planned step, with padding."""
        scheduled = plan.scheduled
        if plan.is_decode:
            num_seqs = len(scheduled)
            context = sum([row.start for row in scheduled]) + num_seqs
            rows = self._decode[num_seqs]
            return StepWork(num_seqs, context, 0, 0, 0, rows, self._logits[num_seqs])
        decodes = context = prompts = tokens = pairs = 0
        for row in scheduled:
            if row.num_scheduled_tokens == 1:
                decodes += 1
                context += row.start + 1
            else:
                new = row.num_scheduled_tokens
                prompts, tokens = prompts + 1, tokens + new
                pairs += new * row.start + new * (new + 1) // 2
        padded, logits = self._buckets.prefill_shape(plan.num_tokens, len(scheduled))
        return StepWork(decodes, context, prompts, tokens, pairs, padded, logits)


class _MemorySample(NamedTuple):
    """Numbers of KV slots after one step.

    Attributes:
        is_full: Whether a request waits for memory although the batch has free rows.
        states: Number of slots in each state.
        held: Number of slots in held blocks or ranges.
        waste: Number of held slots without a token.
        half_blocks: Expected waste: half a block for each sequence that holds blocks.
    """

    is_full: bool
    states: TokenStates
    held: int
    waste: int
    half_blocks: float


class Tally:
    """Collect sums and means over the steps of a scheduler.

    Attributes:
        seconds: Total time of the steps.
        num_steps: Number of steps.
        num_computed: Number of tokens that the steps computed.
        num_recomputed: Number of tokens that were computed again after a preemption.
        num_preempted: Number of preemptions.
        num_moved: Number of blocks moved to and from host memory.
    """

    def __init__(self, scheduler: Scheduler, num_apart: int = 1):
        self._scheduler, self._num_apart = scheduler, num_apart
        self.seconds = self._batch_seconds = self._batch_steps = 0.0
        self.num_steps = self.num_computed = self.num_recomputed = 0
        self.num_preempted = self.num_moved = 0
        self.num_logical = self.num_physical = 0
        # Integrals over time of the number of slots in each state of `TokenStates`, in
        # slot-seconds. `_looked[True]` covers the time in which a request waits for memory.
        # `_looked[False]` covers all other time.
        self._looked = {True: np.zeros(5), False: np.zeros(5)}
        self._waste = self._half_blocks = self._held = 0.0
        self._since_sample = self._running = 0.0
        # `_seen` is the latest `_MemorySample` since the last call of `spend`, or None.
        self._seen: _MemorySample | None = None
        # Maps a sequence id to the number of computed tokens after the last prefill step of the
        # sequence.
        self._prompt_ends: dict[int, int] = {}
        # Maps a sequence id to the number of computed tokens that the sequence lost in a
        # preemption.
        self._lost: dict[int, int] = {}

    def note(self, plan: StepPlan) -> None:
        """Record a planned step."""
        self.num_moved += sum(len(order.block_ids) for order in plan.swap_outs)
        self.num_moved += sum(len(order.copies) for order in plan.swap_ins)
        if not plan.is_decode:
            self._note_prompts(plan)
        if plan.preempted_request_ids:
            self._note_preempted(plan)
        if not plan.scheduled:
            return
        self._running = len(self._scheduler.running) / self._num_apart
        self._batch_steps += self._running
        self.num_steps += 1
        self.num_computed += plan.num_tokens
        if self.num_steps % STEPS_PER_SAMPLE == 1:
            self._seen = self._sample_memory()

    def spend(self, seconds: float) -> None:
        """Record that the steps planned since the last call took `seconds` in total."""
        self.seconds += seconds
        self._batch_seconds += self._running * seconds
        self._since_sample += seconds
        if self._seen is not None:
            weight, seen = self._since_sample, self._seen
            self._looked[seen.is_full] += weight * np.array(seen.states)
            self._held += weight * seen.held
            self._waste += weight * seen.waste
            self._half_blocks += weight * seen.half_blocks
            self._since_sample, self._seen = 0.0, None

    def note_end(self, request: Request) -> None:
        """Record that a request has ended."""
        for sequence in request.sequences:
            self._prompt_ends.pop(sequence.seq_id, None)

    def _note_prompts(self, plan: StepPlan) -> None:
        """Count the tokens that a step with prompts recomputes. Decode steps recompute nothing."""
        for sequence, start, num_tokens, _, _ in plan.scheduled:
            seq_id, end = sequence.seq_id, start + num_tokens
            lost = self._lost.get(seq_id, 0)
            self.num_recomputed += max(min(end, lost) - start, 0)
            if lost <= end:
                self._lost.pop(seq_id, None)
            self._prompt_ends[seq_id] = end

    def _note_preempted(self, plan: StepPlan) -> None:
        self.num_preempted += len(plan.preempted_request_ids)
        for request_id in plan.preempted_request_ids:
            request = self._scheduler.waiting.get(request_id)
            if request is not None and request.status is RequestStatus.PREEMPTED:
                for sequence in request.live_sequences:
                    has_begun = sequence.num_tokens > sequence.num_prompt_tokens
                    prompt_end = self._prompt_ends.get(sequence.seq_id, 0)
                    reached = sequence.num_tokens - 1 if has_begun else prompt_end
                    before = self._lost.get(sequence.seq_id, 0)
                    self._lost[sequence.seq_id] = max(reached, before)

    def _sample_memory(self) -> _MemorySample:
        scheduler = self._scheduler
        limit = scheduler.config.max_num_seqs
        is_full = bool(
            scheduler.waiting
            and scheduler.running.num_rows + scheduler.waiting.first.num_rows <= limit
        )
        report, manager = memory_report(scheduler), scheduler.block_manager
        states = token_states(manager, report, is_full=is_full)
        self.num_logical += report.num_logical_blocks
        self.num_physical += report.num_physical_blocks
        held = report.num_used_slots
        if isinstance(manager, OrcaMax):
            held = (manager.ranges.size - manager.ranges.num_free) * manager.block_size
        num_holding = sum(bool(s.block_table) for s in scheduler.sequences.by_id.values())
        half_blocks = num_holding * manager.block_size / 2
        return _MemorySample(is_full, states, held, held - report.num_token_slots, half_blocks)

    def run(self, work: Workload, *, now: float, num_outputs: int, block_bytes: int) -> Run:
        """Return the results of a trace that ended, or was stopped, at time `now`."""
        trace, cache = work.trace, self._scheduler.block_manager.prefix_cache
        ends = work.finishes[np.isfinite(work.finishes)]
        end = now if work.num_open or not len(ends) else float(ends.max())
        held = max(self._held, 1e-12)
        return Run(
            system=work.system,
            arrivals=np.array([request.arrival for request in trace]),
            first_tokens=work.first_tokens,
            finishes=work.finishes,
            output_lens=np.array([request.output_len for request in trace]),
            gave_up=work.num_open > 0,
            normalized_latency=work.least_latency(now),
            seconds=end - trace[0].arrival if trace else 0.0,
            busy_seconds=self.seconds,
            num_steps=self.num_steps,
            num_output_tokens=num_outputs,
            num_prompt_tokens=sum(r.prompt_len for r in trace if r.arrival <= now),
            num_computed_tokens=self.num_computed,
            num_recomputed_tokens=self.num_recomputed,
            mean_batch=self._batch_seconds / max(self.seconds, 1e-12),
            mean_batch_of_steps=self._batch_steps / max(self.num_steps, 1),
            memory=self._memory(),
            memory_held=100 * self._held / max(sum(map(np.sum, self._looked.values())), 1e-12),
            allocated_waste=100 * self._waste / held,
            waste_formula=100 * self._half_blocks / held,
            num_logical_blocks=self.num_logical,
            num_physical_blocks=self.num_physical,
            num_preemptions=self.num_preempted,
            swapped_bytes=self.num_moved * block_bytes,
            num_query_tokens=0 if cache is None else cache.num_query_tokens,
            num_hit_tokens=0 if cache is None else cache.num_hit_tokens,
        )

    def _memory(self) -> dict[str, float]:
        sums = self._looked[True] if self._looked[True].any() else self._looked[False]
        shares = 100 * sums / max(sums.sum(), 1e-12)
        return dict(zip(TokenStates._fields, shares.tolist(), strict=True))


class _Simulation:
    def __init__(
        self,
        work: Workload,
        scheduler: Scheduler,
        device: DeviceModel,
        padding: Padding,
        give_up_at: float | None,
    ):
        self._work, self._scheduler, self._device = work, scheduler, device
        self._padding, self._give_up_at = padding, math.inf if give_up_at is None else give_up_at
        self._tally = Tally(scheduler, work.num_apart)
        self._now = self._device_free = self._link_free = 0.0
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._next = 0  # `_next` is the index of the next request to arrive.
        self._outputs: dict[int, list[int]] = {}
        self._num_outputs = 0
        self._any_tokens = np.zeros(scheduler.config.max_num_seqs, np.int64)

    def run(self) -> Run:
        work, scheduler, trace = self._work, self._scheduler, self._work.trace
        while work.num_open:
            self._arrive()
            plan = scheduler.schedule()
            if plan is not None:
                _raise_faults(plan.failed)
                self._launch(plan)
            elif not self._in_flight:
                if self._next == len(trace):
                    raise RuntimeError(f"{work.num_open} requests are unfinished, and none can run")
                self._now = trace[self._next].arrival
            num_ahead = 1 if plan is not None else 0
            while len(self._in_flight) > num_ahead:
                self._read()
            if self._tally.num_steps % 64 == 0 and work.least_latency(self._now) > self._give_up_at:
                break
        size = self._device.block_bytes(scheduler.block_manager.block_size)
        outputs = self._num_outputs
        return self._tally.run(work, now=self._now, num_outputs=outputs, block_bytes=size)

    def _arrive(self) -> None:
        trace = self._work.trace
        while self._next < len(trace) and trace[self._next].arrival <= self._now:
            for request in self._work.requests(self._next):
                self._scheduler.add(request)
            if self._work.prefix_caching:
                self._outputs[self._next] = self._work.outputs(self._next)
            self._next += 1

    def _launch(self, plan: StepPlan) -> None:
        device, size = self._device, self._scheduler.block_manager.block_size
        start = max(self._now, self._device_free)
        for _, block_ids in plan.swap_outs:
            self._link(start, len(block_ids))
        work = self._padding.work_of(plan) if plan.scheduled else None
        seconds = device.step_seconds(work, size) if work is not None else 0.0
        if plan.block_copies:
            seconds += (
                2
                * len(plan.block_copies)
                * device.block_bytes(size)
                / (device.coefficients.kv_bandwidth * device.num_gpus)
            )
        end = start + seconds
        for _, places in plan.swap_ins:
            end = max(end, self._link(start, len(places)))
        self._device_free = end
        self._in_flight.append((plan, end))
        self._tally.note(plan)
        if plan.scheduled:
            self._tally.spend(end - start)

    def _link(self, start: float, num_blocks: int) -> float:
        """Queue a transfer that may begin at `start`, and return the time at which it ends."""
        size = self._scheduler.block_manager.block_size
        self._link_free = max(self._link_free, start) + self._device.swap_seconds(num_blocks, size)
        return self._link_free

    def _read(self) -> None:
        plan, end = self._in_flight.popleft()
        self._now = max(self._now, end)
        scheduled, work = plan.scheduled, self._work
        sampled, candidates = self._any_tokens[: len(scheduled)], None
        if self._outputs:
            sampled = np.array([self._token(row.sequence) for row in scheduled], np.int64)
        if work.is_search:
            candidates = _candidates_for(plan, work.width)
        news = self._scheduler.update(plan, sampled, candidates)
        _raise_faults(news.failed)
        for sequence, request, _, reason in news.emitted_tokens:
            if sequence.num_output_tokens == 1:
                work.note_first(index_of(request), self._now)
            self._num_outputs += 1
            if reason is not None and request.is_finished:
                self._end(request)
        for request in news.advanced_beam_requests:
            work.note_first(index_of(request), self._now)
            self._num_outputs += work.width
            if request.is_finished:
                self._end(request)

    def _end(self, request: Request) -> None:
        index = index_of(request)
        self._work.note_end(index, self._now)
        self._outputs.pop(index, None)
        self._tally.note_end(request)

    def _token(self, sequence: TokenSequence) -> int:
        outputs = self._outputs.get(index_of(sequence.request))
        done = sequence.num_output_tokens
        return outputs[done] if outputs is not None and done < len(outputs) else 1


def _raise_faults(failed: Iterable[tuple[Request, Exception]]) -> None:
    for request, error in failed:
        raise ValueError(f"request {request.request_id} cannot be served: {error}") from error


def _candidates_for(plan: StepPlan, width: int) -> BeamCandidates:
    hashes = [hash(tuple(row.sequence.token_ids)) % 2**64 for row in plan.scheduled]
    return candidates_of(np.array(hashes, np.uint64), width)
