"""New weights on the device: each parameter has the bits that the loader gives it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from hf_models import CASES, hf_config
from jax import monitoring
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.flax import load_file

from jpaged.models.checkpoint import read_config
from jpaged.models.live_weights import ModelParameters
from jpaged.models.loader import ModelPlan, plan_model
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh
from tests import fp8_experts as made

Leaves = tuple[jax.Array, ...]


class Checkpoint:
    """A random checkpoint of a case, and an engine's parameters that differ from it."""

    def __init__(
        self, folder: Path, case: str, count: int = 1, quantization: Any = None, dtype: Any = None
    ):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(hf_config(case))
        for parameter in model.parameters():
            parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
        model.save_pretrained(folder)
        self._folder, self._dtype = folder, dtype or jnp.float32
        self._mesh = make_mesh(jax.local_devices(), count)
        self.devices = jax.local_devices()[:count]
        self.tensors = load_file(folder / "model.safetensors")
        plan = self.plan(quantization)
        self.expected = leaves_of(plan)
        self.old = leaves_of(self.plan(quantization, load_format="dummy"))
        self.parameters = ModelParameters(plan, self.devices)

    def plan(self, quantization: Any = None, load_format: str = "auto") -> ModelPlan:
        config = read_model_config(read_config(self._folder), quantization)
        options = {"dtype": self._dtype, "load_format": load_format, "mesh": self._mesh}
        return plan_model(self._folder, config, **options)

    def state(self) -> Any:
        """Return the state of the family's model on one device, in float32."""
        config = read_model_config(read_config(self._folder))
        return nnx.state(plan_model(self._folder, config, dtype=jnp.float32).load())

    def check(self, params: Any) -> None:
        copies = tuple(jnp.copy(it) for it in self.old)
        written = self.parameters.prepare(params, check_finite=True)(copies)
        for found, expected, old in zip(written, self.expected, copies, strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            assert found.sharding.is_equivalent_to(expected.sharding, found.ndim)
            np.testing.assert_array_equal(as_float32(found), as_float32(expected))
            assert old.is_deleted()
        assert not any(it.is_deleted() for it in jax.tree.leaves(params))


def leaves_of(plan: ModelPlan) -> Leaves:
    return tuple(jax.tree.leaves(nnx.state(plan.load())))


def as_float32(array: jax.Array) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", dtype=jnp.bfloat16)


def test_tensors_are_fused_and_cast(qwen: Checkpoint):
    qwen.check(qwen.tensors)


def test_second_update_compiles_nothing(qwen: Checkpoint):
    qwen.check(qwen.tensors)
    other, events = {name: it + 0 for name, it in qwen.tensors.items()}, list[str]()
    copies = tuple(jnp.copy(it) for it in qwen.old)

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        events.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        qwen.parameters.prepare(other, check_finite=True)(copies)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert not [it for it in events if "compile" in it]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_written_parameters_have_the_bits_of_loaded_ones(tmp_path: Path, case: str):
    checkpoint = Checkpoint(tmp_path, case)
    checkpoint.check(checkpoint.tensors)
    checkpoint.check(checkpoint.state())


@pytest.mark.full
@pytest.mark.parametrize(
    "case", ["qwen3-biases", "gpt2", "mistral-window", "qwen3_moe", "opt-350m"]
)
def test_devices_get_their_shards(tmp_path: Path, case: str):
    checkpoint = Checkpoint(tmp_path, case, 2)
    checkpoint.check(checkpoint.tensors)
    checkpoint.check(nnx.to_pure_dict(checkpoint.state()))
    mesh = Mesh(np.array(checkpoint.devices), ("fsdp",))
    checkpoint.check({name: split(mesh, it) for name, it in checkpoint.tensors.items()})


def split(mesh: Mesh, array: jax.Array) -> jax.Array:
    """Return the array split over the devices as a trainer may split it."""
    is_even = array.ndim > 0 and array.shape[0] % mesh.size == 0
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec("fsdp" if is_even else None)))


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("case", ["qwen2", "qwen3_moe"])
def test_weights_are_quantized_on_the_device(tmp_path: Path, case: str, count: int):
    checkpoint = Checkpoint(tmp_path, case, count, "fp8", jnp.bfloat16)
    checkpoint.check(checkpoint.tensors)
    checkpoint.check(checkpoint.state())


@pytest.mark.full
def test_weights_of_a_checkpoint_with_scales_of_the_cache_only_are_not_quantized(tmp_path: Path):
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    quantization = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    fields = made.FIELDS | {"quantization_config": quantization | {"kv_cache_scheme": cache}}
    made.save(tmp_path, fields, made.write_checkpoint(tmp_path, "loaded"))
    plan = plan_model(tmp_path, read_model_config(read_config(tmp_path)), dtype=jnp.float32)
    expected, tensors = leaves_of(plan), load_file(tmp_path / "model.safetensors")
    write = ModelParameters(plan, jax.local_devices()[:1]).prepare(tensors)
    for found, value in zip(write(tuple(map(jnp.zeros_like, expected))), expected, strict=True):
        np.testing.assert_array_equal(found, value)


def without(name: str) -> Callable[[dict[str, jax.Array]], dict[str, Any]]:
    return lambda tensors: {key: it for key, it in tensors.items() if key != name}


def with_tensor(name: str, change: Callable[[jax.Array], Any]) -> Callable:
    return lambda tensors: {key: change(it) if key == name else it for key, it in tensors.items()}


def deleted(array: jax.Array) -> jax.Array:
    (copy := jnp.copy(array)).delete()
    return copy


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
REFUSED: dict[str, tuple[Callable, str]] = {
    "missing": (without(NORM), r"missing parameters \(1\): final_norm.weight \(comes from norm"),
    "missing piece": (
        without(QUERY),
        r"missing piece \(1\): layers.1.attention.qkv.weight along axis 1 \(lacks .*q_proj",
    ),
    "unknown": (
        lambda tensors: tensors | {"model.layers.7.more": jnp.zeros(1)},
        r"unknown tensors \(1\): model.layers.7.more. Pass all tensors",
    ),
    "shape": (
        with_tensor(QUERY, lambda it: it[1:]),
        r"wrong shapes \(1\): model.*q_proj.weight \[63,",
    ),
    "dtype": (
        with_tensor(NORM, lambda it: it.astype(jnp.int32)),
        r"wrong dtypes \(1\): model.norm.weight is int32, supported are F32, F16, BF16",
    ),
    "NumPy": (with_tensor(NORM, np.asarray), r"model.norm.weight is a numpy.ndarray, not a JAX"),
    "deleted": (with_tensor(NORM, deleted), "model.norm.weight was deleted or donated"),
    "NaN": (with_tensor(NORM, lambda it: it.at[1].set(np.nan)), "model.norm.weight has .*NaN or"),
    "infinite": (with_tensor(QUERY, lambda it: it.at[1, 1].set(np.inf)), "q_proj.weight has .*inf"),
    "device": (
        with_tensor(NORM, lambda it: jax.device_put(it, jax.local_devices()[1])),
        r"model.norm.weight is on .*1.*, but the engine runs on .*0",
    ),
    "memory": (
        with_tensor(
            NORM, lambda it: jax.device_put(it, it.sharding.with_memory_kind("pinned_host"))
        ),
        "model.norm.weight is in pinned_host memory",
    ),
    "list": (list, "params is a list: pass a dict from the names"),
    "head": (
        lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        "lm_head.weight differs from model.embed_tokens.weight, but the engine's model ties them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_arrays_are_named(qwen: Checkpoint, name: str):
    change, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        qwen.parameters.prepare(change(qwen.tensors), check_finite=True)


def test_tied_head_may_be_given_with_the_embedding(qwen: Checkpoint):
    embed = qwen.tensors["model.embed_tokens.weight"]
    qwen.check(qwen.tensors | {"lm_head.weight": embed + 0})


def test_parts_of_a_state_are_missing(qwen: Checkpoint):
    state = nnx.to_pure_dict(qwen.state())
    del state["final_norm"]
    with pytest.raises(ValueError, match=re.escape("final_norm.weight (comes from final_norm.we")):
        qwen.parameters.prepare(state)
