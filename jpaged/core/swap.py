"""How groups are preempted."""

from dataclasses import dataclass
from enum import StrEnum

from jpaged.core.costs import PreemptionCosts


class PreemptionMode(StrEnum):
    """What becomes of the KV of a preempted group."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class PressurePolicy:
    """How to preempt: `num_host_blocks` blocks fit in host memory, `costs` decide for `AUTO`."""

    mode: PreemptionMode = PreemptionMode.RECOMPUTE
    num_host_blocks: int = 0
    costs: PreemptionCosts | None = None
