"""What each program of an engine is compiled from: a step, and the shapes of its arguments."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any
from uuid import uuid4

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.models.sharding import AXIS, mesh_of, on_every_device, over, sharding_of
from jpaged.runtime.batch import decode_packed_shape, prefill_packed_shape
from jpaged.runtime.kv_cache import HEADS_AXIS, KVState
from jpaged.runtime.programs import (
    BLOCK_COPIES_CHUNK,
    BURST_LEVELS,
    PROMPT_LOGPROBS_CHUNK,
    Name,
    Shapes,
    SplitModel,
    int32,
    sampler_levels,
)
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import (
    EVERYTHING,
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
    SampleInputs,
    copy_blocks_step,
    decode_burst_step,
    decode_step,
    fork_rows_step,
    mask_step,
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


COLLECTIVES_IN_LINE = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
"""XLA's compiler option that runs collectives on the stream of the step. By default they may have
another stream, but the step waits for each of them anyway, and changing streams twice takes time
(docs/decisions/0015)."""

ON_EACH = PartitionSpec()
"""How results lie that every device has."""

WITH_POOL = KVState._make((PartitionSpec(*[None] * HEADS_AXIS, AXIS), ON_EACH))
"""How the pool and the block tables lie."""


@dataclass(frozen=True)
class Recipe:
    """What a program is compiled from: a step, and the shapes of its arguments.

    `donate` names the arguments whose memory the program reuses. Programs with equal `products`
    have the same matrix products. One that does not need the pool is the same whatever its size.
    `options` are XLA's compiler options, by name; whoever compiles it passes them on.

    Where several devices share the model, the shapes are of the arrays over all of them; the
    function is of a device's own arrays until `on` has made it one of these.
    """

    name: Name
    function: Callable
    arguments: tuple = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    donate: tuple[str, ...] = ()
    products: tuple[str, int] | None = None
    needs_pool: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def on(self, mesh: Mesh | None, results: Any = ON_EACH) -> "Recipe":
        """The same on every device of a mesh at once, with `COLLECTIVES_IN_LINE`; `results` tells
        how what comes out lies."""
        if mesh is None:
            return self

        def placed(it: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return over(mesh, it, None) if it.sharding is None else it

        arguments, keywords = jax.tree.map(placed, (self.arguments, dict(self.keywords)))
        function = on_every_device(self.function, mesh, arguments, keywords, results)
        options = {**self.options, **COLLECTIVES_IN_LINE}
        return replace(
            self, function=function, arguments=arguments, keywords=keywords, options=options
        )

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
        return self.lower(exported).compile(dict(self.options))

    def draft(self) -> "Recipe":
        """The same under a name that no other program has, for looking at what the compiler makes
        of it: JAX's cache has nothing of that name, and programs from there may not tell all."""
        return self._calling(self.function, f"draft_{uuid4().hex}")

    def call(self, exported: export.Exported) -> Any:
        """The step, jitted, as it was exported."""
        return self._calling(exported.call, exported.fun_name).step

    def _calling(self, function: Callable, name: str) -> "Recipe":
        """The same of another function and name."""

        @wraps(self.function)  # arguments are donated by name
        def run(*arguments, **keywords):
            return function(*arguments, **keywords)

        run.__name__ = name
        return replace(self, function=run)

    @property
    def key(self) -> str:
        """Tells it from all recipes of an engine's steps with the same back end."""
        leaves, tree = jax.tree.flatten((self.arguments, dict(self.keywords)))
        shapes = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
        return repr((self.name, str(tree), shapes, sorted(self.options.items())))


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


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _placed_shape(array: Any) -> jax.ShapeDtypeStruct:
    """With its sharding, if it lies on several devices."""
    sharding = array.sharding if mesh_of(array) is not None else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


for _kind in (KVState, LayerKV, SampleInputs, Sampled, SamplingState):
    export.register_namedtuple_serialization(_kind, serialized_name=f"jpaged.{_kind.__name__}")


class Recipes:
    """Everything that an engine compiles.

    Args:
        split: The model.
        shapes: Shapes of the device's arrays.
        config: The runtime's numbers.
        shared: Calls what programs have in common.
    """

    def __init__(
        self,
        split: SplitModel,
        shapes: Shapes,
        config: RuntimeConfig,
        shared: SharedCalls | None = None,
    ):
        self._split, self._shapes, self._config = split, shapes, config
        self._leaves = tuple(map(_placed_shape, split.leaves))
        self._mesh = split.mesh
        self._backend = {"backend": config.backend}
        is_split = shapes.splits_vocabulary
        self._levels = sampler_levels(config, splits_vocabulary=is_split)
        self._split_vocabulary = {"is_split": is_split}
        self._logits_lie = PartitionSpec(None, AXIS) if is_split else ON_EACH
        self._shared = {"shared": shared or SharedCalls(config.backend)}

    def __iter__(self) -> Iterator[Recipe]:
        """Of programs with the same products, the one that has the most to measure comes first; a
        decode step before its bursts, and the smallest before all: the Mosaic kernel it may have is
        compiled only while nothing else is."""
        buckets, shapes, config = self._config.buckets, self._shapes, self._config
        smallest, *larger = buckets.decode_seqs
        for seqs in (smallest, *reversed(larger)):
            yield self._decode(seqs, buckets.logits_rows(seqs))
            if seqs in buckets.burst_seqs:
                for level in BURST_LEVELS:
                    yield self._decode_burst(seqs, level)
        most = buckets.prefill_seqs[-1]
        for shape in sorted(buckets.prefill_shapes, key=lambda it: (it[1] != most, -it[0])):
            yield self._prefill(*shape)
        yield from self.without_pool()
        state, kv, rows = shapes.sampling, shapes.kv, int32(config.num_rows)
        loaded = int32(2 * LOADED_ROWS + 3 * LOADED_TOKENS)
        bias = jax.ShapeDtypeStruct((config.vocab_size,), jnp.float32)
        pairs = int32(BLOCK_COPIES_CHUNK)
        copy_blocks = partial(copy_blocks_step, **self._backend)
        for name, step, arguments, results in (
            ("load_rows", load_rows, (state, loaded), ON_EACH),
            ("load_bias", load_bias, (state, int32(), bias), ON_EACH),
            ("copy_blocks", copy_blocks, (kv, pairs, pairs), WITH_POOL),
            ("fork_rows", fork_rows_step, (kv, rows, rows), WITH_POOL),
        ):
            recipe = Recipe((name, None), step, arguments, donate=("state",))
            yield recipe.on(self._mesh, results)
        for size in chunk_sizes(kv.pool, config.num_host_blocks):
            yield from swap_recipes(kv, size)

    def without_pool(self) -> Iterator[Recipe]:
        """Those that are the same whatever the pool's size."""
        for tokens in self._config.buckets.prefill_tokens:
            yield self._prompt_logprobs(tokens)
        for seqs in self._config.buckets.sample_seqs:
            yield self._mask(seqs)
            for level in reversed(self._levels):
                yield self._sample(seqs, level)

    def largest(self) -> tuple[Recipe, Recipe]:
        """The forward and the sampling program that take the most memory on top of what stays. The
        pool's size does not enter it, so any `num_blocks` gives the same answer."""
        buckets = self._config.buckets
        prefill = self._prefill(*max(buckets.prefill_shapes))
        return prefill, self._sample(max(buckets.decode_seqs), EVERYTHING)

    def _decode(self, seqs: int, rows: int) -> Recipe:
        step = self._split.bind(decode_step, batch_size=seqs, **self._backend)
        recipe = self._forward(("decode", seqs), step, decode_packed_shape(rows), seqs)
        return recipe.on(self._mesh, (self._logits_lie, ON_EACH, WITH_POOL))

    def _decode_burst(self, seqs: int, level: SamplerLevel) -> Recipe:
        step = self._split.bind(decode_burst_step, **self._sampling(level))
        packed = self._config.num_scheduler_steps, *decode_packed_shape(seqs)
        burst = self._forward(("decode_burst", (seqs, level)), step, packed, seqs)
        keywords = {**burst.keywords, "sampling": self._state_at(level)}
        burst = replace(burst, keywords=keywords, donate=("state", "last_tokens", "sampling"))
        return burst.on(self._mesh, (ON_EACH, ON_EACH, ON_EACH, WITH_POOL))

    def _prefill(self, tokens: int, seqs: int) -> Recipe:
        options = {**self._backend, **self._shared}
        step = self._split.bind(prefill_step, num_tokens=tokens, batch_size=seqs, **options)
        packed = prefill_packed_shape(tokens, seqs, self._config.max_blocks_per_seq)
        recipe = self._forward(("prefill", (tokens, seqs)), step, packed, tokens)
        return recipe.on(self._mesh, (self._logits_lie, ON_EACH, ON_EACH, WITH_POOL))

    def _forward(self, name: Name, step: Callable, packed: tuple[int, ...], rows: int) -> Recipe:
        """A program of all layers, whose products have `rows` rows."""
        kv, last_tokens = self._shapes.kv, self._shapes.last_tokens
        keywords = {"state": kv, "last_tokens": last_tokens, "packed": int32(*packed)}
        if self._shapes.peers is not None:
            keywords["peers"] = self._shapes.peers
        products = self._products("layers", rows)
        return Recipe(name, step, (self._leaves,), keywords, ("state",), products)

    def _prompt_logprobs(self, tokens: int) -> Recipe:
        options = {"max_logprobs": MAX_LOGPROBS, **self._backend}
        step = self._split.bind(prompt_logprobs_step, **options)
        width, chunk = self._shapes.hidden, int32(PROMPT_LOGPROBS_CHUNK)
        hidden = jax.ShapeDtypeStruct((tokens, *width.shape), width.dtype)
        keywords = {"hidden": hidden, "indices": chunk, "targets": chunk}
        products = self._products("head", PROMPT_LOGPROBS_CHUNK)
        name = "prompt_logprobs", tokens
        recipe = Recipe(name, step, (self._leaves,), keywords, products=products, needs_pool=False)
        return recipe.on(self._mesh)

    def _sample(self, seqs: int, level: SamplerLevel) -> Recipe:
        step = partial(sample_step, **self._sampling(level))
        counted = jax.ShapeDtypeStruct((seqs,), jnp.bool_)
        inputs = SampleInputs._make([int32(seqs), counted, int32(seqs, ROW_WIDTH), int32(seqs)])
        logits, state = self._logits(seqs), self._state_at(level)
        keywords = {"last_tokens": self._shapes.last_tokens, "sampling": state}
        name, donate = ("sample", (seqs, level)), ("last_tokens", "sampling")
        recipe = Recipe(name, step, (logits, inputs), keywords, donate, needs_pool=False)
        return recipe.on(self._mesh)

    def _mask(self, seqs: int) -> Recipe:
        step = partial(mask_step, **self._split_vocabulary)
        arguments = self._logits(seqs), int32(seqs, self._config.mask_width)
        name, donate = ("mask", seqs), ("logits",)
        recipe = Recipe(name, step, arguments, donate=donate, needs_pool=False)
        return recipe.on(self._mesh, self._logits_lie)

    def _logits(self, rows: int) -> jax.ShapeDtypeStruct:
        """What a forward program leaves for the sampling of so many rows."""
        lie = None if self._mesh is None else NamedSharding(self._mesh, self._logits_lie)
        return jax.ShapeDtypeStruct((rows, self._config.vocab_size), jnp.float32, sharding=lie)

    def _products(self, part: str, rows: int) -> tuple[str, int] | None:
        """Nothing where the compiler measures nothing."""
        return None if self._config.backend is Backend.XLA else (part, rows)

    def _sampling(self, level: SamplerLevel) -> dict[str, Any]:
        options = {**self._backend, **self._shared, **self._split_vocabulary}
        return {"level": level, "max_logprobs": MAX_LOGPROBS, **options}

    def _state_at(self, level: SamplerLevel) -> SamplingState | None:
        return self._shapes.sampling if SamplerLevel.ADJUSTED in level else None


def swap_recipes(state: KVState, size: int) -> tuple[Recipe, Recipe]:
    """`gather_blocks_step` and `scatter_blocks_step` for `size` blocks."""
    ids, mesh, lies = int32(size), mesh_of(state), ON_EACH
    blocks = jax.eval_shape(gather_blocks_step, state.pool, ids)
    if mesh is not None:  # one axis more than the pool's: its arrays
        sharding = sharding_of(mesh, HEADS_AXIS + 1)
        blocks = jax.ShapeDtypeStruct(blocks.shape, blocks.dtype, sharding=sharding)
        lies = sharding.spec
    gather = Recipe(("gather_blocks", size), gather_blocks_step, (state.pool, ids))
    name, arguments = ("scatter_blocks", size), (state, ids, blocks)
    scatter = Recipe(name, scatter_blocks_step, arguments, donate=("state",))
    return gather.on(mesh, lies), scatter.on(mesh, (WITH_POOL, ON_EACH))
