"""The types ops share: where an op runs, one layer's KV pool, norms, weights; numbers in FP8."""

import re
from enum import StrEnum
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped, UInt16

FP8 = jnp.float8_e4m3fn
"""Numbers of eight bits, four of them the exponent's and three the fraction's (Micikevicius et al.
2022, arXiv:2209.05433): no infinity, and what is beyond the largest becomes NaN unless clipped."""

FP8_MAX = 448.0
"""The largest of them."""

FP8_MIN_ABSMAX = 1e-30
"""The least maximum that a scale is made for: numbers below are as good as zeros, and the scale
stays a normal float32."""

FP8_PAIR_DTYPE = jnp.uint16
"""The dtype of a pool in FP8: two neighbours of a head, that of the even column in the low byte.

Kernels read such numbers two at a time. Of single ones each compiler would decide whether to see
them in pairs costs nothing or a pass over the pool, and XLA's for CPUs has no scatter of them.
"""

FP8_GROUP_SIZE = 128
"""Numbers of a row that have a scale together, and rows and columns of a weight's block that do."""


class Backend(StrEnum):
    """How an op runs: plain XLA, Pallas Triton on an NVIDIA GPU, or Pallas interpreted (tests)."""

    XLA = "xla"
    TRITON = "triton"
    INTERPRET = "interpret"

    @property
    def max_head_size(self) -> int | None:
        """The widest heads that attention takes; None for any. Kernels have them in registers."""
        return None if self is Backend.XLA else 256


def select_backend(platform: str) -> Backend:
    """The back end for a JAX platform name (`jax.default_backend()`): `"gpu"`, `"cpu"` ..."""
    return Backend.TRITON if platform in ("gpu", "cuda") else Backend.XLA


def supports_fp8(device: Any) -> bool:
    """Whether ops take pools in FP8 on a JAX device: plain XLA does anywhere, and Triton has the
    conversions for NVIDIA GPUs from compute capability 8.9 on, which multiply such numbers too; for
    others its compiler ends the process."""
    if select_backend(device.platform) is not Backend.TRITON:
        return True
    found = re.fullmatch(r"(\d+)\.(\d+)", str(device.compute_capability))
    return found is not None and (int(found[1]), int(found[2])) >= (8, 9)


class LayerKV(NamedTuple):
    """One layer's pool of keys and values: P blocks of S slots; block 0 is the null block.

    S is from 1 to 256. Heads have any size H that attention takes on the back end
    (`Backend.max_head_size`); those that are rotated an even one. The dtype is bfloat16, float16,
    float32 or, for numbers of `FP8`, `FP8_PAIR_DTYPE`. Of pairs the last axis has H / 2 (`pack_fp8_pairs`), H
    is even, of heads that are rotated a multiple of 4, and keys and values are stored divided by
    `KVScales`.
    """

    k: Shaped[Array, "P S K H"]
    v: Shaped[Array, "P S K H"]

    @property
    def is_scaled(self) -> bool:
        """Whether keys and values are in FP8, stored divided by scales."""
        return self.k.dtype == FP8_PAIR_DTYPE

    @property
    def head_size(self) -> int:
        """H."""
        return self.k.shape[3] * (2 if self.is_scaled else 1)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 1 if self.is_scaled else self.k.dtype.itemsize

    def attention_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """What attention computes in, for queries made in `dtype`: the pool's dtype, but that of
        the queries over a scaled pool, whose tiles are converted to it."""
        return dtype if self.is_scaled else self.k.dtype


def pack_fp8_pairs(x: Float[Array, "*rows H"]) -> UInt16[Array, "*rows half"]:
    """Numbers of `FP8` as a pool has them; H is even. In a Triton kernel too."""
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    bits = lax.bitcast_convert_type(x, jnp.uint8).reshape(*shape, 2)
    parts = lax.split(bits, (1, 1), axis=len(shape))
    even, odd = (part.reshape(shape).astype(FP8_PAIR_DTYPE) for part in parts)
    return even | (odd << FP8_PAIR_DTYPE(8))


def split_fp8_pairs(pairs: UInt16[Array, "*rows half"]) -> tuple[Float[Array, "*rows half"], ...]:
    """The numbers of `FP8` in the even columns, and those in the odd ones. Likewise."""
    halves = pairs.astype(jnp.uint8), (pairs >> FP8_PAIR_DTYPE(8)).astype(jnp.uint8)
    return tuple(lax.bitcast_convert_type(half, FP8) for half in halves)


def unpack_fp8_pairs(
    pairs: UInt16[Array, "*rows half"], dtype: DTypeLike
) -> Float[Array, "*rows H"]:
    """The inverse of `pack_fp8_pairs`, in `dtype`. Likewise."""
    numbers = jnp.stack(split_fp8_pairs(pairs), axis=-1)
    return numbers.reshape(*pairs.shape[:-1], -1).astype(dtype)


class KVScales(NamedTuple):
    """What keys and values are divided by when a pool in FP8 stores them, and multiplied by
    when they are read; positive.

    A quotient is rounded to the nearest, ties to even; one beyond the largest number becomes that.
    NaN stays NaN.
    """

    k: Float32[Array, "1"]
    v: Float32[Array, "1"]


class HeadNorms(NamedTuple):
    """RMSNorm of each query head and of each key head, before they are rotated."""

    q: Float[Array, "H"]
    k: Float[Array, "H"]
    eps: float


class FusedLayerWeights(NamedTuple):
    """What is between the attention of one layer and that of the next: the output projection, the
    gated feed-forward with the norm before it, and the next layer's norm and fused projection."""

    output: Float[Array, "C D"]
    norm: Float[Array, "D"]
    gate_up: Float[Array, "D 2 F"]
    down: Float[Array, "F D"]
    next_norm: Float[Array, "D"]
    next_qkv: Float[Array, "D Q"]
