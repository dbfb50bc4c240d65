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

from jpaged.models.sharding import mesh_of, on_every_device, over
from jpaged.runtime.kv_cache import KVState
from jpaged.runtime.programs import Name, Shapes, SplitModel, int32
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import EVERYTHING, ROW_WIDTH, Sampled, SamplingState
from jpaged.runtime.steps import (
    INPUTS,
    PROGRAMS,
    PlanProgram,
    SampleInputs,
    Sizes,
    StepProgram,
)
from jpaged.sampling_params import MAX_LOGPROBS
from pallas_kernels import Backend, LayerKV

# JAX exports these kernel calls only if asked to, because another version of JAX may not read them.
# A stored program is only used with the version that exported it.
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


@dataclass(frozen=True)
class Recipe:
    """What a program is compiled from: a step function, and the shapes of its arguments.

    `donate` names the arguments whose memory the program reuses. Programs with equal `products`
    have the same matrix products, except those of the output head, which computes `logits_rows`
    rows. A program that does not need the pool does not depend on the size of the pool. `options`
    are XLA's compiler options by name; the code that compiles the lowered program must pass them.

    With tensor parallelism, the shapes are those of the global arrays. The function takes one
    device's shards, until `on` maps it over the mesh.
    """

    name: Name
    function: Callable
    arguments: tuple = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    donate: tuple[str, ...] = ()
    products: tuple[str, int] | None = None
    logits_rows: int = 0
    needs_pool: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def on(self, mesh: Mesh | None, results: Any = ON_EACH) -> "Recipe":
        """Return a recipe that runs on all devices of a mesh, with `COLLECTIVES_IN_LINE`.

        Args:
            mesh: The devices. None: return this recipe.
            results: The `PartitionSpec` of each result, or one for all of them.
        """
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
        """Return this recipe under a unique name, to inspect the compiled program.

        JAX's cache has no program of that name, so the program is compiled anew. A program from the
        cache may not report its memory.
        """
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
    """Calls functions that several programs have; lowers each once per set of shapes.

    JAX's settings and the device must be the same for all calls.

    Args:
        backend: The implementation of the kernels. `Backend.TRITON` lowers for an NVIDIA GPU, even
            if there is none here. Other backends lower for the local device.
    """

    def __init__(self, backend: Backend):
        self._platforms = ("cuda",) if backend is Backend.TRITON else None
        self._lowered: dict[tuple, export.Exported] = {}

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
        shapes: Shapes,
        config: RuntimeConfig,
        shared: SharedCalls | None = None,
    ):
        self._split, self._shapes, self._config = split, shapes, config
        self._leaves = tuple(map(_placed_shape, split.leaves))
        self._sampling_table = np.zeros((config.num_rows, ROW_WIDTH), np.int32)
        self._options = {
            "backend": config.backend,
            "shared": shared or SharedCalls(config.backend),
            "is_split": shapes.splits_vocabulary,
            "max_logprobs": MAX_LOGPROBS,
        }

    def __iter__(self) -> Iterator[Recipe]:
        """Decode steps of the smallest batch come first, with their bursts: XLA compiles the kernel
        of a fused layer, which only they have, while it compiles nothing else."""
        smallest = self._config.buckets.decode_seqs[0]

        def is_later(name: Name) -> bool:
            kind, key = name
            sizes = PROGRAMS[kind].sizes(self._config, key)
            return not sizes.get("batch_size") == sizes.get("num_tokens") == smallest

        return map(self.__getitem__, sorted(self._names(PROGRAMS.values()), key=is_later))

    def __getitem__(self, name: Name) -> Recipe:
        kind, key = name
        step, config, held = PROGRAMS[kind], self._config, self._shapes.held
        sizes = step.sizes(config, key)
        keywords = {name: held[name] for name in step.held(held, sizes)}
        keywords |= {name: self._shape(name, sizes) for name in step.inputs}
        if isinstance(step, PlanProgram):
            packed = step.packer(config, self._sampling_table, key)((), ())
            keywords["packed"] = int32(*packed.shape)
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
            products=None if config.backend is Backend.XLA else step.products(sizes),
            logits_rows=sizes.get("num_rows", 0),
            needs_pool=step.needs_pool,
        )
        if self._split.mesh is None:
            return recipe
        lie = [
            _specs(keywords[name] if name in keywords else self._shape(name, sizes))
            for name in step.results
        ]
        return recipe.on(self._split.mesh, tuple(lie) if len(lie) > 1 else lie[0])

    def without_pool(self) -> Iterator[Recipe]:
        """Those that are the same whatever the pool's size."""
        steps = (step for step in PROGRAMS.values() if not step.needs_pool)
        return map(self.__getitem__, self._names(steps))

    def largest(self) -> tuple[Recipe, Recipe]:
        """The forward and the sampling program that take the most memory on top of what stays. The
        pool's size does not enter it, so any `num_blocks` gives the same answer."""
        buckets = self._config.buckets
        prefill, sample = max(buckets.prefill_shapes), (max(buckets.decode_seqs), EVERYTHING)
        return self["prefill", prefill], self["sample", sample]

    def _names(self, steps: Iterable[StepProgram]) -> Iterator[Name]:
        config, shapes = self._config, self._shapes
        return ((step.name, key) for step in steps for key in step.keys(config, shapes))

    def _shape(self, name: str, sizes: Sizes) -> Any:
        """The shape of an input or result; None if it lies whole on every device."""
        return INPUTS[name](self._config, self._shapes, sizes) if name in INPUTS else None


def _specs(tree: Any) -> Any:
    """How results lie on the devices: as an argument of the same name, else whole on each."""
    if tree is None:
        return ON_EACH
    return jax.tree.map(lambda it: it.sharding.spec if it.sharding is not None else ON_EACH, tree)
