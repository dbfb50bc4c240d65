"""Costs of steps that verify drafts, relative to plain steps.

The scheduler verifies drafts while the rows receive more tokens per step than a verify step costs.
The table is shipped, not measured at startup, so that runs can be repeated. `bench/speculative.py`
measures such costs.
"""

from jpaged.runtime.runtime_config import RuntimeConfig
from pallas_kernels import Backend

GPU_COSTS = {
    1: ((4, 1.05), (8, 1.08), (32, 1.15), (64, 1.35)),
    3: ((2, 1.25), (8, 1.10), (32, 1.25), (64, 1.65)),
    7: ((1, 1.30), (8, 1.25), (32, 1.60), (64, 2.40)),
}
"""By number of drafts: pairs (number of rows, cost). On an H200, three drafts cost 1.43, 1.11, 1.28
and 1.61 plain steps for 1, 8, 32 and 64 rows of Qwen3-0.6B's shape, and 1.07, 1.08, 1.21 and 1.70
for Llama-3.1-8B's (`bench/results/speculative_nvidia-h200.json`). Entries for one and seven drafts
are estimates."""

CPU_COSTS = {
    1: ((4, 1.10), (8, 1.30), (16, 1.40), (64, 1.60)),
    3: ((2, 1.10), (8, 2.10), (16, 2.40), (64, 2.80)),
    7: ((1, 1.15), (8, 3.50), (16, 3.80), (64, 4.50)),
}
"""The same on a CPU, measured with the embedded model. A plain step computes at least 8 rows, so
that a verify step of 8 tokens costs nearly the same."""


def verify_costs(config: RuntimeConfig, num_drafts: int) -> tuple[tuple[int, float], ...]:
    """Return pairs (number of rows, cost) for the verify steps of an engine.

    Args:
        config: Sizes and limits of the runtime.
        num_drafts: Number of drafts per row that verify steps are compiled for.
    """
    costs = (CPU_COSTS if config.backend is Backend.XLA else GPU_COSTS)[num_drafts]
    max_rows = config.buckets.verify_batch_sizes[-1]
    found = [(rows, cost) for rows, cost in costs if rows < max_rows]
    following = next(cost for rows, cost in costs if rows >= max_rows)
    return (*found, (max_rows, following))
