"""Costs of steps that verify drafts, relative to plain steps.

The scheduler verifies drafts while the rows receive more tokens per step than a verify step costs.
The table is shipped, not measured at startup, so that runs can be repeated. `bench/speculative.py`
measures such costs.
"""

from jpaged.runtime.runtime_config import RuntimeConfig
from pallas_kernels import Backend

GPU_COSTS = {
    1: ((2, 1.11), (8, 1.04), (32, 1.10), (64, 1.30)),
    3: ((2, 1.25), (8, 1.10), (32, 1.25), (64, 1.65)),
    7: ((1, 1.31), (8, 1.22), (32, 1.70), (64, 2.46)),
}
"""By number of drafts: pairs (number of rows, cost). An entry is the mean of the costs of
Qwen3-0.6B's and Llama-3.1-8B's shapes on an H200 for 1, 8, 32 and 64 rows
(`bench/results/speculative_nvidia-h200.json`)."""

CPU_COSTS = {
    1: ((4, 1.10), (8, 1.30), (16, 1.40), (64, 1.60)),
    3: ((2, 1.10), (8, 2.10), (16, 2.40), (64, 2.80)),
    7: ((1, 1.15), (8, 3.50), (16, 3.80), (64, 4.50)),
}
"""The same on a CPU: estimates for the embedded model. A plain step computes at least 8 rows, so a
verify step of 8 tokens costs nearly the same."""


def verify_costs(config: RuntimeConfig, num_drafts: int) -> tuple[tuple[int, float], ...]:
    """Return pairs (number of rows, cost) for the verify steps of an engine.

    The cost is the duration of a verify step, as a multiple of the duration of a plain step.

    Args:
        config: Sizes and limits of the runtime.
        num_drafts: Number of drafts per row that verify steps are compiled for.
    """
    costs = (CPU_COSTS if config.backend is Backend.XLA else GPU_COSTS)[num_drafts]
    max_rows = config.buckets.verify_batch_sizes[-1]
    found = [(rows, cost) for rows, cost in costs if rows < max_rows]
    following = next(cost for rows, cost in costs if rows >= max_rows)
    return (*found, (max_rows, following))
