"""FP8 scales of keys and values, measured with a text and written as a checkpoint."""

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
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import plan_model
from jpaged.runtime.kv_cache import make_pool
from jpaged.text.tokenizer import Tokenizer
from pallas_kernels import FP8_MAX, FP8_MIN_ABSMAX, LayerKV, select_backend

BLOCK_SIZE = 16
SCALES_FILE_NAME = "kv_scales.safetensors"
LINKED_FILE_NAME = "weights.safetensors"
"""Name of the symbolic link to the original `model.safetensors`.

If the link were named `model.safetensors` too, loaders would read this file instead of the index,
and would not find the scales."""

KV_CACHE_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}
"""Value of `kv_cache_scheme` in config.json, in the format of compressed-tensors: one scale for the
keys of a layer and one for its values."""

UNQUANTIZED_WEIGHTS = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
"""Value of `quantization_config` in config.json for unquantized weights, in the format of
compressed-tensors."""


def calibrate(
    model: str | Path, text: str, folder: str | Path, *, dtype: str = "auto", length: int = 2048
) -> dict[str, tuple[float, float]]:
    """Measure the FP8 scales of keys and values with a text, and write a checkpoint with them.

    Args:
        model: Checkpoint folder or Hugging Face id.
        text: Text similar to later prompts. The text is split into sequences.
        folder: Output folder; must be new or empty.
        dtype: Dtype of the weights, as in `EngineConfig`.
        length: Maximum number of tokens in a sequence.

    Returns:
        Scale of the keys and scale of the values, by the path of the layer.

    Raises:
        ValueError: The text is empty, `length` is below 2, `folder` exists and is not an empty
            folder, or the model computes keys or values that are not finite.
        CheckpointError: The checkpoint cannot be loaded, or already has scales.
    """
    source, folder = resolve_checkpoint(model), Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists and is not an empty folder: pass a new folder")
    if all((source / name).exists() for name in (SINGLE_FILE_NAME, LINKED_FILE_NAME)):
        raise CheckpointError(
            f"{source} contains {LINKED_FILE_NAME}: rename this file, because calibration creates "
            f"a symbolic link of that name to {SINGLE_FILE_NAME}"
        )
    raw_config = read_config(source)
    config = read_model_config(raw_config)
    if config.quantization is not None and config.quantization.has_kv_scales:
        raise CheckpointError(f"{source} already has scales of keys and values: load it as it is")
    if (source / SCALES_FILE_NAME).exists():
        raise CheckpointError(
            f"{source} contains {SCALES_FILE_NAME}: rename this file, because calibration writes a "
            "file of that name"
        )
    if length < 2:
        raise ValueError(f"length={length} must be at least 2 tokens")
    token_ids = Tokenizer.from_folder(source).encode(text)
    if not token_ids:
        raise ValueError("the text has no tokens: pass a text similar to later prompts")
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
    """Yield the tokens of a text in sequences of at most `length` tokens.

    Every sequence begins with the first token of the text. This may be the beginning-of-text token,
    whose attention keys differ much from the keys of all other tokens.
    """
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
    """Return the largest absolute key and value of each layer.

    Args:
        model: The loaded model.
        config: Configuration of the model.
        sequences: Token ids of each sequence.
        length: Maximum number of tokens in a sequence.
        dtype: Dtype of the KV cache.

    Returns:
        float32 [layers, 2]: keys in column 0, values in column 1.
    """
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
    """Compute one sequence. Return the largest absolute key and value in each layer of the pool,
    and the pool.

    The first `num_tokens` of `tokens` are the sequence, and the others are padding. KV of the
    sequence is written from block 1 on, and KV of padding to block 0. The maxima also cover KV of
    earlier sequences that is still in the pool.
    """
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
    """Return the scale for each maximum: a power of 2, or 1 if the maximum is 0.

    Args:
        max_abs: Largest absolute key and value of each layer, [layers, 2].

    Raises:
        ValueError: A maximum is not finite.
    """
    if not np.isfinite(max_abs).all():
        layer, kind = np.argwhere(~np.isfinite(max_abs))[0]
        raise ValueError(
            f"the {('keys', 'values')[kind]} of layer {layer} are not finite: the checkpoint is "
            "broken or needs another dtype; with float16, try bfloat16"
        )
    scales = np.exp2(np.ceil(np.log2(np.maximum(max_abs, FP8_MIN_ABSMAX) / FP8_MAX)))
    return np.where(max_abs > 0, scales, 1).astype(np.float32)


def _write_checkpoint(
    source: Path, folder: Path, raw_config: dict, scales: dict[str, tuple[float, float]]
) -> None:
    tensors = read_tensor_infos(source)
    folder.mkdir(parents=True, exist_ok=True)
    linked = {SINGLE_FILE_NAME: LINKED_FILE_NAME}
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in ("config.json", INDEX_FILE_NAME):
            os.symlink(file.resolve(), folder / linked.get(file.name, file.name))
    # If the names of the checkpoint's tensors begin with "model.", give the scales this prefix too,
    # so that other loaders find them. Otherwise use no prefix, because jpaged needs none.
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
