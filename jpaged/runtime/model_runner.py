"""Launch step plans on the device.

`ModelRunner` owns the arrays that stay on the device. The runner assigns each running sequence a
row of these arrays (a device row), packs plans, and launches compiled programs in plan order.
Swapping, scoring and drafting are in separate modules, which the runner calls.

A launch does not wait for the device: `StepHandle.read` waits. The only exception is
`_launch_small`, which waits after every `MAX_LAUNCHES_AHEAD` small launches on tensor-parallel
devices.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.plan import ScheduledSequence, SchedulingGoal, StepPlan
from jpaged.core.request import Request, Sequence
from jpaged.models.sharding import without_mesh
from jpaged.runtime.allocation_guard import reserve_fragments
from jpaged.runtime.batch import RowTable
from jpaged.runtime.buckets import SMALL_BATCH_SEQS, round_up
from jpaged.runtime.drafting import make_drafter, pack_tokens
from jpaged.runtime.peer_memory import PeerMemory, wait_for_devices
from jpaged.runtime.programs import (
    BLOCK_COPIES_CHUNK,
    BURST_LEVELS,
    DeviceShapes,
    Programs,
    SplitModel,
    num_scored_rows,
    sampler_levels,
    verify_levels,
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
from jpaged.runtime.step_programs import PLAN_PROGRAMS, PROGRAMS
from jpaged.runtime.swap import SwapEntries
from jpaged.sampling_params import SamplingParams
from pallas_kernels import Backend

SamplingLookup = Callable[[Request], SamplingParams]
RequestFault = tuple[Request, Exception]
ScheduledSequences = tuple[ScheduledSequence, ...]

_NO_ROW_INDICES = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class UnsampledStep:
    """A step whose layers are launched and whose tokens are not sampled yet.

    Attributes:
        plan: The plan that the step computes.
        scheduled: The plan's sequences, in the order of the step's rows. The plan may have another
            order.
        num_rows: Number of rows of the logits; rows after `scheduled` are padding.
        row_indices: For each sequence, in the plan's order, the index of the step's row that
            computes it.
        level: Sampling features that at least one row needs, such as random sampling.
        logits: Logits on the device; None if the plan schedules no sequence.
        inputs: `SampleInputs` on the device; None if the plan schedules no sequence.
        prompt_scores: Scores of prompt tokens.
        incoming_chunks: Swapped-out blocks to write to the pool after the step; None if the plan
            has no swap-ins.
    """

    plan: StepPlan
    scheduled: ScheduledSequences
    num_rows: int
    row_indices: np.ndarray
    level: SamplerLevel
    logits: Any = None  # jax.Array
    inputs: Any = None
    prompt_scores: tuple[PromptScores, ...] = ()
    incoming_chunks: Any = None


class ModelRunner:
    """Runs step plans on the device.

    Attributes:
        burst_steps: Number of decode steps in one launch (a burst); 1 for no bursts.
        programs: Compiled programs that the runner launches.

    Args:
        split: The model, split into its definition and its parameters.
        shapes: Shapes of the persistent arrays, which the runner allocates.
        config: Sizes and limits of the runtime.
        programs: Programs compiled for this model, these shapes and this configuration.
        eos_token_ids: End tokens of the model. A request may not sample these tokens before it has
            `min_tokens` output tokens.
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
        # Maps each set of sampling features to the first compiled set that contains them.
        self._compiled_levels = {
            level: next(it for it in self._levels if it.covers(level))
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
        # Requests that failed while the current plan was launched.
        self._faults: list[RequestFault] = []
        self._num_small_launches = 0
        # `RowMarks` of sequences that join the batch, by the sequence's row on the device.
        self._new_marks: dict[int, RowMarks] = {}
        self._drafter = None if config.speculation is None else make_drafter(config.speculation)
        # Tokens of sequences that join the batch, by the sequence's row on the device.
        self._new_tokens: dict[int, list[int]] = {}
        persistent_arrays = {
            name: shape for name, shape in shapes.persistent_arrays.items() if name != "peer_header"
        }
        self._pool_shapes = shapes.kv.pool
        # Maps the names of step arguments to the arrays that stay on the device.
        self._persistent_arrays: dict[str, Any] = _make_zeros(persistent_arrays)
        mesh, has_peers = split.mesh, shapes.peer_header is not None
        self._peer_memory = PeerMemory(mesh) if mesh is not None and has_peers else None
        if self._peer_memory is not None:
            self._persistent_arrays["peer_header"] = self._peer_memory.headers
        self._parameters: tuple[Any, ...] = split.leaves
        # For each program: whether it takes the model's parameters, and the names of the persistent
        # arrays that the runner passes to it.
        self._program_arguments = {
            (step.name, key): (
                "model" in step.arguments,
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
        # Before any step runs, leave small free gaps in device memory. Later small buffers fill
        # these gaps, so that large buffers keep their addresses. A gap lasts as long as the arrays
        # around the gap are allocated, so `_guards` holds these arrays. No code reads `_guards`.
        devices = [None] if mesh is None else mesh.devices.ravel().tolist()
        self._guards = reserve_fragments(devices) if config.backend is Backend.TRITON else []

    def update_parameters(
        self, write: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
    ) -> None:
        """Replace the model's parameters for all later steps, and wait until they are written.

        Args:
            write: Function that takes the old parameters and returns new ones with the same shapes,
                dtypes and devices. The function may donate the old arrays.
        """
        self._parameters = write(self._parameters)
        self._wait(self._parameters)

    def release_parameters(
        self, release: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
    ) -> None:
        """Release the parameters. No step may be launched until `update_parameters`.

        Args:
            release: Function that frees the parameters, and returns what `update_parameters` needs.
        """
        self._parameters = release(self._parameters)

    def free_pool(self) -> None:
        """Free the memory of the pool. No step may be launched until `restore_pool`."""
        self.wait()
        for array in jax.tree.leaves(self._persistent_arrays["state"].pool):
            array.delete()

    def restore_pool(self) -> None:
        """Allocate the pool again, with zeros."""
        pool = _make_zeros(self._pool_shapes)
        self._wait(jax.tree.leaves(pool))
        self._persistent_arrays["state"] = self._persistent_arrays["state"]._replace(pool=pool)

    def find_deleted_parameter(self) -> int | None:
        """Return the index of a parameter that was deleted or donated; None if all exist."""
        return next((i for i, it in enumerate(self._parameters) if it.is_deleted()), None)

    def launch(self, plan: StepPlan, sampling: SamplingLookup) -> StepHandle:
        """Launch every part of a plan, in the order that `StepPlan` documents.

        The method does not wait for the device, except as described at `_launch_small`.

        Args:
            plan: Plan from the scheduler. Plans must be launched in the order in which they were
                made.
            sampling: Function that returns the sampling parameters of a request. The seeds are in
                the request's sequences.
        """
        if plan.num_drafts:
            incoming_chunks = self._launch_before_step(plan, sampling)
            [handle] = self._launch_verification([plan], [self._rows.rows(plan.scheduled)])
            if incoming_chunks is not None:
                self._swap_entries.finish_swap_ins(self._launch, incoming_chunks)
            return handle
        return self.launch_sampling(self.launch_layers(plan, sampling))

    def launch_layers(self, plan: StepPlan, sampling: SamplingLookup) -> UnsampledStep:
        """Do the first part of the work of `launch`: everything up to the logits.

        Call `launch_sampling` before any other launch. Between the two calls, the tokens of earlier
        steps may be read.
        """
        incoming_chunks = self._launch_before_step(plan, sampling)
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
        level, prompt_scores = self._rows.level(rows), ()
        limits = plan.limits
        if limits and step.row_order is not None:
            limits = [limits[i] for i in row_order.tolist()]
        packed = self._packers[step.name, key](scheduled, rows, limits)
        found = self._launch(step.name, key, packed=packed)
        logits, inputs, hidden = found["logits"], found["inputs"], found.get("hidden")
        if hidden is not None:
            num_rows = num_scored_rows(self._config, hidden.shape[0])
            wait = self._wait if self._handle_options["is_tensor_parallel"] else None
            prompt_scores = score_prompts(
                scheduled, sampling, partial(self._launch_scoring, hidden), num_rows, wait
            )
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

    def _launch_scoring(
        self, hidden: jax.Array, program: str, indices: np.ndarray, targets: np.ndarray
    ) -> jax.Array:
        """Launch the step `program`, which scores the prompt tokens `targets` from the hidden
        states at `indices`."""
        found = self._launch("gather_hidden", hidden.shape[0], hidden=hidden, indices=indices)
        return self._launch(program, len(targets), **found, targets=targets)["scores"]

    def _launch_before_step(self, plan: StepPlan, sampling: SamplingLookup) -> Any:
        """Launch the updates, copies and swap-outs of a plan, which come before its step.

        Returns:
            The chunks that the plan swaps in, whose transfers run while the step runs. None if the
            plan has no swap-ins.
        """
        self._num_small_launches = 0
        self._update_rows(plan, sampling)
        for swap_entry_id in plan.dropped_swap_entry_ids:
            self._swap_entries.drop(swap_entry_id)
        for order in plan.swap_outs:
            self._swap_entries.swap_out(self._launch, order)
        if plan.block_copies:
            self._launch_pairs("copy_blocks", plan.block_copies, BLOCK_COPIES_CHUNK, 0)
        # Start the swap-in transfers before the step is launched, so that both run concurrently.
        return self._swap_entries.start_swap_ins(plan.swap_ins) if plan.swap_ins else None

    def launch_sampling(self, step: UnsampledStep, allowed: np.ndarray | None = None) -> StepHandle:
        """Do the second part of the work of `launch`: mask logits, sample, write swapped-in blocks.

        Args:
            step: The step that `launch_layers` launched last.
            allowed: Bits of the tokens that each row may sample, int32 [step.num_rows, M], as for
                `mask_step`. None allows every token.
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
        """Return whether `plan` fits into a burst, which runs several steps as one program.

        The plan must meet all of these conditions:

        - The plan is a decode step without block copies, swaps or forks.
        - `Buckets.has_burst` is true for `goal` and the number of sequences.
        - If the plan has no drafts, a burst program has the sampling features that the rows need.
          Burst programs are compiled for the sets of features in `BURST_LEVELS`.
        - If the plan has drafts, it has at most `SMALL_BATCH_SEQS` sequences, and the verify
          program for the rows has fewer features than `FULL_LEVEL`, the set of all sampling
          features.
        - The plan has no beam search: a beam search needs a step's scores before the next step.
        """
        if not (plan.scheduled and plan.is_decode) or plan.has_block_moves or plan.row_forks:
            return False
        if not self._buckets.has_burst(len(plan.scheduled), goal):
            return False
        level = self._rows.level(self._rows.rows(plan.scheduled))
        if plan.num_drafts:
            is_small = len(plan.scheduled) <= SMALL_BATCH_SEQS
            return is_small and self._verify_level(level) is not FULL_LEVEL
        if not any(it.covers(level) for it in BURST_LEVELS):
            return False
        scored = SamplerLevel.LOGPROBS in level
        return not (scored and any(it.sequence.request.beam is not None for it in plan.scheduled))

    def launch_burst(self, plans: list[StepPlan], sampling: SamplingLookup) -> list[StepHandle]:
        """Launch several plans as one program, and return one handle per plan.

        `fits_burst` must be true for every plan. Either every plan verifies drafts, or no plan
        does.
        """
        rows, level = [], SamplerLevel.GREEDY
        # `_update_rows` may release rows that the previous plan uses. So look up the rows of each
        # plan before `_update_rows` is called for the next plan.
        for plan in plans:
            self._update_rows(plan, sampling)
            rows.append(self._rows.rows(plan.scheduled))
            level |= self._rows.level(rows[-1])
        if plans[0].num_drafts:
            return self._launch_verification(plans, rows)
        size = round_up(self._buckets.burst_batch_sizes, max(len(plan.scheduled) for plan in plans))
        name = "decode_burst", (size, next(it for it in BURST_LEVELS if it.covers(level)))
        packed = self._packers[name](*_burst_inputs(plans, rows))
        sampled = _start_copy_to_host(self._launch(*name, packed=packed)["sampled"], level)
        return [
            StepHandle(plan, sampled, (), np.arange(len(plan_rows)), (i,), **self._handle_options)
            for i, (plan, plan_rows) in enumerate(zip(plans, rows, strict=True))
        ]

    def _launch_verification(
        self, plans: list[StepPlan], rows: list[np.ndarray]
    ) -> list[StepHandle]:
        """Launch one verify step, or several as one program, and return one handle per plan.

        Args:
            plans: The plans. The caller has called `_update_rows` for each plan.
            rows: For each plan, the rows of its sequences in the arrays on the device.
        """
        level = self._verify_level(self._rows.level(np.concatenate(rows)))
        sizes = self._buckets.verify_batch_sizes
        size = round_up(sizes, max(len(plan.scheduled) for plan in plans))
        name = "verify", (size, len(plans), level, self._drafter)
        packed = self._packers[name](*_burst_inputs(plans, rows))
        sampled = _start_copy_to_host(self._launch(*name, packed=packed)["sampled"], level)
        faults, self._faults = tuple(self._faults), []
        return [
            StepHandle(
                plan,
                sampled,
                (),
                np.arange(len(plan_rows)),
                (i,),
                faults=() if i else faults,
                **self._handle_options,
            )
            for i, (plan, plan_rows) in enumerate(zip(plans, rows, strict=True))
        ]

    def _verify_level(self, level: SamplerLevel) -> SamplerLevel:
        """Return the first set of `verify_levels` that contains all sampling features in `level`.

        Verify programs are compiled only for the sets of sampling features in `verify_levels`.
        """
        return next(it for it in verify_levels(self._config) if it.covers(level))

    def wait(self) -> None:
        """Wait until all launched steps and swap transfers have finished."""
        self._swap_entries.wait()
        self._wait((self._persistent_arrays["state"], self._persistent_arrays["last_tokens"]))

    def warm_up(self) -> None:
        """Run every compiled program twice, with padding rows as input.

        Two runs are needed, because on a GPU, XLA records the kernel launches of a program in the
        program's first run.
        """
        for _ in range(2):
            sampled: set[int] = set()
            for (kind, key), pack in self._packers.items():
                # Wait for each program before the next one is launched. Otherwise, the buffers of
                # all programs would be allocated at the same time, and exceed the memory budget.
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
        """Launch a compiled program.

        The runner adds the parameters and the persistent arrays that the program takes. A result
        with the name of a persistent array replaces that array.

        Returns:
            The remaining results, by their names in `PROGRAMS`.
        """
        persistent_arrays, (takes_model, taken) = (
            self._persistent_arrays,
            self._program_arguments[kind, key],
        )
        model = (self._parameters,) if takes_model else ()
        for name in taken:
            inputs[name] = persistent_arrays[name]
        results, names = self.programs[kind, key](*model, **inputs), PROGRAMS[kind].results
        found = dict(zip(names, results if len(names) > 1 else (results,), strict=True))
        for name in taken:
            if name in found:
                persistent_arrays[name] = found.pop(name)
        return found

    def _launch_small(self, kind: str, **inputs: Any) -> None:
        """Launch a small program. With tensor-parallel devices, every `MAX_LAUNCHES_AHEAD`-th small
        launch of a plan waits for its result."""
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
        """Launch a program that copies blocks or rows, with `size` (source, target) pairs per
        launch. Fill up the last launch with pairs (padding, padding)."""
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
        if not plan.is_decode:  # in a decode plan, no sequence joins the batch
            for item in plan.scheduled:
                if item.sequence.seq_id not in self._rows:
                    row = self._assign_row(item.sequence, sampling)
                    if self._drafter is not None:
                        self._new_tokens[row] = item.sequence.token_ids
        if self._new_tokens:
            tokens, self._new_tokens = self._new_tokens, {}
            for entries in pack_tokens(
                tokens, self._config.padding_row, self._config.max_model_len
            ):
                self._launch_small("load_tokens", entries=entries)
        if self._new_marks:
            marks, self._new_marks = self._new_marks, {}
            for packed in pack_marks(marks, self._config.padding_row, self._config.vocab_size):
                self._launch_small("load_rows", marks=packed)

    def _fork_rows(self, plan: StepPlan, sampling: SamplingLookup) -> None:
        # `sources` maps the row of each child to the row to copy. The program reads all rows
        # before it writes any row. If the parent is itself a child in this plan, the parent's row
        # has no data yet. The child is then copied from the row that the parent is copied from.
        sources: dict[int, int] = {}
        for parent, child in plan.row_forks:
            source = self._rows.row(parent.seq_id)
            row = self._assign_row(child, sampling)
            sources[row] = sources.get(source, source)
            if self._drafter is not None and child.num_output_tokens:
                # The fork copies the parent's tokens. After a preemption, the child's output tokens
                # may differ from the parent's, so replace the copied tokens.
                self._new_tokens[row] = child.token_ids
        pairs = [(source, row) for row, source in sources.items()]
        self._launch_pairs("fork_rows", pairs, self._config.num_rows, self._config.padding_row)

    def _assign_row(self, sequence: Sequence, sampling: SamplingLookup) -> int:
        """Assign a row on the device to a sequence that joins the batch, and return the row.

        The request's parameters are converted before any launch. If the conversion fails, only this
        request fails: the error is added to the plan's faults.
        """
        params, row = sampling(sequence.request), self._rows.assign(sequence.seq_id)
        marks = bias = None
        try:
            # A sequence that joins the batch has no tokens in flight, so the host knows all its
            # tokens.
            if params.adjusts_logits:
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


def _make_zeros(shapes: Any) -> Any:
    """Return a tree of zeros with the shapes, dtypes and shardings in the tree `shapes`."""
    zeros = jax.jit(
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
        out_shardings=jax.tree.map(lambda s: s.sharding, shapes),
    )
    with without_mesh():
        return zeros()


def _burst_inputs(plans: list[StepPlan], rows: list[np.ndarray]) -> tuple[Any, ...]:
    """Return the positional arguments of `pack_burst` for these plans."""
    return [plan.scheduled for plan in plans], rows, [plan.limits for plan in plans]


def _start_copy_to_host(sampled: SampledTokens, level: SamplerLevel) -> Any:
    """Start copying one of the arrays in `sampled` to the host, and return that array.

    If the sampling features in `level` include `LOGPROBS`, the array is `sampled.scores`. The
    scores also contain the ids of the sampled tokens. Otherwise, the array is `sampled.token_ids`.
    """
    wanted = sampled.token_ids
    if SamplerLevel.LOGPROBS in level and sampled.scores is not None:
        wanted = sampled.scores
    wanted.copy_to_host_async()
    return wanted
