"""Test what `jpaged doctor` reports for a working machine and for broken machines."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jpaged.config import EngineConfig
from jpaged.doctor import __main__ as doctor
from jpaged.doctor.__main__ import Finding, Status
from jpaged.engine import startup

H200 = {
    "kind": "NVIDIA H200",
    "platform": "gpu",
    "backend": "triton",
    "capability": "9.0",
    "memory": 140 * 2**30,
    "is_hopper": True,
    "is_tuned": True,
    "has_kernels": True,
    "has_fp8": True,
}
T4 = H200 | {"kind": "Tesla T4", "capability": "7.5", "is_hopper": False, "has_kernels": False}
CPU = dict.fromkeys(H200) | {"kind": "cpu", "platform": "cpu", "backend": "xla"}
GPU_ROW = {"name": "NVIDIA H200", "driver": "570.1", "memory": "143771 MiB", "capability": "9.0"}
PACKAGES = {"jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.13.0"}


def problems(findings: list[Finding]) -> list[Finding]:
    return [it for it in findings if it.status is Status.PROBLEM]


def test_doctor_reports_this_machine_as_usable():
    command = [sys.executable, "-m", "jpaged", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr, report["ok"]) == (0, "", True)
    texts = {it["name"]: it["text"] for it in report["findings"]}
    assert texts["Python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert {"JAX", "NVIDIA", "devices", "kernels", "cache", "memory", "open files"} <= texts.keys()
    assert "plain XLA" in texts["jpaged uses"]


def test_missing_gpu_plugin_is_reported_with_the_package_to_install():
    (found,) = problems(list(doctor.check_devices([CPU], "", [GPU_ROW], PACKAGES)))
    assert "JAX uses no GPU" in found.text
    assert 'pip install "jpaged[cuda13]"' in found.remedy


def test_gpu_plugin_that_finds_no_gpu_is_reported_as_a_problem():
    packages = PACKAGES | {"jax-cuda13-plugin": "0.11.2"}
    (found,) = problems(list(doctor.check_devices([CPU], "", [GPU_ROW], packages)))
    assert "JAX_PLATFORMS" in found.remedy


def test_error_during_the_start_of_the_device_is_reported():
    (found,) = problems(list(doctor.check_devices([], "RuntimeError: no CUDA", [], PACKAGES)))
    assert found.text == "RuntimeError: no CUDA"


def test_reported_kernels_depend_on_the_compute_capability():
    hopper, old = (list(doctor.check_devices([it], "", [GPU_ROW], PACKAGES)) for it in (H200, T4))
    assert not problems(hopper)
    assert hopper[1].text.startswith("Mosaic GPU and Triton; FP8 weights")
    assert [it.name for it in problems(old)] == ["kernels"]


@pytest.mark.parametrize(("plugin", "is_too_old"), [("cuda13", True), ("cuda12", False)])
def test_driver_that_is_too_old_for_the_cuda_version_is_a_problem(plugin: str, is_too_old: bool):
    packages = PACKAGES | {f"jax-{plugin}-plugin": "0.11.2"}
    found = doctor.check_driver([GPU_ROW], packages)
    assert (found.status is Status.PROBLEM) == is_too_old
    assert ("580" in found.remedy) == is_too_old


def test_gpu_plugin_with_another_version_than_jaxlib_is_a_problem():
    found = doctor.check_jax(PACKAGES | {"jax-cuda13-plugin": "0.10.0"})
    assert found.status is Status.PROBLEM


def test_exit_code_is_one_if_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor, "probe_devices", lambda: ([], "no device"))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "✗ devices     no device\n" in out
    assert "1 problem" in out


def test_engine_refuses_a_gpu_without_kernels_before_it_loads_weights(
    monkeypatch: pytest.MonkeyPatch,
):
    old_gpu = SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="Tesla T4")
    monkeypatch.setattr(startup.jax, "local_devices", lambda: [old_gpu])
    with pytest.raises(ValueError, match=r"Tesla T4 has compute capability 7\.5"):
        startup.build_parts(EngineConfig())
