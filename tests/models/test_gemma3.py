"""Compare features that only Gemma 3 has with `transformers`."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from harness import Harness, PagedSequence
from hf_models import CASES, build
from safetensors.numpy import load_file, save_file
from transformers.models.gemma3 import modeling_gemma3

from jpaged.models.checkpoint import CheckpointError, read_config
from jpaged.models.norm import RMSNorm
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import plan_model
from pallas_kernels import Backend

TEXT = {name: value for name, value in CASES["gemma3"].items() if name != "model_type"}
TOKENS = np.random.RandomState(0).randint(2, 97, 12).tolist()


def random_text_model(**changes):
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**TEXT | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model.eval()


def logits_of(model) -> np.ndarray:
    return Harness(model).step([(PagedSequence(TOKENS), len(TOKENS))])[0]


def test_gemma3_attention_scores_are_soft_capped(monkeypatch):
    """The test compares with an attention function of transformers that takes the soft cap as an
    argument.

    The Gemma 3 model of transformers ignores `attn_logit_softcapping`.
    """
    theirs = random_text_model(attn_logit_softcapping=0.5)
    ours = build(
        read_model_config(theirs.config.to_dict()),
        {name: tensor.numpy() for name, tensor in theirs.state_dict().items()},
        jnp.float32,
    )
    capped = partial(modeling_gemma3.eager_attention_forward, softcap=0.5)
    monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", capped)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits_of(ours), expected, atol=1e-4)
    monkeypatch.undo()
    with torch.no_grad():
        assert np.abs(theirs(torch.tensor([TOKENS])).logits[0].numpy() - expected).max() > 0.1


def test_gemma3_embeddings_and_norms_in_bfloat16_equal_transformers():
    """Gemma 3 rounds the factor of its embeddings to bfloat16. The factor of a norm, 1 + weight,
    stays in float32."""
    theirs = random_text_model(hidden_size=48).to(torch.bfloat16)
    tensors = {name: tensor.float().numpy() for name, tensor in theirs.state_dict().items()}
    ours = build(read_model_config(theirs.config.to_dict()), tensors, jnp.bfloat16)
    with torch.no_grad():
        rows = theirs.model.embed_tokens(torch.tensor(TOKENS))
        normed = theirs.model.norm(rows).float().numpy()
    places = jnp.arange(len(TOKENS), dtype=jnp.int32)
    hidden = ours.embed_tokens(jnp.asarray(TOKENS, jnp.int32), places)
    np.testing.assert_array_equal(np.asarray(hidden, np.float32), rows.float().numpy())
    norm = ours.final_norm
    assert isinstance(norm, RMSNorm)
    for got in (norm(hidden), norm.add_norm(hidden, jnp.zeros_like(hidden)[None], Backend.XLA)[0]):
        differing = np.asarray(got, np.float32) != normed
        assert differing.mean() < 0.01  # transformers adds float32 numbers in another order
    plain = RMSNorm(48, 1e-6, dtype=jnp.bfloat16)
    plain.weight = nnx.Param(norm.scale.astype(jnp.bfloat16))
    assert (np.asarray(plain(hidden), np.float32) != normed).mean() > 0.1


def save_multimodal(folder: Path):
    """Save and return a multimodal model of transformers."""
    torch.manual_seed(0)
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=vision, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return model


def test_text_model_of_a_multimodal_checkpoint_is_loaded(tmp_path: Path):
    theirs = save_multimodal(tmp_path)
    config, file = read_model_config(read_config(tmp_path)), tmp_path / "model.safetensors"
    tensors, loaded = load_file(file), []
    for prefix in (None, "model.language_model.", "language_model.model."):
        save_file({renamed(name, prefix): tensor for name, tensor in tensors.items()}, file)
        loaded.append(plan_model(tmp_path, config, dtype=jnp.float32).load())
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits_of(loaded[0]), expected, atol=1e-4)
    states = [jax.tree.leaves(nnx.state(model)) for model in loaded]
    for leaves in zip(*states, strict=True):
        np.testing.assert_array_equal(leaves[1], leaves[0])
        np.testing.assert_array_equal(leaves[2], leaves[0])
    save_file(tensors | {"vision_tower_too": np.ones(1, np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"unknown tensors \(1\): vision_tower_too"):
        plan_model(tmp_path, config, dtype=jnp.float32)


def renamed(name: str, prefix: str | None) -> str:
    """Return the new name of a tensor of the text model, with another prefix. With None as the
    prefix, return the name unchanged."""
    for known in ("model.language_model.", "language_model.model."):
        if prefix is not None and name.startswith(known):
            return prefix + name.removeprefix(known)
    return name
