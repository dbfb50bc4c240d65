"""The decode step of published shapes as lowered for an H200, without one: what it launches.

Recorded bounds: a change that raises one costs every step some microseconds.
"""

import re
from collections import Counter
from functools import cache
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from bench.common import SHAPES
from jpaged.models.config import ModelConfig
from jpaged.models.registry import model_class
from jpaged.runtime.buckets import make_buckets
from jpaged.runtime.recipes import Recipe, Shapes, SplitModel, recipes
from jpaged.runtime_config import GPU_DEFAULTS, RuntimeConfig
from pallas_kernels import Backend

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
KERNEL, PRODUCT = "stablehlo.custom_call @__gpu$xla.gpu.triton", "stablehlo.dot_general"
HOPPER_KERNEL = "stablehlo.custom_call @mosaic_gpu"
NUM_LAYERS = 4

# Ours: norm and sum twice, rotation and KV write, attention, its merging. The compiler's: four
# products, the activation. Ten in all.
KERNELS_A_LAYER, PRODUCTS_A_LAYER = 5, 4
# The first layer adds nothing before its norm; the last norm adds. The output head is a product.
KERNELS_BESIDE, PRODUCTS_BESIDE = 0, 1
NUM_PROGRAMS = 79


def all_recipes(shape: str, num_layers: int) -> dict[Any, Recipe]:
    """What an engine of a shape's first layers would compile on a GPU, with nothing allocated."""
    config = ModelConfig.from_hf({**SHAPES[shape], "num_hidden_layers": num_layers})
    model = nnx.eval_shape(lambda: model_class(config)(config, dtype=jnp.bfloat16))
    limits = GPU_DEFAULTS.max_num_seqs, GPU_DEFAULTS.max_num_batched_tokens
    runtime = RuntimeConfig(16, 1000, 2048, *limits, config.vocab_size, Backend.TRITON)
    split = SplitModel.of(model)
    shapes = Shapes.of(split, config, runtime, jnp.dtype(jnp.bfloat16))
    made = recipes(split, shapes, runtime, make_buckets(*limits))
    return {recipe.name: recipe for recipe in made}


@cache
def step(shape: str, *name: Any) -> str:
    """Its text as lowered for CUDA."""
    recipe = all_recipes(shape, NUM_LAYERS)[name]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        traced = recipe.step.trace(*recipe.arguments, **recipe.keywords)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def launches(text: str) -> Counter:
    """Kernels and products of the main function, those of what it calls included."""
    bodies = dict(
        re.findall(r"func\.func (?:public|private) @(\S+?)\((.*?)\n  \}", text, re.DOTALL)
    )

    @cache
    def count(name: str) -> Counter:
        counted = KERNEL, HOPPER_KERNEL, PRODUCT
        total = Counter({what: bodies[name].count(what) for what in counted})
        for called in re.findall(r"\bcall @(\w+)", bodies[name]):
            total += count(called)
        return total

    return count("main")


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("shape", [*SHAPES])
def test_a_decode_step_launches_no_more_than_recorded(shape: str, rows: int):
    counted = launches(step(shape, "decode", rows))
    # Attention of many sequences needs no splits, so nothing is merged.
    kernels = KERNELS_A_LAYER if rows == 8 else KERNELS_A_LAYER - 1
    assert NUM_LAYERS <= counted[KERNEL] <= NUM_LAYERS * kernels + KERNELS_BESIDE
    assert NUM_LAYERS <= counted[PRODUCT] <= NUM_LAYERS * PRODUCTS_A_LAYER + PRODUCTS_BESIDE


@pytest.mark.parametrize("shape", [*SHAPES])
def test_a_mixed_step_launches_decode_attention_once_a_layer_more(shape: str):
    """Of few sequences it launches none: prefill attention then has the decode rows too."""
    kernels = [launches(step(shape, "prefill", (512, seqs))) for seqs in (8, 256)]
    assert [counted[HOPPER_KERNEL] for counted in kernels] == [NUM_LAYERS] * 2
    few, many = (counted[KERNEL] for counted in kernels)
    assert many - few == NUM_LAYERS
    assert many <= NUM_LAYERS * (KERNELS_A_LAYER - 1) + KERNELS_BESIDE


def test_layers_alike_are_lowered_once():
    """The first differs, since nothing is to be added before it."""
    text = step("qwen3-0.6b", "decode", 8)
    assert len(re.findall(r"func\.func private @_run_layer\w*\(", text)) == 2


def test_no_more_programs_than_recorded():
    assert len(all_recipes("qwen3-0.6b", 1)) <= NUM_PROGRAMS
