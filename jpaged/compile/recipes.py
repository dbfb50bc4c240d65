"""Recipes of an engine's programs. A recipe is the input of a compilation: a step function and the
shapes of its arguments."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any
from uuid import uuid4

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.compile.triton_dialect import register_triton_dialect
from jpaged.config import LogprobsMode
from jpaged.models.sharding import global_shape_struct, tree_mesh, wrap_in_shard_map
from jpaged.runtime.drafting import RowTokens
from jpaged.runtime.kv_cache import KVState
from jpaged.runtime.programs import DeviceShapes, ProgramName, SplitModel, int32_shape
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import (
    FULL_LEVEL,
    ROW_WIDTH,
    SampledTokens,
    SamplerLevel,
    SamplingState,
)
from jpaged.runtime.step_programs import (
    INPUT_SHAPES,
    PROGRAMS,
    PlanProgram,
    ProgramSizes,
    StepProgram,
)
from jpaged.runtime.steps import SampleInputs
from jpaged.sampling_params import MAX_LOGPROBS
from pallas_kernels import Backend, LayerKV

# By default, JAX refuses to export programs with these kernel calls, because another version of JAX
# may be unable to load such programs. Here, the same version of JAX exports and loads a program, so
# allow these calls.
ALLOWED_KERNEL_CALLS = [
    export.DisabledSafetyCheck.custom_call(target)
    for target in ("__gpu$xla.gpu.triton", "triton_kernel_call_ffi", "mosaic_gpu_v2")
]

SYNCHRONOUS_COLLECTIVES = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
"""XLA compiler options that run collectives on the stream of the step. By default XLA may run a
collective on another stream. A step waits for every collective anyway, so switching streams would
only take time (docs/decisions/0015)."""

REPLICATED = PartitionSpec()
"""Sharding of a result of which every device has a complete copy."""


@dataclass(frozen=True)
class Recipe:
    """Describes one program to compile: the step function, the shapes of its arguments, and
    compiler options.

    With tensor parallelism, `arguments` and `keywords` are shapes of global arrays. There are two
    kinds of step functions:

    - A step function of jpaged takes the shards of one device. `on_mesh` wraps the function, so
      that the wrapper takes global arrays.
    - A step function that calls a user's model takes global arrays. `partitioned` lets XLA split
      the program over the devices.

    Attributes:
        name: Name of the program: a pair of the step's name and the key of a variant of the step.
        function: The step function.
        arguments: Shapes of the positional arguments.
        keywords: Shapes of the keyword arguments, by name.
        donate: Names of the arguments whose memory the program reuses for results.
        gemm_key: Pair (part of the model, number of rows) that identifies the program's matrix
            products. Programs with equal keys have the same matrix products, except in the output
            head. None if the program has no matrix products that XLA measures.
        num_logits_rows: Number of rows that the output head computes.
        needs_pool: Whether the program depends on the size of the KV pool.
        options: XLA's compiler options by name. Code that compiles the lowered program must pass
            these options.
        logprobs_mode: Kind of values in the scores of sampled tokens, such as log-probabilities or
            logits; None if the program returns no such scores.
        digest: Function that returns a digest of the user's functions that the program calls; None
            if the program has only code of jpaged.
        out_shardings: Shardings of the results, or a tree prefix of the shardings, if XLA
            partitions the program (see `partitioned`). None for other programs.
    """

    name: ProgramName
    function: Callable
    arguments: tuple = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    donate: tuple[str, ...] = ()
    gemm_key: tuple[str, int] | None = None
    num_logits_rows: int = 0
    needs_pool: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    logprobs_mode: LogprobsMode | None = None
    digest: Callable[[], str] | None = None
    out_shardings: Any = None

    def on_mesh(self, mesh: Mesh | None, results: Any = REPLICATED) -> "Recipe":
        """Return a recipe that runs on all devices of a mesh, with `SYNCHRONOUS_COLLECTIVES`.

        Args:
            mesh: Mesh of the devices. None: return this recipe.
            results: `PartitionSpec` of each result, or one `PartitionSpec` for all results.
        """
        if mesh is None:
            return self
        recipe = self._with_global_shapes(mesh)
        function = wrap_in_shard_map(
            self.function, mesh, recipe.arguments, recipe.keywords, results
        )
        return replace(recipe, function=function)

    def partitioned(self, mesh: Mesh, results: Any = REPLICATED) -> "Recipe":
        """Return a recipe whose function takes global arrays. XLA partitions the program over a
        mesh.

        Args:
            mesh: Mesh of the devices.
            results: `PartitionSpec` of each result, or one `PartitionSpec` for all results.
        """
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            results,
            is_leaf=lambda it: isinstance(it, PartitionSpec),
        )
        return replace(self._with_global_shapes(mesh), out_shardings=shardings)

    def _with_global_shapes(self, mesh: Mesh) -> "Recipe":
        """Return a copy of this recipe for global arrays on a mesh.

        Arguments without a sharding become replicated arrays. The copy has the compiler options
        `SYNCHRONOUS_COLLECTIVES` in addition to the recipe's options.
        """

        def with_sharding(it: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return global_shape_struct(mesh, it, None) if it.sharding is None else it

        arguments, keywords = jax.tree.map(with_sharding, (self.arguments, dict(self.keywords)))
        options = {**self.options, **SYNCHRONOUS_COLLECTIVES}
        return replace(self, arguments=arguments, keywords=keywords, options=options)

    @property
    def jitted_step(self) -> Any:
        """The jitted step function."""
        more = {} if self.out_shardings is None else {"out_shardings": self.out_shardings}
        return jax.jit(self.function, donate_argnames=self.donate, **more)

    def exported(self, platforms: tuple[str, ...] | None = None) -> export.Exported:
        """Trace the step function, and return the exported program, which can be stored.

        Args:
            platforms: Platforms to lower for; None for the platform of the local device.
        """
        exporting = export.export(
            self.jitted_step, platforms=platforms, disabled_checks=ALLOWED_KERNEL_CALLS
        )
        return exporting(*self.arguments, **self.keywords)

    def lower(self, exported: export.Exported | None = None) -> Any:
        """Lower the program.

        Args:
            exported: Result of the method `exported`; None to trace the recipe's step function.
        """
        jitted_step = self.jitted_step if exported is None else self.step_from_export(exported)
        return jitted_step.lower(*self.arguments, **self.keywords)

    def compile(self, exported: export.Exported | None = None) -> Any:
        """Lower and compile the program, with the recipe's compiler options.

        Args:
            exported: Result of the method `exported`; None to trace the recipe's step function.
        """
        return self.lower(exported).compile(dict(self.options))

    def with_unique_name(self) -> "Recipe":
        """Return this recipe with a unique name, so that the program is compiled and not loaded
        from JAX's cache.

        Use the result to read the memory analysis of the compiled program. A program from the cache
        may have no memory analysis.
        """
        return self._with_function(self.function, f"draft_{uuid4().hex}")

    def step_from_export(self, exported: export.Exported) -> Any:
        """Return a jitted step that calls an exported program of this recipe."""
        return self._with_function(exported.call, exported.fun_name).jitted_step

    def _with_function(self, function: Callable, name: str) -> "Recipe":
        # `wraps` keeps the names of the arguments: `jax.jit` donates arguments by name.
        @wraps(self.function)
        def run(*arguments, **keywords):
            return function(*arguments, **keywords)

        run.__name__ = name
        return replace(self, function=run)

    @property
    def key(self) -> str:
        """Text that identifies the recipe: two recipes with equal keys give the same program."""
        leaves, tree = jax.tree.flatten((self.arguments, dict(self.keywords)))
        shapes = [(leaf.shape, leaf.dtype.name, _sharding_text(leaf)) for leaf in leaves]
        options = sorted(self.options.items())
        digest = () if self.digest is None else (self.digest(),)
        return repr((self.name, str(tree), shapes, options, self.logprobs_mode, *digest))


def _sharding_text(shape: jax.ShapeDtypeStruct) -> str | None:
    """Return the mesh and the `PartitionSpec` of a global array as text; None on one device."""
    sharding = shape.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    return f"{dict(sharding.mesh.shape)} {sharding.spec}"


class SharedCalls:
    """Calls functions that several programs share. Each function is lowered once per set of
    argument shapes, and not once per program.

    JAX's settings and the device must be the same for all calls.

    Args:
        backend: Implementation of the kernels. `Backend.TRITON` lowers for an NVIDIA GPU, even on a
            machine without a GPU. Other backends lower for the local device.
    """

    def __init__(self, backend: Backend):
        self._platforms = ("cuda",) if backend is Backend.TRITON else None
        self._exported: dict[tuple, export.Exported] = {}

    def __call__(self, function: partial, *arrays: Any, **named: Any) -> Any:
        """Call `function` with trees of arrays, and return the result.

        Args:
            function: A `partial` of a module-level function, with hashable keywords.
            arrays: Positional arguments of `function`.
            named: Keyword arguments of `function`.
        """
        shapes, named_shapes = jax.tree.map(_shape, (arrays, named))
        leaves, tree = jax.tree.flatten((shapes, named_shapes))
        facts = tuple((it.shape, it.dtype) for it in leaves)
        key = function.func, tuple(sorted(function.keywords.items())), tree, facts
        if key not in self._exported:
            lowering = export.export(
                jax.jit(function), platforms=self._platforms, disabled_checks=ALLOWED_KERNEL_CALLS
            )
            self._exported[key] = lowering(*shapes, **named_shapes)
        return self._exported[key].call(*arrays, **named)


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _sharded_shape(array: Any) -> jax.ShapeDtypeStruct:
    sharding = array.sharding if tree_mesh(array) is not None else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


for _kind in (KVState, LayerKV, RowTokens, SampleInputs, SampledTokens, SamplingState):
    export.register_namedtuple_serialization(_kind, serialized_name=f"jpaged.{_kind.__name__}")

register_triton_dialect()


class Recipes:
    """Recipes of all programs of an engine, by program name.

    A program name is a pair (step, key), such as ("decode", 8). `PROGRAMS` lists the steps. A key
    selects one compiled variant of a step, such as the variant for 8 rows.

    Args:
        split: The model, split into its definition and its parameters. The parameters may be shapes
            instead of arrays.
        shapes: Shapes of the arrays that stay on the device.
        config: Sizes and limits of the runtime.
        shared_calls: Object that calls functions which several programs share; None to create one.
    """

    def __init__(
        self,
        split: SplitModel,
        shapes: DeviceShapes,
        config: RuntimeConfig,
        shared_calls: SharedCalls | None = None,
    ):
        self._split, self._shapes, self._config = split, shapes, config
        self._leaves = tuple(map(_sharded_shape, split.leaves))
        self._sampling_table = np.zeros((config.num_rows, ROW_WIDTH), np.int32)
        self._options = {
            "backend": config.backend,
            "call_shared": shared_calls or SharedCalls(config.backend),
            "is_vocab_sharded": shapes.is_vocab_sharded,
            "max_logprobs": MAX_LOGPROBS,
            "logprobs_mode": config.logprobs_mode,
        }

    def __iter__(self) -> Iterator[Recipe]:
        """Iterate over all recipes. The programs whose steps have the fewest tokens come first.

        Only these programs contain the kernel of a fused layer. XLA compiles this kernel only while
        the process compiles nothing else. If the programs with the kernel came later, they would
        wait for all compilations that have already started.
        """
        smallest = self._config.buckets.decode_batch_sizes[0]

        def is_later(name: ProgramName) -> bool:
            kind, key = name
            return PROGRAMS[kind].sizes(self._config, key).get("num_tokens") != smallest

        return map(self.__getitem__, sorted(self._program_names(PROGRAMS.values()), key=is_later))

    def __getitem__(self, name: ProgramName) -> Recipe:
        kind, key = name
        step, config, persistent_arrays = (
            PROGRAMS[kind],
            self._config,
            self._shapes.persistent_arrays,
        )
        sizes = step.sizes(config, key)
        keywords = {
            name: persistent_arrays[name]
            for name in step.persistent_arrays(persistent_arrays, sizes)
        }
        keywords |= {name: self._value_shape(name, sizes) for name in step.inputs}
        if isinstance(step, PlanProgram):
            packed = step.make_packer(config, self._sampling_table, key)((), ())
            keywords["packed"] = int32_shape(*packed.shape)
        bound = {name: it for name, it in (self._options | sizes).items() if name in step.arguments}
        function, arguments, digest = partial(step.function, **bound), (), None
        if "model" in step.arguments:
            function, arguments = self._split.bind(step.function, **bound), (self._leaves,)
            if self._split.digests is not None:
                counts = sizes.get("num_tokens"), step.logits_row_counts(sizes)
                digest = partial(self._split.digests.digest, *counts)
        recipe = Recipe(
            name,
            function,
            arguments,
            keywords,
            donate=tuple(result for result in step.results if result in step.arguments),
            # On a CPU, XLA does not measure matrix products, so a program needs no `gemm_key`.
            gemm_key=None if config.backend is Backend.XLA else step.gemm_key(sizes),
            num_logits_rows=sizes.get("num_rows", 0),
            needs_pool=step.needs_pool,
            logprobs_mode=config.logprobs_mode
            if SamplerLevel.LOGPROBS in sizes.get("level", SamplerLevel.GREEDY)
            else None,
            digest=digest,
        )
        if self._split.mesh is None:
            return recipe
        specs = [
            _partition_specs(keywords[name] if name in keywords else self._value_shape(name, sizes))
            for name in step.results
        ]
        results = tuple(specs) if len(specs) > 1 else specs[0]
        if self._split.takes_global_arrays and "model" in step.arguments:
            return recipe.partitioned(self._split.mesh, results)
        return recipe.on_mesh(self._split.mesh, results)

    def without_pool(self) -> Iterator[Recipe]:
        """Return the recipes of all programs that do not depend on the size of the KV pool."""
        steps = (step for step in PROGRAMS.values() if not step.needs_pool)
        return map(self.__getitem__, self._program_names(steps))

    def largest_step(self) -> tuple[Recipe, Recipe]:
        """Return the prefill program and the sampling program that need the largest workspace.

        The result does not depend on the number of blocks in the pool.
        """
        buckets = self._config.buckets
        prefill, sample = max(buckets.prefill_shapes), (max(buckets.decode_batch_sizes), FULL_LEVEL)
        return self["prefill", prefill], self["sample", sample]

    def _program_names(self, steps: Iterable[StepProgram]) -> Iterator[ProgramName]:
        config, shapes = self._config, self._shapes
        return ((step.name, key) for step in steps for key in step.keys(config, shapes))

    def _value_shape(self, name: str, sizes: ProgramSizes) -> Any:
        """Return the shape of a step's input or result.

        Return None if `INPUT_SHAPES` does not list the value: the value is then a result that every
        device has as a whole.
        """
        return (
            INPUT_SHAPES[name](self._config, self._shapes, sizes) if name in INPUT_SHAPES else None
        )


def _partition_specs(tree: Any) -> Any:
    """Return the `PartitionSpec` of each shape in a tree.

    A shape without a sharding has the specification `REPLICATED`. If `tree` is None, return
    `REPLICATED`.
    """
    if tree is None:
        return REPLICATED
    return jax.tree.map(
        lambda it: it.sharding.spec if it.sharding is not None else REPLICATED, tree
    )
