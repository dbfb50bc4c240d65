"""What a case's figure is made of."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench import throughput


@pytest.mark.parametrize(("repeats", "expected"), [(1, 20), (3, 30), (4, 40)])
def test_the_median_run_is_reported_but_for_the_first(
    repeats: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    speeds = [1, 20, 50, 30, 40]  # of seeds 0, 1, 2 ...
    engine: Any = SimpleNamespace()

    def measure(*given: Any) -> dict:
        *_, seed, sampling = given
        assert sampling == {"logprobs": 5}
        return {"output_tokens_per_s": speeds[seed], "seed": seed}

    monkeypatch.setattr(throughput, "measure", measure)
    row = throughput.measure_often(
        engine, "qwen3-0.6b", "A", repeats=repeats, sampling={"logprobs": 5}
    )
    assert row["output_tokens_per_s"] == expected == speeds[row["seed"]]
    measured = speeds[1 : repeats + 1]
    assert (row["slowest"], row["fastest"]) == (min(measured), max(measured))
