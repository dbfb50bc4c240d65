"""Runs a plan on the device: rows, packing, launching, reading. Features go elsewhere.

The runner launches programs in plan order and does not wait (where devices share a model, now and
then: `_pace`); `StepHandle.read` does. It owns the device's arrays and the host's view of which
sequence has which row.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.plan import Goal, ScheduledSequence, StepPlan
from jpaged.core.request import Request, Sequence
from jpaged.runtime.allocation_guard import make_places
from jpaged.runtime.batch import RowTable, device_order, pack_decode, pack_prefill
from jpaged.runtime.buckets import round_up
from jpaged.runtime.peer_memory import PeerMemory, await_devices
from jpaged.runtime.programs import (
    BLOCK_COPIES_CHUNK,
    BURST_LEVELS,
    Programs,
    Shapes,
    SplitModel,
    of_kind,
    sampler_levels,
)
from jpaged.runtime.results import (
    LAUNCHES_AHEAD,
    PromptScores,
    StepHandle,
    score_prompts,
)
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import EVERYTHING, RowMarks, Sampled, SamplerLevel, bias_row, pack_marks
from jpaged.runtime.swap import BlockImages
from jpaged.sampling_params import SamplingParams
from pallas_kernels import Backend

SamplingOf = Callable[[Request], SamplingParams]
Fault = tuple[Request, Exception]
Scheduled = tuple[ScheduledSequence, ...]

_NO_PLACES = np.zeros(0, np.int64)


@dataclass(frozen=True)
class UnsampledStep:
    """A step whose layers are launched and whose tokens are not chosen yet.

    Attributes:
        plan: What it computes.
        scheduled: The plan's sequences, in the order in which the step has them.
        num_rows: Rows of its logits; those after `scheduled` are padding.
        places: Where the step has each of the plan's sequences.
        level: What its sampling must do.
        logits, inputs: For the sampling; None where nothing is scheduled.
        scores: Of prompt tokens.
        arrivals: What comes back from host memory behind the step.
    """

    plan: StepPlan
    scheduled: Scheduled
    num_rows: int
    places: np.ndarray
    level: SamplerLevel
    logits: Any = None  # jax.Array
    inputs: Any = None
    scores: PromptScores = field(default_factory=dict)
    arrivals: Any = None


class ModelRunner:
    """The device's side of the engine.

    Attributes:
        burst_steps: Steps of a burst; 1 for none.
        programs: What it calls.

    Args:
        split: The model.
        shapes: Shapes of the device's arrays, which are made here.
        config: The runtime's numbers.
        programs: Compiled for exactly these.
        eos_token_ids: The model's own end tokens, which `min_tokens` forbids at first.
    """

    def __init__(
        self,
        split: SplitModel,
        shapes: Shapes,
        config: RuntimeConfig,
        programs: Programs,
        eos_token_ids: Collection[int] = (),
    ):
        self._leaves = split.leaves
        self.burst_steps = config.num_scheduler_steps
        self._config, self._buckets = config, config.buckets
        # For each number of sequences the bucket of their decode step, and the rows of its logits.
        seqs = self._buckets.decode_seqs
        sizes = [round_up(seqs, n) for n in range(seqs[-1] + 1)]
        self._decode_sizes = [(size, self._buckets.logits_rows(size)) for size in sizes]
        self._levels = sampler_levels(config, splits_vocabulary=shapes.splits_vocabulary)
        # For each level that rows may need the compiled one that serves it.
        self._served_by = {
            level: next(own for own in self._levels if own.covers(level))
            for level in map(SamplerLevel, range(EVERYTHING + 1))
        }
        self.programs = programs
        self._eos_token_ids = eos_token_ids
        self._rows = RowTable(config.num_rows)
        padding = {"sampling_table": self._rows.sampling, "max_blocks": config.max_blocks_per_seq}
        self._pack_decode = partial(pack_decode, **padding)
        self._pack_prefill = partial(pack_prefill, **padding)
        self._faults: list[Fault] = []  # of the plan being launched
        self._num_small_launches = 0  # for the plan being launched
        self._new_marks: dict[int, RowMarks] = {}  # of rows given in the plan being launched
        state = shapes.kv, shapes.last_tokens, shapes.sampling
        zeros = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state),
            out_shardings=jax.tree.map(lambda s: s.sharding, state),
        )
        self._kv, self._last_tokens, self._sampling_state = zeros()
        mesh, has_peers = split.mesh, shapes.peers is not None
        self._peers = PeerMemory(mesh) if mesh is not None and has_peers else None
        # What forward programs have beyond what they have on a single device.
        self._more = {} if self._peers is None else {"peers": self._peers.headers}
        check = None if self._peers is None else self._peers.check
        self._of_devices = {"check": check, "is_shared": mesh is not None}
        self._wait = jax.block_until_ready if mesh is None else await_devices
        gather, scatter = (of_kind(programs, f"{kind}_blocks") for kind in ("gather", "scatter"))
        self._images = BlockImages(gather, scatter, self._wait)
        # Behind all that stays, before any step: where its small buffers go. Held, never read.
        devices = [None] if mesh is None else mesh.devices.ravel().tolist()
        self._guards = make_places(devices) if config.backend is Backend.TRITON else []

    def launch(self, plan: StepPlan, sampling: SamplingOf) -> StepHandle:
        """Launch a plan's parts in the order that `StepPlan` gives, without waiting for any (but
        see `_pace`).

        Args:
            plan: The scheduler's plan; launched in the order they were made.
            sampling: Tells how a request is sampled, but for the seeds, which its sequences have.
        """
        return self.launch_sampling(self.launch_layers(plan, sampling))

    def launch_layers(self, plan: StepPlan, sampling: SamplingOf) -> UnsampledStep:
        """The first part of `launch`: all up to the logits. `launch_sampling` must follow before
        anything else is launched; until then the tokens of earlier steps may be read."""
        self._num_small_launches = 0
        self._update_rows(plan, sampling)
        for image_id in plan.dropped:
            self._images.drop(image_id)
        for order in plan.swap_outs:
            self._images.swap_out(self._kv.pool, order)
        if plan.block_copies:
            self._move("copy_blocks", plan.block_copies, BLOCK_COPIES_CHUNK, 0)
        # What comes back travels while the step runs.
        arrivals = self._images.fetch(plan.swap_ins) if plan.swap_ins else None
        if not plan.scheduled:
            return UnsampledStep(plan, (), 0, _NO_PLACES, SamplerLevel.GREEDY, arrivals=arrivals)
        places, scheduled, rows = self._in_order(plan)
        level, hidden, scores = self._rows.level(rows), None, {}
        if plan.is_decode:
            logits, inputs = self._run_decode(scheduled, rows, *self._decode_sizes[len(rows)])
        else:
            shape = self._buckets.prefill_shape(plan.num_tokens, len(rows))
            logits, hidden, inputs = self._run_prefill(scheduled, rows, *shape)
        if hidden is not None:
            score = partial(
                self.programs["prompt_logprobs", hidden.shape[0]], self._leaves, hidden=hidden
            )
            wait = self._wait if self._of_devices["is_shared"] else None
            scores = score_prompts(scheduled, sampling, score, wait)
        return UnsampledStep(
            plan, scheduled, logits.shape[0], places, level, logits, inputs, scores, arrivals
        )

    def launch_sampling(self, step: UnsampledStep, allowed: np.ndarray | None = None) -> StepHandle:
        """The rest of `launch`.

        Args:
            step: What was launched last.
            allowed: int32 [step.num_rows, M], what each row may sample, as `mask_step` takes it;
                None for all.
        """
        sampled = None
        if step.logits is not None:
            logits = step.logits
            if allowed is not None:
                logits = self.programs["mask", step.num_rows](logits, allowed)
            sampled = _on_its_way(self._sample(logits, step.inputs, step.level), step.level)
        if step.arrivals is not None:
            self._kv = self._images.place(self._kv, step.arrivals)
        faults, self._faults = tuple(self._faults), []
        return StepHandle(
            step.plan, sampled, step.scores, step.places, faults=faults, **self._of_devices
        )

    def fits_burst(self, plan: StepPlan, goal: Goal) -> bool:
        """Whether a burst may hold the plan: a decode step of as many sequences as the goal allows,
        with nothing else to do, that a burst's levels serve and no search of beams waits for."""
        if not (plan.scheduled and plan.is_decode) or plan.moves_blocks or plan.row_forks:
            return False
        if not self._buckets.has_burst(len(plan.scheduled), goal):
            return False
        level = self._rows.level(self._rows.rows(plan.scheduled))
        if not any(own.covers(level) for own in BURST_LEVELS):
            return False
        scored = SamplerLevel.LOGPROBS in level
        return not (scored and any(it.sequence.request.beam is not None for it in plan.scheduled))

    def launch_burst(self, plans: list[StepPlan], sampling: SamplingOf) -> list[StepHandle]:
        """`launch` a burst's plans, all of which fit it, as one program."""
        packed, places, level = [], [], SamplerLevel.GREEDY
        size = round_up(self._buckets.burst_seqs, max(len(plan.scheduled) for plan in plans))
        for plan in plans:
            self._update_rows(plan, sampling)
            place, scheduled, rows = self._in_order(plan)
            level |= self._rows.level(rows)
            packed.append(self._pack_decode(scheduled, rows, num_rows=size))
            places.append(place)
        sampled = _on_its_way(self._run_burst(np.stack(packed), level), level)
        steps = enumerate(zip(plans, places, strict=True))
        return [
            StepHandle(plan, sampled, {}, place, (i,), **self._of_devices)
            for i, (plan, place) in steps
        ]

    def _in_order(self, plan: StepPlan) -> tuple[np.ndarray, Scheduled, np.ndarray]:
        """Where the device has each of the plan's sequences; they as it has them; their rows."""
        scheduled, places = plan.scheduled, np.arange(len(plan.scheduled))
        if not plan.is_decode:
            order = device_order(scheduled)
            scheduled, places = tuple([scheduled[i] for i in order.tolist()]), np.argsort(order)
        return places, scheduled, self._rows.rows(scheduled)

    def wait(self) -> None:
        """Wait until all that was launched is done, images included."""
        self._images.wait()
        self._wait((self._kv, self._last_tokens))

    def warm_up(self) -> None:
        """Run every program on padding alone, twice: a GPU records its launches the first time."""
        none = (), np.zeros(0, np.int32)
        for _ in range(2):
            for size in of_kind(self.programs, "decode"):
                num_rows = self._buckets.logits_rows(size)
                logits, inputs = self._run_decode(*none, size, num_rows)
                everything = np.full((num_rows, self._config.mask_width), -1, np.int32)
                logits = self.programs["mask", num_rows](logits, everything)
                for level in self._levels:
                    # One at a time: the memory account counts the steps of the loop, not a queue.
                    self._wait(self._sample(logits, inputs, level))
            for size, level in of_kind(self.programs, "decode_burst"):
                padding = self._pack_decode(*none, num_rows=size)
                self._wait(self._run_burst(np.stack([padding] * self.burst_steps), level))
            for shape in of_kind(self.programs, "prefill"):
                logits, _, inputs = self._run_prefill(*none, *shape)
                self._wait(self._sample(logits, inputs, SamplerLevel.GREEDY))
        self._kv = self._images.warm_up(self._kv, self._config.num_host_blocks)
        if self._peers is not None:
            self._peers.check()

    def _move(self, kind: str, pairs: Collection[tuple[int, int]], size: int, null: int) -> None:
        """Launch a program over (source, target) pairs, `size` at a time, filled with `null`."""
        moves = np.array(list(pairs), np.int32).reshape(-1, 2)
        for at in range(0, len(moves), size):
            filled = np.full((2, size), null, np.int32)
            filled[:, : len(moves) - at] = moves[at : at + size].T
            self._kv = self.programs[kind, None](self._kv, *filled)
            self._pace(self._kv)

    def _update_rows(self, plan: StepPlan, sampling: SamplingOf) -> None:
        for seq_id in plan.released:
            self._rows.release(seq_id)
        if plan.row_forks:
            self._fork_rows(plan, sampling)
        if not plan.is_decode:  # a row that joins the batch is no decode row
            for item in plan.scheduled:
                if item.sequence.seq_id not in self._rows:
                    self._give_row(item.sequence, sampling)
        if self._new_marks:
            marks, self._new_marks = self._new_marks, {}
            load_rows = self.programs["load_rows", None]
            chunks = pack_marks(marks, self._config.padding_row, self._config.vocab_size)
            for packed in chunks:
                self._sampling_state = load_rows(self._sampling_state, packed)
                self._pace(self._sampling_state)

    def _pace(self, state: Any) -> None:
        """Count a small program of the plan, and where devices share a model wait now and then for
        what it makes."""
        self._num_small_launches += 1
        if self._of_devices["is_shared"] and not self._num_small_launches % LAUNCHES_AHEAD:
            self._wait(state)

    def _fork_rows(self, plan: StepPlan, sampling: SamplingOf) -> None:
        sources: dict[int, int] = {}  # of rows forked in this plan: all are read before any write
        for parent, child in plan.row_forks:
            source = self._rows.row(parent.seq_id)
            sources[self._give_row(child, sampling)] = sources.get(source, source)
        pairs = [(source, row) for row, source in sources.items()]
        self._move("fork_rows", pairs, self._config.num_rows, self._config.padding_row)

    def _give_row(self, sequence: Sequence, sampling: SamplingOf) -> int:
        """Give a row to a sequence that joins the batch. What is made of its request's parameters
        comes before anything is launched: what fails there is the request's own."""
        params, row = sampling(sequence.request), self._rows.assign(sequence.seq_id)
        marks = bias = None
        try:
            if params.adjusts_logits:  # all its tokens are known: none is in flight when it joins
                ending = params.first_forbidden_ids(self._eos_token_ids)
                marks = RowMarks.of(sequence.token_ids, sequence.num_prompt_tokens, ending)
            if params.biases_logits:
                bias = bias_row(params, self._config.vocab_size)
            self._rows.sample(row, params, sequence.seed)
        except Exception as error:
            self._faults.append((sequence.request, error))
            return row
        if marks is not None:
            self._new_marks[row] = marks
        if bias is not None:
            load_bias = self.programs["load_bias", None]
            self._sampling_state = load_bias(self._sampling_state, np.int32(row), bias)
            self._pace(self._sampling_state)
        return row

    def _run_burst(self, packed: np.ndarray, level: SamplerLevel) -> Sampled:
        level = next(own for own in BURST_LEVELS if own.covers(level))
        adjusted = SamplerLevel.ADJUSTED in level
        program = self.programs["decode_burst", (packed.shape[1], level)]
        sampled, self._last_tokens, state, self._kv = program(
            self._leaves,
            state=self._kv,
            last_tokens=self._last_tokens,
            sampling=self._sampling_state if adjusted else None,
            packed=packed,
            **self._more,
        )
        if adjusted:
            self._sampling_state = state
        return sampled

    def _run_decode(self, scheduled: Scheduled, rows: np.ndarray, size: int, num_rows: int):
        packed = self._pack_decode(scheduled, rows, num_rows=num_rows)
        logits, inputs, self._kv = self.programs["decode", size](
            self._leaves, state=self._kv, last_tokens=self._last_tokens, packed=packed, **self._more
        )
        return logits, inputs

    def _run_prefill(self, scheduled: Scheduled, rows: np.ndarray, tokens: int, size: int):
        packed = self._pack_prefill(scheduled, rows, num_tokens=tokens, batch_size=size)
        logits, hidden, inputs, self._kv = self.programs["prefill", (tokens, size)](
            self._leaves, state=self._kv, last_tokens=self._last_tokens, packed=packed, **self._more
        )
        return logits, hidden, inputs

    def _sample(self, logits, inputs, level: SamplerLevel) -> Sampled:
        level = self._served_by[level]
        adjusted = SamplerLevel.ADJUSTED in level
        program = self.programs["sample", (logits.shape[0], level)]
        sampled, self._last_tokens, state = program(
            logits,
            inputs,
            last_tokens=self._last_tokens,
            sampling=self._sampling_state if adjusted else None,
        )
        if adjusted:
            self._sampling_state = state
        return sampled


def _on_its_way(sampled: Sampled, level: SamplerLevel) -> Any:
    """What the host reads of a step or a burst, being copied there: one array, the scores if the
    level asks for them."""
    wanted = sampled.token_ids
    if SamplerLevel.LOGPROBS in level and sampled.scores is not None:
        wanted = sampled.scores
    wanted.copy_to_host_async()
    return wanted
