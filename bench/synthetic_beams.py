"""Run the scheduler without a model: synthetic log-probabilities replace the model's.

The hash of a sequence's tokens seeds the distribution of its next token. The distribution is Zipf's
law over `VOCAB_SIZE` tokens in a pseudo-random order. The exponent is uniform between `EXPONENTS`.
So the likeliest token has a probability between 9 % and 83 %, which varies as in text. The
exponents are a guess, not fitted to measured savings. The savings depend on the exponents: the more
certain the model, the longer beams stay different. With exponents from 2 to 4 instead of 1 to 3,
beams of Alpaca-like lengths save a third to two fifths less.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np

from jpaged.core.beam import BeamSearch
from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import StepPlan
from jpaged.core.request import BeamCandidates, Request, StopCriteria
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.observe.pool_report import MemoryReport, memory_report

VOCAB_SIZE = 2**15
EXPONENTS = (1.0, 3.0)
MAX_NUM_BATCHED_TOKENS = 2048
DESCRIPTION = (
    f"none: made-up next tokens, Zipf's law over {VOCAB_SIZE} tokens with an exponent "
    f"of each context's own, uniform in {EXPONENTS}"
)

_GRID = np.linspace(*EXPONENTS, 257)
_RANKS = np.arange(1, VOCAB_SIZE + 1, dtype=np.float64)
_LOG_TOTALS = np.array([np.log(np.sum(_RANKS**-exponent)) for exponent in _GRID])


def candidates_of(contexts: np.ndarray, num_candidates: int) -> BeamCandidates:
    """Return the L = `num_candidates` likeliest next tokens [B, L] of B contexts.

    `contexts` are hashes of the contexts, uint64 [B].
    """
    mixed = _mix(contexts)
    place = (mixed >> np.uint64(40)).astype(np.int64) % len(_GRID)
    ranks = np.arange(num_candidates)
    logprobs = (
        -_GRID[place][:, None] * np.log(_RANKS[:num_candidates]) - _LOG_TOTALS[place][:, None]
    )
    # The vocabulary has 2**k tokens. An index that advances by an odd stride, modulo 2**k, visits
    # each token once.
    first, stride = mixed % np.uint64(VOCAB_SIZE), (mixed >> np.uint64(20)) | np.uint64(1)
    token_ids = (first[:, None] + stride[:, None] * ranks.astype(np.uint64)) % np.uint64(VOCAB_SIZE)
    return BeamCandidates(token_ids.astype(np.int64), logprobs.astype(np.float32))


def serve(
    work: list[tuple[list[int], int]],
    width: int,
    *,
    is_search: bool,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
) -> Iterator[MemoryReport]:
    """Serve requests, given as (prompt, number of output tokens). Each request has `width` beams or
    samples.

    The pool has room for all running requests. The function yields the memory report of each step.
    """
    num_blocks = 1 + max_num_seqs * -(-max_model_len // block_size)
    config = SchedulerConfig(max_num_seqs, MAX_NUM_BATCHED_TOKENS, max_model_len)
    scheduler = Scheduler(config, BlockManager(num_blocks, block_size))
    seq_id_counter, rng = count(), np.random.RandomState(0)
    for number, (prompt, max_tokens) in enumerate(work):
        request = Request.from_prompt(
            str(number),
            prompt,
            StopCriteria(max_tokens),
            seq_id_counter=seq_id_counter,
            num_samples=1 if is_search else width,
            beam=BeamSearch(width) if is_search else None,
        )
        scheduler.add(request)
    while (plan := scheduler.schedule()) is not None:
        yield memory_report(scheduler)
        sampled = rng.randint(0, VOCAB_SIZE, len(plan.scheduled))
        scheduler.update(plan, sampled, _candidates_for(plan, width) if is_search else None)


def _candidates_for(plan: StepPlan, width: int) -> BeamCandidates:
    hashes = [hash(tuple(row.sequence.token_ids)) % 2**64 for row in plan.scheduled]
    return candidates_of(np.array(hashes, np.uint64), width)


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit hashes with the finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
