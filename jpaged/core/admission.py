"""Who may join the batch, and with how much of its KV found in the prefix cache."""

from collections import Counter
from itertools import chain, islice, takewhile
from typing import NamedTuple

from jpaged.core.block_manager import BlockManager
from jpaged.core.block_pool import BlockContent, KVBlock, registered_content
from jpaged.core.limits import SchedulerConfig
from jpaged.core.queue import RequestQueue
from jpaged.core.request import Request, RequestStatus, Sequence
from jpaged.core.swap import SwapInFit, SwapSpace

_SEATS_PER_FREE_SEAT = 32
"""Of so many seats one is left free while others get free too: 8 of 256."""


class _Refusal(NamedTuple):
    """Why the head of the line did not fit: as long as nothing of it changes, it does not."""

    sequence: Sequence
    num_sequences: int
    num_spare_blocks: int
    num_freed: int
    contents: list[BlockContent]


class Admission:
    """Tells whether the head of the line may join, and remembers a refusal.

    While the head waits, nobody passes it, so free blocks only become fewer until one is freed, and
    its prefix grows only by the block right after it. A refused head thus costs a step one look at
    that block, however long its prompt is.
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
        num_wanted = min(num_waiting, self._config.max_num_seqs // _SEATS_PER_FREE_SEAT)
        return not self._running or self._has_free_seats(num_wanted)

    def would_fill_a_step(
        self, begun: list[Request], waiting: RequestQueue, num_tokens: int
    ) -> bool:
        """Whether what is left of prompts that were begun, and those of new lone sequences at the
        head of the line, nothing of which is cached, come to so many tokens; with seats and blocks
        for all of them, and one for each that runs, so that nobody soon gives way for their sake.
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
    """Blocks that all but the first sequence need beside the stem's."""
    num_shared = request.num_stem_tokens // manager.block_size
    others = request.live[1:]
    return sum(manager.num_blocks_for(len(s.token_ids)) - num_shared for s in others)
