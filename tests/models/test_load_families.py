"""Test loading the checkpoints that transformers writes for every family."""

import dataclasses
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from jpaged.models import loader, weight_plan
from jpaged.models.checkpoint import CheckpointError, WeightRule, read_config, read_tensor_infos
from jpaged.models.decoder import Decoder
from jpaged.models.registry import read_model_config, weight_rules
from jpaged.models.sharding import make_mesh
from jpaged.models.weight_plan import model_parameters, plan_model, plan_weights
from tests.covering import covering

GPT2 = {
    "model_type": "gpt2", "vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4,
    "n_positions": 32,
}  # fmt: skip
OPT = {
    "model_type": "opt", "vocab_size": 50, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "word_embed_proj_dim": 16,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}  # fmt: skip
HF_CONFIGS = {
    "gpt2": GPT2,
    "opt": OPT,
    "opt-350m": OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "llama": LLAMA,
    "llama-biased": LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "mistral-mqa": LLAMA | {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": 8},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "gemma3": LLAMA | {"model_type": "gemma3_text", "head_dim": 6, "tie_word_embeddings": True},
    "qwen3-moe": QWEN3_MOE | {"mlp_only_layers": [1]},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 3},
    "olmoe": LLAMA | {"model_type": "olmoe", "num_experts": 3, "num_experts_per_tok": 2},
    "qwen3-tied": LLAMA | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
}


def make_checkpoint(folder, hf_config, max_shard_size="5GB"):
    """Save a model whose parameters hold the numbers 1, 2, 3, ...; return these numbers."""
    options = dict(hf_config)
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    values = torch.arange(1, 1 + sum(p.numel() for p in model.parameters()), dtype=torch.float32)
    start = 0
    for parameter in model.parameters():
        chunk = values[start : start + parameter.numel()]
        parameter.data = chunk.reshape(parameter.shape).clone()
        if config.model_type == "gemma3_text" and parameter.ndim == 1:
            parameter.data -= 1  # Gemma's checkpoints store a norm's scale minus 1
        start += parameter.numel()
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return values.numpy()


def edit(folder, change):
    """Call `change` with the checkpoint's tensors by name, and save the tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def load(folder, dtype=jnp.float32):
    config = read_model_config(read_config(folder))
    model = plan_model(folder, config, dtype=dtype).load()
    return {path: np.asarray(array) for path, array in model_parameters(model).items()}


@pytest.mark.parametrize(
    ("scaled", "load_format", "num_devices"), covering([True, False], ["auto", "dummy"], [2, 1])
)
def test_kv_scales_come_from_the_checkpoint_or_default_to_1(
    tmp_path, monkeypatch, scaled, load_format, num_devices
):
    if num_devices > jax.device_count():
        pytest.skip("needs 2 devices")
    make_checkpoint(tmp_path, LLAMA)
    config = read_model_config(read_config(tmp_path))
    rules = weight_rules(config)
    given = {"layers.1.attention.k_scale": 0.25, "layers.1.attention.v_scale": 0.5}
    if scaled:
        scales = {path: np.full(1, value, np.float32) for path, value in given.items()}
        edit(tmp_path, lambda tensors: tensors.update(scales))
        scale_rules = [WeightRule(path, path) for path in given]
        more = dataclasses.replace(rules, rules=[*rules.rules, *scale_rules])
        monkeypatch.setattr(weight_plan, "weight_rules", lambda config: more)
    config = dataclasses.replace(config, kv_cache_dtype="float8_e4m3fn")
    options = {"load_format": load_format, "mesh": make_mesh(jax.devices(), num_devices)}
    found = model_parameters(plan_model(tmp_path, config, dtype=jnp.float16, **options).load())
    names = [f"layers.{i}.attention.{kind}_scale" for i in (0, 1) for kind in "kv"]
    assert sorted(path for path in found if path.endswith("_scale")) == names
    for name in names:
        value = found[name]
        expected = given.get(name, 1.0) if scaled and load_format == "auto" else 1.0
        assert (value.dtype, value.shape) == (jnp.float32, (1,))
        shards = [shard.data.tolist() for shard in value.addressable_shards]
        assert shards == [[expected]] * num_devices


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_checkpoint_in_several_files_loads_every_value_once(tmp_path, name):
    values = make_checkpoint(tmp_path / "one", HF_CONFIGS[name])
    make_checkpoint(tmp_path / "many", HF_CONFIGS[name], max_shard_size="4KB")
    assert (tmp_path / "one/model.safetensors").exists()
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    loaded = np.sort(np.concatenate([value.ravel() for value in one.values()]))
    np.testing.assert_array_equal(loaded, values)
    assert one.keys() == many.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, many[path], err_msg=path)


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_transposed_matrix_is_refused(tmp_path, name):
    make_checkpoint(tmp_path, HF_CONFIGS[name])
    config = read_model_config(read_config(tmp_path))
    specs = model_parameters(nnx.eval_shape(lambda: Decoder(config, dtype=jnp.float32)))
    tensors = read_tensor_infos(tmp_path)
    for i, tensor in enumerate(tensors):
        flipped = dataclasses.replace(tensor, shape=tensor.shape[::-1])
        if flipped != tensor:
            changed = [*tensors[:i], flipped, *tensors[i + 1 :]]
            with pytest.raises(CheckpointError, match=re.escape(tensor.name)):
                plan_weights(changed, weight_rules(config), specs)


def test_untied_checkpoint_must_contain_the_head(tmp_path):
    make_checkpoint(tmp_path, LLAMA)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing parameters \(1\): .*lm_head"):
        load(tmp_path)


def test_config_whose_sizes_differ_from_the_tensors_is_refused(tmp_path):
    make_checkpoint(tmp_path, LLAMA)
    config = read_config(tmp_path) | {"intermediate_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "wrong shapes (6): model.layers.0.mlp.down_proj.weight [16, 24]" in str(caught.value)
    assert "intermediate_size=20" in str(caught.value)


@pytest.mark.parametrize("num_layers", [1, 1000])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_wrong_number_of_layers_is_refused_before_allocation(
    tmp_path, name, num_layers, monkeypatch
):
    make_checkpoint(tmp_path, HF_CONFIGS[name])
    field = "n_layer" if name == "gpt2" else "num_hidden_layers"
    config = read_model_config(read_config(tmp_path) | {field: num_layers})
    monkeypatch.setattr(
        weight_plan, "make_abstract_model", lambda *_: pytest.fail("layers were made")
    )
    with pytest.raises(CheckpointError, match=f"num_hidden_layers={num_layers}, .* has 2 layers"):
        plan_model(tmp_path, config, dtype=jnp.float32)


def stack_experts(tensors, names):
    """Replace the tensors of single experts by tensors that each hold all experts of a layer.

    Models of transformers 5 have such tensors. `names` is a value of `EXPERT_TENSORS`.
    """
    block, *parts = names
    found = {name: tensors.pop(name) for name in [*tensors] if f".{block}." in name}
    for layer in {name.partition(f".{block}.")[0] for name in found}:
        own = f"{layer}.{block}"
        tensors[f"{layer}.mlp.gate.weight"] = found[f"{own}.gate.weight"]
        each = [[found[f"{own}.experts.{i}.{part}.weight"] for part in parts] for i in range(3)]
        gate_up = np.stack([np.concatenate(it[:2]) for it in each])
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = gate_up
        tensors[f"{layer}.mlp.experts.down_proj"] = np.stack([it[2] for it in each])


EXPERT_TENSORS = {
    "qwen3-moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
"""Tensor names by model: the sparse feed-forward, then an expert's gate, up and down
projections."""


@pytest.mark.parametrize("name", EXPERT_TENSORS)
def test_tensors_of_stacked_experts_load_like_those_of_single_experts(tmp_path, monkeypatch, name):
    config = HF_CONFIGS[name] | ({"mlp_only_layers": []} if name == "qwen3-moe" else {})
    make_checkpoint(tmp_path, config)
    single = load(tmp_path)
    edit(tmp_path, partial(stack_experts, names=EXPERT_TENSORS[name]))
    assert sum("experts" in it.name for it in read_tensor_infos(tmp_path)) == 4
    monkeypatch.setattr(loader, "SLAB_BYTES", 700)
    stacked = load(tmp_path)
    assert single.keys() == stacked.keys()
    for path, value in single.items():
        np.testing.assert_array_equal(value, stacked[path], err_msg=path)


@pytest.mark.parametrize("name", EXPERT_TENSORS)
def test_weights_of_each_expert_are_loaded_at_its_index(tmp_path, name):
    make_checkpoint(tmp_path, HF_CONFIGS[name])
    block, *names = EXPERT_TENSORS[name]
    tensors, model = load_file(tmp_path / "model.safetensors"), load(tmp_path)
    for index in range(3):
        gate, up, down = (
            tensors[f"model.layers.0.{block}.experts.{index}.{each}.weight"].T for each in names
        )
        gate_up = model["layers.0.mlp.gate_up"][index]
        np.testing.assert_array_equal(gate_up[:, 0], gate)
        np.testing.assert_array_equal(gate_up[:, 1], up)
        np.testing.assert_array_equal(model["layers.0.mlp.down"][index], down)


EXPERT_1 = "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda it: it.pop(EXPERT_1), r"layers.0.mlp.gate_up .*lacks .*experts.1.up_proj.weight"),
        (lambda it: [it.pop(name) for name in [*it] if ".experts." in name],
         r"missing parameters \(4\): .*experts.0.gate_proj.weight, .* and 2 more"),
        (lambda it: it.update({EXPERT_1: it[EXPERT_1][1:]}),
         r"experts.1.up_proj.weight \[11, 16\]"),
        (lambda it: it.update({EXPERT_1.replace("s.1.", "s.3."): it[EXPERT_1]}),
         r"unknown tensors \(1\): .*experts.3.up_proj"),
        (lambda it: it.update({"model.layers.0.mlp.experts.down_proj": np.zeros((3, 16, 12))}),
         r"experts.down_proj is F64"),
        (lambda it: it.update(
            {"model.layers.0.mlp.experts.down_proj": np.zeros((3, 16, 12), np.float32)}),
         r"parameters filled twice \(1\): layers.0.mlp.down"),
    ],
)  # fmt: skip
def test_wrong_expert_tensors_are_refused_before_weights_are_read(
    tmp_path, monkeypatch, change, complaint
):
    make_checkpoint(tmp_path, QWEN3_MOE)
    edit(tmp_path, change)
    for module in (loader, weight_plan):
        monkeypatch.setattr(module, "read_rows", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path)
