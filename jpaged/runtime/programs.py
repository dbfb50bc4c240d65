"""Every program a running engine can need, compiled before it serves.

Programs are compiled ahead of time and called as compiled executables, so that nothing can compile
while serving: a shape that was not foreseen is an error, not a pause.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.config import ModelConfig
from jpaged.runtime.batch import decode_packed_shape, prefill_packed_shape
from jpaged.runtime.buckets import Buckets
from jpaged.runtime.kv_cache import make_pool
from jpaged.runtime.sampler import SamplerLevel
from jpaged.runtime.sampling_state import ROW_WIDTH, SamplingState, init_state, load_row
from jpaged.runtime.steps import (
    KVState,
    SampleInputs,
    copy_blocks_step,
    decode_step,
    fork_rows_step,
    prefill_step,
    prompt_logprobs_step,
    sample_step,
)
from jpaged.runtime.swap import chunk_sizes, lower_gather, lower_scatter
from jpaged.runtime_config import RuntimeConfig
from jpaged.sampling_params import MAX_LOGPROBS

PROMPT_LOGPROBS_CHUNK = 64
"""Prompt tokens whose logits exist at once; a whole prompt's would not fit beside the pool."""


BLOCK_COPIES_CHUNK = 64
"""Blocks copied by one launch."""


@dataclass(frozen=True)
class SplitModel:
    """A model taken apart once: its definition, and its parameters as a flat tuple.

    Steps take the flat leaves, so that a launch costs no traversal in Python (design decision 11).
    """

    definition: nnx.GraphDef
    treedef: Any
    leaves: tuple[jax.Array, ...]

    @staticmethod
    def of(model: nnx.Module) -> "SplitModel":
        """Take a model apart."""
        definition, state = nnx.split(model)
        leaves, treedef = jax.tree.flatten(state)
        return SplitModel(definition, treedef, tuple(leaves))

    def jit(self, step: Callable, donate: tuple[str, ...] = (), **static: Any) -> Callable:
        """A jitted program over the leaves; `donate` names arguments whose memory it reuses."""

        def run(leaves, **arguments):
            model = nnx.merge(self.definition, jax.tree.unflatten(self.treedef, leaves))
            return step(model, **arguments, **static)

        run.__name__ = step.__name__
        return jax.jit(run, donate_argnames=donate)


@dataclass(frozen=True)
class Shapes:
    """Shapes and dtypes of the arrays that live on the device."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    kv: KVState
    last_tokens: jax.ShapeDtypeStruct
    sampling: SamplingState
    hidden: jax.ShapeDtypeStruct

    @staticmethod
    def of(split: SplitModel, model: ModelConfig, config: RuntimeConfig, dtype) -> "Shapes":
        """The shapes a configuration implies."""
        rows = config.num_rows

        def kv_state() -> KVState:
            pool = make_pool(model, config.num_blocks, config.block_size, dtype)
            return KVState(pool, jnp.zeros((rows, config.max_blocks_per_seq), jnp.int32))

        return Shapes(
            leaves=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in split.leaves),
            kv=jax.eval_shape(kv_state),
            last_tokens=_int32(rows),
            sampling=jax.eval_shape(partial(init_state, config.num_rows, config.vocab_size)),
            hidden=jax.ShapeDtypeStruct((model.hidden_size,), dtype),
        )


@dataclass(frozen=True)
class Programs:
    """Compiled programs, by shape where there are several; `jpaged.runtime.steps` says what each
    does."""

    decode: dict[int, Any]
    prefill: dict[tuple[int, int], Any]
    sample: dict[tuple[int, SamplerLevel], Any]
    prompt_logprobs: dict[int, Any]
    load_row: Any
    copy_blocks: Any
    fork_rows: Any
    gather_blocks: dict[int, Any]
    scatter_blocks: dict[int, Any]

    @staticmethod
    def of(compiled: "dict[Name, Any]") -> "Programs":
        """Sort compiled programs by kind."""

        def kind(name: str) -> dict:
            return {key: program for (own, key), program in compiled.items() if own == name}

        return Programs(
            decode=kind("decode"),
            prefill=kind("prefill"),
            sample=kind("sample"),
            prompt_logprobs=kind("prompt_logprobs"),
            load_row=compiled["load_row", None],
            copy_blocks=compiled["copy_blocks", None],
            fork_rows=compiled["fork_rows", None],
            gather_blocks=kind("gather_blocks"),
            scatter_blocks=kind("scatter_blocks"),
        )


Name = tuple[str, Any]
"""A program's kind and its key among those."""


def compile_programs(
    split: SplitModel,
    shapes: Shapes,
    config: RuntimeConfig,
    buckets: Buckets,
    *,
    threads: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Programs:
    """Compile everything, `threads` programs at a time.

    Args:
        split: The model.
        shapes: Shapes of the device's arrays.
        config: The runtime's numbers.
        buckets: The steps' shapes.
        threads: Compilations at once; XLA compiles outside Python's lock.
        progress: Called with (compiled so far, all).
    """
    lowerings = dict(_lowerings(split, shapes, config, buckets))
    compiled: dict[Name, Any] = {}
    with ThreadPoolExecutor(threads) as pool:
        futures = {
            name: pool.submit(lambda low: low().compile(), lower)
            for name, lower in lowerings.items()
        }
        for name, future in futures.items():
            compiled[name] = future.result()
            progress(len(compiled), len(futures))
    return Programs.of(compiled)


def largest_step_workspace(
    split: SplitModel, shapes: Shapes, config: RuntimeConfig, buckets: Buckets
) -> int:
    """Bytes of temporaries and fresh outputs of the largest step, as compiled.

    The pool's size does not enter them, so any `num_blocks` in `shapes` gives the same answer.
    """
    prefill = _lower_prefill(split, shapes, config, *max(buckets.prefill_shapes()))
    sampling = _lower_sample(shapes, config, max(buckets.decode_seqs), max(SamplerLevel))
    return _workspace(prefill.compile()) + _workspace(sampling.compile())


def _workspace(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    fresh_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + fresh_outputs


def _lowerings(
    split: SplitModel, shapes: Shapes, config: RuntimeConfig, buckets: Buckets
) -> Iterator[tuple[Name, Callable[[], Any]]]:
    """Everything to compile, the largest first so that no thread ends with a long one."""
    for tokens, seqs in sorted(buckets.prefill_shapes(), reverse=True):
        lower = partial(_lower_prefill, split, shapes, config, tokens, seqs)
        yield ("prefill", (tokens, seqs)), lower
    for seqs in reversed(buckets.decode_seqs):
        yield ("decode", seqs), partial(_lower_decode, split, shapes, config, seqs)
    for tokens in buckets.prefill_tokens:
        yield ("prompt_logprobs", tokens), partial(_lower_prompt_logprobs, split, shapes, tokens)
    for seqs in sorted({*buckets.decode_seqs, *buckets.prefill_seqs}):
        for level in SamplerLevel:
            lower = partial(_lower_sample, shapes, config, seqs, level)
            yield ("sample", (seqs, level)), lower
    yield ("load_row", None), partial(_lower_load_row, shapes, config)
    yield ("copy_blocks", None), partial(_lower_copy_blocks, shapes, config)
    yield ("fork_rows", None), partial(_lower_fork_rows, shapes, config)
    for size in chunk_sizes(shapes.kv.pool, config.num_host_blocks):
        yield ("gather_blocks", size), partial(lower_gather, shapes.kv, size)
        yield ("scatter_blocks", size), partial(lower_scatter, shapes.kv, size)


def _lower_decode(split: SplitModel, shapes: Shapes, config: RuntimeConfig, seqs: int):
    step = split.jit(decode_step, donate=("state",), backend=config.backend)
    packed = _int32(*decode_packed_shape(seqs))
    return step.lower(shapes.leaves, state=shapes.kv, last_tokens=shapes.last_tokens, packed=packed)


def _lower_prefill(
    split: SplitModel, shapes: Shapes, config: RuntimeConfig, tokens: int, seqs: int
):
    step = split.jit(
        prefill_step,
        donate=("state",),
        num_tokens=tokens,
        batch_size=seqs,
        backend=config.backend,
    )
    packed = _int32(*prefill_packed_shape(tokens, seqs, config.max_blocks_per_seq))
    return step.lower(shapes.leaves, state=shapes.kv, last_tokens=shapes.last_tokens, packed=packed)


def _lower_prompt_logprobs(split: SplitModel, shapes: Shapes, tokens: int):
    step = split.jit(prompt_logprobs_step, max_logprobs=MAX_LOGPROBS)
    hidden = jax.ShapeDtypeStruct((tokens, *shapes.hidden.shape), shapes.hidden.dtype)
    chunk = _int32(PROMPT_LOGPROBS_CHUNK)
    return step.lower(shapes.leaves, hidden=hidden, indices=chunk, targets=chunk)


def _lower_sample(shapes: Shapes, config: RuntimeConfig, seqs: int, level: SamplerLevel):
    step = jax.jit(
        partial(sample_step, level=level, max_logprobs=MAX_LOGPROBS),
        donate_argnames=("last_tokens", "sampling"),
    )
    inputs = jax.eval_shape(
        lambda: SampleInputs(
            rows=jnp.zeros(seqs, jnp.int32),
            counted=jnp.zeros(seqs, jnp.bool_),
            encoded=jnp.zeros((seqs, ROW_WIDTH), jnp.int32),
            positions=jnp.zeros(seqs, jnp.int32),
        )
    )
    logits = jax.ShapeDtypeStruct((seqs, config.vocab_size), jnp.float32)
    sampling = shapes.sampling if level >= SamplerLevel.ADJUSTED else None
    return step.lower(logits, inputs, last_tokens=shapes.last_tokens, sampling=sampling)


def _lower_load_row(shapes: Shapes, config: RuntimeConfig):
    scalar, tokens = _int32(), _int32(config.max_model_len)
    bias = jax.ShapeDtypeStruct((config.vocab_size,), jnp.float32)
    ending = jax.ShapeDtypeStruct((config.vocab_size,), jnp.bool_)
    step = jax.jit(load_row, donate_argnums=0)
    return step.lower(shapes.sampling, scalar, tokens, scalar, scalar, bias, ending)


def _lower_copy_blocks(shapes: Shapes, config: RuntimeConfig):
    pairs = _int32(BLOCK_COPIES_CHUNK)
    step = jax.jit(partial(copy_blocks_step, backend=config.backend), donate_argnums=0)
    return step.lower(shapes.kv, pairs, pairs)


def _lower_fork_rows(shapes: Shapes, config: RuntimeConfig):
    rows = _int32(config.num_rows)
    return jax.jit(fork_rows_step, donate_argnums=0).lower(shapes.kv, rows, rows)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
