"""What each program of an engine is compiled from: the step, and the shapes of its arguments."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export

from jpaged.compile.recipe import Recipe
from jpaged.compile.shared_calls import SharedCalls
from jpaged.models.config import ModelConfig
from jpaged.runtime.batch import decode_packed_shape, prefill_packed_shape
from jpaged.runtime.buckets import Buckets
from jpaged.runtime.kv_cache import make_pool
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import EVERYTHING, SCORED_GREEDY, Sampled, SamplerLevel
from jpaged.runtime.sampling_state import (
    LOADED_ROWS,
    LOADED_TOKENS,
    ROW_WIDTH,
    SamplingState,
    init_state,
    load_bias,
    load_rows,
)
from jpaged.runtime.steps import (
    KVState,
    SampleInputs,
    copy_blocks_step,
    decode_burst_step,
    decode_step,
    fork_rows_step,
    prefill_step,
    prompt_logprobs_step,
    sample_step,
)
from jpaged.runtime.swap import chunk_sizes, gather_blocks_step, scatter_blocks_step
from jpaged.sampling_params import MAX_LOGPROBS
from pallas_kernels import Backend, LayerKV

PROMPT_LOGPROBS_CHUNK = 64
"""Prompt tokens whose logits exist at once; a whole prompt's would not fit beside the pool."""

BLOCK_COPIES_CHUNK = 64
"""Blocks copied by one launch."""

BURST_LEVELS = (SCORED_GREEDY, SamplerLevel.TRUNCATED)
"""Sampling levels of bursts: a burst runs at the first that does all it needs."""

for _kind in (KVState, LayerKV, SampleInputs, Sampled, SamplingState):
    export.register_namedtuple_serialization(_kind, serialized_name=f"jpaged.{_kind.__name__}")


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

    def bind(self, step: Callable, **static: Any) -> Callable:
        """The step as a function of the leaves and its other arguments."""

        def run(leaves, **arguments):
            model = nnx.merge(self.definition, jax.tree.unflatten(self.treedef, leaves))
            return step(model, **arguments, **static)

        run.__name__ = step.__name__
        return run


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


def recipes(
    split: SplitModel,
    shapes: Shapes,
    config: RuntimeConfig,
    buckets: Buckets,
    shared: SharedCalls | None = None,
) -> Iterator[Recipe]:
    """Everything to compile; of programs with the same products, the one that has the most to
    measure comes first. A decode step comes before its bursts, which wait for it, and the smallest
    before all: the Mosaic kernel it may have is compiled only while nothing else is. `shared`
    calls what they have in common: one of their own unless given."""
    shared = shared or SharedCalls(config.backend)
    smallest, *larger = buckets.decode_seqs
    for seqs in (smallest, *reversed(larger)):
        yield _decode(split, shapes, config, seqs, buckets.logits_rows(seqs))
        if seqs in buckets.burst_seqs:
            for level in BURST_LEVELS:
                yield _decode_burst(split, shapes, config, seqs, level, shared)
    most = buckets.prefill_seqs[-1]
    for tokens, seqs in sorted(buckets.prefill_shapes, key=lambda it: (it[1] != most, -it[0])):
        yield prefill_recipe(split, shapes, config, tokens, seqs, shared)
    yield from recipes_without_pool(split, shapes, config, buckets, shared)
    yield _load_rows(shapes)
    yield _load_bias(shapes, config)
    yield _copy_blocks(shapes, config)
    yield _fork_rows(shapes, config)
    for size in chunk_sizes(shapes.kv.pool, config.num_host_blocks):
        yield from swap_recipes(shapes.kv, size)


def recipes_without_pool(
    split: SplitModel,
    shapes: Shapes,
    config: RuntimeConfig,
    buckets: Buckets,
    shared: SharedCalls,
) -> Iterator[Recipe]:
    """Those of `recipes` that are the same whatever the pool's size."""
    for tokens in buckets.prefill_tokens:
        yield _prompt_logprobs(split, shapes, config, tokens)
    for seqs in buckets.sample_seqs:
        for level in reversed(sampler_levels(config)):
            yield sample_recipe(shapes, config, seqs, level, shared)


def sampler_levels(config: RuntimeConfig) -> tuple[SamplerLevel, ...]:
    """The levels compiled; a batch runs at the first that does all it needs."""
    if config.few_programs:
        return SamplerLevel.GREEDY, SCORED_GREEDY, EVERYTHING
    return SCORED_GREEDY, SamplerLevel.RANDOM, SamplerLevel.TRUNCATED, EVERYTHING


def _decode(
    split: SplitModel, shapes: Shapes, config: RuntimeConfig, seqs: int, rows: int
) -> Recipe:
    step = split.bind(decode_step, batch_size=seqs, backend=config.backend)
    packed = _int32(*decode_packed_shape(rows))
    keywords = {"state": shapes.kv, "last_tokens": shapes.last_tokens, "packed": packed}
    name, products = ("decode", seqs), _products(config, seqs)
    return Recipe(name, step, (shapes.leaves,), keywords, ("state",), products)


def _decode_burst(
    split: SplitModel,
    shapes: Shapes,
    config: RuntimeConfig,
    seqs: int,
    level: SamplerLevel,
    shared: SharedCalls,
) -> Recipe:
    options = {"level": level, "backend": config.backend, "max_logprobs": MAX_LOGPROBS}
    step = split.bind(decode_burst_step, shared=shared, **options)
    packed = _int32(config.num_scheduler_steps, *decode_packed_shape(seqs))
    keywords = {"state": shapes.kv, "last_tokens": shapes.last_tokens, "packed": packed}
    keywords["sampling"] = _state_at(level, shapes)
    name, products = ("decode_burst", (seqs, level)), _products(config, seqs)
    donate = "state", "last_tokens", "sampling"
    return Recipe(name, step, (shapes.leaves,), keywords, donate, products)


def _state_at(level: SamplerLevel, shapes: Shapes) -> SamplingState | None:
    return shapes.sampling if SamplerLevel.ADJUSTED in level else None


def prefill_recipe(
    split: SplitModel,
    shapes: Shapes,
    config: RuntimeConfig,
    tokens: int,
    seqs: int,
    shared: SharedCalls,
) -> Recipe:
    """`prefill_step` of a bucket."""
    options = {"backend": config.backend, "shared": shared}
    step = split.bind(prefill_step, num_tokens=tokens, batch_size=seqs, **options)
    packed = _int32(*prefill_packed_shape(tokens, seqs, config.max_blocks_per_seq))
    keywords = {"state": shapes.kv, "last_tokens": shapes.last_tokens, "packed": packed}
    name, products = ("prefill", (tokens, seqs)), _products(config, tokens)
    return Recipe(name, step, (shapes.leaves,), keywords, ("state",), products)


def _products(config: RuntimeConfig, rows: int) -> tuple[str, int] | None:
    """Those of all layers; nothing where the compiler measures nothing."""
    return None if config.backend is Backend.XLA else ("layers", rows)


def _prompt_logprobs(
    split: SplitModel, shapes: Shapes, config: RuntimeConfig, tokens: int
) -> Recipe:
    options = {"max_logprobs": MAX_LOGPROBS, "backend": config.backend}
    step = split.bind(prompt_logprobs_step, **options)
    hidden = jax.ShapeDtypeStruct((tokens, *shapes.hidden.shape), shapes.hidden.dtype)
    chunk = _int32(PROMPT_LOGPROBS_CHUNK)
    keywords = {"hidden": hidden, "indices": chunk, "targets": chunk}
    name = "prompt_logprobs", tokens
    products = None if config.backend is Backend.XLA else ("head", PROMPT_LOGPROBS_CHUNK)
    leaves = (shapes.leaves,)
    return Recipe(name, step, leaves, keywords, products=products, needs_pool=False)


def sample_recipe(
    shapes: Shapes,
    config: RuntimeConfig,
    seqs: int,
    level: SamplerLevel,
    shared: SharedCalls,
) -> Recipe:
    """`sample_step` of a bucket and a level."""
    options = {"level": level, "backend": config.backend, "max_logprobs": MAX_LOGPROBS}
    step = partial(sample_step, shared=shared, **options)
    counted = jax.ShapeDtypeStruct((seqs,), jnp.bool_)
    inputs = SampleInputs._make([_int32(seqs), counted, _int32(seqs, ROW_WIDTH), _int32(seqs)])
    logits = jax.ShapeDtypeStruct((seqs, config.vocab_size), jnp.float32)
    keywords = {"last_tokens": shapes.last_tokens, "sampling": _state_at(level, shapes)}
    name, donate = ("sample", (seqs, level)), ("last_tokens", "sampling")
    return Recipe(name, step, (logits, inputs), keywords, donate, needs_pool=False)


def _load_rows(shapes: Shapes) -> Recipe:
    packed = _int32(2 * LOADED_ROWS + 3 * LOADED_TOKENS)
    return Recipe(("load_rows", None), load_rows, (shapes.sampling, packed), donate=("state",))


def _load_bias(shapes: Shapes, config: RuntimeConfig) -> Recipe:
    bias = jax.ShapeDtypeStruct((config.vocab_size,), jnp.float32)
    arguments = (shapes.sampling, _int32(), bias)
    return Recipe(("load_bias", None), load_bias, arguments, donate=("state",))


def _copy_blocks(shapes: Shapes, config: RuntimeConfig) -> Recipe:
    pairs = _int32(BLOCK_COPIES_CHUNK)
    step = partial(copy_blocks_step, backend=config.backend)
    return Recipe(("copy_blocks", None), step, (shapes.kv, pairs, pairs), donate=("state",))


def _fork_rows(shapes: Shapes, config: RuntimeConfig) -> Recipe:
    rows = _int32(config.num_rows)
    arguments = (shapes.kv, rows, rows)
    return Recipe(("fork_rows", None), fork_rows_step, arguments, donate=("state",))


def swap_recipes(state: KVState, size: int) -> tuple[Recipe, Recipe]:
    """`gather_blocks_step` and `scatter_blocks_step` for `size` blocks."""
    ids = _int32(size)
    blocks = jax.eval_shape(gather_blocks_step, state.pool, ids)
    gather = Recipe(("gather_blocks", size), gather_blocks_step, (state.pool, ids))
    arguments = (state, ids, blocks)
    name = ("scatter_blocks", size)
    return gather, Recipe(name, scatter_blocks_step, arguments, donate=("state",))


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
