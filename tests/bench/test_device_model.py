"""Test the device model: its fit, its recorded data and its scaling to other GPUs."""

import json
import math
from dataclasses import asdict, replace
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.lengths import sharegpt_like_lengths
from bench.paper import device_model as module
from bench.paper.device_model import (
    MODELS,
    RECORDED,
    Coefficients,
    DeviceModel,
    StepWork,
    device_model,
    fit,
    fit_rows,
    read_rows,
)
from bench.paper.simulator import Padding
from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import SchedulingGoal
from jpaged.core.request import Request, StopCriteria
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.runtime.buckets import make_buckets

TRUE = Coefficients(
    step=2e-4,
    layer=1.5e-5,
    bandwidth=4e12,
    rate=6e14,
    joint=1.8,
    kv_bandwidth=3.5e12,
    prefill_rate=3e14,
    element=2e-11,
    mixed=5e-6,
    swap=8e-4,
    swap_bandwidth=4e10,
)


def row_of(kind: str, work: StepWork, seconds: float, block_size: int = 16) -> dict[str, Any]:
    fields = {"model": "opt-13b", "kind": kind, "block_size": block_size, "seconds": seconds}
    return {**work._asdict(), **fields, "blocks": 0, "source": "made up"}


def made_up_rows() -> list[dict[str, Any]]:
    model, rows = DeviceModel("", MODELS["opt-13b"], TRUE), []
    for seqs, context in product((8, 32, 64, 128, 256), (64, 512, 1024)):
        work = StepWork(seqs, seqs * context, 0, 0, 0, seqs, seqs)
        rows.append(row_of("decode", work, model.step_seconds(work)))
    for seqs, length in product((1, 2, 8), (64, 256, 1024)):
        pairs, tokens = seqs * length * (length + 1) // 2, seqs * length
        work = StepWork(0, 0, seqs, tokens, pairs, tokens, 8)
        rows.append(row_of("prefill", work, model.step_seconds(work)))
        work = StepWork(32, 32 * 512, seqs, tokens, pairs, 2 * tokens, 256)
        rows.append(row_of("mixed", work, model.step_seconds(work)))
    for blocks in (8, 64, 512):
        seconds = model.swap_seconds(blocks, 16)
        rows.append(row_of("swap_out", StepWork(0, 0, 0, 0, 0, 0, 0), seconds) | {"blocks": blocks})
    return rows


def test_fit_recovers_the_coefficients_of_synthetic_step_times():
    found = fit_rows(made_up_rows())
    assert found.mean_error < 1e-3
    assert max(abs(point.error) for point in found.points) < 0.01
    for name, value in asdict(TRUE).items():
        if name in ("bandwidth", "kv_bandwidth", "rate", "swap_bandwidth", "swap"):
            assert asdict(found.coefficients)[name] == pytest.approx(value, rel=0.05), name


def test_fit_of_the_device_model_finds_the_slowdown_of_each_block_size():
    rows, model = made_up_rows(), DeviceModel("", MODELS["opt-13b"], TRUE)
    work = StepWork(32, 32 * 512, 0, 0, 0, 32, 32)
    longer = work._replace(context_tokens=32 * 1024)
    for size, factors in ((16, (1.0, 1.0)), (1, (2.9, 3.1)), (64, (0.9, 0.9))):
        for point, factor in zip((work, longer), factors, strict=True):
            rows.append(row_of("attention", point, 1e-9 * point.context_tokens * factor, size))
    found = fit_rows(rows)
    by = found.coefficients
    assert [by.slowdown(size) for size in (1, 2, 8, 16, 32, 64, 256)] == pytest.approx(
        [3.0, 3.0, 1.0, 1.0, 1.0, 0.9, 0.9]
    )
    # The timings of attention kernels give the slowdown of attention at each block size. The fitted
    # points come from all other timings, which are of whole steps and of swaps.
    assert len(found.points) == len(made_up_rows())
    fitted = replace(model, coefficients=by)
    more = fitted.step_seconds(work, 1) - fitted.step_seconds(work)
    assert more == pytest.approx(2 * fitted.kv_seconds(work))


def test_device_model_fitted_to_recorded_steps_has_small_errors():
    recorded = fit_rows(read_rows(RECORDED))
    assert recorded.mean_error < 0.06
    assert max(abs(point.error) for point in recorded.points) < 0.16
    assert all("bench/" in it.source or "docs/" in it.source for it in recorded.points)


@pytest.mark.parametrize(
    ("shape", "case"), [("llama-3.1-8b", "A"), ("llama-3.1-8b", "B"), ("qwen3-0.6b", "B")]
)
def test_device_model_predicts_the_times_of_recorded_runs(shape: str, case: str):
    """The test compares with cases A and B of `bench.throughput`, which are not part of the fitted
    data."""
    path = RECORDED.parent.parent / "results" / "throughput_nvidia-h200.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    of_case = (row for row in rows if (row["case"], row["model"]) == (case, shape))
    (row,) = (row for row in of_case if "format" not in row)
    lengths = ([128] * 256, [128] * 256) if case == "A" else sharegpt_like_lengths(512)
    modelled = generation_seconds(device_model(shape), *lengths)
    assert modelled == pytest.approx(row["seconds"], rel=0.1)


def generation_seconds(device: DeviceModel, prompts: Any, outputs: Any) -> float:
    """Return the seconds that the device model predicts for `Engine.generate`, with prompts and
    outputs of these lengths."""
    scheduler = Scheduler(SchedulerConfig(256, 8192, 2048), BlockManager(40_000, 16))
    padding, seq_id_counter = Padding(make_buckets(256, 8192)), count()
    for name, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens, stop = [1] * int(prompt), StopCriteria(int(output))
        scheduler.add(Request.from_prompt(str(name), tokens, stop, seq_id_counter=seq_id_counter))
    seconds = 0.0
    while (plan := scheduler.schedule(SchedulingGoal.THROUGHPUT)) is not None:
        seconds += device.step_seconds(padding.work_of(plan))
        scheduler.update(plan, np.ones(len(plan.scheduled), np.int64))
    return seconds


def test_device_model_is_fitted_to_result_files_instead_of_shipped_step_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = made_up_rows()
    (tmp_path / "step_times_opt-13b_nvidia-h200.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    fit.cache_clear()
    try:
        assert fit("opt-66b").coefficients == fit("opt-13b").coefficients
        assert fit("opt-13b").mean_error < 1e-3
        (tmp_path / "step_times_qwen3-0.6b_nvidia-h200.json").write_text("{}")
        with pytest.raises(ValueError, match=r"step_times_qwen3-0.6b.*cannot be read: KeyError"):
            fit("qwen3-0.6b")
    finally:
        fit.cache_clear()


def test_step_times_of_another_gpu_are_predicted_from_the_ratio_of_peak_rates():
    here, there = device_model("opt-13b"), device_model("opt-13b", "a100-40gb")
    many, long = (32, 1000.0), [2048]
    decode_ratio = there.decode_seconds(*many) / here.decode_seconds(*many)
    assert decode_ratio == pytest.approx(4.8 / 1.555, rel=0.1)
    prefill_ratio = there.prefill_seconds(long) / here.prefill_seconds(long)
    assert prefill_ratio == pytest.approx(989 / 312, rel=0.1)
    assert there.swap_seconds(1000, 16) > 1.9 * here.swap_seconds(1000, 16)
    shared = device_model("opt-13b", "a100-40gb", 4)
    assert 0.25 < shared.decode_seconds(*many) / there.decode_seconds(*many) < 0.4
    assert shared.block_bytes(16) == here.block_bytes(16) == 16 * 2 * 40 * 5120 * 2


@pytest.mark.parametrize(
    ("shape", "weights", "kv_gib", "slots"),
    [
        ("opt-13b", 26e9, 12, 15_700),
        ("opt-66b", 132e9, 21, 9_700),
        ("opt-175b", 346e9, 264, 60_100),
    ],
)
def test_opt_model_shapes_have_the_sizes_that_the_paper_states(
    shape: str, weights: float, kv_gib: int, slots: int
):
    model = MODELS[shape]
    params = model.num_layers * model.layer_params + model.head_params
    assert 2 * params == pytest.approx(weights, rel=0.02)
    assert model.kv_bytes * slots == pytest.approx(kv_gib * 2**30, rel=0.02)


def test_device_model_refuses_an_unknown_gpu_or_model_and_zero_gpus():
    with pytest.raises(ValueError, match="shape 'opt' is unknown: pass one of opt-13b"):
        device_model("opt")
    with pytest.raises(ValueError, match="gpu 'a100' is unknown: pass one of h200"):
        device_model("opt-13b", "a100")
    with pytest.raises(ValueError, match="num_gpus must be at least 1, got 0"):
        device_model("opt-13b", num_gpus=0)
    assert math.isinf(DeviceModel("", MODELS["opt-13b"], TRUE).nvlink)
