"""What an engine counts, and its figures for people."""

from bisect import bisect_left
from dataclasses import dataclass, field

from jpaged.core.plan import StepPlan
from jpaged.core.scheduler import Scheduler
from jpaged.observe.pool_report import num_waste_slots
from jpaged.observe.statistics import EngineStats


@dataclass
class LoopCounts:
    """What happened since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    finished: int = 0
    peak_used_blocks: int = 0
    block_copies: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    step_tokens: int = 0
    steps_by_size: list[int] = field(
        default_factory=lambda: [0] * (len(EngineStats.STEP_SIZES) + 1)
    )

    def note_plan(self, plan: StepPlan, num_used_blocks: int) -> None:
        """Count a step that is launched while so many blocks are held."""
        self.steps += 1
        if num_tokens := plan.num_new_tokens:
            self.step_tokens += num_tokens
            self.steps_by_size[bisect_left(EngineStats.STEP_SIZES, num_tokens)] += 1
        self.preemptions += len(plan.preempted)
        self.peak_used_blocks = max(self.peak_used_blocks, num_used_blocks)
        self.block_copies += len(plan.block_copies)
        for order in plan.swap_outs:
            self.swapped_out_blocks += len(order.block_ids)
        for order in plan.swap_ins:
            self.swapped_in_blocks += len(order.places)


def engine_stats(scheduler: Scheduler, counts: LoopCounts) -> EngineStats:
    """The pool and the queues now, and counts since the start. O(sequences)."""
    manager, swap = scheduler.block_manager, scheduler.swap_space
    cache = manager.prefix_cache
    return EngineStats(
        block_size=manager.block_size,
        num_blocks=manager.pool.num_usable_blocks,
        num_free_blocks=manager.num_free_blocks,
        peak_used_blocks=counts.peak_used_blocks,
        num_waste_slots=num_waste_slots(scheduler),
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_swapped=scheduler.num_swapped,
        num_preemptions=counts.preemptions,
        num_prompt_tokens=counts.prompt_tokens,
        num_cached_tokens=counts.cached_tokens,
        prefix_cache_queries=0 if cache is None else cache.num_query_tokens,
        prefix_cache_hits=0 if cache is None else cache.num_hit_tokens,
        num_cached_blocks=manager.pool.num_cached_blocks,
        num_pinned_blocks=manager.pins.num_blocks,
        num_block_copies=counts.block_copies,
        num_host_blocks=swap.policy.num_host_blocks,
        num_used_host_blocks=swap.num_used_blocks,
        num_swapped_out_blocks=counts.swapped_out_blocks,
        num_swapped_in_blocks=counts.swapped_in_blocks,
        num_generated_tokens=counts.generated_tokens,
        num_steps=counts.steps,
        num_step_tokens=counts.step_tokens,
        num_steps_by_size=tuple(counts.steps_by_size),
        num_finished=counts.finished,
    )
