"""What several programs have in common, traced and lowered once; each program then calls it.

Kernels are most of what tracing and lowering a program takes: the five of `truncation_mask`, which
three sampling levels of every batch and a burst have, and prefill attention's for Hopper, the same
for all numbers of sequences. XLA inlines the call: what it compiles is the same.
"""

from functools import partial
from typing import Any

import jax
from jax import export

from jpaged.compile.recipe import KERNEL_CALLS
from pallas_kernels import Backend


class SharedCalls:
    """Calls functions, each lowered once for one set of shapes.

    To be called under the same settings of JAX and for the same device throughout.

    Args:
        backend: The kernels'; those for an NVIDIA GPU are lowered for one, whether there is one or
            not, all else for the device at hand.
    """

    def __init__(self, backend: Backend):
        self._platforms = ("cuda",) if backend is Backend.TRITON else None
        self._lowered: dict[tuple, export.Exported] = {}

    def __call__(self, function: partial, *arrays: Any, **named: Any) -> Any:
        """What `function` returns for the trees of arrays: one of a module's, hashable keywords
        bound."""
        shapes, named_shapes = jax.tree.map(_shape, (arrays, named))
        leaves, tree = jax.tree.flatten((shapes, named_shapes))
        facts = tuple((it.shape, it.dtype) for it in leaves)
        key = function.func, tuple(sorted(function.keywords.items())), tree, facts
        if key not in self._lowered:
            lowering = export.export(
                jax.jit(function), platforms=self._platforms, disabled_checks=KERNEL_CALLS
            )
            self._lowered[key] = lowering(*shapes, **named_shapes)
        return self._lowered[key].call(*arrays, **named)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
