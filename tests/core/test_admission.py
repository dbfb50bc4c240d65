"""Test when a refused request fits, in a pool of five blocks of four tokens."""

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
SMALL = [9, 9, 9]


@dataclass
class Line:
    """A request at the head of the line, and who holds what it waits for."""

    manager: BlockManager
    admission: Admission
    running: RequestQueue
    holder: Sequence
    head: Request

    def change_freed(self) -> None:
        self.manager.pool.free(self.holder.block_table[-1:])

    def change_head(self) -> None:
        self.head = make_request("8", SMALL)

    def change_sample_ended(self) -> None:
        self.head.live_sequences.pop()

    def change_nobody_runs(self) -> None:
        """Free a sequence whose block another sequence holds too: no block becomes free."""
        self.running.discard(self.running.first)

    def change_prefix(self) -> None:
        self.manager.register_full_blocks(self.holder, 4)


CHANGES: dict[str, tuple[Callable[[Line], None], list[int], int]] = {
    # what changes; the head's prompt and its samples, for which one block more was needed
    "a block was freed": (Line.change_freed, PROMPT, 1),
    "another stands at the head": (Line.change_head, PROMPT, 1),
    "a sample ended": (Line.change_sample_ended, [1, 2, 3, 4, 5, 6], 2),
    "nobody runs, so none is spared": (Line.change_nobody_runs, PROMPT[:8], 1),
    "its prefix has grown": (Line.change_prefix, PROMPT, 1),
}


def make_line(prompt: list[int], num_samples: int, *, spares: bool) -> Line:
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
    return Line(manager, Admission(config, manager, space, running), running, holder, head)


@pytest.mark.parametrize("name", CHANGES)
def test_refused_request_fits_as_soon_as_its_blocks_are_free(name: str):
    change, prompt, num_samples = CHANGES[name]
    line = make_line(prompt, num_samples, spares=change is Line.change_nobody_runs)
    for _ in range(2):  # the second time from memory
        assert line.admission.find_fit(line.head) is None
    change(line)
    assert line.admission.find_fit(line.head) is not None


@pytest.mark.parametrize("name", CHANGES)
def test_swapped_request_fits_as_soon_as_its_blocks_are_free(name: str):
    change, prompt, num_samples = CHANGES[name]
    line = make_line(prompt, num_samples, spares=change is Line.change_nobody_runs)

    def fits() -> bool:
        for (
            sequence
        ) in line.head.live_sequences:  # as if it had been swapped out, all of it computed
            num_blocks = line.manager.num_blocks_for(len(sequence.token_ids))
            first = 10 * sequence.index
            sequence.host_block_table = list(range(first, first + num_blocks))
            sequence.num_computed_tokens = len(sequence.token_ids)
        line.head.num_common_prefix_tokens, line.head.swap_entry = 0, SwapEntry(1, 0)
        line.head.status = RequestStatus.SWAPPED
        return line.admission.find_fit(line.head) is not None

    assert [fits(), fits()] == [False, False]
    change(line)
    assert fits()
