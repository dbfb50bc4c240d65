"""Who may join the batch, and with how much of its KV found in the prefix cache."""

from typing import NamedTuple

from jpaged.core.block_manager import BlockManager
from jpaged.core.block_pool import BlockContent, KVBlock, registered_content
from jpaged.core.limits import SchedulerConfig
from jpaged.core.request import Sequence


class _Refusal(NamedTuple):
    """Why the head of the line did not fit: as long as nothing of it changes, it does not."""

    sequence: Sequence
    num_spare_blocks: int
    num_freed: int
    contents: list[BlockContent]


class Admission:
    """Looks the head of the line's prefix up, and remembers a refusal.

    While the head waits, nobody passes it, so free blocks only become fewer until one is freed, and
    its prefix grows only by the block right after it. A refused head thus costs a step one look at
    that block, however long its prompt is.
    """

    def __init__(self, config: SchedulerConfig, manager: BlockManager):
        self._config, self._manager = config, manager
        self._refusal: _Refusal | None = None

    def find(
        self, sequence: Sequence, budget: int, num_spare_blocks: int
    ) -> tuple[list[KVBlock]] | None:
        """The cached prefix with which `sequence` fits now, in a tuple; None if it must wait.

        `budget` is the step's tokens left; `num_spare_blocks` must stay free besides.
        """
        if sequence.num_pending_tokens or sequence.num_in_flight_steps:
            return None  # preempted a moment ago: its newest token is not known here yet
        if self._is_still_refused(sequence, num_spare_blocks):
            return None
        manager, known = self._manager, len(sequence.token_ids)
        prefix = manager.find_prefix(sequence)
        num_missing = known - len(prefix) * manager.block_size
        if num_missing > budget and not self._config.enable_chunked_prefill:
            return None
        if manager.can_allocate(num_missing, num_spare_blocks, prefix):
            self._refusal = None
            return (prefix,)
        contents = [registered_content(block) for block in prefix]
        self._refusal = _Refusal(sequence, num_spare_blocks, manager.pool.num_freed, contents)
        return None

    def _is_still_refused(self, sequence: Sequence, num_spare_blocks: int) -> bool:
        refusal, manager = self._refusal, self._manager
        if refusal is None or refusal[:3] != (sequence, num_spare_blocks, manager.pool.num_freed):
            return False
        return not manager.can_extend(refusal.contents, sequence)
