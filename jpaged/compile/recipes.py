"""What each program of an engine is compiled from: a step, and the shapes of its arguments."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any
from uuid import uuid4

import jax
import jax.numpy as jnp
from jax import export

from jpaged.runtime.batch import decode_packed_shape, prefill_packed_shape
from jpaged.runtime.buckets import Buckets
from jpaged.runtime.programs import (
    BLOCK_COPIES_CHUNK,
    BURST_LEVELS,
    PROMPT_LOGPROBS_CHUNK,
    Name,
    Shapes,
    SplitModel,
    sampler_levels,
)
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import (
    LOADED_ROWS,
    LOADED_TOKENS,
    ROW_WIDTH,
    Sampled,
    SamplerLevel,
    SamplingState,
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

# Calls that JAX exports only on demand, since another version of it may not read them; programs are
# kept for the same version alone.
KERNEL_CALLS = [
    export.DisabledSafetyCheck.custom_call(target)
    for target in ("__gpu$xla.gpu.triton", "triton_kernel_call_ffi", "mosaic_gpu_v2")
]


@dataclass(frozen=True)
class Recipe:
    """What a program is compiled from: a step, and the shapes of its arguments.

    `donate` names the arguments whose memory the program reuses. Programs with equal `products`
    have the same matrix products. One that does not need the pool is the same whatever its size.
    """

    name: Name
    function: Callable
    arguments: tuple = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    donate: tuple[str, ...] = ()
    products: tuple[str, int] | None = None
    needs_pool: bool = True

    @property
    def step(self) -> Any:
        """The jitted step."""
        return jax.jit(self.function, donate_argnames=self.donate)

    def exported(self, platforms: tuple[str, ...] | None = None) -> export.Exported:
        """Trace and lower to what can be kept, for the device at hand unless told."""
        exporting = export.export(self.step, platforms=platforms, disabled_checks=KERNEL_CALLS)
        return exporting(*self.arguments, **self.keywords)

    def lower(self, exported: export.Exported | None = None) -> Any:
        """Lower what was exported, or trace first."""
        step = self.step if exported is None else self.call(exported)
        return step.lower(*self.arguments, **self.keywords)

    def compile(self, exported: export.Exported | None = None) -> Any:
        """Lower and compile."""
        return self.lower(exported).compile()

    def draft(self) -> "Recipe":
        """The same under a name that no other program has, for looking at what the compiler makes
        of it: JAX's cache has nothing of that name, and programs from there may not tell all."""

        @wraps(self.function)  # arguments are donated by name
        def run(*arguments, **keywords):
            return self.function(*arguments, **keywords)

        run.__name__ = f"draft_{uuid4().hex}"
        return replace(self, function=run)

    def call(self, exported: export.Exported) -> Any:
        """The step, jitted, as it was exported."""

        @wraps(self.function)  # arguments are donated by name
        def run(*arguments, **keywords):
            return exported.call(*arguments, **keywords)

        run.__name__ = exported.fun_name  # that of a partial is hidden
        return jax.jit(run, donate_argnames=self.donate)

    @property
    def key(self) -> str:
        """Tells it from all recipes of an engine's steps with the same back end."""
        leaves, tree = jax.tree.flatten((self.arguments, dict(self.keywords)))
        return repr((self.name, str(tree), [(leaf.shape, leaf.dtype.name) for leaf in leaves]))


class SharedCalls:
    """Calls functions, each lowered once for one set of shapes.

    To be called under the same settings of JAX and for the same device throughout.

    Args:
        backend: The kernels'; those for an NVIDIA GPU are lowered for one, whether there is one or
            not, all else for the device at hand.
    """

    def __init__(self, backend: Backend):
        self._platforms = ("cuda",) if backend is Backend.TRITON else None
        self._lowered: dict[tuple, export.Exported] = {}

    def __call__(self, function: partial, *arrays: Any, **named: Any) -> Any:
        """What `function` returns for the trees of arrays: one of a module's, hashable keywords
        bound."""
        shapes, named_shapes = jax.tree.map(_shape, (arrays, named))
        leaves, tree = jax.tree.flatten((shapes, named_shapes))
        facts = tuple((it.shape, it.dtype) for it in leaves)
        key = function.func, tuple(sorted(function.keywords.items())), tree, facts
        if key not in self._lowered:
            lowering = export.export(
                jax.jit(function), platforms=self._platforms, disabled_checks=KERNEL_CALLS
            )
            self._lowered[key] = lowering(*shapes, **named_shapes)
        return self._lowered[key].call(*arrays, **named)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


for _kind in (KVState, LayerKV, SampleInputs, Sampled, SamplingState):
    export.register_namedtuple_serialization(_kind, serialized_name=f"jpaged.{_kind.__name__}")


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
