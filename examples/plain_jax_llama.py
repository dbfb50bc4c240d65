"""A Llama in plain JAX, served by jpaged: `python -m examples.plain_jax_llama`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.flax import load_file

from jpaged import Engine, JaxModel, SamplingParams
from jpaged.config import EMBEDDED_MODEL


def make_model(config: dict) -> JaxModel:
    """Return a Llama that also normalizes queries and keys, which is the architecture of Qwen3."""
    eps, theta, head_size = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]

    def norm(x, weight):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight

    def rotate(x, positions):  # [T, heads, head_size]
        angles = positions[:, None] / theta ** (jnp.arange(0, head_size, 2) / head_size)
        cos, sin = (it(angles)[:, None].astype(x.dtype) for it in (jnp.cos, jnp.sin))
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def forward(params, tokens, positions, step):
        x = params["model.embed_tokens.weight"][tokens]
        for i in range(config["num_hidden_layers"]):
            p = {name.removeprefix(f"model.layers.{i}."): it for name, it in params.items()}
            h = norm(x, p["input_layernorm.weight"])
            q, k, v = (h @ p[f"self_attn.{it}_proj.weight"].T for it in "qkv")
            q, k, v = (it.reshape(len(x), -1, head_size) for it in (q, k, v))
            q, k = norm(q, p["self_attn.q_norm.weight"]), norm(k, p["self_attn.k_norm.weight"])
            out = step.attend(i, rotate(q, positions), rotate(k, positions), v)
            x += out.reshape(len(x), -1) @ p["self_attn.o_proj.weight"].T
            h = norm(x, p["post_attention_layernorm.weight"])
            gate, up = (h @ p[f"mlp.{it}_proj.weight"].T for it in ("gate", "up"))
            x += (jax.nn.silu(gate) * up) @ p["mlp.down_proj.weight"].T
        return norm(x, params["model.norm.weight"])

    def logits(params, hidden):
        return hidden @ params["model.embed_tokens.weight"].T

    num_layers, num_kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
    others = config["vocab_size"], config["max_position_embeddings"], config["eos_token_id"]
    return JaxModel(forward, logits, num_layers, num_kv_heads, head_size, *others)


def load(folder: Path) -> tuple[JaxModel, dict[str, jax.Array]]:
    """Return the model and the parameters of a checkpoint, in float32."""
    weights = load_file(folder / "model.safetensors").items()
    params = {name: it.astype(jnp.float32) for name, it in weights}
    return make_model(json.loads((folder / "config.json").read_text())), params


if __name__ == "__main__":
    model, params = load(EMBEDDED_MODEL)
    engine = Engine(model, params=params, tokenizer=EMBEDDED_MODEL, kv_cache_memory_bytes=2**26)
    print(engine.generate("Count from 1 to 20", SamplingParams(max_tokens=96))[0].outputs[0].text)
