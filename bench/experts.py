"""Time the experts of one sparse layer on this machine's GPU (`python -m bench.experts`).

One jitted program runs the gated GEMM and the down GEMM of several layers. Each layer has different
tokens and different random choices of experts, and successive layers have different weights. All
experts are equally probable, unless `--skew` is set.
JAX's profiler records the kernels. A result row has the times per layer: of each kernel, of all
kernels together, and of the layer with the gaps between its kernels.

The lower bound ("floor") of a GEMM is the larger of two times: the time to read the weights of the
chosen experts, at `EXPERT_BYTES_PER_SECOND`, and the time to compute the FLOPs, at
`EXPERT_FLOPS_PER_SECOND`. The constants are the speeds of an H200; `--bandwidth` sets the bandwidth
of another GPU in TB/s. FP8 weights have half the bytes, and FP8 products take half the time.

With FP8 weights, a layer also quantizes the rows before each GEMM, and the kernels' time includes
this quantization.
"""

import argparse
import dataclasses
import tempfile
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp

from bench.compare import parse_arguments
from bench.profile_step import read_trace
from bench.records import print_table, record
from pallas_kernels import (
    FP8,
    FP8_GROUP_SIZE,
    Backend,
    block_scaled_expert_down_gemm,
    block_scaled_expert_gated_gemm,
    expert_down_gemm,
    expert_gated_gemm,
    quantize_rows,
    route,
    scaled_expert_down_gemm,
    scaled_expert_gated_gemm,
    select_backend,
)

EXPERT_BYTES_PER_SECOND = 4.6e12
EXPERT_FLOPS_PER_SECOND = 800e12
NUM_LAUNCHES = 3
# Target efficiency by number of tokens. The efficiency is the lower bound of the GEMMs' time,
# divided by the measured time of all kernels.
MARKS = {1: 0.6, 8: 0.6, 64: 0.8, 256: 0.8, 8192: 0.65}
KERNELS = (
    "expert_gated_gemm",
    "expert_gemm",
    "expert_tiles",
    "gather_rows",
    "combine_rows",
    "quantize_rows",
)
FORMATS = ("bfloat16", "fp8", "fp8-blocks")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model's experts.

    Attributes:
        hidden: Hidden size of the model.
        num_experts: Number of experts of a layer.
        num_choices: Number of experts that each token chooses.
        inner: Width of an expert.
    """

    hidden: int
    num_experts: int
    num_choices: int
    inner: int


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 128, 8, 768),
    "mixtral-8x7b": Shape(4096, 8, 2, 14336),
    "olmoe-1b-7b": Shape(2048, 64, 8, 1024),
}


def make_weights(key: jax.Array, shape: Shape, weight_format: str) -> tuple[jax.Array, ...]:
    """Return random weights of all experts: gate_up and down, each followed by its FP8 scales."""
    num_experts, size, inner = shape.num_experts, shape.hidden, shape.inner
    arrays = []
    for parts, outputs, inputs in ((2, inner, size), (1, size, inner)):
        weight_shape = num_experts, inputs, parts * outputs
        if weight_format != "bfloat16":
            weight_shape = num_experts, parts * outputs, inputs
        weight = jax.random.normal(key, weight_shape, jnp.bfloat16)
        if weight_format == "bfloat16":
            arrays.append(weight * jnp.bfloat16(inputs**-0.5))
            continue
        scale_shape = num_experts, parts * outputs
        if weight_format == "fp8-blocks":
            blocks = (-(-n // FP8_GROUP_SIZE) for n in (outputs, inputs))
            scale_shape = num_experts, parts * next(blocks), next(blocks)
        arrays += [weight.astype(FP8), jnp.full(scale_shape, inputs**-0.5, jnp.float32)]
    return tuple(arrays)


def run_layer(weights, x, routing, weight_format: str) -> jax.Array:
    """Return the weighted sum of the experts of each row of x."""
    if weight_format == "bfloat16":
        gate_up, down = weights
        rows = expert_gated_gemm(x, gate_up, routing, backend=Backend.TRITON)
        return expert_down_gemm(rows, down, routing, backend=Backend.TRITON)
    gate_up, gate_up_scale, down, down_scale = weights
    grouped = weight_format == "fp8-blocks"
    options = {"dtype": x.dtype, "backend": Backend.TRITON}
    gated_gemm, down_gemm = scaled_expert_gated_gemm, scaled_expert_down_gemm
    if grouped:
        gated_gemm, down_gemm = block_scaled_expert_gated_gemm, block_scaled_expert_down_gemm

    def quantize(rows):
        values, scale = quantize_rows(rows, grouped=grouped, backend=Backend.TRITON)
        return values, scale if grouped else scale[:, 0]

    values, scale = quantize(x)
    rows = gated_gemm(values, gate_up, scale, gate_up_scale, routing, **options)
    values, scale = quantize(rows)
    return down_gemm(values, down, scale, down_scale, routing, **options)


def router_logits(key: jax.Array, num_tokens: int, num_experts: int, skew: float) -> jax.Array:
    """Return random router logits, float32 [num_tokens, num_experts].

    Args:
        key: Key of the random numbers.
        num_tokens: Number of rows.
        num_experts: Number of columns.
        skew: Exponent of Zipf's law: the probability of expert e is proportional to
            (e + 1) ** -skew. With 0, all experts are equally probable.
    """
    noise = jax.random.gumbel(key, (num_tokens, num_experts))
    return noise - skew * jnp.log(jnp.arange(1, num_experts + 1, dtype=jnp.float32))[None]


def lower_bound(
    shape: Shape, num_tokens: int, experts_hit: float, itemsize: int, bandwidth: float
) -> float:
    """Return the lower bound in seconds of the two GEMMs of a layer.

    Args:
        shape: Sizes of the experts.
        num_tokens: Number of tokens.
        experts_hit: Number of experts that the tokens choose.
        itemsize: Bytes of an element of the weights.
        bandwidth: Bytes that the GPU reads per second.
    """
    seconds = 0.0
    # The weight of the gated GEMM has 2 * `inner` columns, and the weight of the down GEMM has
    # `inner` rows.
    for columns in (2 * shape.inner, shape.inner):
        read = experts_hit * shape.hidden * columns * itemsize / bandwidth
        flops = 2 * num_tokens * shape.num_choices * shape.hidden * columns
        seconds += max(read, flops * itemsize / 2 / EXPERT_FLOPS_PER_SECOND)
    return seconds


def measure(
    name: str,
    weight_format: str,
    num_tokens: int,
    bandwidth: float,
    num_layers: int,
    skew: float = 0.0,
) -> dict:
    """Time the experts of a model for a number of tokens, and return the result row.

    `weight_format` is one of `FORMATS`, `bandwidth` is in bytes per second, `num_layers` is the
    number of layers per program, and `skew` is the argument of `router_logits`.
    """
    shape = SHAPES[name]
    size, num_experts = shape.hidden, shape.num_experts
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [make_weights(key, shape, weight_format) for key in jax.random.split(keys[0], 2)]
    tokens = [
        jax.random.normal(key, (num_tokens, size), jnp.bfloat16)
        for key in jax.random.split(keys[1], num_layers)
    ]
    routings = [
        route(
            router_logits(key, num_tokens, num_experts, skew),
            shape.num_choices,
            backend=Backend.TRITON,
        )
        for key in jax.random.split(keys[2], num_layers)
    ]
    experts_hit = sum(int((jnp.diff(r.offsets) > 0).sum()) for r in routings) / num_layers

    @jax.jit
    def run(weights, tokens, routings):
        out = []
        for index, (x, routing) in enumerate(zip(tokens, routings, strict=True)):
            out.append(run_layer(weights[index % len(weights)], x, routing, weight_format))
        return out

    jax.block_until_ready(run(weights, tokens, routings))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(NUM_LAUNCHES):
                out = run(weights, tokens, routings)
            jax.block_until_ready(out)
        kernels = read_trace(Path(folder))
    busy: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        known = [prefix for prefix in KERNELS if prefix in kernel.name]
        busy[known[0] if known else "other"] += kernel.duration / (NUM_LAUNCHES * num_layers)
    span = (max(k.end for k in kernels) - kernels[0].start) / (NUM_LAUNCHES * num_layers)
    itemsize = weights[0][0].dtype.itemsize
    floor = lower_bound(shape, num_tokens, experts_hit, itemsize, bandwidth) * 1e6
    row = {"model": name, "weights": weight_format, "tokens": num_tokens, "skew": skew or None}
    row |= {"experts hit": experts_hit, "floor us": floor}
    row |= {f"{kernel} us": busy[kernel] for kernel in (*KERNELS, "other")}
    total = sum(busy.values())
    row |= {"kernels us": total, "layer us": span, "share of floor": floor / total}
    has_mark = weight_format == "bfloat16" and not skew
    return row | {"mark": MARKS.get(num_tokens) if has_mark else None}


def main():
    parser = argparse.ArgumentParser(description="Time the experts of one sparse layer.")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["qwen3-30b-a3b"])
    parser.add_argument("--weights", nargs="+", choices=FORMATS, default=["bfloat16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[*MARKS])
    parser.add_argument("--layers", type=int, default=6, help="layers per program")
    parser.add_argument("--bandwidth", type=float, default=EXPERT_BYTES_PER_SECOND / 1e12)
    parser.add_argument("--skew", type=float, default=0.0, help="exponent of Zipf's law")
    arguments = parse_arguments(parser)
    if select_backend(jax.default_backend()) is not Backend.TRITON:
        raise SystemExit(
            f"bench.experts needs an NVIDIA GPU; JAX sees only {jax.default_backend()!r}"
        )
    bandwidth, layers, skew = arguments.bandwidth * 1e12, arguments.layers, arguments.skew
    rows = [
        measure(name, weight_format, num_tokens, bandwidth, layers, skew)
        for name in arguments.shape
        for weight_format in arguments.weights
        for num_tokens in arguments.tokens
    ]
    print_table(rows)
    by = "model", "weights", "tokens", "skew"
    print(record("experts", rows, by=by, bandwidth=arguments.bandwidth))


if __name__ == "__main__":
    main()
