"""Test how much device memory each purpose gets, and that sizing runs while the model is loaded."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from bench.common import ALL_SHAPES
from jpaged.compile import sizing as sizing_module
from jpaged.compile.sizing import POOL_BLOCK_MULTIPLE, Sizing
from jpaged.config import EMBEDDED_MODEL, EngineConfig
from jpaged.engine import startup
from jpaged.models.checkpoint import read_config, resolve_checkpoint
from jpaged.models.config import ModelConfig
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh, per_device_bytes
from jpaged.models.weight_plan import ModelPlan, make_abstract_model
from jpaged.runtime.kv_cache import block_bytes
from jpaged.runtime.programs import SplitModel

MODEL = read_model_config(read_config(resolve_checkpoint(EMBEDDED_MODEL)))
FLOAT32 = jnp.dtype(jnp.float32)


def device(stats: dict[str, int] | None) -> SimpleNamespace:
    return SimpleNamespace(platform="cpu", device_kind="X", memory_stats=lambda: stats)


def device_of(limit: int) -> SimpleNamespace:
    return device({"bytes_limit": limit, "bytes_in_use": 0})


def sizing(limit: int, held: int = 0, model: ModelConfig = MODEL, **options: Any) -> Sizing:
    stats = {"bytes_limit": limit, "bytes_in_use": held}
    split = SplitModel.of(make_abstract_model(model, FLOAT32))
    made = Sizing(EngineConfig(**options), model, split, FLOAT32, [device(stats)])
    # Memory that is allocated from now on counts as memory of this engine.
    stats["bytes_in_use"] = limit
    return made


def test_smallest_tensor_parallel_device_limits_the_pool():
    config = EngineConfig(tensor_parallel_size=2, preemption_mode="swap", swap_space=0.01)
    split = SplitModel.of(make_abstract_model(MODEL, FLOAT32, make_mesh(jax.devices(), 2)))
    devices = [device_of(2**30), device_of(2**29)]
    runtime, account, _ = Sizing(config, MODEL, split, FLOAT32, devices).fit(0)
    assert account.limit == 2**29
    per_block = account.kv_cache // runtime.num_blocks
    assert per_block * 2 == block_bytes(MODEL, 16, FLOAT32)
    assert account.swap == runtime.num_host_blocks * 2 * per_block <= 0.01 * 2**30


@pytest.mark.parametrize("count", [1, 2])
def test_model_too_large_for_one_device_fits_on_two_devices(count: int):
    """Llama-3-70B has 131 GiB of weights. An engine gets 90% of an H200's 139.8 GiB."""
    h200 = device_of(int(0.9 * 139.8 * 2**30))
    model, dtype = read_model_config(ALL_SHAPES["llama-70b"]), jnp.dtype(jnp.bfloat16)
    split = SplitModel.of(make_abstract_model(model, dtype, make_mesh(jax.devices(), count)))
    limits: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
    config = EngineConfig(tensor_parallel_size=count, max_model_len=2048, **limits)
    if count == 1:
        with pytest.raises(ValueError, match=r"weights take 131\.4 GiB as bfloat16.*more devices"):
            Sizing(config, model, split, dtype, [h200])
        return
    runtime, account, _ = Sizing(config, model, split, dtype, [h200] * count).fit(3 * 2**30)
    assert account.weights == pytest.approx(65.7 * 2**30, rel=1e-3)
    assert (runtime.num_blocks - 1) * runtime.block_size > 64 * 2048


@pytest.mark.parametrize(
    ("count", "room", "words"),
    [
        (1, 0.9, "GiB as float32, but this machine's memory"),
        (2, 0.9, "each of 2 devices as float32, but each device's share of this machine's memory"),
        (2, 1.9, None),
    ],
)
def test_virtual_devices_share_the_host_memory(
    count: int, room: float, words: str | None, monkeypatch: pytest.MonkeyPatch
):
    split = SplitModel.of(make_abstract_model(MODEL, FLOAT32, make_mesh(jax.devices(), count)))
    whole = per_device_bytes(SplitModel.of(make_abstract_model(MODEL, FLOAT32)).leaves)
    monkeypatch.setattr(sizing_module, "physical_memory_bytes", lambda: int(room * whole))
    config = EngineConfig(tensor_parallel_size=count)
    if words is None:
        Sizing(config, MODEL, split, FLOAT32, [device(None)] * count)
        return
    with pytest.raises(ValueError, match=words) as error:
        Sizing(config, MODEL, split, FLOAT32, [device(None)] * count)
    assert "more devices" not in str(error.value)  # all devices share the memory


def test_kv_dtype_with_fewer_bytes_gives_more_blocks():
    """A block of the float8 KV cache has a quarter of the bytes of a float32 block, on the device
    and in host memory."""
    model = replace(MODEL, kv_cache_dtype="float8_e4m3fn")
    options: dict[str, Any] = {"preemption_mode": "swap", "swap_space": 0.01}
    wide, _, _ = sizing(2**30, **options).fit(0)
    runtime, account, shapes = sizing(2**30, model=model, **options).fit(0)
    per_block = block_bytes(model, 16, FLOAT32)
    assert 4 * per_block == block_bytes(MODEL, 16, FLOAT32)
    assert 3.9 * wide.num_blocks < runtime.num_blocks <= 4.1 * wide.num_blocks
    assert account.kv_cache == runtime.num_blocks * per_block == per_device_bytes(shapes.kv.pool)
    assert runtime.num_host_blocks == int(0.01 * 2**30) // per_block
    assert shapes.hidden.dtype == FLOAT32


def test_pool_gets_the_memory_that_other_purposes_leave():
    limit, held, step = 2**30, 2**28, 2**20
    runtime, account, shapes = sizing(limit, held).fit(step)
    assert account.limit == limit - held
    assert account.workspace >= 2 * step
    per_block = account.kv_cache // runtime.num_blocks
    assert 0 <= account.limit - account.total < per_block * POOL_BLOCK_MULTIPLE
    assert shapes.kv.pool[0].k.shape[0] == runtime.num_blocks
    less, _, _ = sizing(limit, held).fit(16 * step)
    assert less.num_blocks < runtime.num_blocks


@pytest.mark.parametrize(("max_num_seqs", "steps", "rows"), [(20, 64, 32), (256, 4, 256)])
def test_memory_budget_includes_the_logits_of_every_step_of_multi_step_decode(
    max_num_seqs: int, steps: int, rows: int
):
    limits: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 256}
    none, some = (
        sizing(2**31, num_scheduler_steps=n, **limits).fit(0)[1].workspace for n in (1, steps)
    )
    assert some - none == 2 * steps * rows * MODEL.vocab_size * FLOAT32.itemsize


def test_engine_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit in the device's memory"):
        sizing(2**31, num_blocks=10**6).fit(0)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_pool_is_sized_while_the_model_loads(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    begun, before = threading.Event(), threading.active_count()

    def workspace(*_: Any) -> int:
        begun.set()
        return 0

    def load(*_: Any, **__: Any) -> None:
        assert begun.wait(60)
        raise error("cannot read the weights")

    monkeypatch.setattr(Sizing, "workspace", workspace)
    monkeypatch.setattr(ModelPlan, "load", load)
    with pytest.raises(error, match="cannot read the weights"):
        startup.build_parts(EngineConfig(compilation_cache_dir=None))
    assert threading.active_count() == before


def test_engine_start_raises_compile_errors_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch):
    before = threading.active_count()
    monkeypatch.setattr(Sizing, "workspace", Mock(side_effect=RuntimeError("does not compile")))
    with pytest.raises(RuntimeError, match="does not compile"):
        startup.build_parts(EngineConfig(compilation_cache_dir=None))
    assert threading.active_count() == before
