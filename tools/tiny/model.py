"""The bundled model in plain JAX: Qwen3's forward pass over packed rows, for training.

Parameters are a flat dictionary with the names and shapes of the Hugging Face checkpoint, so a
checkpoint contains them unchanged. Axis letters: R rows, L tokens of a row, D width, V vocabulary,
N query heads, K KV heads, H head size. jpaged does not use this file to serve the model.
"""

from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from tools.tiny.tokenizer import ENDOFTEXT, EOS_TOKEN_IDS, VOCAB_SIZE

Params = dict[str, Array]
EPSILON = 1e-6


@dataclass(frozen=True)
class Config:
    """Sizes of the model, with the names of Hugging Face's config.json."""

    hidden_size: int = 192
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    vocab_size: int = VOCAB_SIZE
    max_position_embeddings: int = 1536
    rope_theta: float = 10000.0

    def to_hf(self) -> dict[str, object]:
        """Return the content of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "rope_scaling": None,
            "hidden_act": "silu",
            "rms_norm_eps": EPSILON,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": EOS_TOKEN_IDS,
            "pad_token_id": ENDOFTEXT,
            "torch_dtype": "bfloat16",
        }


def init(key: Array, config: Config) -> Params:
    """Return random float32 parameters.

    Norm weights are 1. Matrices are normally distributed; those whose output is added to the
    residual stream are small.
    """
    D, H, F = config.hidden_size, config.head_dim, config.intermediate_size
    query, kv = config.num_attention_heads * H, config.num_key_value_heads * H
    shapes = {"model.embed_tokens.weight": (config.vocab_size, D), "model.norm.weight": (D,)}
    for i in range(config.num_hidden_layers):
        layer = {
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
            "self_attn.q_proj": (query, D),
            "self_attn.k_proj": (kv, D),
            "self_attn.v_proj": (kv, D),
            "self_attn.o_proj": (D, query),
            "self_attn.q_norm": (H,),
            "self_attn.k_norm": (H,),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    keys = jax.random.split(key, len(shapes))
    return {
        name: _init_one(k, name, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _init_one(key: Array, name: str, shape: tuple[int, ...]) -> Array:
    if len(shape) == 1:
        return jnp.ones(shape, jnp.float32)
    shrink = 0.06 if "o_proj" in name or "down_proj" in name else 1.0
    scale = 0.06 if "embed" in name else shrink * shape[1] ** -0.5
    return scale * jax.random.normal(key, shape, jnp.float32)


def forward(
    params: Params, config: Config, tokens: Int32[Array, "R L"], segments: Int32[Array, "R L"]
) -> Float[Array, "R L V"]:
    """Return float32 logits, computed in the dtype of the parameters.

    A token attends to earlier tokens of its segment. Positions restart at 0 in each segment.
    """
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    is_start = jnp.diff(segments, axis=1, prepend=-1) != 0
    positions = index - jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)
    rope = _rope_tables(positions, config)
    same = segments[:, :, None] == segments[:, None, :]
    mask = same & (index[:, :, None] >= index[:, None, :])
    x = params["model.embed_tokens.weight"][tokens]
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        x = x + _attention(layer, _norm(x, layer["input_layernorm.weight"]), rope, mask, config)
        x = x + _mlp(layer, _norm(x, layer["post_attention_layernorm.weight"]))
    x = _norm(x, params["model.norm.weight"])
    embedding = params["model.embed_tokens.weight"]
    return jnp.einsum("rld,vd->rlv", x, embedding, preferred_element_type=jnp.float32)


def _norm(x: Float[Array, "... D"], weight: Float[Array, " D"]) -> Float[Array, "... D"]:
    """Apply RMSNorm in float32 (Zhang and Sennrich, 2019)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + EPSILON)
    shape = (1,) * (x.ndim - 1) + weight.shape
    return (x32 * scale).astype(x.dtype) * weight.reshape(shape)


def _rope_tables(positions: Int32[Array, "R L"], config: Config) -> tuple[Array, Array]:
    """Return the cosines and sines of rotary embedding (Su et al. 2021), float32 [R, L, 1, H/2]."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = positions.astype(jnp.float32)[:, :, None] * config.rope_theta ** -exponents[None, None]
    return jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]


def _rotate(x: Float[Array, "R L N H"], rope: tuple[Array, Array]) -> Float[Array, "R L N H"]:
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _attention(
    layer: Params, x: Float[Array, "R L D"], rope: tuple[Array, Array], mask: Array, config: Config
) -> Float[Array, "R L D"]:
    R, L, _ = x.shape
    q, k, v = (
        (x @ layer[f"self_attn.{name}_proj.weight"].T).reshape(R, L, -1, config.head_dim)
        for name in "qkv"
    )
    q = _rotate(_norm(q, layer["self_attn.q_norm.weight"]), rope)
    k = _rotate(_norm(k, layer["self_attn.k_norm.weight"]), rope)
    kernel = "cudnn" if x.dtype == jnp.bfloat16 and jax.default_backend() == "gpu" else "xla"
    out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation=kernel)
    return out.reshape(R, L, -1) @ layer["self_attn.o_proj.weight"].T


def _mlp(layer: Params, x: Float[Array, "R L D"]) -> Float[Array, "R L D"]:
    gate = jax.nn.silu(x @ layer["mlp.gate_proj.weight"].T)
    return (gate * (x @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
