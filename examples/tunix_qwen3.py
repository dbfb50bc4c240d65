"""Serve a Qwen3 of google-tunix 0.1.7, an NNX module: `python -m examples.tunix_qwen3`."""

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen3 import model as qwen3  # type: ignore

from jpaged import Engine, JaxModel, SamplingParams


def adapt(model: "qwen3.Qwen3", max_positions: int = 4096) -> tuple[JaxModel, nnx.State]:
    """Wrap a Qwen3 of tunix for an engine of jpaged.

    Returns:
        A `JaxModel`, and its parameters. The parameters are the NNX state of `model`. The state
        shares the arrays of `model` without a copy.
    """
    definition, state = nnx.split(model)
    config = model.config

    def forward(params, tokens, positions, step):
        it = nnx.merge(definition, params)
        x, positions = it.embedder.encode(tokens[None]), positions[None]
        for i, layer in enumerate(it.layers):
            attn, h = layer.attn, layer.input_layernorm(x)
            q, k, v = attn.q_norm(attn.q_proj(h)), attn.k_norm(attn.k_proj(h)), attn.v_proj(h)
            q, k = (qwen3.apply_rope(heads, positions, attn.head_dim) for heads in (q, k))
            x += attn.o_proj(step.attend(i, q[0], k[0], v[0])[None])
            x += layer.mlp(layer.post_attention_layernorm(x))
        return it.final_norm(x)[0]

    def logits(params, hidden):
        it = nnx.merge(definition, params)
        if config.use_tied_embedding:
            return it.embedder.decode(hidden[None])[0]
        return it.lm_head(hidden[None])[0]

    heads = config.num_kv_heads, config.head_dim
    sizes = config.num_layers, *heads, config.vocab_size, max_positions
    return JaxModel(forward, logits, *sizes), state


def small_model() -> "qwen3.Qwen3":
    """Return a small model with random weights and tied embeddings."""
    sizes = {"num_layers": 2, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4}
    heads = {"head_dim": 16, "num_kv_heads": 2, "rope_theta": 1_000_000, "norm_eps": 1e-6}
    config = qwen3.ModelConfig(**sizes, **heads, use_tied_embedding=True)
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    noise = lambda it: it + jax.random.normal(jax.random.key(it.size), it.shape) / 3  # noqa: E731
    nnx.update(model, jax.tree.map(noise, nnx.state(model, nnx.Param)))
    return model


def own_logits(model: "qwen3.Qwen3", tokens: jax.Array) -> jax.Array:
    """Return the logits [T, V] that tunix computes without jpaged."""
    mask = jnp.tril(jnp.ones((1, len(tokens), len(tokens)), bool))
    return model(tokens[None], jnp.arange(len(tokens))[None], None, mask)[0][0]


if __name__ == "__main__":
    model, params = adapt(small_model())
    engine = Engine(model, params=params, num_blocks=9)
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    print(engine.generate([[3, 1, 4, 1, 5]], greedy)[0].outputs[0].token_ids)
