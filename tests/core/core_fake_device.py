"""A fake device that checks that each step reads the right KV, and functions that compute the
expected tokens.

The device stores a checksum instead of the KV of a token. The checksum depends on all tokens of the
sequence up to this token. It also depends on the cache salt if prefixes are shared, otherwise on
the request.
"""

import zlib
from itertools import accumulate

import numpy as np

from jpaged.core.beam import BeamSearch, Hypothesis
from jpaged.core.block_pool import BlockPool
from jpaged.core.plan import ScheduledSequence, StepPlan
from jpaged.core.request import BeamCandidates, FinishReason, Sequence, StopCriteria

VOCABULARY = 11


def next_token(token_ids: list[int], index: int = 0) -> int:
    """Return the fake model's next token, which depends on all tokens and the sample's index."""
    return zlib.crc32(bytes(token_ids), index) % VOCABULARY


def candidates_of(token_ids: list[int]) -> BeamCandidates:
    """Return all tokens with the fake model's log-probabilities, most probable first."""
    weights = [zlib.crc32(bytes([*token_ids, t])) / 2**32 for t in range(VOCABULARY)]
    logprobs = np.log(np.array(weights) / sum(weights)).astype(np.float32)
    order = np.argsort(-logprobs, kind="stable")
    return BeamCandidates(order.astype(np.int32), logprobs[order])


def oracle(
    prompt: list[int], stop: StopCriteria, max_model_len: int, index: int = 0
) -> tuple[list[int], FinishReason]:
    """Return the expected output tokens and finish reason of one sample of a prompt."""
    tokens = list(prompt)
    while True:
        tokens.append(token := next_token(tokens, index))
        outputs = tokens[len(prompt) :]
        if token in stop.stop_token_ids and len(outputs) >= stop.min_tokens:
            return outputs, FinishReason.STOP
        if len(outputs) == stop.max_tokens or len(tokens) == max_model_len:
            return outputs, FinishReason.LENGTH


def beam_oracle(prompt: list[int], search: BeamSearch, max_tokens: int) -> list[Hypothesis]:
    """Return the expected answers of a beam search, computed without scheduler and blocks."""
    outputs, scores = [[]], [0.0]
    while outputs:
        found = [candidates_of(prompt + output) for output in outputs]
        going = search.advance(
            outputs,
            scores,
            np.stack([c.token_ids for c in found]),
            np.stack([c.logprobs for c in found]),
            max_tokens=max_tokens,
        )
        outputs = [[*outputs[parent], token] for parent, token, _ in going]
        scores = [score for _, _, score in going]
    return search.hypotheses


def kv_of(origin: str, token_ids: list[int]) -> list[int]:
    """Return one checksum per token of a sequence. The fake device stores the checksum
    instead of the token's KV."""
    start = zlib.crc32(origin.encode())
    return list(accumulate(token_ids, lambda h, t: zlib.crc32(bytes([t]), h), initial=start))[1:]


class FakeDevice:
    """Hold the state of a fake device: slots, block tables and last tokens. `launch` runs a step on
    this state."""

    def __init__(
        self, block_size: int, max_num_seqs: int, shares: bool = False, num_host_blocks: int = 0
    ):
        self.block_size, self.max_num_seqs, self.shares = block_size, max_num_seqs, shares
        self.num_host_blocks = num_host_blocks
        self.swap_entries: dict[int, list[list[int]]] = {}  # copied blocks
        self.slots: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}  # by seq_id
        self.last_tokens: dict[int, int] = {}
        self.history: dict[int, list[int]] = {}  # all tokens of every sequence, by seq_id

    def launch(self, plan: StepPlan) -> tuple[np.ndarray, BeamCandidates | None]:
        """Run a step, and return one token per row. The token is meaningless in rows that do not
        sample."""
        for seq_id in plan.released_seq_ids:
            del self.tables[seq_id]  # A KeyError means that the sequence has no batch row.
            self.last_tokens.pop(seq_id, None)
        for parent, child in plan.row_forks:
            assert child.seq_id not in self.tables, "a child has a row already"
            self.tables[child.seq_id] = list(self.tables[parent.seq_id])
        for swap_entry_id in plan.dropped_swap_entry_ids:
            del self.swap_entries[swap_entry_id]
        for swap_entry_id, block_ids in plan.swap_outs:
            assert swap_entry_id not in self.swap_entries
            assert 0 < len(set(block_ids)) == len(block_ids)
            self.swap_entries[swap_entry_id] = [self._block(block_id) for block_id in block_ids]
        assert sum(map(len, self.swap_entries.values())) <= self.num_host_blocks
        self._copy_blocks(plan.block_copies)
        newcomers = [row for row in plan.scheduled if row.sequence.seq_id not in self.tables]
        assert not (newcomers and plan.is_decode), "a row joins the batch in a decode step"
        for row in plan.scheduled:
            self._join(row)
        assert len(self.tables) <= self.max_num_seqs, "more rows than the device has"
        inputs = [self._inputs(row) for row in plan.scheduled]
        for row in plan.scheduled:
            self._read(row, row.start)  # Check the KV of earlier steps before this step writes KV.
        self._write(plan, inputs)
        for row in plan.scheduled:
            self._read(row, row.start + row.num_scheduled_tokens)
        for swap_entry_id, copies in plan.swap_ins:
            entry = self.swap_entries.pop(swap_entry_id)
            for host_block, block_id in copies:
                self._set_block(block_id, entry[host_block])
        return np.array([self._sample(row) for row in plan.scheduled], np.int32), _offers(plan)

    def unsample(self, sequence: Sequence) -> int:
        """Replace the last sampled token of a sequence by an invalid id, and return this id."""
        self.history[sequence.seq_id].pop()
        self.last_tokens[sequence.seq_id] = 10**6
        return 10**6

    def spoil(self, pool: BlockPool) -> None:
        """Delete the KV in free blocks, which no step may read after a reset of the prefix
        cache."""
        for block_id in pool.free_block_queue:
            for offset in range(self.block_size):
                self.slots.pop(block_id * self.block_size + offset, None)

    def _block(self, block_id: int) -> list[int]:
        slots = range(block_id * self.block_size, (block_id + 1) * self.block_size)
        return [self.slots.get(slot, -1) for slot in slots]

    def _set_block(self, block_id: int, contents: list[int]) -> None:
        for offset, kv in enumerate(contents):
            self.slots[block_id * self.block_size + offset] = kv

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Read all source blocks before writing the target blocks, as the device does."""
        sources, targets = {s for s, _ in copies}, [t for _, t in copies]
        assert len(set(targets)) == len(targets), "a block is the target of two copies"
        assert sources.isdisjoint(targets), "a copy's source is another's target"
        for target, contents in [(target, self._block(source)) for source, target in copies]:
            self._set_block(target, contents)

    def _join(self, row: ScheduledSequence) -> None:
        sequence = row.sequence
        if sequence.seq_id not in self.tables:
            is_alone = len(sequence.request.sequences) == 1
            if is_alone and not self.shares and not self.num_host_blocks:
                assert row.start == 0, "a row must join the batch from its first token"
            assert row.start < len(sequence.token_ids), "nothing is left to compute"
            self.tables[sequence.seq_id] = []
        table = self.tables[sequence.seq_id]
        for index, block_id in row.block_updates:
            table[index : index + 1] = [block_id]
        end = row.start + row.num_scheduled_tokens
        assert table == sequence.block_table, "the device's block table is out of date"
        assert len(table) == -(-end // self.block_size)
        if sequence.request.beam is not None:
            self.history[sequence.seq_id] = list(sequence.token_ids)
        history = self.history.setdefault(sequence.seq_id, list(sequence.token_ids))
        assert history[: len(sequence.token_ids)] == sequence.token_ids
        assert len(history) == sequence.num_tokens - row.is_sampled, "wrong number of samples"

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
        return repr(sequence.cache_salt if self.shares else sequence.request.request_id)

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
        assert found == own, "a step reads missing KV or KV of another sequence"

    def _sample(self, row: ScheduledSequence) -> int:
        seq_id = row.sequence.seq_id
        self.last_tokens.pop(seq_id, None)
        if not row.is_sampled or row.sequence.request.beam is not None:
            return 10**6
        token = next_token(self.history[seq_id], row.sequence.index)
        self.history[seq_id].append(token)
        self.last_tokens[seq_id] = token
        return token


def _offers(plan: StepPlan) -> BeamCandidates | None:
    """Return the candidate tokens of each row if the plan has a beam search."""
    if all(row.sequence.request.beam is None for row in plan.scheduled):
        return None
    rows = [candidates_of(row.sequence.token_ids) for row in plan.scheduled]
    return BeamCandidates(
        np.stack([r.token_ids for r in rows]), np.stack([r.logprobs for r in rows])
    )
