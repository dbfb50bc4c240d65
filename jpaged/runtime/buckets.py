"""Shapes the step functions are compiled for.

Static shapes come from buckets of sequences and of tokens, never from context lengths: kernels loop
to the lengths read at run time. No bucket is under 8 rows, since XLA turns matrix products of fewer
rows into element-wise multiply and reduce, which reads weights at a fifth of the bandwidth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from jpaged.core.plan import SchedulingGoal

MIN_SEQS = 8
MIN_TOKENS = 64
MAX_SINGLE_BUCKET_SEQS = 32

SMALL_BATCH_SEQS = 32
"""Sequences up to which a step of a small model is over before a host has launched the next one."""

MAX_BURST_ROWS = 1024
"""Of all steps of a burst of more sequences, at most: launched one by one, so many rows of logits
exist at once."""

MAX_PADDED_LOGITS_SEQS = 256
"""Sequences up to which logits are padded to a power of two of rows; a row more to sample takes one
to two microseconds."""

MIN_HALF_STEP_TOKENS = 256
"""Tokens from which there is a bucket half-way to the double: more rows than these take a product
longer, so padding to twice as many would."""


@dataclass(frozen=True)
class Buckets:
    """Every shape a step can have, ascending.

    Attributes:
        decode_seqs: Batch sizes of decode steps.
        prefill_shapes: Total tokens and sequences of prefill steps.
        burst_seqs: Batch sizes of bursts, some of those of decode steps.
    """

    decode_batch_sizes: tuple[int, ...]
    prefill_shapes: tuple[tuple[int, int], ...]
    burst_batch_sizes: tuple[int, ...] = ()

    def has_burst(self, num_seqs: int, goal: SchedulingGoal) -> bool:
        """Whether steps of `num_seqs` sequences are better launched as a burst. Few may be padded
        for it, which costs less than their launches; more may not."""
        if num_seqs <= SMALL_BATCH_SEQS:
            return bool(self.burst_batch_sizes)
        unpadded = round_up(self.decode_batch_sizes, num_seqs)
        return goal is SchedulingGoal.THROUGHPUT and unpadded in self.burst_batch_sizes

    @cached_property
    def logits_row_sizes(self) -> tuple[int, ...]:
        """Rows of the logits that steps leave: of few sequences fewer sizes than batches have,
        since each takes a program for every sampling level (docs/decisions/0003)."""
        whole = _keep_powers_of_two(self.decode_batch_sizes)
        more = (seqs for seqs in self.decode_batch_sizes if seqs > MAX_PADDED_LOGITS_SEQS)
        return tuple(sorted({*whole, *more}))

    def num_logits_rows(self, num_seqs: int) -> int:
        """Rows of the logits that a decode step of a bucket leaves."""
        return round_up(self.logits_row_sizes, num_seqs)

    @cached_property
    def padded_decode_sizes(self) -> tuple[int, ...]:
        """For each number of sequences, the batch size of their decode step."""
        return tuple(
            round_up(self.decode_batch_sizes, n) for n in range(self.decode_batch_sizes[-1] + 1)
        )

    @property
    def prefill_token_sizes(self) -> tuple[int, ...]:
        """Total tokens of prefill steps."""
        return tuple(sorted({tokens for tokens, _ in self.prefill_shapes}))

    @property
    def prefill_batch_sizes(self) -> tuple[int, ...]:
        """Sequences of prefill steps."""
        return tuple(sorted({seqs for _, seqs in self.prefill_shapes}))

    def prefill_shape(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        """The smallest prefill shape that holds a step.

        Raises:
            ValueError: no shape is that large.
        """
        for tokens, seqs in self.prefill_shapes:
            if tokens >= num_tokens and seqs >= num_seqs:
                return tokens, seqs
        raise ValueError(
            f"a prefill step of {num_tokens} tokens of {num_seqs} sequences is above the largest "
            f"bucket, {self.prefill_shapes[-1]}"
        )


def make_buckets(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    few_programs: bool = False,
    burst_steps: int = 1,
) -> Buckets:
    """Choose the buckets.

    Args:
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step, at least `max_num_seqs`.
        few: Compile fewer shapes, and pad more.
        burst_steps: Steps of a burst; 1 for none.
    """
    decode_batch_sizes = _bucket_sizes(max_num_seqs, MIN_SEQS, _next_decode_bucket)
    next_size = (lambda size: 8 * size) if few_programs else _next_token_bucket
    tokens = _bucket_sizes(max_num_batched_tokens, MIN_TOKENS, next_size)
    prefill_shapes = tuple(_prefill_shapes(tokens, decode_batch_sizes[0], decode_batch_sizes[-1]))
    return Buckets(
        decode_batch_sizes, prefill_shapes, _burst_sizes(decode_batch_sizes, burst_steps)
    )


def _burst_sizes(decode_batch_sizes: tuple[int, ...], num_steps: int) -> tuple[int, ...]:
    """The least, since many run alone; the largest of few; of more, the powers of two and the last:
    each is two programs to compile."""
    if num_steps == 1:
        return ()
    few = max(seqs for seqs in decode_batch_sizes if seqs <= SMALL_BATCH_SEQS)
    max_seqs = MAX_BURST_ROWS // num_steps
    more = (seqs for seqs in _keep_powers_of_two(decode_batch_sizes) if few < seqs <= max_seqs)
    return tuple(sorted({decode_batch_sizes[0], few, *more}))


def _keep_powers_of_two(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of ascending sizes, and the last."""
    return tuple(size for size in sizes if _is_power_of_two(size) or size == sizes[-1])


def _prefill_shapes(
    tokens: tuple[int, ...], min_seqs: int, max_seqs: int
) -> Iterator[tuple[int, int]]:
    """Prefill steps rarely hold many sequences, and the largest step may hold all. With few, the
    padding costs less than compiling every shape twice. No more sequences than tokens. Half-way
    buckets are for steps of many, in which prompts join those that decode."""
    if max_seqs <= MAX_SINGLE_BUCKET_SEQS:
        yield from ((size, max_seqs) for size in tokens)
        return
    for size in tokens:
        if size < max_seqs or _is_power_of_two(size):
            yield size, min_seqs
        if size >= max_seqs:
            yield size, max_seqs


def round_up(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket of at least `size`.

    Raises:
        ValueError: no bucket is that large.
    """
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"size {size} is above the largest bucket {buckets[-1]}")


def _next_decode_bucket(size: int) -> int:
    """8, 16, 32, 48, 64, 96, 128, 192, 256, 320 ...: padding costs at most half a batch."""
    if size < 32:
        return 2 * size
    if size < 64:
        return size + 16
    if size < 128:
        return size + 32
    return size + 64


def _next_token_bucket(size: int) -> int:
    """64, 128, 256, 384, 512, 768, 1024, 1536 ..."""
    if size < MIN_HALF_STEP_TOKENS:
        return 2 * size
    return size + size // 2 if _is_power_of_two(size) else size + size // 3


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def _bucket_sizes(most: int, first: int, next_size) -> tuple[int, ...]:
    buckets = [first]
    while buckets[-1] < most:
        buckets.append(next_size(buckets[-1]))
    return tuple(buckets)
