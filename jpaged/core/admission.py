"""Admission: the scheduler's limits, which requests they refuse on arrival, and whether the first
waiting request may join the batch now."""

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import NamedTuple

from jpaged.core.block_manager import BlockManager
from jpaged.core.block_pool import BlockContent, KVBlock, registered_content
from jpaged.core.request import Request, RequestStatus, Sequence
from jpaged.core.sequence_table import RequestQueue
from jpaged.core.swap import SwapInFit, SwapSpace

SEATS_PER_FREE_SEAT = 32
"""Of so many seats one is left free while others get free too: 8 of 256."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a sequence.

    `max_num_seqs` sequences run at once, `max_num_batched_tokens` tokens are computed a step, and
    prompt and outputs together stay within `max_model_len` tokens. `by_priority`, requests are
    served in the order of their priorities; if not, in that of their arrival.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    by_priority: bool = False

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class _Refusal(NamedTuple):
    """Why the head of the line did not fit: as long as nothing of it changes, it does not."""

    sequence: Sequence
    num_sequences: int
    num_spare_blocks: int
    num_freed: int
    contents: list[BlockContent]


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
        self._refusal: _Refusal | None = None

    def has_room(self, request: Request) -> bool:
        """Whether there are seats and blocks for the request."""
        if not self.has_seats(request):
            return False
        if request.status is RequestStatus.SWAPPED:
            return self.find_image(request) is not None
        return self.find_prefix(request) is not None

    def would_have_room(self, request: Request, yielding: list[Request]) -> bool:
        """Whether there would be seats and blocks if these runners gave all of theirs back."""
        if not self.has_seats(request, sum(r.num_seats for r in yielding)):
            return False
        tables = (sequence.block_table for r in yielding for sequence in r.live)
        held, blocks = Counter(chain.from_iterable(tables)), self._manager.pool.blocks
        num_returned = sum(blocks[b].ref_cnt == count for b, count in held.items())
        if request.status is RequestStatus.SWAPPED:
            num_needed = self._swap_space.measure(request).num_needed_blocks
        else:
            num_needed, _ = self._measure(request)
        num_needed += int(len(yielding) < len(self._running))  # the spare block
        return num_needed <= self._manager.num_free_blocks + num_returned

    def has_seats(self, request: Request, num_more: int = 0) -> bool:
        """Whether a step has places for so many sequences more, `num_more` being made free."""
        return self._has_free_seats(request.num_seats, num_more)

    def is_worth_a_step(self, num_waiting: int) -> bool:
        """Whether seats enough are free for so many that wait, of whatever kind, that a step with
        prompts pays.

        Such a step takes longer than its tokens account for, and the seats left free meanwhile cost
        little: as the scheduler plans case B (bench/throughput.py), 36 such steps instead of 168.
        """
        num_wanted = min(num_waiting, self._config.max_num_seqs // SEATS_PER_FREE_SEAT)
        return not self._running or self._has_free_seats(num_wanted)

    def would_fill_a_step(
        self, begun: list[Request], waiting: RequestQueue, num_tokens: int
    ) -> bool:
        """Whether what is left of prompts that were begun, and those of new lone sequences at the
        head of the line, nothing of which is cached, come to so many tokens; with seats and blocks
        for all of them, and one for each that runs, so that no request is soon preempted for them.
        """
        if not begun and not self.is_worth_a_step(len(waiting)):
            return False
        manager = self._manager
        num_blocks = self._running.num_seats
        new = islice(takewhile(_is_new_and_lone, waiting), self._num_free_seats)
        for request in chain(begun, new):
            first = request.live[0]
            num_tokens -= first.num_tokens - first.num_computed_tokens
            num_blocks += manager.num_blocks_for(first.num_tokens) - len(first.block_table)
            if not manager.can_admit(first, num_blocks) or self._finds_a_block(request):
                return False
            if num_tokens <= 0:
                return True
        return False

    def _finds_a_block(self, request: Request) -> bool:
        """Whether some of a new request's prompt is cached, which then begins with its first
        block."""
        most = min(self._manager.block_size, _max_prefix_tokens(request))
        is_new = not request.live[0].block_table
        return is_new and bool(self._manager.find_prefix(request.live[0], most))

    @property
    def _num_free_seats(self) -> int:
        return self._config.max_num_seqs - self._running.num_seats

    def _has_free_seats(self, num_wanted: int, num_more: int = 0) -> bool:
        return self._num_free_seats + num_more >= num_wanted

    def find_image(self, request: Request) -> SwapInFit | None:
        """How a swapped group can come back; None if it must wait."""
        return self._swap_space.find(request, self._num_spare_blocks)

    def find_prefix(self, request: Request) -> list[KVBlock] | None:
        """The cached prefix with which the whole group, its stem settled, fits now; None if it must
        wait."""
        if self._is_still_refused(request):
            return None
        num_needed, prefix = self._measure(request)
        if self._manager.can_admit(request.live[0], num_needed + self._num_spare_blocks):
            self._refusal = None
            return prefix
        contents = [registered_content(block) for block in prefix]
        self._refusal = _Refusal(*self._state(request), contents)
        return None

    def _measure(self, request: Request) -> tuple[int, list[KVBlock]]:
        """Free blocks that a waiting group takes to compute all its tokens, and its prefix."""
        manager, first = self._manager, request.live[0]
        prefix = manager.find_prefix(first, _max_prefix_tokens(request))
        num_missing = len(first.token_ids) - len(prefix) * manager.block_size
        num_revived = sum(block.ref_cnt == 0 for block in prefix)
        num_needed = manager.num_blocks_for(num_missing) + num_revived
        return num_needed + _num_blocks_of_others(manager, request), prefix

    @property
    def _num_spare_blocks(self) -> int:
        """Keeps a newcomer from being preempted by the next one to grow."""
        return int(bool(self._running))

    def _is_still_refused(self, request: Request) -> bool:
        refusal, first = self._refusal, request.live[0]
        if refusal is None or refusal[:-1] != self._state(request):
            return False
        return not self._manager.can_extend(refusal.contents, first, _max_prefix_tokens(request))

    def _state(self, request: Request) -> tuple[Sequence, int, int, int]:
        live, num_freed = request.live, self._manager.pool.num_freed
        return live[0], len(live), self._num_spare_blocks, num_freed


def _is_new_and_lone(request: Request) -> bool:
    return request.status is RequestStatus.WAITING and request.num_seats == 1


def _max_prefix_tokens(request: Request) -> int:
    """A stem is shared by all; without one a last token is left to compute."""
    return request.num_stem_tokens or len(request.live[0].token_ids) - 1


def _num_blocks_of_others(manager: BlockManager, request: Request) -> int:
    """Blocks that all but the first sequence need in addition to the stem's."""
    num_shared = request.num_stem_tokens // manager.block_size
    others = request.live[1:]
    return sum(manager.num_blocks_for(len(s.token_ids)) - num_shared for s in others)


def max_num_tokens(config: SchedulerConfig, request: Request) -> int:
    """Tokens that a sequence of the request reaches at most, the prompt counted."""
    prompt = request.sequences[0].num_prompt_tokens
    return min(prompt + request.stop.max_tokens, config.max_model_len)


def check_new(
    config: SchedulerConfig,
    request: Request,
    is_unfinished: Callable[[str], bool],
    seq_ids: Container[int],
) -> None:
    """Raise ValueError if one of the request's ids is in use, or it has a priority for nothing."""
    if is_unfinished(request.request_id):
        raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request")
    for sequence in request.sequences:
        if sequence.seq_id in seq_ids:
            raise ValueError(f"seq_id {sequence.seq_id} is in use by another sequence")
    if request.priority and not config.by_priority:
        raise ValueError(
            f"priority={request.priority} of request {request.request_id!r} has no effect: make "
            "the engine with scheduling_policy='priority', or leave it at 0"
        )


def check_fits(config: SchedulerConfig, manager: BlockManager, request: Request) -> None:
    """Raise ValueError unless the request, alone in the pool, can run to its end."""
    _check_prompt(config, request)
    seats, limit = request.num_seats, config.max_num_seqs
    if seats > limit:
        raise ValueError(
            f"request {request.request_id!r} runs {seats} sequences and max_num_seqs={limit}: "
            "lower n, best_of or beam_width, or raise max_num_seqs"
        )
    needed = _num_needed_blocks(manager, request, max_num_tokens(config, request))
    pinned = manager.pins.num_blocks
    usable = manager.pool.num_usable_blocks - pinned
    if needed > usable:
        beside = f" beside {pinned} pinned ones" if pinned else ""
        several = f", {seats} sequences" if seats > 1 else ""
        raise ValueError(
            f"request {request.request_id!r} may need {needed} blocks "
            f"({request.sequences[0].num_prompt_tokens} prompt tokens, "
            f"max_tokens={request.stop.max_tokens}{several}) and the pool has {usable}{beside}: "
            f"raise num_blocks{', unpin a prefix' if pinned else ''} or lower max_tokens"
            f"{', n or beam_width' if several else ''}"
        )


def check_pin_fits(
    manager: BlockManager, num_new_blocks: int, unfinished: Iterable[Request]
) -> None:
    """Raise ValueError unless each unfinished request could still run to its end, alone, beside
    `num_new_blocks` more pinned ones; what it may share with these is not counted on."""
    left = manager.pool.num_usable_blocks - manager.pins.num_blocks - num_new_blocks
    if left < 0:
        raise ValueError(
            f"pinning {num_new_blocks} blocks leaves the pool {-left} short: "
            "raise num_blocks, or unpin another prefix"
        )
    for request in unfinished:
        needed = _num_needed_blocks(manager, request, request.max_num_tokens)
        if needed > left:
            raise ValueError(
                f"pinning {num_new_blocks} blocks leaves {left}, and request "
                f"{request.request_id!r} may need {needed}: wait for its end, or raise num_blocks"
            )


def _num_needed_blocks(manager: BlockManager, request: Request, max_num_tokens: int) -> int:
    """Blocks that the request needs at most in addition to the pinned ones.

    The last token of a sequence is never fed back, so it needs no slot. The sequences of a group
    share the prompt's full blocks, whatever befalls them (samples compute its last token each), and
    a pinned prefix is there already.
    """
    first = request.live[0]
    each = manager.num_blocks_for(max_num_tokens - 1)
    pinned = manager.num_shared_with_pins(first)
    if request.num_seats == 1:
        return each - pinned
    stem = (first.num_prompt_tokens - (request.beam is None)) // manager.block_size
    return each + (request.num_seats - 1) * (each - stem) - min(pinned, stem)


def _check_prompt(config: SchedulerConfig, request: Request) -> None:
    prompt, limit = request.sequences[0].num_prompt_tokens, config.max_model_len
    if prompt < 1:
        raise ValueError(f"prompt_token_ids of request {request.request_id!r} is empty")
    if prompt + 1 > limit:
        raise ValueError(
            f"the prompt of request {request.request_id!r} has {prompt} tokens, and "
            f"max_model_len={limit} leaves no room for an output token: shorten the prompt or "
            "raise max_model_len"
        )
