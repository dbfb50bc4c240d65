"""What a case's figure is made of."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import throughput
from bench.common import FORMATS, SHAPES, Floor, format_of, labelled
from jpaged.models.loader import make_abstract_model
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh, per_device_bytes
from jpaged.runtime.programs import SplitModel


@pytest.mark.parametrize(("repeats", "expected"), [(1, 20), (3, 30), (4, 40)])
def test_the_median_run_is_reported_but_for_the_first(
    repeats: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    speeds = [1, 20, 50, 30, 40]  # of seeds 0, 1, 2 ...
    engine: Any = SimpleNamespace()

    def measure(*given: Any) -> dict:
        *_, seed, sampling = given
        assert sampling == {"logprobs": 5}
        return {"output_tokens_per_s": speeds[seed], "seed": seed}

    monkeypatch.setattr(throughput, "measure", measure)
    row = throughput.measure_often(
        engine, "qwen3-0.6b", "A", repeats=repeats, sampling={"logprobs": 5}
    )
    assert row["output_tokens_per_s"] == expected == speeds[row["seed"]]
    measured = speeds[1 : repeats + 1]
    assert (row["slowest"], row["fastest"]) == (min(measured), max(measured))


@pytest.mark.parametrize("shape", [*SHAPES])
def test_devices_that_share_a_model_have_a_part_of_the_floor_each(shape: str):
    """Of two each half, but for norms; of memory-bound and of computing steps alike."""
    model = read_model_config(SHAPES[shape])
    floors = []
    for count in (1, 2):
        mesh = make_mesh(jax.devices(), count)
        weights = per_device_bytes(
            SplitModel.of(make_abstract_model(model, jnp.bfloat16, mesh)).leaves
        )
        engine: Any = SimpleNamespace(
            model_config=model,
            memory_account=SimpleNamespace(weights=weights),
            config=SimpleNamespace(tensor_parallel_size=count),
        )
        floors.append(Floor.of(engine))
    alone, each = floors
    for seconds in (lambda it: it.decode_step(64, 1000.0), lambda it: it.prefill([8192])):
        assert seconds(each) == pytest.approx(seconds(alone) / 2, rel=1e-3)


def test_narrow_weights_and_a_narrow_cache_lower_the_floor():
    """Bytes of the weights and the cache about half, so are the times of the layers' products."""
    floors = {}
    for form in FORMATS:
        config = SHAPES["llama-3.1-8b"]
        options = FORMATS[form]
        model = read_model_config(config, options.get("quantization"))
        kept = "float8_e4m3fn" if "kv_cache_dtype" in options else None
        model = replace(model, kv_cache_dtype=kept)
        weights = per_device_bytes(
            SplitModel.of(make_abstract_model(model, jnp.bfloat16, None)).leaves
        )
        asked = {"quantization": None, "kv_cache_dtype": "auto"} | options
        engine: Any = SimpleNamespace(
            model_config=model,
            memory_account=SimpleNamespace(weights=weights),
            config=SimpleNamespace(tensor_parallel_size=1, **asked),
        )
        assert format_of(engine) == form
        floors[form] = Floor.of(engine)
    wide, narrow, weights, cache = floors.values()
    assert narrow.kv_bytes_per_token == cache.kv_bytes_per_token == wide.kv_bytes_per_token / 2
    assert weights.kv_bytes_per_token == wide.kv_bytes_per_token
    assert narrow.flops_per_token == wide.flops_per_token
    a_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336  # norms are no products
    assert wide.flops_per_token == 2 * 32 * a_layer
    assert wide.head_flops == 2 * 128256 * 4096
    assert cache.weight_bytes == pytest.approx(wide.weight_bytes, rel=1e-6)  # and its scales
    # What vLLM's figures in FP8 are measured by: 1.9 ms, 2.9 ms, about 0.65 s.
    assert narrow.decode_step(1, 256) == pytest.approx(1.9e-3, rel=0.05)
    assert narrow.decode_step(64, 1088) == pytest.approx(2.9e-3, rel=0.05)
    assert narrow.prefill([1024] * 64) == pytest.approx(0.65, rel=0.1)
    assert labelled({"case": "A"}, "bf16") == {"case": "A"}
    assert labelled({"case": "A"}, "fp8") == {"case": "A", "format": "fp8"}
