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

from jpaged.core.plan import Goal, ScheduledSequence, StepPlan
from jpaged.core.request import Request, Sequence
from jpaged.runtime.allocation_guard import make_places
from jpaged.runtime.batch import RowTable
from jpaged.runtime.buckets import round_up
from jpaged.runtime.peer_memory import PeerMemory, await_devices
from jpaged.runtime.programs import (
    BLOCK_COPIES_CHUNK,
    BURST_LEVELS,
    Programs,
    Shapes,
    SplitModel,
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
from jpaged.runtime.steps import PLAN_PROGRAMS, PROGRAMS
from jpaged.runtime.swap import BlockImages
from jpaged.sampling_params import SamplingParams
from pallas_kernels import Backend

SamplingOf = Callable[[Request], SamplingParams]
Fault = tuple[Request, Exception]
Scheduled = tuple[ScheduledSequence, ...]

_NO_PLACES = np.zeros(0, np.int64)


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
        self.burst_steps = config.num_scheduler_steps
        self._config, self._buckets = config, config.buckets
        self._levels = sampler_levels(config, splits_vocabulary=shapes.splits_vocabulary)
        # For each level that rows may need the compiled one that serves it.
        self._served_by = {
            level: next(own for own in self._levels if own.covers(level))
            for level in map(SamplerLevel, range(EVERYTHING + 1))
        }
        self.programs = programs
        self._eos_token_ids = eos_token_ids
        self._rows = RowTable(config.num_rows)
        self._packers = {
            (step.name, key): step.packer(config, self._rows.sampling, key)
            for step in PLAN_PROGRAMS
            for key in step.keys(config, shapes)
        }
        self._faults: list[Fault] = []  # of the plan being launched
        self._num_small_launches = 0  # for the plan being launched
        self._new_marks: dict[int, RowMarks] = {}  # of rows given in the plan being launched
        held = {name: shape for name, shape in shapes.held.items() if name != "peers"}
        zeros = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), held),
            out_shardings=jax.tree.map(lambda s: s.sharding, held),
        )
        self._held: dict[str, Any] = zeros()  # what stays on the device, by steps' names for it
        mesh, has_peers = split.mesh, shapes.peers is not None
        self._peers = PeerMemory(mesh) if mesh is not None and has_peers else None
        if self._peers is not None:
            self._held["peers"] = self._peers.headers
        # For each program: the model if it takes it, and names of the arrays that stay.
        self._taken = {
            (step.name, key): (
                (split.leaves,) if "model" in step.arguments else (),
                step.held(self._held, step.sizes(config, key)),
            )
            for step in PROGRAMS.values()
            for key in step.keys(config, shapes)
        }
        check = None if self._peers is None else self._peers.check
        self._of_devices = {"check": check, "is_shared": mesh is not None}
        self._wait = jax.block_until_ready if mesh is None else await_devices
        self._images = BlockImages(shapes.kv.pool, config.num_host_blocks, self._wait)
        # Behind all that stays, before any step: where its small buffers go. Held, never read.
        devices = [None] if mesh is None else mesh.devices.ravel().tolist()
        self._guards = make_places(devices) if config.backend is Backend.TRITON else []

    def launch(self, plan: StepPlan, sampling: SamplingOf) -> StepHandle:
        """Launch a plan's parts in the order that `StepPlan` gives, without waiting for any (but
        see `_launch_small`).

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
            self._images.swap_out(self._launch, order)
        if plan.block_copies:
            self._move("copy_blocks", plan.block_copies, BLOCK_COPIES_CHUNK, 0)
        # What comes back travels while the step runs.
        arrivals = self._images.fetch(plan.swap_ins) if plan.swap_ins else None
        if not plan.scheduled:
            return UnsampledStep(plan, (), 0, _NO_PLACES, SamplerLevel.GREEDY, arrivals=arrivals)
        for step in PLAN_PROGRAMS:
            if (key := step.key_of(self._buckets, plan)) is not None:
                break
        scheduled, places = plan.scheduled, np.arange(len(plan.scheduled))
        if step.order is not None:
            order = step.order(scheduled)
            scheduled, places = tuple([scheduled[i] for i in order.tolist()]), np.argsort(order)
        rows = self._rows.rows(scheduled)
        level, scores = self._rows.level(rows), {}
        packed = self._packers[step.name, key](scheduled, rows)
        found = self._launch(step.name, key, packed=packed)
        logits, inputs, hidden = found["logits"], found["inputs"], found.get("hidden")
        if hidden is not None:
            score = partial(self._launch, "prompt_logprobs", hidden.shape[0], hidden=hidden)
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
                masked = self._launch("mask", step.num_rows, logits=logits, allowed=allowed)
                logits = masked["logits"]
            key = step.num_rows, self._served_by[step.level]
            found = self._launch("sample", key, logits=logits, inputs=step.inputs)
            sampled = _on_its_way(found["sampled"], step.level)
        if step.arrivals is not None:
            self._images.place(self._launch, step.arrivals)
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
        rows, level = [], SamplerLevel.GREEDY
        size = round_up(self._buckets.burst_seqs, max(len(plan.scheduled) for plan in plans))
        for plan in plans:
            self._update_rows(plan, sampling)
            rows.append(self._rows.rows(plan.scheduled))
            level |= self._rows.level(rows[-1])
        name = "decode_burst", (size, next(own for own in BURST_LEVELS if own.covers(level)))
        packed = self._packers[name]([plan.scheduled for plan in plans], rows)
        sampled = _on_its_way(self._launch(*name, packed=packed)["sampled"], level)
        return [
            StepHandle(plan, sampled, {}, np.arange(len(own)), (i,), **self._of_devices)
            for i, (plan, own) in enumerate(zip(plans, rows, strict=True))
        ]

    def wait(self) -> None:
        """Wait until all that was launched is done, images included."""
        self._images.wait()
        self._wait((self._held["state"], self._held["last_tokens"]))

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
                everything = np.full((rows, self._config.mask_width), -1, np.int32)
                masked = self._launch("mask", rows, logits=found["logits"], allowed=everything)
                for level in self._levels:
                    given = {"logits": masked["logits"], "inputs": found["inputs"]}
                    self._wait(self._launch("sample", (rows, level), **given))
        self._images.warm_up(self._launch)
        if self._peers is not None:
            self._peers.check()

    def _launch(self, kind: str, key: Any = None, **inputs: Any) -> dict[str, Any]:
        """Call a compiled program, with the arrays that stay on the device as its arguments and
        their successors among its results.

        Returns:
            The other results, by their names in `PROGRAMS`.
        """
        held, (model, taken) = self._held, self._taken[kind, key]
        for name in taken:
            inputs[name] = held[name]
        results, names = self.programs[kind, key](*model, **inputs), PROGRAMS[kind].results
        found = dict(zip(names, results if len(names) > 1 else (results,), strict=True))
        for name in taken:
            if name in found:
                held[name] = found.pop(name)
        return found

    def _launch_small(self, kind: str, **inputs: Any) -> None:
        """Launch a small program of the plan, and where devices share a model wait now and then for
        what it makes."""
        self._launch(kind, **inputs)
        self._num_small_launches += 1
        if self._of_devices["is_shared"] and not self._num_small_launches % LAUNCHES_AHEAD:
            self._wait(self._held[PROGRAMS[kind].results[0]])

    def _move(self, kind: str, pairs: Collection[tuple[int, int]], size: int, null: int) -> None:
        """Launch a program over (source, target) pairs, `size` at a time, filled with `null`."""
        moves = np.array(list(pairs), np.int32).reshape(-1, 2)
        for at in range(0, len(moves), size):
            filled = np.full((2, size), null, np.int32)
            filled[:, : len(moves) - at] = moves[at : at + size].T
            self._launch_small(kind, **dict(zip(PROGRAMS[kind].inputs, filled, strict=True)))

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
            for packed in pack_marks(marks, self._config.padding_row, self._config.vocab_size):
                self._launch_small("load_rows", marks=packed)

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
            self._launch_small("load_bias", row=np.int32(row), bias=bias)
        return row


def _on_its_way(sampled: Sampled, level: SamplerLevel) -> Any:
    """What the host reads of a step or a burst, being copied there: one array, the scores if the
    level asks for them."""
    wanted = sampled.token_ids
    if SamplerLevel.LOGPROBS in level and sampled.scores is not None:
        wanted = sampled.scores
    wanted.copy_to_host_async()
    return wanted
