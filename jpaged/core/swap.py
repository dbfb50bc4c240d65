"""Preemption by swap: copy the blocks of a group to a swap entry in host memory, and back.

A swap entry holds each block once, even if several sequences of the group share the block. A
swapped-out sequence has a `host_block_table` instead of a block table, with the index of each block
in the swap entry. Beam search can therefore still fork and end swapped-out sequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from jpaged.core.block_manager import BlockManager, GroupFit
from jpaged.core.block_pool import KVBlock, require
from jpaged.core.groups import num_tokens_to_recompute
from jpaged.core.plan import SwapIn, SwapOut
from jpaged.core.prefix_cache import REGISTRATION_ENDED
from jpaged.core.request import Request, RequestStatus, SwapEntry


class PreemptionMode(StrEnum):
    """Strategy for restoring the KV of a preempted group of sequences."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"  # choose the cheaper mode for each group, by the measured `PreemptionCosts`


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Measured times of prefill steps and swap transfers, in lists sorted by size.

    Attributes:
        prefill_seconds: (number of tokens, seconds) of prefill steps.
        swap_seconds: (number of blocks, seconds) of transfers between device and host, one way.

    Raises:
        ValueError: A list is empty, its sizes are not positive and rising, or a time is negative.
    """

    prefill_seconds: tuple[tuple[int, float], ...]
    swap_seconds: tuple[tuple[int, float], ...]

    def __post_init__(self):
        _check_times("prefill_seconds", self.prefill_seconds)
        _check_times("swap_seconds", self.swap_seconds)

    def recompute_cost(self, num_tokens: int) -> float:
        """Return the estimated seconds to recompute `num_tokens` tokens."""
        return _total_step_seconds(self.prefill_seconds, num_tokens)

    def swap_cost(self, num_blocks: int) -> float:
        """Return the estimated seconds to copy `num_blocks` blocks to the host and back."""
        return 2 * _interpolate_seconds(self.swap_seconds, num_blocks)


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """Options of preemption.

    Attributes:
        mode: Strategy for restoring the KV of preempted groups.
        num_host_blocks: Maximum number of blocks in host memory.
        costs: Measured times of prefill steps and swap transfers. `PreemptionMode.AUTO` requires
            them.
    """

    mode: PreemptionMode = PreemptionMode.RECOMPUTE
    num_host_blocks: int = 0
    costs: PreemptionCosts | None = None

    def __post_init__(self):
        if self.num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must not be negative, got {self.num_host_blocks}")
        if self.mode is PreemptionMode.AUTO and self.costs is None:
            raise ValueError(
                "preemption mode 'auto' needs costs, the measured times of prefill steps and swap "
                "transfers: pass PreemptionCosts, or use mode 'recompute' or 'swap'"
            )


class SwapSpace:
    """Bookkeeping of swap entries in host memory, and of the copies for the next `StepPlan`.

    Attributes:
        policy: Options of preemption.
        num_used_host_blocks: Number of blocks in all swap entries.
    """

    def __init__(self, policy: PreemptionPolicy, manager: BlockManager):
        self.policy = policy
        self.num_used_host_blocks = 0
        self._manager = manager
        self._last_swap_entry_id = 0
        self._dropped: list[int] = []
        self._swap_outs: list[SwapOut] = []
        self._swap_ins: list[SwapIn] = []

    @property
    def has_swap_ins(self) -> bool:
        """Whether the next `StepPlan` has copies of a swapped-out group back to the device."""
        return bool(self._swap_ins)

    def pop_swap_changes(self) -> tuple[tuple[int, ...], tuple[SwapOut, ...], tuple[SwapIn, ...]]:
        """Return the swap changes since the last call, and clear them.

        Returns:
            `dropped_swap_entry_ids`, `swap_outs` and `swap_ins` for the next `StepPlan`.
        """
        changes = tuple(self._dropped), tuple(self._swap_outs), tuple(self._swap_ins)
        for list_ in (self._dropped, self._swap_outs, self._swap_ins):
            list_.clear()
        return changes

    # ---- out

    def should_swap(self, request: Request) -> bool:
        """Return whether to swap out the blocks of a preempted group. Otherwise, its tokens are
        recomputed."""
        policy = self.policy
        if policy.mode is PreemptionMode.RECOMPUTE:
            return False
        num_blocks = len(_group_block_ids(request))
        if not 0 < num_blocks <= policy.num_host_blocks - self.num_used_host_blocks:
            return False
        if policy.mode is PreemptionMode.SWAP or policy.costs is None:
            return True
        recompute_cost = policy.costs.recompute_cost(num_tokens_to_recompute(request))
        return policy.costs.swap_cost(num_blocks) < recompute_cost

    def swap_out(self, request: Request) -> None:
        """Free a group's blocks, and schedule copies of the blocks to a new swap entry.

        The next `StepPlan` contains the copies. The device executes the copies before a later step
        can overwrite the freed blocks.
        """
        indices = {block_id: index for index, block_id in enumerate(_group_block_ids(request))}
        for sequence in request.live_sequences:
            sequence.host_block_table = [indices[block_id] for block_id in sequence.block_table]
            is_ended = sequence.num_registered_blocks == REGISTRATION_ENDED
            self._manager.free(sequence)
            sequence.num_registered_blocks = REGISTRATION_ENDED if is_ended else 0
        self._last_swap_entry_id += 1
        request.swap_entry = SwapEntry(self._last_swap_entry_id, len(indices))
        self.num_used_host_blocks += len(indices)
        self._swap_outs.append(SwapOut(self._last_swap_entry_id, tuple(indices)))

    # ---- in

    def measure_fit(self, request: Request) -> GroupFit:
        """Return a swapped-out group's cached blocks, and the number of free blocks that it needs.

        The method does not check whether enough blocks are free.
        The number of needed blocks includes blocks for tokens that are not computed yet. Without
        these blocks, the group would be preempted again immediately. Blocks that the prefix cache
        still holds are shared and not copied from host memory. Blocks that hold only drafts that
        were rejected after the swap-out are not copied back.
        """
        manager = self._manager
        for sequence in request.live_sequences:
            del sequence.host_block_table[manager.num_blocks_for(sequence.num_computed_tokens) :]
        hits = [manager.find_prefix(s, s.num_computed_tokens) for s in request.live_sequences]
        found = {block.block_id: block for blocks in hits for block in blocks}
        num_needed = sum(block.ref_cnt == 0 for block in found.values())
        num_needed += len(_host_block_indices(request) - _cached_host_blocks(request, hits).keys())
        num_prefix_tokens = request.num_common_prefix_tokens
        computing = request.live_sequences[:1] if num_prefix_tokens else request.live_sequences
        ends = [
            (num_prefix_tokens or len(sequence.token_ids), sequence.host_block_table)
            for sequence in computing
        ]
        num_needed += sum(manager.num_blocks_for(end) - len(table) for end, table in ends)
        partial = [s for s in computing if s.num_computed_tokens % manager.block_size]
        # If n sequences share a partly filled block, n - 1 of these sequences need a copy of the
        # block.
        num_copies = len(partial) - len({s.host_block_table[-1] for s in partial})
        return GroupFit(hits, num_needed + num_copies)

    def swap_in(self, request: Request, hits: list[list[KVBlock]]) -> None:
        """Allocate blocks for a swapped-out group, and schedule copies from host memory.

        The next `StepPlan` contains the copies. Sequences that shared a block before the swap-out
        share the new block, too.

        Args:
            request: Request of the group.
            hits: Cached blocks that need no copy; see `GroupFit.hits`.
        """
        pool = self._manager.pool
        block_ids_by_index = {
            e: block.block_id for e, block in _cached_host_blocks(request, hits).items()
        }
        held = list(block_ids_by_index.values())
        # Take references to the cached blocks first. Otherwise, `allocate` could reuse these
        # blocks.
        pool.touch(held)
        copied = sorted(_host_block_indices(request) - block_ids_by_index.keys())
        fresh = pool.allocate(len(copied))
        block_ids_by_index.update(zip(copied, fresh, strict=True))
        for sequence, prefix in zip(request.live_sequences, hits, strict=True):
            self._manager.assign_blocks(
                sequence, [block_ids_by_index[e] for e in sequence.host_block_table], prefix
            )
            sequence.host_block_table = []
        pool.free(held + fresh)
        swap_entry_id = self._remove_entry(request)
        self._swap_ins.append(SwapIn(swap_entry_id, tuple(zip(copied, fresh, strict=True))))

    def drop(self, request: Request) -> None:
        """Drop the swap entry of an ended group, if the group was swapped out."""
        if request.swap_entry is None:
            return
        swap_entry_id = self._remove_entry(request)
        left = [pending for pending in self._swap_outs if pending.swap_entry_id != swap_entry_id]
        if len(left) == len(self._swap_outs):
            # An earlier plan contains the swap-out, so the next plan must drop the swap entry.
            self._dropped.append(swap_entry_id)
        self._swap_outs = left

    def _remove_entry(self, request: Request) -> int:
        swap_entry = request.swap_entry
        require(swap_entry is not None, f"request {request.request_id!r} has no swap entry")
        request.swap_entry = None
        self.num_used_host_blocks -= swap_entry.num_blocks  # pyright: ignore[reportOptionalMemberAccess]
        return swap_entry.swap_entry_id  # pyright: ignore[reportOptionalMemberAccess]

    def check_integrity(self, unfinished_requests: Iterable[Request]) -> None:
        """Check that exactly the swapped-out requests have swap entries, with correct counts.

        Args:
            unfinished_requests: Running and waiting requests.

        Raises:
            IntegrityError: A swap entry is missing or superfluous, or block counts are wrong.
        """
        swap_entries = [
            request.swap_entry for request in unfinished_requests if request.swap_entry is not None
        ]
        used = sum(swap_entry.num_blocks for swap_entry in swap_entries)
        require(
            used == self.num_used_host_blocks,
            f"{used} host blocks are used, but another number is counted",
        )
        require(
            used <= self.policy.num_host_blocks,
            f"{used} host blocks are used, more than num_host_blocks",
        )
        for request in unfinished_requests:
            is_swapped = request.status is RequestStatus.SWAPPED
            require(
                is_swapped == (request.swap_entry is not None),
                f"{request.request_id!r} has status swapped or a swap entry, but not both",
            )


def _group_block_ids(request: Request) -> dict[int, None]:
    """Return the ids of the group's blocks without duplicates, in the order of its sequences."""
    return dict.fromkeys(b for sequence in request.live_sequences for b in sequence.block_table)


def _host_block_indices(request: Request) -> set[int]:
    return {index for sequence in request.live_sequences for index in sequence.host_block_table}


def _cached_host_blocks(request: Request, hits: list[list[KVBlock]]) -> dict[int, KVBlock]:
    return {
        index: block
        for sequence, blocks in zip(request.live_sequences, hits, strict=True)
        for index, block in zip(sequence.host_block_table, blocks, strict=False)
    }


def _total_step_seconds(times: tuple[tuple[int, float], ...], amount: int) -> float:
    """Return the total time in seconds of the steps that process `amount` tokens or blocks.

    All steps have the largest size in `times`, except a step that processes the remainder. That
    step has the smallest sufficient size.

    Args:
        times: Time of a step of each size: (size, seconds) in increasing order of size.
        amount: Number of tokens or blocks to process, in the same unit as the sizes.
    """
    largest, seconds = times[-1]
    whole, rest = divmod(amount, largest)
    last = next(s for size, s in times if size >= rest) if rest else 0.0
    return whole * seconds + last


def _interpolate_seconds(times: tuple[tuple[int, float], ...], amount: int) -> float:
    """Interpolate linearly between measured sizes, and extrapolate after the largest size."""
    if not amount:
        return 0.0
    before, last = ((0, 0.0), *times)[-2:]
    if amount <= last[0]:
        sizes, seconds = zip(*times, strict=True)
        return float(np.interp(amount, sizes, seconds))
    slope = max(last[1] - before[1], 0.0) / (last[0] - before[0])
    return last[1] + (amount - last[0]) * slope


def _check_times(name: str, times: tuple[tuple[int, float], ...]) -> None:
    sizes = [0, *(size for size, _ in times)]
    rising = all(a < b for a, b in pairwise(sizes))
    if not times or not rising or not all(seconds >= 0 for _, seconds in times):
        raise ValueError(
            f"{name}={times!r} must list (size, seconds) with positive, rising sizes "
            "and without negative times"
        )
