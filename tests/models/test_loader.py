"""Test the loader with a small model that has every kind of tensor layout."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jpaged.models import loader, weight_plan
from jpaged.models.checkpoint import CheckpointError, WeightRule, WeightRules
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import model_parameters, plan_model

V, D, N, K, H, F = 11, 6, 4, 2, 8, 7
LAYERS = 2
SIZES = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": N}
SIZES |= {"num_key_value_heads": K, "head_dim": H, "intermediate_size": F}
SIZES |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
CONFIG = read_model_config(SIZES | {"model_type": "llama"})
DTYPES = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}


def param(dtype, *shape):
    return nnx.Param(jnp.zeros(shape, dtype))


class Layer(nnx.Module):
    def __init__(self, dtype):
        self.norm = param(dtype, D)
        self.qkv = param(dtype, D, N + 2 * K, H)
        self.qkv_bias = param(dtype, N + 2 * K, H)
        self.output = param(dtype, N, H, D)
        self.gate_up = param(dtype, D, 2, F)


class Model(nnx.Module):
    def __init__(self, config, *, dtype):
        self.embedding = param(dtype, V, D)
        self.head = param(dtype, D, V)
        self.layers = nnx.List([Layer(dtype) for _ in range(config.num_layers)])


def model_rules(config=CONFIG):
    rules = [WeightRule("embed", "embedding"), WeightRule("lm_head", "head", (D, V), ((1,), (0,)))]
    for i in range(config.num_layers):

        def piece(name, target, *place, i=i):
            rules.append(WeightRule(f"layers.{i}.{name}", f"layers.{i}.{target}", *place))

        rules.append(WeightRule(f"layers.{i}.norm", f"layers.{i}.norm", addend=0.5))
        piece("o", "output", (N, H, D), ((2,), (0, 1)))
        for name, heads, start in (("q", N, 0), ("k", K, N), ("v", K, N + K)):
            piece(name, "qkv", (D, heads, H), ((1, 2), (0,)), 1, start)
            piece(f"{name}_bias", "qkv_bias", (heads, H), ((0, 1),), 0, start)
        for start, name in enumerate(("gate", "up")):
            piece(name, "gate_up", (D, 1, F), ((1, 2), (0,)), 1, start)
    return WeightRules(rules, "model_", r"layers\.\d+\.mask")


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setattr(weight_plan, "Decoder", Model)
    monkeypatch.setattr(weight_plan, "weight_rules", model_rules)


def make_tensors(dtype=np.float32):
    shapes = {"embed": (V, D), "lm_head": (V, D)}
    for i in range(LAYERS):
        layer = {
            "norm": (D,), "o": (D, N * H), "gate": (F, D), "up": (F, D),
            "q": (N * H, D), "k": (K * H, D), "v": (K * H, D),
            "q_bias": (N * H,), "k_bias": (K * H,), "v_bias": (K * H,),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def expected_parameters(tensors, dtype=np.float32):
    expected = {"embedding": tensors["embed"], "head": tensors["lm_head"].T}
    for i in range(LAYERS):
        t = {name: tensors[f"layers.{i}.{name}"] for name in
             ("norm", "o", "gate", "up", "q", "k", "v", "q_bias", "k_bias", "v_bias")}  # fmt: skip
        qkv = np.concatenate([t["q"], t["k"], t["v"]]).T.reshape(D, N + 2 * K, H)
        biases = np.concatenate([t["q_bias"], t["k_bias"], t["v_bias"]]).reshape(-1, H)
        gate_up = np.stack([t["gate"].T, t["up"].T], axis=1)
        output = t["o"].T.reshape(N, H, D)
        names = ("norm", "qkv", "qkv_bias", "output", "gate_up")
        values = (t["norm"].astype(dtype) + dtype(0.5), qkv, biases, output, gate_up)
        expected |= {f"layers.{i}.{n}": x for n, x in zip(names, values, strict=True)}
    return expected


def save(folder, tensors, num_files=1):
    for i in range(num_files):  # The parts of a fused parameter are in different files.
        names = list(tensors)[i::num_files]
        part = {name: np.ascontiguousarray(tensors[name]) for name in names}
        save_file(part, folder / f"part-{i}.safetensors")


def load(folder, dtype=jnp.float32, **options):
    return model_parameters(plan_model(folder, CONFIG, dtype=dtype, **options).load())


@pytest.mark.parametrize("slab_bytes", [loader.SLAB_BYTES, 40, 1])
@pytest.mark.parametrize("num_files", [1, 5])
def test_every_value_is_loaded_into_its_parameter(tmp_path, monkeypatch, num_files, slab_bytes):
    monkeypatch.setattr(loader, "SLAB_BYTES", slab_bytes)
    tensors = make_tensors()
    save(tmp_path, tensors, num_files)
    got, expected = load(tmp_path), expected_parameters(tensors)
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        assert isinstance(got[path], jax.Array)
        np.testing.assert_array_equal(got[path], value, err_msg=path)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_loaded_weights_keep_their_dtype_or_are_cast_to_the_requested_one(tmp_path, source, target):
    tensors = make_tensors(DTYPES[source])
    save(tmp_path, tensors)
    got = load(tmp_path, DTYPES[target])
    for path, value in expected_parameters(tensors, DTYPES[target]).items():
        assert got[path].dtype == DTYPES[target]
        np.testing.assert_array_equal(got[path], value.astype(DTYPES[target]), err_msg=path)


def test_loaded_weights_survive_a_change_of_the_file(tmp_path):
    tensors = make_tensors()
    save(tmp_path, tensors)
    got = load(tmp_path)
    file = tmp_path / "part-0.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    np.testing.assert_array_equal(got["embedding"], tensors["embed"])


def test_ignored_tensors_can_have_any_dtype(tmp_path):
    tensors = make_tensors()
    save(tmp_path, tensors | {"layers.0.mask": np.ones((3, 3), np.bool_)})
    np.testing.assert_array_equal(load(tmp_path)["embedding"], tensors["embed"])


def without(*names):
    return {name: tensor for name, tensor in make_tensors().items() if name not in names}


def changed(name, tensor):
    return make_tensors() | {name: tensor}


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        (changed("extra", np.ones(1)), r"unknown tensors \(1\): extra\."),
        (changed("layers.1.extra", np.ones(1)), r"unknown tensors \(1\): layers\.1\.extra\."),
        (changed("layers.2.extra", np.ones(1)), r"unknown tensors \(1\): layers\.2\.extra\."),
        (changed("layers.2.norm", np.ones(D)), r"num_hidden_layers=2, .* has 3 layers"),
        (without("embed"), r"missing parameters \(1\): embedding \(comes from embed\)"),
        (without("layers.1.norm"), r"missing parameters \(1\): layers\.1\.norm"),
        (without("layers.1.k"), r"missing piece \(1\): layers\.1\.qkv along axis 1 .*\.k\)"),
        (without("layers.0.v_bias"), r"missing piece \(1\): layers\.0\.qkv_bias .*v_bias\)"),
        (without("layers.0.gate"), r"missing piece \(1\): layers\.0\.gate_up"),
        (changed("embed", np.ones((V, D + 1), np.float32)),
         r"\(1\): embed \[11, 7\] .* \[11, 6\]\. config.json says vocab_size=11, hidden_size=6,"),
        (changed("layers.0.q", np.ones((N * H + 1, D), np.float32)),
         r"wrong shapes \(1\): layers\.0\.q \[33, 6\] should be \[32, 6\] for layers\.0\.qkv"),
        (changed("layers.0.v", np.ones((3 * H, D), np.float32)),
         r"wrong shapes \(1\): layers\.0\.v \[24, 6\] should be \[16, 6\] for .* \[6, 8, 8\]"),
        (changed("layers.0.q", np.ones((N * H, D), np.int8)),
         r"wrong dtypes \(1\): layers\.0\.q is I8, supported are F32, F16, BF16"),
        (changed("embed", np.ones((V, D), ml_dtypes.float8_e4m3fn)), "embed is F8_E4M3"),
        (changed("embed", np.ones((V, D))), "embed is F64"),
        (changed("model_embed", np.ones((V, D), np.float32)),
         r"filled twice \(1\): embedding by embed and model_embed"),
    ],
)  # fmt: skip
def test_error_for_mismatched_tensors_names_the_tensors(tmp_path, tensors, complaint):
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path)


def test_error_lists_all_problems_and_shortens_long_lists(tmp_path):
    tensors = without("embed", "layers.0.up") | {f"extra{i:02}": np.ones(1) for i in range(13)}
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    for part in ("unknown tensors (13): extra00", "extra09 and 3 more", "embedding"):
        assert part in message
    assert "layers.0.gate_up" in message
    assert "extra10" not in message


def use_rules(monkeypatch, rules):
    changed_rules = replace(model_rules(), rules=rules)
    monkeypatch.setattr(weight_plan, "weight_rules", lambda config: changed_rules)


def test_tensor_for_a_parameter_that_the_model_lacks_is_refused(tmp_path, monkeypatch):
    use_rules(monkeypatch, [*model_rules().rules, WeightRule("wpe", "positions")])
    save(tmp_path, changed("wpe", np.ones((V, D), np.float32)))
    with pytest.raises(CheckpointError, match=r"unknown.*: wpe \(the model has no positions\)"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("layers.0.k", r"missing piece \(1\): layers\.0\.qkv along axis 1 \(lacks a tensor that"),
        ("embed", r"missing parameters \(1\): embedding \(comes from a tensor that no rule"),
    ],
)
def test_name_mapping_that_leaves_a_parameter_without_a_tensor_is_refused(
    tmp_path, monkeypatch, source, complaint
):
    use_rules(monkeypatch, [rule for rule in model_rules().rules if rule.source != source])
    save(tmp_path, without(source))
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path)


def test_two_name_mappings_to_one_parameter_are_refused(tmp_path, monkeypatch):
    use_rules(monkeypatch, [WeightRule("embed", "head"), *model_rules().rules])
    save(tmp_path, make_tensors())
    with pytest.raises(CheckpointError, match=r"filled twice \(1\): head by embed and "):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model_embed", "embed"])
def test_two_tensors_for_one_parameter_are_refused(tmp_path, name):
    save(tmp_path, make_tensors())
    save_file({name: np.ones((V, D), np.float32)}, tmp_path / "second.safetensors")
    complaint = rf"filled twice \(1\): embedding by embed and {name}\b"
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path)


def test_dummy_weights_need_no_folder_and_depend_only_on_the_seed():
    def dummy(seed):
        return load("/nowhere", jnp.bfloat16, load_format="dummy", seed=seed)

    first, again, other = dummy(1), dummy(1), dummy(2**40)
    for path, value in first.items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(value, again[path])
        if path.endswith("norm"):
            np.testing.assert_array_equal(value, np.ones(D))
        else:
            assert 0.01 < np.std(np.asarray(value, np.float32)) < 0.03
            assert not np.array_equal(value, other[path])
    assert not np.array_equal(first["layers.0.qkv"], first["layers.1.qkv"])


def test_number_of_traversals_of_the_model_does_not_depend_on_its_layers(monkeypatch):
    """A traversal takes as long as the model has parameters. With one traversal per parameter, the
    time to load a model would grow with the square of its layers."""
    calls = list[nnx.Module]()

    def count(model):
        calls.append(model)
        return model_parameters(model)

    monkeypatch.setattr(weight_plan, "model_parameters", count)

    def num_traversals(num_layers):
        config = read_model_config(SIZES | {"model_type": "llama", "num_hidden_layers": num_layers})
        plan = plan_model("/nowhere", config, dtype=jnp.float32, load_format="dummy")
        calls.clear()
        plan.load()
        return len(calls)

    assert num_traversals(1) == num_traversals(3)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"load_format": "pt"}, "load_format='pt'"),
        ({"dtype": jnp.int8}, "dtype=.*int8"),
        ({"dtype": jnp.float8_e4m3fn}, "dtype=.*float8"),
    ],
)
def test_unknown_load_format_or_dtype_is_refused(tmp_path, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path, **options)
