"""Helpers of the kernel tests: ragged batches over a KV pool with NaN, error bounds, lowering."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import Backend, KVScales, LayerKV
from tests.covering import covering
from tests.reference import kernels as reference

TRITON_ON_GPU = pytest.param(Backend.TRITON, marks=pytest.mark.gpu)
XLA_AND_TRITON = [Backend.XLA, TRITON_ON_GPU]
IMPLEMENTATIONS = [Backend.XLA, Backend.INTERPRET, TRITON_ON_GPU]
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
F8 = jnp.float8_e4m3fn


H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
A100 = AbstractDevice(device_kind="NVIDIA A100", num_cores=108, platform="gpu")
KERNEL_CALL = r"custom_call @\S*(triton|mosaic_gpu)"


def on_device(device=H200):
    """Return a context in which ops are traced for a GPU that this machine may not have."""
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lower(function, *arguments, device=H200):
    """Return the text of a function lowered for a GPU."""
    with on_device(device):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def on_backends(*axes, **options):
    """Return test parameters: combinations of the values in `axes`, each followed by a backend.

    `covering` chooses which combinations the default tier (pytest without `--tier full`) runs on
    backends that need no GPU. `options` are passed to `covering`. On a GPU every combination runs.
    """
    without_gpu = covering(*axes, [Backend.INTERPRET, Backend.XLA], **options)
    return without_gpu + covering(*axes, [TRITON_ON_GPU], strength=1)


def with_dtypes(cases, dtypes, num_by_xla=None):
    """Return test parameters: all combinations of a case, a dtype and a backend.

    pytest runs all combinations on a GPU, and with `--tier full`. The default tier on a CPU runs
    each case once in interpret mode and once in XLA, with two different dtypes from `dtypes`. If
    `num_by_xla` is given, this tier runs only the first `num_by_xla` cases in XLA.
    """

    def is_default(case, dtype, backend):
        index = cases.index(case)
        if backend is Backend.XLA:
            if num_by_xla is not None and index >= num_by_xla:
                return False
            index += 1
        return dtypes.index(dtype) == index % len(dtypes)

    return on_backends(cases, dtypes, strength=0, keep=is_default)


def to_pool(x, dtype):
    """Convert an array to `dtype` in the layout of a pool, which stores `F8` numbers in pairs."""
    narrow = np.asarray(x).astype(dtype)
    return jnp.asarray(reference.paired(narrow) if dtype == F8 else narrow)


@dataclass(frozen=True)
class Case:
    """Parameters of an attention test.

    `lens` has, for each sequence, the pair (number of tokens, number of new tokens). `scales` are
    the scales of an FP8 pool. Without scales the pool has the dtype of the queries.
    """

    dtype: Any = F32
    head_size: int = 64
    block_size: int = 16
    heads: tuple[int, int] = (4, 2)
    lens: tuple[tuple[int, int], ...] = ()
    soft_cap: float | None = None
    sliding_window: int | None = None
    padding: int = 0
    scales: tuple[float, float] | None = None

    @property
    def options(self):
        options: dict[str, Any] = {
            "scale": self.head_size**-0.5,
            "soft_cap": self.soft_cap,
            "sliding_window": self.sliding_window,
        }
        return options | ({"scales": self.kv_scales} if self.scales else {})

    @property
    def kv_scales(self):
        return KVScales(*(jnp.full(1, scale, F32) for scale in self.scales or (1.0, 1.0)))

    def __str__(self):
        heads = "x".join(str(n) for n in self.heads)
        parts = [jnp.dtype(self.dtype).name, f"H{self.head_size}", f"S{self.block_size}", heads]
        parts += [f"cap{self.soft_cap:g}"] if self.soft_cap else []
        parts += [f"win{self.sliding_window}"] if self.sliding_window else []
        parts += [f"f8x{self.scales[0]:g}"] if self.scales else []
        return "-".join(parts)


class Batch(NamedTuple):
    """Arguments of prefill attention and of decode attention."""

    kv: LayerKV
    block_tables: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    q_decode: jax.Array
    q_prefill: jax.Array

    @property
    def decode_arguments(self):
        return self.q_decode, self.kv, self.block_tables, self.seq_lens

    @property
    def prefill_arguments(self):
        return self.q_prefill, self.kv, self.block_tables, self.query_start_loc, self.seq_lens


def edge_lens(block_size):
    """Return `Case.lens` whose lengths are near multiples of `block_size`.

    Some sequences have only new tokens, others have tokens in the pool too.
    """
    s = block_size
    lens = (0, 0), (1, 1), (s - 1, 1), (s, s), (s + 1, 3), (2 * s + 1, 1), (3 * s + 2, s + 5)
    lens += ((140, 25),) * (s < 8)  # needs several key tiles
    return tuple((total, min(new, total)) for total, new in lens)


def build(case, seed=0):
    """Return a random batch. All slots of the pool that hold no token of a sequence contain NaN."""
    rng = np.random.default_rng(seed)
    seq_lens = np.array([total for total, _ in case.lens], np.int32)
    query_lens = np.array([new for _, new in case.lens], np.int32)
    tables, num_blocks = _block_tables(rng, seq_lens, case.block_size)
    pools = []
    for scale in case.scales or (1.0, 1.0):
        shape = (num_blocks, case.block_size, case.heads[1], case.head_size)
        pool = np.full(shape, np.nan, np.float32)
        for table, length in zip(tables, seq_lens, strict=True):
            positions = np.arange(length)
            slots = table[positions // case.block_size], positions % case.block_size
            pool[slots] = rng.standard_normal((length, *shape[2:]))
        quotients = jnp.asarray(pool) / jnp.float32(scale)
        pools.append(to_pool(quotients, F8 if case.scales else case.dtype))
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    rows = (case.heads[0], case.head_size)
    q_decode = rng.standard_normal((len(seq_lens), *rows))
    q_prefill = rng.standard_normal((starts[-1] + case.padding, *rows))
    return Batch(
        LayerKV(*pools),
        jnp.asarray(tables),
        jnp.asarray(starts),
        jnp.asarray(seq_lens),
        jnp.asarray(q_decode, case.dtype),
        jnp.asarray(q_prefill, case.dtype),
    )


def _block_tables(rng, seq_lens, block_size):
    """Return block tables with blocks in random order, and the number of blocks of the pool.

    Unused entries of a table hold the ids of blocks that contain only NaN.
    """
    counts = -(-seq_lens // block_size)
    num_blocks = int(counts.sum()) + 3
    order = rng.permutation(np.arange(1, num_blocks)).astype(np.int32)
    owned, unused = order[: counts.sum()], order[counts.sum() :]
    tables = np.zeros((len(seq_lens), int(counts.max()) + 2), np.int32)
    tables[:, 1::2] = unused[0]
    for table, count, end in zip(tables, counts, np.cumsum(counts), strict=True):
        table[:count] = owned[end - count : end]
    return tables, num_blocks


def assert_close(got, reference, dtype):
    """Check that `got` is near `reference(float64)`, the expected result in float64.

    The allowed error is twice the error of `reference(dtype)`, plus a tolerance for rounding,
    because kernels add numbers in another order.
    """
    got = np.asarray(got, np.float64)
    oracle = reference(np.float64)
    plain = np.asarray(reference(jnp.dtype(dtype)), np.float64)
    assert np.isfinite(got).all()
    assert not got[(oracle == 0).all(axis=(1, 2))].any()
    rounding = 4 * jnp.finfo(dtype).eps + got.shape[-1] / 8 * jnp.finfo(jnp.float32).eps
    allowed = 2 * np.abs(plain - oracle).max() + float(rounding)
    error = np.abs(got - oracle).max()
    assert error <= allowed, f"{error:.3g} > {allowed:.3g}"
