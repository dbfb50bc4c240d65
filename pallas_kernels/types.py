"""Types and constants that several ops share: backends, KV pools, FP8 formats, layer weights."""

import re
from enum import StrEnum
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_pytree_node
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped, UInt16

FP8 = jnp.float8_e4m3fn
"""The FP8 dtype e4m3: 8 bits, with 4 bits of exponent and 3 bits of fraction.

The dtype has no infinity: a conversion of a number beyond `FP8_MAX` gives NaN, so ops clip first.
Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

FP8_MAX = 448.0
"""The largest finite FP8 number (e4m3)."""

FP8_MIN_ABSMAX = 1e-30
"""The minimum of the largest absolute value from which an FP8 scale is computed.

It keeps the scale of a row of zeros from being 0: the scale is a normal float32 number.
"""

FP8_PAIR_DTYPE = jnp.uint16
"""The dtype of an FP8 pool, which packs two neighbouring numbers of a head into each element.

Element i has column 2 * i in the low byte, and column 2 * i + 1 in the high byte. Kernels read two
numbers at a time. If the pool had the dtype `FP8`, a compiler might copy the whole pool to convert
the numbers to pairs. Another reason is that XLA cannot scatter `FP8` arrays on a CPU.
"""

FP8_GROUP_SIZE = 128
"""The number of consecutive elements of an activation row that share one FP8 scale.

A block-scaled weight has one scale per block of `FP8_GROUP_SIZE` rows by `FP8_GROUP_SIZE` columns.
"""


class Backend(StrEnum):
    """The implementation of an op: plain XLA, Pallas on an NVIDIA GPU, or Pallas interpreted.

    TRITON includes the Mosaic GPU kernels for Hopper GPUs. INTERPRET is for tests.
    """

    XLA = "xla"
    TRITON = "triton"
    INTERPRET = "interpret"

    @property
    def max_head_size(self) -> int | None:
        """The largest head size that attention supports, or None for no limit.

        Kernels keep whole heads in registers, which limits the head size.
        """
        return None if self is Backend.XLA else 256


def select_backend(platform: str) -> Backend:
    """Return the backend for a JAX platform name such as "gpu" (from `jax.default_backend()`)."""
    return Backend.TRITON if platform in ("gpu", "cuda") else Backend.XLA


def supports_kernels(device: Any) -> bool:
    """Return whether the ops of this package run on a JAX device.

    Plain XLA runs on every device. On a GPU, XLA compiles Triton kernels only for compute
    capability 8.0 or later.
    """
    return select_backend(device.platform) is Backend.XLA or _capability(device) >= (8, 0)


def supports_fp8(device: Any) -> bool:
    """Return whether ops accept FP8 pools on a JAX device.

    Ops in plain XLA accept FP8 pools on every device. Triton converts FP8 numbers only on NVIDIA
    GPUs of compute capability 8.9 or later. On older GPUs, its compiler would end the process.
    """
    if select_backend(device.platform) is not Backend.TRITON:
        return True
    return _capability(device) >= (8, 9)


def _capability(device: Any) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) if it is unknown."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(device.compute_capability))
    return (int(found[1]), int(found[2])) if found else (0, 0)


class LayerKV(NamedTuple):
    """One layer's pool of keys and values: P blocks of S slots; block 0 is the null block.

    S is from 1 to 256. The head size H is at most `Backend.max_head_size`. If heads are rotated, H
    is even. The dtype is bfloat16, float16, float32, or `FP8_PAIR_DTYPE` for an FP8 pool.

    An FP8 pool stores keys and values divided by `KVScales`. The numbers are packed in pairs
    (`pack_fp8_pairs`), so the last axis has H / 2 elements, and H is even. If heads are rotated, H
    is a multiple of 4.
    """

    k: Shaped[Array, "P S K H"]
    v: Shaped[Array, "P S K H"]

    @property
    def is_scaled(self) -> bool:
        """Whether the pool is an FP8 pool, which stores keys and values divided by scales."""
        return self.k.dtype == FP8_PAIR_DTYPE

    @property
    def head_size(self) -> int:
        """The number of elements of one head (H).

        An FP8 pool stores two elements in one uint16. Both elements are counted.
        """
        return self.k.shape[3] * (2 if self.is_scaled else 1)

    @property
    def itemsize(self) -> int:
        """The number of bytes of one key or value element: 1 in an FP8 pool."""
        return 1 if self.is_scaled else self.k.dtype.itemsize

    def attention_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """Return the dtype in which attention computes, for queries of dtype `dtype`.

        Attention over an FP8 pool converts tiles of the pool to the queries' dtype. Attention over
        any other pool computes in the pool's dtype.
        """
        return dtype if self.is_scaled else self.k.dtype


def pack_fp8_pairs(x: Float[Array, "*rows H"]) -> UInt16[Array, "*rows half"]:
    """Pack `FP8` numbers in pairs, as an FP8 pool stores them; H is even.

    The function also works inside a Triton kernel.
    """
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    bits = lax.bitcast_convert_type(x, jnp.uint8).reshape(*shape, 2)
    parts = lax.split(bits, (1, 1), axis=len(shape))
    even, odd = (part.reshape(shape).astype(FP8_PAIR_DTYPE) for part in parts)
    return even | (odd << FP8_PAIR_DTYPE(8))


def split_fp8_pairs(pairs: UInt16[Array, "*rows half"]) -> tuple[Float[Array, "*rows half"], ...]:
    """Unpack pairs into two `FP8` arrays: the even columns and the odd columns.

    The function also works inside a Triton kernel.
    """
    halves = pairs.astype(jnp.uint8), (pairs >> FP8_PAIR_DTYPE(8)).astype(jnp.uint8)
    return tuple(lax.bitcast_convert_type(half, FP8) for half in halves)


def unpack_fp8_pairs(
    pairs: UInt16[Array, "*rows half"], dtype: DTypeLike
) -> Float[Array, "*rows H"]:
    """Unpack pairs of `FP8` numbers and convert the numbers to `dtype`.

    This is the inverse of `pack_fp8_pairs`. The function also works inside a Triton kernel.
    """
    numbers = jnp.stack(split_fp8_pairs(pairs), axis=-1)
    return numbers.reshape(*pairs.shape[:-1], -1).astype(dtype)


class KVScales(NamedTuple):
    """The positive scales of one layer's FP8 pool, one for keys and one for values.

    A write divides by the scale, clips to `FP8_MAX` and rounds to nearest, ties to even. A read
    multiplies by the scale. NaN stays NaN.
    """

    k: Float32[Array, "1"]
    v: Float32[Array, "1"]


class HeadNorms(NamedTuple):
    """Weights and epsilon of the RMSNorm of each query head and key head before the rotation."""

    q: Float[Array, "H"]
    k: Float[Array, "H"]
    eps: float


# `eps` is not a leaf of the pytree, so a jitted function gets `eps` as a Python number, not as a
# tracer.
register_pytree_node(
    HeadNorms,
    lambda norms: ((norms.q, norms.k), norms.eps),
    lambda eps, weights: HeadNorms(*weights, eps),
)


class FusedLayerWeights(NamedTuple):
    """Weights of the op `fused_layer`, which computes everything between the attentions of two
    layers.

    Attributes:
        output: Weight of the attention's output projection.
        norm: Weight of the RMSNorm before the feed-forward.
        gate_up: Weights of the gate and up projections.
        down: Weight of the down projection.
        next_norm: Weight of the RMSNorm before the next layer's attention.
        next_qkv: Weight of the next layer's query, key and value projections.
    """

    output: Float[Array, "C D"]
    norm: Float[Array, "D"]
    gate_up: Float[Array, "D 2 F"]
    down: Float[Array, "F D"]
    next_norm: Float[Array, "D"]
    next_qkv: Float[Array, "D Q"]
