"""Scales of keys and values in FP8, from what a text gives, and a checkpoint that has them."""

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32
from safetensors.numpy import save

from jpaged.engine.startup import resolve_dtype
from jpaged.models.attention import AttentionInputs
from jpaged.models.checkpoint import (
    INDEX_FILE_NAME,
    SINGLE_FILE_NAME,
    CheckpointError,
    read_config,
    read_tensor_infos,
    resolve_checkpoint,
)
from jpaged.models.config import ModelConfig
from jpaged.models.loader import plan_model
from jpaged.models.registry import read_model_config
from jpaged.runtime.kv_cache import make_pool
from jpaged.text.tokenizer import Tokenizer
from pallas_kernels import FP8_MAX, FP8_MIN_ABSMAX, LayerKV, select_backend

BLOCK_SIZE = 16
SCALES_FILE_NAME = "kv_scales.safetensors"
LINKED_FILE_NAME = "weights.safetensors"
"""What `model.safetensors` is linked as."""

KV_CACHE_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}
"""compressed-tensors' words for one scale of all keys of a layer, and one of all values."""

UNQUANTIZED_WEIGHTS = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
"""Its words for weights as they are."""


def calibrate(
    model: str | Path, text: str, folder: str | Path, *, dtype: str = "auto", length: int = 2048
) -> dict[str, tuple[float, float]]:
    """Write a checkpoint with scales of the keys and values that a text gives.

    Args:
        model: checkpoint folder or hub id.
        text: such as the model will see; cut into sequences.
        folder: what to write; must not be there yet, or be empty.
        dtype: of the weights, as of `Engine`.
        length: most tokens of a sequence.

    Returns:
        The scales of keys and of values, by the layer's path.

    Raises:
        ValueError: an empty text, a `length` below 2, a folder that has something in it.
        CheckpointError: a checkpoint that cannot be loaded, or has scales already.
    """
    source, folder = resolve_checkpoint(model), Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; give a folder that is new, or empty")
    if all((source / name).exists() for name in (SINGLE_FILE_NAME, LINKED_FILE_NAME)):
        raise CheckpointError(
            f"{source} has {SINGLE_FILE_NAME}, which is linked as {LINKED_FILE_NAME}, and a file of that "
            "name too; rename it"
        )
    raw_config = read_config(source)
    config = read_model_config(raw_config)
    if config.quantization is not None and config.quantization.has_kv_scales:
        raise CheckpointError(f"{source} has scales of keys and values; load it as it is")
    if (source / SCALES_FILE_NAME).exists():
        raise CheckpointError(
            f"{source} has a file {SCALES_FILE_NAME}, as what is written; rename it"
        )
    if length < 2:
        raise ValueError(f"length={length} must be at least 2 tokens")
    token_ids = Tokenizer.from_folder(source).encode(text)
    if not token_ids:
        raise ValueError("the text has no tokens; give one such as the model will see")
    length = min(length, config.max_position_embeddings)
    platform = jax.devices()[0].platform
    weights_dtype = resolve_dtype(dtype, config, platform)
    loaded_model = plan_model(source, config, dtype=weights_dtype).load()
    max_abs = measure_max_abs(
        loaded_model, config, _split_sequences(token_ids, length), length, weights_dtype
    )
    scales = compute_scales(max_abs)
    layer_scales = {f"layers.{i}": (float(k), float(v)) for i, (k, v) in enumerate(scales)}
    _write_checkpoint(source, folder, raw_config, layer_scales)
    return layer_scales


def _split_sequences(token_ids: Sequence[int], length: int) -> Iterator[list[int]]:
    """The text's tokens in pieces of `length`, each after the text's first token: that may be the
    one that begins a text, whose keys are like no others."""
    first, rest = token_ids[0], token_ids[1:]
    for start in range(0, max(len(rest), 1), length - 1):
        yield [first, *rest[start : start + length - 1]]


def measure_max_abs(
    model: nnx.Module,
    config: ModelConfig,
    sequences: Iterator[list[int]],
    length: int,
    dtype: jnp.dtype,
) -> np.ndarray:
    """The largest absolute key and value of each layer, [layers, 2], in sequences of up to
    `length` tokens."""
    num_blocks = -(-length // BLOCK_SIZE)
    pool = make_pool(config, num_blocks + 1, BLOCK_SIZE, dtype)
    graph, state = nnx.split(model)
    max_abs = np.zeros((config.num_layers, 2), np.float32)
    for tokens in sequences:
        padded = np.zeros(num_blocks * BLOCK_SIZE, np.int32)
        padded[: len(tokens)] = tokens
        maxima, pool = _run_sequence(
            graph, state, jnp.asarray(padded), jnp.int32(len(tokens)), pool
        )
        max_abs = np.maximum(max_abs, np.asarray(maxima))
    return max_abs


@partial(jax.jit, static_argnames="graph", donate_argnames="pool")
def _run_sequence(
    graph: Any,
    state: Any,
    tokens: Int32[Array, "T"],
    num_tokens: Int32[Array, ""],
    pool: tuple[LayerKV, ...],
) -> tuple[Float32[Array, "layers 2"], tuple[LayerKV, ...]]:
    """What a sequence of `num_tokens` tokens leaves in blocks 1 and up, where those of sequences before
    it may be too; padding goes to block 0."""
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    attention = AttentionInputs(
        block_tables=jnp.arange(1, pool[0].k.shape[0], dtype=jnp.int32)[None],
        seq_lens=num_tokens[None],
        slot_mapping=jnp.where(positions < num_tokens, positions + BLOCK_SIZE, 0),
        query_start_loc=jnp.stack([jnp.zeros_like(num_tokens), num_tokens]),
        backend=select_backend(jax.default_backend()),
    )
    _, pool = nnx.merge(graph, state)(tokens, positions, pool, attention)
    maxima = [jnp.max(jnp.abs(part[1:])).astype(jnp.float32) for kv in pool for part in kv]
    return jnp.stack(maxima).reshape(-1, 2), pool


def compute_scales(max_abs: np.ndarray) -> np.ndarray:
    """The scales, 1 where a layer has zeros alone.

    Raises:
        ValueError: a number that is not finite.
    """
    if not np.isfinite(max_abs).all():
        layer, kind = np.argwhere(~np.isfinite(max_abs))[0]
        raise ValueError(
            f"the {('keys', 'values')[kind]} of layer {layer} are not finite: the checkpoint is "
            "broken, or needs another dtype (bfloat16 for float16)"
        )
    scales = np.exp2(np.ceil(np.log2(np.maximum(max_abs, FP8_MIN_ABSMAX) / FP8_MAX)))
    return np.where(max_abs > 0, scales, 1).astype(np.float32)


def _write_checkpoint(
    source: Path, folder: Path, raw_config: dict, scales: dict[str, tuple[float, float]]
) -> None:
    """The folder: links, the scales, and what tells of them."""
    tensors = read_tensor_infos(source)
    folder.mkdir(parents=True, exist_ok=True)
    linked = {SINGLE_FILE_NAME: LINKED_FILE_NAME}
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in ("config.json", INDEX_FILE_NAME):
            os.symlink(file.resolve(), folder / linked.get(file.name, file.name))
    # What stands before the names of layers differs by family and may be left out; where it is the
    # usual one, other loaders find the scales too.
    is_usual = any(it.name.startswith("model.layers.") for it in tensors)
    prefix = "model." if is_usual else ""
    scale_tensors = {
        f"{prefix}{layer}.self_attn.{kind}_scale": np.asarray([scale], np.float32)
        for layer, pair in scales.items()
        for kind, scale in zip("kv", pair, strict=True)
    }
    (folder / SCALES_FILE_NAME).write_bytes(save(scale_tensors))
    tensor_files = {it.name: linked.get(it.file.name, it.file.name) for it in tensors}
    index = {
        "metadata": {},
        "weight_map": tensor_files | dict.fromkeys(scale_tensors, SCALES_FILE_NAME),
    }
    (folder / INDEX_FILE_NAME).write_text(json.dumps(index, indent=1))
    quantization = dict(raw_config.get("quantization_config") or UNQUANTIZED_WEIGHTS)
    config = raw_config | {
        "quantization_config": quantization | {"kv_cache_scheme": KV_CACHE_SCHEME}
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
