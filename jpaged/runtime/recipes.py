"""What each program of an engine is compiled from: the step, and the shapes of its arguments."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
from jpaged.runtime.swap import chunk_sizes, gather_program, scatter_program
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
    leaves: tuple[jax.Array | jax.ShapeDtypeStruct, ...]

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


Name = tuple[str, Any]
"""A program's kind and its key among those."""


@dataclass(frozen=True)
class Recipe:
    """What a program is compiled from: a step, and the shapes of its arguments."""

    name: Name
    step: Any
    arguments: tuple = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def compile(self) -> Any:
        """Trace, lower, compile."""
        return self.step.lower(*self.arguments, **self.keywords).compile()


def recipes(
    split: SplitModel, shapes: Shapes, config: RuntimeConfig, buckets: Buckets
) -> Iterator[Recipe]:
    """Everything to compile, the largest first so that no thread ends with a long one."""
    for tokens, seqs in sorted(buckets.prefill_shapes(), reverse=True):
        yield prefill_recipe(split, shapes, config, tokens, seqs)
    for seqs in reversed(buckets.decode_seqs):
        yield _decode(split, shapes, config, seqs)
    for tokens in buckets.prefill_tokens:
        yield _prompt_logprobs(split, shapes, tokens)
    for seqs in sorted({*buckets.decode_seqs, *buckets.prefill_seqs}):
        for level in sampler_levels(config):
            yield sample_recipe(shapes, config, seqs, level)
    yield _load_row(shapes, config)
    yield _copy_blocks(shapes, config)
    yield _fork_rows(shapes, config)
    for size in chunk_sizes(shapes.kv.pool, config.num_host_blocks):
        yield Recipe(("gather_blocks", size), *gather_program(shapes.kv, size))
        yield Recipe(("scatter_blocks", size), *scatter_program(shapes.kv, size))


def sampler_levels(config: RuntimeConfig) -> tuple[SamplerLevel, ...]:
    """The levels compiled; a batch runs at the lowest that does all it needs."""
    if config.few_programs:
        return SamplerLevel.GREEDY, SamplerLevel.ADJUSTED, SamplerLevel.LOGPROBS
    return tuple(SamplerLevel)


def _decode(split: SplitModel, shapes: Shapes, config: RuntimeConfig, seqs: int) -> Recipe:
    step = split.jit(decode_step, donate=("state",), backend=config.backend)
    packed = _int32(*decode_packed_shape(seqs))
    keywords = {"state": shapes.kv, "last_tokens": shapes.last_tokens, "packed": packed}
    return Recipe(("decode", seqs), step, (shapes.leaves,), keywords)


def prefill_recipe(
    split: SplitModel, shapes: Shapes, config: RuntimeConfig, tokens: int, seqs: int
) -> Recipe:
    """`prefill_step` of a bucket."""
    step = split.jit(
        prefill_step,
        donate=("state",),
        num_tokens=tokens,
        batch_size=seqs,
        backend=config.backend,
    )
    packed = _int32(*prefill_packed_shape(tokens, seqs, config.max_blocks_per_seq))
    keywords = {"state": shapes.kv, "last_tokens": shapes.last_tokens, "packed": packed}
    return Recipe(("prefill", (tokens, seqs)), step, (shapes.leaves,), keywords)


def _prompt_logprobs(split: SplitModel, shapes: Shapes, tokens: int) -> Recipe:
    step = split.jit(prompt_logprobs_step, max_logprobs=MAX_LOGPROBS)
    hidden = jax.ShapeDtypeStruct((tokens, *shapes.hidden.shape), shapes.hidden.dtype)
    chunk = _int32(PROMPT_LOGPROBS_CHUNK)
    keywords = {"hidden": hidden, "indices": chunk, "targets": chunk}
    return Recipe(("prompt_logprobs", tokens), step, (shapes.leaves,), keywords)


def sample_recipe(shapes: Shapes, config: RuntimeConfig, seqs: int, level: SamplerLevel) -> Recipe:
    """`sample_step` of a bucket and a level."""
    options = {"level": level, "backend": config.backend, "max_logprobs": MAX_LOGPROBS}
    step = jax.jit(
        partial(sample_step, **options),
        donate_argnames=("last_tokens", "sampling"),
    )
    counted = jax.ShapeDtypeStruct((seqs,), jnp.bool_)
    inputs = SampleInputs._make([_int32(seqs), counted, _int32(seqs, ROW_WIDTH), _int32(seqs)])
    logits = jax.ShapeDtypeStruct((seqs, config.vocab_size), jnp.float32)
    sampling = shapes.sampling if level >= SamplerLevel.ADJUSTED else None
    keywords = {"last_tokens": shapes.last_tokens, "sampling": sampling}
    return Recipe(("sample", (seqs, level)), step, (logits, inputs), keywords)


def _load_row(shapes: Shapes, config: RuntimeConfig) -> Recipe:
    scalar, tokens = _int32(), _int32(config.max_model_len)
    bias = jax.ShapeDtypeStruct((config.vocab_size,), jnp.float32)
    ending = jax.ShapeDtypeStruct((config.vocab_size,), jnp.bool_)
    step = jax.jit(load_row, donate_argnums=0)
    arguments = (shapes.sampling, scalar, tokens, scalar, scalar, bias, ending)
    return Recipe(("load_row", None), step, arguments)


def _copy_blocks(shapes: Shapes, config: RuntimeConfig) -> Recipe:
    pairs = _int32(BLOCK_COPIES_CHUNK)
    step = jax.jit(partial(copy_blocks_step, backend=config.backend), donate_argnums=0)
    return Recipe(("copy_blocks", None), step, (shapes.kv, pairs, pairs))


def _fork_rows(shapes: Shapes, config: RuntimeConfig) -> Recipe:
    rows = _int32(config.num_rows)
    step = jax.jit(fork_rows_step, donate_argnums=0)
    return Recipe(("fork_rows", None), step, (shapes.kv, rows, rows))


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
