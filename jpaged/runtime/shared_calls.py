"""What several programs have in common, traced and lowered once; each program then calls it.

Kernels are most of what tracing and lowering a program takes: the five of `truncation_mask`, which
three sampling levels of every batch and a burst have, and prefill attention's for Hopper, the same
for all numbers of sequences. XLA inlines the call: what it compiles is the same.
"""

from functools import partial
from typing import Any

import jax
from jax import export
from jaxtyping import Array, Bool, Float32, Int32

from jpaged.runtime.recipe import KERNEL_CALLS
from pallas_kernels import Backend, truncation_mask

_NAMES = ("temperature", "min_p", "top_k", "top_p")


class SharedCalls:
    """Calls functions, each lowered once for one set of shapes.

    To be called under the same settings of JAX and for the same device throughout.
    """

    def __init__(self):
        self._lowered: dict[tuple, export.Exported] = {}

    def __call__(self, function: partial, *arrays: jax.Array) -> Any:
        """What `function`, keywords bound to one of a module's, returns for the arrays on an NVIDIA
        GPU, whether there is one or not."""
        return self._call(function, ("cuda",), arrays)

    def truncation_mask(
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
        platforms = ("cuda",) if backend is Backend.TRITON else None  # that at hand
        truncation = partial(_truncation_mask, backend=backend)
        return self._call(truncation, platforms, (logits, temperature, min_p, top_k, top_p))

    def _call(self, function: partial, platforms: tuple[str, ...] | None, arrays: tuple) -> Any:
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        facts = tuple((shape.shape, shape.dtype) for shape in shapes)
        key = function.func, tuple(sorted(function.keywords.items())), facts
        if key not in self._lowered:
            lowering = export.export(
                jax.jit(function), platforms=platforms, disabled_checks=KERNEL_CALLS
            )
            self._lowered[key] = lowering(*shapes)
        return self._lowered[key].call(*arrays)


def _truncation_mask(logits: jax.Array, *rows: jax.Array, backend: Backend) -> jax.Array:
    return truncation_mask(logits, **dict(zip(_NAMES, rows, strict=True)), backend=backend)
