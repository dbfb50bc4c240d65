"""The ops that `tools.tune` tunes, with their launch parameters, benchmark cases and check cases.

A case has a state (the KV pool), which the op updates in place, and arguments. All values are
random.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    HeadNorms,
    LayerKV,
    copy_blocks,
    paged_decode_attention,
    paged_prefill_attention,
    rope_write_kv,
    write_kv,
)
from tests.reference import kernels as reference

BLOCK_SIZE, NORM_EPS = 16, 1e-6
Made = tuple[Any, tuple]


@dataclass(frozen=True)
class Case:
    """An op with inputs of one size: large inputs to time, or small inputs to check the results.

    Attributes:
        make: Function that takes a seed and returns (state, arguments).
        run: Function that takes (state, *arguments, backend=) and returns (new state, results).
        reference: Function that takes (state, *arguments) and returns what `shown` should return.
        shown: Function that takes the result of `run`, and returns the list of arrays to compare.
    """

    name: str
    make: Callable[[int], Made]
    run: Callable[..., tuple[Any, Any]]
    reference: Callable[..., list]
    shown: Callable[[Any], list]


@dataclass(frozen=True)
class Op:
    """An op with an entry in the tables of `pallas_kernels.tuning`.

    Attributes:
        grid: The values to try of each launch parameter, by name.
        cases: Cases to time.
        checks: Small cases whose results are compared with the reference.
        tolerance: Maximum absolute or relative error of a result.
    """

    name: str
    head_size: int
    itemsize: int
    grid: Mapping[str, tuple[int, ...]]
    cases: list[Case]
    checks: list[Case]
    tolerance: float


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(rng.integers(2**31)), shape, jnp.dtype(dtype))


def _attention_inputs(
    batch: int, context: int, tokens: int, heads: tuple[int, int], head_size: int, dtype: str
) -> Callable[[int], Made]:
    """Return a function for `Case.make`, which makes the inputs of `batch` equal sequences.

    Each sequence has `context` cached tokens and `tokens` new tokens. 0 new tokens mean a decode
    step.
    """
    seq_len = context + tokens
    width = -(-seq_len // BLOCK_SIZE)

    def make(seed: int) -> Made:
        rng = np.random.default_rng(seed)
        pool = (batch * width + 1, BLOCK_SIZE, heads[1], head_size)
        tables = rng.permutation(np.arange(1, pool[0])).reshape(batch, width).astype(np.int32)
        lens = jnp.full(batch, seq_len, jnp.int32)
        q = _normal(rng, (batch * max(tokens, 1), heads[0], head_size), dtype)
        kv = LayerKV(_normal(rng, pool, dtype), _normal(rng, pool, dtype))
        starts = jnp.arange(batch + 1, dtype=jnp.int32) * tokens
        indices = (tables, starts, lens) if tokens else (tables, lens)
        return kv, (q, *map(jnp.asarray, indices))

    return make


def _attention_case(
    name: str, batch: int, context: int, tokens: int, heads: tuple[int, int], size: int, dtype: str
) -> Case:
    op = paged_prefill_attention if tokens else paged_decode_attention
    exact = reference.paged_prefill_attention if tokens else reference.paged_decode_attention

    def run(kv, q, *indices, backend):
        return kv, op(q, kv, *indices, scale=size**-0.5, backend=backend)

    def expect(kv, q, *indices):
        return [exact(q, kv, *indices, scale=size**-0.5)]

    make = _attention_inputs(batch, context, tokens, heads, size, dtype)
    return Case(name, make, run, expect, lambda given: [given[1]])


def decode(head_size: int, dtype: str) -> Op:
    """Return the op that computes the attention of decode steps.

    The sweep does not change the number of splits, which the heuristic chooses.
    """
    case = partial(_attention_case, tokens=0, size=head_size, dtype=dtype)
    grid = {"tile_tokens": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)}
    cases = [
        case("64 x 2048", 64, 2048, heads=(32, 8)),
        case("256 x 512", 256, 512, heads=(16, 8)),
        case("256 x 200", 256, 200, heads=(16, 8)),
        case("8 x 1024", 8, 1024, heads=(16, 8)),
        case("1 x 2048", 1, 2048, heads=(32, 8)),
    ]
    checks = [case("3 x 75", 3, 75, heads=(4, 2)), case("1 x 200", 1, 200, heads=(4, 1))]
    return _op("decode", head_size, dtype, grid, cases, checks)


def prefill(head_size: int, dtype: str) -> Op:
    """Return the op that computes the attention of prefill steps."""
    case = partial(_attention_case, size=head_size, dtype=dtype)
    grid = {
        "tile_rows": (64, 128, 256),
        "tile_tokens": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
    }
    cases = [
        case("8 x 2048", 8, 0, 2048, heads=(32, 8)),
        case("64 x 256", 64, 0, 256, heads=(32, 8)),
        case("4 x 512 on 4096", 4, 4096, 512, heads=(32, 8)),
    ]
    checks = [case("2 x 140", 2, 0, 140, heads=(4, 2)), case("1 x 9 on 30", 1, 30, 9, heads=(4, 1))]
    return _op("prefill", head_size, dtype, grid, cases, checks)


def _write_case(name: str, tokens: int, kv_heads: int, size: int, dtype: str) -> Case:
    def make(seed: int) -> Made:
        rng = np.random.default_rng(seed)
        pool = (-(-2 * tokens // BLOCK_SIZE) + 1, BLOCK_SIZE, kv_heads, size)
        free = np.arange(BLOCK_SIZE, pool[0] * BLOCK_SIZE)
        slots = jnp.asarray(rng.permutation(free)[:tokens].astype(np.int32))
        k, v = (_normal(rng, (tokens, kv_heads, size), dtype) for _ in range(2))
        return LayerKV(_normal(rng, pool, dtype), _normal(rng, pool, dtype)), (k, v, slots)

    def run(kv, k, v, slots, backend):
        return write_kv(kv, k, v, slots, backend=backend), ()

    return Case(name, make, run, lambda *all_: [*reference.write_kv(*all_)], lambda g: [*g[0]])


def write(head_size: int, dtype: str) -> Op:
    """Return the op that stores new tokens' keys and values."""
    case = partial(_write_case, size=head_size, dtype=dtype)
    cases = [case(f"{n} tokens", n, 8) for n in (8, 256, 8192)]
    return _op("write", head_size, dtype, _MOVES, cases, [case("5 tokens", 5, 3)])


def _copy_case(name: str, pairs: int, layers: int, kv_heads: int, size: int, dtype: str) -> Case:
    def make(seed: int) -> Made:
        rng = np.random.default_rng(seed)
        shape = (2 * pairs + 1, BLOCK_SIZE, kv_heads, size)
        pool = tuple(
            LayerKV(_normal(rng, shape, dtype), _normal(rng, shape, dtype)) for _ in range(layers)
        )
        blocks = rng.permutation(np.arange(1, shape[0])).astype(np.int32)
        return pool, (jnp.asarray(blocks[:pairs]), jnp.asarray(blocks[pairs:]))

    def run(pool, src, dst, backend):
        return copy_blocks(pool, src, dst, backend=backend), ()

    def expect(*all_):
        return [array for layer in reference.copy_blocks(*all_) for array in layer]

    return Case(name, make, run, expect, lambda given: jax.tree.leaves(given[0]))


def copy(head_size: int, dtype: str) -> Op:
    """Return the op that copies blocks of all layers."""
    case = partial(_copy_case, size=head_size, dtype=dtype)
    cases = [case("64 blocks", 64, 28, 8), case("8 blocks", 8, 28, 8)]
    return _op("copy", head_size, dtype, _MOVES, cases, [case("3 blocks", 3, 2, 3)])


def _rope_case(
    name: str, tokens: int, heads: tuple[int, int], size: int, dtype: str, normed: bool = False
) -> Case:
    kv_case = _write_case(name, tokens, heads[1], size, dtype)

    def make(seed: int) -> Made:
        kv, (_, _, slots) = kv_case.make(seed)
        rng = np.random.default_rng(seed)
        qkv = _normal(rng, (1, tokens, heads[0] + 2 * heads[1], size), dtype)
        turns = rng.uniform(0, 2 * np.pi, (tokens, size // 2)).astype(np.float32)
        weights = [_normal(rng, (size,), dtype) for _ in range(2 if normed else 0)]
        return kv, (qkv, slots, jnp.asarray(np.cos(turns)), jnp.asarray(np.sin(turns)), *weights)

    def run(kv, qkv, slots, cos, sin, *weights, backend):
        options = {"norms": _norms_of(weights), "backend": backend}
        q, kv = rope_write_kv(qkv, kv, slots, (cos, sin), **options)
        return kv, q

    def expect(kv, qkv, slots, cos, sin, *weights):
        q, pool = reference.rope_write_kv(qkv, kv, slots, (cos, sin), _norms_of(weights))
        return [q, *pool]

    return Case(name, make, run, expect, lambda given: [given[1], *given[0]])


def _norms_of(weights: tuple[jax.Array, ...]) -> HeadNorms | None:
    return HeadNorms(*weights, eps=NORM_EPS) if weights else None


def rope_write(head_size: int, dtype: str) -> Op:
    """Return the op that normalizes and rotates queries and keys, and stores keys and values."""
    case = partial(_rope_case, size=head_size, dtype=dtype)
    grid = {"tile_rows": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)}
    cases = [case(f"{n} tokens", n, (32, 8)) for n in (8, 64, 8192)]
    cases += [case(f"{n} tokens with norms", n, (16, 8), normed=True) for n in (64, 512, 8192)]
    checks = [case("5 tokens", 5, (4, 2)), case("5 tokens with norms", 5, (6, 3), normed=True)]
    return _op("rope_write", head_size, dtype, grid, cases, checks)


_MOVES = {"chunk": (512, 1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8)}


def _op(
    name: str, head_size: int, dtype: str, grid: Mapping, cases: list[Case], checks: list[Case]
) -> Op:
    itemsize = jnp.dtype(dtype).itemsize
    tolerance = 3e-2 if itemsize == 2 else 1e-4
    return Op(name, head_size, itemsize, grid, cases, checks, tolerance)


OPS: dict[str, Callable[[int, str], Op]] = {
    "decode": decode,
    "prefill": prefill,
    "write": write,
    "copy": copy,
    "rope_write": rope_write,
}
