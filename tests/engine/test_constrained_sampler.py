"""Test how long a step waits for grammar masks that are not ready."""

import time
from functools import partial

import pytest

from jpaged.engine.constrained_sampler import WaitBudget


def test_step_waits_longer_if_more_rows_lack_their_grammar_masks(
    monkeypatch: pytest.MonkeyPatch,
):
    now = 10.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    budget = WaitBudget()
    is_spent = partial(budget.is_spent, has_unconstrained_rows=True)
    now += 0.004  # the duration of a step
    budget.begin_wait(0.0)
    now += 1.0  # the wait for masks is not part of the step's duration
    budget.end_wait()
    budget.begin_wait(0.0)
    # If only rows with slow grammars lack their masks, the step does not wait for the masks.
    assert is_spent(0.0)
    assert not is_spent(0.125)
    # One row in eight lacks its mask. The step waits up to an eighth of the previous step's
    # duration: 4 ms / 8 = 0.5 ms.
    now += 0.0006
    assert is_spent(0.125)
    assert not is_spent(0.25)
    now += 0.0005
    assert is_spent(0.25)
    assert not is_spent(0.3)
    # More than a quarter of the rows lack their masks. The step waits up to the whole duration of
    # the previous step: 4 ms.
    now += 0.0030
    assert is_spent(0.3)
    assert not budget.is_spent(0.3, has_unconstrained_rows=False)
    # Here too, only rows with slow grammars lack their masks. But the host has just waited 2 ms for
    # the device, so the step may also wait 2 ms for the masks.
    budget.begin_wait(0.002)
    now += 0.0019
    assert not is_spent(0.0)
    now += 0.0002
    assert is_spent(0.0)
    assert not is_spent(0.125)
    now += 60
    assert not budget.is_spent(0.3, has_unconstrained_rows=False)
    budget.begin_wait(0.0)
    budget.end_wait()
    budget.begin_wait(0.0)
    # The previous step took 60 s, but `WaitBudget` uses a duration of at most 50 ms. If a quarter
    # of the rows lack their masks, the step waits up to a quarter of 50 ms.
    now += 0.26 * 0.05
    assert is_spent(0.25)
