"""Measure the time of a decode step and of a prefill: cases C and D (`python -m bench.latency`).

    C  1 request, 128 tokens in and 256 out: ms per token
    D  64 requests, 1,024 in and 128 out: seconds of the prefill, ms per decode step

Requests are greedy, ignore EOS, and run through `Engine.generate`; the weights are random. The time
of a decode step is (time of a whole generation - time of a generation of one token) / number of
decode steps. `--format bf16 fp8` measures both formats in one run.
"""

import argparse
import itertools
import statistics
import time

from bench.common import (
    ALL_SHAPES,
    CASE,
    FORMATS,
    SHAPES,
    Floor,
    add_expert_option,
    add_format_option,
    format_of,
    labelled,
    make_engine,
    random_prompts,
)
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import Engine, SamplingParams

CASES = {"C": (1, 128, 256), "D": (64, 1024, 128)}
# Maps (case, model) to four numbers for an H200. The first two are the milliseconds per decode
# step: vLLM's measurement and jpaged's target. The last two are the seconds of the prefill: vLLM's
# measurement and jpaged's target. The version of vLLM is 0.24, or 0.26 for sparse models.
REFERENCE = {
    ("C", "qwen3-0.6b"): (1.64, 0.80, None, None),
    ("C", "llama-3.1-8b"): (4.90, 4.05, None, None),
    ("D", "qwen3-0.6b"): (3.73, 2.60, 0.149, 0.130),
    ("D", "llama-3.1-8b"): (7.63, 6.40, 1.507, 1.40),
    ("C", "qwen3-30b-a3b"): (4.12, 2.60, None, None),
    ("D", "qwen3-30b-a3b"): (19.25, 17.80, 0.904, 0.75),
}
# The same numbers as in `REFERENCE`, for weights and KV cache in FP8. vLLM 0.26 was measured.
FP8_REFERENCE = {
    ("C", "llama-3.1-8b"): (3.57, 2.50, None, None),
    ("D", "llama-3.1-8b"): (5.86, 4.20, 0.943, 0.90),
    ("C", "qwen3-30b-a3b"): (None, 2.10, None, None),
    ("D", "qwen3-30b-a3b"): (None, 10.30, None, None),
}

# The same numbers as in `REFERENCE`, for two tensor-parallel GPUs. vLLM was not measured.
REFERENCE_ON_TWO = {
    ("C", "llama-3.1-8b"): (None, 2.60, None, None),
    ("D", "llama-3.1-8b"): (None, 4.00, None, 0.885),
}


def timed(engine: Engine, prompts: list[list[int]], max_tokens: int) -> float:
    """Generate `max_tokens` tokens for each prompt, and return the seconds that the engine
    takes."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def measure(engine: Engine, shape: str, case: str, repeats: int) -> dict:
    """Return a result row: the median times of a case, and a lower bound of each time.

    Each generation has new prompts.
    """
    count, prompt_len, output_len = CASES[case]
    seeds = itertools.count()

    def run(max_tokens: int) -> float:
        lengths = [prompt_len] * count
        return timed(engine, random_prompts(lengths, engine.vocab_size, next(seeds)), max_tokens)

    run(output_len)
    prefill = statistics.median(run(1) for _ in range(repeats))
    whole = statistics.median(run(output_len) for _ in range(repeats))
    step = (whole - prefill) / (output_len - 1)
    floor = Floor.of(engine)
    step_floor = floor.decode_step(count, prompt_len + output_len / 2)
    form = format_of(engine)
    by_setting = {("bf16", 1): REFERENCE, ("fp8", 1): FP8_REFERENCE, ("bf16", 2): REFERENCE_ON_TWO}
    known = by_setting.get((form, engine.config.tensor_parallel_size), {})
    vllm, target, vllm_prefill, target_prefill = known.get((case, shape), (None,) * 4)
    row = {
        "case": case,
        "model": shape,
        "ms_a_step": 1e3 * step,
        "vllm": vllm,
        "to_reach": target,
        "floor": 1e3 * step_floor,
        "of_floor": step_floor / step,
        "prefill_s": prefill,
        "vllm_prefill": vllm_prefill,
        "to_reach_prefill": target_prefill,
        "floor_prefill": floor.prefill([prompt_len] * count),
    }
    return labelled(row, form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*ALL_SHAPES], nargs="+", default=[*SHAPES])
    parser.add_argument("--case", choices=[*CASES], nargs="+", default=[*CASES])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--synchronous", action="store_true", help="use the synchronous loop")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs (%(default)s)")
    add_expert_option(parser)
    add_format_option(parser)
    args = parse_arguments(parser)
    num_devices, rows = args.tensor_parallel_size, []
    options = {"async_scheduling": not args.synchronous, "tensor_parallel_size": num_devices}
    options["enable_expert_parallel"] = args.enable_expert_parallel
    for shape, form in itertools.product(args.model, args.format):
        engine = make_engine(shape, verbose=True, **options, **FORMATS[form])
        rows += [measure(engine, shape, case, args.repeats) for case in args.case]
        del engine
    print_table(rows)
    name = "latency" + (f"_on_{num_devices}" if num_devices > 1 else "")
    name += "_expert_parallel" if args.enable_expert_parallel else ""
    print(record(name, rows, by=() if args.synchronous else CASE, synchronous=args.synchronous))


if __name__ == "__main__":
    main()
