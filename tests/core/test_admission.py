"""Test which events in a full block pool let the scheduler admit a waiting request that did not fit
before."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from core_driver import DIGESTS, make_request

from jpaged.core.admission import Admission, SchedulerConfig
from jpaged.core.block_manager import BlockManager
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.request import Request, RequestStatus, Sequence, SwapEntry
from jpaged.core.sequence_table import RequestQueue
from jpaged.core.swap import PreemptionPolicy, SwapSpace

PROMPT = list(range(10))  # three blocks


@dataclass
class WaitingQueue:
    """A queue of waiting requests, and a sequence (`holder`) that holds blocks.

    The first request in the queue (`head`) needs one block more than is free.
    """

    manager: BlockManager
    admission: Admission
    running: RequestQueue
    holder: Sequence
    head: Request

    def free_block(self) -> None:
        self.manager.pool.free(self.holder.block_table[-1:])

    def replace_head(self) -> None:
        self.head = make_request("8", [9, 9, 9])

    def end_sample(self) -> None:
        self.head.live_sequences.pop()

    def end_running_request(self) -> None:
        """End the running request. It holds no block, but one free block was reserved for it."""
        self.running.discard(self.running.first)

    def register_prefix(self) -> None:
        self.manager.register_full_blocks(self.holder, 4)


CHANGES: list[tuple[Callable[[WaitingQueue], None], list[int], int]] = [
    # Each tuple is a test case: a method of `WaitingQueue`, the prompt of the waiting request, and
    # the number of samples of the request. Before the test calls the method, the request needs one
    # block more than is free. After the call, the request fits.
    (WaitingQueue.free_block, PROMPT, 1),
    (WaitingQueue.replace_head, PROMPT, 1),
    (WaitingQueue.end_sample, [1, 2, 3, 4, 5, 6], 2),
    (WaitingQueue.end_running_request, PROMPT[:8], 1),
    (WaitingQueue.register_prefix, PROMPT, 1),
]


def make_queue(prompt: list[int], num_samples: int, *, spares: bool) -> WaitingQueue:
    manager = BlockManager(6, 4, PrefixCache(4, DIGESTS["xxh3"]))
    space, running = SwapSpace(PreemptionPolicy(), manager), RequestQueue()
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=20)
    holder = make_request("1", PROMPT).live_sequences[0]
    manager.append(holder, len(PROMPT))
    holder.num_computed_tokens = len(PROMPT)
    if spares:
        runner = make_request("2", 1)
        runner.arrival_index = 0
        running.add(runner)
    head = make_request("7", prompt, n=num_samples, seq_id=70)
    if num_samples > 1:
        head.num_common_prefix_tokens = len(prompt) - 1
    return WaitingQueue(manager, Admission(config, manager, space, running), running, holder, head)


@pytest.mark.parametrize(("change", "prompt", "num_samples"), CHANGES)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_waiting_request_is_admitted_as_soon_as_enough_blocks_are_free(
    change: Callable[[WaitingQueue], None], prompt: list[int], num_samples: int, is_swapped: bool
):
    queue = make_queue(prompt, num_samples, spares=change is WaitingQueue.end_running_request)

    def fits() -> bool:
        if is_swapped:
            swap_out(queue.head, queue.manager)
        return queue.admission.find_fit(queue.head) is not None

    # The second call returns the cached result of the first call.
    assert [fits(), fits()] == [False, False]
    change(queue)
    assert fits()


def swap_out(request: Request, manager: BlockManager) -> None:
    """Put a request into the state that it has after all its tokens were swapped out."""
    for sequence in request.live_sequences:
        first, num_tokens = 10 * sequence.index, len(sequence.token_ids)
        sequence.host_block_table = [*range(first, first + manager.num_blocks_for(num_tokens))]
        sequence.num_computed_tokens = num_tokens
    request.num_common_prefix_tokens, request.swap_entry = 0, SwapEntry(1, 0)
    request.status = RequestStatus.SWAPPED
