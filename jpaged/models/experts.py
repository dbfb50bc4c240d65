"""The sparse feed-forward: the weighted sum of the experts that a router chooses for each token.

Shazeer et al. 2017, arXiv:1701.06538. An expert computes every token for which it was chosen.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.checkpoint import WeightRule
from jpaged.models.config import ExpertsConfig, ModelConfig
from jpaged.models.expert_formats import ExpertSource, expert_format
from jpaged.models.formats import LinearInput, zero_param
from jpaged.models.norm import Norm, add_norm
from jpaged.models.sharding import (
    MESH_AXIS,
    PendingAllReduce,
    shard_start,
    sum_in_device_order,
)
from pallas_kernels import (
    BATCH_INVARIANT_UNIT,
    Backend,
    batch_invariant_transposed_gemm,
    device_sum,
    einsum,
    route,
)


def router_logits(
    x: Float[Array, "T D"],
    router: Float[Array, "E D"],
    *,
    backend: Backend,
    batch_invariant: bool,
) -> Float32[Array, "T E"]:
    """Return the logits of all experts for each row, in float32.

    If `batch_invariant` is set, a row's bits do not depend on the other rows. The kernels of this
    mode need a multiple of `BATCH_INVARIANT_UNIT` experts, so the router is padded with zeros.
    """
    if not batch_invariant:
        return einsum("td,ed->te", x, router, out=jnp.float32)
    num_experts = router.shape[0]
    padded = jnp.pad(router, ((0, -num_experts % BATCH_INVARIANT_UNIT), (0, 0)))
    logits = batch_invariant_transposed_gemm(x, padded, backend=backend)
    return logits[:, :num_experts]


class ExpertNames(NamedTuple):
    """Names of the tensors of a sparse feed-forward, relative to a layer's name in the checkpoint.

    Attributes:
        block: Name of the feed-forward in published checkpoints.
        gate, up, down: Names of the projections of one expert.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class SparseFeedForward(nnx.Module):
    """The sparse feed-forward of a layer: for each token, the weighted sum of the experts that the
    router chooses.

    `router` [E, D] is never quantized, and is replicated on all devices. `format` is a module that
    has the weights of the experts.
    """

    def __init__(
        self, config: ModelConfig, index: int, experts: ExpertsConfig, *, dtype: DTypeLike
    ):
        self.router = zero_param(dtype, experts.num_experts, config.hidden_size)
        self.format = expert_format(config, index)(config, experts, dtype)
        self.experts, self.is_shared = experts, config.tensor_parallel_size > 1
        self.batch_invariant = config.batch_invariant

    def __call__(
        self,
        x: LinearInput,
        backend: Backend,
        peer_header: Int32[Array, "W"] | None = None,
        num_tokens: Int32[Array, ""] | None = None,
    ) -> Float[Array, "_ T D"] | PendingAllReduce:
        """Return the feed-forward of each row, as an update of the residual stream.

        Args:
            x: Input rows, which are not quantized.
            backend: Implementation of the kernels.
            peer_header: See `AttentionInputs`. If set, the update is a `PendingAllReduce`.
            num_tokens: Number of rows before the padding rows; None if no row is padding.
        """
        x, experts = cast(jax.Array, x), self.experts
        first_expert = num_local = None
        if experts.num_local_experts < experts.num_experts:
            num_local = experts.num_local_experts
            first_expert = jnp.asarray(shard_start(num_local), jnp.int32)
        routing = route(
            self.router_logits(x, backend),
            experts.num_experts_per_token,
            normalize=experts.normalize,
            num_tokens=num_tokens,
            first_expert=first_expert,
            num_local_experts=num_local,
            backend=backend,
            batch_invariant=self.batch_invariant,
        )
        update = self.format(x, routing, backend)
        if peer_header is not None:
            return PendingAllReduce(update[None], peer_header, buffer_index=1)
        if self.is_shared:
            ordered = self.batch_invariant
            update = sum_in_device_order(update) if ordered else device_sum(update, MESH_AXIS)
        return update[None]

    def router_logits(self, x: Float[Array, "T D"], backend: Backend) -> Float32[Array, "T E"]:
        """Return the router's logits of all experts for each row."""
        return router_logits(
            x, self.router[...], backend=backend, batch_invariant=self.batch_invariant
        )

    def add_norm(
        self,
        norm: Norm,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | PendingAllReduce,
        backend: Backend,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Add the update to the residual stream, and apply the norm that precedes the
        feed-forward."""
        return add_norm(norm, hidden, update, backend)


def expert_rules(
    config: ModelConfig, index: int, source: str, target: str, names: ExpertNames
) -> list[WeightRule]:
    """Return the rules that map checkpoint tensors to the parameters of a sparse feed-forward.

    Published checkpoints have one tensor per expert and projection. Stacked checkpoints have two
    tensors per layer, `experts.gate_up_proj` and `experts.down_proj`.

    Args:
        config: Config of the model.
        index: Index of the layer, which has experts.
        source: Name of the layer in the checkpoint.
        target: Path of the `SparseFeedForward`.
        names: Names of the tensors.
    """
    experts = cast(ExpertsConfig, config.layers[index].experts)
    block, stacked, router = f"{source}.{names.block}", f"{source}.mlp", f"{target}.router"
    rules = [WeightRule(f"{block}.gate.weight", router)]
    if block != stacked:
        rules.append(WeightRule(f"{stacked}.gate.weight", router, is_alternative=True))
    sources = list[ExpertSource]()
    for expert in range(experts.num_experts):
        module = f"{block}.experts.{expert}"
        for part, name in enumerate((names.gate, names.up)):
            sources.append(ExpertSource(f"{module}.{name}", "gate_up", part, expert))
        sources.append(ExpertSource(f"{module}.{names.down}", "down", 0, expert))
    sources.append(ExpertSource(f"{stacked}.experts.gate_up_proj", "gate_up"))
    sources.append(ExpertSource(f"{stacked}.experts.down_proj", "down"))
    weight_format = expert_format(config, index)
    make_rules = weight_format.float_rules if config.has_float_tensors else weight_format.rules
    for each in sources:
        rules += make_rules(config, experts, each, target)
    return rules
