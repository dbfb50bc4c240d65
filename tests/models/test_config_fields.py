"""Test reading config.json, and the errors for unsupported values."""

import re

import pytest
from hf_models import CASES
from transformers import AutoConfig

from jpaged.models.config import ExpertsConfig, LayerConfig, RopeConfig
from jpaged.models.registry import SUPPORTED_MODEL_TYPES, read_model_config

SIZES = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 256}
LLAMA = SIZES | {"model_type": "llama", "intermediate_size": 96}
GQA = LLAMA | {"num_key_value_heads": 2}
MISTRAL, QWEN2, QWEN3 = (GQA | {"model_type": name} for name in ("mistral", "qwen2", "qwen3"))
QWEN3_MOE = QWEN3 | {"model_type": "qwen3_moe", "moe_intermediate_size": 32}
QWEN3_MOE |= {"num_experts": 8, "num_experts_per_tok": 2}
MIXTRAL = GQA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
OLMOE = GQA | {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 4.0}
OPT = SIZES | {"model_type": "opt", "ffn_dim": 96}
GPT2 = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 64, "n_layer": 3, "n_head": 4}
GPT2 |= {"n_positions": 256}
GEMMA3 = GQA | {"model_type": "gemma3_text", "head_dim": 32}
GEMMA3_IMAGES = {"model_type": "gemma3", "text_config": GEMMA3}
GEMMA3_IMAGES |= {"vision_config": {"image_size": 896}}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
WINDOWS = {"use_sliding_window": True, "sliding_window": 16}

# Fields of config.json as transformers 4 writes them. Transformers 5 has renamed some of these
# fields.
OLD_FILES = {
    "gpt2": GPT2 | {"n_ctx": 256, "torch_dtype": "float32", "summary_use_proj": True},
    "opt": OPT | {"word_embed_proj_dim": 64, "torch_dtype": "float16", "prefix": "</s>"},
    "opt-350m": OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "opt-old-norm": OPT | {"_remove_final_layer_norm": True},
    "llama": LLAMA | {"rope_scaling": None, "pretraining_tp": 1, "torch_dtype": "float16"},
    "llama-theta": LLAMA | {"rope_theta": 5e5, "eos_token_id": [2, 7], "torch_dtype": "bfloat16"},
    "llama-linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama3-original": LLAMA
    | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}, "head_dim": 48},
    "mistral": MISTRAL | {"sliding_window": 16, "rope_theta": 1e4},
    "mistral-full": MISTRAL | {"sliding_window": None, "rope_theta": 1e6},
    "mistral-default": MISTRAL,
    "qwen2": QWEN2 | {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
    "qwen2-window": QWEN2 | WINDOWS | {"max_window_layers": 2},
    "qwen2-late": QWEN2 | WINDOWS | {"max_window_layers": 3},
    "qwen3": QWEN3 | {"head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3-default-head": QWEN3,
    "qwen3-yarn": QWEN3
    | {"rope_theta": 1e6, "rope_scaling": YARN | {"original_max_position_embeddings": 64}},
    "qwen2-yarn": QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": None}},
    "qwen3-moe": QWEN3_MOE | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen3-moe-steps": QWEN3_MOE | {"decoder_sparse_step": 2, "router_aux_loss_coef": 0.001},
    "mixtral": MIXTRAL | {"rope_theta": 1e6, "sliding_window": None, "rms_norm_eps": 1e-5},
    "mixtral-window": MIXTRAL | {"sliding_window": 16, "router_jitter_noise": 0.0},
    "olmoe": OLMOE | {"clip_qkv": None, "norm_topk_prob": False, "eos_token_id": 50279},
    "gemma3": GEMMA3
    | {"sliding_window": 16, "sliding_window_pattern": 2, "eos_token_id": [1, 106]},
    "gemma3-thetas": GEMMA3 | {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
    "gemma3-linear": GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3-defaults": {"model_type": "gemma3_text", "hidden_size": 64}
    | {"intermediate_size": 96, "num_hidden_layers": 8},
}


def windows_of(config: dict) -> tuple:
    return tuple(layer.sliding_window for layer in read_model_config(config).layers)


def through_transformers(config: dict) -> dict:
    values = dict(config)
    return AutoConfig.for_model(values.pop("model_type"), **values).to_dict()


@pytest.mark.parametrize("name", OLD_FILES)
def test_old_config_files_give_the_same_model_config_as_transformers_5_files(name):
    new = through_transformers(OLD_FILES[name])
    assert "rope_scaling" not in new
    assert read_model_config(OLD_FILES[name]) == read_model_config(new)


@pytest.mark.parametrize("name", [n for n in OLD_FILES if "qwen" in n and "moe" not in n])
def test_sliding_window_of_each_layer_is_the_same_as_in_transformers(name):
    theirs = through_transformers(OLD_FILES[name])
    window = {"full_attention": None, "sliding_attention": theirs["sliding_window"]}
    expected = tuple(window[kind] for kind in theirs["layer_types"])
    assert windows_of(OLD_FILES[name]) == expected


def test_attention_sizes_and_norms_are_read_from_config_fields():
    assert windows_of(OLD_FILES["qwen2-window"]) == (None, None, 16)
    assert windows_of(OLD_FILES["mistral"]) == (16, 16, 16)
    llama3 = read_model_config(OLD_FILES["llama3-original"])
    assert {layer.rope for layer in llama3.layers} == {RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 64)}
    assert (llama3.head_size, llama3.num_kv_heads, llama3.eos_token_ids) == (48, 4, (2,))
    assert {layer.scale for layer in llama3.layers} == {48**-0.5}
    opt = read_model_config(OLD_FILES["opt-350m"])
    assert (opt.embedding_size, opt.norm_positions, opt.has_final_norm) == (32, ("sum",), False)
    assert read_model_config(OLD_FILES["opt"]).checkpoint_dtype == "float16"
    gemma = read_model_config(OLD_FILES["gemma3-linear"] | {"query_pre_attn_scalar": 168})
    assert gemma.layers[0] == LayerConfig(168**-0.5, RopeConfig(1e4), 4096, None, "head")
    assert windows_of(OLD_FILES["gemma3-defaults"]) == (*[4096] * 5, None, 4096, 4096)
    assert read_model_config(OLD_FILES["gemma3"]).layers[1].sliding_window is None
    far = read_model_config(OLD_FILES["gemma3"] | {"rope_scaling": {"type": "linear", "factor": 8}})
    assert [layer.rope for layer in far.layers] == [
        RopeConfig(1e4), RopeConfig(1e6, "linear", 8.0), RopeConfig(1e4),
    ]  # fmt: skip


def test_text_config_of_a_multimodal_checkpoint_is_read():
    """The config of a multimodal checkpoint has the text model's sizes in `text_config`.

    The ids of special tokens are outside `text_config`.
    """
    fields = {"eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    assert read_model_config(GEMMA3_IMAGES | fields) == read_model_config(GEMMA3 | fields)
    new = AutoConfig.for_model("gemma3", text_config=GEMMA3).to_dict()
    assert read_model_config(new) == read_model_config(GEMMA3)
    # Null fields of the outer config do not override fields of `text_config`.
    inner = GEMMA3 | {"eos_token_id": [1, 106], "tie_word_embeddings": False}
    nulls = {"eos_token_id": None, "tie_word_embeddings": None}
    outer = GEMMA3_IMAGES | {"text_config": inner} | nulls
    assert read_model_config(outer) == read_model_config(inner)


@pytest.mark.parametrize(
    ("value", "ids"), [(None, ()), (5, (5,)), ([5, 6], (5, 6)), ([], ()), (0, (0,))]
)
def test_eos_token_ids_are_read(value, ids):
    assert read_model_config(LLAMA | {"eos_token_id": value}).eos_token_ids == ids


def test_missing_eos_token_id_gets_the_default_of_the_model_family():
    found = {c["model_type"]: read_model_config(c).eos_token_ids for c in (GPT2, OPT, QWEN3)}
    assert found == {"gpt2": (50256,), "opt": (2,), "qwen3": ()}


@pytest.mark.parametrize(
    ("config", "field", "supported"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'", "gpt2, opt, llama, mistral, qwen2"),
        ({}, "model_type=None", "gpt2"),
        (LLAMA | {"hidden_act": "mish"}, "hidden_act='mish'", "relu"),
        (GPT2 | {"activation_function": "quick_gelu"}, "activation_function", "gelu_new"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'", "llama3"),
        (LLAMA | {"rope_scaling": YARN | {"attn_factor": 0.9}},
         "rope_scaling.attn_factor=0.9", "attention_factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 16}},
         "rope_scaling.beta_fast=16", "factor"),
        (LLAMA | {"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing", "config"),
        (LLAMA | {"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor=0.5", "at least 1"),
        (LLAMA | {"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast=0.5", "beta_slow=1.0"),
        (LLAMA | {"rope_scaling": YARN | {"mscale": "x", "mscale_all_dim": 1.0}}, "mscale='x'",
         "numbers above 0"),
        (LLAMA | {"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate=1", "true"),
        (QWEN3_MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok=9", "num_experts=8"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok=9", "num_local_experts=8"),
        (QWEN3_MOE | {"num_experts": 0}, "num_experts=0", "integers from 1"),
        (QWEN3_MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size=0", "integers from 1"),
        (QWEN3_MOE | {"mlp_only_layers": [0.5]}, "mlp_only_layers=[0.5]", "layer indices"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step=0", "integers from 1"),
        (QWEN3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob=1", "true, false"),
        (QWEN3_MOE | {"num_local_experts": 4}, "num_local_experts=4", "num_experts=8"),
        (QWEN3_MOE | {"n_shared_experts": 1}, "n_shared_experts=1", "0"),
        (QWEN3_MOE | {"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5", "1.0"),
        (QWEN3_MOE | {"use_sliding_window": True, "layer_types": ["full_attention"] * 3},
         "layer_types=", "sliding_attention in every layer"),
        (OLMOE | {"clip_qkv": 8.0}, "clip_qkv=8.0", "None"),
        (OLMOE | {"hidden_act": "gelu"}, "hidden_act='gelu'", "silu for models with experts"),
        (LLAMA | {"rope_parameters": {"rope_type": "longrope"}}, "'longrope'", "default"),
        (QWEN2 | {"rope_scaling": {"mrope_section": [16]}}, "mrope_section=[16]", "factor"),
        (LLAMA | {"rope_parameters": {"full_attention": {}}}, "full_attention={}", "rope_theta"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary", "1.0"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5", "1.0"),
        (LLAMA | {"rope_theta": -1.0}, "rope_theta=-1.0", "above 0"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config", "None"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True", "False"),
        (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True", "False"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights=False", "True"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention=True", "False"),
        (GPT2 | {"pruned_heads": {"0": [1]}}, "pruned_heads", "{}"),
        (QWEN3 | {"num_experts": 8}, "num_experts=8", "0"),
        (LLAMA | {"logits_scaling": 8.0}, "logits_scaling=8.0", "1.0"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "softcapping=30.0", "None"),
        (LLAMA | {"is_causal": False}, "is_causal=False", "True"),
        (LLAMA | {"sliding_window": 16}, "sliding_window=16", "null"),
        (LLAMA | {"layer_types": ["linear_attention"] * 3}, "layer_types", "full_attention"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 3}, "layer_types", "3 layers of full"),
        (QWEN2 | {"layer_types": ["full_attention"] * 2}, "layer_types", "3 layers"),
        (MISTRAL | {"layer_types": ["full_attention"] * 3}, "layer_types", "sliding_attention"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": None},
         "max_window_layers=None", "an integer of at least 0"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window=0", "from 1"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size='64'", "integers from 1 to 1048576"),
        (LLAMA | {"num_hidden_layers": 1025}, "num_hidden_layers=1025", "integers from 1 to 1024"),
        (GPT2 | {"n_layer": 10**9}, "n_layer=1000000000", "1024"),
        (OPT | {"ffn_dim": 10**9}, "ffn_dim=1000000000", "4194304"),
        (MISTRAL | {"sliding_window": 2**31}, "sliding_window=2147483648", "1073741824"),
        (LLAMA | {"rope_theta": float("inf")}, "rope_theta=inf", "finite numbers"),
        (LLAMA | {"rms_norm_eps": 10**400}, "rms_norm_eps=1000", "finite numbers"),
        (LLAMA | {"attention_bias": 1}, "attention_bias=1", "true, false"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads=3", "num_attention_heads=4"),
        (LLAMA | {"num_attention_heads": 5}, "num_attention_heads=5", "hidden_size=64"),
        (LLAMA | {"head_dim": 33}, "head_dim=33", "even"),
        (GEMMA3_IMAGES | {"text_config": None}, "text_config=None", "an object"),
        ({"model_type": "gemma3"}, "text_config is missing", "config.json"),
        (GEMMA3_IMAGES | {"text_config": {"model_type": "gemma3_text"}},
         "text_config.hidden_size is missing", "config.json"),
        (GEMMA3 | {"rope_scaling": {"rope_type": "linear"}},
         "rope_scaling.factor is missing", "config.json"),
        (GEMMA3_IMAGES | {"text_config": LLAMA}, "model_type='llama'", "gemma3_text"),
        (GEMMA3_IMAGES | {"text_config": GEMMA3 | {"num_experts": 2}}, "num_experts=2", "0"),
        (GEMMA3_IMAGES | {"quantization_config": {"bits": 4}}, "quantization_config", "None"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta", "full_"),
        (GEMMA3 | {"rope_parameters": {"full_attention": 3}}, "full_attention=3", "an object"),
        (GEMMA3 | {"hidden_activation": "mish"}, "hidden_activation='mish'", "gelu_pytorch_tanh"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention", "False"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0", "above 0"),
        (LLAMA | {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar=256", "None"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id='</s>'", "integer"),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'", "bfloat16"),
    ],
)  # fmt: skip
def test_unsupported_config_values_are_refused(config, field, supported):
    with pytest.raises(ValueError, match=re.escape(field)) as error:
        read_model_config(config)
    assert supported in str(error.value)


NESTED: list = []
for _ in range(500):
    NESTED = [NESTED]
STRANGE = [None, [], {}, "x", -1, 1.5, True, [[]], {"a": 1}, [{}], 10**400, float("nan"), NESTED]
STRANGE += [YARN | {name: 1e308} for name in ("factor", "beta_fast", "attention_factor")]
STRANGE += [["x"] * 10**5, {"rope_type": []}, {"type": {}}, {"rope_type": "linear", "factor": []}]
READ = {
    *("rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "eos_token_id", "bos_token_id", "torch_dtype"),
    *("head_dim", "n_inner", "tie_word_embeddings", "original_max_position_embeddings"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "rope_local_base_freq", "text_config"),
    *("mlp_only_layers", "decoder_sparse_step", "norm_topk_prob", "num_local_experts"),
    *("rms_norm_eps", "layer_norm_epsilon", "hidden_act", "activation_function", "pruned_heads"),
}


@pytest.mark.parametrize(
    "config",
    [GPT2, OPT, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, OLMOE, GEMMA3, GEMMA3_IMAGES],
)
def test_error_names_the_config_field_for_any_invalid_value(config):
    for name in READ | config.keys():
        for value in STRANGE:
            try:
                hash(read_model_config(config | {name: value}))
            except ValueError as error:
                assert re.match(r"model config: \w", str(error))  # noqa: PT017
                assert len(str(error)) < 1000  # noqa: PT017


@pytest.mark.parametrize(
    "config", [GPT2, OPT, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, OLMOE]
)
def test_config_without_a_required_size_is_refused(config):
    needless = {"model_type"}
    needless |= {"num_key_value_heads"} if config in (LLAMA, OLMOE) else set()
    for name in config.keys() - needless:
        with pytest.raises(ValueError, match=f"{name} is missing"):
            read_model_config({key: config[key] for key in config.keys() - {name}})


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_missing_rope_factors_are_refused(kind):
    for name in "rope_scaling", "rope_parameters":
        with pytest.raises(ValueError, match=rf"{name}\.factor is missing"):
            read_model_config(LLAMA | {name: {"rope_type": kind}})


@pytest.mark.parametrize(("also", "found"), [({}, 256), ({"max_sequence_length": 1024}, 1024)])
def test_max_sequence_length_counts_only_with_linear_rope_scaling(also, found):
    """The configs of Vicuna give the number of positions after scaling in `max_sequence_length`."""
    scaling = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert read_model_config(LLAMA | scaling | also).max_position_embeddings == found
    assert read_model_config(LLAMA | also).max_position_embeddings == 256
    assert read_model_config(LLAMA | {"max_sequence_length": 0}).max_position_embeddings == 256


def test_yarn_multiplies_original_max_position_embeddings():
    scaling = YARN | {"original_max_position_embeddings": 100}
    assert read_model_config(LLAMA | {"rope_scaling": scaling}).max_position_embeddings == 400
    short = scaling | {"factor": 1.5}
    assert read_model_config(LLAMA | {"rope_scaling": short}).max_position_embeddings == 256
    derived = read_model_config(LLAMA | {"rope_scaling": scaling | {"factor": None}}).layers[0].rope
    assert derived is not None
    assert derived.factor == 2.56


def test_config_fields_select_which_layers_have_experts():
    steps = read_model_config(OLD_FILES["qwen3-moe-steps"])
    assert [layer.experts is not None for layer in steps.layers] == [False, True, False]
    listed = read_model_config(OLD_FILES["qwen3-moe"])
    assert [layer.experts is not None for layer in listed.layers] == [True, False, True]
    assert listed.experts == ExpertsConfig(8, 2, 32, normalize=True)
    assert listed.projection("layers.0.mlp.down") is None
    assert listed.projection("layers.1.mlp.down") is not None


def test_null_field_that_a_rope_type_does_not_use_is_ignored():
    scaling = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": None}
    read_model_config(LLAMA | {"rope_scaling": scaling})


def test_fields_without_effect_are_accepted():
    harmless = {"use_cache": True, "transformers_version": "4.40", "attention_dropout": 0.1}
    assert read_model_config(LLAMA | harmless) == read_model_config(LLAMA)


def test_every_supported_model_family_is_tested():
    tested = {case["model_type"] for case in CASES.values()} | {GEMMA3_IMAGES["model_type"]}
    assert tested == set(SUPPORTED_MODEL_TYPES)
    assert hash(read_model_config(QWEN3)) == hash(read_model_config(QWEN3))
