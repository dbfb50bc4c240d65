"""What preemption costs on this device: prefill steps and swaps, timed once before serving."""

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
    """Time every prefill bucket and every size of swap; all of it touches the null block only.

    Args:
        runner: Warmed up, and idle.
        config: Its configuration, with host blocks to swap to.
    """
    # Every size of a chunk, and as many of the largest as are on their way at once.
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
    """Seconds of a step that prefills `num_tokens` tokens, until the host has its result."""
    requests = _make_requests(config, num_tokens)
    plan = StepPlan(
        step_id=-1,
        scheduled=tuple(
            ScheduledSequence(sequence, 0, len(sequence.token_ids), is_sampled=True)
            for request in requests
            for sequence in request.sequences
        ),
    )
    sampling = dict.fromkeys(requests, SamplingParams(temperature=0.0))
    runner.wait()
    start = time.perf_counter()
    runner.launch(plan, sampling.__getitem__).read()
    seconds = time.perf_counter() - start
    rows = tuple(item.sequence.seq_id for item in plan.scheduled)
    runner.launch(StepPlan(step_id=-1, scheduled=(), released_seq_ids=rows), {}.__getitem__)
    return seconds


def time_swap(runner: ModelRunner, num_blocks: int) -> float:
    """Seconds to bring `num_blocks` blocks to the host and, when they are there, back."""
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
    """Prompts of so many tokens in all, as far as a step has room, whose blocks are all null."""
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
