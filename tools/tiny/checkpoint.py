"""Write and read the folder of the bundled model, which is a Hugging Face checkpoint."""

import json
from pathlib import Path

import jax.numpy as jnp
from safetensors.flax import load_file, save_file

from tools.tiny.model import Config, Params
from tools.tiny.tokenizer import ENDOFTEXT, EOS_TOKEN_IDS, save_tokenizer


def save_checkpoint(folder: Path, params: Params, config: Config) -> None:
    """Write a checkpoint: configuration, bfloat16 weights, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    generation = {"eos_token_id": EOS_TOKEN_IDS, "pad_token_id": ENDOFTEXT, "do_sample": False}
    _write_json(folder / "config.json", config.to_hf())
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(folder, config.max_position_embeddings)
    weights = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_checkpoint(folder: Path, dtype: jnp.dtype) -> tuple[Params, Config]:
    """Return the weights and the model sizes of a checkpoint. Convert the weights to `dtype`."""
    settings = json.loads((folder / "config.json").read_text())
    config = Config(**{name: settings[name] for name in Config.__dataclass_fields__})
    weights = load_file(folder / "model.safetensors")
    return {name: value.astype(dtype) for name, value in weights.items()}, config


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
