"""Compare a user's JAX model with the built-in family (`python -m bench.jax_model`).

Three engines serve one architecture with random bf16 weights: the built-in Qwen3, the same model
with the fused operations of jpaged (`examples/fused_jax_llama.py`), and in plain JAX
(`examples/plain_jax_llama.py`). The cases are A of `bench.throughput` and D of `bench.latency`.
The 8B shape is Llama 3.1 8B with Qwen3's norms of queries and keys, and with tied embeddings.
"""

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.common import AS_VLLM, SHAPES, random_prompts
from bench.compare import parse_arguments
from bench.latency import timed
from bench.records import print_table, record
from examples import fused_jax_llama, plain_jax_llama
from jpaged import Engine

MODELS = ("built-in", "fused", "plain")
NUM_COMPILE_WORKERS = 8


def make_config(shape: str, num_layers: int | None) -> dict[str, Any]:
    """Return the config of a Qwen3 model with the sizes of a published shape. The built-in Qwen3,
    `fused_jax_llama` and `plain_jax_llama` support this config."""
    config = SHAPES[shape] | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "eos_token_id": [0],
    }
    return config if num_layers is None else config | {"num_hidden_layers": num_layers}


def make_tensors(config: dict[str, Any]) -> dict[str, jax.Array]:
    """Return random tensors with the names and shapes of a Qwen3 checkpoint, in bf16."""
    width, head_size, inner = (
        config[it] for it in ("hidden_size", "head_dim", "intermediate_size")
    )
    num_queries, num_kv = (
        config[it] * head_size for it in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_norm": (head_size,),
        "self_attn.k_norm": (head_size,),
        "self_attn.q_proj": (num_queries, width),
        "self_attn.k_proj": (num_kv, width),
        "self_attn.v_proj": (num_kv, width),
        "self_attn.o_proj": (width, num_queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    named = {"model.embed_tokens": (config["vocab_size"], width), "model.norm": (width,)}
    for layer in range(config["num_hidden_layers"]):
        named |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
    normal = jax.jit(
        lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1
    )
    keys = jax.random.split(jax.random.key(0), len(named))
    return {
        f"{name}.weight": jnp.ones(shape, jnp.bfloat16) if len(shape) == 1 else normal(key, shape)
        for key, (name, shape) in zip(keys, named.items(), strict=True)
    }


def make_engine(
    model: str, config: dict[str, Any], kv_cache_memory_bytes: int, **more: Any
) -> Engine:
    """Return an engine that serves the model `model`, one of `MODELS`, with random weights.

    `more` are more options of the engine.
    """
    options = AS_VLLM | {"kv_cache_memory_bytes": kv_cache_memory_bytes} | more
    if model == "built-in":
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            return Engine(folder, load_format="dummy", skip_tokenizer_init=True, **options)
    params: Any = make_tensors(config)
    if model == "fused":
        params = fused_jax_llama.fuse(params, config)
    module = fused_jax_llama if model == "fused" else plain_jax_llama
    options["num_compile_workers"] = NUM_COMPILE_WORKERS
    return Engine(module.make_model(config), params=params, **options)


def measure(engine: Engine, repeats: int, scale: float) -> dict[str, float]:
    """Measure case A of `bench.throughput` and case D of `bench.latency`.

    Returns:
        The output tokens per second of case A; and the milliseconds per decode step and the seconds
        of the prefill of case D.
    """

    def seconds(count: int, prompt_len: int, num_tokens: int) -> float:
        """Return the median seconds of several runs. The first run is not counted."""
        count = max(round(count * scale), 1)
        times = []
        for seed in range(1 + repeats):
            prompts = random_prompts([prompt_len] * count, engine.vocab_size, seed)
            times.append(timed(engine, prompts, num_tokens))
        return statistics.median(times[1:])

    whole, prefill = seconds(64, 1024, 128), seconds(64, 1024, 1)
    return {
        "A_tokens_per_s": max(round(256 * scale), 1) * 128 / seconds(256, 128, 128),
        "D_ms": 1e3 * (whole - prefill) / 127,
        "D_prefill_s": prefill,
    }


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per shape and model."""
    for shape in args.shape:
        config = make_config(shape, args.layers)
        for model in args.models:
            engine = make_engine(model, config, int(args.pool_gib * 2**30))
            found = measure(engine, args.repeats, args.scale)
            yield {"shape": shape, "layers": config["num_hidden_layers"], "model": model} | found
            del engine
            gc.collect()


def main(arguments: list[str] | None = None) -> None:
    """Print one row per model, and record the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*SHAPES], nargs="+", default=["llama-3.1-8b"])
    parser.add_argument("--models", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--pool-gib", type=float, default=24.0, help="size of the KV pool")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests")
    args = parse_arguments(parser, arguments)
    found = []
    with tempfile.TemporaryDirectory() as cache:
        # Compile workers of a `JaxModel` run only with JAX's compilation cache.
        jax.config.update("jax_compilation_cache_dir", cache)
        for row in rows(args):
            found.append(row)
            print(*row.values(), sep="  ", flush=True)
            path = record("jax_model", found, by=("shape", "layers", "model"))
    print_table(found)
    print(path)


if __name__ == "__main__":
    main()
