"""What one program is compiled from, and the way there: exported, lowered, compiled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any
from uuid import uuid4

import jax
from jax import export

# Calls that JAX exports only on demand, since another version of it may not read them; programs are
# kept for the same version alone.
KERNEL_CALLS = [
    export.DisabledSafetyCheck.custom_call(target)
    for target in ("__gpu$xla.gpu.triton", "triton_kernel_call_ffi", "mosaic_gpu_v2")
]

Name = tuple[str, Any]
"""A program's kind and its key among those."""


@dataclass(frozen=True)
class Recipe:
    """What a program is compiled from: a step, and the shapes of its arguments.

    `donate` names the arguments whose memory the program reuses. Programs with equal `products`
    have the same matrix products. One that does not need the pool is the same whatever its size.
    """

    name: Name
    function: Callable
    arguments: tuple = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    donate: tuple[str, ...] = ()
    products: tuple[str, int] | None = None
    needs_pool: bool = True

    @property
    def step(self) -> Any:
        """The jitted step."""
        return jax.jit(self.function, donate_argnames=self.donate)

    def exported(self, platforms: tuple[str, ...] | None = None) -> export.Exported:
        """Trace and lower to what can be kept, for the device at hand unless told."""
        exporting = export.export(self.step, platforms=platforms, disabled_checks=KERNEL_CALLS)
        return exporting(*self.arguments, **self.keywords)

    def lower(self, exported: export.Exported | None = None) -> Any:
        """Lower what was exported, or trace first."""
        step = self.step if exported is None else self.call(exported)
        return step.lower(*self.arguments, **self.keywords)

    def compile(self, exported: export.Exported | None = None) -> Any:
        """Lower and compile."""
        return self.lower(exported).compile()

    def draft(self) -> "Recipe":
        """The same under a name that no other program has, for looking at what the compiler makes
        of it: JAX's cache has nothing of that name, and programs from there may not tell all."""

        @wraps(self.function)  # arguments are donated by name
        def run(*arguments, **keywords):
            return self.function(*arguments, **keywords)

        run.__name__ = f"draft_{uuid4().hex}"
        return replace(self, function=run)

    def call(self, exported: export.Exported) -> Any:
        """The step, jitted, as it was exported."""

        @wraps(self.function)  # arguments are donated by name
        def run(*arguments, **keywords):
            return exported.call(*arguments, **keywords)

        run.__name__ = exported.fun_name  # that of a partial is hidden
        return jax.jit(run, donate_argnames=self.donate)

    @property
    def key(self) -> str:
        """Tells it from all recipes of an engine's steps with the same back end."""
        leaves, tree = jax.tree.flatten((self.arguments, dict(self.keywords)))
        return repr((self.name, str(tree), [(leaf.shape, leaf.dtype.name) for leaf in leaves]))
