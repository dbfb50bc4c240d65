"""A fake device and a driver for speculative decoding. Each draft token is right with a random
chance."""

import random
import zlib

import numpy as np
from core_driver import Driver, _stream_name
from core_fake_device import FakeDevice, kv_of, next_token

from jpaged.core.plan import (
    NO_DRAFT,
    REJECTED,
    EmittedToken,
    ScheduledSequence,
    SchedulingGoal,
    StepPlan,
)
from jpaged.core.request import BeamCandidates, Sequence
from jpaged.core.scheduler import Scheduler
from jpaged.core.speculation import Speculation

GARBAGE = 10**6


class RandomSpeculation(Speculation):
    """Choose at random for each step whether it verifies drafts."""

    def __init__(self, num_drafts: int, seed: int = 0, rate: float = 0.8):
        super().__init__(num_drafts, [(10**6, 1.0)])
        self._rate, self._random = rate, random.Random(seed)

    def choose_num_drafts(self, num_rows: int) -> int:
        return self.num_drafts if self._random.random() < self._rate else 0


class SpeculativeDevice(FakeDevice):
    """A fake device that proposes, verifies and accepts drafts.

    For each row, the device writes tokens only to slots that the plan has reserved.

    Attributes:
        acceptance: Probability that a draft is the token that the model samples.
    """

    def __init__(self, *args, acceptance: float = 0.6, **options):
        super().__init__(*args, **options)
        self.acceptance = acceptance
        self.num_accepted = self.num_rejected = self.num_cut = self.num_stopped_rows = 0

    def launch(self, plan: StepPlan) -> tuple[np.ndarray, BeamCandidates | None]:
        assert len(plan.limits) == len(plan.scheduled)
        assert not plan.num_drafts or plan.num_tokens == len(plan.scheduled)
        self.limits = {
            row.sequence.seq_id: limit
            for row, limit in zip(plan.scheduled, plan.limits, strict=True)
        }
        self.drafts = {
            row.sequence.seq_id: self._propose(row.sequence, plan.num_drafts)
            for row in plan.scheduled
            if plan.num_drafts
        }
        self.stopped: set[int] = set()
        tokens, candidates = super().launch(plan)
        if not plan.num_drafts:
            return tokens, candidates
        return np.array([self._accept(row, plan.num_drafts) for row in plan.scheduled]), None

    def _propose(self, sequence: Sequence, num_drafts: int) -> list[int]:
        """Return at most `num_drafts` drafts, and only as many as the row has free slots for. Some
        drafts are wrong."""
        seq_id = sequence.seq_id
        tokens, drafts = list(self.history.get(seq_id, sequence.token_ids)), []
        noise = random.Random(zlib.crc32(repr((seq_id, len(tokens))).encode()))
        for _ in range(num_drafts):
            if noise.random() < 0.1:
                break
            if len(tokens) >= self.limits[seq_id]:
                self.num_cut += 1
                break
            token = next_token(tokens, sequence.index)
            if noise.random() >= self.acceptance:
                token = (token + noise.randint(1, 10)) % 11
            drafts.append(token)
            tokens.append(token)
        return drafts

    def _is_stopped(self, row: ScheduledSequence) -> bool:
        seq_id = row.sequence.seq_id
        return self._start(row) >= self.limits[seq_id]

    def _start(self, row: ScheduledSequence) -> int:
        """Return the position of the first token that the row computes.

        Only the device knows the number of accepted drafts until the host has read the results of
        all earlier steps.
        """
        if row.start < len(row.sequence.token_ids):
            return row.start
        return len(self.history[row.sequence.seq_id]) - 1

    def _join(self, row: ScheduledSequence) -> None:
        sequence = row.sequence
        if sequence.seq_id not in self.tables:
            assert row.start < len(sequence.token_ids), "the row has no known token to compute"
            self.tables[sequence.seq_id] = []
        table = self.tables[sequence.seq_id]
        for index, block_id in row.block_updates:
            assert index <= len(table)
            table[index : index + 1] = [block_id]
        held = sequence.block_table
        assert table[: len(held)] == held, "the device's block table is out of date"
        del table[len(held) :]  # the scheduler has freed the last blocks of the table
        assert len(table) >= -(-(row.start + row.num_scheduled_tokens) // self.block_size)
        assert self.limits[sequence.seq_id] <= len(table) * self.block_size
        if sequence.request.beam is not None or row.start < len(sequence.token_ids):
            self.history[sequence.seq_id] = list(sequence.token_ids)
        history = self.history[sequence.seq_id]
        assert history[: len(sequence.token_ids)] == sequence.token_ids

    def _inputs(self, row: ScheduledSequence) -> list[int]:
        seq_id, start = row.sequence.seq_id, self._start(row)
        if self._is_stopped(row):
            return []
        end = start + row.num_scheduled_tokens
        return self.history[seq_id][start:end] + self.drafts.get(seq_id, [])

    def _write(self, plan: StepPlan, inputs: list[list[int]]) -> None:
        written: set[int] = set()
        for row, tokens in zip(plan.scheduled, inputs, strict=True):
            seq_id, start = row.sequence.seq_id, self._start(row)
            kv = kv_of(self._origin(row.sequence), self.history[seq_id][:start] + tokens)
            for position in range(start, len(kv)):
                slot = self._slot(seq_id, position)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.slots[slot] = kv[position]

    def _read(self, row: ScheduledSequence, end: int) -> None:
        """Check the KV that the row reads, including tokens that the host has not read yet."""
        num_more = self._start(row) - row.start
        if not self._is_stopped(row):
            super()._read(row, end + num_more)

    def _sample(self, row: ScheduledSequence) -> int:
        if not self._is_stopped(row):
            return super()._sample(row)
        self.num_stopped_rows += 1
        self.stopped.add(row.sequence.seq_id)
        return NO_DRAFT

    def _accept(self, row: ScheduledSequence, num_drafts: int) -> list[int]:
        """Return all tokens that a row of a verify step emits. `_sample` has sampled the first of
        these tokens."""
        seq_id = row.sequence.seq_id
        drafts, history = self.drafts[seq_id], self.history[seq_id]
        if seq_id in self.stopped:
            return [NO_DRAFT] * (1 + num_drafts)
        tokens = [history[-1]]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            history.append(next_token(history, row.sequence.index))
            tokens.append(history[-1])
        self.last_tokens[seq_id] = history[-1]
        self.num_accepted += len(tokens) - 1
        self.num_rejected += len(drafts) - len(tokens) + 1
        tokens += [REJECTED] * (1 + len(drafts) - len(tokens))
        return tokens + [NO_DRAFT] * (1 + num_drafts - len(tokens))


class SpeculativeDriver(Driver):
    """A driver that runs a scheduler with speculative decoding on the fake device."""

    def __init__(
        self,
        scheduler: Scheduler,
        lag: int = 0,
        burst: int = 1,
        goal: SchedulingGoal = SchedulingGoal.LATENCY,
        acceptance: float = 0.6,
    ):
        super().__init__(scheduler, lag, burst, goal)
        manager = scheduler.block_manager
        self.device: SpeculativeDevice = SpeculativeDevice(
            manager.block_size,
            scheduler.config.max_num_seqs,
            shares=manager.prefix_cache is not None,
            num_host_blocks=scheduler.swap_space.policy.num_host_blocks,
            acceptance=acceptance,
        )

    def read(self) -> list[EmittedToken]:
        plan, sampled, candidates = self.in_flight.popleft()
        updates = [self.scheduler.update(plan, sampled, candidates)]
        if plan.num_drafts:
            for column in sampled.T[1:]:
                self.scheduler.check_integrity()
                updates.append(self.scheduler.append_accepted(plan, column))
        emitted = [token for update in updates for token in update.emitted_tokens]
        self.failed += [fault for update in updates for fault in update.failed]
        for sequence, _, token_id, _ in emitted:
            self.streams[_stream_name(sequence)].append(token_id)
        self.scheduler.check_integrity()
        return emitted
