"""The types ops share: where an op runs, one layer's KV pool, the norms of its heads."""

from enum import StrEnum
from typing import NamedTuple

from jaxtyping import Array, Float


class Backend(StrEnum):
    """How an op runs: plain XLA, Pallas Triton on an NVIDIA GPU, or Pallas interpreted (tests)."""

    XLA = "xla"
    TRITON = "triton"
    INTERPRET = "interpret"


def select_backend(platform: str) -> Backend:
    """The back end for a JAX platform name (`jax.default_backend()`): `"gpu"`, `"cpu"` ..."""
    return Backend.TRITON if platform in ("gpu", "cuda") else Backend.XLA


class LayerKV(NamedTuple):
    """One layer's pool of keys and values: P blocks of S slots; block 0 is the null block."""

    k: Float[Array, "P S K H"]
    v: Float[Array, "P S K H"]


class HeadNorms(NamedTuple):
    """RMSNorm of each query head and of each key head, before they are rotated."""

    q: Float[Array, "H"]
    k: Float[Array, "H"]
    eps: float
