"""Measure the time of steps on this device (`python -m bench.step_times --shape opt-13b`).

Each kind of step runs steadily in the engine's overlapped loop, with random weights of a shape:

    decode       rows x context, if they fit in the pool
    prefill      prompts x tokens, computed in one step
    mixed        decode rows and prompts in one step
    copy_blocks  blocks copied within the pool
    swap_out, swap_in   blocks copied to host memory and back, until complete
    attention    attention of one layer in a decode step, for each block size of the paper

The rows go to `results/step_times_<shape>_<device>.json`, to which the device model of
`bench.paper` is fitted. A run replaces the rows of its kinds and keeps the others. The block size
affects only attention noticeably, so all other kinds have blocks of 16 slots.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import jax

from bench import kernels
from bench.common import ALL_SHAPES, make_engine, random_prompts
from bench.compare import parse_arguments
from bench.paper.published import BLOCK_SIZES
from bench.records import COMMIT, print_table, record, result_path
from jpaged import Engine, SamplingParams
from jpaged.core.plan import StepPlan, SwapIn, SwapOut
from jpaged.models.registry import read_model_config
from jpaged.runtime.buckets import round_up
from pallas_kernels import select_backend

# These kinds of steps need an engine.
KINDS = ("decode", "prefill", "mixed", "copy", "swap")
# The first `WARM_TURNS` loop iterations are not timed. After them, the host runs one step ahead of
# the device.
WARM_TURNS = 4
COPIES_IN_A_ROW = 8
_SWAP_ENTRY_ID = -1


@dataclass(frozen=True)
class Sizes:
    """The sizes at which each kind of step is measured.

    Attributes:
        decode: Pairs (rows, context tokens per row).
        prefill: Pairs (prompts, tokens per prompt).
        mixed: Tuples (decode rows, context tokens per row, prompts, tokens per prompt).
        copy, swap: Numbers of blocks per transfer.
        attention: Pairs (rows, context tokens per row).
        block_sizes: Block sizes at which attention is measured.
        decode_steps, prefill_steps: Number of timed steps.
        repeats: Number of timed copies, swaps and attention runs; the result is the median.
    """

    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, int, int, int], ...]
    copy: tuple[int, ...] = (8, 64)
    swap: tuple[int, ...] = (16, 64, 128)
    attention: tuple[tuple[int, int], ...] = ((8, 512), (32, 512), (32, 1024))
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    decode_steps: int = 30
    prefill_steps: int = 10
    repeats: int = 5


FULL = Sizes(
    decode=tuple(
        (rows, context)
        for context in (64, 256, 512, 1024)
        for rows in (1, 8, 32, 64, 128, 192, 256)
    ),
    prefill=((1, 64), (1, 256), (32, 20), (8, 256), (1, 1024), (2, 1023), (1, 2047)),
    mixed=((32, 512, 1, 128), (32, 512, 1, 512), (32, 512, 4, 256)),
)
QUICK = Sizes(
    decode=((1, 48), (8, 48)),
    prefill=((1, 40), (4, 10)),
    mixed=((4, 40, 1, 20),),
    copy=(3,),
    swap=(3,),
    attention=((2, 48),),
    block_sizes=(8, 16),
    decode_steps=6,
    prefill_steps=4,
    repeats=2,
)


def time_decode(engine: Engine, rows: int, context: int, num_steps: int) -> dict | None:
    """Time a decode step of `rows` sequences with about `context` tokens each.

    Return None if the sequences do not fit in the pool, or exceed `max_num_seqs` or
    `max_model_len`.
    """
    tokens = _start_decoding(engine, rows, context, num_steps)
    if tokens is None:
        return None
    seconds = time_turns(engine, num_steps, lambda: None)
    buckets = engine.runtime_config.buckets
    padded = round_up(buckets.decode_batch_sizes, rows)
    return {
        **_row(engine, "decode", seconds, num_steps),
        "decode_seqs": rows,
        "context_tokens": tokens + rows * (WARM_TURNS + num_steps // 2),
        "padded_tokens": padded,
        "logits_rows": buckets.num_logits_rows(padded),
    }


def time_prompts(
    engine: Engine, prompts: int, length: int, num_steps: int, rows: int = 0, context: int = 0
) -> dict | None:
    """Time a step that computes whole prompts and one new token for each of `rows` decoding
    sequences.

    Return None if the decoding sequences do not fit in the pool, or if the step exceeds
    `max_num_batched_tokens`, `max_num_seqs` or `max_model_len`.
    """
    num_tokens, config = prompts * length + rows, engine.runtime_config
    room = (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len - 1)
    if any(
        wanted > most
        for wanted, most in zip((num_tokens, prompts + rows, length), room, strict=True)
    ):
        return None
    tokens = _start_decoding(engine, rows, context, num_steps) if rows else 0
    if tokens is None:
        return None
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    lengths = [length] * (prompts * (num_steps + WARM_TURNS))
    given = iter(random_prompts(lengths, engine.vocab_size, seed=1))

    def add() -> None:
        for _ in range(prompts):
            engine.add_request(next(given), params)

    seconds = time_turns(engine, num_steps, add)
    padded, seqs = config.buckets.prefill_shape(num_tokens, prompts + rows)
    return {
        **_row(engine, "mixed" if rows else "prefill", seconds, num_steps),
        "decode_seqs": rows,
        "context_tokens": tokens + rows * (WARM_TURNS + num_steps // 2),
        "prompt_seqs": prompts,
        "prompt_tokens": prompts * length,
        "prompt_pairs": prompts * length * (length + 1) // 2,
        "padded_tokens": padded,
        "logits_rows": seqs,
    }


def time_copies(engine: Engine, blocks: int, repeats: int) -> dict:
    """Measure the median time of a launch that copies `blocks` blocks. The launches run back to
    back.
    """
    pairs = tuple((1 + i, 1 + blocks + i) for i in range(blocks))
    plans = [StepPlan(step_id=-1, scheduled=(), block_copies=pairs)] * COPIES_IN_A_ROW
    times = [_time_plans(engine, plans) / COPIES_IN_A_ROW for _ in range(repeats + 1)][1:]
    return _row(engine, "copy_blocks", statistics.median(times), repeats) | {"blocks": blocks}


def time_swaps(engine: Engine, blocks: int, repeats: int) -> list[dict]:
    """Time the swap of blocks to host memory and back.

    Return no rows if the swap space of the engine is too small.
    """
    if engine.runtime_config.num_host_blocks < blocks:
        return []
    out = SwapOut(_SWAP_ENTRY_ID, tuple(range(1, 1 + blocks)))
    back = SwapIn(_SWAP_ENTRY_ID, tuple((entry, 1 + entry) for entry in range(blocks)))
    plans = {
        "swap_out": StepPlan(step_id=-1, scheduled=(), swap_outs=(out,)),
        "swap_in": StepPlan(step_id=-1, scheduled=(), swap_ins=(back,)),
    }
    times: dict[str, list[float]] = {kind: [] for kind in plans}
    for _ in range(repeats + 1):
        for kind, plan in plans.items():
            times[kind].append(_time_plans(engine, [plan]))
    return [
        _row(engine, kind, statistics.median(found[1:]), repeats) | {"blocks": blocks}
        for kind, found in times.items()
    ]


def _time_plans(engine: Engine, plans: list[StepPlan]) -> float:
    """Launch the plans, and return the seconds until the device has completed their transfers.

    The engine must have no unfinished request, because the plans overwrite arbitrary blocks.
    """
    runner = engine._loop._runner
    runner.wait()
    start = time.perf_counter()
    for plan in plans:
        runner.launch(plan, {}.__getitem__)
    runner.wait()
    return time.perf_counter() - start


def time_attention(shape: str, sizes: Sizes) -> Iterator[dict]:
    """Time decode attention of one layer. Yield a row per batch size, context and block size.

    Raises:
        ValueError: the shape's head size is not `bench.kernels.HEAD_SIZE`.
    """
    config = read_model_config(ALL_SHAPES[shape])
    if config.head_size != kernels.HEAD_SIZE:
        raise ValueError(
            f"shape {shape!r} has head size {config.head_size}, and attention is timed only for "
            f"{kernels.HEAD_SIZE}: leave attention out of --kinds"
        )
    backend = select_backend(jax.default_backend())
    for rows, context in sizes.attention:
        for block_size in sizes.block_sizes:
            heads = (config.num_heads, config.num_kv_heads)
            case = kernels.Case("", rows, context, 0, heads, block_size, 0.0, "us")
            op = kernels.attention(case, backend)
            seconds = kernels.seconds_per_call(op, *kernels.build(case), sizes.repeats)
            yield {
                **dict.fromkeys(_COUNTS, 0),
                "kind": "attention",
                "block_size": block_size,
                "decode_seqs": rows,
                "context_tokens": rows * context,
                "seconds": seconds,
                "steps": sizes.repeats,
            }


def measure(engine: Engine, sizes: Sizes, kinds: Sequence[str] = KINDS) -> Iterator[dict]:
    """Measure each kind of step at each size that fits in the pool; yield one row per size."""
    steps = sizes.decode_steps, sizes.prefill_steps
    points: dict[str, Iterator[dict | None]] = {
        "decode": (time_decode(engine, *point, steps[0]) for point in sizes.decode),
        "prefill": (time_prompts(engine, *point, steps[1]) for point in sizes.prefill),
        "mixed": (
            time_prompts(engine, prompts, length, steps[1], rows, context)
            for rows, context, prompts, length in sizes.mixed
        ),
        "copy": (time_copies(engine, blocks, sizes.repeats) for blocks in sizes.copy),
        "swap": chain.from_iterable(
            time_swaps(engine, blocks, sizes.repeats) for blocks in sizes.swap
        ),
    }
    for kind in kinds:
        yield from (row for row in points[kind] if row is not None)


def _start_decoding(engine: Engine, rows: int, context: int, num_steps: int) -> int | None:
    """Start `rows` sequences, and run steps until all of them decode.

    The caller then runs `num_steps` further steps. In the middle of these steps, each sequence has
    about `context` tokens.

    Returns:
        The total number of tokens of the sequences. None if the sequences do not fit in the pool,
        or if they exceed `max_num_seqs` or `max_model_len`.
    """
    config, before = engine.runtime_config, engine.stats()
    length = max(context - num_steps // 2 - 2 * WARM_TURNS, 1)
    prefills = -(-rows * length // max(config.max_num_batched_tokens - rows, 1))
    most = 2 * prefills + 4 * WARM_TURNS + num_steps
    blocks = rows * -(-(length + most) // config.block_size)
    fits = blocks <= before.num_free_blocks and length + most <= config.max_model_len
    if rows > config.max_num_seqs or not fits:
        return None
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
    for prompt in random_prompts([length] * rows, engine.vocab_size):
        engine.add_request(prompt, params)
    steady, generated = 0, before.num_generated_tokens
    while steady < WARM_TURNS:
        engine.advance()
        now = engine.stats().num_generated_tokens
        steady, generated = steady + 1 if now - generated == rows else 0, now
    return rows * length + generated - before.num_generated_tokens


def time_turns(engine: Engine, num_steps: int, add: Callable[[], None]) -> float:
    """Time `num_steps` loop iterations, abort all requests, and return the seconds per step.

    The function calls `add` before each iteration.

    Raises:
        RuntimeError: the steps had different amounts of work, because a request was preempted or
            had to wait; or the number of steps is not `num_steps`.
    """
    for _ in range(WARM_TURNS):
        add()
        engine.advance()
    before, start = engine.stats(), time.perf_counter()
    for _ in range(num_steps):
        add()
        engine.advance()
    seconds, after = time.perf_counter() - start, engine.stats()
    engine.abort_all()
    steps = after.num_steps - before.num_steps
    preempted = after.num_preemptions - before.num_preemptions
    if steps != num_steps or preempted or after.num_waiting:
        raise RuntimeError(
            f"{num_steps} iterations had {steps} steps and {preempted} preemptions, and left "
            f"{after.num_waiting} requests waiting, so the steps differ: use smaller sizes"
        )
    return seconds / num_steps


def _row(engine: Engine, kind: str, seconds: float, steps: int) -> dict:
    """Return a result row whose counts (of sequences, tokens, blocks, ...) are 0."""
    zeros = dict.fromkeys(_COUNTS, 0)
    block_size = engine.runtime_config.block_size
    return {"kind": kind, "block_size": block_size, **zeros, "seconds": seconds, "steps": steps}


_COUNTS = (
    "decode_seqs", "context_tokens", "prompt_seqs", "prompt_tokens", "prompt_pairs",
    "padded_tokens", "logits_rows", "blocks",
)  # fmt: skip


def merged(old: Sequence[dict], new: Sequence[dict]) -> list[dict]:
    """Return the new rows, and the old rows of the kinds that the new rows do not have."""
    replaced = {row["kind"] for row in new}
    return [*(row for row in old if row["kind"] not in replaced), *new]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*ALL_SHAPES], default="opt-13b")
    parser.add_argument(
        "--kinds", choices=[*KINDS, "attention"], nargs="+", default=[*KINDS, "attention"]
    )
    parser.add_argument("--swap-space", type=float, default=2.0, help="GiB of host memory")
    parser.add_argument("--quick", action="store_true", help="a few points with few steps")
    args = parse_arguments(parser)
    start, sizes = time.perf_counter(), QUICK if args.quick else FULL
    rows = []
    for row in _measure_all(args, sizes):
        rows.append({"model": args.shape, **row, "commit": COMMIT})
        print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    name = f"step_times_{args.shape}"
    path = result_path(name)
    old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    print(record(name, merged(old, rows), seconds=time.perf_counter() - start))


def _measure_all(args: argparse.Namespace, sizes: Sizes) -> Iterator[dict]:
    """Yield the rows of `args.kinds`; start an engine only if a kind needs it."""
    if "attention" in args.kinds:
        yield from time_attention(args.shape, sizes)
    kinds = [kind for kind in args.kinds if kind != "attention"]
    if not kinds:
        return
    options: dict = {"max_num_batched_tokens": 2048}
    if "swap" in kinds:
        options |= {"preemption_mode": "swap", "swap_space": args.swap_space}
    # Disable bursts (several decode steps in one launch), because the device model predicts the
    # times of single steps.
    engine = make_engine(args.shape, num_scheduler_steps=1, verbose=True, **options)
    yield from measure(engine, sizes, kinds)


if __name__ == "__main__":
    main()
