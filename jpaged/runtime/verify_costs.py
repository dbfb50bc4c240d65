"""Costs of steps that verify drafts, relative to plain steps.

The cost of a verify step is its duration, as a multiple of the duration of a step without drafts.
The scheduler verifies drafts as long as the number of tokens per row and step exceeds the cost. The
costs are constants, and not measured at startup, so that runs are reproducible.
`bench/speculative.py` measures them.
"""

from jpaged.runtime.runtime_config import RuntimeConfig
from pallas_kernels import Backend

GPU_COSTS = {
    1: ((2, 1.11), (8, 1.04), (32, 1.10), (64, 1.30)),
    3: ((2, 1.25), (8, 1.10), (32, 1.25), (64, 1.65)),
    7: ((1, 1.31), (8, 1.22), (32, 1.70), (64, 2.46)),
}
"""Costs on a GPU: for each number of drafts, pairs (number of rows, cost). A cost is the mean of
two costs measured on an H200, with the shapes of Qwen3-0.6B and of Llama-3.1-8B
(`bench/results/speculative_nvidia-h200.json`)."""

CPU_COSTS = {
    1: ((4, 1.10), (8, 1.30), (16, 1.40), (64, 1.60)),
    3: ((2, 1.10), (8, 2.10), (16, 2.40), (64, 2.80)),
    7: ((1, 1.15), (8, 3.50), (16, 3.80), (64, 4.50)),
}
"""Costs on a CPU, estimated for the bundled model: for each number of drafts, pairs (number of
rows, cost). A step without drafts computes at least 8 rows, so a verify step of 8 tokens costs
little more than 1."""


def verify_costs(config: RuntimeConfig, num_drafts: int) -> tuple[tuple[int, float], ...]:
    """Return pairs (number of rows, cost) for the verify steps of an engine.

    The cost is the duration of a verify step, as a multiple of the duration of a step without
    drafts.

    Args:
        config: Sizes and limits of the runtime.
        num_drafts: Number of drafts per row that verify steps are compiled for.
    """
    costs = (CPU_COSTS if config.backend is Backend.XLA else GPU_COSTS)[num_drafts]
    max_rows = config.buckets.verify_batch_sizes[-1]
    found = [(rows, cost) for rows, cost in costs if rows < max_rows]
    following = next(cost for rows, cost in costs if rows >= max_rows)
    return (*found, (max_rows, following))
