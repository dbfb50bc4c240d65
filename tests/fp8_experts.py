"""Write random checkpoints of models with experts whose projections are in FP8."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jpaged.models.checkpoint import read_rows, read_tensor_infos

FIELDS: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96,
    "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "mlp_only_layers": [0], "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 256}
"""Sizes of checkpoints with scales of blocks: two devices can split each projection."""

ROUTERS = ["model.layers.1.mlp.gate"]
_COMPRESSED_ROWS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def _compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": _COMPRESSED_ROWS}
    fields = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return fields | {"config_groups": {"group_0": group}, "ignore": ["lm_head", *ROUTERS]}


CONFIGS: dict[str, dict[str, Any] | None] = {
    "channel": _compressed("channel"),
    "tensor": _compressed("tensor"),
    "block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", *ROUTERS],
    },
    "loaded": None,
}
"""The `quantization_config` of each layout; "loaded" is unquantized until it is loaded."""


def _shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the checkpoint, with one tensor per expert."""
    width, vocab, head = fields["hidden_size"], fields["vocab_size"], fields["head_dim"]
    heads, kv = (fields[f"num_{each}_heads"] * head for each in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for index in range(fields["num_hidden_layers"]):
        layer, inner = f"model.layers.{index}", fields["moe_intermediate_size"]
        shapes |= {f"{layer}.self_attn.q_proj.weight": (heads, width)}
        shapes |= {f"{layer}.self_attn.{each}_proj.weight": (kv, width) for each in "kv"}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (width, heads)}
        shapes |= {f"{layer}.self_attn.{each}_norm.weight": (head,) for each in "qk"}
        norms = "input_layernorm", "post_attention_layernorm"
        shapes |= {f"{layer}.{each}.weight": (width,) for each in norms}
        modules = [f"{layer}.mlp.experts.{i}" for i in range(fields["num_experts"])]
        if index in fields["mlp_only_layers"]:
            modules, inner = [f"{layer}.mlp"], fields["intermediate_size"]
        else:
            shapes[f"{layer}.mlp.gate.weight"] = fields["num_experts"], width
        for module in modules:
            shapes |= {f"{module}.{each}_proj.weight": (inner, width) for each in ("gate", "up")}
            shapes[f"{module}.down_proj.weight"] = width, inner
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}


def _scales(weight: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the FP8 scales of a weight as the checkpoint stores them, and the scales broadcast to
    the shape of the weight."""
    if kind == "tensor":
        scale = np.abs(weight).max().reshape(1) / np.float32(448)
        return scale, np.broadcast_to(scale[None], weight.shape)
    if kind != "block":
        scale = np.abs(weight).max(1, keepdims=True) / np.float32(448)
        return scale, np.broadcast_to(scale, weight.shape)
    rows, columns = (np.arange(size) // 128 for size in weight.shape)
    scale = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    np.maximum.at(scale, (rows[:, None], columns[None]), np.abs(weight))
    scale = (scale / 448).astype(ml_dtypes.bfloat16)
    return scale, scale.astype(np.float32)[rows][:, columns]


def quantize_blocks(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Quantize the projections of a checkpoint to FP8, with one scale per block of 128 x 128."""
    quantized = dict(tensors)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name].astype(np.float32)
        rows, columns = weight.shape
        narrow = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
        scales = np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
        for row in range(0, rows, 128):
            for column in range(0, columns, 128):
                block = weight[row : row + 128, column : column + 128]
                scale = max(np.abs(block).max(), np.float32(1e-30)) / np.float32(448)
                values = np.clip(block / scale, -448, 448).astype(narrow.dtype)
                narrow[row : row + 128, column : column + 128] = values
                scales[row // 128, column // 128] = scale
        quantized |= {name: narrow, f"{name}_scale_inv": scales}
    return quantized


def write_checkpoint(
    folder: Path, kind: str, *, is_stacked: bool = False, **fields: Any
) -> dict[str, np.ndarray]:
    """Write a random checkpoint, and return its tensors with one tensor per expert, dequantized.

    Args:
        folder: Folder to write.
        kind: Key of `CONFIGS`.
        is_stacked: Whether the weights of all experts are stacked, as transformers 5 does.
        fields: Fields that replace those of `FIELDS`.
    """
    fields = FIELDS | (WIDE if kind == "block" else {}) | fields
    rng, tensors, wide = np.random.default_rng(0), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, shape in _shapes(fields).items():
        value = rng.standard_normal(shape) * 1.5 * shape[-1] ** -0.5
        if name.endswith("proj.weight"):
            value *= rng.uniform(0.1, 1.1, (shape[0], 1))
        tensors[name] = wide[name] = value = value.astype(np.float32)
        if not name.endswith("proj.weight"):
            continue
        scale, scales = _scales(value, kind)
        # A scale that was rounded to bfloat16 can give quotients above 448, the largest FP8 number.
        narrow = np.clip(value / scales, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        wide[name] = narrow.astype(np.float32) * scales
        if kind != "loaded":
            tensors[name] = narrow
            suffix = "_scale_inv" if kind == "block" else "_scale"
            tensors[name + suffix] = scale
    save(folder, fields | {"quantization_config": CONFIGS[kind]}, tensors)
    if is_stacked:
        edit(folder, stack)
    return wide


def write_dequantized(folder: Path, kind: str, wide: dict[str, np.ndarray], **fields: Any) -> None:
    """Write the tensors that `write_checkpoint` returned, without quantization."""
    save(folder, FIELDS | (WIDE if kind == "block" else {}) | fields, wide)


def save(folder: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")


def edit(folder: Path, change: Any) -> None:
    """Change the tensors of a checkpoint, and save the checkpoint again."""
    # The safetensors package cannot return FP8 tensors as numpy arrays.
    tensors = {it.name: read_rows(it, slice(None)) for it in read_tensor_infos(folder)}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def stack(tensors: dict[str, np.ndarray]) -> None:
    """Replace the tensors of single experts by the stacked tensors of transformers 5."""
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight(\w*)")
    found = {name: match for name in tensors if (match := pattern.fullmatch(name))}
    parts = {(*it.group(1, 3, 4), int(it[2])): tensors.pop(name) for name, it in found.items()}
    count = 1 + max(expert for *_, expert in parts)
    for module, suffix in {(module, suffix) for module, _, suffix, _ in parts}:
        gate, up, down = (
            np.stack([parts[module, each, suffix, expert] for expert in range(count)])
            for each in ("gate", "up", "down")
        )
        tensors[f"{module}.gate_up_proj{suffix}"] = np.concatenate([gate, up], axis=1)
        tensors[f"{module}.down_proj{suffix}"] = down
