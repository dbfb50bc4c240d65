"""Serve a Llama of marin-levanter, an Equinox module: `python -m examples.levanter_llama`."""

import equinox as eqx  # type: ignore
import haliax as hax  # type: ignore
import jax
from levanter.layers.attention import AttentionMask  # type: ignore
from levanter.models import llama  # type: ignore

from jpaged import Engine, JaxModel, SamplingParams

HEADS = "kv_head", "q_heads_per_group"


def adapt(model: "llama.LlamaLMHeadModel") -> tuple[JaxModel, "llama.LlamaLMHeadModel"]:
    """Return a `JaxModel` for an engine, and its parameters, which are the arrays of `model`."""
    params, rest = eqx.partition(model, eqx.is_array)
    config = model.config

    def forward(params, tokens, positions, step):
        it = eqx.combine(params, rest)
        positions = hax.named(positions, "position")
        x = it.embeddings.embed(hax.named(tokens, "position"))
        for i, layer in enumerate(it.transformer.layers.unstacked()):
            attn, h = layer.self_attn, layer.input_layernorm(x)
            q, k, v = attn._compute_qkv(h, key=None, pos_ids=positions)
            q = q.flatten_axes(HEADS, "heads").rearrange(("position", "heads", "head_size"))
            k, v = (each.rearrange(("position", "kv_head", "head_size")) for each in (k, v))
            out = hax.named(step.attend(i, q.array, k.array, v.array), q.axes)
            x = x + attn.o_proj(out)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return it.transformer.norm(x).rearrange(("position", "embed")).array

    def logits(params, hidden):
        it = eqx.combine(params, rest)
        named = hax.named(hidden, ("position", "embed"))
        found = it.embeddings.unembed(named) if it.lm_head is None else it.lm_head(named)
        return found.rearrange(("position", "vocab")).array

    sizes = config.num_layers, config.num_kv_heads, config.actual_head_size
    return JaxModel(forward, logits, *sizes, model.vocab_size, config.max_seq_len), params


def small_model() -> "llama.LlamaLMHeadModel":
    """Return a small model with random weights."""
    sizes = {"max_seq_len": 128, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2}
    config = llama.LlamaConfig(**sizes, num_heads=4, num_kv_heads=2, initializer_range=0.5)
    return llama.LlamaLMHeadModel.init(hax.Axis("vocab", 64), config, key=jax.random.key(0))


def own_logits(model: "llama.LlamaLMHeadModel", tokens: jax.Array) -> jax.Array:
    """Return the logits [T, V] that levanter computes without jpaged."""
    found = model(hax.named(tokens, "position"), AttentionMask.causal())
    return found.rearrange(("position", "vocab")).array


if __name__ == "__main__":
    model, params = adapt(small_model())
    engine = Engine(model, params=params, num_blocks=9)
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    print(engine.generate([[3, 1, 4, 1, 5]], greedy)[0].outputs[0].token_ids)
