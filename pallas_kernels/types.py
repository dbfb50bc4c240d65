"""The two types every op shares: where an op runs, and one layer's KV pool."""

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
