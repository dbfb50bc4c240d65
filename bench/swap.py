"""Measure swaps to host memory: bandwidth, and swap against recompute (`python -m bench.swap`).

Part 1, `ways`: the bandwidth of swapping groups of blocks out and in, for each method that JAX
offers, and for a plain copy by the NVIDIA driver. GB/s count the bytes of the group. The time
includes gather, scatter and the padding of chunks. `first_out_GB/s` is the bandwidth of the first
transfer of a size, which also pins the host memory.

Part 2, `lengths`: the time to recompute a context, and the time to swap it out and in, as the
engine does. Part 2 also measures the time of a decode step without a swap and during a swap.

`--quick` uses tiny sizes on any device, as a smoke test.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import SHAPES
from bench.compare import parse_arguments
from bench.pinned_copy import pinned_copy_seconds
from bench.records import print_table, record
from bench.swap_ways import WAYS, Plain, Way
from jpaged.compile.builder import ProgramBuilder
from jpaged.compile.recipes import Recipes
from jpaged.core.plan import ScheduledSequence, StepPlan, SwapIn, SwapOut
from jpaged.core.request import Request, StopCriteria
from jpaged.models.config import ModelConfig
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import plan_model
from jpaged.runtime.kv_cache import KVState, make_pool
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.preemption_timing import measure_preemption_costs, time_swap
from jpaged.runtime.programs import DeviceShapes, SplitModel
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.swap import (
    chunk_sizes,
    pool_block_bytes,
    split_into_chunks,
)
from jpaged.sampling_params import SamplingParams
from pallas_kernels import select_backend

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        groups: Numbers of blocks of a group that is swapped.
        prefill_tokens: Context lengths that are recomputed and swapped.
        max_model_len: Maximum number of tokens of a sequence.
        num_seqs: Number of sequences of a decode step.
        context: Number of tokens of each of these sequences.
        repeats: Number of timed repetitions.
    """

    groups: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    max_model_len: int
    num_seqs: int
    context: int
    repeats: int


FULL = Sizes((16, 64, 256, 1024), (256, 1024, 4096, 8192), 16384, 64, 1024, 7)
QUICK = Sizes((3, 16), (64,), 64, 8, 32, 2)
TINY = {**SHAPES["qwen3-0.6b"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
TINY |= {"num_hidden_layers": 2, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def measure_way(kind: type[Way], state: KVState, num_blocks: int, repeats: int) -> tuple:
    """Time the swap of `num_blocks` blocks with a method. Return a result row and the new KV cache
    state."""
    sizes = chunk_sizes(state.pool, num_blocks)
    way = kind(state, sizes)
    ids, first = [], 1
    for size in split_into_chunks(num_blocks, sizes):
        ids.append(np.arange(first, first + size, dtype=np.int32))
        first += size
    outs, backs = [], []
    for _ in range(repeats + 2):
        jax.block_until_ready(state)
        start = time.perf_counter()
        entries = [way.out(state, chunk) for chunk in ids]
        entries = [way.settle(entry) for entry in entries]
        between = time.perf_counter()
        for chunk, entry in zip(ids, entries, strict=True):
            state = way.back(state, chunk, entry)
        jax.block_until_ready(state)
        outs.append(between - start)
        backs.append(time.perf_counter() - between)
        del entries
    gigabytes = num_blocks * pool_block_bytes(state.pool) / 1e9
    row = {
        "way": way.name,
        "chunks": len(ids),
        "out_GB/s": gigabytes / statistics.median(outs[2:]),
        "in_GB/s": gigabytes / statistics.median(backs[2:]),
    }
    # Report the first transfer only for `Plain`. With every other method, the time of the first
    # transfer would include a compilation.
    if kind is Plain:
        row["first_out_GB/s"] = gigabytes / outs[0]
    return row, state


def measure_ways(
    shape: str, model: ModelConfig, dtype: Any, sizes: Sizes, kinds: list[type[Way]]
) -> list[dict]:
    """Time every method for every group size.

    If JAX rejects a method, the row of the method has the error.
    """
    # A group is swapped in chunks, and padding may add blocks to a chunk. The pool must therefore
    # be larger than the largest group.
    num_blocks = 1 + 2 * max(max(sizes.groups), 8)
    rows = []
    for group in sizes.groups:
        num_bytes = group * pool_block_bytes(make_pool(model, 1, BLOCK_SIZE, dtype))
        common = {"model": shape, "blocks": group, "MiB": num_bytes / 2**20}
        seconds = pinned_copy_seconds(num_bytes, sizes.repeats)
        if seconds is not None:
            rates = [num_bytes / 1e9 / s for s in seconds]
            rows.append(
                {**common, "way": "driver", "chunks": 1, "out_GB/s": rates[0], "in_GB/s": rates[1]}
            )
        for kind in kinds:
            state = KVState(make_pool(model, num_blocks, BLOCK_SIZE, dtype), jnp.zeros((1, 1), int))
            try:
                row, state = measure_way(kind, state, group, sizes.repeats)
                rows.append({**common, **row})
            except Exception as error:
                rows.append({**common, "way": kind.name, "error": str(error)[:300]})
            del state
            # Print each row immediately, because a later method may crash the process.
            print(rows[-1], flush=True)
    return rows


def swap_seconds(
    model: ModelConfig, dtype: Any, block_size: int, num_tokens: int, repeats: int
) -> float:
    """Return the seconds in which the engine swaps `num_tokens` tokens out and in again."""
    group = -(-num_tokens // block_size)
    pool = make_pool(model, 1 + 2 * max(group, 8), block_size, dtype)
    gigabytes = group * pool_block_bytes(pool) / 1e9
    row, _ = measure_way(Way, KVState(pool, jnp.zeros((1, 1), int)), group, repeats)
    return gigabytes / row["out_GB/s"] + gigabytes / row["in_GB/s"]


def make_runner(model: ModelConfig, dtype: Any, sizes: Sizes) -> tuple[ModelRunner, RuntimeConfig]:
    """Create a `ModelRunner` with random weights, and its runtime configuration."""
    with tempfile.TemporaryDirectory() as folder:
        split = SplitModel.of(plan_model(folder, model, dtype=dtype, load_format="dummy").load())
    largest = -(-sizes.max_model_len // BLOCK_SIZE)
    config = RuntimeConfig(
        block_size=BLOCK_SIZE,
        num_blocks=2 * largest + 1,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.num_seqs,
        max_num_batched_tokens=max(sizes.prefill_tokens),
        vocab_size=model.vocab_size,
        backend=select_backend(jax.default_backend()),
        num_host_blocks=largest,
    )
    shapes = DeviceShapes.of(model, config, dtype)
    with ProgramBuilder(16) as builder:
        builder.add(Recipes(split, shapes, config))
        runner = ModelRunner(split, shapes, config, builder.programs())
    runner.warm_up()
    return runner, config


def measure_lengths(shape: str, parts: tuple, sizes: Sizes) -> list[dict]:
    """Return a row per context length: milliseconds to recompute the context, and to swap it."""
    runner, config = parts
    costs = measure_preemption_costs(runner, config)
    rows, tokens = [], min(256, sizes.max_model_len)
    while tokens <= sizes.max_model_len:
        blocks = tokens // BLOCK_SIZE
        swap = statistics.median(time_swap(runner, blocks) for _ in range(sizes.repeats))
        row = {
            "model": shape,
            "tokens": tokens,
            "blocks": blocks,
            "recompute_ms": 1e3 * costs.recompute_cost(tokens),
            "swap_ms": 1e3 * swap,
            "swap_ms_as_foreseen": 1e3 * costs.swap_cost(blocks),
        }
        rows.append(row)
        tokens *= 2
    return rows


def measure_overlap(shape: str, runner: ModelRunner, sizes: Sizes) -> list[dict]:
    """Return rows with the time of a decode step without swaps, and with a swap in each step."""
    request = Request.from_prompt(
        "decoding",
        [0] * sizes.context,
        StopCriteria(max_tokens=1),
        seq_id_counter=iter(range(sizes.num_seqs)),
        num_samples=sizes.num_seqs,
    )
    rows = tuple(
        ScheduledSequence(sequence, sizes.context - 1, 1, True) for sequence in request.sequences
    )
    launch = partial(runner.launch, sampling=lambda _: GREEDY)
    # Sequences can join the runner's batch only in a prefill step, so launch one prefill step
    # before the measured decode steps. `num_admitted_tokens = sizes.context` makes the step a
    # prefill step.
    for sequence in request.sequences:
        sequence.num_admitted_tokens = sizes.context
    launch(StepPlan(0, rows)).read()
    for sequence in request.sequences:
        sequence.num_admitted_tokens = 0
    group = min(64, sizes.max_model_len // BLOCK_SIZE)
    out = SwapOut(0, (0,) * group)
    back = SwapIn(0, tuple((i, 0) for i in range(group)))
    cases = {
        "alone": ({}, {}),
        "swap out, then in": ({"swap_outs": (out,)}, {"swap_ins": (back,)}),
        "swap out, then drop": ({"swap_outs": (out,)}, {"dropped_swap_entry_ids": (0,)}),
    }
    table = []
    for name, transfers in cases.items():
        plans = [StepPlan(0, rows, **more) for more in transfers]  # pyright: ignore[reportArgumentType]
        seconds = min(_seconds_a_step(launch, plans, 10 * sizes.repeats) for _ in range(3))
        table.append({"model": shape, "step": name, "blocks": group, "ms": 1e3 * seconds})
    launch(StepPlan(0, (), released_seq_ids=tuple(s.seq_id for s in request.sequences)))
    return table


def _seconds_a_step(launch: Callable, plans: list[StepPlan], num_steps: int) -> float:
    """Return the seconds per step. The host launches each step before the previous step ends, as in
    the engine's overlapped loop."""
    launch(plans[0]).read()
    launch(plans[1]).read()
    start = time.perf_counter()
    ahead = launch(plans[0])
    for step in range(1, num_steps):
        following = launch(plans[step % 2])
        ahead.read()
        ahead = following
    ahead.read()
    seconds = (time.perf_counter() - start) / num_steps
    if num_steps % 2:
        launch(plans[1]).read()
    return seconds


def _aligned(rows: list[dict]) -> list[dict]:
    """Return the rows, with None for each column that a row lacks but another row has."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*SHAPES], nargs="+", default=[*SHAPES])
    parser.add_argument("--quick", action="store_true", help="a tiny model, as a smoke test")
    parser.add_argument(
        "--part", choices=["ways", "lengths"], nargs="+", default=["ways", "lengths"]
    )
    parser.add_argument("--ways", nargs="+", help="methods of part 1, by name or prefix")
    args = parse_arguments(parser)
    kinds = [w for w in WAYS if args.ways is None or w.name.startswith(tuple(args.ways))]
    sizes = QUICK if args.quick else FULL
    shapes = {"tiny": TINY} if args.quick else {name: SHAPES[name] for name in args.model}
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    ways, lengths, overlap = [], [], []
    for name, fields in shapes.items():
        model = read_model_config(fields)
        if "ways" in args.part:
            ways += measure_ways(name, model, dtype, sizes, kinds)
        if "lengths" in args.part:
            parts = make_runner(model, dtype, sizes)
            lengths += measure_lengths(name, parts, sizes)
            overlap += measure_overlap(name, parts[0], sizes)
            del parts
    for rows in filter(None, (ways, lengths, overlap)):
        print_table(_aligned(rows))
    print(record("swap", ways, lengths=lengths, overlap=overlap, quick=args.quick))


if __name__ == "__main__":
    main()
