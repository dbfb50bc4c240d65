"""Test that an engine can replace its weights by arrays on its devices, and computes later tokens
with the new weights."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from e2e_options import Engines, token_ids
from random_models import random_model
from safetensors.flax import load_file

from jpaged import Engine, SamplingParams
from tests import fp8_experts as made

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPTS = [[5, 9, 2, 7, 1, 8, 3, 6, 4] * 3, [7, 3]]
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 64}

Tensors = dict[str, jax.Array]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Save two checkpoints that differ only in their weights."""
    made = []
    for seed in (0, 1):
        values = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        model = random_model("qwen3", seed=seed, std=0.3, vocab_size=96, **values)
        made.append(tmp_path_factory.mktemp("live"))
        model.save_pretrained(made[-1])
    return made[0], made[1]


@pytest.fixture(scope="module")
def tensors(folders: tuple[Path, Path]) -> tuple[Tensors, Tensors]:
    old, new = (load_file(it / "model.safetensors") for it in folders)
    return old, new


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
    return token_ids(engine.generate(prompts, GREEDY))


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_parallel_size": 2}, {"quantization": "fp8"}, {"async_scheduling": False}],
    ids=str,
)
def test_engine_with_updated_weights_gives_the_same_answers_as_a_new_engine(
    new_engine: Engines, folders: tuple[Path, Path], tensors: tuple[Tensors, Tensors], options: dict
):
    engine = new_engine(folders[0], **OPTIONS, **options)
    before, num_cached = answers(engine), engine.stats().num_cached_tokens
    engine.update_weights(tensors[1], version=7)
    assert engine.weights_version == 7
    after = answers(engine)
    # No request used a cached prefix that the old weights had computed.
    assert engine.stats().num_cached_tokens == num_cached
    assert after == answers(new_engine(folders[1], **OPTIONS, **options)) != before
    engine.sleep(level=2)
    engine.update_weights(tensors[0])
    engine.wake_up()
    assert (answers(engine), engine.weights_version) == (before, 8)
    engine.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_update_quantizes_weights_in_the_same_way_as_a_quantized_checkpoint(
    new_engine: Engines, tmp_path: Path, options: dict
):
    """The checkpoints have dense and mixture-of-experts layers. Each block of 128 x 128 weights has
    one scale."""
    sizes: dict[str, Any] = made.WIDE | {"hidden_size": 192}
    fields = made.FIELDS | sizes | {"quantization_config": made.CONFIGS["block"]}
    old = made.write_checkpoint(tmp_path / "float", "loaded", **sizes)
    rng = np.random.default_rng(1)
    new = {
        name: (it * rng.uniform(0.2, 1.8, it.shape)).astype(ml_dtypes.bfloat16)
        for name, it in old.items()
    }
    for name, tensors in (("old", old), ("new", new)):
        made.save(tmp_path / name, fields, made.quantize_blocks(tensors))
    engine = new_engine(tmp_path / "old", **OPTIONS, **options)
    before = answers(engine)
    engine.update_weights({name: jnp.asarray(it) for name, it in new.items()})
    assert answers(engine) == answers(new_engine(tmp_path / "new", **OPTIONS, **options)) != before
    engine.update_weights(tmp_path / "float")
    assert answers(engine) == before
    engine.check_integrity()
