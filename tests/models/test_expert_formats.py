"""Test experts in FP8: each layout loads its values, and computes with quantized rows."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from harness import Harness, PagedSequence
from jax.sharding import PartitionSpec

from jpaged.models import loader, weight_plan
from jpaged.models.checkpoint import (
    CheckpointError,
    read_config,
    read_rows,
    read_tensor_infos,
)
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.live_weights import ModelParameters
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import axis_sharding, make_mesh, wrap_in_shard_map
from jpaged.models.weight_plan import model_parameters, plan_model
from pallas_kernels import Backend
from tests import fp8_experts as made
from tests.reference import kernels as reference

EXPERTS = "layers.1.mlp"


def read(folder: Path, kind: str | None = None) -> ModelConfig:
    """Read the config of a checkpoint. `kind` is a key of `fp8_experts.CONFIGS`, or None for an
    unquantized checkpoint."""
    return read_model_config(read_config(folder), "fp8" if kind == "loaded" else None)


def load(folder: Path, kind: str | ModelConfig | None = None, **options: Any) -> Decoder:
    """Load a checkpoint. Use `kind` as the config if it is a config, else `read(folder, kind)`."""
    config = kind if isinstance(kind, ModelConfig) else read(folder, kind)
    model = plan_model(folder, config, dtype=jnp.float32, **options).load()
    assert isinstance(model, Decoder)
    return model


def dequantized(model: Decoder, parameter: str) -> np.ndarray:
    """Return the dequantized weights [E, outputs, inputs] of all experts in the parameter
    `parameter`."""
    found = model_parameters(model)
    weight = np.asarray(found[f"{EXPERTS}.{parameter}"]).astype(np.float32)
    scale = np.asarray(found[f"{EXPERTS}.{parameter}_weight_scale"])
    if scale.ndim == weight.ndim:  # scales of blocks
        for axis in (-2, -1):
            scale = np.repeat(scale, 128, axis).take(range(weight.shape[axis]), axis)
    else:
        scale = scale[..., None]
    weight = weight * scale
    return weight.reshape(len(weight), -1, weight.shape[-1])


def expected(wide: dict[str, np.ndarray], *parts: str) -> np.ndarray:
    """Return the expected weights [E, outputs, inputs] of all experts, from the dequantized tensors
    `wide` of a checkpoint."""
    experts = range(made.FIELDS["num_experts"])
    name = "model.layers.1.mlp.experts.{}.{}_proj.weight"
    return np.stack([np.concatenate([wide[name.format(i, it)] for it in parts]) for i in experts])


def fake_quantized(rows: np.ndarray, *, grouped: bool) -> np.ndarray:
    """Round rows to FP8 with one scale per row or per group of 128 numbers, and return the rounded
    rows as wider numbers."""
    out = np.zeros(rows.shape)
    size = 128 if grouped else rows.shape[1]
    for first in range(0, rows.shape[1], size):
        part = rows[:, first : first + size].astype(np.float32)
        scale = np.abs(part).max(1, keepdims=True) / np.float32(448)
        out[:, first : first + size] = reference.to_fp8(part, scale) * scale
    return out


def feed_forward(x: np.ndarray, wide: dict[str, np.ndarray], *, grouped: bool) -> np.ndarray:
    """Compute the output of the expert layer for the rows `x` in NumPy, with rows that are
    quantized before each projection."""
    logits = x @ wide["model.layers.1.mlp.gate.weight"].T
    weights, chosen, *_ = reference.route(logits, 2, normalize=True)
    gate_up, down = expected(wide, "gate", "up"), expected(wide, "down")
    narrow, out = fake_quantized(x, grouped=grouped), np.zeros(x.shape)
    for t, c in np.ndindex(*chosen.shape):
        gate, up = np.split(gate_up[chosen[t, c]] @ narrow[t], 2)
        inner = fake_quantized((gate / (1 + np.exp(-gate)) * up)[None], grouped=grouped)[0]
        out[t] += weights[t, c] * (down[chosen[t, c]] @ inner)
    return out


def random_rows(config: ModelConfig) -> np.ndarray:
    """Return random input rows for the experts of layer 1."""
    return np.random.default_rng(1).standard_normal((9, config.hidden_size)).astype(np.float32)


def compute(model: Decoder, x: np.ndarray) -> np.ndarray:
    """Compute the output of the expert layer for the rows `x`, on one device."""
    mlp = jax.jit(partial(model.layers[1].mlp, backend=Backend.XLA))
    return np.asarray(mlp(jnp.asarray(x))[0])


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """Return the root mean square of the difference, divided by the root mean square of `want`."""
    return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))


@pytest.mark.parametrize(
    ("kind", "is_stacked", "fields"),
    [
        ("channel", False, {}),
        ("block", False, {}),
        ("loaded", False, {}),
        pytest.param("tensor", False, {}, marks=pytest.mark.full),
        pytest.param("block", True, {}, marks=pytest.mark.full),
        pytest.param(
            "block",
            False,
            {"hidden_size": 192, "moe_intermediate_size": 160},
            marks=pytest.mark.full,
        ),
        pytest.param("loaded", True, {}, marks=pytest.mark.full),
    ],
)
def test_fp8_experts_load_exact_weights_and_compute_the_expected_outputs(
    tmp_path, monkeypatch, kind, is_stacked, fields
):
    if is_stacked:
        # the loader reads several experts at a time
        monkeypatch.setattr(loader, "SLAB_BYTES", 70_000)
    wide = made.write_checkpoint(tmp_path, kind, is_stacked=is_stacked, **fields)
    model, want = load(tmp_path, kind), (expected(wide, "gate", "up"), expected(wide, "down"))
    for parameter, value in zip(("gate_up", "down"), want, strict=True):
        assert model_parameters(model)[f"{EXPERTS}.{parameter}"].dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(dequantized(model, parameter), value, err_msg=parameter)
    x = random_rows(model.config)
    got = compute(model, x)
    # A different order of additions can change how a few inputs of the second projection are
    # rounded.
    assert difference(got, feed_forward(x, wide, grouped=kind == "block")) < 3e-3


@pytest.mark.full
@pytest.mark.parametrize("kind", made.CONFIGS)
def test_model_with_fp8_experts_gives_nearly_the_logits_of_the_dequantized_model(tmp_path, kind):
    """FP8 rounds rows by 2.6 % on average, so the router may choose another expert for a token."""
    wide = made.write_checkpoint(tmp_path / "narrow", kind)
    made.write_dequantized(tmp_path / "wide", kind, wide)
    models = load(tmp_path / "narrow", kind), load(tmp_path / "wide")
    tokens = list(range(2, 14))
    got, want = (Harness(it).step([(PagedSequence(tokens), len(tokens))])[0] for it in models)
    assert 1e-3 < difference(got, want) < 0.06


@pytest.mark.full
@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("kind", made.CONFIGS)
def test_fp8_experts_split_over_two_devices_equal_those_on_one_device(tmp_path, kind, by_expert):
    made.write_checkpoint(tmp_path, kind)
    config = replace(read(tmp_path, kind), enable_expert_parallel=by_expert)
    mesh = make_mesh(jax.devices(), 2)
    assert mesh is not None
    whole, sharded = load(tmp_path, config), load(tmp_path, config, mesh=mesh)
    for name in ("gate_up", "gate_up_weight_scale", "down", "down_weight_scale"):
        path, axis = f"{EXPERTS}.{name}", 0 if by_expert else 2
        value = np.asarray(model_parameters(whole)[path]).astype(np.float32)
        is_split = axis < value.ndim  # each device has the scale of every output of `down`
        halves = np.split(value, 2, axis) if is_split else [value] * 2
        shards = model_parameters(sharded)[path].addressable_shards
        for half, shard in zip(halves, shards, strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data).astype(np.float32), half, path)
    x = random_rows(config)
    definition, state = nnx.split(sharded.layers[1].mlp)

    def run(state, x):
        return cast(Any, nnx.merge(definition, state))(x, Backend.XLA)[0]

    rows = jax.device_put(x, axis_sharding(mesh, None))
    got = jax.jit(wrap_in_shard_map(run, mesh, (state, rows), {}, PartitionSpec()))(state, rows)
    assert difference(np.asarray(got), compute(whole, x)) < 3e-3


@pytest.mark.full
@pytest.mark.parametrize("kind", made.CONFIGS)
def test_updated_fp8_expert_weights_have_the_same_bits_as_loaded_weights(tmp_path, kind):
    made.write_checkpoint(tmp_path, kind)
    plan = plan_model(tmp_path, read(tmp_path, kind), dtype=jnp.float32)
    expected = jax.tree.leaves(nnx.state(plan.load()))
    parameters = ModelParameters(plan, jax.local_devices()[:1])
    tensors = {
        it.name: jnp.asarray(read_rows(it, slice(None))) for it in read_tensor_infos(tmp_path)
    }
    written = parameters.prepare(tensors)(tuple(map(jnp.zeros_like, expected)))
    for found, value in zip(written, expected, strict=True):
        got, want = (np.asarray(it).astype(np.float32) for it in (found, value))
        np.testing.assert_array_equal(got, want)


EXPERT = "model.layers.1.mlp.experts.2.up_proj"
ROUTER = "model.layers.1.mlp.gate.weight"


def narrow(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("kind", "change", "complaint"),
    [
        ("block", lambda it: it.update({f"{EXPERT}.weight_scale_inv": np.ones((2, 3), np.float32)}),
         r"experts.2.up_proj.weight_scale_inv \[2, 3\] should be \[2, 2\]"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [
            ("channel", lambda it: it.update({f"{EXPERT}.weight_scale": np.ones(48, np.float32)}),
             r"experts.2.up_proj.weight_scale \[48\] should be \[48, 1\]"),
            ("channel", lambda it: it.pop(f"{EXPERT}.weight_scale"),
             r"gate_up_weight_scale .*lacks .*experts.2.up_proj.weight_scale"),
            ("channel",
             lambda it: it.update({f"{EXPERT}.weight_scale": narrow(np.ones((48, 1)))}),
             r"experts.2.up_proj.weight_scale is F8_E4M3"),
            ("channel", lambda it: it.update({f"{EXPERT}.weight": np.ones((48, 64), np.float32)}),
             r"experts.2.up_proj.weight is F32, supported are F8_E4M3"),
            ("channel", lambda it: it.update({ROUTER: narrow(it[ROUTER])}),
             r"mlp.gate.weight is F8_E4M3, supported are F32, F16, BF16"),
            ("channel", lambda it: it.update({f"{EXPERT}.input_scale": np.ones(1, np.float32)}),
             r"unknown tensors \(1\): .*experts.2.up_proj.input_scale"),
            ("channel", made.stack, r"unknown tensors .*experts.gate_up_proj"),
            ("loaded", lambda it: it.update({f"{EXPERT}.weight": narrow(np.ones((48, 64)))}),
             r"experts.2.up_proj.weight is F8_E4M3, supported are F32, F16, BF16"),
        ]),
    ],
)  # fmt: skip
def test_wrong_fp8_tensors_of_experts_are_refused_before_a_weight_is_read(
    tmp_path, monkeypatch, kind, change, complaint
):
    made.write_checkpoint(tmp_path, kind)
    made.edit(tmp_path, change)
    for module in (loader, weight_plan):
        monkeypatch.setattr(module, "read_rows", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path, kind)


@pytest.mark.full
def test_scale_blocks_that_contain_both_gate_and_up_rows_are_refused(tmp_path):
    made.write_checkpoint(tmp_path, "block", is_stacked=True, moe_intermediate_size=160)
    with pytest.raises(CheckpointError, match=r"unknown tensors .*gate_up_proj_scale_inv"):
        load(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_zero_scale_of_an_expert_is_refused(tmp_path, kind):
    made.write_checkpoint(tmp_path, kind)
    name = f"{EXPERT}.weight_scale" + ("_inv" if kind == "block" else "")
    made.edit(tmp_path, lambda tensors: tensors[name].__setitem__((1, 0), 0))
    with pytest.raises(CheckpointError, match=f"{name} in model.safetensors holds the scale 0"):
        load(tmp_path)
