"""How a projection's weight is kept, loaded and multiplied: its format.

A format is an object with the methods of `Format`; `Projection.format` has its name. This is what
all have in common, and `Plain`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jpaged.models.checkpoint import WeightRule
from jpaged.models.config import Projection
from pallas_kernels import Backend, einsum, gated_gemm, split_k_gemm


@dataclass(frozen=True)
class FP8Rows:
    """Rows [T, size_in] that are in FP8 already.

    Attributes:
        values: their numbers.
        scale: [T, groups], what these are multiplied by.
        dtype: that of the rows, which products with them have.
    """

    values: Float[Array, "T size_in"]
    scale: Float32[Array, "T groups"]
    dtype: DTypeLike


Rows = Float[Array, "T size_in"] | FP8Rows
"""What a projection is given."""

RowScales = Literal["row", "group"] | None
"""What of rows that a format brings to FP8 has a scale; None: it takes rows as they are."""

Layout = dict[str, tuple[int, tuple[int, ...]]]
"""Of parameters, by name: the axis along which a projection's parts lie, and their sizes there."""


class Format(Protocol):
    """How weights of one kind are kept. `linear` is the `Linear` whose attributes they are."""

    def parameters(self, projection: Projection, dtype: DTypeLike) -> dict[str, nnx.Param]:
        """What the format keeps of a projection, by the names of the module's attributes."""
        ...

    def layout(self, projection: Projection) -> Layout:
        """Where the parts lie in the parameters that have them side by side."""
        ...

    def rules(
        self, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """How its parameters come from a checkpoint; see `jpaged.models.linear.linear_rules`."""
        ...

    @property
    def row_scales(self) -> RowScales:
        """In which scales it may be given `FP8Rows`."""
        ...

    def given_scales(self, linear: Any) -> Float32[Array, "parts"] | None:
        """The static scales of its rows, one a part: all rows take the largest. None: each row has
        a scale of its own."""
        ...

    def partials(self, linear: Any, x: Rows, backend: Backend) -> Float[Array, "parts T size_out"]:
        """Rows by the weight, in split-K partials whose sum is the product."""
        ...

    def product(self, linear: Any, x: Rows, backend: Backend) -> Float[Array, "T *outputs"]:
        """Rows by the weight."""
        ...

    def gated_silu(self, linear: Any, x: Rows, backend: Backend) -> Float[Array, "T F"]:
        """silu(gate) * up of a projection to the two, without bias."""
        ...

    def array(self, linear: Any) -> Float[Array, "..."] | None:
        """The weight [*inputs, *outputs]; None in formats that keep no such array."""
        ...


@dataclass(frozen=True)
class Plain:
    """The format of weights that are kept as they are: float32, float16 or bfloat16.

    One parameter, `weight`, of the shape [*inputs, *outputs].
    """

    @property
    def row_scales(self) -> RowScales:
        """See `Format`: rows are arrays."""
        return None

    def given_scales(self, linear: Any) -> None:
        """See `Format`: there are none."""
        return

    def parameters(self, projection: Projection, dtype: DTypeLike) -> dict[str, nnx.Param]:
        """See `Format`."""
        return {"weight": zeros(dtype, *projection.inputs, *projection.outputs)}

    def layout(self, projection: Projection) -> Layout:
        """See `Format`."""
        return {"weight": (len(projection.inputs), sizes(projection))}

    def rules(
        self, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """See `Format`."""
        before = len(projection.inputs)
        inputs = tuple(range(before))
        outputs = tuple(range(before, before + len(projection.outputs)))
        file_axes = (outputs, inputs) if transposed else (inputs, outputs)
        return [
            WeightRule(
                source + ".weight",
                target + ".weight",
                (*projection.inputs, size, *projection.width),
                file_axes,
                before,
                start,
            )
            for source, start, size in pieces(projection, sources)
        ]

    def partials(self, linear: Any, x: Any, backend: Backend) -> Float[Array, "parts T size_out"]:
        """See `Format`."""
        weight = linear.weight[...]
        return split_k_gemm(x, weight.reshape(x.shape[1], -1), backend=backend)

    def product(self, linear: Any, x: Any, backend: Backend) -> Float[Array, "T *outputs"]:
        """See `Format`; by XLA."""
        outputs = "odf"[: len(linear.projection.outputs)]
        return einsum(f"ti,i{outputs}->t{outputs}", x, linear.weight[...])

    def gated_silu(self, linear: Any, x: Any, backend: Backend) -> Float[Array, "T F"]:
        """See `Format`."""
        return gated_gemm(x, linear.weight[...], backend=backend)

    def array(self, linear: Any) -> Float[Array, "..."] | None:
        """See `Format`."""
        return linear.weight[...]


def zeros(dtype: DTypeLike, *shape: int) -> nnx.Param:
    """A parameter to be filled by the loader; costs nothing under `nnx.eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype))


def sizes(projection: Projection) -> tuple[int, ...]:
    """The parts' sizes along the first output axis."""
    return tuple(size for _, size in projection.parts)


def pieces(projection: Projection, sources: Sequence[str]) -> list[tuple[str, int, int]]:
    """Where the tensors of a projection lie in it: source, start and size along the parts' axis."""
    own = sizes(projection)
    own = own if len(sources) == len(own) else (sum(own),)
    starts = [sum(own[:index]) for index in range(len(own))]
    return list(zip(sources, starts, own, strict=True))
