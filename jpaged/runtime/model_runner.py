"""Runs a plan on the device: rows, packing, launching, reading. Features go elsewhere.

The runner launches programs in plan order and does not wait (where devices share a model, now and
then: `_launch_small`); `StepHandle.read` does. It owns the device's arrays and the host's view of
which sequence has which row.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.plan import ScheduledSequence, SchedulingGoal, StepPlan
from jpaged.core.request import Request, Sequence
from jpaged.runtime.allocation_guard import reserve_fragments
from jpaged.runtime.batch import RowTable
from jpaged.runtime.buckets import round_up
from jpaged.runtime.peer_memory import PeerMemory, wait_for_devices
from jpaged.runtime.programs import (
    BLOCK_COPIES_CHUNK,
    BURST_LEVELS,
    DeviceShapes,
    Programs,
    SplitModel,
    sampler_levels,
)
from jpaged.runtime.results import (
    MAX_LAUNCHES_AHEAD,
    PromptScores,
    StepHandle,
    score_prompts,
)
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import (
    FULL_LEVEL,
    RowMarks,
    SampledTokens,
    SamplerLevel,
    bias_row,
    pack_marks,
)
from jpaged.runtime.steps import PLAN_PROGRAMS, PROGRAMS
from jpaged.runtime.swap import SwapEntries
from jpaged.sampling_params import SamplingParams
from pallas_kernels import Backend

SamplingLookup = Callable[[Request], SamplingParams]
RequestFault = tuple[Request, Exception]
ScheduledSequences = tuple[ScheduledSequence, ...]

_NO_ROW_INDICES = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
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
    scheduled: ScheduledSequences
    num_rows: int
    row_indices: np.ndarray
    level: SamplerLevel
    logits: Any = None  # jax.Array
    inputs: Any = None
    prompt_scores: PromptScores = field(default_factory=dict)
    incoming_chunks: Any = None


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
        shapes: DeviceShapes,
        config: RuntimeConfig,
        programs: Programs,
        eos_token_ids: Collection[int] = (),
    ):
        self.burst_steps = config.num_scheduler_steps
        self._config, self._buckets = config, config.buckets
        self._levels = sampler_levels(config, is_vocab_sharded=shapes.is_vocab_sharded)
        # For each level that rows may need the compiled one that serves it.
        self._compiled_levels = {
            level: next(own for own in self._levels if own.covers(level))
            for level in map(SamplerLevel, range(FULL_LEVEL + 1))
        }
        self.programs = programs
        self._eos_token_ids = eos_token_ids
        self._rows = RowTable(config.num_rows)
        self._packers = {
            (step.name, key): step.make_packer(config, self._rows.sampling_table, key)
            for step in PLAN_PROGRAMS
            for key in step.keys(config, shapes)
        }
        self._faults: list[RequestFault] = []  # of the plan being launched
        self._num_small_launches = 0  # for the plan being launched
        self._new_marks: dict[int, RowMarks] = {}  # of rows given in the plan being launched
        persistent_arrays = {
            name: shape for name, shape in shapes.persistent_arrays.items() if name != "peer_header"
        }
        zeros = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), persistent_arrays),
            out_shardings=jax.tree.map(lambda s: s.sharding, persistent_arrays),
        )
        self._persistent_arrays: dict[str, Any] = (
            zeros()
        )  # what stays on the device, by steps' names for it
        mesh, has_peers = split.mesh, shapes.peer_header is not None
        self._peer_memory = PeerMemory(mesh) if mesh is not None and has_peers else None
        if self._peer_memory is not None:
            self._persistent_arrays["peer_header"] = self._peer_memory.headers
        # For each program: the model if it takes it, and names of the arrays that stay.
        self._program_arguments = {
            (step.name, key): (
                (split.leaves,) if "model" in step.arguments else (),
                step.persistent_arrays(self._persistent_arrays, step.sizes(config, key)),
            )
            for step in PROGRAMS.values()
            for key in step.keys(config, shapes)
        }
        check_devices = None if self._peer_memory is None else self._peer_memory.check_devices
        self._handle_options = {
            "check_devices": check_devices,
            "is_tensor_parallel": mesh is not None,
        }
        self._wait = jax.block_until_ready if mesh is None else wait_for_devices
        self._swap_entries = SwapEntries(shapes.kv.pool, config.num_host_blocks, self._wait)
        # Behind all that stays, before any step: where its small buffers go. Held, never read.
        devices = [None] if mesh is None else mesh.devices.ravel().tolist()
        self._guards = reserve_fragments(devices) if config.backend is Backend.TRITON else []

    def launch(self, plan: StepPlan, sampling: SamplingLookup) -> StepHandle:
        """Launch a plan's parts in the order that `StepPlan` gives, without waiting for any (but
        see `_launch_small`).

        Args:
            plan: The scheduler's plan; launched in the order they were made.
            sampling: Tells how a request is sampled, but for the seeds, which its sequences have.
        """
        return self.launch_sampling(self.launch_layers(plan, sampling))

    def launch_layers(self, plan: StepPlan, sampling: SamplingLookup) -> UnsampledStep:
        """The first part of `launch`: all up to the logits. `launch_sampling` must follow before
        anything else is launched; until then the tokens of earlier steps may be read."""
        self._num_small_launches = 0
        self._update_rows(plan, sampling)
        for swap_entry_id in plan.dropped_swap_entry_ids:
            self._swap_entries.drop(swap_entry_id)
        for order in plan.swap_outs:
            self._swap_entries.swap_out(self._launch, order)
        if plan.block_copies:
            self._launch_pairs("copy_blocks", plan.block_copies, BLOCK_COPIES_CHUNK, 0)
        # What comes back travels while the step runs.
        incoming_chunks = (
            self._swap_entries.start_swap_ins(plan.swap_ins) if plan.swap_ins else None
        )
        if not plan.scheduled:
            return UnsampledStep(
                plan, (), 0, _NO_ROW_INDICES, SamplerLevel.GREEDY, incoming_chunks=incoming_chunks
            )
        for step in PLAN_PROGRAMS:
            if (key := step.plan_key(self._buckets, plan)) is not None:
                break
        scheduled, row_indices = plan.scheduled, np.arange(len(plan.scheduled))
        if step.row_order is not None:
            row_order = step.row_order(scheduled)
            scheduled, row_indices = (
                tuple([scheduled[i] for i in row_order.tolist()]),
                np.argsort(row_order),
            )
        rows = self._rows.rows(scheduled)
        level, prompt_scores = self._rows.level(rows), {}
        packed = self._packers[step.name, key](scheduled, rows)
        found = self._launch(step.name, key, packed=packed)
        logits, inputs, hidden = found["logits"], found["inputs"], found.get("hidden")
        if hidden is not None:
            score = partial(self._launch, "prompt_logprobs", hidden.shape[0], hidden=hidden)
            wait = self._wait if self._handle_options["is_tensor_parallel"] else None
            prompt_scores = score_prompts(scheduled, sampling, score, wait)
        return UnsampledStep(
            plan,
            scheduled,
            logits.shape[0],
            row_indices,
            level,
            logits,
            inputs,
            prompt_scores,
            incoming_chunks,
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
                masked = self._launch("mask", step.num_rows, logits=logits, allowed=allowed)
                logits = masked["logits"]
            key = step.num_rows, self._compiled_levels[step.level]
            found = self._launch("sample", key, logits=logits, inputs=step.inputs)
            sampled = _start_copy_to_host(found["sampled"], step.level)
        if step.incoming_chunks is not None:
            self._swap_entries.finish_swap_ins(self._launch, step.incoming_chunks)
        faults, self._faults = tuple(self._faults), []
        return StepHandle(
            step.plan,
            sampled,
            step.prompt_scores,
            step.row_indices,
            faults=faults,
            **self._handle_options,
        )

    def fits_burst(self, plan: StepPlan, goal: SchedulingGoal) -> bool:
        """Whether a burst may hold the plan: a decode step of as many sequences as the goal allows,
        with nothing else to do, that a burst's levels serve and no search of beams waits for."""
        if not (plan.scheduled and plan.is_decode) or plan.has_block_moves or plan.row_forks:
            return False
        if not self._buckets.has_burst(len(plan.scheduled), goal):
            return False
        level = self._rows.level(self._rows.rows(plan.scheduled))
        if not any(own.covers(level) for own in BURST_LEVELS):
            return False
        scored = SamplerLevel.LOGPROBS in level
        return not (scored and any(it.sequence.request.beam is not None for it in plan.scheduled))

    def launch_burst(self, plans: list[StepPlan], sampling: SamplingLookup) -> list[StepHandle]:
        """`launch` a burst's plans, all of which fit it, as one program."""
        rows, level = [], SamplerLevel.GREEDY
        size = round_up(self._buckets.burst_batch_sizes, max(len(plan.scheduled) for plan in plans))
        for plan in plans:
            self._update_rows(plan, sampling)
            rows.append(self._rows.rows(plan.scheduled))
            level |= self._rows.level(rows[-1])
        name = "decode_burst", (size, next(own for own in BURST_LEVELS if own.covers(level)))
        packed = self._packers[name]([plan.scheduled for plan in plans], rows)
        sampled = _start_copy_to_host(self._launch(*name, packed=packed)["sampled"], level)
        return [
            StepHandle(plan, sampled, {}, np.arange(len(own)), (i,), **self._handle_options)
            for i, (plan, own) in enumerate(zip(plans, rows, strict=True))
        ]

    def wait(self) -> None:
        """Wait until all that was launched is done, images included."""
        self._swap_entries.wait()
        self._wait((self._persistent_arrays["state"], self._persistent_arrays["last_tokens"]))

    def warm_up(self) -> None:
        """Run every program on padding alone, twice: a GPU records its launches the first time."""
        for _ in range(2):
            sampled: set[int] = set()
            for (kind, key), pack in self._packers.items():
                # One at a time: the memory account counts the steps of the loop, not a queue.
                self._wait(found := self._launch(kind, key, packed=pack((), ())))
                if "logits" not in found or (rows := found["logits"].shape[0]) in sampled:
                    continue
                sampled.add(rows)
                all_allowed = np.full((rows, self._config.mask_width), -1, np.int32)
                masked = self._launch("mask", rows, logits=found["logits"], allowed=all_allowed)
                for level in self._levels:
                    given = {"logits": masked["logits"], "inputs": found["inputs"]}
                    self._wait(self._launch("sample", (rows, level), **given))
        self._swap_entries.warm_up(self._launch)
        if self._peer_memory is not None:
            self._peer_memory.check_devices()

    def _launch(self, kind: str, key: Any = None, **inputs: Any) -> dict[str, Any]:
        """Call a compiled program, with the arrays that stay on the device as its arguments and
        their successors among its results.

        Returns:
            The other results, by their names in `PROGRAMS`.
        """
        persistent_arrays, (model, taken) = (
            self._persistent_arrays,
            self._program_arguments[kind, key],
        )
        for name in taken:
            inputs[name] = persistent_arrays[name]
        results, names = self.programs[kind, key](*model, **inputs), PROGRAMS[kind].results
        found = dict(zip(names, results if len(names) > 1 else (results,), strict=True))
        for name in taken:
            if name in found:
                persistent_arrays[name] = found.pop(name)
        return found

    def _launch_small(self, kind: str, **inputs: Any) -> None:
        """Launch a small program of the plan, and where devices share a model wait now and then for
        what it makes."""
        self._launch(kind, **inputs)
        self._num_small_launches += 1
        if (
            self._handle_options["is_tensor_parallel"]
            and not self._num_small_launches % MAX_LAUNCHES_AHEAD
        ):
            self._wait(self._persistent_arrays[PROGRAMS[kind].results[0]])

    def _launch_pairs(
        self, kind: str, pairs: Collection[tuple[int, int]], size: int, padding: int
    ) -> None:
        """Launch a program over (source, target) pairs, `size` at a time, filled with `padding`."""
        moves = np.array(list(pairs), np.int32).reshape(-1, 2)
        for at in range(0, len(moves), size):
            filled = np.full((2, size), padding, np.int32)
            filled[:, : len(moves) - at] = moves[at : at + size].T
            self._launch_small(kind, **dict(zip(PROGRAMS[kind].inputs, filled, strict=True)))

    def _update_rows(self, plan: StepPlan, sampling: SamplingLookup) -> None:
        for seq_id in plan.released_seq_ids:
            self._rows.release(seq_id)
        if plan.row_forks:
            self._fork_rows(plan, sampling)
        if not plan.is_decode:  # a row that joins the batch is no decode row
            for item in plan.scheduled:
                if item.sequence.seq_id not in self._rows:
                    self._assign_row(item.sequence, sampling)
        if self._new_marks:
            marks, self._new_marks = self._new_marks, {}
            for packed in pack_marks(marks, self._config.padding_row, self._config.vocab_size):
                self._launch_small("load_rows", marks=packed)

    def _fork_rows(self, plan: StepPlan, sampling: SamplingLookup) -> None:
        sources: dict[int, int] = {}  # of rows forked in this plan: all are read before any write
        for parent, child in plan.row_forks:
            source = self._rows.row(parent.seq_id)
            sources[self._assign_row(child, sampling)] = sources.get(source, source)
        pairs = [(source, row) for row, source in sources.items()]
        self._launch_pairs("fork_rows", pairs, self._config.num_rows, self._config.padding_row)

    def _assign_row(self, sequence: Sequence, sampling: SamplingLookup) -> int:
        """Give a row to a sequence that joins the batch. What is made of its request's parameters
        comes before anything is launched: what fails there is the request's own."""
        params, row = sampling(sequence.request), self._rows.assign(sequence.seq_id)
        marks = bias = None
        try:
            if params.adjusts_logits:  # all its tokens are known: none is in flight when it joins
                ending_ids = params.first_forbidden_ids(self._eos_token_ids)
                marks = RowMarks.of(sequence.token_ids, sequence.num_prompt_tokens, ending_ids)
            if params.biases_logits:
                bias = bias_row(params, self._config.vocab_size)
            self._rows.set_sampling(row, params, sequence.seed)
        except Exception as error:
            self._faults.append((sequence.request, error))
            return row
        if marks is not None:
            self._new_marks[row] = marks
        if bias is not None:
            self._launch_small("load_bias", row=np.int32(row), bias=bias)
        return row


def _start_copy_to_host(sampled: SampledTokens, level: SamplerLevel) -> Any:
    """What the host reads of a step or a burst, being copied there: one array, the scores if the
    level asks for them."""
    wanted = sampled.token_ids
    if SamplerLevel.LOGPROBS in level and sampled.scores is not None:
        wanted = sampled.scores
    wanted.copy_to_host_async()
    return wanted
