"""Choose the shapes that the step functions are compiled for.

A bucket is a number of sequences or tokens for which a step is compiled. Smaller steps are padded
to a bucket. Context lengths need no buckets, because kernels loop to lengths that they read at run
time. Every bucket has at least 8 rows: XLA turns a matrix product of fewer rows into an
element-wise multiply and a reduction, which read weights at a fifth of the memory bandwidth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from jpaged.core.plan import SchedulingGoal

MIN_SEQS = 8
MIN_TOKENS = 64
MAX_SINGLE_BUCKET_SEQS = 32

SMALL_BATCH_SEQS = 32
"""Maximum number of sequences for which a small model's step ends before the host has launched the
next step."""

MAX_VERIFY_SEQS = 64
"""Maximum number of sequences in a verify step. With more sequences, a step without drafts already
uses the device fully, so each draft adds nearly as much time as another sequence."""

MAX_BURST_ROWS = 1024
"""Maximum of (number of sequences) * (number of steps) in a burst, which is several decode steps in
one launch. Bursts of at most `SMALL_BATCH_SEQS` sequences have no such limit.

The steps of a burst may also be launched one by one, without waiting. The logits of all these steps
then exist at the same time."""

MAX_PADDED_LOGITS_SEQS = 256
"""Maximum batch size for which the number of rows of logits is padded to a power of two. Larger
batches are not padded further, because sampling takes one to two microseconds per row."""

MIN_HALF_STEP_TOKENS = 256
"""Number of tokens above which there are also buckets halfway between powers of two. Above this
number, the time of a matrix product grows with its rows, so padding to twice the rows would be
slow."""


@dataclass(frozen=True)
class Buckets:
    """Every shape that a step can have, in ascending order.

    Attributes:
        decode_batch_sizes: Batch sizes of decode steps.
        prefill_shapes: Pairs (number of tokens, number of sequences) of prefill steps.
        burst_batch_sizes: Batch sizes of bursts (several decode steps in one launch), a subset of
            `decode_batch_sizes`.
        verify_batch_sizes: Batch sizes of steps that verify drafts; empty without speculative
            decoding. In a step of the smallest batch size, the rows and their drafts have
            `MIN_SEQS` tokens in total.
    """

    decode_batch_sizes: tuple[int, ...]
    prefill_shapes: tuple[tuple[int, int], ...]
    burst_batch_sizes: tuple[int, ...] = ()
    verify_batch_sizes: tuple[int, ...] = ()

    def has_burst(self, num_seqs: int, goal: SchedulingGoal) -> bool:
        """Return whether decode steps of `num_seqs` sequences should be launched as a burst, which
        runs several steps as one program.

        A batch of at most `SMALL_BATCH_SEQS` sequences may be padded to the batch size of a burst:
        padding costs less than a launch for each step. A larger batch gets no extra padding. For a
        larger batch, `goal` must be `THROUGHPUT`, and `burst_batch_sizes` must contain the batch
        size of the decode step.
        """
        if num_seqs <= SMALL_BATCH_SEQS:
            return bool(self.burst_batch_sizes)
        unpadded = round_up(self.decode_batch_sizes, num_seqs)
        return goal is SchedulingGoal.THROUGHPUT and unpadded in self.burst_batch_sizes

    @cached_property
    def logits_row_sizes(self) -> tuple[int, ...]:
        """Every number of rows that a step's logits can have. Logits of small batches are padded to
        few such numbers, because each number needs several sampling programs, with different
        sampling features (docs/decisions/0003).
        """
        whole = _keep_powers_of_two(self.decode_batch_sizes)
        more = (seqs for seqs in self.decode_batch_sizes if seqs > MAX_PADDED_LOGITS_SEQS)
        return tuple(sorted({*whole, *more}))

    def num_logits_rows(self, num_seqs: int) -> int:
        """Return the padded number of logits rows for a decode step with `num_seqs` sequences."""
        return round_up(self.logits_row_sizes, num_seqs)

    @cached_property
    def padded_decode_sizes(self) -> tuple[int, ...]:
        """Decode batch size for each number of sequences: entry `n` is the batch size for `n`
        sequences."""
        return tuple(
            round_up(self.decode_batch_sizes, n) for n in range(self.decode_batch_sizes[-1] + 1)
        )

    @property
    def prefill_token_sizes(self) -> tuple[int, ...]:
        """Token counts to which prefill steps are padded, in ascending order."""
        return tuple(sorted({tokens for tokens, _ in self.prefill_shapes}))

    @property
    def prefill_batch_sizes(self) -> tuple[int, ...]:
        """Sequence counts to which prefill steps are padded, in ascending order."""
        return tuple(sorted({seqs for _, seqs in self.prefill_shapes}))

    def prefill_shape(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        """Return the smallest prefill bucket, as (tokens, sequences), that holds a step.

        Raises:
            ValueError: No prefill bucket is large enough.
        """
        for tokens, seqs in self.prefill_shapes:
            if tokens >= num_tokens and seqs >= num_seqs:
                return tokens, seqs
        raise ValueError(
            f"a prefill step of {num_tokens} tokens and {num_seqs} sequences is above the largest "
            f"bucket {self.prefill_shapes[-1]}: plan fewer tokens or fewer sequences per step"
        )


def make_buckets(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    few_programs: bool = False,
    burst_steps: int = 1,
    num_drafts: int = 0,
) -> Buckets:
    """Return the buckets for the limits of an engine.

    Args:
        max_num_seqs: Maximum number of sequences in a step.
        max_num_batched_tokens: Maximum number of tokens in a step, at least `max_num_seqs`.
        few_programs: Whether to compile fewer shapes and pad more.
        burst_steps: Number of decode steps in one launch (a burst); 1 for no bursts.
        num_drafts: Number of drafts per sequence in a verify step; 0 without speculative decoding.
    """
    decode_batch_sizes = _bucket_sizes(max_num_seqs, MIN_SEQS, _next_decode_bucket)
    next_size = (lambda size: 8 * size) if few_programs else _next_token_bucket
    tokens = _bucket_sizes(max_num_batched_tokens, MIN_TOKENS, next_size)
    prefill_shapes = tuple(_prefill_shapes(tokens, decode_batch_sizes[0], decode_batch_sizes[-1]))
    return Buckets(
        decode_batch_sizes,
        prefill_shapes,
        _burst_sizes(decode_batch_sizes, burst_steps),
        _verify_sizes(decode_batch_sizes, 1 + num_drafts, max_num_batched_tokens)
        if num_drafts
        else (),
    )


def _verify_sizes(
    decode_batch_sizes: tuple[int, ...], num_queries: int, max_num_tokens: int
) -> tuple[int, ...]:
    """Return the batch sizes of verify steps. There are only a few sizes, because each size adds
    several programs.

    Args:
        decode_batch_sizes: Batch sizes of decode steps.
        num_queries: Number of tokens per sequence.
        max_num_tokens: Maximum number of tokens in a step. The smallest batch size is always
            returned, even if a step of this size exceeds the maximum.
    """
    max_seqs = min(max_num_tokens // num_queries, MAX_VERIFY_SEQS)
    fitting = [seqs for seqs in decode_batch_sizes if seqs <= max_seqs]
    wanted = {MIN_SEQS, SMALL_BATCH_SEQS, MAX_VERIFY_SEQS, *fitting[-1:]}
    return MIN_SEQS // num_queries, *(seqs for seqs in fitting if seqs in wanted)


def _burst_sizes(decode_batch_sizes: tuple[int, ...], num_steps: int) -> tuple[int, ...]:
    """Return the batch sizes of bursts. A burst is `num_steps` decode steps in one launch.

    The result is empty if `num_steps` is 1. Each size adds two programs to compile, so the result
    contains only three kinds of decode batch sizes:

    - The smallest size, because a request often runs alone.
    - The largest size up to `SMALL_BATCH_SEQS`.
    - Above `SMALL_BATCH_SEQS`, every power of two and the largest size. A size is left out if its
      product with `num_steps` exceeds `MAX_BURST_ROWS`.
    """
    if num_steps == 1:
        return ()
    few = max(seqs for seqs in decode_batch_sizes if seqs <= SMALL_BATCH_SEQS)
    max_seqs = MAX_BURST_ROWS // num_steps
    more = (seqs for seqs in _keep_powers_of_two(decode_batch_sizes) if few < seqs <= max_seqs)
    return tuple(sorted({decode_batch_sizes[0], few, *more}))


def _keep_powers_of_two(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the powers of two among ascending `sizes`, and always the last size."""
    return tuple(size for size in sizes if _is_power_of_two(size) or size == sizes[-1])


def _prefill_shapes(
    tokens: tuple[int, ...], min_seqs: int, max_seqs: int
) -> Iterator[tuple[int, int]]:
    """Yield the buckets of prefill steps, as (tokens, sequences).

    Most prefill steps compute few sequences, so a bucket is for either `min_seqs` or `max_seqs`
    sequences. If `max_seqs` is small, all buckets are for `max_seqs`: padding then costs less than
    compiling programs for both.

    Otherwise, a bucket of fewer than `max_seqs` tokens is for `min_seqs`. From `max_seqs` tokens
    on, every number of tokens has a bucket for `max_seqs`, whose steps mix prompts and decode rows.
    Only powers of two then also have a bucket for `min_seqs`.
    """
    if max_seqs <= MAX_SINGLE_BUCKET_SEQS:
        yield from ((size, max_seqs) for size in tokens)
        return
    for size in tokens:
        if size < max_seqs or _is_power_of_two(size):
            yield size, min_seqs
        if size >= max_seqs:
            yield size, max_seqs


def round_up(buckets: tuple[int, ...], size: int) -> int:
    """Return the smallest bucket that is at least `size`.

    Raises:
        ValueError: All buckets are smaller than `size`.
    """
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"size {size} is above the largest bucket {buckets[-1]}")


def _next_decode_bucket(size: int) -> int:
    """Return the number after `size` in the series 8, 16, 32, 48, 64, 96, 128, 192, 256, 320 ... A
    batch of 8 or more sequences is then at most half padding."""
    if size < 32:
        return 2 * size
    if size < 64:
        return size + 16
    if size < 128:
        return size + 32
    return size + 64


def _next_token_bucket(size: int) -> int:
    """Return the number after `size` in the series 64, 128, 256, 384, 512, 768, 1024, 1536 ..."""
    if size < MIN_HALF_STEP_TOKENS:
        return 2 * size
    return size + size // 2 if _is_power_of_two(size) else size + size // 3


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def _bucket_sizes(max_size: int, first: int, next_size) -> tuple[int, ...]:
    buckets = [first]
    while buckets[-1] < max_size:
        buckets.append(next_size(buckets[-1]))
    return tuple(buckets)
