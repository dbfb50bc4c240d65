"""What a preemption costs, as measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Stub until the measured one is merged."""

    prefill_seconds: tuple[tuple[int, float], ...]
    swap_seconds: tuple[tuple[int, float], ...]

    def recompute(self, num_tokens: int) -> float:
        """Seconds."""
        return num_tokens * self.prefill_seconds[-1][1] / self.prefill_seconds[-1][0]

    def swap(self, num_blocks: int) -> float:
        """Seconds."""
        return 2 * num_blocks * self.swap_seconds[-1][1] / self.swap_seconds[-1][0]
