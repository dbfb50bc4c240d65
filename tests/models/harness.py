"""A minimal runner for paged models that returns every logit."""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models.attention import AttentionInputs
from jpaged.models.decoder import Decoder
from pallas_kernels import FP8, Backend, LayerKV, pack_fp8_pairs

# `NUM_SEQS` is the maximum number of sequences in a step. `NUM_TOKENS` is the maximum number of
# tokens in a prefill step.
NUM_SEQS, NUM_TOKENS = 4, 32
BLOCK_SIZE, TABLE_WIDTH = 8, 6
NUM_BLOCKS = 1 + NUM_SEQS * TABLE_WIDTH
MAX_TOKENS = BLOCK_SIZE * TABLE_WIDTH


@partial(jax.jit, static_argnames="graphdef", donate_argnames="pool")
def paged_step(graphdef, state, token_ids, positions, pool, attention):
    """Compute a step. Return the logits of every token, and the updated KV cache pool."""
    model = nnx.merge(graphdef, state)
    hidden, pool = model(token_ids, positions, pool, attention)
    return model.logits(hidden), pool


def poisoned_pool(model: Decoder, dtype) -> tuple[LayerKV, ...]:
    """Return a pool of NaN, so that reading an unwritten slot gives NaN."""
    config = model.config
    shape = (NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_size)

    def make():
        numbers = jnp.full(shape, jnp.nan, dtype)
        return pack_fp8_pairs(numbers) if dtype == FP8 else numbers

    return tuple(LayerKV(make(), make()) for _ in range(config.num_layers))


@dataclass
class PagedSequence:
    """A sequence: its tokens, the number of tokens whose keys and values are in the pool, and the
    ids of its blocks."""

    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed


class Harness:
    """Run one model with two step shapes, prefill and decode, so that it compiles only twice."""

    def __init__(self, model: Decoder, *, pool_dtype=jnp.float32, seed: int = 0):
        self.graphdef, self.state = nnx.split(model)
        self.pool = poisoned_pool(model, pool_dtype)
        self.poison = jnp.array(self.pool[0].k[0])
        self.free = list(np.random.RandomState(seed).permutation(np.arange(1, NUM_BLOCKS)))

    def release(self, sequence: PagedSequence) -> None:
        """Free the blocks of a sequence and fill them with NaN."""
        freed, sequence.blocks, sequence.computed = sequence.blocks, [], 0
        index = jnp.asarray(freed, jnp.int32)
        self.pool = jax.tree.map(lambda x: x.at[index].set(self.poison), self.pool)
        self.free = freed + self.free

    def step(self, work: list[tuple[PagedSequence, int]]) -> list[np.ndarray]:
        """Compute one step, and return the logits [n, V] of each sequence.

        Args:
            work: The sequences, each with `n`, the number of its next tokens to compute.
        """
        decode = all(n == 1 for _, n in work)
        num_rows = NUM_SEQS if decode else NUM_TOKENS
        counts = [n for _, n in work]
        assert 1 <= len(work) <= NUM_SEQS
        assert sum(counts) <= num_rows
        token_ids, positions, slots = (np.zeros(num_rows, np.int32) for _ in range(3))
        starts = np.cumsum([0, *counts, *[0] * (NUM_SEQS - len(work))]).astype(np.int32)
        lens = np.zeros(NUM_SEQS, np.int32)
        tables = np.zeros((NUM_SEQS, TABLE_WIDTH), np.int32)
        for i, (sequence, n) in enumerate(work):
            rows, new = slice(starts[i], starts[i + 1]), self._advance(sequence, n)
            token_ids[rows] = np.asarray(sequence.tokens)[new]
            positions[rows], lens[i] = new, sequence.computed
            tables[i, : len(sequence.blocks)] = sequence.blocks
            slots[rows] = np.asarray(sequence.blocks)[new // BLOCK_SIZE] * BLOCK_SIZE
            slots[rows] += new % BLOCK_SIZE
        attention = AttentionInputs(
            block_tables=jnp.asarray(tables),
            seq_lens=jnp.asarray(lens),
            slot_mapping=jnp.asarray(slots),
            query_start_loc=None if decode else jnp.asarray(starts),
            backend=Backend.XLA,
        )
        inputs = jnp.asarray(token_ids), jnp.asarray(positions), self.pool, attention
        logits, self.pool = paged_step(self.graphdef, self.state, *inputs)
        return np.split(np.asarray(logits), starts[1:])[: len(work)]

    def _advance(self, sequence: PagedSequence, n: int) -> np.ndarray:
        """Allocate blocks for the next n tokens, and return their positions."""
        positions = np.arange(sequence.computed, sequence.computed + n)
        sequence.computed += n
        while len(sequence.blocks) * BLOCK_SIZE < sequence.computed:
            sequence.blocks.append(self.free.pop())
        return positions
