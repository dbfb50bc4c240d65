"""Names of compiled programs, their sets of sampling features, and shapes of their arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jpaged.models.jax_model import JaxDecoder
from jpaged.models.model_trace import ModelDigests
from jpaged.models.sharding import axis_sharding, global_shape_struct, per_device_shape, tree_mesh
from jpaged.models.sizes import ModelSizes
from jpaged.runtime.buckets import round_up
from jpaged.runtime.drafting import RowTokens
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

SCORED_ROW_SIZES = (64, 256, 1024)
"""Numbers of prompt tokens that one launch can score. Larger launches would not be faster."""

MAX_SCORED_LOGITS_ROWS = 256
"""Maximum number of rows of logits that `prompt_logprobs_step` holds at once. A large decode step
has as many rows, so that both steps have the same matrix product in the output head."""

BLOCK_COPIES_CHUNK = 64
"""Number of blocks that one launch of `copy_blocks_step` copies."""

BURST_LEVELS = (SCORED_GREEDY, SamplerLevel.TRUNCATED)
"""Sets of sampling features that bursts (several decode steps in one launch) are compiled for. A
burst uses the first of these sets that has the features of all rows in the burst."""


VERIFY_LEVELS = (SamplerLevel.GREEDY, SamplerLevel.TRUNCATED, FULL_LEVEL)
"""Sets of sampling features that verify steps are compiled for. A step uses the first of these sets
that has the features of all rows in the step."""

MAX_VERIFY_LOGITS_ROWS = 256
"""Maximum number of rows of logits that a verify step computes at once. A batch with more rows is
an exception: the step computes the rows of one draft position at once."""


@dataclass(frozen=True)
class SplitModel:
    """A model split into its definition and a flat tuple of its parameters.

    Steps take the flat parameters, so that a launch does not traverse the model in Python.
    """

    definition: nnx.GraphDef
    treedef: Any
    leaves: tuple[jax.Array | jax.ShapeDtypeStruct, ...]
    digests: ModelDigests | None = None
    """Digests of a user's functions, for the program store; None for a model of jpaged."""
    takes_global_arrays: bool = False
    """Whether the model computes with global arrays, and not with the shards of one device."""

    @staticmethod
    def of(model: nnx.Module) -> "SplitModel":
        """Split a model."""
        definition, state = nnx.split(model)
        leaves, treedef = jax.tree.flatten(state)
        takes_global_arrays = isinstance(model, JaxDecoder) and model.devices is not None
        return SplitModel(
            definition, treedef, tuple(leaves), takes_global_arrays=takes_global_arrays
        )

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of the tensor-parallel devices; None if the model is on one device."""
        return tree_mesh(self.leaves)

    @property
    def shard_leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of one device's shard of each parameter."""
        return tuple(jax.ShapeDtypeStruct(per_device_shape(it), it.dtype) for it in self.leaves)

    def bind(self, step: Callable, **static: Any) -> Callable:
        """Return a function that takes a tuple of parameters, makes the model, and calls `step`.

        The parameters are global arrays if `takes_global_arrays` is true, and otherwise the shards
        of one device. Each call of the function passes the keyword arguments `static` to `step`.
        """

        # `run` must not refer to `self`, because a reference would keep `self.leaves` in memory.
        definition, treedef = self.definition, self.treedef

        def run(leaves, *inputs, **arguments):
            model = nnx.merge(definition, jax.tree.unflatten(treedef, leaves))
            return step(model, *inputs, **arguments, **static)

        run.__name__ = step.__name__
        return run


@dataclass(frozen=True)
class DeviceShapes:
    """Shapes and dtypes of the arrays that stay on the device, and of hidden states.

    With several devices, the shapes are global. The pool is split along its KV heads, and each
    device has a complete copy of the block tables and of the per-row state.
    """

    kv: KVState
    last_tokens: jax.ShapeDtypeStruct
    sampling: SamplingState
    hidden: jax.ShapeDtypeStruct
    peer_header: jax.ShapeDtypeStruct | None = None
    """Shape of `PeerMemory.headers`, an int array with the addresses of the memory through which
    devices all-reduce; None if all-reduces do not use peer memory."""
    is_vocab_sharded: bool = False
    """Whether each device has the logits of only its shard of the vocabulary."""
    row_tokens: RowTokens | None = None
    """Tokens of the running sequences, one row per sequence; None without speculative decoding."""

    @staticmethod
    def of(
        model: ModelSizes, config: RuntimeConfig, dtype, mesh: Mesh | None = None
    ) -> "DeviceShapes":
        """Return the shapes for a configuration.

        Args:
            model: Sizes of the model. With several devices, sizes of one device's shard.
            config: Sizes and limits of the runtime.
            dtype: Dtype of the weights, and of the pool if the model sets no other dtype.
            mesh: Mesh of the tensor-parallel devices; None for one device.

        Raises:
            ValueError: `model.tensor_parallel_size` is not the number of devices.
        """
        if model.tensor_parallel_size != (1 if mesh is None else mesh.size):
            raise ValueError(
                f"model.tensor_parallel_size is {model.tensor_parallel_size}, which is not the "
                "number of devices: pass the result of ModelConfig.shard"
            )

        def replicate(tree):
            return jax.tree.map(lambda it: global_shape_struct(mesh, it, None), tree)

        rows, pool_size = config.num_rows, (config.num_blocks, config.block_size)
        pool = jax.eval_shape(lambda: make_pool(model, *pool_size, dtype))
        pool = jax.tree.map(lambda it: global_shape_struct(mesh, it, HEADS_AXIS), pool)
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
            row_tokens=None
            if config.speculation is None
            else replicate(
                RowTokens._make([int32_shape(rows), int32_shape(rows, config.max_model_len)])
            ),
        )

    @property
    def persistent_arrays(self) -> dict[str, Any]:
        """Dict from names of step arguments to the shapes of the arrays that stay on the device
        between steps."""
        persistent_arrays = {
            "state": self.kv,
            "last_tokens": self.last_tokens,
            "sampling": self.sampling,
        }
        optional = {"peer_header": self.peer_header, "row_tokens": self.row_tokens}
        return persistent_arrays | {name: it for name, it in optional.items() if it is not None}

    def logits(self, num_rows: int) -> jax.ShapeDtypeStruct:
        """Return the shape of the logits that a decode or prefill step of `num_rows` rows leaves on
        the device."""
        mesh = tree_mesh(self.kv) if self.is_vocab_sharded else None
        sharding = None if mesh is None else axis_sharding(mesh, 1)
        shape = num_rows, self.sampling.token_state.shape[1]
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def blocks(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        """Return the shape of `num_blocks` blocks gathered from all arrays of the pool."""
        blocks, mesh = (
            jax.eval_shape(gather_blocks_step, self.kv, int32_shape(num_blocks)),
            tree_mesh(self.kv),
        )
        # The array of gathered blocks has an additional first axis, with one entry per array of the
        # pool.
        sharding = None if mesh is None else axis_sharding(mesh, HEADS_AXIS + 1)
        return jax.ShapeDtypeStruct(blocks.shape, blocks.dtype, sharding=sharding)


def int32_shape(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the `ShapeDtypeStruct` of an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def sampler_levels(
    config: RuntimeConfig, *, is_vocab_sharded: bool = False
) -> tuple[SamplerLevel, ...]:
    """Return the sets of sampling features that sample steps are compiled for.

    A batch uses the first of these sets that has the features of all rows in the batch.

    If `is_vocab_sharded`, each device has the logits of only a shard of the vocabulary. The result
    then begins with the sets for which sampling need not gather the logits of all devices.
    """
    levels = SCORED_GREEDY, SamplerLevel.RANDOM, SamplerLevel.TRUNCATED, FULL_LEVEL
    if config.few_programs:
        levels = SamplerLevel.GREEDY, SCORED_GREEDY, FULL_LEVEL
    if not is_vocab_sharded:
        return levels
    first = SamplerLevel.GREEDY, SamplerLevel.RANDOM
    return *first, *(level for level in levels if level not in first)


def num_scored_rows(config: RuntimeConfig, num_tokens: int) -> int:
    """Return the number of prompt tokens that one launch scores after a prefill step of
    `num_tokens` tokens."""
    max_tokens = config.buckets.prefill_token_sizes[-1]
    return min(round_up(SCORED_ROW_SIZES, min(num_tokens, SCORED_ROW_SIZES[-1])), max_tokens)


def verify_levels(config: RuntimeConfig) -> tuple[SamplerLevel, ...]:
    """Return the sets of sampling features that verify steps are compiled for: all `VERIFY_LEVELS`,
    or only the first and the last of `VERIFY_LEVELS` if `few_programs` is set."""
    if config.few_programs:
        return VERIFY_LEVELS[0], VERIFY_LEVELS[-1]
    return VERIFY_LEVELS


ProgramName = tuple[str, Any]
"""Name of a program: the name of its step, and a key that distinguishes the step's programs. The
key is usually a shape; None if the step has only one program."""

Programs = Mapping[ProgramName, Any]
"""Compiled programs by name. `jpaged.runtime.step_programs.PROGRAMS` describes the steps."""
