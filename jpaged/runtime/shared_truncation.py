"""`truncation_mask` for several programs of one batch: traced and lowered once, then called.

Its five kernels are most of what tracing and lowering a sampling program takes, and three sampling
levels of every batch, and a burst, have it. XLA inlines the call: what it compiles is the same.
"""

import jax
from jax import export
from jaxtyping import Array, Bool, Float32, Int32

from jpaged.runtime.recipe import KERNEL_CALLS
from pallas_kernels import Backend, truncation_mask

_NAMES = ("temperature", "min_p", "top_k", "top_p")


class SharedTruncation:
    """Computes `truncation_mask`; of one shape and back end, it is traced and lowered once.

    To be called under the same settings of JAX and for the same device throughout.
    """

    def __init__(self):
        self._lowered: dict[tuple, export.Exported] = {}

    def __call__(
        self,
        logits: Float32[Array, "B V"],
        *,
        temperature: Float32[Array, "B"],
        min_p: Float32[Array, "B"],
        top_k: Int32[Array, "B"],
        top_p: Float32[Array, "B"],
        backend: Backend,
    ) -> Bool[Array, "B V"]:
        """As `pallas_kernels.truncation_mask`."""
        arrays = (logits, temperature, min_p, top_k, top_p)
        key = logits.shape, backend
        if key not in self._lowered:
            self._lowered[key] = _lower(backend, arrays)
        return self._lowered[key].call(*arrays)


def _lower(backend: Backend, arrays: tuple[jax.Array, ...]) -> export.Exported:
    def truncation(logits, *rows):
        return truncation_mask(logits, **dict(zip(_NAMES, rows, strict=True)), backend=backend)

    # Not the platform at hand: Triton's kernels are lowered for GPUs without one, too.
    platforms = ("cuda",) if backend is Backend.TRITON else None
    exporting = export.export(
        jax.jit(truncation), platforms=platforms, disabled_checks=KERNEL_CALLS
    )
    return exporting(*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))
