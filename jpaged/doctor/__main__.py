"""The command `jpaged doctor`: report what jpaged finds on this machine and what it would use.

The exit code is 0 if jpaged can run and every GPU of the machine is usable, otherwise 1. The device
is examined in a child process, so that a broken JAX plugin cannot end the report, and no GPU memory
stays reserved.
"""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jpaged import __version__
from jpaged.config import DEFAULT_COMPILATION_CACHE, EngineConfig
from jpaged.errors import format_count
from jpaged.options import CommandLine

PROBE_TIMEOUT_S = 120.0
"""Seconds that JAX has to start the device. A first start of CUDA can take half a minute."""

_MIN_DRIVERS = {"cuda13": 580, "cuda12": 525}
"""Lowest NVIDIA driver of each CUDA version that JAX ships, by jpaged's extra."""

_PROBE = """\
import json, jax
from pallas_kernels import select_backend, supports_fp8, supports_kernels
from pallas_kernels.tuning import has_tuned_table, is_hopper
found = []
for device in jax.local_devices():
    is_gpu = device.platform == "gpu"
    found.append({
        "kind": device.device_kind,
        "platform": device.platform,
        "backend": select_backend(device.platform).value,
        "capability": str(device.compute_capability) if is_gpu else None,
        "memory": (device.memory_stats() or {}).get("bytes_limit") if is_gpu else None,
        "is_hopper": is_gpu and is_hopper(device.device_kind),
        "is_tuned": is_gpu and has_tuned_table(device.device_kind),
        "has_kernels": supports_kernels(device),
        "has_fp8": is_gpu and supports_fp8(device),
    })
print(json.dumps(found))
"""
_PROBE_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}


class Status(StrEnum):
    """Result of one check. Only PROBLEM changes the exit code."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was checked.
        text: What was found.
        remedy: What the user can do; empty if nothing has to change.
        status: Result of the check.
    """

    name: str
    text: str
    remedy: str = ""
    status: Status = Status.OK


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, and return the exit code."""
    parser = CommandLine(
        prog="jpaged doctor",
        description="Report what jpaged finds on this machine, what it would use, and what is "
        "missing. The exit code is 1 if something must be repaired, otherwise 0.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    as_json = parser.parse_args(argv).json
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print(format_finding(finding), flush=True)
    problems = [it for it in findings if it.status is Status.PROBLEM]
    if as_json:
        print(json.dumps({"ok": not problems, "findings": [asdict(it) for it in findings]}))
    else:
        found = format_count(len(problems), "problem")
        print(f"\n{found}: see the lines marked ✗" if problems else "\njpaged can run here")
    return 1 if problems else 0


def format_finding(finding: Finding) -> str:
    """Return a line of the report, and a second line with the remedy if there is one."""
    mark = {Status.OK: " ", Status.NOTE: "!", Status.PROBLEM: "✗"}[finding.status]
    line = f"{mark} {finding.name:<11} {finding.text}"
    return f"{line}\n  {'':<11} {finding.remedy}" if finding.remedy else line


def examine() -> Iterator[Finding]:
    """Yield the findings, in the order of the report."""
    yield Finding("jpaged", __version__)
    yield _check_python()
    jax_packages = installed_packages()
    yield check_jax(jax_packages)
    gpus = list_nvidia_gpus()
    yield check_driver(gpus, jax_packages)
    devices, error = probe_devices() if "jax" in jax_packages else ([], "JAX is not installed")
    yield from check_devices(devices, error, gpus, jax_packages)
    yield _check_cache()
    yield _check_memory()
    yield _check_open_files()
    if devices:
        yield describe_use(devices)


def _check_python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("Python", found)
    remedy = "install Python 3.11, 3.12 or 3.13, and then jpaged in an environment of that Python"
    return Finding("Python", found, remedy, Status.PROBLEM)


def installed_packages() -> dict[str, str]:
    """Return the versions of the installed JAX packages, by package name."""
    names = ["jax", "jaxlib", "flax"]
    names += [f"jax-cuda{major}-{part}" for major in (12, 13) for part in ("plugin", "pjrt")]
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_jax(packages: Mapping[str, str]) -> Finding:
    """Check that JAX is installed, and that an installed GPU plugin has the same version as
    jaxlib."""
    if not packages:
        return Finding("JAX", "not installed", "pip install jpaged", Status.PROBLEM)
    found = ", ".join(f"{name} {number}" for name, number in packages.items())
    plugins = [number for name, number in packages.items() if name.endswith("-plugin")]
    if any(number != packages.get("jaxlib") for number in plugins):
        remedy = "the GPU plugin must have the version of jaxlib: pip install --upgrade jaxlib and "
        remedy += "the plugin together"
        return Finding("JAX", found, remedy, Status.PROBLEM)
    return Finding("JAX", found)


def list_nvidia_gpus() -> list[dict[str, str]]:
    """Return name, driver, memory and compute capability of each GPU, without using JAX.

    If `nvidia-smi` is missing or fails, return an empty dict for each NVIDIA device file in `/dev`.
    """
    fields = {"name": "name", "driver": "driver_version", "memory": "memory.total"}
    fields |= {"capability": "compute_cap"}
    if command := shutil.which("nvidia-smi"):
        query = [command, f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=30)
            rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
            if done.returncode == 0:
                return [dict(zip(fields, row, strict=False)) for row in rows]
        except (OSError, subprocess.TimeoutExpired):
            pass
    return [{} for _ in Path("/dev").glob("nvidia[0-9]*")]


def check_driver(gpus: Sequence[Mapping[str, str]], packages: Mapping[str, str]) -> Finding:
    """Check that the driver is recent enough for the installed plugin.

    Args:
        gpus: GPUs of the system, from `list_nvidia_gpus`.
        packages: Installed packages, from `installed_packages`.
    """
    if not gpus:
        return Finding("NVIDIA", "no GPU found by the system")
    driver = gpus[0].get("driver")
    if driver is None:
        remedy = "install the NVIDIA driver, or start the container with --gpus all"
        return Finding("NVIDIA", f"{len(gpus)} GPU, nvidia-smi fails", remedy, Status.PROBLEM)
    names = ", ".join(f"{gpu['name']} ({gpu.get('memory', '?')})" for gpu in gpus)
    found = f"{names}, driver {driver}"
    for extra, lowest in _MIN_DRIVERS.items():
        if f"jax-{extra}-plugin" in packages and int(driver.split(".")[0]) < lowest:
            remedy = f"{extra} needs driver {lowest} or later: update the driver"
            if extra == "cuda13":
                remedy += ', or pip install "jpaged[cuda12]"'
            return Finding("NVIDIA", found, remedy, Status.PROBLEM)
    return Finding("NVIDIA", found)


def probe_devices() -> tuple[list[dict[str, Any]], str]:
    """Return JAX's local devices, and an error text ("" for no error). A child process starts
    JAX."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            env=os.environ | _PROBE_ENVIRONMENT,
        )
    except subprocess.TimeoutExpired:
        return [], f"JAX did not start a device within {PROBE_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), ""
    lines = done.stderr.strip().splitlines()
    return [], lines[-1] if lines else f"JAX ended with exit code {done.returncode}"


def check_devices(
    devices: Sequence[Mapping[str, Any]],
    error: str,
    gpus: Sequence[Mapping[str, str]],
    packages: Mapping[str, str],
) -> Iterator[Finding]:
    """Yield the findings about the devices and the kernels that run on them.

    Args:
        devices: Devices as `probe_devices` returns them.
        error: Error because of which JAX found no devices; empty if JAX found devices.
        gpus: GPUs of the system, from `list_nvidia_gpus`.
        packages: Installed packages, from `installed_packages`.
    """
    if not devices:
        remedy = 'run python -c "import jax; jax.devices()" to see the whole error'
        yield Finding("devices", error, remedy, Status.PROBLEM)
        return
    kinds = ", ".join(_describe_device(device) for device in devices)
    if gpus and devices[0]["platform"] != "gpu":
        remedy = 'pip install "jpaged[cuda13]" (or cuda12 for drivers from 525 to 579)'
        if any(name.endswith("-plugin") for name in packages):
            remedy = "unset JAX_PLATFORMS and CUDA_VISIBLE_DEVICES, then run "
            remedy += 'python -c "import jax; jax.devices()" to see why the plugin fails'
        elif platform.machine() not in ("x86_64", "aarch64") or sys.platform != "linux":
            remedy = "JAX uses NVIDIA GPUs on Linux only: run jpaged there, or under WSL 2"
        yield Finding("devices", f"{kinds}; JAX uses no GPU", remedy, Status.PROBLEM)
    else:
        yield Finding("devices", kinds)
    yield _check_kernels(devices[0])


def _describe_device(device: Mapping[str, Any]) -> str:
    if device["capability"] is None:
        return str(device["kind"])
    memory = f", {device['memory'] / 2**30:.1f} GiB" if device["memory"] else ""
    return f"{device['kind']} (compute capability {device['capability']}{memory})"


def _check_kernels(device: Mapping[str, Any]) -> Finding:
    """Return which implementations of the kernels run on a device."""
    if device["backend"] == "xla":
        return Finding("kernels", "plain XLA: correct on any device, for tests and small models")
    if not device["has_kernels"]:
        remedy = "use a GPU of compute capability 8.0 or later, or JAX_PLATFORMS=cpu"
        return Finding("kernels", "none for this GPU", remedy, Status.PROBLEM)
    found = "Mosaic GPU and Triton" if device["is_hopper"] else "Triton"
    fp8 = "FP8 weights and KV cache" if device["has_fp8"] else "no FP8 (needs 8.9)"
    tuned = "tuned launch parameters" if device["is_tuned"] else "heuristic launch parameters"
    return Finding("kernels", f"{found}; {fp8}; {tuned}")


def _check_cache() -> Finding:
    """Check that the default folder of compiled programs is writable and private."""
    folder = Path(DEFAULT_COMPILATION_CACHE).expanduser()
    if not folder.exists():
        return Finding("cache", f"{folder}: the first start will create this folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        files = [file.stat() for file in folder.rglob("*") if file.is_file()]
        is_private = folder.stat().st_mode & 0o022 == 0
    except OSError as error:
        remedy = "make the folder writable, or pass --compilation-cache-dir; until then every "
        remedy += "start compiles all programs"
        return Finding("cache", f"{folder}: {error.strerror}", remedy, Status.NOTE)
    size = sum(file.st_size for file in files) / 2**20
    found = f"{folder}: {format_count(len(files), 'file')}, {size:,.0f} MiB"
    if is_private:
        return Finding("cache", found)
    remedy = f"other users can write there, and its programs are executed: chmod go-w {folder}"
    return Finding("cache", found, remedy, Status.NOTE)


def _check_memory() -> Finding:
    """Report the host's memory, or the limit of the container if that is lower."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    found = f"{total / 2**30:.1f} GiB of host memory"
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    if limit.isdigit() and int(limit) < total:
        limited = int(limit) / 2**30
        remedy = "the default of --swap-space ignores this limit: set --swap-space"
        found += f", container limit {limited:.1f} GiB"
        return Finding("memory", found, remedy, Status.NOTE)
    return Finding("memory", found)


def _check_open_files() -> Finding:
    """Check that the server can open a file for each of its connections."""
    from jpaged.serve.http.lifecycle import num_files_needed
    from jpaged.serve.options import Limits

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_connections = Limits().max_connections
    needed = num_files_needed(max_connections)
    found = f"limit {_limit_text(soft)}, can be raised to {_limit_text(hard)}"
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return Finding("open files", found)
    remedy = f"{max_connections} connections of the server need {needed} files: ulimit -n {needed}"
    return Finding("open files", found, f"{remedy}, or pass --max-connections", Status.NOTE)


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def describe_use(devices: Sequence[Mapping[str, Any]]) -> Finding:
    """Return the device, dtype and memory fraction that jpaged uses by default."""
    device, config = devices[0], EngineConfig()
    if device["platform"] != "gpu":
        return Finding("jpaged uses", f"{device['kind']}, float32, plain XLA")
    share = f"{config.gpu_memory_utilization:.0%} of its memory"
    text = f"{device['kind']}, the checkpoint's dtype, {share}"
    if len(devices) > 1:
        text += f"; --tensor-parallel-size {len(devices)} would use all {len(devices)} GPUs"
    return Finding("jpaged uses", text)


if __name__ == "__main__":
    sys.exit(main())
