"""Test weight updates that the device quantizes to FP8 with one scale per block of 128 x 128.

Every parameter must equal, bit for bit, the parameter of a checkpoint quantized with numpy.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jpaged.models.checkpoint import read_config
from jpaged.models.live_weights import ModelParameters
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh
from jpaged.models.weight_plan import ModelPlan, plan_model
from tests import fp8_experts as made

EDGES: dict[str, Any] = {
    "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 160, "moe_intermediate_size": 144, "num_experts": 2,
}  # fmt: skip
"""Sizes of a model in which the last block of each projection is smaller than 128 x 128. The blocks
of the fused projections end within a tensor: queries have 192 rows, keys and values 64 rows."""

SPLIT: dict[str, Any] = made.WIDE | {"hidden_size": 192, "num_experts": 2}
"""Sizes of a model that two devices can split, because each shard holds whole blocks."""

Tensors = dict[str, np.ndarray]


class Checkpoint:
    """A random checkpoint in bfloat16, and its copy that numpy quantized to FP8.

    Layer 0 has a dense feed-forward, and layer 1 has experts.

    Attributes:
        float_folder: Folder of the checkpoint in bfloat16.
        tensors: Tensors of the checkpoint in bfloat16.
    """

    def __init__(self, folder: Path, sizes: dict[str, Any], **options: Any):
        folder.mkdir(exist_ok=True)
        wide = made.write_checkpoint(folder / "wide", "loaded", **sizes)
        # One block contains only zeros, so its scale is the minimum.
        wide["model.layers.0.self_attn.o_proj.weight"][128:] = 0
        self.tensors = {name: it.astype(ml_dtypes.bfloat16) for name, it in wide.items()}
        self.float_folder, self.fp8_folder = folder / "bf16", folder / "fp8"
        fields = made.FIELDS | sizes
        made.save(self.float_folder, fields, self.tensors)
        fields |= {"quantization_config": made.CONFIGS["block"]}
        made.save(self.fp8_folder, fields, made.quantize_blocks(self.tensors))
        self._options = options
        self._plan = self.plan(self.fp8_folder, **options)
        devices = jax.local_devices()[: options.get("count", 1)]
        self.parameters = ModelParameters(self._plan, devices)
        self.expected = jax.tree.leaves(nnx.state(self._plan.load()))

    def plan(self, folder: Path, count: int = 1, by_expert: bool = False) -> ModelPlan:
        config = read_model_config(read_config(folder))
        config = replace(config, enable_expert_parallel=by_expert)
        mesh = make_mesh(jax.local_devices(), count)
        return plan_model(folder, config, dtype=jnp.bfloat16, mesh=mesh)

    def state(self) -> Any:
        """Load the bfloat16 checkpoint onto one device, and return the parameters (`nnx.State`)."""
        return nnx.state(self.plan(self.float_folder).load())

    def check(self, params: Any) -> None:
        """Update all parameters, and compare each with the checkpoint that numpy quantized."""
        old = tuple(jnp.ones_like(it) for it in self.expected)
        written = self.parameters.prepare(params)(old)
        for found, expected in zip(written, self.expected, strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            assert found.sharding.is_equivalent_to(expected.sharding, found.ndim)
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def on_device(tensors: Tensors) -> dict[str, jax.Array]:
    return {name: jnp.asarray(it) for name, it in tensors.items()}


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("edges"), EDGES)


def test_device_and_numpy_quantize_blocks_to_identical_bits(edges: Checkpoint):
    edges.check(on_device(edges.tensors))


def test_q_k_and_v_of_a_fused_projection_have_separate_scale_blocks(edges: Checkpoint):
    edges.check(edges.state())


@pytest.mark.full
def test_weights_loaded_from_a_bfloat16_folder_get_one_fp8_scale_per_block(edges: Checkpoint):
    edges.check(edges.float_folder)


@pytest.mark.full
def test_float32_arrays_are_quantized_without_a_cast_to_the_dtype_of_the_engine(
    tmp_path: Path,
):
    checkpoint = Checkpoint(tmp_path, EDGES)
    rng = np.random.default_rng(1)
    tensors = {
        name: it.astype(np.float32) * rng.uniform(0.9, 1.1, it.shape).astype(np.float32)
        for name, it in checkpoint.tensors.items()
    }
    fields = made.FIELDS | EDGES | {"quantization_config": made.CONFIGS["block"]}
    made.save(tmp_path / "new", fields, made.quantize_blocks(tensors))
    checkpoint.expected = jax.tree.leaves(nnx.state(checkpoint.plan(tmp_path / "new").load()))
    checkpoint.check(on_device(tensors))


@pytest.mark.full
def test_gate_and_up_of_stacked_experts_have_separate_scale_blocks(edges: Checkpoint):
    tensors = dict(edges.tensors)
    made.stack(tensors)
    assert "model.layers.1.mlp.experts.gate_up_proj" in tensors
    edges.check(on_device(tensors))


def test_each_device_gets_its_shard_of_blocks_and_scales(tmp_path: Path):
    checkpoint = Checkpoint(tmp_path, SPLIT, count=2)
    checkpoint.check(on_device(checkpoint.tensors))


@pytest.mark.full
def test_two_devices_quantize_weights_from_an_nnx_state_or_a_folder(tmp_path: Path):
    checkpoint = Checkpoint(tmp_path, SPLIT, count=2)
    checkpoint.check(nnx.to_pure_dict(checkpoint.state()))
    checkpoint.check(checkpoint.float_folder)


@pytest.mark.full
def test_expert_parallel_devices_quantize_experts_with_one_scale_per_block(tmp_path: Path):
    sizes = SPLIT | {"moe_intermediate_size": 144}
    checkpoint = Checkpoint(tmp_path, sizes, count=2, by_expert=True)
    checkpoint.check(on_device(checkpoint.tensors))
    checkpoint.check(checkpoint.state())


@pytest.mark.full
def test_already_quantized_nnx_state_replaces_the_weights_of_the_engine(edges: Checkpoint):
    plan = edges.plan(edges.fp8_folder)
    edges.check(nnx.state(plan.load()))


@pytest.mark.full
def test_update_that_mixes_fp8_and_unquantized_projections_is_refused(edges: Checkpoint):
    name = "model.layers.0.self_attn.q_proj.weight"
    quantized = made.quantize_blocks(edges.tensors)
    tensors = on_device(edges.tensors) | {name: jnp.asarray(quantized[name])}
    with pytest.raises(ValueError, match=f"wrong dtypes.* {name} is in FP8: pass either no weight"):
        edges.parameters.prepare(tensors)
