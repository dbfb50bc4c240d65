"""A device that stores in each slot whose token's KV it would hold, and a naive oracle.

It applies plans as a runner must, in launch order, and checks that every slot a step reads holds
exactly the KV of the sequence's own tokens: the KV of a token is stood for by a checksum of all
tokens up to that one and of its origin, which is the sequence's cache salt where prefixes are
shared, and the sequence itself where nothing is.
"""

import zlib
from itertools import accumulate

import numpy as np

from jpaged.core.block_pool import BlockPool
from jpaged.core.plan import ScheduledSequence, StepPlan
from jpaged.core.request import FinishReason, Sequence, StopCriteria

VOCABULARY = 11


def next_token(token_ids: list[int]) -> int:
    """The fake model: any deterministic function of all the tokens will do."""
    return zlib.crc32(bytes(token_ids)) % VOCABULARY


def oracle(
    prompt: list[int], stop: StopCriteria, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """What a request must give, run alone with no cache at all."""
    tokens = list(prompt)
    while True:
        tokens.append(token := next_token(tokens))
        outputs = tokens[len(prompt) :]
        if token in stop.stop_token_ids and len(outputs) >= stop.min_tokens:
            return outputs, FinishReason.STOP
        if len(outputs) == stop.max_tokens or len(tokens) == max_model_len:
            return outputs, FinishReason.LENGTH


def kv_of(origin: str, token_ids: list[int]) -> list[int]:
    """The KV of each token of a sequence, as checksums."""
    start = zlib.crc32(origin.encode())
    return list(accumulate(token_ids, lambda h, t: zlib.crc32(bytes([t]), h), initial=start))[1:]


class FakeDevice:
    """Pool, device-side block tables and last tokens; `launch` runs a step at once."""

    def __init__(self, block_size: int, max_num_seqs: int, shares: bool = False):
        self.block_size, self.max_num_seqs, self.shares = block_size, max_num_seqs, shares
        self.slots: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}  # rows of the batch, by sequence
        self.last_tokens: dict[int, int] = {}
        self.history: dict[int, list[int]] = {}  # all tokens of each sequence ever seen

    def launch(self, plan: StepPlan) -> np.ndarray:
        """Run a step; returns what it samples, garbage for rows that do not."""
        for seq_id in plan.released:
            del self.tables[seq_id]  # KeyError: released twice, or never in the batch
            self.last_tokens.pop(seq_id, None)
        for src, dst in plan.block_copies:
            self._copy_block(src, dst)
        for row in plan.scheduled:
            self._join(row)
        assert len(self.tables) <= self.max_num_seqs, "more rows than the device has"
        inputs = [self._inputs(row) for row in plan.scheduled]
        for row in plan.scheduled:
            self._read(row, row.start)  # what it stands on is there before this step writes
        self._write(plan, inputs)
        for row in plan.scheduled:
            self._read(row, row.start + row.num_scheduled_tokens)
        return np.array([self._sample(row) for row in plan.scheduled], np.int32)

    def spoil(self, pool: BlockPool) -> None:
        """Make the KV in free blocks unreadable, as it is after a reset of the prefix cache."""
        for block in pool.free_block_queue:
            for offset in range(self.block_size):
                self.slots.pop(block.block_id * self.block_size + offset, None)

    def _copy_block(self, src: int, dst: int) -> None:
        for offset in range(self.block_size):
            self.slots[dst * self.block_size + offset] = self.slots.get(
                src * self.block_size + offset, -1
            )

    def _join(self, row: ScheduledSequence) -> None:
        sequence = row.sequence
        if sequence.seq_id not in self.tables:
            if not self.shares:
                assert row.start == 0, "a row must join the batch from its first token"
            assert row.start % self.block_size == 0, "only full blocks are shared"
            assert row.start < len(sequence.token_ids), "nothing is left to compute"
            self.tables[sequence.seq_id] = []
        table = self.tables[sequence.seq_id]
        for index, block_id in row.block_updates:
            table[index : index + 1] = [block_id]
        end = row.start + row.num_scheduled_tokens
        assert table == sequence.block_table, "the device's block table is out of date"
        assert len(table) == -(-end // self.block_size)
        history = self.history.setdefault(sequence.seq_id, list(sequence.token_ids))
        assert history[: len(sequence.token_ids)] == sequence.token_ids
        assert len(history) == sequence.num_tokens - row.samples, "samples not as counted"

    def _inputs(self, row: ScheduledSequence) -> list[int]:
        known = row.sequence.token_ids
        end = row.start + row.num_scheduled_tokens
        inputs = known[row.start : end]
        if end > len(known):
            inputs.append(self.last_tokens[row.sequence.seq_id])
        assert len(inputs) == row.num_scheduled_tokens
        assert inputs == self.history[row.sequence.seq_id][row.start : end]
        return inputs

    def _origin(self, sequence: Sequence) -> str:
        return repr(sequence.cache_salt if self.shares else sequence.seq_id)

    def _slot(self, seq_id: int, position: int) -> int:
        block_id = self.tables[seq_id][position // self.block_size]
        assert block_id != 0, "the null block is in a block table"
        return block_id * self.block_size + position % self.block_size

    def _write(self, plan: StepPlan, inputs: list[list[int]]) -> None:
        written: set[int] = set()
        for row, tokens in zip(plan.scheduled, inputs, strict=True):
            seq_id = row.sequence.seq_id
            kv = kv_of(self._origin(row.sequence), self.history[seq_id][: row.start] + tokens)
            for position in range(row.start, len(kv)):
                slot = self._slot(seq_id, position)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.slots[slot] = kv[position]

    def _read(self, row: ScheduledSequence, end: int) -> None:
        seq_id = row.sequence.seq_id
        found = [self.slots.get(self._slot(seq_id, position)) for position in range(end)]
        own = kv_of(self._origin(row.sequence), self.history[seq_id][:end])
        assert found == own, "KV of others, or none, is read"

    def _sample(self, row: ScheduledSequence) -> int:
        seq_id = row.sequence.seq_id
        self.last_tokens.pop(seq_id, None)
        if not row.samples:
            return 10**6
        self.history[seq_id].append(token := next_token(self.history[seq_id]))
        self.last_tokens[seq_id] = token
        return token
