"""Test which devices all-reduce through peer memory, and how long the host waits for devices."""

import ctypes
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec, use_abstract_mesh

from jpaged.core.plan import ScheduledSequence
from jpaged.core.request import Request, StopCriteria
from jpaged.models.sharding import MESH_AXIS, axis_sharding, make_mesh
from jpaged.runtime import peer_memory
from jpaged.runtime.peer_memory import can_use_peer_memory, wait_for_devices
from jpaged.runtime.results import score_prompts
from jpaged.sampling_params import SamplingParams


def test_wait_returns_when_the_devices_finish():
    mesh = make_mesh(jax.devices(), 2)
    assert mesh is not None
    arrays = [jax.device_put(np.arange(8), axis_sharding(mesh, 0)), jnp.ones(3)]
    wait_for_devices(arrays)
    assert all(it.is_ready() for it in arrays)


def test_wait_raises_if_a_device_failed():
    def fail(x: np.ndarray) -> np.ndarray:
        raise ValueError("the device has failed")

    mesh, parts = make_mesh(jax.devices(), 2), PartitionSpec(MESH_AXIS)

    def run(x: jax.Array) -> jax.Array:
        return jax.pure_callback(fail, x, x)

    # Virtual devices run tensor-parallel programs asynchronously.
    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=parts, out_specs=parts))(jnp.ones(4))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the device has failed"):
        wait_for_devices(found)


def test_wait_for_a_hanging_device_step_times_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_memory, "MAX_STEP_S", 0.05)
    with pytest.raises(RuntimeError, match=r"not ended after 0\.05 s: .* kill this process"):
        wait_for_devices([SimpleNamespace(is_ready=lambda: False)])


H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")


def exchanges(num_devices: int, dtype: Any, device_kind: str = "NVIDIA H200") -> bool:
    devices = [
        SimpleNamespace(platform="gpu", device_kind=device_kind, local_hardware_id=place)
        for place in range(num_devices)
    ]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        return can_use_peer_memory(devices, dtype)


class FakeDriver:
    """A CUDA driver that reports that some pairs of GPUs cannot access each other."""

    def __init__(self, unreachable: set[tuple[int, int]], status: int):
        self.unreachable, self.status = unreachable, status

    def cuDeviceCanAccessPeer(self, answer: Any, device: int, peer: int) -> int:  # noqa: N802
        answer._obj.value = int((device, peer) not in self.unreachable)
        return self.status


@pytest.mark.parametrize(
    ("dtype", "kind", "unreachable", "status", "expected"),
    [
        (jnp.bfloat16, "NVIDIA H200", set(), 0, True),
        (jnp.float16, "NVIDIA H200", set(), 0, False),
        (jnp.float32, "NVIDIA H200", set(), 0, False),
        (jnp.bfloat16, "NVIDIA A100", set(), 0, False),
        (jnp.bfloat16, "NVIDIA H200", {(3, 1)}, 0, False),
        (jnp.bfloat16, "NVIDIA H200", set(), 101, False),  # CUDA_ERROR_INVALID_DEVICE
    ],
)
def test_peer_memory_needs_connected_hopper_gpus_and_bfloat16(
    monkeypatch: pytest.MonkeyPatch, dtype, kind, unreachable, status, expected
):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(unreachable, status))
    assert exchanges(4, dtype, kind) is expected


def test_peer_memory_needs_the_cuda_driver(monkeypatch: pytest.MonkeyPatch):
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert not exchanges(2, jnp.bfloat16)


@pytest.mark.parametrize("is_shared", [False, True])
def test_unfinished_launches_of_prompt_logprobs_are_limited(is_shared: bool):
    """With too many unfinished launches, the next launch would block forever if a device hangs."""
    num_rows = 64
    length = 20 * num_rows
    stop = StopCriteria(max_tokens=1)
    request = Request.from_prompt(
        "a", [*range(length + 1)], stop, seq_id_counter=iter([7]), first_scored_position=1
    )
    scored: list[jax.Array] = []
    waited: list[tuple[Any, int]] = []

    def launch(name: str, indices: np.ndarray, targets: np.ndarray) -> jax.Array:
        assert name == "prompt_logprobs"
        scored.append(jnp.asarray(targets[0]))
        return scored[-1]

    def wait(array: jax.Array) -> None:
        waited.append((int(array), len(scored)))

    scheduled = (ScheduledSequence(request.sequences[0], 0, length, is_sampled=False),)
    params = SamplingParams(prompt_logprobs=0)
    options = scheduled, lambda _: params, launch, num_rows
    (found,) = score_prompts(*options, wait if is_shared else None)
    assert (found.arrays, found.slices) == (scored, {7: slice(0, length)})
    firsts = [1 + i * num_rows for i in range(20)]
    assert [int(it) for it in scored] == firsts
    # scoring `num_rows` tokens takes two launches
    ahead = [(first, i + 8) for i, first in enumerate(firsts[:12])]
    assert waited == (ahead if is_shared else [])
