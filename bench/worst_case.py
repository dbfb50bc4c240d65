"""Measure the device memory under the largest batch (`python -m bench.worst_case`).

The batch has the maximum number of sequences of the maximum length, in the largest prefill steps.
All use penalties, top-p and log-probabilities; a few also want prompt log-probabilities. The table
compares the memory use that the engine computed at startup with the memory use that JAX's allocator
and the driver report. The driver also counts its context, kernels and graphs.
"""

import argparse
import subprocess
import time
from pathlib import Path

import jax

from bench.common import AS_VLLM, SHAPES, make_engine, random_prompts
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import Engine, SamplingParams
from jpaged.sampling_params import MAX_LOGPROBS

OUTPUT_TOKENS = 8
SCORED_PROMPTS = 4
MIB = 2**20


def params(index: int) -> SamplingParams:
    """Return the sampling parameters of request `index`, which use all features that need device
    memory.

    The first `SCORED_PROMPTS` requests also ask for log-probabilities of their prompts.
    """
    return SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=100,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS if index < SCORED_PROMPTS else None,
        max_tokens=OUTPUT_TOKENS,
        ignore_eos=True,
        seed=index,
    )


def run(engine: Engine) -> float:
    """Serve the largest possible batch, and return the seconds that it takes.

    Raises:
        RuntimeError: an answer has a wrong length.
    """
    count, longest = AS_VLLM["max_num_seqs"], AS_VLLM["max_model_len"]
    prompts = random_prompts([longest - OUTPUT_TOKENS] * count, engine.vocab_size)
    start = time.perf_counter()
    outputs = engine.generate(prompts, [params(i) for i in range(count)], use_tqdm=False)
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if lengths != {OUTPUT_TOKENS}:
        raise RuntimeError(f"answers have {sorted(lengths)} tokens, not {OUTPUT_TOKENS}")
    return time.perf_counter() - start


def driver_bytes() -> tuple[int | None, int | None]:
    """Return the used and total bytes of the first GPU from `nvidia-smi`, or (None, None)."""
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    used, total = (int(part) * MIB for part in text.splitlines()[0].split(","))
    return used, total


def row(model: str, engine: Engine, seconds: float) -> dict:
    """Return a row that compares the memory use that the engine computed with the measured use.

    Sizes are in MiB. The row also has the relative errors of the computed sizes.
    """
    account, stats = engine.memory_account, jax.local_devices()[0].memory_stats()
    used, total = driver_bytes()
    return {
        "model": model,
        "seconds": seconds,
        "account_resident": account.resident / MIB,
        "in_use": stats["bytes_in_use"] / MIB,
        "resident_off": stats["bytes_in_use"] / account.resident - 1,
        "account_total": account.total / MIB,
        "peak": stats["peak_bytes_in_use"] / MIB,
        "limit": stats["bytes_limit"] / MIB,
        "total_off": stats["bytes_limit"] / account.total - 1,
        "driver_used": used / MIB if used is not None else None,
        "driver_off": used / account.total - 1 if used is not None else None,
        "driver_total": total / MIB if total is not None else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*SHAPES], default="qwen3-0.6b")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--cache-dir", type=Path, help="--cache-dir of bench.startup")
    args = parse_arguments(parser)
    cached = {"compilation_cache_dir": args.cache_dir / args.model} if args.cache_dir else {}
    share = args.gpu_memory_utilization
    engine = make_engine(args.model, gpu_memory_utilization=share, verbose=True, **cached)
    if not jax.local_devices()[0].memory_stats():
        parser.error("this device does not report its memory use: run this on a GPU")
    rows = [row(args.model, engine, run(engine))]
    print_table([{"figure": name, "value": value} for name, value in rows[0].items()])
    print(record("worst_case", rows, gpu_memory_utilization=share))


if __name__ == "__main__":
    main()
