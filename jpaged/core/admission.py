"""Check whether a request fits the engine, and decide when a waiting request joins the batch."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from jpaged.core.block_manager import BlockManager, GroupFit
from jpaged.core.block_pool import PrefixCacheEntry, get_cache_entry
from jpaged.core.groups import pending_work
from jpaged.core.request import Request, RequestStatus
from jpaged.core.sequence_table import RequestQueue
from jpaged.core.swap import SwapSpace
from jpaged.errors import ErrorKind, RequestError, format_count

ROWS_PER_FREE_ROW = 32
"""A step with prompts is worthwhile when `max_num_seqs / ROWS_PER_FREE_ROW` batch rows are free."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        max_num_seqs: Maximum number of running sequences.
        max_num_batched_tokens: Maximum number of tokens that one step computes.
        max_model_len: Maximum number of tokens of a sequence, prompt and outputs together.
        has_priorities: Whether requests may have priorities. If False, the scheduler serves
            requests in order of arrival.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    has_priorities: bool = False

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise RequestError(name, f"must be at least 1, got {getattr(self, name)}")


class Admission:
    """Decides whether the first waiting request may join the batch.

    A request that does not fit stays first in the queue, because no request overtakes another. The
    request can fit later only if a block is freed or the request's cached prefix becomes longer.
    The object therefore stores a negative result. If no block was freed since, the next check of
    the same request only looks up whether one more block of its prefix is cached.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        swap_space: SwapSpace,
        running: RequestQueue,
    ):
        self._config, self._manager = config, manager
        self._swap_space, self._running = swap_space, running
        # Result of the last `find_fit` call that found too few free blocks. `_refused_state` is the
        # tuple (first sequence of the request, number of its live sequences, number of blocks that
        # must stay free, number of blocks freed so far). `_refused_prefix` is the cached prefix of
        # the first sequence. The method returns None again until the tuple changes or the cached
        # prefix becomes longer.
        self._refused_state: tuple[object, ...] = ()
        self._refused_prefix: list[PrefixCacheEntry] = []
        # Result of the last `would_fit_after_preemption` call that found too few blocks.
        # `_preemption_refused_state` is the tuple (first sequence of the request, number of its
        # live sequences, number of `BlockPool.free` calls so far, number of blocks that must stay
        # free). `_preemption_refused_prefix` is the cached prefix of the first sequence. Until the
        # tuple changes or the cached prefix becomes longer, the method returns False again.
        self._preemption_refused_state: tuple[object, ...] = ()
        self._preemption_refused_prefix: list[PrefixCacheEntry] = []

    def find_fit(self, request: Request) -> GroupFit | None:
        """Return a waiting request's cached blocks, and the number of free blocks that it needs.

        Return None if too few batch rows or blocks are free. Call `set_common_prefix` for the
        request first.
        """
        if request.num_rows > self.num_free_rows:
            return None
        manager, first, num_spare = (
            self._manager,
            request.live_sequences[0],
            int(bool(self._running)),
        )
        state = first, len(request.live_sequences), num_spare, manager.pool.num_blocks_freed
        if state == self._refused_state:
            max_prefix_tokens = _max_prefix_tokens(request)
            if not manager.can_extend_prefix(self._refused_prefix, first, max_prefix_tokens):
                return None
        fit = self.measure_fit(request)
        # `num_spare` further blocks must stay free. Otherwise, the request would be preempted as
        # soon as a running sequence needs a new block.
        if manager.can_admit(first, fit.num_needed_blocks + num_spare):
            self._refused_state = ()
            return fit
        self._refused_state = state
        self._refused_prefix = [get_cache_entry(block) for block in fit.hits[0]]
        return None

    def measure_fit(self, request: Request) -> GroupFit:
        """Return a waiting request's cached blocks, and the number of free blocks that it needs.

        The method does not check whether enough blocks are free.
        """
        if request.status is RequestStatus.SWAPPED:
            return self._swap_space.measure_fit(request)
        manager, (first, *others) = self._manager, request.live_sequences
        prefix = manager.find_prefix(first, _max_prefix_tokens(request))
        num_needed = manager.num_blocks_for(len(first.token_ids)) - len(prefix)
        num_needed += sum(block.ref_cnt == 0 for block in prefix)
        num_shared = request.num_common_prefix_tokens // manager.block_size
        num_needed += sum(manager.num_blocks_for(len(s.token_ids)) - num_shared for s in others)
        return GroupFit([prefix], num_needed)

    def would_fit_after_preemption(
        self, request: Request, victims: list[Request], token_budget: int
    ) -> bool:
        """Return whether a waiting request would fit if all `victims` were preempted.

        The free blocks must also suffice for the next step of the other running requests.

        If too few blocks would be free for `request` alone, the method stores the result False.
        Later calls for the same request then cost one prefix-cache lookup each, until a sequence or
        a pinned prefix releases a block. Blocks that `victims` allocate between two calls do not
        change the result, because preemption frees these blocks too.

        Args:
            request: Waiting request for which `find_fit` returned None.
            victims: Running requests to preempt.
            token_budget: Maximum number of tokens that the next step computes.
        """
        if request.num_rows > self.num_free_rows + sum(r.num_rows for r in victims):
            return False
        manager, first = self._manager, request.live_sequences[0]
        sequences = [s for r in victims for s in r.live_sequences]
        num_spare = int(len(victims) < len(self._running))
        state = first, len(request.live_sequences), manager.pool.num_free_calls, num_spare
        if state == self._preemption_refused_state:
            max_prefix_tokens = _max_prefix_tokens(request)
            if not manager.can_extend_prefix(
                self._preemption_refused_prefix, first, max_prefix_tokens
            ):
                return False
        freed_blocks = manager.exclusive_blocks(sequences)
        fit = self.measure_fit(request)
        # Some of `freed_blocks` may be cached blocks that the waiting request will reuse.
        # `measure_fit` does not count these blocks as needed, because the victims still hold them.
        # After the preemption, the request takes these blocks from the free blocks. Therefore, add
        # the number of these blocks to `num_needed`.
        num_needed = fit.num_needed_blocks + num_spare
        num_needed += len({block.block_id for hits in fit.hits for block in hits} & freed_blocks)
        num_surplus_blocks = manager.num_free_blocks + len(freed_blocks) - num_needed
        if num_surplus_blocks < 0:
            self._preemption_refused_state = state
            self._preemption_refused_prefix = [get_cache_entry(block) for block in fit.hits[0]]
            return False
        self._preemption_refused_state = ()
        staying = [r for r in self._running if r.priority <= request.priority]
        return num_surplus_blocks >= sum(
            manager.total_new_blocks(pending_work(r, token_budget)) for r in staying
        )

    @property
    def num_free_rows(self) -> int:
        """Number of sequences that can still join the batch."""
        return self._config.max_num_seqs - self._running.num_rows

    def is_prefill_worthwhile(self, num_waiting: int) -> bool:
        """Return whether enough batch rows are free to make a step with new prompts worthwhile.

        A step with prompts takes longer than its number of tokens suggests, so a few large prefills
        beat many small ones. Batch rows that stay free until the next prefill cost little.

        Args:
            num_waiting: Number of waiting requests.
        """
        num_wanted = min(num_waiting, self._config.max_num_seqs // ROWS_PER_FREE_ROW)
        return not self._running or self.num_free_rows >= num_wanted

    def would_fill_step(
        self, partial_prefills: list[Request], waiting: RequestQueue, num_tokens: int
    ) -> bool:
        """Return whether prompts alone can fill a step.

        The prompts are `partial_prefills`, then new single-sequence requests at the front of
        `waiting`. The result is False if one of these prompts has a cached prefix or does not fit
        in the free blocks. One free block per running sequence is reserved, so that the prompts do
        not soon cause a preemption.

        Args:
            partial_prefills: Running requests whose prompts are partly computed.
            waiting: Waiting requests.
            num_tokens: Number of tokens that fill the step.
        """
        if not partial_prefills and not self.is_prefill_worthwhile(len(waiting)):
            return False
        manager = self._manager
        num_blocks = self._running.num_rows
        new = islice(takewhile(_is_new_single_sequence, waiting), self.num_free_rows)
        for request in chain(partial_prefills, new):
            first = request.live_sequences[0]
            num_tokens -= first.num_tokens - first.num_computed_tokens
            num_blocks += manager.num_blocks_for(first.num_tokens) - len(first.block_table)
            # Look up only the prompt's first block. If it is not cached, no prefix of the prompt is
            # cached.
            max_prefix_tokens = min(manager.block_size, _max_prefix_tokens(request))
            is_cached = not first.block_table and manager.find_prefix(first, max_prefix_tokens)
            if is_cached or not manager.can_admit(first, num_blocks):
                return False
            if num_tokens <= 0:
                return True
        return False


def _is_new_single_sequence(request: Request) -> bool:
    return request.status is RequestStatus.WAITING and request.num_rows == 1


def _max_prefix_tokens(request: Request) -> int:
    """Return the maximum number of leading tokens of a request that the prefix cache may supply.

    For a request with several sequences, this is the length of their common prefix. For a single
    sequence, it is the number of tokens before the last token: a step must compute the last token,
    because it samples the next token from the result.
    """
    if request.status is RequestStatus.SWAPPED:
        return request.live_sequences[0].num_computed_tokens
    return request.num_common_prefix_tokens or len(request.live_sequences[0].token_ids) - 1


def check_request_fits(config: SchedulerConfig, manager: BlockManager, request: Request) -> int:
    """Check a new request, and return the maximum length of its sequences in tokens.

    Returns:
        Prompt length plus `max_tokens`, limited by `max_model_len`.

    Raises:
        ValueError: The request is invalid, or the pool is too small for it even without other
            requests.
    """
    name, prompt = f"request {request.request_id!r}", request.sequences[0].num_prompt_tokens
    if request.priority and not config.has_priorities:
        raise RequestError(
            "priority",
            f"of {name} has no effect",
            value=f"{request.priority}",
            remedy="create the engine with scheduling_policy='priority', or omit the priority",
        )
    if prompt < 1:
        raise ValueError(f"prompt_token_ids of {name} is empty: pass at least one token id")
    if prompt + 1 > config.max_model_len:
        raise ValueError(
            f"the prompt of {name} has {format_count(prompt, 'token')}, and "
            f"max_model_len={config.max_model_len} leaves no room for an output token: "
            "shorten the prompt or raise max_model_len"
        )
    num_rows, limit = request.num_rows, config.max_num_seqs
    if num_rows > limit:
        raise RequestError(
            "",
            f"{name} runs {num_rows} sequences, but max_num_seqs={limit}",
            remedy="lower n, best_of or beam_width, or raise max_num_seqs",
        )
    max_num_tokens = min(prompt + request.stop_criteria.max_tokens, config.max_model_len)
    needed = _num_needed_blocks(manager, request, max_num_tokens)
    pinned = manager.pins.num_blocks
    usable = manager.pool.num_usable_blocks - pinned
    if needed > usable:
        pinned_note = f" in addition to {pinned} pinned blocks" if pinned else ""
        several = f", {num_rows} sequences" if num_rows > 1 else ""
        unpin = ", unpin a prefix" if pinned else ""
        fewer = ", n or beam_width" if several else ""
        raise RequestError(
            "",
            f"{name} may need {format_count(needed, 'block')} "
            f"({format_count(prompt, 'prompt token')}, ",
            "max_tokens",
            f"={request.stop_criteria.max_tokens}{several}), "
            f"but the pool has {usable}{pinned_note}",
            remedy=(f"raise num_blocks{unpin} or lower ", "max_tokens", fewer),
            kind=ErrorKind.TOO_LARGE,
        )
    return max_num_tokens


def check_pin_fits(
    manager: BlockManager, num_new_blocks: int, unfinished_requests: Iterable[Request]
) -> None:
    """Check that the pool stays large enough for every unfinished request if a prefix is pinned.

    The check assumes that the requests share no blocks with the prefix.

    Args:
        manager: Block manager whose pool holds the pinned blocks.
        num_new_blocks: Number of blocks of the prefix that are not pinned yet.
        unfinished_requests: Running and waiting requests.

    Raises:
        ValueError: The pool is too small for the pin, or for the pin and one of the requests.
    """
    num_remaining_blocks = manager.pool.num_usable_blocks - manager.pins.num_blocks - num_new_blocks
    if num_remaining_blocks < 0:
        raise ValueError(
            f"pinning {format_count(num_new_blocks, 'block')} takes {-num_remaining_blocks} more "
            "than the pool has: raise num_blocks, or unpin another prefix"
        )
    for request in unfinished_requests:
        needed = _num_needed_blocks(manager, request, request.max_num_tokens)
        if needed > num_remaining_blocks:
            raise ValueError(
                f"pinning {format_count(num_new_blocks, 'block')} leaves {num_remaining_blocks}, "
                f"but request {request.request_id!r} may need {needed} blocks: "
                "wait until the request has finished, or raise num_blocks"
            )


def _num_needed_blocks(manager: BlockManager, request: Request, max_num_tokens: int) -> int:
    """Return the maximum number of blocks that the request may need.

    Pinned blocks that the request shares are not counted. The last token of a sequence is never an
    input of the model, so it needs no slot. The sequences of a group share the full blocks of the
    prompt. Samples do not share the block of the last prompt token, because each sample computes
    this token itself.
    """
    first = request.live_sequences[0]
    each = manager.num_blocks_for(max_num_tokens - 1)
    pinned = manager.num_pinned_prefix_blocks(first)
    if request.num_rows == 1:
        return each - pinned
    num_prefix_blocks = (first.num_prompt_tokens - (request.beam is None)) // manager.block_size
    return (
        each + (request.num_rows - 1) * (each - num_prefix_blocks) - min(pinned, num_prefix_blocks)
    )
