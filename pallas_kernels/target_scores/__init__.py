"""Scores of given tokens, computed from hidden states without storing the logits."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.target_scores import hopper, xla
from pallas_kernels.tuning import device_kind, is_hopper, num_cores
from pallas_kernels.types import Backend


class TargetScores(NamedTuple):
    """Three numbers per row of logits, which give the log-probability of the row's target token.

    The log-probability is `target - largest - log(total)`.

    Attributes:
        largest: Largest logit of each row.
        total: Sum of exp(logit - largest) of each row.
        target: Logit of the row's target token; 0 if the token is outside the vocabulary.
    """

    largest: Float32[Array, "R"]
    total: Float32[Array, "R"]
    target: Float32[Array, "R"]


def target_scores(
    x: Float[Array, "R D"],
    table: Float[Array, "V D"],
    targets: Int32[Array, "R"],
    *,
    soft_cap: float | None = None,
    backend: Backend,
) -> TargetScores:
    """Return the largest logit, the sum of exponentials and the target's logit of each row.

    The logits are x @ table.T, in float32. The op never stores all logits at the same time.

    Args:
        x: Hidden states.
        table: Weight of the output head.
        targets: One target token id per row. An id outside the table gives 0 as the target's logit.
            Devices that hold shards of the table can therefore sum these logits.
        soft_cap: Each logit z becomes soft_cap * tanh(z / soft_cap); None leaves it unchanged.
        backend: The implementation to run.

    Raises:
        ValueError: Shapes do not match.
        TypeError: Dtypes differ or are not supported.
    """
    sizes = checks.check_array("x", x, "[R, D]")
    sizes = checks.check_array("table", table, "[V, D]", x.dtype, **sizes)
    checks.check_array("targets", targets, "[R]", jnp.int32, **sizes)
    cores = num_cores(Backend(backend))
    if cores and is_hopper(device_kind(backend)) and soft_cap is None and _fits_hopper(x, table):
        return TargetScores(*hopper.target_scores(x, table, targets, num_programs=cores))
    return TargetScores(*xla.target_scores(x, table, targets, soft_cap=soft_cap))


def _fits_hopper(x, table) -> bool:
    """Return whether the Hopper kernel supports the dtype and the shapes."""
    (rows, depth), width = x.shape, table.shape[0]
    is_whole = depth % hopper.TILE == 0 and width % hopper.TOKEN_MULTIPLE == 0
    return x.dtype.itemsize == 2 and is_whole and rows > 0 and width >= hopper.TILE_TOKENS
