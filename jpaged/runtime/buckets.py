"""Shapes the step functions are compiled for.

Static shapes come from buckets of sequences and of tokens, never from context lengths: kernels loop
to the lengths read at run time. No bucket is under 8 rows, since XLA turns matrix products of fewer
rows into element-wise multiply and reduce, which reads weights at a fifth of the bandwidth.
"""

from dataclasses import dataclass

MIN_SEQS = 8
MIN_TOKENS = 64
ONE_PREFILL_BUCKET_UPTO = 32


@dataclass(frozen=True)
class Buckets:
    """Every shape a step can have, ascending.

    Attributes:
        decode_seqs: Batch sizes of decode steps.
        prefill_tokens: Total tokens of prefill steps.
        prefill_seqs: Sequences of prefill steps.
    """

    decode_seqs: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    prefill_seqs: tuple[int, ...]

    def prefill_shapes(self) -> list[tuple[int, int]]:
        """Every (tokens, sequences) of a prefill step; no more sequences than tokens."""
        smallest = self.prefill_seqs[0]
        return [
            (tokens, seqs)
            for tokens in self.prefill_tokens
            for seqs in self.prefill_seqs
            if seqs == smallest or seqs <= tokens
        ]

    def prefill_shape(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        """The smallest prefill shape that holds a step."""
        seqs = round_up(self.prefill_seqs, num_seqs)
        tokens = round_up(self.prefill_tokens, max(num_tokens, min(seqs, self.prefill_tokens[-1])))
        return tokens, seqs


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int, *, few: bool = False) -> Buckets:
    """Choose the buckets.

    Args:
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step, at least `max_num_seqs`.
        few: Compile fewer shapes, and pad more.
    """
    decode_seqs = _upto(max_num_seqs, MIN_SEQS, _next_decode_bucket)
    growth = 8 if few else 2
    tokens = _upto(max_num_batched_tokens, MIN_TOKENS, lambda n: growth * n)
    # Prefill steps rarely hold many sequences, and the largest step may hold all. With few, the
    # padding costs less than compiling every shape twice.
    fewest, most = decode_seqs[0], decode_seqs[-1]
    prefill_seqs = (most,) if most <= ONE_PREFILL_BUCKET_UPTO else (fewest, most)
    return Buckets(decode_seqs, tokens, prefill_seqs)


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


def _upto(most: int, first: int, following) -> tuple[int, ...]:
    buckets = [first]
    while buckets[-1] < most:
        buckets.append(following(buckets[-1]))
    return tuple(buckets)
