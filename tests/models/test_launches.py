"""Test which kernels and matrix products a layer launches in a decode step, without a GPU."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jpaged.models.attention import AttentionInputs
from jpaged.models.decoder import Decoder
from jpaged.models.registry import read_model_config
from pallas_kernels import Backend, LayerKV, paged_decode_attention

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
WHOLE_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
KERNELS = {"paged_decode_attention": 1, "add_rms_norm": 2}
# Operations that launch no kernel: they move no data, or XLA fuses them into the next operation.
FREE = {"reshape", "transpose", "squeeze", "slice", "broadcast_in_dim", "convert_element_type"}
ACTIVATION = {"logistic", "mul", "pjit", "jit"}
# with this feed-forward width, the kernel `gated_silu` and not XLA computes the activation
WIDE = 8704
ONCE_A_STEP = {"decode_plan"}

_SHAPE = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_SHAPE |= {"num_key_value_heads": 1, "max_position_embeddings": 128, "hidden_act": "silu"}
_SHAPE |= {"torch_dtype": "bfloat16"}
CONFIGS = {
    f"{family}-{inner}": _SHAPE | {"model_type": family, "intermediate_size": inner}
    for family in ("llama", "qwen3")
    for inner in (48, WIDE)
}
FP8_SHAPE = _SHAPE | {"model_type": "llama", "hidden_size": 1024, "num_attention_heads": 8}
FP8_SHAPE |= {"intermediate_size": 3072}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CONFIGS_IN_FP8 = {
    "fp8": FP8_SHAPE | {"quantization_config": FP8},
    "static fp8": FP8_SHAPE | {"quantization_config": FP8 | {"activation_scheme": "static"}},
    "block fp8": FP8_SHAPE | {"quantization_config": FP8 | {"weight_block_size": [128, 128]}},
}
GEMMA3 = {"model_type": "gemma3_text", "intermediate_size": 48, "head_dim": 256}


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def layers_of_a_step(case: str, rows: int, device: AbstractDevice = H200):
    """Return the jaxpr of each layer of a bfloat16 decode step with Triton kernels."""
    config = read_model_config((CONFIGS | CONFIGS_IN_FP8).get(case, _SHAPE | GEMMA3))
    model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16))
    graphdef, state = nnx.split(model)
    shape = (9, 8, config.num_kv_heads, config.head_size)
    layer = jax.eval_shape(lambda: LayerKV(*(jnp.zeros(shape, jnp.bfloat16) for _ in range(2))))

    def step(state, tokens, positions, pool, tables, lens, slots):
        attention = AttentionInputs(tables, lens, slots, None, Backend.TRITON)
        return nnx.merge(graphdef, state)(tokens, positions, pool, attention)

    pool = (layer,) * config.num_layers
    arguments = (ints(rows), ints(rows), pool, ints(rows, 200), ints(rows), ints(rows))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.make_jaxpr(step)(state, *arguments)
    calls = [eqn for eqn in traced.eqns if eqn.params.get("name") == "_run_layer"]
    assert len(calls) == config.num_layers
    return [call.params["jaxpr"].jaxpr for call in calls]


def operations(jaxpr):
    """Return the names of all operations and kernels of the jaxpr, including inner jits."""
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") in ONCE_A_STEP:
            continue
        if eqn.primitive.name == "pallas_call":
            yield f"kernel {eqn.params['name']}"
        elif "jaxpr" in eqn.params:
            yield from operations(eqn.params["jaxpr"].jaxpr)
        else:
            yield eqn.primitive.name


@pytest.mark.parametrize("case", [*CONFIGS])
def test_layer_launches_the_expected_kernels(case):
    ours = KERNELS | ({"gated_silu": 1} if case.endswith(str(WIDE)) else {})
    free = FREE if "gated_silu" in ours else FREE | ACTIVATION
    for index, layer in enumerate(layers_of_a_step(case, rows=8)):
        counts = Counter(operations(layer))
        kernels = {
            name.removeprefix("kernel "): n for name, n in counts.items() if "kernel" in name
        }
        # The kernel `add_rms_norm` adds an update to the residual stream and normalizes the sum.
        # The first norm of the first layer has no update to add, so XLA computes the norm.
        assert kernels == ours | {"add_rms_norm": 2 if index else 1}
        assert counts["dot_general"] == 4
        if index:
            others = set(counts) - {f"kernel {name}" for name in kernels} - {"dot_general"}
            assert others <= free


@pytest.mark.parametrize("case", [*CONFIGS_IN_FP8])
def test_fp8_layer_launches_the_expected_kernels(case):
    layer = layers_of_a_step(case, 8, WHOLE_H200)[1]
    counts = Counter(operations(layer))
    wanted = {"add_rms_norm_to_fp8": 2, "quantize_rows": 2, "paged_decode_attention": 1}
    assert {f"kernel {name}": n for name, n in wanted.items()}.items() <= counts.items()
    products = {name for name in counts if "vmap" in name}
    assert sum(counts[name] for name in products) == 4
    assert set(counts) - {f"kernel {name}" for name in wanted} - products <= FREE


def test_gemma3_layer_launches_the_expected_kernels():
    """Gemma 3 also has a norm after attention and a norm after feed-forward. XLA computes these two
    norms, without our kernel `add_rms_norm`."""
    for index, layer in enumerate(layers_of_a_step("gemma3", rows=8)):
        counts = Counter(operations(layer))
        norms = counts["kernel add_rms_norm"]
        assert (counts["kernel paged_decode_attention"], norms) == (1, 2 if index else 1)
        assert counts["dot_general"] == 4


def test_decode_attention_plan_is_computed_once_per_step():
    """The jaxpr of each layer computes the attention plan (the work items of decode attention). XLA
    merges these equal computations."""
    shape = (9, 8, 1, 32)

    def step(queries, pool, tables, lens):
        for q, kv in zip(queries, pool, strict=True):
            options = {"scale": 1.0, "backend": Backend.INTERPRET}
            yield paged_decode_attention(q, kv, tables, lens, **options)

    kv = jax.eval_shape(lambda: LayerKV(*(jnp.zeros(shape, jnp.float32) for _ in range(2))))
    q = jax.ShapeDtypeStruct((4, 2, 32), jnp.float32)

    def planned(num_layers):
        arguments = (q,) * num_layers, (kv,) * num_layers, ints(4, 8), ints(4)
        compiled = jax.jit(lambda *a: list(step(*a))).lower(*arguments).compile()
        return re.findall(r"= s32\S* (?:sign|reduce-window)\(", compiled.as_text() or "")

    assert planned(3) == planned(1) != []


def lowered_opt_layer(rows: int) -> str:
    """Return the StableHLO of an OPT layer's projections, lowered for an H200."""
    shape = {"vocab_size": 128, "hidden_size": 1024, "ffn_dim": 4096, "word_embed_proj_dim": 1024}
    shape |= {"num_attention_heads": 16, "num_hidden_layers": 1, "max_position_embeddings": 64}
    config = read_model_config({"model_type": "opt", "activation_function": "relu"} | shape)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16))
    graphdef, state = nnx.split(model.layers[0])

    def projections(state, x, heads):
        layer = nnx.merge(graphdef, state)
        qkv = layer.attention.qkv(x, Backend.TRITON)
        return qkv, layer.attention.output(heads, Backend.TRITON), layer.mlp(x, Backend.TRITON)

    x, heads = (jax.ShapeDtypeStruct((rows, *it), jnp.bfloat16) for it in ((1024,), (16, 64)))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=WHOLE_H200)):
        return (
            jax.jit(projections)
            .trace(state, x, heads)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )


def test_projections_with_bias_use_the_gemm_kernels():
    text = lowered_opt_layer(8)
    assert "stablehlo.dot_general" not in text
    assert text.count("@mosaic_gpu") == 4


def test_addition_of_a_bias_is_fused_into_the_gemm():
    """If the bias had an axis of heads, XLA would write it for every row before adding it.

    That would take 2 % of the time of a 2,048-token step.
    """
    added = re.findall(r"stablehlo\.add .*? : tensor<(\S+)xbf16>", lowered_opt_layer(2048))
    assert added.count("2048x3072") == 1
    assert sorted({*added}) == ["2048x1024", "2048x3072", "2048x4096"]
