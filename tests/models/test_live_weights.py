"""Test weight updates on the device: each parameter gets the same bits as from the loader."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from fp8_checkpoints import compressed
from hf_models import CASES, hf_config
from jax import monitoring
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.flax import load_file

from jpaged.models.checkpoint import read_config
from jpaged.models.live_weights import ModelParameters, on_mesh
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh
from jpaged.models.weight_plan import ModelPlan, plan_model
from tests import fp8_experts as made

Leaves = tuple[jax.Array, ...]


class Checkpoint:
    """A random checkpoint for the model configuration `case`, and the parameters of an engine with
    other weights."""

    def __init__(
        self,
        folder: Path,
        case: str,
        count: int = 1,
        quantization: Any = None,
        dtype: Any = None,
        sizes: dict[str, int] | None = None,
    ):
        torch.manual_seed(0)
        config = hf_config(case)
        config.update(sizes or {})
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
        model.save_pretrained(folder)
        self.folder, self._dtype = folder, dtype or jnp.float32
        self._mesh = make_mesh(jax.local_devices(), count)
        self.devices = jax.local_devices()[:count]
        self.tensors = load_file(folder / "model.safetensors")
        plan = self.plan(quantization)
        self.expected = leaves_of(plan)
        self.old = leaves_of(self.plan(quantization, load_format="dummy"))
        self.parameters = ModelParameters(plan, self.devices)

    def plan(self, quantization: Any = None, load_format: str = "auto") -> ModelPlan:
        config = read_model_config(read_config(self.folder), quantization)
        options = {"dtype": self._dtype, "load_format": load_format, "mesh": self._mesh}
        return plan_model(self.folder, config, **options)

    def state(self) -> Any:
        """Return the parameters of the model family on one device, in float32."""
        config = read_model_config(read_config(self.folder))
        return nnx.state(plan_model(self.folder, config, dtype=jnp.float32).load())

    def check(self, params: Any) -> None:
        copies = tuple(jnp.copy(it) for it in self.old)
        is_folder = isinstance(params, Path)
        written = self.parameters.prepare(params, check_finite=not is_folder)(copies)
        for found, expected, old in zip(written, self.expected, copies, strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            assert found.sharding.is_equivalent_to(expected.sharding, found.ndim)
            np.testing.assert_array_equal(as_float32(found), as_float32(expected))
            assert old.is_deleted()
        assert is_folder or not any(it.is_deleted() for it in jax.tree.leaves(params))


def leaves_of(plan: ModelPlan) -> Leaves:
    return tuple(jax.tree.leaves(nnx.state(plan.load())))


def as_float32(array: jax.Array) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", dtype=jnp.bfloat16)


def test_updated_tensors_are_fused_and_cast(qwen: Checkpoint):
    qwen.check(qwen.tensors)


def test_files_are_read_one_parameter_at_a_time(qwen: Checkpoint):
    qwen.check(qwen.folder)
    with pytest.raises(ValueError, match="check_finite needs arrays"):
        qwen.parameters.prepare(qwen.folder, check_finite=True)
    with pytest.raises(ValueError, match="params='/absent' is not a folder"):
        qwen.parameters.prepare(Path("/absent"))


def test_second_weight_update_compiles_nothing(qwen: Checkpoint):
    qwen.check(qwen.tensors)
    other = {name: it + 0 for name, it in qwen.tensors.items()}
    copies = tuple(jnp.copy(it) for it in qwen.old)
    with compilations() as events:
        qwen.parameters.prepare(other, check_finite=True)(copies)
    assert not events


def test_arrays_that_a_trainer_splits_are_copied_to_all_devices_by_one_program():
    mesh = make_mesh(jax.local_devices(), 2)
    trainer = Mesh(np.array(jax.local_devices()[:2]), ("fsdp",))
    first, second = (split(trainer, jnp.arange(8.0) + each) for each in range(2))
    on_mesh(first, mesh)
    with compilations() as events:
        np.testing.assert_array_equal(on_mesh(second, mesh), np.arange(8.0) + 1)
    assert not events


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Yield a list to which the events of JAX's traces and compilations are appended."""
    events = list[str]()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "compile" in event:
            events.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        monitoring.unregister_event_duration_listener(listen)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_updated_parameters_have_the_same_bits_as_loaded_parameters(tmp_path: Path, case: str):
    checkpoint = Checkpoint(tmp_path, case)
    checkpoint.check(checkpoint.tensors)
    checkpoint.check(checkpoint.state())


@pytest.mark.full
@pytest.mark.parametrize(
    "case", ["qwen3-biases", "gpt2", "mistral-window", "qwen3_moe", "opt-350m"]
)
def test_each_device_gets_its_shard_of_updated_weights(tmp_path: Path, case: str):
    checkpoint = Checkpoint(tmp_path, case, 2)
    checkpoint.check(checkpoint.tensors)
    checkpoint.check(nnx.to_pure_dict(checkpoint.state()))
    checkpoint.check(checkpoint.folder)
    mesh = Mesh(np.array(checkpoint.devices), ("fsdp",))
    checkpoint.check({name: split(mesh, it) for name, it in checkpoint.tensors.items()})


def split(mesh: Mesh, array: jax.Array) -> jax.Array:
    """Return the array, split over the devices in a way that a training program may choose."""
    is_even = array.ndim > 0 and array.shape[0] % mesh.size == 0
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec("fsdp" if is_even else None)))


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("case", ["qwen2", "qwen3_moe"])
def test_updated_weights_are_quantized_on_the_device(tmp_path: Path, case: str, count: int):
    checkpoint = Checkpoint(tmp_path, case, count, "fp8", jnp.bfloat16)
    checkpoint.check(checkpoint.tensors)
    checkpoint.check(checkpoint.state())


@pytest.mark.full
def test_weight_update_keeps_weights_unquantized_if_only_the_kv_cache_has_scales(tmp_path: Path):
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
    "key": (
        with_tensor(NORM, lambda it: jax.random.split(jax.random.key(0), len(it))),
        r"model.norm.weight is an array of key<fry>, not of numbers: omit it",
    ),
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
def test_error_names_the_arrays_that_a_weight_update_refuses(qwen: Checkpoint, name: str):
    change, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        qwen.parameters.prepare(change(qwen.tensors), check_finite=True)


def test_weight_update_may_contain_a_tied_head_and_the_embedding(qwen: Checkpoint):
    embed = qwen.tensors["model.embed_tokens.weight"]
    qwen.check(qwen.tensors | {"lm_head.weight": embed + 0})


@pytest.mark.full
def test_weight_update_that_lacks_a_parameter_is_refused(qwen: Checkpoint):
    state = nnx.to_pure_dict(qwen.state())
    del state["final_norm"]
    with pytest.raises(ValueError, match=re.escape("final_norm.weight (comes from final_norm.we")):
        qwen.parameters.prepare(state)


@pytest.mark.full
@pytest.mark.parametrize("weights", ["channel", "tensor", "block"])
def test_fp8_model_accepts_updates_with_fp8_and_unquantized_weights(tmp_path: Path, weights: str):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 128}
    wide = Checkpoint(tmp_path / "wide", "llama", sizes=sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(wide.folder)
    compressed(model, tmp_path / "fp8", weights, "group" if weights == "block" else "token")
    config = read_model_config(read_config(tmp_path / "fp8"))
    plan = plan_model(tmp_path / "fp8", config, dtype=jnp.float32)
    expected, parameters = leaves_of(plan), ModelParameters(plan, wide.devices)

    def check(params: Any, expected: Leaves) -> None:
        zeros = tuple(jnp.zeros_like(it) for it in expected)
        for found, each in zip(parameters.prepare(params)(zeros), expected, strict=True):
            np.testing.assert_array_equal(as_float32(found), as_float32(each))

    check(tmp_path / "fp8", expected)
    check(wide.tensors, expected if weights == "block" else leaves_of(wide.plan("fp8")))
