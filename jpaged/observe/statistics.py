"""Statistics of an engine: the current pool and queues, and counts since the start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of an engine at one moment, from `Engine.stats()`.

    Block counts exclude the null block, which never holds a token. A cached block is full, and no
    sequence holds it. Its content stays in the prefix cache until the block is reused. Cached
    blocks count as free, because they can be allocated immediately.

    Attributes:
        block_size: Number of slots in a block.
        num_blocks: Number of blocks that can hold tokens.
        num_free_blocks: Number of blocks that no sequence and no pinned prefix holds, including
            cached blocks.
        num_cached_blocks: Number of free blocks whose content a later prefix may use.
        num_pinned_blocks: Number of blocks that pinned prefixes hold (see `Engine.pin_prefix`).
        peak_used_blocks: Maximum number of used blocks since the start.
        num_waste_slots: Number of empty slots in used blocks: fewer than one block's slots per
            sequence.
        num_running: Number of running requests.
        num_running_seqs: Number of batch rows reserved for running requests, out of `max_num_seqs`:
            one row per sample or beam.
        num_waiting: Number of waiting requests, including preempted requests.
        num_swapped: Number of waiting requests whose KV is in host memory.
        num_preemptions: Number of preemptions since the start.
        num_prompt_tokens: Number of prompt tokens of all requests so far. The prompt of a request
            with several samples counts once.
        num_cached_tokens: Number of prompt tokens whose KV was in the prefix cache when their
            request first joined the batch.
        prefix_cache_queries: Number of tokens looked up in the prefix cache. The tokens of a
            request are looked up each time it joins the batch, including output tokens after a
            preemption.
        prefix_cache_hits: Number of tokens found in the prefix cache, out of
            `prefix_cache_queries`.
        num_block_copies: Number of blocks copied because a sequence wrote to a shared block.
        num_host_blocks: Number of blocks in host memory for swapped KV.
        num_used_host_blocks: Number of host blocks that hold the KV of swapped requests.
        num_swapped_out_blocks: Number of blocks copied to host memory so far.
        num_swapped_in_blocks: Number of blocks copied from host memory back to the device so far.
        num_generated_tokens: Number of output tokens of all requests so far. A beam search counts
            only the tokens of the answers that it returned.
        num_steps: Number of steps launched so far.
        num_step_tokens: Number of tokens of all steps. A prompt token counts each time it is
            computed. Sampled tokens count even if they are dropped because the answer had ended.
        num_steps_by_size: Histogram of the number of tokens per step: one count of steps per upper
            bound in `STEP_SIZES`, and a last count for larger steps. Steps without tokens do not
            count.
        num_finished: Number of requests that ended so far, for any reason.
        num_drafts: Number of times that a step verified the drafts of a sequence. A step with
            drafts of several sequences counts once per sequence.
        num_draft_tokens: Number of drafts that steps verified.
        num_accepted_tokens: Number of drafts that were accepted.
        num_verify_steps: Number of steps that verified drafts.
        num_mixed_steps: Number of steps whose decode rows had no drafts, because other rows of the
            step computed prompts. Counted only with speculative decoding.
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
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verify_steps: int = 0
    num_mixed_steps: int = 0

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that sequences or pinned prefixes (`Engine.pin_prefix`) hold."""
        return self.num_blocks - self.num_free_blocks

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the verified drafts that were accepted, 0 to 1."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def waste(self) -> float:
        """Fraction of the slots in used blocks that hold no token, 0 to 1."""
        num_slots = self.num_used_blocks * self.block_size
        return self.num_waste_slots / num_slots if num_slots else 0.0


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of `time.monotonic()`. A time is None until its
    event.

    Attributes:
        arrival_time: Time at which the engine created the request.
        first_scheduled_time: Time at which the request first joined a step.
        first_token_time: Time at which the host read the first output token.
        finished_time: Time at which the request ended.
        num_preemptions: Number of times the request was preempted.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token; None before the first token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class MemoryAccount:
    """Memory of one device in bytes, by purpose. All tensor-parallel devices use equal amounts.

    Attributes:
        weights: Parameters of the model.
        sampling: Token counts, biases and block tables of the running sequences.
        workspace: Temporary arrays and outputs of the largest compiled step, and blocks in transfer
            between the pool and host memory.
        kv_cache: The KV pool.
        limit: Memory that the engine may use in total; None without a limit, as on a CPU.
        swap: Pinned host memory for swapped blocks of all devices, not included in `total`.
    """

    weights: int
    sampling: int
    workspace: int
    kv_cache: int
    limit: int | None
    swap: int = 0

    @property
    def total(self) -> int:
        """Sum of the device memory for all purposes."""
        return self.weights + self.sampling + self.workspace + self.kv_cache

    @property
    def resident(self) -> int:
        """Memory in use between steps: the total without the workspace."""
        return self.total - self.workspace

    def lines(self) -> list[str]:
        """Return one line of text per use of device memory, such as "KV cache 1,024.0 MiB"."""
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
        """Return a list with one line of text about the memory use that the device reports.

        Args:
            stats: Result of `jax.Device.memory_stats()`. If a value is missing, the returned list
                is empty.
        """
        names = "bytes_in_use", "peak_bytes_in_use", "bytes_limit"
        if not all(name in stats for name in names):
            return []
        in_use, peak, limit = (f"{stats[name] / 2**20:,.1f} MiB" for name in names)
        resident_mib = f"{self.resident / 2**20:,.1f}"
        return [
            f"device memory: {in_use} in use ({resident_mib} MiB planned), peak {peak}, "
            f"limit {limit}"
        ]
