"""One layer of a decoder: attention and feed-forward, and what links it to the next."""

from typing import Protocol, runtime_checkable

from flax import nnx
from jaxtyping import Array, Float

from jpaged.models.layers import Attention, AttentionInputs, LayerNorm, RMSNorm
from jpaged.models.rope import RopeAngles
from pallas_kernels import Backend, LayerKV, LayerWeights, sum_partials

Norm = RMSNorm | LayerNorm


@runtime_checkable
class FeedForwardPart(Protocol):
    """A layer's feed-forward."""

    def __call__(self, x: Float[Array, "T D"], backend: Backend) -> Float[Array, "parts T D"]:
        """On each row; in parts to be summed."""
        ...

    def gated_weights(self) -> tuple[Float[Array, "D 2 F"], Float[Array, "F D"]] | None:
        """Gate and up, and down, of a plain gated perceptron; None for others."""
        ...


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each with a residual sum and a norm before (or after) it."""

    def __init__(
        self,
        *,
        attention: Attention,
        attention_norm: Norm,
        mlp: FeedForwardPart,
        mlp_norm: Norm,
        pre_norm: bool = True,
    ):
        self.attention, self.attention_norm = attention, attention_norm
        self.mlp, self.mlp_norm = mlp, mlp_norm
        self.pre_norm = pre_norm

    def __call__(
        self,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | None,
        kv: LayerKV,
        attention: AttentionInputs,
        angles: RopeAngles | None = None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"] | None, LayerKV]:
        """One layer; the residual stream is hidden + sum(update), the last product's output apart.

        Whoever reads the stream adds the update, so that a norm does it in one pass. None stands
        for zeros. Returns the stream after the layer in the same form, and the layer's pool.
        """
        backend = attention.backend
        if self.pre_norm:
            rows, hidden = add_norm(self.attention_norm, hidden, update, backend)
            update, kv = self.attention(rows, kv, attention, angles)
            rows, hidden = self.mlp_norm.add(hidden, update, backend)
            return hidden, self.mlp(rows, backend), kv
        update, kv = self.attention(hidden, kv, attention, angles)
        hidden = self.attention_norm(hidden + sum_partials(update, hidden.dtype))
        update = sum_partials(self.mlp(hidden, backend), hidden.dtype)
        return self.mlp_norm(hidden + update), None, kv

    def link(self, following: "DecoderLayer") -> LayerWeights | None:
        """What lies between this layer's attention and that of the following one, if it is no more
        than `fused_layer` computes."""
        first, second = self.mlp_norm, following.attention_norm
        if not (isinstance(first, RMSNorm) and isinstance(second, RMSNorm)):
            return None
        output, qkv = self.attention.output, following.attention.qkv
        plain = self.pre_norm and following.pre_norm and output.bias is None and qkv.bias is None
        gated = self.mlp.gated_weights()
        if gated is None or not plain or first.eps != second.eps:
            return None
        matrix, projection = output.weight[...], qkv.weight[...]
        return LayerWeights(
            matrix.reshape(-1, matrix.shape[2]),
            first.weight[...],
            *gated,
            second.weight[...],
            projection.reshape(projection.shape[0], -1),
        )


def add_norm(
    norm: Norm,
    hidden: Float[Array, "T D"],
    update: Float[Array, "parts T D"] | None,
    backend: Backend,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """The norm of hidden + sum(update), and that sum."""
    return (norm(hidden), hidden) if update is None else norm.add(hidden, update, backend)
