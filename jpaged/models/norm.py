"""RMSNorm and LayerNorm over the last axis, computed in float32 and rounded once."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jpaged.models.config import ModelConfig
from jpaged.models.formats import zero_param
from jpaged.models.sharding import MESH_AXIS, PendingAllReduce, reduce_update
from pallas_kernels import (
    Backend,
    add_rms_norm,
    device_sum_norm,
    map_row_tiles,
    rms_norm,
    sum_partials,
)


def normalize_rows(
    x: Float[Array, "*rows D"],
    weight: Float[Array, "D"],
    eps: float,
    *,
    batch_invariant: bool,
) -> Float[Array, "*rows D"]:
    """Apply RMSNorm to each row of `x`, and return the rows in the dtype of `x`.

    If `batch_invariant` is set, a row's bits do not depend on the number of rows.
    """
    normalize = partial(rms_norm, weight=weight, eps=eps)
    return map_row_tiles(normalize, x) if batch_invariant else normalize(x)


def add_norm_rows(
    hidden: Float[Array, "T D"],
    update: Float[Array, "parts T D"] | None,
    weight: Float[Array, "D"],
    eps: float,
    *,
    backend: Backend,
    batch_invariant: bool,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Add the parts of `update` to `hidden`. Return the RMS norm of the sum, and the sum.

    If `update` is None, nothing is added.
    """
    is_kernel = backend is not Backend.XLA
    if update is None and is_kernel and batch_invariant:
        # Add zeros if no update is given, so that the fused kernel computes the norm. Otherwise XLA
        # would compute it, in a loop over tiles of rows.
        update = jnp.zeros_like(hidden)[None]
    if update is not None and (is_kernel or not batch_invariant):
        return add_rms_norm(hidden, update, weight, eps=eps, backend=backend)
    if update is not None:
        hidden += sum_partials(update, hidden.dtype)
    return normalize_rows(hidden, weight, eps, batch_invariant=batch_invariant), hidden


class RMSNorm(nnx.Module):
    """RMSNorm: x / rms(x) * weight over the last axis (Zhang, Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike, batch_invariant: bool = False):
        self.weight = zero_param(dtype, size)
        self.eps, self.batch_invariant = eps, batch_invariant

    @property
    def scale(self) -> Float[Array, "D"]:
        """The weight as an array, for kernels that fuse the norm."""
        return self.weight[...]

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalize each row of `x`, and return the rows in the dtype of `x`."""
        return normalize_rows(x, self.scale, self.eps, batch_invariant=self.batch_invariant)

    def add_norm(
        self,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | PendingAllReduce | None,
        backend: Backend,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Add the parts of `update` to `hidden`. Return the norm of the sum, and the sum."""
        if isinstance(update, PendingAllReduce):
            peer_options = {"header": update.peer_header, "buffer_index": update.buffer_index}
            options = {"eps": self.eps, "backend": backend}
            return device_sum_norm(
                hidden, update.partials, self.scale, MESH_AXIS, **peer_options, **options
            )
        mode = {"backend": backend, "batch_invariant": self.batch_invariant}
        return add_norm_rows(hidden, update, self.scale, self.eps, **mode)


class LayerNorm(nnx.Module):
    """LayerNorm: (x - mean) / std over the last axis, with weight and bias if `affine`."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: DTypeLike,
        affine: bool = True,
        batch_invariant: bool = False,
    ):
        self.weight = zero_param(dtype, size) if affine else None
        self.bias = zero_param(dtype, size) if affine else None
        self.eps, self.batch_invariant = eps, batch_invariant

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Normalize each row of `x`, and return the rows in the dtype of `x`."""
        return map_row_tiles(self._normalize, x) if self.batch_invariant else self._normalize(x)

    def _normalize(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.weight is not None and self.bias is not None:
            wide *= self.weight[...].astype(jnp.float32)[None]
            wide += self.bias[...].astype(jnp.float32)[None]
        return wide.astype(x.dtype)

    def add_norm(
        self,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | PendingAllReduce | None,
        backend: Backend,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Add the parts of `update` to `hidden`. Return the norm of the sum, and the sum."""
        if update is not None:
            hidden += reduce_update(update, hidden.dtype)
        return self(hidden), hidden


Norm = RMSNorm | LayerNorm


def make_norm(config: ModelConfig, size: int, *, dtype: DTypeLike) -> Norm:
    """Create the norm that `config.norm_type` selects, for rows of `size` numbers."""
    options = {"batch_invariant": config.batch_invariant}
    if config.norm_type in ("layer", "bare_layer"):
        affine = config.norm_type == "layer"
        return LayerNorm(size, config.norm_eps, dtype=dtype, affine=affine, **options)
    weight_dtype = jnp.float32 if config.norm_type == "offset_rms" else dtype
    return RMSNorm(size, config.norm_eps, dtype=weight_dtype, **options)


def add_norm(
    norm: Norm,
    hidden: Float[Array, "T D"],
    update: Float[Array, "parts T D"] | PendingAllReduce | None,
    backend: Backend,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Add the parts of `update` to `hidden`. Return the norm of the sum, and the sum.

    If `update` is None, nothing is added.
    """
    return norm.add_norm(hidden, update, backend)


def norm_update(
    norm: Norm | None, update: Float[Array, "parts T D"] | PendingAllReduce, dtype: DTypeLike
) -> Float[Array, "_ T D"] | PendingAllReduce:
    """Add the parts of `update`, and return the norm of the sum as an update with one part. If
    `norm` is None, return `update` itself."""
    return update if norm is None else norm(reduce_update(update, dtype))[None]
