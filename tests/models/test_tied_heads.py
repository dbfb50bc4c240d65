"""Test checkpoints that contain an output head although tie_word_embeddings is true."""

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from harness import NUM_TOKENS, Harness, PagedSequence
from hf_models import hf_config
from safetensors.numpy import load_file, save_file

from jpaged.models.checkpoint import CheckpointError, read_config
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import ModelPlan, plan_model

FAMILIES = ("llama", "qwen2", "gpt2", "opt-350m")
NOT_TIED = "lm_head.weight .*different values: the head is not tied"


def save(folder: Path, case: str) -> dict[str, np.ndarray]:
    """Save a model with a separate head and tie_word_embeddings=true; return the tensors."""
    torch.manual_seed(0)
    config = hf_config(case)
    assert config.tie_word_embeddings
    config.tie_word_embeddings = False
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model.save_pretrained(folder)
    fields = read_config(folder) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(fields))
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def name_of_embedding(tensors: dict[str, np.ndarray]) -> str:
    (name,) = (name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    return name


def plan(folder: Path, dtype: type = jnp.float32, load_format: str = "auto") -> ModelPlan:
    config = read_model_config(read_config(folder))
    return plan_model(folder, config, dtype=dtype, load_format=load_format)


def check_tied(planned: ModelPlan) -> None:
    abstract_model: Any = planned.abstract_model
    assert planned.config.tie_word_embeddings
    assert abstract_model.lm_head is None


def num_bytes(planned: ModelPlan) -> int:
    leaves = jax.tree.leaves(nnx.state(planned.abstract_model))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def check_logits(folder: Path, planned: ModelPlan) -> None:
    """Check that our logits equal those of transformers, which loads the same folder."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = np.random.RandomState(1).randint(2, 97, NUM_TOKENS).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0].numpy()
    model: Any = planned.load()
    (got,) = Harness(model).step([(PagedSequence(ids), NUM_TOKENS)])
    assert np.abs(got - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("case", FAMILIES)
def test_output_head_that_differs_from_the_embedding_is_kept(tmp_path: Path, case: str):
    tensors = save(tmp_path, case)
    with pytest.warns(UserWarning, match=NOT_TIED):
        planned = plan(tmp_path)
    assert not planned.config.tie_word_embeddings
    check_logits(tmp_path, planned)
    tied = plan(tmp_path, load_format="dummy")
    check_tied(tied)
    assert num_bytes(planned) - num_bytes(tied) == tensors["lm_head.weight"].nbytes


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_output_head_equal_to_the_embedding_is_dropped(tmp_path: Path, case: str):
    tensors = save(tmp_path, case)
    rewrite(tmp_path, tensors | {"lm_head.weight": tensors[name_of_embedding(tensors)]})
    check_tied(planned := plan(tmp_path))
    check_logits(tmp_path, planned)


@pytest.mark.parametrize("case", ["qwen2", "gpt2"])
def test_lm_head_serves_as_the_missing_embedding(tmp_path: Path, case: str):
    tensors = save(tmp_path, case)
    del tensors[name_of_embedding(tensors)]
    rewrite(tmp_path, tensors)
    check_tied(planned := plan(tmp_path))
    check_logits(tmp_path, planned)


def test_output_head_and_embedding_are_compared_after_casting(tmp_path: Path):
    tensors = save(tmp_path, "llama")
    embedding = tensors[name_of_embedding(tensors)].astype(jnp.bfloat16).astype(np.float32)
    embedding[3, 5] = 0.0
    head = np.nextafter(embedding, np.float32(9)).astype(np.float32)
    head[3, 5] = -0.0  # -0.0 equals 0.0, but has other bits
    rewrite(tmp_path, tensors | {name_of_embedding(tensors): embedding, "lm_head.weight": head})
    assert plan(tmp_path, jnp.bfloat16).config.tie_word_embeddings
    with pytest.warns(UserWarning, match=NOT_TIED):
        assert not plan(tmp_path).config.tie_word_embeddings


def test_output_head_that_differs_only_in_its_last_value_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jpaged.models.weight_plan.COMPARE_CHUNK_BYTES", 1000)
    tensors = save(tmp_path, "llama")
    head = tensors[name_of_embedding(tensors)].copy()
    rewrite(tmp_path, tensors | {"lm_head.weight": head})
    assert plan(tmp_path).config.tie_word_embeddings
    head[-1, -1] += 1
    rewrite(tmp_path, tensors | {"lm_head.weight": head})
    with pytest.warns(UserWarning, match=NOT_TIED):
        plan(tmp_path)


def test_output_head_with_another_shape_than_the_embedding_is_refused(tmp_path: Path):
    tensors = save(tmp_path, "llama")
    rewrite(tmp_path, tensors | {"lm_head.weight": tensors["lm_head.weight"][1:]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match=r"wrong shapes \(1\): lm_head.weight \[96, 64\]"):
            plan(tmp_path)
