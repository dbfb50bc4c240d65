"""Costs of steps that verify drafts, relative to plain steps.

The scheduler verifies drafts while the rows receive more tokens per step than a verify step costs.
The table is shipped, not measured at startup, so that runs can be repeated. `bench/speculative.py`
measures its entries.
"""

from jpaged.runtime.runtime_config import RuntimeConfig
from pallas_kernels import Backend

GPU_COSTS = {
    1: ((8, 1.05), (32, 1.10), (64, 1.20)),
    3: ((8, 1.15), (32, 1.25), (64, 1.50)),
    7: ((8, 1.20), (32, 1.45), (64, 2.10)),
}
"""By number of drafts: pairs (number of rows, cost). A burst of plain steps and a burst of verify
steps have about the same ratio as single steps."""

CPU_COSTS = {
    1: ((8, 1.15), (16, 1.30), (64, 1.60)),
    3: ((8, 1.40), (16, 1.80), (64, 2.60)),
    7: ((8, 2.00), (16, 2.80), (64, 4.50)),
}


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
