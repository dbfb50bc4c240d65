"""The programs that a runner calls, and the shapes of the arrays that they work on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jpaged.models.config import ModelConfig
from jpaged.models.sharding import axis_sharding, global_shape_struct, per_device_shape, tree_mesh
from jpaged.runtime.kv_cache import HEADS_AXIS, KVState, make_pool
from jpaged.runtime.peer_memory import peer_header_shape
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import (
    FULL_LEVEL,
    SCORED_GREEDY,
    SamplerLevel,
    SamplingState,
    init_sampling_state,
)
from jpaged.runtime.swap import gather_blocks_step

PROMPT_LOGPROBS_CHUNK = 64
"""Prompt tokens whose logits exist at once; a whole prompt's would not fit next to the pool."""

BLOCK_COPIES_CHUNK = 64
"""Blocks copied by one launch."""

BURST_LEVELS = (SCORED_GREEDY, SamplerLevel.TRUNCATED)
"""Sampling levels of bursts: a burst runs at the first that does all it needs."""


@dataclass(frozen=True)
class SplitModel:
    """A model taken apart once: its definition, and its parameters as a flat tuple.

    Steps take the flat leaves, so that a launch costs no traversal in Python.
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

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the model; None if it is on one."""
        return tree_mesh(self.leaves)

    @property
    def shard_leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of what each device has of the parameters."""
        return tuple(jax.ShapeDtypeStruct(per_device_shape(it), it.dtype) for it in self.leaves)

    def bind(self, step: Callable, **static: Any) -> Callable:
        """The step as a function of the leaves, a device's own, and its other arguments."""

        def run(leaves, *inputs, **arguments):
            model = nnx.merge(self.definition, jax.tree.unflatten(self.treedef, leaves))
            return step(model, *inputs, **arguments, **static)

        run.__name__ = step.__name__
        return run


@dataclass(frozen=True)
class DeviceShapes:
    """Shapes and dtypes of the arrays that live on the device; with several devices, of the arrays
    over all of them, the pool split by its heads and all else on each."""

    kv: KVState
    last_tokens: jax.ShapeDtypeStruct
    sampling: SamplingState
    hidden: jax.ShapeDtypeStruct
    peer_header: jax.ShapeDtypeStruct | None = None
    """Headers of the devices' peer memories, side by side; None where sums do not go through it."""
    is_vocab_sharded: bool = False
    """Whether each device has the logits of its own part of the vocabulary alone."""

    @staticmethod
    def of(
        model: ModelConfig, config: RuntimeConfig, dtype, mesh: Mesh | None = None
    ) -> "DeviceShapes":
        """The shapes a configuration implies.

        Args:
            model: What each device computes.
            config: The runtime's numbers.
            dtype: Of the weights, and of the pool unless the model has another.
            mesh: The devices; None for one.

        Raises:
            ValueError: the model is not the share of one of so many devices.
        """
        if model.tensor_parallel_size != (1 if mesh is None else mesh.size):
            raise ValueError(
                f"tensor_parallel_size={model.tensor_parallel_size} of the model is not the mesh's size: "
                "give `ModelConfig.shard` of it"
            )

        def replicate(tree):
            return jax.tree.map(lambda own: global_shape_struct(mesh, own, None), tree)

        rows, pool_size = config.num_rows, (config.num_blocks, config.block_size)
        pool = jax.eval_shape(lambda: make_pool(model, *pool_size, dtype))
        pool = jax.tree.map(lambda own: global_shape_struct(mesh, own, HEADS_AXIS), pool)
        return DeviceShapes(
            kv=KVState._make((pool, replicate(int32_shape(rows, config.max_blocks_per_seq)))),
            last_tokens=replicate(int32_shape(rows)),
            sampling=replicate(
                jax.eval_shape(lambda: init_sampling_state(rows, config.vocab_size))
            ),
            hidden=jax.ShapeDtypeStruct((model.hidden_size,), dtype),
            peer_header=None
            if mesh is None or not config.has_peer_memory
            else peer_header_shape(mesh),
            is_vocab_sharded=model.num_embedding_rows < model.vocab_size,
        )

    @property
    def persistent_arrays(self) -> dict[str, Any]:
        """What stays on the device between steps, by the names that steps have for it."""
        persistent_arrays = {
            "state": self.kv,
            "last_tokens": self.last_tokens,
            "sampling": self.sampling,
        }
        return (
            persistent_arrays
            if self.peer_header is None
            else {**persistent_arrays, "peer_header": self.peer_header}
        )

    def logits(self, num_rows: int) -> jax.ShapeDtypeStruct:
        """What a step leaves for its sampling."""
        mesh = tree_mesh(self.kv) if self.is_vocab_sharded else None
        sharding = None if mesh is None else axis_sharding(mesh, 1)
        shape = num_rows, self.sampling.token_state.shape[1]
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def blocks(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        """Blocks gathered from the pool."""
        blocks, mesh = (
            jax.eval_shape(gather_blocks_step, self.kv, int32_shape(num_blocks)),
            tree_mesh(self.kv),
        )
        # One axis more than the pool's: its arrays.
        sharding = None if mesh is None else axis_sharding(mesh, HEADS_AXIS + 1)
        return jax.ShapeDtypeStruct(blocks.shape, blocks.dtype, sharding=sharding)


def int32_shape(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an array of int32."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def sampler_levels(
    config: RuntimeConfig, *, is_vocab_sharded: bool = False
) -> tuple[SamplerLevel, ...]:
    """The levels compiled; a batch runs at the first that does all it needs. Where devices split
    the vocabulary, those that need no whole rows of logits (`sample`) are among them and first."""
    levels = SCORED_GREEDY, SamplerLevel.RANDOM, SamplerLevel.TRUNCATED, FULL_LEVEL
    if config.few_programs:
        levels = SamplerLevel.GREEDY, SCORED_GREEDY, FULL_LEVEL
    if not is_vocab_sharded:
        return levels
    first = SamplerLevel.GREEDY, SamplerLevel.RANDOM
    return *first, *(level for level in levels if level not in first)


ProgramName = tuple[str, Any]
"""A program's kind and its key among those, mostly the shape of what it computes; None of one."""

Programs = Mapping[ProgramName, Any]
"""Compiled programs; `jpaged.runtime.steps.PROGRAMS` says what each kind does."""
