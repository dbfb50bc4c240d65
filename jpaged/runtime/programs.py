"""The programs that a runner calls, and the shapes of the arrays that they work on."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.config import ModelConfig
from jpaged.runtime.kv_cache import make_pool
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import (
    EVERYTHING,
    SCORED_GREEDY,
    SamplerLevel,
    SamplingState,
    init_state,
)
from jpaged.runtime.steps import KVState

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


def sampler_levels(config: RuntimeConfig) -> tuple[SamplerLevel, ...]:
    """The levels compiled; a batch runs at the first that does all it needs."""
    if config.few_programs:
        return SamplerLevel.GREEDY, SCORED_GREEDY, EVERYTHING
    return SCORED_GREEDY, SamplerLevel.RANDOM, SamplerLevel.TRUNCATED, EVERYTHING


Name = tuple[str, Any]
"""A program's kind and its key among those."""


@dataclass(frozen=True)
class Programs:
    """Compiled programs, by shape where there are several; `jpaged.runtime.steps` says what each
    does."""

    decode: dict[int, Any]
    decode_burst: dict[tuple[int, SamplerLevel], Any]
    prefill: dict[tuple[int, int], Any]
    sample: dict[tuple[int, SamplerLevel], Any]
    prompt_logprobs: dict[int, Any]
    load_rows: Any
    load_bias: Any
    copy_blocks: Any
    fork_rows: Any
    gather_blocks: dict[int, Any]
    scatter_blocks: dict[int, Any]

    @staticmethod
    def of(compiled: dict[Name, Any]) -> "Programs":
        """Sort compiled programs by kind."""

        def kind(name: str) -> dict:
            return {key: program for (own, key), program in compiled.items() if own == name}

        return Programs(
            decode=kind("decode"),
            decode_burst=kind("decode_burst"),
            prefill=kind("prefill"),
            sample=kind("sample"),
            prompt_logprobs=kind("prompt_logprobs"),
            load_rows=compiled["load_rows", None],
            load_bias=compiled["load_bias", None],
            copy_blocks=compiled["copy_blocks", None],
            fork_rows=compiled["fork_rows", None],
            gather_blocks=kind("gather_blocks"),
            scatter_blocks=kind("scatter_blocks"),
        )

    def noted(self, note: Callable[[Name], None]) -> "Programs":
        """The same programs, each of which tells its name when it is called."""

        def wrap(name: Name, program: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **keywords: Any) -> Any:
                note(name)
                return program(*arguments, **keywords)

            return run

        def wrap_kind(kind: str, own: Any) -> Any:
            if isinstance(own, dict):
                return {key: wrap((kind, key), program) for key, program in own.items()}
            return wrap((kind, None), own)

        kinds = {kind.name: getattr(self, kind.name) for kind in fields(self)}
        return Programs(**{kind: wrap_kind(kind, own) for kind, own in kinds.items()})


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
