"""Values that the paper states, by figure (Kwon et al., SOSP 2023, arXiv 2309.06180).

Numbers come from its text, tables and labelled bars, and never from curves of its plots. If the
text has no ratio or range, the paper's column says "plot only".
"""

from dataclasses import dataclass

PLOT_ONLY = "plot only"

SYSTEMS = ("fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "ours")
ORCAS = ("orca_max", "orca_pow2", "orca_oracle")
LABELS = {
    "fastertransformer": "FasterTransformer-like",
    "orca_max": "Orca (Max)",
    "orca_pow2": "Orca (Pow2)",
    "orca_oracle": "Orca (Oracle)",
    "ours": "jpaged",
}


@dataclass(frozen=True)
class Server:
    """A column of table 1.

    Attributes:
        model: Name of the OPT model.
        gpus: The paper's GPUs.
        gpu_gb: Total GPU memory, GB.
        weights_gb: Parameter size, GB.
        kv_gb: Memory for the KV cache, GB.
        num_slots: Most KV cache slots, tokens.
        num_layers, hidden_size: OPT's shape; a slot has 2 x layers x hidden x 2 bytes of fp16.
        trace_seconds: Length of the paper's traces.
    """

    model: str
    gpus: str
    gpu_gb: int
    weights_gb: int
    kv_gb: int
    num_slots: int
    num_layers: int
    hidden_size: int
    trace_seconds: int = 3600


SERVERS = {
    "13b": Server("OPT-13B", "A100", 40, 26, 12, 15_700, 40, 5120),
    "66b": Server("OPT-66B", "4 x A100", 160, 132, 21, 9_700, 64, 9216),
    "175b": Server("OPT-175B", "8 x A100-80GB", 640, 346, 264, 60_100, 96, 12288, 900),
}

MEMORY = {
    "orca_max": {"tokens": 20.4, "reserved": 13.3, "internal": 57.3, "external": 8.9},
    "orca_pow2": {"tokens": 26.8, "reserved": 17.9, "internal": 13.6, "external": 41.6},
    "orca_oracle": {"tokens": 38.2, "reserved": 25.2, "internal": 0.0, "external": 36.6},
    "ours": {"tokens": 96.3, "other": 3.7},
}
"""Figure 2, percent of KV memory. The figure calls Oracle's 25.2 % internal fragmentation, which
section 3.1's definition (never used) rules out for a system that knows the lengths: it is what
that section calls reservation, and is compared with that here."""

WASTE_PERCENT = 3.7
"""vLLM's share of KV memory that holds no token states, figure 2."""

SUSTAINED_RATIOS = {
    "orca_max": (2.7, 8.0),
    "orca_oracle": (1.7, 2.7),
    "fastertransformer": (None, 22.0),
}
"""Section 6.2, ShareGPT, over the three models: request rate of vLLM over that of the system.
"Up to 22x" has no lower end. Nothing is stated of Orca (Pow2), nor of Alpaca."""

BATCHED = {
    "sharegpt": {"orca_max": 7.00, "orca_pow2": 9.81, "orca_oracle": 13.62, "ours": 30.42},
    "alpaca": {"orca_max": 7.00, "orca_pow2": 43.24, "orca_oracle": 72.75, "ours": 132.44},
}
"""Figure 13: mean requests in a batch, OPT-13B."""

BATCHED_RATE = {"sharegpt": 2.0, "alpaca": 30.0}
"""Figure 13: requests per second."""

BASIC_RATIO, BEAM_6_RATIO = 1.3, 2.3
"""Section 6.3, OPT-13B on Alpaca over Orca (Oracle): one sample, and beam search of width 6."""

WIDTHS = (2, 4, 6)

SAVED = {
    ("alpaca", "parallel"): (6.09, 8.53, 9.79),
    ("alpaca", "beam"): (37.56, 53.13, 55.16),
}
"""Figure 15, percent of blocks saved by sharing, for `WIDTHS`."""

SAVED_RANGE = {("sharegpt", "parallel"): (16.2, 30.5), ("sharegpt", "beam"): (44.3, 66.3)}
"""Section 6.3, the same for ShareGPT: from the narrowest to the widest."""

PREFIX_RATIOS = {"1-shot": 1.67, "5-shot": 3.58}
"""Section 6.4: throughput over Orca (Oracle) with a shared prefix of 80 and 341 tokens."""

CHAT_RATIO = 2.0
"""Section 6.5: request rate over any of the three Orca systems."""

KERNEL_OVERHEAD_PERCENT = (20.0, 26.0)
"""Section 7.1: how much longer paged attention takes than contiguous attention."""

KERNEL_CONTEXTS, KERNEL_BATCHES = (64, 128, 256), (8, 32)
"""Figure 18a. "bs" of its legend is the batch size."""

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

BEST_BLOCK_SIZES = {"sharegpt": (16, 128), "alpaca": (16, 32)}
"""Section 7.2: the range of block sizes that did best."""

RECOMPUTE_WINS, SWAP_WINS, COMPARABLE = (1, 8), (64, 256), (16, 64)
"""Section 7.3: block sizes at which each was better, and at which they were alike."""

RECOMPUTE_OVER_SWAP = 1.2
"""Section 7.3: recomputation never took more than 20 % above swapping's time."""


def between(low: float | None, high: float) -> str:
    """Return a range as text for tables."""
    return f"up to {high:g}" if low is None else f"{low:g} to {high:g}"
