"""Convert step plans, block pools and block tables to short tuples and lists, which tests can
compare."""

from core_driver import Driver

from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import StepPlan
from jpaged.core.request import Sequence


def the(plan: StepPlan | None) -> StepPlan:
    assert plan is not None
    return plan


def shape(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    """Return (seq_id, start, num_scheduled_tokens, is_sampled) of each row."""
    rows = the(plan).scheduled
    return [(r.sequence.seq_id, r.start, r.num_scheduled_tokens, r.is_sampled) for r in rows]


def updates(plan: StepPlan | None) -> list[tuple[tuple[int, int], ...]]:
    return [row.block_updates for row in the(plan).scheduled]


def forks(plan: StepPlan | None) -> list[tuple[int, int]]:
    return [(parent.seq_id, child.seq_id) for parent, child in the(plan).row_forks]


def samples(driver: Driver, name: str) -> list[Sequence]:
    return driver.requests[name].sequences


def tables(driver: Driver, name: str) -> list[list[int]]:
    """Return the block tables of the request's live sequences."""
    return [sequence.block_table for sequence in driver.requests[name].live_sequences]


def status(driver: Driver, name: str) -> str:
    return str(driver.requests[name].status)


def queue_of(manager: BlockManager) -> list[int]:
    """Return the ids of the free blocks. The block that is allocated next comes first."""
    return list(manager.pool.free_block_queue)


def num_free(driver: Driver) -> int:
    return driver.scheduler.block_manager.num_free_blocks
