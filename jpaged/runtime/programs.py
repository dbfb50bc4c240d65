"""The programs that a runner calls, and the shapes of the arrays that they work on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jpaged.models.config import ModelConfig
from jpaged.models.sharding import mesh_of, over, own_shape, sharding_of
from jpaged.runtime.kv_cache import HEADS_AXIS, KVState, make_pool
from jpaged.runtime.peer_memory import header_shape
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import (
    EVERYTHING,
    SCORED_GREEDY,
    SamplerLevel,
    SamplingState,
    init_state,
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
        return mesh_of(self.leaves)

    @property
    def own_leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of what each device has of the parameters."""
        return tuple(jax.ShapeDtypeStruct(own_shape(it), it.dtype) for it in self.leaves)

    def bind(self, step: Callable, **static: Any) -> Callable:
        """The step as a function of the leaves, a device's own, and its other arguments."""

        def run(leaves, *inputs, **arguments):
            model = nnx.merge(self.definition, jax.tree.unflatten(self.treedef, leaves))
            return step(model, *inputs, **arguments, **static)

        run.__name__ = step.__name__
        return run


@dataclass(frozen=True)
class Shapes:
    """Shapes and dtypes of the arrays that live on the device; with several devices, of the arrays
    over all of them, the pool split by its heads and all else on each."""

    kv: KVState
    last_tokens: jax.ShapeDtypeStruct
    sampling: SamplingState
    hidden: jax.ShapeDtypeStruct
    peers: jax.ShapeDtypeStruct | None = None
    """Headers of the devices' peer memories, side by side; None where sums do not go through it."""
    splits_vocabulary: bool = False
    """Whether each device has the logits of its own part of the vocabulary alone."""

    @staticmethod
    def of(model: ModelConfig, config: RuntimeConfig, dtype, mesh: Mesh | None = None) -> "Shapes":
        """The shapes a configuration implies.

        Args:
            model: What each device computes.
            config: The runtime's numbers.
            dtype: Of the weights, and of the pool unless the model has another.
            mesh: The devices; None for one.

        Raises:
            ValueError: the model is not the share of one of so many devices.
        """
        if model.num_shares != (1 if mesh is None else mesh.size):
            raise ValueError(
                f"num_shares={model.num_shares} of the model is not the mesh's size: "
                "give `ModelConfig.share` of it"
            )

        def on_all(tree):
            return jax.tree.map(lambda own: over(mesh, own, None), tree)

        rows, pool_size = config.num_rows, (config.num_blocks, config.block_size)
        pool = jax.eval_shape(lambda: make_pool(model, *pool_size, dtype))
        pool = jax.tree.map(lambda own: over(mesh, own, HEADS_AXIS), pool)
        return Shapes(
            kv=KVState._make((pool, on_all(int32(rows, config.max_blocks_per_seq)))),
            last_tokens=on_all(int32(rows)),
            sampling=on_all(jax.eval_shape(lambda: init_state(rows, config.vocab_size))),
            hidden=jax.ShapeDtypeStruct((model.hidden_size,), dtype),
            peers=None if mesh is None or not config.peer_memory else header_shape(mesh),
            splits_vocabulary=model.table_rows < model.vocab_size,
        )

    @property
    def held(self) -> dict[str, Any]:
        """What stays on the device between steps, by the names that steps have for it."""
        held = {"state": self.kv, "last_tokens": self.last_tokens, "sampling": self.sampling}
        return held if self.peers is None else {**held, "peers": self.peers}

    def logits(self, num_rows: int) -> jax.ShapeDtypeStruct:
        """What a step leaves for its sampling."""
        mesh = mesh_of(self.kv) if self.splits_vocabulary else None
        lie = None if mesh is None else sharding_of(mesh, 1)
        shape = num_rows, self.sampling.words.shape[1]
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=lie)

    def blocks(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        """Blocks gathered from the pool."""
        blocks, mesh = (
            jax.eval_shape(gather_blocks_step, self.kv, int32(num_blocks)),
            mesh_of(self.kv),
        )
        # One axis more than the pool's: its arrays.
        lie = None if mesh is None else sharding_of(mesh, HEADS_AXIS + 1)
        return jax.ShapeDtypeStruct(blocks.shape, blocks.dtype, sharding=lie)


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an array of int32."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def sampler_levels(
    config: RuntimeConfig, *, splits_vocabulary: bool = False
) -> tuple[SamplerLevel, ...]:
    """The levels compiled; a batch runs at the first that does all it needs. Where devices split
    the vocabulary, those that need no whole rows of logits (`sample`) are among them and first."""
    levels = SCORED_GREEDY, SamplerLevel.RANDOM, SamplerLevel.TRUNCATED, EVERYTHING
    if config.few_programs:
        levels = SamplerLevel.GREEDY, SCORED_GREEDY, EVERYTHING
    if not splits_vocabulary:
        return levels
    first = SamplerLevel.GREEDY, SamplerLevel.RANDOM
    return *first, *(level for level in levels if level not in first)


Name = tuple[str, Any]
"""A program's kind and its key among those, mostly the shape of what it computes; None of one."""

Programs = Mapping[Name, Any]
"""Compiled programs; `jpaged.runtime.steps.PROGRAMS` says what each kind does."""
