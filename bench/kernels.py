"""Time the kernels on this machine's GPU, and print the times with the targets.

    python -m bench.kernels [--repeats 7] [--sweep | --fp8]

One jitted program calls the op many times with different queries and pools. The pools together
exceed the GPU's L2 cache, so each call reads its pool from memory. A round launches the program
several times back to back, and then waits for the results. A figure is the median over the rounds
of the time per call. The time includes the launch gaps that the GPU cannot hide, as in a serving
step.

Bytes are the keys and values in the pool, read once. FLOPs are 4 * N * H for each pair of a query
and a visible key. The paging row compares blocks in random order with contiguous blocks. The
sampling rows time a whole sampling step: temperature, truncation, noise and argmax.

`--sweep` times only prefill attention, for the head counts of published models and several prompt
lengths. Query groups have 1 to 16 heads. A row has the fraction of the lower bound (FLOPs at 790
TFLOP/s). It also has the ratio of that fraction to the mean of the neighbours: the head counts with
the next smaller and the next larger group.

`--fp8` times only the GEMMs of a layer of Llama-3.1-8B in FP8, with scales and activation. Bytes
count the weight only.
"""

import argparse
import dataclasses
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import BYTES_PER_SECOND, FLOPS_PER_SECOND, FP8_FLOPS_PER_SECOND
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import SamplingParams
from jpaged.runtime.sampler import pack_params, required_level, sample, unpack_params
from pallas_kernels import (
    FP8,
    FP8_GROUP_SIZE,
    Backend,
    LayerKV,
    block_scaled_gated_gemm,
    block_scaled_gemm,
    pack_fp8_pairs,
    paged_decode_attention,
    paged_prefill_attention,
    scaled_gated_gemm,
    scaled_gemm,
    select_backend,
)

HEAD_SIZE = 128
# `CACHE_BYTES` is several times the L2 cache of any GPU.
CACHE_BYTES = 256 << 20
# A timed program reads at least `PROGRAM_BYTES` bytes, so that it runs longer than its launch.
PROGRAM_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention case: `batch` sequences with `tokens` new tokens after `context` cached tokens.

    `tokens` is 0 for a decode step. `fp8` means a pool in FP8.
    """

    name: str
    batch: int
    context: int
    tokens: int
    heads: tuple[int, int]
    block_size: int
    mark: float  # target of the measured speed or time, in `unit`
    unit: str
    fp8: bool = False

    @property
    def seq_len(self):
        return self.context + self.tokens

    @property
    def num_bytes(self):
        return self.batch * self.seq_len * self.heads[1] * HEAD_SIZE * 2 * (2 - self.fp8)

    @property
    def flops(self):
        pairs = self.tokens * self.context + self.tokens * (self.tokens + 1) // 2
        return 4 * self.batch * self.heads[0] * HEAD_SIZE * pairs


CASES = [
    Case("decode 64 x 2048", 64, 2048, 0, (32, 8), 16, 4.1, "TB/s"),
    Case("decode 64 x 2048, block 64", 64, 2048, 0, (32, 8), 64, 4.1, "TB/s"),
    Case("decode 256 x 512", 256, 512, 0, (16, 8), 16, 3.9, "TB/s"),
    Case("decode 1 x 2048", 1, 2048, 0, (32, 8), 16, 10.0, "us"),
    Case("prefill 8 x 2048", 8, 0, 2048, (32, 8), 16, 520.0, "TFLOP/s"),
    Case("prefill 1 x 8192", 1, 0, 8192, (32, 8), 16, 640.0, "TFLOP/s"),
    Case("prefill 64 x 256", 64, 0, 256, (32, 8), 16, 180.0, "TFLOP/s"),
    Case("prefill 4 x 512 on 4096", 4, 4096, 512, (32, 8), 16, 550.0, "TFLOP/s"),
]
FP8_MARKS = (3.65, 3.65, 3.5, 9.0, 480.0, 600.0, 170.0, 500.0)
"""Targets of the same cases with an FP8 pool. Decode: 85 % of the memory bandwidth. Prefill: the
bfloat16 target minus the cost of converting keys and values to bfloat16."""

CASES += [
    dataclasses.replace(case, name=f"{case.name}, fp8", mark=mark, fp8=True)
    for case, mark in zip(CASES, FP8_MARKS, strict=True)
]


# (query heads, KV heads), ordered by query heads per KV head: Llama-2, Qwen3-0.6B, Llama-3.2-3B,
# Llama-3.1-8B, Qwen3-14B, Qwen2.5-1.5B, Qwen2.5-7B, Qwen3-32B, GLM-4, and a model with one KV head.
SWEPT_HEADS = [
    (32, 32), (16, 8), (24, 8), (32, 8), (40, 8), (12, 2), (28, 4), (64, 8), (32, 2), (16, 1)
]  # fmt: skip
# (sequences, cached tokens of each sequence, new tokens of each sequence)
SWEPT_PROMPTS = [(8, 0, 256), (8, 0, 1024), (1, 0, 8192), (1, 24576, 8192)]
NEIGHBOURS_MARK = 1 / 1.05


@dataclasses.dataclass(frozen=True)
class FP8Product:
    """A matrix product of `rows` input rows and an FP8 weight of Llama-3.1-8B."""

    name: str
    width: int
    depth: int
    rows: int
    gated: bool = False
    in_blocks: bool = False

    @property
    def mark(self):
        """Target speed of this matrix product: TB/s of reading the weight for up to 128 rows, and
        TFLOP/s for more rows."""
        if self.rows <= 128:
            return 0.85 * BYTES_PER_SECOND / 1e12
        return 1000.0 if self.in_blocks else 1200.0


FP8_WEIGHTS = {
    "qkv": (6144, 4096, False),
    "output": (4096, 4096, False),
    "gate and up": (28672, 4096, True),
    "down": (4096, 14336, False),
}
FP8_PRODUCTS = [
    FP8Product(name, width, depth, rows, gated, in_blocks)
    for rows in (8, 64, 8192)
    for in_blocks in (False, True)
    for name, (width, depth, gated) in FP8_WEIGHTS.items()
]

PAGING_CASE, PAGING_MARK = CASES[0], 2.0  # the target is in percent
SAMPLE_SHAPE, SAMPLE_MARK = (64, 151936), 150.0  # the target is in microseconds
TRUNCATIONS = [{"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}, {}]


def build(case, seed=0, *, contiguous=False, least_blocks=0, max_pools=None):
    """Return the arguments of an attention op: a list of random queries, a list of random KV cache
    pools, and indices.

    The indices are (block tables, sequence lengths). Blocks are in random order unless `contiguous`
    is true. A pool has at least `least_blocks` blocks.
    """
    width = -(-case.seq_len // case.block_size)
    num_blocks = max(case.batch * width, least_blocks) + 1
    order = np.arange(1, case.batch * width + 1)
    if not contiguous:
        order = np.random.default_rng(seed).permutation(order)
    tables = jnp.asarray(order.reshape(case.batch, width), jnp.int32)
    lens = jnp.full((case.batch,), case.seq_len, jnp.int32)
    starts = jnp.arange(case.batch + 1, dtype=jnp.int32) * case.tokens
    num_pools = max(1, -(-CACHE_BYTES // case.num_bytes)) if not case.tokens else 1
    num_pools = min(num_pools, max_pools or num_pools)
    num_calls = max(num_pools, 4 if case.tokens else 32)
    keys = iter(jax.random.split(jax.random.key(seed), num_calls + 2 * num_pools))
    rows = case.batch * max(1, case.tokens)

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    queries = [normal(rows, case.heads[0], HEAD_SIZE) for _ in range(num_calls)]
    shape = (num_blocks, case.block_size, case.heads[1], HEAD_SIZE)

    def pool():
        return pack_fp8_pairs(normal(*shape).astype(FP8)) if case.fp8 else normal(*shape)

    pools = [LayerKV(pool(), pool()) for _ in range(num_pools)]
    return queries, pools, ((tables, starts, lens) if case.tokens else (tables, lens))


def attention(case, backend):
    op = paged_prefill_attention if case.tokens else paged_decode_attention
    return partial(op, scale=HEAD_SIZE**-0.5, backend=backend)


def seconds_per_call(op, queries, pools, indices, repeats):
    """Return the seconds per call of `op`: the median over `repeats` rounds.

    A round launches a program several times, and the program calls `op` many times. Each call
    depends on the result of the previous call, so that XLA does not merge calls that read the same
    pool. Each launch overwrites the results of the previous launch. For results at new
    addresses, XLA would rebuild the CUDA graph, which takes longer than a small kernel.
    """
    num_queries, num_pools = len(queries), len(pools)
    read = num_queries * sum(x.nbytes for x in jax.tree.leaves(pools)) / num_pools
    turns = 1 if num_pools == 1 else max(1, int(PROGRAM_BYTES / read))
    pairs = [
        (i % num_queries, (i + i // num_queries) % num_pools) for i in range(turns * num_queries)
    ]

    @partial(jax.jit, donate_argnums=0, keep_unused=True)
    def step(_, queries, pools, indices):
        outputs = []
        for i, j in pairs:
            query, _ = jax.lax.optimization_barrier((queries[i], outputs[-1:]))
            outputs.append(op(query, pools[j], *indices))
        return outputs

    shapes = jax.eval_shape(step, (), queries, pools, indices)
    outputs = jax.tree.map(lambda it: jnp.zeros(it.shape, it.dtype), shapes)

    def run_round(launches):
        nonlocal outputs
        start = time.perf_counter()
        for _ in range(launches):
            outputs = step(outputs, queries, pools, indices)
        jax.block_until_ready(outputs)
        return (time.perf_counter() - start) / launches

    run_round(1)
    once = run_round(3)
    launches = max(3, int(0.05 / once))
    return statistics.median(run_round(launches) for _ in range(repeats)) / len(pairs)


def measure(case, backend, repeats):
    seconds = seconds_per_call(attention(case, backend), *build(case), repeats)
    rates = {
        "TB/s": case.num_bytes / seconds / 1e12,
        "TFLOP/s": case.flops / seconds / 1e12,
        "us": seconds * 1e6,
    }
    value = rates[case.unit]
    reached = value <= case.mark if case.unit == "us" else value >= case.mark
    result = {"us": seconds * 1e6, "value": value, "reached": reached}
    return {"case": case.name, "unit": case.unit, "to_reach": case.mark, **result}


def sweep(backend, repeats):
    """Time prefill attention for each pair of head counts and prompt lengths.

    The rows of a prompt length are printed as soon as they are measured.
    """
    rows = []
    # All KV cache pools have the same size, so that cases with the same prompt lengths share a
    # compiled kernel.
    least = max(n * (before + new) for n, before, new in SWEPT_PROMPTS) // 16
    for batch, context, tokens in SWEPT_PROMPTS:
        name = f"prefill {batch} x {tokens}" + (f" on {context}" if context else "")
        cases = [
            Case(name, batch, context, tokens, heads, 16, 0.0, "TFLOP/s") for heads in SWEPT_HEADS
        ]
        seconds = [
            seconds_per_call(attention(case, backend), *build(case, least_blocks=least), repeats)
            for case in cases
        ]
        swept = [*_sweep_rows(cases, seconds)]
        print_table(swept)
        rows += swept
    return rows


def _sweep_rows(cases, seconds):
    """Yield one row of the table per case.

    `of_floor` is (lower bound of the time / measured time). `to_neighbours` is `of_floor` divided
    by the mean of `of_floor` of the previous and the next case.
    """
    shares = [case.flops / FLOPS_PER_SECOND / own for case, own in zip(cases, seconds, strict=True)]
    for index, (case, own, share) in enumerate(zip(cases, seconds, shares, strict=True)):
        ratio = share / statistics.mean(shares[max(index - 1, 0) : index] + shares[index + 1 :][:1])
        yield {
            "case": case.name,
            "heads": f"{case.heads[0]}/{case.heads[1]}",
            "group": case.heads[0] // case.heads[1],
            "us": own * 1e6,
            "TFLOP/s": case.flops / own / 1e12,
            "of_floor": share,
            "to_neighbours": ratio,
            "reached": ratio >= NEIGHBOURS_MARK,
        }


def build_fp8(product, seed=0):
    """Return the arguments of FP8 GEMMs: a list of FP8 rows with scales, a list of FP8 weights with
    scales, and an empty tuple.

    The weights together exceed the L2 cache. With block scales, the row scales have shape
    [groups, rows], as in a serving step. `measure_fp8` passes the transpose to the GEMM op. The op
    transposes the row scales back for the GEMM kernel. XLA removes both transpositions.
    """
    num_weights = max(1, -(-CACHE_BYTES // (product.width * product.depth)))
    num_rows = max(num_weights, 4 if product.rows > 128 else 32)
    keys = iter(jax.random.split(jax.random.key(seed), 2 * (num_rows + num_weights)))
    groups = product.depth // FP8_GROUP_SIZE

    def scaled(outputs, *scales):
        values = jax.random.normal(next(keys), (outputs, product.depth), jnp.bfloat16)
        scale = jax.random.uniform(next(keys), scales, jnp.float32, 0.001, 0.01)
        return (values * 64).astype(FP8), scale

    in_blocks, blocks = product.in_blocks, product.width // FP8_GROUP_SIZE
    of_rows = (groups, product.rows) if in_blocks else (product.rows,)
    of_weight = (blocks, groups) if in_blocks else (product.width,)
    rows = [scaled(product.rows, *of_rows) for _ in range(num_rows)]
    return rows, [scaled(product.width, *of_weight) for _ in range(num_weights)], ()


def measure_fp8(product, backend, repeats):
    """Time a GEMM in FP8 with scales; the GEMM of gate and up includes the activation."""
    options = {"dtype": jnp.bfloat16, "backend": backend}
    if product.in_blocks:
        parts = {} if product.gated else {"rows_per_part": [product.width]}
        run = block_scaled_gated_gemm if product.gated else block_scaled_gemm
        run = partial(run, **parts, **options)
    else:
        run = partial(scaled_gated_gemm if product.gated else scaled_gemm, **options)

    def op(rows, weight):
        (x, x_scale), (values, scale) = rows, weight
        # If `x_scale` has one axis, transposing it changes nothing.
        return run(x, values, x_scale.T, scale)

    seconds = seconds_per_call(op, *build_fp8(product), repeats)
    num_bytes = product.width * product.depth
    is_few = product.rows <= 128
    value = (num_bytes if is_few else 2 * product.rows * num_bytes) / seconds / 1e12
    result = {"us": 1e6 * seconds, "value": value, "reached": value >= product.mark}
    kind = "blocks" if product.in_blocks else "outputs"
    case = f"fp8 {product.name}, {product.rows} rows, scales of {kind}"
    unit = "TB/s" if is_few else "TFLOP/s"
    flops = 2 * product.rows * num_bytes
    floor = max(num_bytes / BYTES_PER_SECOND, flops / FP8_FLOPS_PER_SECOND)
    result |= {"of_floor": floor / seconds}
    return {"case": case, "unit": unit, "to_reach": product.mark, **result}


def measure_paging(backend, repeats):
    """Time `PAGING_CASE` with blocks in random order and with contiguous blocks, and compare them.

    The value of the returned row says by how many percent the random order is slower.
    """
    op = attention(PAGING_CASE, backend)
    paged, contiguous = (
        seconds_per_call(op, *build(PAGING_CASE, contiguous=one), repeats) for one in (False, True)
    )
    value = 100 * (paged / contiguous - 1)
    result = {"us": 1e6 * contiguous, "value": value, "reached": value <= PAGING_MARK}
    return {"case": "paging, 64 x 2048", "unit": "% more", "to_reach": PAGING_MARK, **result}


def measure_sampling(backend, repeats, truncation):
    """Time the sampling of logits [batch, vocabulary] drawn from a standard normal distribution."""
    batch, width = SAMPLE_SHAPE
    params = SamplingParams(temperature=1.0, **truncation)
    packed = jnp.asarray(np.stack([pack_params(params, seed) for seed in range(batch)]))
    rows = unpack_params(packed, jnp.arange(batch, dtype=jnp.int32))
    options = {"level": required_level(params), "backend": backend}
    keys = jax.random.split(jax.random.key(0), 8)
    logits = [jax.random.normal(key, SAMPLE_SHAPE, jnp.float32) for key in keys]

    def op(logits, _, rows):
        return sample(logits, rows, None, jnp.arange(batch, dtype=jnp.int32), **options).token_ids

    seconds = seconds_per_call(op, logits, [None], (rows,), repeats)
    name = ", ".join(f"{key} {value}" for key, value in truncation.items()) or "all tokens"
    result = {"us": 1e6 * seconds, "value": 1e6 * seconds, "reached": 1e6 * seconds <= SAMPLE_MARK}
    case = f"sample {batch} x {width}, {name}"
    return {"case": case, "unit": "us", "to_reach": SAMPLE_MARK, **result}


def main():
    parser = argparse.ArgumentParser(description="Time the kernels.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sweep", action="store_true", help="prefill by head counts and lengths")
    parser.add_argument("--fp8", action="store_true", help="GEMMs in FP8")
    arguments = parse_arguments(parser)
    if select_backend(jax.default_backend()) is not Backend.TRITON:
        raise SystemExit(
            f"bench.kernels needs an NVIDIA GPU; JAX sees only {jax.default_backend()!r}"
        )
    if arguments.sweep:
        rows = sweep(Backend.TRITON, arguments.repeats)
        print(record("prefill_sweep", rows))
        return
    if arguments.fp8:
        rows = [measure_fp8(each, Backend.TRITON, arguments.repeats) for each in FP8_PRODUCTS]
        print_table(rows)
        print(record("fp8_products", rows))
        return
    rows = [measure(case, Backend.TRITON, arguments.repeats) for case in CASES]
    rows.append(measure_paging(Backend.TRITON, arguments.repeats))
    for truncation in TRUNCATIONS:
        rows.append(measure_sampling(Backend.TRITON, arguments.repeats, truncation))
    print_table(rows)
    print(record("kernels", rows))


if __name__ == "__main__":
    main()
