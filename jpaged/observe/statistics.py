"""What the engine reports about itself: the pool and the queues now, and counts since its start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of an engine, from `Engine.stats()`.

    Blocks are counted without the null block, which never holds a token. A cached block (full,
    unused, kept for its prefix) counts as free: it can be handed out at once.

    Attributes:
        block_size: Token slots in a block.
        num_blocks: Blocks that can hold tokens.
        num_free_blocks: Blocks that no sequence and no pin holds.
        num_cached_blocks: Those of them whose content may serve a prefix again.
        num_pinned_blocks: Blocks that pinned prefixes hold.
        peak_used_blocks: Most blocks held at once since the engine started.
        num_waste_slots: Slots of held blocks without a token: less than one block a sequence.
        num_running: Requests in the batch.
        num_running_seqs: Sequences that those run at most: samples and beams, of `max_num_seqs`.
        num_waiting: Requests that wait for a place in it, preempted ones included.
        num_swapped: Those of the waiting whose KV is in host memory.
        num_preemptions: Times a request lost its blocks to another, since the start.
        num_prompt_tokens: Prompt tokens of all requests so far, each prompt once for all samples.
        num_cached_tokens: Those of them that a cached prefix spared when their request first joined
            the batch.
        prefix_cache_queries: Tokens looked up in the prefix cache, each time a request joins the
            batch (again after a preemption, its outputs included).
        prefix_cache_hits: Those of them that were found.
        num_block_copies: Blocks copied on write: a sequence wrote to one that others share.
        num_host_blocks: Blocks of host memory that KV can be swapped to.
        num_used_host_blocks: Those of them that hold a swapped request's KV.
        num_swapped_out_blocks: Blocks copied to host memory so far.
        num_swapped_in_blocks: Blocks copied back so far.
        num_generated_tokens: Output tokens of all requests so far; of a beam search those of the
            answers it returned.
        num_steps: Steps launched so far.
        num_step_tokens: Tokens of all steps: of prompts (each time they are computed) and of
            answers (as they are sampled, also those after an answer's end that are dropped).
        num_steps_by_size: Steps that had tokens, by how many: up to each of `STEP_SIZES`, and more.
        num_finished: Requests that ended so far, for whatever reason.
    """

    STEP_SIZES: ClassVar = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

    block_size: int
    num_blocks: int
    num_free_blocks: int
    peak_used_blocks: int
    num_waste_slots: int = 0
    num_running: int = 0
    num_running_seqs: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_cached_blocks: int = 0
    num_pinned_blocks: int = 0
    num_block_copies: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0
    num_steps_by_size: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)
    num_finished: int = 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences and pins hold."""
        return self.num_blocks - self.num_free_blocks

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def waste(self) -> float:
        """Share of the held slots without a token, 0 to 1."""
        num_slots = self.num_used_blocks * self.block_size
        return self.num_waste_slots / num_slots if num_slots else 0.0


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic()`; None: not yet.

    Attributes:
        arrival_time: `add_request` or `generate` took it in.
        first_scheduled_time: It first joined a step.
        first_token_time: The host read its first output token.
        finished_time: It ended.
        num_preemptions: Times it lost its blocks.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class MemoryAccount:
    """Where the device's memory goes, in bytes; where several share a model, that of each.

    Attributes:
        weights: The model's parameters.
        sampling: Token counts, biases and block tables of the running sequences.
        workspace: Temporaries and outputs of the largest step, as compiled, and blocks on their
            way between the pool and host memory.
        kv_cache: The pool.
        limit: What the engine may use in all; None where nothing limits it (CPU).
        swap: Of host memory, pinned, for swapped blocks of all devices: no part of the total.
    """

    weights: int
    sampling: int
    workspace: int
    kv_cache: int
    limit: int | None
    swap: int = 0

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return self.weights + self.sampling + self.workspace + self.kv_cache

    @property
    def resident(self) -> int:
        """What is there between steps too: all but the workspace."""
        return self.total - self.workspace

    def lines(self) -> list[str]:
        """The account as text, one part a line."""
        parts = [
            ("weights", self.weights),
            ("sampling state", self.sampling),
            ("step workspace", self.workspace),
            ("KV cache", self.kv_cache),
            ("total", self.total),
        ]
        if self.limit is not None:
            parts.append(("limit", self.limit))
        return [f"  {name:<15} {size / 2**20:>11,.1f} MiB" for name, size in parts]

    def device_memory_lines(self, stats: Mapping[str, int]) -> list[str]:
        """What the device itself says once all is there (`jax.Device.memory_stats`), if it does."""
        names = "bytes_in_use", "peak_bytes_in_use", "bytes_limit"
        if not all(name in stats for name in names):
            return []
        in_use, peak, limit = (f"{stats[name] / 2**20:,.1f} MiB" for name in names)
        resident_mib = f"{self.resident / 2**20:,.1f}"
        return [
            f"the device has {in_use} in use (the account {resident_mib}), had {peak}, of {limit}"
        ]
