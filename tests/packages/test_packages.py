"""Engines serve models of published training packages, which are installed without changes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = {
    "tunix_qwen3": ("3.11", "google-tunix==0.1.7"),
    "levanter_llama": ("3.12", "marin-levanter==0.2.227.dev40316220070"),
}


def find_python(version: str) -> str | None:
    """Return the path of a Python interpreter, or None if there is no interpreter of the version.

    The interpreter is on the PATH or was installed by pyenv. `version` is, for example, "3.11".
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = (shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python"))
    for path in filter(None, found):
        result = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if result.stdout.startswith(f"Python {version}."):
            return str(path)
    return None


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("example", CASES)
def test_engine_and_training_package_give_the_same_greedy_tokens(example: str, tmp_path: Path):
    version, package = CASES[example]
    if (python := find_python(version)) is None:
        pytest.skip(f"needs Python {version}")
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    inside = str(tmp_path / "venv" / "bin" / "python")
    install = [inside, "-m", "pip", "install", "--quiet", str(ROOT), package]
    subprocess.run(install, check=True, timeout=900)
    script = [inside, str(Path(__file__).with_name("check_adapter.py")), example]
    # Another jaxlib may not know the flags of these tests.
    environment = {n: it for n, it in os.environ.items() if not n.startswith(("JAX_", "XLA_"))}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["equal"], run.stderr
