"""Measure the output tokens per second of the engine: cases A and B (`python -m bench.throughput`).

    A  256 requests, 128 tokens in and 128 out
    B  512 requests with ShareGPT-like lengths

Requests are greedy, ignore EOS, and run through `Engine.generate`; the weights are random. The
results have the median, the slowest and the fastest of several runs. Case A of a small model takes
only half a second, so other work of the host affects it. `--logprobs 5` and `--penalties` apply to
every request. `--scale` reduces the number of requests. `--format bf16 fp8` measures both formats
in one run.
"""

import argparse
import itertools
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from bench.common import (
    ALL_SHAPES,
    CASE,
    FORMATS,
    SHAPES,
    Floor,
    add_expert_option,
    add_format_option,
    add_sampling_options,
    format_of,
    labelled,
    make_engine,
    random_prompts,
    sampling_options,
)
from bench.compare import parse_arguments
from bench.lengths import sharegpt_like_lengths
from bench.records import print_table, record
from jpaged import Engine, SamplingParams

# Maps (case, model) to a pair of output tokens per second on an H200: the measurement of vLLM 0.24
# (0.26 for sparse models), and jpaged's target.
REFERENCE = {
    ("A", "qwen3-0.6b"): (50_900, 80_000),
    ("B", "qwen3-0.6b"): (28_650, 43_000),
    ("A", "llama-3.1-8b"): (15_350, 18_500),
    ("B", "llama-3.1-8b"): (12_450, 15_000),
    ("A", "qwen3-30b-a3b"): (10_280, 12_000),
    ("B", "qwen3-30b-a3b"): (5_930, 7_200),
}
# The same numbers as in `REFERENCE`, for weights and KV cache in FP8. vLLM 0.26 was measured.
FP8_REFERENCE = {
    ("A", "llama-3.1-8b"): (20_670, 25_000),
    ("B", "llama-3.1-8b"): (None, 19_000),
    ("A", "qwen3-30b-a3b"): (None, 17_500),
}


def lengths_of(case: str, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompt lengths and output lengths of a case's requests.

    If `scale` is below 1, return only that fraction of the requests.
    """
    if case == "A":
        count = max(round(256 * scale), 1)
        return np.full(count, 128), np.full(count, 128)
    prompts, outputs = sharegpt_like_lengths(512)
    count = max(round(512 * scale), 1)
    return prompts[:count], outputs[:count]


def measure(
    engine: Engine,
    shape: str,
    case: str,
    scale: float = 1.0,
    seed: int = 0,
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> dict:
    """Serve the requests of a case once, and return a result row.

    All requests have the sampling parameters `sampling`.
    """
    prompt_lens, output_lens = lengths_of(case, scale)
    prompts = random_prompts(prompt_lens.tolist(), engine.vocab_size, seed)
    params = [
        SamplingParams(temperature=0.0, max_tokens=int(n), ignore_eos=True, **sampling)
        for n in output_lens
    ]
    before = engine.stats()
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    after = engine.stats()
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    floor = Floor.of(engine).generation(
        prompt_lens.tolist(), output_lens.tolist(), engine.runtime_config.max_num_seqs
    )
    num_devices = engine.config.tensor_parallel_size
    is_comparable = scale == 1.0 and num_devices == 1 and not any(sampling.values())
    form = format_of(engine)
    known = {"bf16": REFERENCE, "fp8": FP8_REFERENCE}.get(form, {})
    vllm, target = known.get((case, shape), (None, None)) if is_comparable else (None, None)
    row = {
        "case": case,
        "model": shape,
        "seconds": seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "vllm": vllm,
        "to_reach": target,
        "floor_tokens_per_s": num_tokens / floor,
        "of_floor": floor / seconds,
        "steps": after.num_steps - before.num_steps,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "ms_a_step": 1e3 * seconds / max(after.num_steps - before.num_steps, 1),
    }
    return labelled(row, form)


def measure_often(
    engine: Engine,
    shape: str,
    case: str,
    scale: float = 1.0,
    repeats: int = 3,
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> dict:
    """Run a case several times after a warm-up run, and return the row of the median run.

    Each run has new prompts. For an even number of runs, the median is the faster of the two middle
    runs.
    """
    seeds = range(repeats + 1)
    runs = [measure(engine, shape, case, scale, seed, sampling) for seed in seeds][1:]
    runs.sort(key=lambda run: run["output_tokens_per_s"])
    speeds = [run["output_tokens_per_s"] for run in runs]
    return runs[repeats // 2] | {"slowest": speeds[0], "fastest": speeds[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*ALL_SHAPES], nargs="+", default=[*SHAPES])
    parser.add_argument("--case", choices=["A", "B"], nargs="+", default=["A", "B"])
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the requests to run")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs")
    parser.add_argument("--synchronous", action="store_true", help="use the synchronous loop")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs (%(default)s)")
    add_expert_option(parser)
    add_format_option(parser)
    add_sampling_options(parser)
    args = parse_arguments(parser)
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}: pass 1 or more")
    num_devices, rows = args.tensor_parallel_size, []
    options = {"async_scheduling": not args.synchronous, "tensor_parallel_size": num_devices}
    options["enable_expert_parallel"] = args.enable_expert_parallel
    for shape, form in itertools.product(args.model, args.format):
        start = time.perf_counter()
        engine = make_engine(shape, verbose=True, **options, **FORMATS[form])
        ready = f"engine ready in {time.perf_counter() - start:.1f} s"
        print(f"{shape}, {form}: {ready}", flush=True)
        for case in args.case:
            sampling = sampling_options(args)
            rows.append(measure_often(engine, shape, case, args.scale, args.repeats, sampling))
        del engine
    print_table(rows)
    asked = {"scale": args.scale, "repeats": args.repeats, "synchronous": args.synchronous}
    name = "throughput" + ("_logprobs" if args.logprobs is not None else "")
    name += "_penalties" if args.penalties else ""
    name += f"_on_{num_devices}" if num_devices > 1 else ""
    name += "_expert_parallel" if args.enable_expert_parallel else ""
    # Each new row replaces the recorded row of the same case, and other recorded rows remain. But
    # if `--scale` or `--synchronous` is given, drop all recorded rows: one file must not mix rows
    # that cannot be compared.
    by = CASE if args.scale == 1.0 and not args.synchronous else ()
    print(record(name, rows, by=by, **asked, **sampling_options(args)))


if __name__ == "__main__":
    main()
