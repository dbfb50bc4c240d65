"""Measure the duration of prefill steps and swaps before serving. The scheduler preempts by
recomputing or by swapping, whichever takes less time."""

import itertools
import time
from collections.abc import Callable
from typing import Any

from jpaged.core.plan import ScheduledSequence, StepPlan, SwapIn, SwapOut
from jpaged.core.request import Request, StopCriteria
from jpaged.core.swap import PreemptionCosts
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.swap import MAX_STAGED_CHUNKS
from jpaged.sampling_params import SamplingParams

_REPEATS = 3
_SWAP_ENTRY_ID = -1


def measure_preemption_costs(runner: ModelRunner, config: RuntimeConfig) -> PreemptionCosts:
    """Measure the duration of every prefill bucket and every swap size. The timed steps write only
    to the null block.

    Args:
        runner: A runner that is warmed up and idle.
        config: Configuration of the runner, with at least one host block.
    """
    # Measure swaps of one chunk of each size, and a swap of `MAX_STAGED_CHUNKS` chunks of the
    # largest size.
    chunks = sorted(size for kind, size in runner.programs if kind == "gather_blocks")
    max_blocks = min(MAX_STAGED_CHUNKS * chunks[-1], config.num_host_blocks)
    blocks = sorted({*chunks, max(max_blocks, chunks[-1])})
    prefill = [
        (n, _min_seconds(time_prefill, runner, config, n))
        for n in config.buckets.prefill_token_sizes
    ]
    swaps = [(n, _min_seconds(time_swap, runner, n) / 2) for n in blocks]
    return PreemptionCosts(tuple(prefill), tuple(swaps))


def time_prefill(runner: ModelRunner, config: RuntimeConfig, num_tokens: int) -> float:
    """Return the seconds from the launch of a prefill step of `num_tokens` tokens until the host
    has its result."""
    requests = _make_requests(config, num_tokens)
    scheduled = tuple(
        ScheduledSequence(sequence, 0, len(sequence.token_ids), is_sampled=True)
        for request in requests
        for sequence in request.sequences
    )
    lengths = tuple(item.num_scheduled_tokens for item in scheduled)
    limits = () if config.speculation is None else lengths
    plan = StepPlan(step_id=-1, scheduled=scheduled, limits=limits)
    sampling = dict.fromkeys(requests, SamplingParams(temperature=0.0))
    runner.wait()
    start = time.perf_counter()
    runner.launch(plan, sampling.__getitem__).read()
    seconds = time.perf_counter() - start
    rows = tuple(item.sequence.seq_id for item in plan.scheduled)
    runner.launch(StepPlan(step_id=-1, scheduled=(), released_seq_ids=rows), {}.__getitem__)
    return seconds


def time_swap(runner: ModelRunner, num_blocks: int) -> float:
    """Return the seconds to swap out `num_blocks` blocks and then swap them in again."""
    out = SwapOut(_SWAP_ENTRY_ID, (0,) * num_blocks)
    back = SwapIn(_SWAP_ENTRY_ID, tuple((entry, 0) for entry in range(num_blocks)))
    plans = (
        StepPlan(step_id=-1, scheduled=(), swap_outs=(out,)),
        StepPlan(step_id=-1, scheduled=(), swap_ins=(back,)),
    )
    runner.wait()
    start = time.perf_counter()
    for plan in plans:
        runner.launch(plan, {}.__getitem__)
        runner.wait()
    return time.perf_counter() - start


def _make_requests(config: RuntimeConfig, num_tokens: int) -> list[Request]:
    """Return the requests of a timed prefill step, with `num_tokens` prompt tokens in total.

    Each request has `max_model_len` prompt tokens, except that the last request has the remaining
    tokens. The result has at most `max_num_seqs` requests. If `num_tokens` is too large for these
    two limits, the excess tokens are left out. Every block table contains only the null block.
    """
    seq_id_counter, stop = itertools.count(-1, -1), StopCriteria(max_tokens=1)
    lengths = [config.max_model_len] * (num_tokens // config.max_model_len)
    lengths += [rest] if (rest := num_tokens % config.max_model_len) else []
    requests = []
    for length in lengths[: config.max_num_seqs]:
        request = Request.from_prompt(
            f"timing {length}", [0] * length, stop, seq_id_counter=seq_id_counter
        )
        num_blocks = -(-length // config.block_size)
        request.sequences[0].block_table = [0] * num_blocks
        requests.append(request)
    return requests


def _min_seconds(measure: Callable[..., float], *arguments: Any) -> float:
    return min(measure(*arguments) for _ in range(_REPEATS))
