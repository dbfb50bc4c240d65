"""Measure how fast prompts are scored, compared with their prefill (`python -m bench.scoring`).

Every run has 64 new prompts of 1,024 random tokens, through an engine with random weights:

    prefill         generate one token, without scores
    scored          `Engine.score_completions`: log-probabilities of all tokens but the first
    ranked          prompt_logprobs=0: log-probabilities and ranks
    top 5           prompt_logprobs=5: also the five most probable tokens
    top 5, read     the same, and the caller reads each entry, which creates the entry
    completions     `score_completions` of the last 128 tokens; the prompts are not cached

`ratio` compares a time with the time of `prefill`. Runs alternate between the kinds, and the times
are medians. `--head` measures the output head alone on 1,024 rows: the fused kernel, plain XLA, and
the whole logits with `token_scores`.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import (
    ALL_SHAPES,
    FLOPS_PER_SECOND,
    FORMATS,
    SHAPES,
    add_format_option,
    format_of,
    labelled,
    make_engine,
    random_prompts,
)
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import Engine, SamplingParams
from pallas_kernels import einsum, select_backend, token_scores

NUM_PROMPTS, PROMPT_LEN, COMPLETION_LEN = 64, 1024, 128
TARGETS = {
    ("scored", "qwen3-0.6b"): 1.35,
    ("scored", "llama-3.1-8b"): 1.15,
    ("top 5", "qwen3-0.6b"): 2.0,
}
CASE = "case", "model", "format"


def _generate(
    prompts: list[list[int]],
    engine: Engine,
    prompt_logprobs: int | None,
    *,
    reads_entries: bool = False,
) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=prompt_logprobs
    )
    for output in engine.generate(prompts, params, use_tqdm=False):
        if reads_entries:
            assert len(list(output.prompt_logprobs or ())) == len(output.prompt_token_ids)


def _score(prompts: list[list[int]], engine: Engine, completion_len: int | None) -> None:
    split = 1 if completion_len is None else len(prompts[0]) - completion_len
    given, completions = [each[:split] for each in prompts], [each[split:] for each in prompts]
    scores = engine.score_completions(given, completions, use_tqdm=False)
    assert all(len(each.logprobs) == len(prompts[0]) - split for each in scores)


def measure(
    engine: Engine, shape: str, repeats: int, num_prompts: int, prompt_len: int
) -> list[dict]:
    """Run the kinds of runs that the module's docstring lists; return one row per kind."""
    completion_len = min(COMPLETION_LEN, prompt_len // 2)
    kinds: dict[str, Callable[[list[list[int]]], None]] = {
        "prefill": partial(_generate, engine=engine, prompt_logprobs=None),
        "ranked": partial(_generate, engine=engine, prompt_logprobs=0),
        "top 5": partial(_generate, engine=engine, prompt_logprobs=5),
        "top 5, read": partial(_generate, engine=engine, prompt_logprobs=5, reads_entries=True),
    }
    if hasattr(engine, "score_completions"):
        kinds["scored"] = partial(_score, engine=engine, completion_len=None)
        kinds["completions"] = partial(_score, engine=engine, completion_len=completion_len)
    seeds, times = itertools.count(), {kind: list[float]() for kind in kinds}
    for repeat in range(1 + repeats):  # The first repetition is a warm-up and is not counted.
        for kind, run in kinds.items():
            prompts = random_prompts([prompt_len] * num_prompts, engine.vocab_size, next(seeds))
            start = time.perf_counter()
            run(prompts)
            if repeat:
                times[kind].append(time.perf_counter() - start)
    medians = {kind: statistics.median(own) for kind, own in times.items()}
    return [
        labelled(
            {
                "case": kind,
                "model": shape,
                "prompts": num_prompts,
                "prompt_len": prompt_len,
                "seconds": seconds,
                "least": min(times[kind]),
                "most": max(times[kind]),
                "ratio": seconds / medians["prefill"],
                "to_reach": TARGETS.get((kind, shape)),
            },
            format_of(engine),
        )
        for kind, seconds in medians.items()
    ]


def measure_head(shape: str, repeats: int, num_rows: int, vocab_size: int | None) -> list[dict]:
    """Return the times of the output head alone, in microseconds per launch of `num_rows` rows."""
    # Import the kernel here, because the script must also run with older versions of jpaged, which
    # lack the kernel.
    from pallas_kernels import target_scores
    from pallas_kernels.target_scores import xla

    sizes = ALL_SHAPES[shape]
    width, depth = vocab_size or sizes["vocab_size"], sizes["hidden_size"]
    backend = select_backend(jax.default_backend())
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (num_rows, depth), jnp.bfloat16)
    table = (jax.random.normal(keys[1], (width, depth)) * depth**-0.5).astype(jnp.bfloat16)
    targets = jax.random.randint(keys[2], (num_rows,), 0, width, jnp.int32)

    def whole(x, table, targets):
        def part(given):
            logits = einsum("rd,vd->rv", given[0], table, out=jnp.float32)
            wanted = jnp.ones(logits.shape[:1], jnp.bool_)
            return token_scores(logits, given[1], wanted, 20, backend=backend)

        size = min(256, num_rows)
        parts = x.reshape(-1, size, depth), targets.reshape(-1, size)
        return jax.lax.map(part, parts).reshape(num_rows, -1)

    ways = {
        "op": partial(target_scores, backend=backend),
        "xla": partial(xla.target_scores, soft_cap=None),
        "ranks and top 20": whole,
    }
    rows, found = [], {}
    for name, way in ways.items():
        run = jax.jit(way)
        found[name] = jax.block_until_ready(run(x, table, targets))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            result = [run(x, table, targets) for _ in range(20)]
            jax.block_until_ready(result)
            times.append((time.perf_counter() - start) / 20)
        seconds = statistics.median(times)
        flops = 2 * num_rows * depth * width
        rows.append(
            {
                "case": f"head, {name}",
                "model": shape,
                "rows": num_rows,
                "us": 1e6 * seconds,
                "tflops": flops / seconds / 1e12,
                "floor_us": 1e6 * flops / FLOPS_PER_SECOND,
            }
        )
    for ours, xlas in zip(found["op"], found["xla"], strict=True):
        np.testing.assert_allclose(ours, xlas, rtol=2e-4, atol=2e-3)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*ALL_SHAPES], nargs="+", default=[*SHAPES])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--prompt-len", type=int, default=PROMPT_LEN)
    parser.add_argument("--head", action="store_true", help="measure the output head alone")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs (%(default)s)")
    add_format_option(parser)
    args = parse_arguments(parser)
    rows, num_devices = [], args.tensor_parallel_size
    for shape in args.model:
        if args.head:
            rows += measure_head(shape, args.repeats, 1024, None)
            continue
        for form in args.format:
            options = {"tensor_parallel_size": num_devices, **FORMATS[form]}
            engine = make_engine(shape, verbose=True, **options)
            rows += measure(engine, shape, args.repeats, args.prompts, args.prompt_len)
            del engine
    print_table(rows)
    if not args.head:
        name = "scoring" + (f"_on_{num_devices}" if num_devices > 1 else "")
        print(record(name, rows, by=CASE))


if __name__ == "__main__":
    main()
