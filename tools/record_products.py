"""Records how XLA computes the matrix products of published shapes fastest on the GPU at hand
(`python -m tools.record_products`).

XLA measures ways to compute each product while it compiles, which is most of a cold start, and
measures the worse the more is compiled at once. Here programs are compiled one by one, and what XLA
then knows is written to `jpaged/assets/autotuning/`, for `jpaged.jax_setup` to give to an engine's
start on such a device with the same version of XLA. Anywhere else it is not looked at.
"""

import argparse
import json
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from bench.common import AS_VLLM, SHAPES
from jpaged.config import EngineConfig
from jpaged.jax_setup import AUTOTUNING, autotuning_folder, prepare_jax, recorded_products
from jpaged.models.config import ModelConfig
from jpaged.models.registry import model_class
from jpaged.runtime.buckets import make_buckets
from jpaged.runtime.recipes import Recipe, Shapes, SplitModel, recipes
from jpaged.runtime_config import GPU_DEFAULTS, resolve_limits, with_pool
from pallas_kernels import Backend, select_backend

DTYPE = jnp.dtype(jnp.bfloat16)
NUM_BLOCKS = 4096
"""Of the pool; it has no part in any product."""


def all_recipes(shape: str) -> Iterator[Recipe]:
    """What an engine of the shape compiles, with nothing allocated."""
    model = ModelConfig.from_hf(SHAPES[shape])
    config = EngineConfig(**AS_VLLM)
    limits = resolve_limits(
        config,
        model_max_len=model.max_position_embeddings,
        vocab_size=model.vocab_size,
        backend=Backend.TRITON,
        defaults=GPU_DEFAULTS,
    )
    runtime = with_pool(limits, NUM_BLOCKS, config)
    split = SplitModel.of(nnx.eval_shape(lambda: model_class(model)(model, dtype=DTYPE)))
    shapes = Shapes.of(split, model, runtime, DTYPE)
    yield from recipes(
        split, shapes, runtime, make_buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
    )


def measure(shape: str) -> None:
    """Let XLA measure, one program of each kind of products at a time."""
    chosen: dict[object, Recipe] = {}
    for recipe in all_recipes(shape):
        if recipe.products is not None:
            chosen.setdefault(recipe.products, recipe)
    start = time.perf_counter()
    for recipe in chosen.values():
        recipe.compile()
    print(f"{shape}: {len(chosen)} programs in {time.perf_counter() - start:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*SHAPES], nargs="+", default=[*SHAPES])
    parser.add_argument("--output", type=Path, default=AUTOTUNING)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        prepare_jax(EngineConfig(compilation_cache_dir=cache))
        if select_backend(jax.default_backend()) is not Backend.TRITON:
            raise SystemExit(f"needs an NVIDIA GPU; JAX sees {jax.default_backend()!r} only")
        for shape in args.model:
            measure(shape)
        folder = autotuning_folder(Path(cache))
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        found = {
            str(file.relative_to(folder)): b64encode(file.read_bytes()).decode() for file in files
        }
    path = args.output / recorded_products(jax.local_devices()[0]).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    print(f"{path}: {len(found)} products and fusions")


if __name__ == "__main__":
    main()
