"""Run a Llama with the fused operations of jpaged: `python -m examples.fused_jax_llama`.

`plain_jax_llama` is the same model in plain JAX.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from examples.plain_jax_llama import load as load_plain
from jpaged import Engine, JaxModel, SamplingParams
from jpaged.config import EMBEDDED_MODEL


def make_model(config: dict) -> JaxModel:
    """Return a Llama that also normalizes queries and keys, which is the architecture of Qwen3."""
    eps, theta, head_size = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]

    def forward(params, tokens, positions, step):
        angle = positions[:, None] / theta ** (jnp.arange(0, head_size, 2) / head_size)
        angles, x, update = (jnp.cos(angle), jnp.sin(angle)), params["embed"][tokens], None
        for i, p in enumerate(params["layers"]):
            h, x = step.add_rms_norm(x, update, p["attention_norm"], eps=eps)
            norms = p["q_norm"], p["k_norm"], eps
            out = step.rope_attend(i, step.project(h, p["qkv"]), angles, norms=norms)
            h, x = step.add_rms_norm(x, step.project(out, p["out"]), p["mlp_norm"], eps=eps)
            update = step.project(step.gated_project(h, p["gate_up"]), p["down"])
        return step.add_rms_norm(x, update, params["norm"], eps=eps)[0]

    def logits(params, hidden, step):
        return step.project_vocabulary(hidden, params["embed"])

    num_layers, num_kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
    others = config["vocab_size"], config["max_position_embeddings"], config["eos_token_id"]
    return JaxModel(forward, logits, num_layers, num_kv_heads, head_size, *others)


def fuse(weights: dict[str, jax.Array], config: dict) -> dict:
    """Build the parameters of `forward` from the tensors of a checkpoint, and return them."""
    layers, head_size = [], config["head_dim"]
    for i in range(config["num_hidden_layers"]):
        p = {name.removeprefix(f"model.layers.{i}."): it for name, it in weights.items()}
        qkv = jnp.concatenate([p[f"self_attn.{it}_proj.weight"] for it in "qkv"]).T
        gate_up = [p[f"mlp.{it}_proj.weight"].T for it in ("gate", "up")]
        out, norm = p["self_attn.o_proj.weight"].T, "layernorm.weight"
        layer = {"attention_norm": p[f"input_{norm}"], "mlp_norm": p[f"post_attention_{norm}"]}
        layer |= {it: p[f"self_attn.{it}.weight"] for it in ("q_norm", "k_norm")}
        layer |= {"qkv": qkv.reshape(len(qkv), -1, head_size), "gate_up": jnp.stack(gate_up, 1)}
        layer |= {"out": out.reshape(-1, head_size, out.shape[1])}
        layers.append(layer | {"down": p["mlp.down_proj.weight"].T})
    embed, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    return {"embed": embed, "norm": norm, "layers": layers}


def load(folder: Path) -> tuple[JaxModel, dict]:
    """Return the model and the parameters of a checkpoint, in float32."""
    config = json.loads((folder / "config.json").read_text())
    return make_model(config), fuse(load_plain(folder)[1], config)


if __name__ == "__main__":
    model, params = load(EMBEDDED_MODEL)
    engine = Engine(model, params=params, tokenizer=EMBEDDED_MODEL, kv_cache_memory_bytes=2**26)
    print(engine.generate("Count from 1 to 20", SamplingParams(max_tokens=96))[0].outputs[0].text)
