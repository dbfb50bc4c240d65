"""What each program of an engine is compiled from: a step, and the shapes of its arguments."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any
from uuid import uuid4

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, PartitionSpec

from jpaged.models.sharding import global_shape_struct, tree_mesh, wrap_in_shard_map
from jpaged.runtime.kv_cache import KVState
from jpaged.runtime.programs import DeviceShapes, ProgramName, SplitModel, int32_shape
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import FULL_LEVEL, ROW_WIDTH, SampledTokens, SamplingState
from jpaged.runtime.steps import (
    INPUT_SHAPES,
    PROGRAMS,
    PlanProgram,
    ProgramSizes,
    SampleInputs,
    StepProgram,
)
from jpaged.sampling_params import MAX_LOGPROBS
from pallas_kernels import Backend, LayerKV

# JAX exports these kernel calls only if asked to, because another version of JAX may not read them.
# A stored program is only used with the version that exported it.
ALLOWED_KERNEL_CALLS = [
    export.DisabledSafetyCheck.custom_call(target)
    for target in ("__gpu$xla.gpu.triton", "triton_kernel_call_ffi", "mosaic_gpu_v2")
]


SYNCHRONOUS_COLLECTIVES = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
"""XLA's compiler option that runs collectives on the stream of the step. By default they may have
another stream, but the step waits for each of them anyway, and changing streams twice takes time
(docs/decisions/0015)."""

REPLICATED = PartitionSpec()
"""How results lie that every device has."""


@dataclass(frozen=True)
class Recipe:
    """What a program is compiled from: a step function, and the shapes of its arguments.

    `donate` names the arguments whose memory the program reuses. Programs with equal `gemm_key`
    have the same matrix products, except those of the output head, which computes `num_logits_rows`
    rows. A program that does not need the pool does not depend on the size of the pool. `options`
    are XLA's compiler options by name; the code that compiles the lowered program must pass them.

    With tensor parallelism, the shapes are those of the global arrays. The function takes one
    device's shards, until `on_mesh` maps it over the mesh.
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

    def on_mesh(self, mesh: Mesh | None, results: Any = REPLICATED) -> "Recipe":
        """Return a recipe that runs on all devices of a mesh, with `SYNCHRONOUS_COLLECTIVES`.

        Args:
            mesh: The devices. None: return this recipe.
            results: The `PartitionSpec` of each result, or one for all of them.
        """
        if mesh is None:
            return self

        def placed(it: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return global_shape_struct(mesh, it, None) if it.sharding is None else it

        arguments, keywords = jax.tree.map(placed, (self.arguments, dict(self.keywords)))
        function = wrap_in_shard_map(self.function, mesh, arguments, keywords, results)
        options = {**self.options, **SYNCHRONOUS_COLLECTIVES}
        return replace(
            self, function=function, arguments=arguments, keywords=keywords, options=options
        )

    @property
    def jitted_step(self) -> Any:
        """The jitted step."""
        return jax.jit(self.function, donate_argnames=self.donate)

    def exported(self, platforms: tuple[str, ...] | None = None) -> export.Exported:
        """Trace and lower to what can be kept, for the device at hand unless told."""
        exporting = export.export(
            self.jitted_step, platforms=platforms, disabled_checks=ALLOWED_KERNEL_CALLS
        )
        return exporting(*self.arguments, **self.keywords)

    def lower(self, exported: export.Exported | None = None) -> Any:
        """Lower what was exported, or trace first."""
        jitted_step = self.jitted_step if exported is None else self.step_from_export(exported)
        return jitted_step.lower(*self.arguments, **self.keywords)

    def compile(self, exported: export.Exported | None = None) -> Any:
        """Lower and compile."""
        return self.lower(exported).compile(dict(self.options))

    def with_unique_name(self) -> "Recipe":
        """Return this recipe under a unique name, to inspect the compiled program.

        JAX's cache has no program of that name, so the program is compiled anew. A program from the
        cache may not report its memory.
        """
        return self._with_function(self.function, f"draft_{uuid4().hex}")

    def step_from_export(self, exported: export.Exported) -> Any:
        """The step, jitted, as it was exported."""
        return self._with_function(exported.call, exported.fun_name).jitted_step

    def _with_function(self, function: Callable, name: str) -> "Recipe":
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
    """Calls functions that several programs have; lowers each once per set of shapes.

    JAX's settings and the device must be the same for all calls.

    Args:
        backend: The implementation of the kernels. `Backend.TRITON` lowers for an NVIDIA GPU, even
            if there is none here. Other backends lower for the local device.
    """

    def __init__(self, backend: Backend):
        self._platforms = ("cuda",) if backend is Backend.TRITON else None
        self._exported: dict[tuple, export.Exported] = {}

    def __call__(self, function: partial, *arrays: Any, **named: Any) -> Any:
        """Return the result of `function` for trees of arrays.

        Args:
            function: A `partial` of a function in a module, with hashable keywords.
            arrays, named: Its positional and keyword arguments.
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
    """With its sharding, if it lies on several devices."""
    sharding = array.sharding if tree_mesh(array) is not None else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


for _kind in (KVState, LayerKV, SampleInputs, SampledTokens, SamplingState):
    export.register_namedtuple_serialization(_kind, serialized_name=f"jpaged.{_kind.__name__}")


class Recipes:
    """Everything that an engine compiles: `PROGRAMS` with the shapes of its arguments.

    Args:
        split: The model.
        shapes: Shapes of the device's arrays.
        config: The runtime's numbers.
        shared: Calls what programs have in common.
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
        }

    def __iter__(self) -> Iterator[Recipe]:
        """Decode steps of the smallest batch come first, with their bursts: XLA compiles the kernel
        of a fused layer, which only they have, while it compiles nothing else."""
        smallest = self._config.buckets.decode_batch_sizes[0]

        def is_later(name: ProgramName) -> bool:
            kind, key = name
            sizes = PROGRAMS[kind].sizes(self._config, key)
            return not sizes.get("batch_size") == sizes.get("num_tokens") == smallest

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
        function, arguments = partial(step.function, **bound), ()
        if "model" in step.arguments:
            function, arguments = self._split.bind(step.function, **bound), (self._leaves,)
        recipe = Recipe(
            name,
            function,
            arguments,
            keywords,
            donate=tuple(result for result in step.results if result in step.arguments),
            # The compiler measures none for a CPU.
            gemm_key=None if config.backend is Backend.XLA else step.gemm_key(sizes),
            num_logits_rows=sizes.get("num_rows", 0),
            needs_pool=step.needs_pool,
        )
        if self._split.mesh is None:
            return recipe
        specs = [
            _partition_specs(keywords[name] if name in keywords else self._value_shape(name, sizes))
            for name in step.results
        ]
        return recipe.on_mesh(self._split.mesh, tuple(specs) if len(specs) > 1 else specs[0])

    def without_pool(self) -> Iterator[Recipe]:
        """Those that are the same whatever the pool's size."""
        steps = (step for step in PROGRAMS.values() if not step.needs_pool)
        return map(self.__getitem__, self._program_names(steps))

    def largest_step(self) -> tuple[Recipe, Recipe]:
        """The forward and the sampling program that take the most memory on top of what stays. The
        pool's size does not enter it, so any `num_blocks` gives the same answer."""
        buckets = self._config.buckets
        prefill, sample = max(buckets.prefill_shapes), (max(buckets.decode_batch_sizes), FULL_LEVEL)
        return self["prefill", prefill], self["sample", sample]

    def _program_names(self, steps: Iterable[StepProgram]) -> Iterator[ProgramName]:
        config, shapes = self._config, self._shapes
        return ((step.name, key) for step in steps for key in step.keys(config, shapes))

    def _value_shape(self, name: str, sizes: ProgramSizes) -> Any:
        """The shape of an input or result; None if it lies whole on every device."""
        return (
            INPUT_SHAPES[name](self._config, self._shapes, sizes) if name in INPUT_SHAPES else None
        )


def _partition_specs(tree: Any) -> Any:
    """How results lie on the devices: as an argument of the same name, else whole on each."""
    if tree is None:
        return REPLICATED
    return jax.tree.map(
        lambda it: it.sharding.spec if it.sharding is not None else REPLICATED, tree
    )
