"""Ops of mixture-of-experts layers: routing tokens to experts, and the experts' GEMMs.

A token has `k` pairs (token, choice), one per chosen expert. `route` sorts the pairs by expert. The
GEMMs compute one row per pair, in this sorted order. Every pair is computed: experts have no
capacity limit, and no token is dropped.

The public ops check their arguments and choose an implementation for the backend and the shapes:

    route                   triton.py on a GPU, else xla.py; xla.py also sorts the pairs of steps
                            with more than `triton.MAX_SORTED_PAIRS` pairs on a GPU
    expert_gated_gemm,      hopper.py on a Hopper GPU if the dtype has 2 bytes and the sizes are
    expert_down_gemm        multiples of 64, triton.py on other GPUs, else xla.py
    FP8 ops                 fp8_hopper.py on a Hopper GPU if the depth is a multiple of 128 and the
                            width a multiple of 64, fp8_triton.py on other GPUs with FP8 support,
                            else fp8.py
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.experts import fp8, fp8_hopper, fp8_triton, hopper, triton, tuning, xla
from pallas_kernels.gemm import BATCH_INVARIANT_UNIT, map_row_tiles
from pallas_kernels.tuning import device_kind, has_fp8, num_cores
from pallas_kernels.types import FP8, FP8_GROUP_SIZE, Backend

ACTIVATIONS = ("silu",)
"""Activations that `expert_gated_gemm` supports."""


class Routing(NamedTuple):
    """The pairs (token, choice) of a step, sorted by expert.

    T tokens have k choices each, so there are R = T * k pairs. The pair of token t and choice c has
    the index t * k + c. E is the number of experts whose weights the device holds.

    A pair is routed to no expert of this device if its token is padding, or if another device holds
    the expert. The expert index of such a pair is E.

    Attributes:
        weights: Routing weight of each pair.
        experts: Expert of each pair; E for a pair that is routed to no expert of this device.
        order: Pair index of each row of the sorted list. The rows are sorted by expert, and rows of
            one expert by pair index. The last rows are the pairs that are routed to no expert of
            this device.
        positions: Row of the sorted list that holds each pair; the inverse of `order`.
        offsets: First row of each expert. offsets[E] is the number of rows of all experts of this
            device.
    """

    weights: Float32[Array, "T k"]
    experts: Int32[Array, "T k"]
    order: Int32[Array, "R"]
    positions: Int32[Array, "T k"]
    offsets: Int32[Array, "bounds"]


def route(
    logits: Float[Array, "T E"],
    num_experts_per_token: int,
    *,
    softmax_first: bool = True,
    normalize: bool = False,
    scale: float | None = None,
    num_tokens: Int32[Array, ""] | None = None,
    first_expert: Int32[Array, ""] | None = None,
    num_local_experts: int | None = None,
    backend: Backend,
    batch_invariant: bool = False,
) -> Routing:
    """Choose the experts of each token, and sort the pairs (token, choice) by expert.

    The choices of a token are in order of decreasing probability. If two experts have equal
    probabilities, the expert with the lower index comes first. If a row has a NaN logit, its
    weights are NaN; other rows do not change.

    Args:
        logits: Router logits of each token.
        num_experts_per_token: Number of experts that each token chooses (k).
        softmax_first: Whether the softmax covers all experts. Otherwise it covers the k chosen
            experts only.
        normalize: Whether the weights of a token are divided by their sum.
        scale: Factor that multiplies every routing weight; None for no factor.
        num_tokens: Number of tokens. Later rows are padding, and are routed to no expert. None
            means no padding.
        first_expert: Index of the device's first expert, if the device holds only some experts.
        num_local_experts: Number of the device's experts, if `first_expert` is set.
        backend: The implementation to run.
        batch_invariant: Whether the bits of a token's weights must not depend on the other tokens.

    Raises:
        ValueError: A shape or `num_experts_per_token` is wrong, or only one of `first_expert` and
            `num_local_experts` is set.
        TypeError: A dtype is not supported.
    """
    sizes = checks.check_array("logits", logits, "[T, E]")
    if not 1 <= num_experts_per_token <= sizes["E"]:
        raise ValueError(
            f"num_experts_per_token is {num_experts_per_token}; it must be from 1 to the number of "
            f"experts, {sizes['E']}"
        )
    if (sizes["E"] + 1) * sizes["T"] * num_experts_per_token >= 2**31:
        raise ValueError(
            f"logits has shape {logits.shape}; with {num_experts_per_token} experts per token, the "
            "sort keys exceed 31 bits: pass fewer tokens"
        )
    if (first_expert is None) != (num_local_experts is None):
        raise ValueError("first_expert and num_local_experts: set both, or omit both")
    for name, scalar in (("num_tokens", num_tokens), ("first_expert", first_expert)):
        if scalar is not None:
            checks.check_array(name, scalar, "[]", jnp.int32)
    backend = Backend(backend)
    options: dict[str, Any] = {
        "num_choices": num_experts_per_token,
        "softmax_first": softmax_first,
        "normalize": normalize,
        "scale": scale,
    }
    num_experts = sizes["E"] if num_local_experts is None else num_local_experts
    if backend is Backend.XLA or not logits.size:
        choose = partial(xla.choose_experts, **options)
        weights, experts = map_row_tiles(choose, logits) if batch_invariant else choose(logits)
        if first_expert is not None:
            experts = experts - first_expert
        return Routing(weights, *xla.sort_by_expert(experts, num_experts, num_tokens))
    # The kernel is always batch-invariant, because a program computes one row.
    interpret = backend is Backend.INTERPRET
    weights, experts = triton.choose_experts(
        logits,
        num_tokens,
        first_expert,
        num_local_experts=num_experts,
        interpret=interpret,
        **options,
    )
    if experts.size > triton.MAX_SORTED_PAIRS:
        return Routing(weights, *xla.sort_by_expert(experts, num_experts))
    sorted_pairs = triton.sort_pairs(experts, num_experts=num_experts, interpret=interpret)
    return Routing(weights, experts, *sorted_pairs)


def expert_gated_gemm(
    x: Float[Array, "T D"],
    weight: Float[Array, "E D width"],
    routing: Routing,
    *,
    activation: str = "silu",
    backend: Backend,
    batch_invariant: bool = False,
) -> Float[Array, "R F"]:
    """Return activation(gate) * up for each pair (token, choice): multiply the row of the token by
    the weight of the chosen expert.

    The GEMM accumulates in float32, the activation computes in float32, and the result has x's
    dtype.

    Args:
        x: Rows of the tokens.
        weight: Gate projection and up projection of each expert, concatenated along the last axis,
            which has 2 F columns.
        routing: Result of `route`.
        activation: Name of the activation; one of `ACTIVATIONS`.
        backend: The implementation to run.
        batch_invariant: Whether a row's bits must not depend on the other rows.

    Returns:
        One row per pair (token, choice), in the order of `routing.order`. Rows that are routed to
        no expert of this device are undefined.

    Raises:
        ValueError: Shapes do not match, the activation is not supported, or `batch_invariant` is
            set and the GPU has no such kernel. The kernel needs a Hopper GPU, a 2-byte dtype, and
            sizes that are multiples of `BATCH_INVARIANT_UNIT`.
        TypeError: Dtypes differ or are not bfloat16, float16 or float32.
    """
    sizes = checks.check_array("x", x, "[T, D]")
    sizes = checks.check_array("weight", weight, "[E, D, width]", x.dtype, **sizes)
    check_routing(routing, T=sizes["T"], E=sizes["E"])
    if sizes["width"] % 2:
        raise ValueError(
            f"weight has {sizes['width']} columns: pass an even number, half gate and half up"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be {' or '.join(ACTIVATIONS)}")
    backend = Backend(backend)
    if not (x.size and weight.size):
        return jnp.zeros((routing.order.shape[0], sizes["width"] // 2), x.dtype)
    module, options = _select(weight, routing, backend, 2, batch_invariant=batch_invariant)
    return module.expert_gated_gemm(x, weight, routing, **options)


def expert_down_gemm(
    x: Float[Array, "R F"],
    weight: Float[Array, "E F D"],
    routing: Routing,
    *,
    backend: Backend,
    batch_invariant: bool = False,
) -> Float[Array, "T D"]:
    """Apply the down projections, and return the weighted sum of each token's k experts.

    Each product is rounded to x's dtype. The k products of a token are summed in float32, in the
    order of the router's choices, and the sum is rounded to x's dtype. Experts of other devices and
    padding tokens add nothing, whatever their rows of x contain.

    Args:
        x: Result of `expert_gated_gemm`.
        weight: Down projection of each expert.
        routing: Result of `route`.
        backend: The implementation to run.
        batch_invariant: Whether a token's bits must not depend on the other tokens.

    Raises:
        ValueError: Shapes do not match, or `batch_invariant` is set and the GPU has no such kernel.
            The kernel needs a Hopper GPU, a 2-byte dtype, and sizes that are multiples of
            `BATCH_INVARIANT_UNIT`.
        TypeError: Dtypes differ or are not bfloat16, float16 or float32.
    """
    sizes = checks.check_array("x", x, "[R, F]")
    sizes = checks.check_array("weight", weight, "[E, F, D]", x.dtype, **sizes)
    check_routing(routing, R=sizes["R"], E=sizes["E"])
    backend = Backend(backend)
    if not (x.size and weight.size):
        return jnp.zeros((routing.experts.shape[0], sizes["D"]), x.dtype)
    module, options = _select(weight, routing, backend, 1, batch_invariant=batch_invariant)
    return module.expert_down_gemm(x, weight, routing, **options)


def _select(
    weight, routing, backend, num_factors, *, batch_invariant
) -> tuple[Any, dict[str, Any]]:
    """Return the module that runs a GEMM, and the options for the module's function.

    Args:
        weight: Weights of all experts.
        routing: The routing of the step.
        backend: The implementation to run.
        num_factors: Number of weights per expert: 2 for a gated GEMM, else 1.
        batch_invariant: Whether a row's bits must not depend on the other rows.

    Raises:
        ValueError: `batch_invariant` is set, and the GPU has no kernel for the sizes.
    """
    if backend is Backend.XLA or (batch_invariant and backend is not Backend.TRITON):
        return xla, {"batch_invariant": batch_invariant}
    num_experts, depth, num_columns = weight.shape
    sizes = num_experts, depth, num_columns // num_factors
    gemm = _describe(routing, sizes, num_factors, weight.dtype, weight.dtype, backend)
    config = tuning.experts_config(gemm)
    if config is not None:
        return hopper, {"config": config}
    if batch_invariant:  # The Triton kernel is not batch-invariant.
        raise ValueError(
            f"no batch-invariant kernel multiplies {weight.dtype} rows by expert weights of "
            f"{depth} x {gemm.width} on {gemm.device_kind or 'this GPU'}: use a Hopper GPU, a "
            f"2-byte dtype, and weight sizes that are multiples of {BATCH_INVARIANT_UNIT}"
        )
    interpret = backend is Backend.INTERPRET
    return triton, {"tile_rows": tuning.triton_tile_rows(gemm), "interpret": interpret}


def _describe(routing, sizes, num_factors, dtype, out_dtype, backend):
    """Return the `ExpertsProblem`: the facts about a GEMM that determine the launch parameters.

    Args:
        routing: The `Routing`.
        sizes: Number of experts, and the depth and the width of one weight.
        num_factors: Number of weights per expert: 2 for a gated GEMM (gate and up), else 1.
        dtype: Dtype of the rows and weights.
        out_dtype: Dtype of the result.
        backend: The backend.
    """
    num_tokens, num_choices = routing.experts.shape
    num_experts, depth, width = sizes
    return tuning.ExpertsProblem(
        num_tokens=num_tokens,
        num_choices=num_choices,
        num_experts=num_experts,
        depth=depth,
        width=width,
        itemsize=dtype.itemsize,
        num_factors=num_factors,
        out_itemsize=out_dtype.itemsize,
        num_cores=num_cores(backend),
        device_kind=device_kind(backend),
    )


def check_routing(routing, **sizes):
    """Check the shapes and dtypes of a `Routing`.

    Args:
        routing: The routing.
        sizes: Required sizes by axis name: T, k, R or E.

    Raises:
        ValueError: A shape does not match.
        TypeError: A dtype is wrong.
    """
    num_experts = sizes.pop("E")
    sizes = checks.check_array("routing.weights", routing.weights, "[T, k]", jnp.float32, **sizes)
    pairs = {"T": sizes["T"], "k": sizes["k"]}
    for name in ("experts", "positions"):
        checks.check_array(f"routing.{name}", getattr(routing, name), "[T, k]", jnp.int32, **pairs)
    num_rows = sizes["T"] * sizes["k"]
    if sizes.get("R", num_rows) != num_rows:
        raise ValueError(
            f"x has {sizes['R']} rows; it must have {num_rows}: one row per token and chosen expert"
        )
    checks.check_array("routing.order", routing.order, "[R]", jnp.int32, R=num_rows)
    bounds = num_experts + 1
    checks.check_array("routing.offsets", routing.offsets, "[bounds]", jnp.int32, bounds=bounds)


def scaled_expert_gated_gemm(
    x: Float[Array, "T D"],
    weight: Float[Array, "E width D"],
    x_scale: Float32[Array, "T"],
    weight_scale: Float32[Array, "E width"],
    routing: Routing,
    *,
    activation: str = "silu",
    dtype: DTypeLike,
    backend: Backend,
) -> Float[Array, "R F"]:
    """Run `expert_gated_gemm` with FP8 matrices that have one scale per row.

    Each product equals the result of `scaled_gemm` in float32. The activation computes in float32.

    Args:
        x: Rows of the tokens, in FP8 (e4m3).
        weight: Gate projection and up projection of each expert in FP8, stored transposed and
            concatenated: the first half of the `width` = 2 F rows is the gate projection.
        x_scale: Scale of each row of x.
        weight_scale: Scale of each row of each expert's weight.
        routing: Result of `route`.
        activation: Name of the activation; one of `ACTIVATIONS`.
        dtype: Dtype of the result.
        backend: The implementation to run. GPUs without FP8 support convert both matrices to
            bfloat16 first.

    Returns:
        One row per pair (token, choice), in the order of `routing.order`. Rows that are routed to
        no expert of this device are undefined.

    Raises:
        ValueError: Shapes do not match, or the activation is not supported.
        TypeError: A dtype is not supported: matrices are FP8, scales are float32.
    """
    check_fp8_gated_gemm(x, weight, x_scale, weight_scale, routing, activation, grouped=False)
    if not x.size:
        return jnp.zeros((routing.order.shape[0], weight.shape[1] // 2), dtype)
    module, options = _select_fp8(weight, routing, 2, dtype, Backend(backend), grouped=False)
    return module.gated_gemm(x, weight, x_scale, weight_scale, routing, **options)


def scaled_expert_down_gemm(
    x: Float[Array, "R F"],
    weight: Float[Array, "E D F"],
    x_scale: Float32[Array, "R"],
    weight_scale: Float32[Array, "E D"],
    routing: Routing,
    *,
    dtype: DTypeLike,
    backend: Backend,
) -> Float[Array, "T D"]:
    """Run `expert_down_gemm` with FP8 matrices that have one scale per row.

    Each product equals the result of `scaled_gemm` in float32.

    Args:
        x: Result of `scaled_expert_gated_gemm`, in FP8 (e4m3).
        weight: Down projection of each expert in FP8, stored transposed.
        x_scale: Scale of each row of x.
        weight_scale: Scale of each row of each expert's weight.
        routing: Result of `route`.
        dtype: Dtype of the result.
        backend: The implementation to run. See `scaled_expert_gated_gemm`.

    Raises:
        ValueError: Shapes do not match.
        TypeError: A dtype is not supported: matrices are FP8, scales are float32.
    """
    check_fp8_down_gemm(x, weight, x_scale, weight_scale, routing, grouped=False)
    if not x.size:
        return jnp.zeros((routing.experts.shape[0], weight.shape[1]), dtype)
    module, options = _select_fp8(weight, routing, 1, dtype, Backend(backend), grouped=False)
    return module.down_gemm(x, weight, x_scale, weight_scale, routing, **options)


def block_scaled_expert_gated_gemm(
    x: Float[Array, "T D"],
    weight: Float[Array, "E width D"],
    x_scale: Float32[Array, "T groups"],
    weight_scale: Float32[Array, "E blocks groups"],
    routing: Routing,
    *,
    activation: str = "silu",
    dtype: DTypeLike,
    backend: Backend,
) -> Float[Array, "R F"]:
    """Run `expert_gated_gemm` in FP8, with a scale per group of a row and per block of a weight.

    The products of a row with gate and with up each equal a result of `block_scaled_gemm` in
    float32. See `scaled_expert_gated_gemm` for the other arguments, the result and the errors.

    Args:
        x, weight: Matrices in FP8 (e4m3).
        x_scale: Scale of each group of `FP8_GROUP_SIZE` numbers of a row of x. The last group of a
            row may be smaller.
        weight_scale: Scale of each block of `FP8_GROUP_SIZE` rows by `FP8_GROUP_SIZE` columns of
            each expert's weight. The up projection begins with a new block. The last blocks of a
            projection may be smaller.
        routing, activation, dtype, backend: See `scaled_expert_gated_gemm`.
    """
    check_fp8_gated_gemm(x, weight, x_scale, weight_scale, routing, activation, grouped=True)
    if not x.size:
        return jnp.zeros((routing.order.shape[0], weight.shape[1] // 2), dtype)
    module, options = _select_fp8(weight, routing, 2, dtype, Backend(backend), grouped=True)
    return module.gated_gemm(x, weight, x_scale, weight_scale, routing, **options)


def block_scaled_expert_down_gemm(
    x: Float[Array, "R F"],
    weight: Float[Array, "E D F"],
    x_scale: Float32[Array, "R groups"],
    weight_scale: Float32[Array, "E blocks groups"],
    routing: Routing,
    *,
    dtype: DTypeLike,
    backend: Backend,
) -> Float[Array, "T D"]:
    """Run `expert_down_gemm` in FP8, with a scale per group of a row and per block of a weight.

    Each product equals the result of `block_scaled_gemm` in float32. See `scaled_expert_down_gemm`
    for the other arguments and the errors, and `block_scaled_expert_gated_gemm` for the scales.
    """
    check_fp8_down_gemm(x, weight, x_scale, weight_scale, routing, grouped=True)
    if not x.size:
        return jnp.zeros((routing.experts.shape[0], weight.shape[1]), dtype)
    module, options = _select_fp8(weight, routing, 1, dtype, Backend(backend), grouped=True)
    return module.down_gemm(x, weight, x_scale, weight_scale, routing, **options)


def _select_fp8(
    weight, routing, num_factors, dtype, backend, *, grouped
) -> tuple[Any, dict[str, Any]]:
    """Return the module that runs an FP8 GEMM, and the options for the module's function.

    Args:
        weight: Weights of all experts.
        routing: The `Routing`.
        num_factors: Number of weights per expert: 2 for a gated GEMM, else 1.
        dtype: Dtype of the result.
        backend: The backend.
        grouped: Whether there is one scale per group of 128 columns of a row of x, and one scale
            per block of 128 x 128 of a weight. Otherwise there is one scale per row.
    """
    options: dict[str, Any] = {"dtype": jnp.dtype(dtype)}
    interpret = backend is Backend.INTERPRET
    if not (interpret or (backend is Backend.TRITON and has_fp8(backend))):
        return fp8, options | {"backend": backend}
    num_experts, num_outputs, depth = weight.shape
    sizes = num_experts, depth, num_outputs // num_factors
    gemm = _describe(routing, sizes, num_factors, weight.dtype, options["dtype"], backend)
    config = tuning.fp8_experts_config(gemm, grouped=grouped)
    if config is not None:
        return fp8_hopper, options | {"config": config}
    return fp8_triton, options | {
        "tile_rows": tuning.triton_tile_rows(gemm),
        "interpret": interpret,
    }


def check_fp8_gated_gemm(x, weight, x_scale, weight_scale, routing, activation, *, grouped):
    """Check the arguments of a gated FP8 op.

    `scaled_expert_gated_gemm` documents the errors. If `grouped` is true, each row of x has a scale
    for each group of columns, and each block of a weight has a scale. Otherwise, each row of x and
    each row of a weight has one scale.
    """
    sizes = checks.check_array("x", x, "[T, D]", FP8)
    sizes = checks.check_array("weight", weight, "[E, width, D]", FP8, **sizes)
    check_routing(routing, T=sizes["T"], E=sizes["E"])
    if sizes["width"] % 2:
        raise ValueError(
            f"weight has {sizes['width']} rows: pass an even number, half gate and half up"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be {' or '.join(ACTIVATIONS)}")
    blocks = 2 * _num_blocks(sizes["width"] // 2)
    _check_fp8_scales(x_scale, weight_scale, "T", "width", "D", sizes, blocks if grouped else None)


def check_fp8_down_gemm(x, weight, x_scale, weight_scale, routing, *, grouped):
    """Check the arguments of an FP8 op of the down projection.

    `scaled_expert_down_gemm` documents the errors. See `check_fp8_gated_gemm` for `grouped`.
    """
    sizes = checks.check_array("x", x, "[R, F]", FP8)
    sizes = checks.check_array("weight", weight, "[E, D, F]", FP8, **sizes)
    check_routing(routing, R=sizes["R"], E=sizes["E"])
    blocks = _num_blocks(sizes["D"]) if grouped else None
    _check_fp8_scales(x_scale, weight_scale, "R", "D", "F", sizes, blocks)


def _check_fp8_scales(x_scale, weight_scale, rows, outputs, inputs, sizes, blocks):
    """Check the shapes and dtypes of FP8 scales.

    Args:
        x_scale, weight_scale: The scales.
        rows, outputs, inputs: Names of the axes of x and of the weight.
        sizes: Sizes of the axes.
        blocks: Number of blocks along the outputs of a weight; None if each row has one scale.
    """
    if blocks is None:
        x_axes, weight_axes = f"[{rows}]", f"[E, {outputs}]"
    else:
        sizes = sizes | {"blocks": blocks, "groups": _num_blocks(sizes[inputs])}
        x_axes, weight_axes = f"[{rows}, groups]", "[E, blocks, groups]"
    checks.check_array("x_scale", x_scale, x_axes, jnp.float32, **sizes)
    checks.check_array("weight_scale", weight_scale, weight_axes, jnp.float32, **sizes)


def _num_blocks(size):
    """Return the number of blocks along an axis of `size`; the last block may be smaller."""
    return -(-size // FP8_GROUP_SIZE)
