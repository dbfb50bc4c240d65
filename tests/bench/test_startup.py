"""Test how the start-up benchmark reads the log of a start, and makes result rows."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from bench.common import UNRECORDED
from bench.startup import Kind, command, phases, row
from jpaged.compile.gemm_autotuning import AUTOTUNING_DIR, read_record
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import make_abstract_model
from jpaged.runtime.programs import SplitModel

STDERR = """\
jpaged: imports took 1.50 s
jpaged: starting the device took 0.25 s
jpaged: loading Qwen3-0.6B as bfloat16 took 2.00 s
a warning: something took 9.00 s
jpaged: sizing the pool took 0.10 s
jpaged: compiled 10 of 79 programs
jpaged: waiting for programs took 3.00 s
jpaged: warming up took 0.50 s
"""


def test_start_up_time_is_split_into_phases_and_other_time():
    found = phases(STDERR, 8.0)
    assert list(found.values()) == pytest.approx([1.5, 0.25, 2.0, 0.1, 3.0, 0.5, 0.65])
    assert sum(found.values()) == pytest.approx(8.0)


def test_startup_row_says_whether_the_target_is_reached():
    assert row("warm", Kind("qwen3-0.6b"), {"first_token_s": 10.0})["reached"]
    assert not row("warm", Kind("qwen3-0.6b"), {"first_token_s": 10.1})["reached"]
    assert row("cold", Kind("llama-3.1-8b"), {"first_token_s": 39.0})["reached"]
    assert not row("cold", Kind("embedded"), {"first_token_s": 39.0})["reached"]
    assert row("cold", Kind("opt-13b"), {"first_token_s": 45.0})["reached"]
    assert not row("warm", Kind("opt-13b"), {"first_token_s": 45.0})["reached"]
    assert not row("cold", Kind("qwen3-30b-a3b"), {"first_token_s": 60.1})["reached"]
    assert row("warm", Kind("qwen3-30b-a3b"), {"first_token_s": 60.1})["reached"] is None


def test_weight_format_and_number_of_gpus_set_the_target_time_and_engine_options(tmp_path: Path):
    kinds = [Kind("llama-3.1-8b", form, count) for form, count in (("fp8", 1), ("bf16", 2))]
    rows = [row("cold", kind, {"first_token_s": 44.0}) for kind in kinds]
    assert [(it["to_reach"], it["vllm"]) for it in rows] == [(45, None), (60, None)]
    assert [(it.get("format"), it.get("devices")) for it in rows] == [("fp8", None), (None, 2)]
    options = [json.loads(command(kind, tmp_path, tmp_path)[-1]) for kind in kinds]
    assert [it["tensor_parallel_size"] for it in options] == [1, 2]
    assert [it.get("kv_cache_dtype") for it in options] == ["fp8", None]


def test_start_of_a_jax_model_names_its_shape_and_has_no_target(tmp_path: Path):
    found = row("cold", Kind("plain"), {"first_token_s": 44.0})
    assert (found["model"], found["to_reach"]) == ("qwen3-0.6b, plain JaxModel", None)
    assert found["reached"] is None
    code, options = command(Kind("plain"), tmp_path, tmp_path)[-2:]
    assert "from bench.jax_model import make_engine" in code
    assert json.loads(options)["model"] == "plain"


@pytest.mark.parametrize("shape", UNRECORDED)
def test_benchmarks_include_models_without_a_shipped_autotuning_record(shape: str):
    model = make_abstract_model(read_model_config(UNRECORDED[shape]), jnp.dtype(jnp.bfloat16))
    for path in AUTOTUNING_DIR.iterdir():
        assert not read_record(path).covers(SplitModel.of(model).leaves, {8})
