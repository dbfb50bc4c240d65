"""Runs a plan on the device: rows, packing, launching, reading. Features go elsewhere.

The runner launches programs in plan order and never waits; `StepHandle.read` does. It owns the
device's arrays and the host's view of which sequence has which row.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import RuntimeConfig
from jpaged.core.plan import ScheduledSequence, StepPlan
from jpaged.runtime.batch import pack_decode, pack_prefill
from jpaged.runtime.buckets import Buckets, round_up
from jpaged.runtime.programs import (
    BLOCK_COPIES_CHUNK,
    PROMPT_LOGPROBS_CHUNK,
    Programs,
    Shapes,
    SplitModel,
)
from jpaged.runtime.rows import RowTable
from jpaged.runtime.sampler import Sampled, SamplerLevel
from jpaged.runtime.sampling_state import bias_row, ending_row
from jpaged.sampling_params import SamplingParams


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of some tokens of one sequence and of their best alternatives.

    Attributes:
        logprobs: float32 [C], of the tokens themselves.
        ranks: int32 [C], 1 is the most likely.
        top_token_ids: int32 [C, L], the most likely tokens, best first.
        top_logprobs: float32 [C, L].
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True)
class StepResult:
    """What the host reads of a finished step.

    Attributes:
        token_ids: int32 [len(plan.scheduled)], sampled.
        logprobs: One row a scheduled sequence, or None if nobody in the step asked.
        prompt_logprobs: seq_id -> of the prompt tokens this step scored (those after the chunk's
            own positions), for sequences that asked.
    """

    token_ids: np.ndarray
    logprobs: TokenScores | None
    prompt_logprobs: dict[int, TokenScores]


@dataclass(frozen=True)
class StepHandle:
    """A launched step whose results are on their way to the host."""

    plan: StepPlan
    sampled: Sampled
    prompt_logprobs: dict[int, list[tuple[jax.Array, ...]]]

    def read(self) -> StepResult:
        """Wait for the step and give its results."""
        n = len(self.plan.scheduled)
        tokens = np.asarray(self.sampled.token_ids)[:n]
        scores = self.sampled[1:]
        asked = scores[0] is not None
        logprobs = TokenScores(*(np.asarray(a)[:n] for a in scores)) if asked else None
        return StepResult(tokens, logprobs, self._read_prompt_logprobs())

    def _read_prompt_logprobs(self) -> dict[int, TokenScores]:
        wanted = {}
        for seq_id, chunks in self.prompt_logprobs.items():
            count = num_scored_prompt_tokens(self._scheduled(seq_id))
            columns = zip(*chunks, strict=True)
            whole = (np.concatenate([np.asarray(c) for c in col])[:count] for col in columns)
            wanted[seq_id] = TokenScores(*whole)
        return wanted

    def _scheduled(self, seq_id: int) -> ScheduledSequence:
        return next(s for s in self.plan.scheduled if s.sequence.seq_id == seq_id)


def num_scored_prompt_tokens(item: ScheduledSequence) -> int:
    """How many prompt tokens a scheduled chunk predicts: those right after its positions."""
    end = min(item.start + item.num_scheduled_tokens, item.sequence.num_prompt_tokens - 1)
    return max(end - item.start, 0)


class ModelRunner:
    """The device's side of the engine.

    Args:
        split: The model.
        shapes: Shapes of the device's arrays, which are made here.
        config: The runtime's numbers.
        buckets: The steps' shapes.
        programs: Compiled for exactly these.
        eos_token_ids: The model's own end tokens, which `min_tokens` forbids at first.
    """

    def __init__(
        self,
        split: SplitModel,
        shapes: Shapes,
        config: RuntimeConfig,
        buckets: Buckets,
        programs: Programs,
        eos_token_ids: Collection[int] = (),
    ):
        self._leaves = split.leaves
        self._config = config
        self._buckets = buckets
        self._programs = programs
        self._eos_token_ids = eos_token_ids
        self._rows = RowTable(config.num_rows)
        self._kv, self._last_tokens, self._sampling_state = _zeros(
            (shapes.kv, shapes.last_tokens, shapes.sampling)
        )

    def launch(self, plan: StepPlan, sampling: Mapping[int, SamplingParams]) -> StepHandle:
        """Launch a step without waiting for it.

        Args:
            plan: The scheduler's plan; launched in the order they were made.
            sampling: seq_id -> its parameters, with a seed, for every scheduled sequence.
        """
        self._update_rows(plan, sampling)
        self._copy_blocks(plan.block_copies)
        rows = self._rows.rows(plan.scheduled)
        hidden = None
        if plan.is_decode:
            size = round_up(self._buckets.decode_seqs, len(rows))
            logits, inputs = self._run_decode(plan, rows, size)
        else:
            shape = self._buckets.prefill_shape(plan.num_tokens, len(rows))
            logits, hidden, inputs = self._run_prefill(plan, rows, *shape)
        sampled = self._sample(logits, inputs, self._rows.level(rows))
        for array in sampled:
            if array is not None:
                array.copy_to_host_async()
        return StepHandle(plan, sampled, self._score_prompts(plan, sampling, hidden))

    def warm_up(self) -> None:
        """Run every program on padding alone, twice: a GPU records its launches the first time."""
        nobody = StepPlan(step_id=-1, scheduled=())
        none = np.zeros(0, np.int32)
        for _ in range(2):
            for size in self._programs.decode:
                logits, inputs = self._run_decode(nobody, none, size)
                self._sample_all_levels(logits, inputs)
            for shape in self._programs.prefill:
                logits, _, inputs = self._run_prefill(nobody, none, *shape)
                jax.block_until_ready(self._sample(logits, inputs, SamplerLevel.GREEDY))

    def _sample_all_levels(self, logits, inputs) -> None:
        for level in SamplerLevel:
            sampled = self._sample(logits, inputs, level)
            # One at a time: the memory account counts the steps of the loop, not a queue of them.
            jax.block_until_ready(sampled)

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks on the device; the pairs that fill the last chunk are (null, null)."""
        size = BLOCK_COPIES_CHUNK
        for at in range(0, len(copies), size):
            pairs = np.zeros((size, 2), np.int32)
            pairs[: len(copies) - at] = copies[at : at + size]
            source, target = np.ascontiguousarray(pairs.T)
            self._kv = self._programs.copy_blocks(self._kv, source, target)

    def _update_rows(self, plan: StepPlan, sampling: Mapping[int, SamplingParams]) -> None:
        for seq_id in plan.released:
            self._rows.release(seq_id)
        for item in plan.scheduled:
            seq_id = item.sequence.seq_id
            if seq_id not in self._rows:
                row = self._rows.assign(seq_id, sampling[seq_id])
                if sampling[seq_id].adjusts_logits:
                    self._load_row(row, item, sampling[seq_id])

    def _load_row(self, row: int, item: ScheduledSequence, params: SamplingParams) -> None:
        """All its tokens are known: a sequence joins the batch only when none is in flight."""
        sequence, vocab_size = item.sequence, self._config.vocab_size
        tokens = np.zeros(self._config.max_model_len, np.int32)
        tokens[: len(sequence.token_ids)] = sequence.token_ids
        self._sampling_state = self._programs.load_row(
            self._sampling_state,
            np.int32(row),
            tokens,
            np.int32(sequence.num_prompt_tokens),
            np.int32(len(sequence.token_ids)),
            bias_row(params, vocab_size),
            ending_row(params, vocab_size, self._eos_token_ids),
        )

    def _run_decode(self, plan: StepPlan, rows: np.ndarray, size: int):
        packed = pack_decode(
            plan.scheduled,
            rows,
            self._rows.sampling,
            batch_size=size,
            padding_row=self._config.padding_row,
            max_blocks_per_seq=self._config.max_blocks_per_seq,
        )
        logits, inputs, self._kv = self._programs.decode[size](
            self._leaves, state=self._kv, last_tokens=self._last_tokens, packed=packed
        )
        return logits, inputs

    def _run_prefill(self, plan: StepPlan, rows: np.ndarray, tokens: int, size: int):
        packed = pack_prefill(
            plan.scheduled,
            rows,
            self._rows.sampling,
            num_tokens=tokens,
            batch_size=size,
            padding_row=self._config.padding_row,
            max_blocks_per_seq=self._config.max_blocks_per_seq,
        )
        logits, hidden, inputs, self._kv = self._programs.prefill[tokens, size](
            self._leaves, state=self._kv, last_tokens=self._last_tokens, packed=packed
        )
        return logits, hidden, inputs

    def _sample(self, logits, inputs, level: SamplerLevel) -> Sampled:
        adjusted = level >= SamplerLevel.ADJUSTED
        sampled, self._last_tokens, state = self._programs.sample[logits.shape[0], level](
            logits,
            inputs,
            last_tokens=self._last_tokens,
            sampling=self._sampling_state if adjusted else None,
        )
        if adjusted:
            self._sampling_state = state
        return sampled

    def _score_prompts(self, plan: StepPlan, sampling, hidden) -> dict[int, list]:
        if hidden is None:
            return {}
        scored, offset = {}, 0
        for item in plan.scheduled:
            wanted = sampling[item.sequence.seq_id].prompt_logprobs is not None
            count = num_scored_prompt_tokens(item) if wanted else 0
            if count:
                scored[item.sequence.seq_id] = self._score_chunks(item, offset, count, hidden)
            offset += item.num_scheduled_tokens
        return scored

    def _score_chunks(self, item: ScheduledSequence, offset: int, count: int, hidden) -> list:
        program = self._programs.prompt_logprobs[hidden.shape[0]]
        chunks, size = [], PROMPT_LOGPROBS_CHUNK
        for at in range(0, count, size):
            n = min(size, count - at)
            indices, targets = np.zeros(size, np.int32), np.zeros(size, np.int32)
            indices[:n] = np.arange(offset + at, offset + at + n)
            first = item.start + at + 1
            targets[:n] = item.sequence.token_ids[first : first + n]
            chunks.append(program(self._leaves, hidden=hidden, indices=indices, targets=targets))
        return chunks


def _zeros(shapes):
    """Arrays of zeros made on the device, in one program."""
    return jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))()
