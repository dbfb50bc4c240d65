"""`PROGRAMS`, the table from which the step functions are compiled and launched.

The table has one record per step. A record has the step function, the names of the function's
results, and the keys of the step's programs. Most step functions are in `jpaged.runtime.steps`.
`INPUT_SHAPES` has the shapes of the arguments that a launch passes.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.plan import ScheduledSequence, StepPlan
from jpaged.runtime.batch import (
    decode_key,
    device_order,
    pack_burst,
    pack_decode,
    pack_prefill,
    prefill_key,
)
from jpaged.runtime.buckets import SMALL_BATCH_SEQS, Buckets
from jpaged.runtime.drafting import Drafter, load_tokens, make_drafter
from jpaged.runtime.programs import (
    BLOCK_COPIES_CHUNK,
    BURST_LEVELS,
    MAX_SCORED_LOGITS_ROWS,
    MAX_VERIFY_LOGITS_ROWS,
    DeviceShapes,
    int32_shape,
    num_scored_rows,
    sampler_levels,
    verify_levels,
)
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import (
    FULL_LEVEL,
    ROW_WIDTH,
    ROWS_PER_LOAD,
    TOKENS_PER_LOAD,
    SamplerLevel,
    load_bias,
    load_rows,
)
from jpaged.runtime.steps import (
    SampleInputs,
    copy_blocks_step,
    decode_burst_step,
    decode_step,
    fork_rows_step,
    gather_hidden_step,
    mask_step,
    prefill_step,
    prompt_logprobs_step,
    sample_step,
    score_targets_step,
    verify_step,
)
from jpaged.runtime.swap import chunk_sizes, gather_blocks_step, scatter_blocks_step

ProgramSizes = Mapping[str, Any]

INPUT_SHAPES: Mapping[str, Callable[[RuntimeConfig, DeviceShapes, ProgramSizes], Any]] = {
    "logits": lambda config, shapes, sizes: shapes.logits(sizes["num_rows"]),
    "inputs": lambda config, shapes, sizes: _sample_inputs(sizes["num_rows"]),
    "allowed": lambda config, shapes, sizes: int32_shape(sizes["num_rows"], config.mask_width),
    "hidden": lambda config, shapes, sizes: jax.ShapeDtypeStruct(
        (sizes["num_tokens"], *shapes.hidden.shape), shapes.hidden.dtype
    ),
    "indices": lambda config, shapes, sizes: int32_shape(sizes["num_scored"]),
    "scored_hidden": lambda config, shapes, sizes: jax.ShapeDtypeStruct(
        (sizes["num_scored"], *shapes.hidden.shape), shapes.hidden.dtype
    ),
    "targets": lambda config, shapes, sizes: int32_shape(sizes["num_scored"]),
    "marks": lambda config, shapes, sizes: int32_shape(2 * ROWS_PER_LOAD + 3 * TOKENS_PER_LOAD),
    "row": lambda config, shapes, sizes: int32_shape(),
    "bias": lambda config, shapes, sizes: jax.ShapeDtypeStruct((config.vocab_size,), jnp.float32),
    "entries": lambda config, shapes, sizes: int32_shape(3, TOKENS_PER_LOAD),
    "source": lambda config, shapes, sizes: int32_shape(BLOCK_COPIES_CHUNK),
    "target": lambda config, shapes, sizes: int32_shape(BLOCK_COPIES_CHUNK),
    "parents": lambda config, shapes, sizes: int32_shape(config.num_rows),
    "children": lambda config, shapes, sizes: int32_shape(config.num_rows),
    "block_ids": lambda config, shapes, sizes: int32_shape(sizes["num_blocks"]),
    "blocks": lambda config, shapes, sizes: shapes.blocks(sizes["num_blocks"]),
}
"""Shape of each argument that a launch passes, by the argument's name. `packed` is missing, because
its shape follows from `PlanProgram.pack`."""


@dataclass(frozen=True)
class StepProgram:
    """A step function, and everything needed to compile, warm up and launch its programs.

    The name of an argument determines where its value comes from. The runner holds the model and
    the arrays of `DeviceShapes.persistent_arrays`. Sizes, and options such as `backend`, are bound
    when a program is traced. A launch passes `packed` and the arguments in `INPUT_SHAPES`.

    Attributes:
        name: Name of the step. A pair (name, key) names one compiled program of the step.
        function: The step function.
        results: Names of the function's results. An argument with the name of a result is donated,
            and the result reuses the memory of the argument.
        key: Names of the values that make up a key, in order.
        keys: Function that returns the keys of all programs, in compile order.
        gemm_key: Function that returns which matrix products a program has: the part of the model
            ("layers" or "head") and the number of rows. None if a program has no matrix products to
            autotune.
        compile_seconds: Pair of CPU seconds: (one program, shared code). Programs whose keys differ
            only in the last part share code, which is compiled once. Both numbers were measured
            with Qwen3-0.6B on an H200; see docs/startup.md.
    """

    name: str
    function: Callable[..., Any]
    results: tuple[str, ...]
    key: tuple[str, ...] = ()
    keys: Callable[[RuntimeConfig, DeviceShapes], Iterable[Any]] = lambda *_: (None,)
    gemm_key: Callable[[ProgramSizes], tuple[str, int] | None] = lambda _: None
    compile_seconds: tuple[float, float] = 0.5, 0.0

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the step function's arguments."""
        return tuple(signature(self.function).parameters)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments that a launch passes, except `packed`."""
        return tuple(name for name in self.arguments if name in INPUT_SHAPES)

    def sizes(self, config: RuntimeConfig, key: Any) -> dict[str, Any]:
        """Return the sizes and options of one compiled program as a dict, by name.

        The dict maps the names in `self.key` to the values in `key`. The dict also contains sizes
        that follow from these values. For example, `num_rows` is the number of rows of the logits.
        If `self.key` does not contain "num_tokens", the method computes `num_tokens` from the
        batch size and the number of drafts.

        Args:
            config: Sizes and limits of the runtime.
            key: Key of the program, one of the results of `self.keys`.
        """
        sizes = dict(zip(self.key, key if isinstance(key, tuple) else (key,), strict=False))
        if "drafter" in sizes:
            num_drafts = sizes["drafter"].num_drafts
            sizes["num_tokens"] = sizes["batch_size"] * (1 + num_drafts)
            sizes["num_rows"] = sizes["batch_size"]
            sizes["max_block_updates"] = 1 + -(-num_drafts // config.block_size)
        if "indices" in self.arguments:
            sizes["num_scored"] = num_scored_rows(config, sizes["num_tokens"])
        elif "num_scored" in sizes:
            sizes["num_rows"] = math.gcd(sizes["num_scored"], MAX_SCORED_LOGITS_ROWS)
        if "batch_size" in sizes:
            sizes.setdefault("num_rows", config.buckets.num_logits_rows(sizes["batch_size"]))
            sizes.setdefault("num_tokens", sizes["batch_size"])
        return sizes

    def logits_row_counts(self, sizes: ProgramSizes) -> set[int]:
        """Return the row counts of a program's calls of the output head, without duplicates.

        A verify step may call the output head several times, with different numbers of rows.
        """
        if "drafter" not in sizes:
            return {sizes[name] for name in ("batch_size", "num_rows") if name in sizes}
        num_seqs, num_rows = sizes["batch_size"], sizes["num_tokens"]
        per_head = num_seqs * max(1, MAX_VERIFY_LOGITS_ROWS // num_seqs)
        return {min(per_head, num_rows), num_rows % per_head} - {0}

    @property
    def needs_pool(self) -> bool:
        """Whether the step's programs depend on the size of the pool."""
        return "state" in self.arguments

    def persistent_arrays(self, names: Iterable[str], sizes: ProgramSizes) -> tuple[str, ...]:
        """Return the names of the persistent arrays that a compiled program takes as arguments.

        Persistent arrays, such as the KV pool, stay on the device between steps.

        Args:
            names: Names of the persistent arrays that the engine has.
            sizes: Sizes and options of the program, from `self.sizes`.
        """
        adjusts = SamplerLevel.ADJUSTED in sizes.get("level", FULL_LEVEL)
        taken = [name for name in names if name in self.arguments]
        return tuple(name for name in taken if adjusts or name != "sampling")


@dataclass(frozen=True, kw_only=True)
class PlanProgram(StepProgram):
    """A step function that computes the scheduler's plans, and its compiled programs.

    Attributes:
        pack: Function that packs a plan's sequences, and their rows in the arrays on the device,
            into the argument `packed`. Without sequences, the function packs only padding.
        plan_key: Function that returns the key of the program that computes a plan; None if no
            program of this step function can compute the plan.
        row_order: Function that returns the order in which a program computes a plan's sequences;
            None to keep the order of the plan.
    """

    pack: Callable[..., np.ndarray]
    plan_key: Callable[[Buckets, StepPlan], Any] = lambda *_: None
    row_order: Callable[[tuple[ScheduledSequence, ...]], np.ndarray] | None = None
    gemm_key: Callable[[ProgramSizes], tuple[str, int]] = lambda sizes: (
        "layers",
        sizes["num_tokens"],
    )

    def make_packer(
        self, config: RuntimeConfig, sampling_table: np.ndarray, key: Any
    ) -> Callable[..., np.ndarray]:
        """Return a function that packs a step's inputs for the program of `key`.

        The function calls `pack`, and adds the arguments that are the same for every step of the
        program: `sampling_table`, options from `config`, and the sizes for `key`.
        """
        options = {
            "sampling_table": sampling_table,
            "max_blocks": config.max_blocks_per_seq,
            "num_steps": config.num_scheduler_steps,
            "speculates": config.speculation is not None,
            **self.sizes(config, key),
        }
        wanted = signature(self.pack).parameters
        return partial(self.pack, **{name: it for name, it in options.items() if name in wanted})


def _sample_inputs(num_rows: int) -> SampleInputs:
    is_output = jax.ShapeDtypeStruct((num_rows,), jnp.bool_)
    rows, packed_params = int32_shape(num_rows), int32_shape(num_rows, ROW_WIDTH)
    return SampleInputs._make([rows, is_output, packed_params, rows])


def _decode_keys(config: RuntimeConfig, _: DeviceShapes) -> list[int]:
    """Return the decode batch sizes. The largest size comes first, because its matrix products take
    longest to autotune."""
    return [*reversed(config.buckets.decode_batch_sizes)]


def _burst_keys(config: RuntimeConfig, shapes: DeviceShapes) -> list[tuple[int, SamplerLevel]]:
    sizes = [
        size for size in _decode_keys(config, shapes) if size in config.buckets.burst_batch_sizes
    ]
    return [(size, level) for size in sizes for level in BURST_LEVELS]


def _verify_keys(
    config: RuntimeConfig, shapes: DeviceShapes
) -> list[tuple[int, int, SamplerLevel, Drafter]]:
    """Return the keys that identify the compiled programs of `verify_step`.

    Every batch size has programs that run one step. If `num_scheduler_steps` is above 1, small
    batch sizes also have programs that run several steps in one launch (bursts).
    """
    if config.speculation is None:
        return []
    drafter, keys = make_drafter(config.speculation), []
    for size in reversed(config.buckets.verify_batch_sizes):
        keys += [(size, 1, level, drafter) for level in verify_levels(config)]
        if config.num_scheduler_steps > 1 and size <= SMALL_BATCH_SEQS:
            keys += [
                (size, config.num_scheduler_steps, level, drafter)
                for level in verify_levels(config)
                if level is not FULL_LEVEL
            ]
    return keys


def _load_tokens_keys(config: RuntimeConfig, _: DeviceShapes) -> tuple[None, ...]:
    return () if config.speculation is None else (None,)


def _prefill_keys(config: RuntimeConfig, _: DeviceShapes) -> list[tuple[int, int]]:
    max_seqs = config.buckets.prefill_batch_sizes[-1]
    return sorted(config.buckets.prefill_shapes, key=lambda it: (it[1] != max_seqs, -it[0]))


def _scored_keys(config: RuntimeConfig, _: DeviceShapes) -> list[int]:
    return sorted({num_scored_rows(config, size) for size in config.buckets.prefill_token_sizes})


def _sample_keys(config: RuntimeConfig, shapes: DeviceShapes) -> list[tuple[int, SamplerLevel]]:
    levels = sampler_levels(config, is_vocab_sharded=shapes.is_vocab_sharded)
    rows = _logits_row_counts(config, shapes)
    return [(num_rows, level) for num_rows in rows for level in reversed(levels)]


def _logits_row_counts(config: RuntimeConfig, shapes: DeviceShapes) -> list[int]:
    """Return every number of rows that the logits of a step can have, in ascending order."""
    steps = [step for step in PLAN_PROGRAMS if "logits" in step.results]
    keys = [(step, key) for step in steps for key in step.keys(config, shapes)]
    return sorted({step.sizes(config, key)["num_rows"] for step, key in keys})


def _swap_keys(config: RuntimeConfig, shapes: DeviceShapes) -> tuple[int, ...]:
    return chunk_sizes(shapes.kv.pool, config.num_host_blocks)


PROGRAMS: Mapping[str, StepProgram] = {
    program.name: program
    for program in (
        PlanProgram(
            "decode",
            decode_step,
            ("logits", "inputs", "state"),
            ("batch_size",),
            _decode_keys,
            compile_seconds=(5.5, 0.0),
            pack=pack_decode,
            plan_key=decode_key,
        ),
        PlanProgram(
            "decode_burst",
            decode_burst_step,
            ("sampled", "last_tokens", "sampling", "state", "row_tokens"),
            ("batch_size", "level"),
            _burst_keys,
            compile_seconds=(8.0, 0.0),
            pack=pack_burst,
        ),
        PlanProgram(
            "verify",
            verify_step,
            ("sampled", "last_tokens", "sampling", "state", "row_tokens"),
            ("batch_size", "num_steps", "level", "drafter"),
            _verify_keys,
            compile_seconds=(8.0, 0.0),
            pack=pack_burst,
        ),
        PlanProgram(
            "prefill",
            prefill_step,
            ("logits", "hidden", "inputs", "state"),
            ("num_tokens", "batch_size"),
            _prefill_keys,
            compile_seconds=(5.0, 4.5),
            pack=pack_prefill,
            plan_key=prefill_key,
            row_order=device_order,
        ),
        StepProgram(
            "gather_hidden",
            gather_hidden_step,
            ("scored_hidden",),
            ("num_tokens",),
            lambda config, _: config.buckets.prefill_token_sizes,
            compile_seconds=(0.2, 0.0),
        ),
        StepProgram(
            "prompt_logprobs",
            prompt_logprobs_step,
            ("scores",),
            ("num_scored",),
            _scored_keys,
            lambda sizes: ("head", sizes["num_rows"]),
        ),
        StepProgram(
            "score_targets",
            score_targets_step,
            ("scores",),
            ("num_scored",),
            _scored_keys,
        ),
        StepProgram("mask", mask_step, ("logits",), ("num_rows",), _logits_row_counts),
        StepProgram(
            "sample",
            sample_step,
            ("sampled", "last_tokens", "sampling", "row_tokens"),
            ("num_rows", "level"),
            _sample_keys,
            compile_seconds=(1.0, 0.0),
        ),
        StepProgram("load_rows", load_rows, ("sampling",)),
        StepProgram("load_bias", load_bias, ("sampling",)),
        StepProgram("load_tokens", load_tokens, ("row_tokens",), keys=_load_tokens_keys),
        StepProgram("copy_blocks", copy_blocks_step, ("state",)),
        StepProgram("fork_rows", fork_rows_step, ("state", "row_tokens")),
        StepProgram("gather_blocks", gather_blocks_step, ("blocks",), ("num_blocks",), _swap_keys),
        StepProgram(
            "scatter_blocks", scatter_blocks_step, ("state", "done"), ("num_blocks",), _swap_keys
        ),
    )
}
"""Every step that an engine compiles, in compile order. The decode step comes before bursts
(several decode steps in one launch). Among programs with the same matrix products, the program with
the most to autotune comes first."""

PLAN_PROGRAMS = tuple(step for step in PROGRAMS.values() if isinstance(step, PlanProgram))
