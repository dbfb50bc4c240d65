"""Test the loader's peak host memory, which a child process measures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from peak_memory import write_checkpoint


def peak_memory(folder, how):
    script = Path(__file__).with_name("peak_memory.py")
    run = subprocess.run(
        [sys.executable, script, folder, how],
        cwd=script.parents[2],
        env=os.environ | {"PYTHONPATH": str(script.parents[2]), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("how", "low", "high"),
    [("load", 0.0, 1.3), pytest.param("naive", 1.9, 9.0, marks=pytest.mark.full)],
)
def test_peak_host_memory_is_below_1_3_times_the_largest_file(tmp_path, how, low, high):
    """Load two files with one large tensor each, which the loader casts.

    The case "naive" reads all files first, and shows that such a loader exceeds the limit.
    """
    write_checkpoint(tmp_path)
    assert low < peak_memory(tmp_path, how) < high
