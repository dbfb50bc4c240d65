"""Test the throughput benchmark: the median run, and the lower bound of each format."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import throughput
from bench.common import FORMATS, SHAPES, Floor, format_of, labelled
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh, per_device_bytes
from jpaged.models.weight_plan import make_abstract_model
from jpaged.runtime.programs import SplitModel


@pytest.mark.parametrize(("repeats", "expected"), [(1, 20), (3, 30), (4, 40)])
def test_reported_run_is_the_median_of_the_runs_after_the_first(
    repeats: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    # `speeds` has the tokens per second of the runs with the seeds 0, 1, 2, ...
    speeds = [1, 20, 50, 30, 40]
    engine: Any = SimpleNamespace()

    def measure(*given: Any) -> dict:
        *_, seed, sampling = given
        assert sampling == {"logprobs": 5}
        return {"output_tokens_per_s": speeds[seed], "seed": seed}

    monkeypatch.setattr(throughput, "measure", measure)
    options = {"repeats": repeats, "sampling": {"logprobs": 5}}
    row = throughput.measure_often(engine, "qwen3-0.6b", "A", **options)
    assert row["output_tokens_per_s"] == expected == speeds[row["seed"]]
    measured = speeds[1 : repeats + 1]
    assert (row["slowest"], row["fastest"]) == (min(measured), max(measured))


def engine_of(model: Any, mesh: Any, **options: Any) -> Any:
    """Return a stand-in for an engine, with the fields that `Floor.of` reads."""
    leaves = SplitModel.of(make_abstract_model(model, jnp.bfloat16, mesh)).leaves
    account = SimpleNamespace(weights=per_device_bytes(leaves))
    return SimpleNamespace(
        model_config=model, memory_account=account, config=SimpleNamespace(**options)
    )


@pytest.mark.parametrize("shape", [*SHAPES])
def test_two_tensor_parallel_devices_halve_the_lower_bound(shape: str):
    model = read_model_config(SHAPES[shape])
    floors = []
    for count in (1, 2):
        mesh = make_mesh(jax.devices(), count)
        floors.append(Floor.of(engine_of(model, mesh, tensor_parallel_size=count)))
    alone, each = floors
    for seconds in (lambda it: it.decode_step(64, 1000.0), lambda it: it.prefill([8192])):
        assert seconds(each) == pytest.approx(seconds(alone) / 2, rel=1e-3)


def test_lower_bound_of_the_step_time_is_smaller_with_fp8_weights_and_kv_cache():
    floors = {}
    for form in FORMATS:
        options = FORMATS[form]
        model = read_model_config(SHAPES["llama-3.1-8b"], options.get("quantization"))
        kept = "float8_e4m3fn" if "kv_cache_dtype" in options else None
        model = replace(model, kv_cache_dtype=kept)
        asked = {"tensor_parallel_size": 1, "quantization": None, "kv_cache_dtype": "auto"}
        engine = engine_of(model, None, **asked | options)
        assert format_of(engine) == form
        floors[form] = Floor.of(engine)
    wide, narrow, weights, cache = floors.values()
    assert narrow.kv_bytes_per_token == cache.kv_bytes_per_token == wide.kv_bytes_per_token / 2
    assert weights.kv_bytes_per_token == wide.kv_bytes_per_token
    assert narrow.flops_per_token == wide.flops_per_token
    # the weights of the GEMMs of a layer, without the norms
    a_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert wide.flops_per_token == 2 * 32 * a_layer
    assert wide.head_flops == 2 * 128256 * 4096
    assert cache.weight_bytes == pytest.approx(
        wide.weight_bytes,
        rel=1e-6,
        # The weight bytes differ slightly, because the scales of the FP8 KV cache count as weights.
    )
    # Lower bounds in seconds of the decode steps and the prefill in cases C and D of
    # `bench.latency`, in which vLLM was measured with FP8.
    assert narrow.decode_step(1, 256) == pytest.approx(1.9e-3, rel=0.05)
    assert narrow.decode_step(64, 1088) == pytest.approx(2.9e-3, rel=0.05)
    assert narrow.prefill([1024] * 64) == pytest.approx(0.65, rel=0.1)
    assert labelled({"case": "A"}, "bf16") == {"case": "A"}
    assert labelled({"case": "A"}, "fp8") == {"case": "A", "format": "fp8"}
