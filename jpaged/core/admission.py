"""Admission: the scheduler's limits, which requests they refuse on arrival, and whether the first
waiting request may join the batch now."""

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
"""Of so many seats one is left free while others get free too: 8 of 256."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a sequence.

    `max_num_seqs` sequences run at once, `max_num_batched_tokens` tokens are computed a step, and
    prompt and outputs together stay within `max_model_len` tokens. `has_priorities`, requests are
    served in the order of their priorities; if not, in that of their arrival.
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
    """Tells whether the head of the line may join, and remembers a refusal.

    While the head waits, no request passes it, so free blocks only become fewer until one is freed,
    and its prefix grows only by the block right after it. A refused head thus costs a step one look
    at that block, however long its prompt is.
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
        self._refused_state: tuple[object, ...] = ()  # who, and all else that the refusal rests on
        self._refused_prefix: list[PrefixCacheEntry] = []
        self._no_room_state: tuple[object, ...] = ()  # likewise, if others yield
        self._no_room_prefix: list[PrefixCacheEntry] = []

    def find_fit(self, request: Request) -> GroupFit | None:
        """How the whole group, its stem settled, fits now: seats and blocks; None if it must
        wait."""
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
        # The spare block keeps a newcomer from being preempted by the next one to grow.
        if manager.can_admit(first, fit.num_needed_blocks + num_spare):
            self._refused_state = ()
            return fit
        self._refused_state = state
        self._refused_prefix = [get_cache_entry(block) for block in fit.hits[0]]
        return None

    def measure_fit(self, request: Request) -> GroupFit:
        """How a waiting group would fit if enough blocks were free."""
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
        """Whether there would be seats and blocks for one that `find_fit` has refused, if these runners
        gave all of theirs back; also behind the next step of the others, of `token_budget` tokens.

        A refusal is remembered here too. Until a block is given back, a repeated call costs one
        lookup of the block right after the prefix: a block that a yielding request takes leaves the
        free blocks and joins the blocks that it would give back.
        """
        if request.num_rows > self.num_free_rows + sum(r.num_rows for r in victims):
            return False
        manager, first = self._manager, request.live_sequences[0]
        sequences = [s for r in victims for s in r.live_sequences]
        num_spare = int(len(victims) < len(self._running))
        state = first, len(request.live_sequences), manager.pool.num_free_calls, num_spare
        if state == self._no_room_state:
            max_prefix_tokens = _max_prefix_tokens(request)
            if not manager.can_extend_prefix(self._no_room_prefix, first, max_prefix_tokens):
                return False
        freed_blocks = manager.exclusive_blocks(sequences)
        fit = self.measure_fit(request)
        # What it finds cached in these blocks it takes, though to find them costs nothing now.
        num_needed = fit.num_needed_blocks + num_spare
        num_needed += len({block.block_id for hits in fit.hits for block in hits} & freed_blocks)
        num_room = manager.num_free_blocks + len(freed_blocks) - num_needed
        if num_room < 0:
            self._no_room_state = state
            self._no_room_prefix = [get_cache_entry(block) for block in fit.hits[0]]
            return False
        self._no_room_state = ()
        staying = [r for r in self._running if r.priority <= request.priority]
        return num_room >= sum(
            manager.total_new_blocks(pending_work(r, token_budget)) for r in staying
        )

    @property
    def num_free_rows(self) -> int:
        """Sequences that a step has places for, besides those that run."""
        return self._config.max_num_seqs - self._running.num_rows

    def is_prefill_worthwhile(self, num_waiting: int) -> bool:
        """Whether seats enough are free for so many that wait, of whatever kind, that a step with
        prompts pays.

        Such a step takes longer than its tokens account for, and the seats left free meanwhile cost
        little: as the scheduler plans case B (bench/throughput.py), 36 such steps instead of 168.
        """
        num_wanted = min(num_waiting, self._config.max_num_seqs // ROWS_PER_FREE_ROW)
        return not self._running or self.num_free_rows >= num_wanted

    def would_fill_step(
        self, partial_prefills: list[Request], waiting: RequestQueue, num_tokens: int
    ) -> bool:
        """Whether what is left of prompts that were begun, and those of new lone sequences at the
        head of the line, nothing of which is cached, come to so many tokens; with seats and blocks
        for all of them, and one for each that runs, so that no request is soon preempted for them.
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
            # A prompt of which anything is cached begins with a cached block.
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
    """A stem is shared by all; without one a last token is left to compute."""
    if request.status is RequestStatus.SWAPPED:
        return request.live_sequences[0].num_computed_tokens
    return request.num_common_prefix_tokens or len(request.live_sequences[0].token_ids) - 1


def check_request_fits(config: SchedulerConfig, manager: BlockManager, request: Request) -> int:
    """The most tokens that each of the request's sequences reaches, its prompt counted; ValueError
    unless the request, alone in the pool, can run to its end."""
    name, prompt = f"request {request.request_id!r}", request.sequences[0].num_prompt_tokens
    if request.priority and not config.has_priorities:
        raise RequestError(
            "priority",
            f"of {name} has no effect",
            value=f"{request.priority}",
            remedy="make the engine with scheduling_policy='priority', or leave it at 0",
        )
    if prompt < 1:
        raise ValueError(f"prompt_token_ids of {name} is empty")
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
            f"{name} runs {num_rows} sequences and max_num_seqs={limit}",
            remedy="lower n, best_of or beam_width, or raise max_num_seqs",
        )
    max_num_tokens = min(prompt + request.stop_criteria.max_tokens, config.max_model_len)
    needed = _num_needed_blocks(manager, request, max_num_tokens)
    pinned = manager.pins.num_blocks
    usable = manager.pool.num_usable_blocks - pinned
    if needed > usable:
        pinned_note = f" beside {pinned} pinned ones" if pinned else ""
        several = f", {num_rows} sequences" if num_rows > 1 else ""
        unpin = ", unpin a prefix" if pinned else ""
        fewer = ", n or beam_width" if several else ""
        raise RequestError(
            "",
            f"{name} may need {format_count(needed, 'block')} ({format_count(prompt, 'prompt token')}, ",
            "max_tokens",
            f"={request.stop_criteria.max_tokens}{several}) and the pool has {usable}{pinned_note}",
            remedy=(f"raise num_blocks{unpin} or lower ", "max_tokens", fewer),
            kind=ErrorKind.TOO_LARGE,
        )
    return max_num_tokens


def check_pin_fits(
    manager: BlockManager, num_new_blocks: int, unfinished_requests: Iterable[Request]
) -> None:
    """Raise ValueError unless each unfinished request could still run to its end, alone, beside
    `num_new_blocks` more pinned ones; what it may share with these is not counted on."""
    num_remaining_blocks = manager.pool.num_usable_blocks - manager.pins.num_blocks - num_new_blocks
    if num_remaining_blocks < 0:
        raise ValueError(
            f"pinning {format_count(num_new_blocks, 'block')} leaves the pool {-num_remaining_blocks} short: "
            "raise num_blocks, or unpin another prefix"
        )
    for request in unfinished_requests:
        needed = _num_needed_blocks(manager, request, request.max_num_tokens)
        if needed > num_remaining_blocks:
            raise ValueError(
                f"pinning {format_count(num_new_blocks, 'block')} leaves {num_remaining_blocks}, and request "
                f"{request.request_id!r} may need {needed}: wait for its end, or raise num_blocks"
            )


def _num_needed_blocks(manager: BlockManager, request: Request, max_num_tokens: int) -> int:
    """Blocks that the request needs at most in addition to the pinned ones.

    The last token of a sequence is never fed back, so it needs no slot. The sequences of a group
    share the prompt's full blocks, whatever befalls them (samples compute its last token each), and
    a pinned prefix is there already.
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
