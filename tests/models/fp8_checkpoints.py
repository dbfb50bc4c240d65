"""Write FP8 checkpoints for tests."""

import fnmatch
import json
import re
from pathlib import Path
from typing import Any, cast

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LARGEST = 448.0
TOKENS = list(range(2, 14))

WEIGHTS: dict[str, dict[str, Any]] = {
    "channel": {"strategy": "channel"},
    "tensor": {"strategy": "tensor"},
    "block": {"strategy": "block", "block_structure": [128, 128]},
}
ROWS: dict[str, dict[str, Any]] = {
    "token": {"strategy": "token", "dynamic": True},
    "static": {"strategy": "tensor", "dynamic": False},
    "group": {"strategy": "group", "group_size": 128, "dynamic": True},
}
ROW_SCALES = {"q_proj": 0.0001, "v_proj": 0.0002, "up_proj": 0.0001}
"""Static input scale by projection. Other projections have 0.02. A fused projection must use the
largest scale of its parts: with a smaller one, FP8 clips nearly every number."""


def copied(model: PreTrainedModel) -> PreTrainedModel:
    other = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
    other.load_state_dict(model.state_dict())
    return other


def logits_of(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return cast(Any, model)(torch.tensor([TOKENS])).logits[0].float().numpy()


def compressed(
    model: PreTrainedModel, folder: Path, weights: str, rows: str, ignore: tuple[str, ...] = ()
) -> Any:
    """Quantize a copy of the model, write it with compressed-tensors, and return the copy's logits.

    Args:
        weights: A key of `WEIGHTS`, the granularity of the weights' scales.
        rows: A key of `ROWS`, the granularity of the input rows' scales.
        ignore: Names of modules that are not quantized.
    """
    model = copied(model)
    common: Any = {"num_bits": 8, "type": "float", "symmetric": True}
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**common, **WEIGHTS[weights]),
        input_activations=QuantizationArgs(**common, **ROWS[rows]),
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head", *ignore], format="float-quantized"
    )
    apply_quantization_config(model, config)
    for name, found in model.named_modules():
        module: Any = found
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = scales_of(module.weight.data, weights)
            if rows == "static":
                module.input_scale.data.fill_(0.01 if "down_proj" in name else 0.02)
    logits = logits_of(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return logits


def scales_of(weight: Tensor, weights: str) -> Tensor:
    if weights == "channel":
        return weight.abs().amax(1, keepdim=True) / LARGEST
    if weights == "tensor":
        return weight.abs().amax().reshape(1) / LARGEST
    blocks = [-(-size // 128) for size in weight.shape]
    padded = torch.zeros(blocks[0] * 128, blocks[1] * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
    return padded.reshape(blocks[0], 128, blocks[1], 128).amax((1, 3)) / LARGEST


def expanded(scale: Tensor, weight: Tensor) -> Tensor:
    """Repeat the scales, so that they have the shape of the weight, and return them."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(weight.shape)
    if scale.shape[1] == 1 and scale.shape[0] == weight.shape[0]:
        return scale.expand(weight.shape)
    rows, columns = (it.repeat_interleave(128) for it in map(torch.arange, scale.shape))
    return scale[rows[: weight.shape[0]]][:, columns[: weight.shape[1]]]


def published(
    model: PreTrainedModel, folder: Path, weights: str, config: dict[str, Any], **names: str
) -> PreTrainedModel:
    """Write a checkpoint with FP8 weights, and return a model with the dequantized weights.

    Args:
        weights: "tensor" for one scale per weight, "block" for one scale per block of a weight.
        config: The quantization_config. Its lists of excluded modules hold `fnmatch` patterns.
        names: Suffixes of tensor names. `scale` is the suffix for the scale of a weight. `rows` is
            the suffix for the static scale of a projection's input; without it there is none.
    """
    model = copied(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    ignored = [*config.get("modules_to_not_convert", []), *config.get("exclude_modules", [])]
    values = model.state_dict()
    for name in list(tensors):
        module = name.removesuffix(".weight")
        is_left = any(fnmatch.fnmatchcase(module, each) for each in [*ignored, "lm_head"])
        if is_left or not re.search(r"proj\.weight$", name):
            continue
        scale = scales_of(tensors[name], weights)
        wide = expanded(scale, tensors[name])
        tensors[name] = (tensors[name] / wide).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        values[name].copy_(tensors[name].float() * wide)
        tensors[f"{module}.{names['scale']}"] = scale if weights == "block" else scale.reshape(())
        if "rows" in names:
            part = module.rpartition(".")[2]
            tensors[f"{module}.{names['rows']}"] = torch.tensor(ROW_SCALES.get(part, 0.02))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return model


def random_model(**sizes: Any) -> PreTrainedModel:
    """Return a random LLaMA whose weight rows have very different magnitudes."""
    values = {"vocab_size": 97, "num_hidden_layers": 2, "max_position_embeddings": 128}
    values |= {"bos_token_id": 0, "eos_token_id": 1} | sizes
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
                parameter *= torch.rand(parameter.shape[0], 1) + 0.1
    return model
