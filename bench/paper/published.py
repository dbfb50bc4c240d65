"""Values that the paper states, by figure (Kwon et al., SOSP 2023, arXiv 2309.06180).

The numbers come from the paper's text, tables and labelled bars, never from the curves of plots. If
the paper has no number, the column `paper` of a figure says "plot only".
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
    """A column of the paper's table 1: a model and the GPUs that serve it.

    Attributes:
        model: Name of the OPT model.
        gpus: The paper's GPUs.
        gpu_gb: Total GPU memory in GB.
        weights_gb: Size of the parameters in GB.
        kv_gb: Memory for the KV cache in GB.
        num_slots: Maximum number of KV cache slots. A slot holds one token.
        num_layers, hidden_size: Shape of the model. In float16, a slot has
            2 x num_layers x hidden_size x 2 bytes.
        trace_seconds: Length of the paper's traces in seconds.
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
"""Figure 2: percent of the KV memory in each state.

The figure calls Orca (Oracle)'s 25.2 % "internal fragmentation". By the definition in section 3.1,
internal fragmentation is memory that is never used, and a system that knows the output lengths has
none. So the 25.2 % are entered as "reserved" here.
"""

WASTE_PERCENT = 3.7
"""Figure 2: percent of vLLM's KV memory that holds no token."""

SUSTAINED_RATIOS = {
    "orca_max": (2.7, 8.0),
    "orca_oracle": (1.7, 2.7),
    "fastertransformer": (None, 22.0),
}
"""Section 6.2, for ShareGPT: (request rate of vLLM / request rate of the system).

The ranges (lowest, highest) are over the three models. The paper says "up to 22x" of
FasterTransformer, so that range has no lower end. It states no ratio for Orca (Pow2) or for Alpaca.
"""

BATCHED = {
    "sharegpt": {"orca_max": 7.00, "orca_pow2": 9.81, "orca_oracle": 13.62, "ours": 30.42},
    "alpaca": {"orca_max": 7.00, "orca_pow2": 43.24, "orca_oracle": 72.75, "ours": 132.44},
}
"""Figure 13: mean number of requests in a batch, for OPT-13B."""

BATCHED_RATE = {"sharegpt": 2.0, "alpaca": 30.0}
"""Figure 13: request rate in requests per second."""

BASIC_RATIO, BEAM_6_RATIO = 1.3, 2.3
"""Section 6.3, OPT-13B on Alpaca: (rate of vLLM / rate of Orca (Oracle)).

The first number is for one sample per request, the second for beam search of width 6.
"""

WIDTHS = (2, 4, 6)

SAVED = {
    ("alpaca", "parallel"): (6.09, 8.53, 9.79),
    ("alpaca", "beam"): (37.56, 53.13, 55.16),
}
"""Figure 15: percent of the blocks that sharing saves, for each width in `WIDTHS`."""

SAVED_RANGE = {("sharegpt", "parallel"): (16.2, 30.5), ("sharegpt", "beam"): (44.3, 66.3)}
"""Section 6.3: the same percentages for ShareGPT, for the smallest and the largest width only."""

PREFIX_RATIOS = {"1-shot": 1.67, "5-shot": 3.58}
"""Section 6.4: (throughput of vLLM / throughput of Orca (Oracle)) if all prompts share a prefix.

The prefix has 80 tokens ("1-shot") or 341 tokens ("5-shot").
"""

CHAT_RATIO = 2.0
"""Section 6.5: (request rate of vLLM / request rate of each of the three Orca systems)."""

KERNEL_OVERHEAD_PERCENT = (20.0, 26.0)
"""Section 7.1: by how many percent paged attention takes longer than contiguous attention."""

KERNEL_CONTEXTS, KERNEL_BATCHES = (64, 128, 256), (8, 32)
"""Figure 18a: context lengths in tokens, and batch sizes ("bs" in the legend)."""

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

BEST_BLOCK_SIZES = {"sharegpt": (16, 128), "alpaca": (16, 32)}
"""Section 7.2: the range (smallest, largest) of the best block sizes, by dataset."""

RECOMPUTE_WINS, SWAP_WINS, COMPARABLE = (1, 8), (64, 256), (16, 64)
"""Section 7.3: ranges of block sizes.

In the first range recomputing was faster, in the second swapping. In the third they were alike.
"""

RECOMPUTE_OVER_SWAP = 1.2
"""Section 7.3: recomputing took at most 1.2 times as long as swapping."""


def between(low: float | None, high: float) -> str:
    """Return a range as text for tables, such as "up to 22" or "2.7 to 8"."""
    return f"up to {high:g}" if low is None else f"{low:g} to {high:g}"
