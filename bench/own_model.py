"""Compare a user's model with the built-in family (`python -m bench.own_model`).

The same Qwen3 with random weights runs as three models: the built-in family, the functions of
`examples/fused_jax_llama.py`, and those of `examples/plain_jax_llama.py`. Each serves the same
greedy requests:

    A   256 requests, 128 tokens in and 128 out
    D   64 requests, 1,024 tokens in and 128 out

The sizes are those of Llama 3.1 8B by default. A row has the median seconds of a model, and its
time divided by the time of the built-in family. The models take turns for `--rounds` rounds.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.common import AS_VLLM, SHAPES
from bench.compare import parse_arguments
from bench.paging_cost import work_of
from bench.records import print_table, record
from examples import fused_jax_llama, plain_jax_llama
from jpaged import Engine, JaxModel, SamplingParams
from jpaged.config import EMBEDDED_MODEL

MODELS = ("built-in", "fused", "plain")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def shape_fields(shape: str) -> dict[str, Any]:
    """Return the config.json of a Qwen3 with the sizes of a published model."""
    if shape == "embedded":
        text = (EMBEDDED_MODEL / "config.json").read_text(encoding="utf-8")
        return json.loads(text) | {"max_position_embeddings": 8192}
    sizes = {name: SHAPES[shape][name] for name in (*_SIZES, "num_key_value_heads", "vocab_size")}
    head_dim = SHAPES[shape].get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    fields = {**SHAPES["qwen3-0.6b"], **sizes, "head_dim": head_dim, "eos_token_id": None}
    return fields | {"tie_word_embeddings": True, "max_position_embeddings": 8192}


def tensor_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a Qwen3 checkpoint, by their names."""
    width, inner, size = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    heads = fields["num_attention_heads"] * size
    kv_heads = fields["num_key_value_heads"] * size
    layer = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    layer |= {f"self_attn.{it}_norm": (size,) for it in "qk"}
    layer |= {f"self_attn.{it}_proj": (kv_heads, width) for it in "kv"}
    layer |= {"self_attn.q_proj": (heads, width), "self_attn.o_proj": (width, heads)}
    layer |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    layer |= {"mlp.down_proj": (width, inner)}
    count = fields["num_hidden_layers"]
    shapes = {f"model.layers.{i}.{n}.weight": it for i in range(count) for n, it in layer.items()}
    shapes["model.embed_tokens.weight"] = fields["vocab_size"], width
    return shapes | {"model.norm.weight": (width,)}


def user_model(name: str, fields: dict[str, Any]) -> tuple[JaxModel, Any]:
    """Return a user's model with random parameters in bfloat16."""

    def random(index: int, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.bfloat16)
        return 0.02 * jax.random.normal(jax.random.key(index), shape, jnp.bfloat16)

    weights = {n: random(i, it) for i, (n, it) in enumerate(tensor_shapes(fields).items())}
    if name == "plain":
        return plain_jax_llama.make_model(fields), weights
    fuse = jax.jit(lambda it: fused_jax_llama.fuse(it, fields), donate_argnums=0)
    return fused_jax_llama.make_model(fields), fuse(weights)


def start(name: str, fields: dict[str, Any], kv_cache_bytes: int) -> Engine:
    """Create an engine of one of `MODELS`."""
    options = {**AS_VLLM, "kv_cache_memory_bytes": kv_cache_bytes}
    if name != "built-in":
        model, params = user_model(name, fields)
        return Engine(model, params=params, **options)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields), encoding="utf-8")
        dummy = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
        return Engine(folder, **dummy, **options)


def run(engine: Engine, case: str, scale: float, seed: int) -> float:
    """Serve a case, and return the seconds."""
    work = work_of(case, scale, engine.vocab_size, engine.runtime_config.max_model_len, seed)
    params = [
        SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        for most in work.outputs
    ]
    started = time.perf_counter()
    engine.generate(work.prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*SHAPES, "embedded"], default="llama-3.1-8b")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the requests to run")
    parser.add_argument("--rounds", type=int, default=2, help="times to start each model")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs per round")
    parser.add_argument("--kv-cache-gib", type=float, default=16.0, help="size of the pool")
    parser.add_argument("--output", type=Path, help="folder of the results (bench/results)")
    args = parse_arguments(parser)
    fields, seconds = shape_fields(args.model), defaultdict[tuple[str, str], list[float]](list)
    starts = defaultdict[str, list[float]](list)
    for _ in range(args.rounds):
        for name in MODELS:
            started = time.perf_counter()
            engine = start(name, fields, int(args.kv_cache_gib * 2**30))
            starts[name].append(time.perf_counter() - started)
            for case in "AD":
                runs = [run(engine, case, args.scale, seed) for seed in range(args.repeats + 1)]
                seconds[case, name] += runs[1:]
                print(f"{name}, case {case}: {statistics.median(runs[1:]):.3f} s", flush=True)
            del engine
            gc.collect()
    medians = {key: statistics.median(runs) for key, runs in seconds.items()}
    rows = [
        {
            "case": case,
            "model": args.model,
            "as": name,
            "seconds": found,
            "of_built_in": found / medians[case, "built-in"],
            "first_start_s": starts[name][0],
            "last_start_s": starts[name][-1],
        }
        for (case, name), found in medians.items()
    ]
    print_table(rows)
    print(
        record("own_model", rows, folder=args.output, by=("case", "model", "as"), scale=args.scale)
    )


if __name__ == "__main__":
    main()
