"""Test the test tiers: covering sets, selection of tests by mark, and the limit of CPU time."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import TIER, covering, num_examples

ROOT = Path(__file__).parents[1]


def _in_default_tier(params) -> list[tuple]:
    return [each.values for each in params if not any(mark.name == "full" for mark in each.marks)]


def test_default_tier_runs_all_pairs_of_values_and_full_tier_runs_all_combinations():
    axes = (range(4), "abc", (True, False), range(3))
    params = covering(*axes)
    assert [each.values for each in params] == list(itertools.product(*axes))
    small = _in_default_tier(params)
    assert len(small) <= 16  # of 72
    for first, second in itertools.combinations(range(4), 2):
        pairs = {(each[first], each[second]) for each in small}
        assert pairs == set(itertools.product(axes[first], axes[second]))


def test_covering_set_of_strength_one_contains_every_value_of_each_option():
    """The covering set has the combinations of option values that the default tier runs. The set
    also has each combination for which `keep` returns True."""
    params = covering(
        range(3), "ab", strength=1, keep=lambda number, letter: (number, letter) == (0, "b")
    )
    small = _in_default_tier(params)
    assert (0, "b") in small
    assert len(small) == 3
    assert [{each[axis] for each in small} for axis in range(2)] == [{0, 1, 2}, {"a", "b"}]


def test_combined_parameters_keep_the_pytest_marks_and_ids_of_their_values():
    gpu = pytest.param("triton", id="on-gpu", marks=pytest.mark.gpu)
    params = covering([gpu], [pytest.param(1, id="one")])
    assert (params[0].id, [mark.name for mark in params[0].marks]) == ("on-gpu-one", ["gpu"])


def test_default_tier_runs_a_quarter_of_the_random_examples(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    tier = request.config.getoption("tier")
    assert num_examples(10) == (10 if tier == "full" else 3)
    monkeypatch.setenv(TIER, "full")
    assert num_examples(10) == 10


@pytest.fixture
def run_pytest(tmp_path):
    """Return a function that runs the source of a test module with this project's settings.

    The function returns pytest's report. It writes the tests to a folder named `core`, because
    conftest.py does not import JAX for tests in such a folder.
    """

    def run(source: str, *options: str, test: str = "", ci: bool = False) -> str:
        folder = tmp_path / "core"
        folder.mkdir(exist_ok=True)
        (folder / "test_sample.py").write_text("import pytest\n" + source, encoding="utf-8")
        settings = (
            f"--rootdir={ROOT} -c {ROOT}/pyproject.toml -p tests.conftest -p no:cacheprovider"
        )
        command = [sys.executable, "-m", "pytest", *settings.split(), *options, f"{folder}{test}"]
        environment = {name: value for name, value in os.environ.items() if name != "CI"}
        environment |= {"PYTHONPATH": str(ROOT)} | ({"CI": "true"} if ci else {})
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    return run


TWO = """
def test_small(): pass
@pytest.mark.full
def test_large(): pass
"""


def test_default_tier_skips_tests_marked_full(run_pytest):
    assert "1 passed, 1 deselected" in run_pytest(TWO)
    assert "1 passed" in run_pytest(TWO, test="/test_sample.py::test_large")
    assert "2 passed" in run_pytest(TWO, "--tier", "full")


SLOW = """
import tests.conftest
tests.conftest.MAX_PROCESSOR_SECONDS = 0.2
def busy():
    import time
    end = time.process_time() + 0.5
    while time.process_time() < end: pass
def test_small(): pass
def test_slow(): busy()
@pytest.mark.full
def test_slow_but_full(): busy()
"""


def test_ci_reports_an_error_if_a_default_tier_test_exceeds_the_cpu_time_limit(run_pytest):
    report = run_pytest(SLOW, "--tier", "full", ci=True)
    assert "1 error" in report or "1 failed" in report
    assert "test_slow used" in report
    assert "make the test smaller" in report
