"""Test that the benchmark of the host's time measures every part of a step."""

from typing import Any

import pytest

from bench.common import PENALTIES
from bench.host_step import ENDS, ORDER, measure, measure_ends
from bench.null_device import Clock


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 5}, PENALTIES], ids=str)
def test_host_time_of_every_part_of_a_step_is_measured(sampling: dict[str, Any]):
    found = measure(num_seqs=16, num_steps=5, sampling=sampling)
    assert set(found) == {*ORDER, "total", "total, 99 of 100"}
    assert all(us > 0 for us in found.values())


def test_host_time_before_the_first_step_and_after_the_last_step_is_measured():
    found = measure_ends(num_seqs=4, num_times=2)
    assert tuple(found) == ENDS
    assert all(ms > 0 for ms in found.values())


def test_time_of_a_measured_part_excludes_nested_parts():
    clock = Clock(iter([0.0, 1.0, 5.0, 7.0]).__next__)
    clock.timed("outer", clock.timed("inner", list))()
    assert clock.take() == {"inner": 4.0, "outer": 3.0}
    assert clock.take() == {}
