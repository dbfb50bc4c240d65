"""Test the tables that the profile benchmark makes of a JAX profiler trace."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import profile_step
from bench.common import FORMATS, Floor


def make_event(name: str, start: float, duration: float, *, pid: int = 1, tid: int = 13) -> dict:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": duration}


def write_trace(folder: Path, *kernels: dict) -> None:
    """Write a trace file in which each of two GPUs runs `kernels`.

    The file also has an event of an XLA operation and an event of the host.
    """

    def named(kind: str, name: str, **place: int) -> dict:
        return {"ph": "M", "name": kind, "args": {"name": name}, **place}

    events = [
        named("process_name", "/device:GPU:0 NVIDIA H200", pid=1),
        named("thread_name", "Stream #13(Compute)", pid=1, tid=13),
        named("thread_name", "XLA Ops", pid=1, tid=2),
        named("process_name", "/device:GPU:1 NVIDIA H200", pid=2),
        named("thread_name", "Stream #13(Compute)", pid=2, tid=13),
        *(kernel | {"pid": 2} for kernel in kernels),
        named("process_name", "/host:CPU", pid=7),
        named("thread_name", "Stream #1", pid=7, tid=13),
        make_event("fusion", 0, 1000, tid=2),
        make_event("python", 0, 1000, pid=7),
        *kernels,
    ]
    path = folder / "plugins" / "profile" / "host.trace.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


@pytest.mark.parametrize("form", [*FORMATS])
def test_profile_reports_kernels_and_the_lower_bound_of_a_step_in_bf16_and_fp8(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made, recorded = [], []

    def make(shape: str, **options: Any) -> Any:
        made.append((shape, options))
        return SimpleNamespace()

    def profile(engine: Any, batch: int, context: int, steps: int, folder: Path) -> dict:
        assert (context, steps) == (512, 2)
        first = [  # the kernels of the first of two traced steps
            make_event("gemm_fusion_7_1", 10, 6),
            # This norm kernel overlaps with the first GEMM for 2 us.
            make_event("add_rms_norm_to_fp8<x>", 14, 4),
            make_event("gemm_fusion_8", 20, 8),
        ]
        second = [event | {"ts": event["ts"] + 30} for event in first]
        write_trace(folder, *second, *first)
        return {"ms_a_step": 0.03, "num_steps": 2}

    def record(name: str, rows: list[dict]) -> str:
        recorded.extend(rows)
        return f"{name}.json"

    monkeypatch.setattr(profile_step, "make_engine", make)
    monkeypatch.setattr(profile_step, "profile", profile)
    monkeypatch.setattr(profile_step, "record", record)
    # A step takes 10 us to read the weights, and 1 ns per token.
    floor = Floor(4.3e7, 4.3e3, 0, 0, 0)
    monkeypatch.setattr(Floor, "of", staticmethod(lambda _engine: floor))
    options = "--tensor-parallel-size 2 --batch 1 8 --context 512 --steps 2 --model llama-3.1-8b"
    profile_step.main([*options.split(), "--format", form])
    assert made == [("llama-3.1-8b", {"verbose": True, "tensor_parallel_size": 2} | FORMATS[form])]
    assert [row["batch"] for row in recorded] == [1, 8]
    for row in recorded:
        assert row.get("format", "bf16") == form
        assert row["kernels_a_step"] == 3
        assert row["busy_ms"] == pytest.approx(16e-3)
        assert row["traced_ms"] == pytest.approx(24e-3)
        assert row["floor_ms"] == pytest.approx(0.01 + row["batch"] * 512e-6)
        gemm, norm = row["kernels"]
        assert (gemm["kernel"], norm["kernel"]) == ("gemm_fusion", "add_rms_norm_to_fp8")
        assert (gemm["launches_a_step"], gemm["us_each"], gemm["us_a_step"]) == (2, 7, 14)
        assert gemm["share"] == pytest.approx(14 / 18)
    assert "add_rms_norm_to_fp8" in capsys.readouterr().out


def test_trace_without_a_gpu_is_refused(tmp_path: Path):
    write_trace(tmp_path)
    with pytest.raises(RuntimeError, match="no kernel of a GPU"):
        profile_step.read_trace(tmp_path)
