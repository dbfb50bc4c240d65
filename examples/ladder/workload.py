"""The workload, the cost, the check and the table that all versions of attention (rungs) share.

A version of attention is a module with `TITLE` and three functions. `prepare(work)` returns the
inputs in the version's layout. `attend(*inputs)`, which is timed, returns the attention of all
tokens. `cost(work)` returns a `Cost`.
"""

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LENGTHS = (128, 64, 32, 8)
NUM_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 64, 16
# `GARBAGE` fills slots without a token. If a version of attention reads such a slot, its result is
# wrong, and the check finds it.
GARBAGE = 99.0


class Workload(NamedTuple):
    """Queries, keys and values of several sequences.

    The T rows of an array are the tokens of the first sequence, then those of the second, and so
    on.
    """

    lengths: tuple[int, ...]
    q: jax.Array  # [T, N, H]
    k: jax.Array  # [T, N, H]
    v: jax.Array  # [T, N, H]

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the sequences fill; only the last block of each may be partial."""
        return sum(-(-length // BLOCK_SIZE) for length in self.lengths)

    @property
    def num_real_pairs(self) -> int:
        """Number of pairs of two tokens of the same sequence: the sum of the squared lengths."""
        return sum(length * length for length in self.lengths)

    @property
    def sequence(self) -> np.ndarray:
        """Index of the sequence of each token, [T]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def position(self) -> np.ndarray:
        """Position of each token in its sequence, [T]."""
        return np.concatenate([np.arange(length) for length in self.lengths])

    def padded(self, flat: jax.Array) -> jax.Array:
        """Convert an array [T, N, H] to [B, Lmax, N, H], padded with `GARBAGE`."""
        shape = (len(self.lengths), max(self.lengths), *flat.shape[1:])
        return jnp.full(shape, GARBAGE).at[self.sequence, self.position].set(flat)

    def unpadded(self, padded: jax.Array) -> jax.Array:
        """Convert a padded array [B, Lmax, N, H] to [T, N, H]."""
        return padded[self.sequence, self.position]

    def block_tables(self) -> list[list[int]]:
        """Return the block ids of each sequence, in random order as in a busy pool."""
        counts = [-(-length // BLOCK_SIZE) for length in self.lengths]
        blocks = 1 + np.random.default_rng(0).permutation(sum(counts))  # block 0 is for padding
        return [part.tolist() for part in np.split(blocks, np.cumsum(counts)[:-1])]

    def pool(self, flat: jax.Array) -> jax.Array:
        """Return a pool [P, S, N, H] that holds the tokens in the blocks of `block_tables`."""
        tables = self.block_tables()
        pairs = zip(self.sequence, self.position // BLOCK_SIZE, strict=True)
        blocks = np.array([tables[sequence][index] for sequence, index in pairs])
        shape = (1 + sum(map(len, tables)), BLOCK_SIZE, *flat.shape[1:])
        return jnp.full(shape, GARBAGE).at[blocks, self.position % BLOCK_SIZE].set(flat)


class Cost(NamedTuple):
    """Cost of one version of attention. A pair is one query and one key, with all heads."""

    calls: int  # `calls` is the number of calls from Python to the device.
    num_pairs: int  # `num_pairs` counts the pairs whose scores are computed, including padding.
    num_padding_pairs: int  # `num_padding_pairs` counts the pairs whose query or key is padding.
    # `num_rows_read` counts the keys and values that are read. A key or value has shape [N, H].
    num_rows_read: int
    num_slots: int  # `num_slots` is the number of KV cache slots that the sequences hold.
    # `scores_at_once` is the maximum number of attention scores in memory at a time. For a Pallas
    # kernel, `scores_at_once` counts only the scores of one program instance.
    scores_at_once: int
    # The dot products q . k and p . v take one multiplication and one addition per element.
    flops_per_pair: int = 4 * HEAD_SIZE

    @property
    def num_flops(self) -> int:
        """Number of FLOPs, including FLOPs that are spent on padding."""
        return self.num_pairs * NUM_HEADS * self.flops_per_pair

    @property
    def waste(self) -> float:
        """Fraction of the FLOPs that are spent on padding, from 0 to 1."""
        return self.num_padding_pairs / self.num_pairs

    @property
    def bytes_read(self) -> int:
        """Number of bytes of keys and values that are read."""
        return self.num_rows_read * NUM_HEADS * HEAD_SIZE * 4


def tiled_cost(work: Workload, num_rows: int, num_keys: int) -> Cost:
    """Return the cost of a kernel with tiles of `num_rows` queries and `num_keys` keys.

    A program computes the queries of one tile, and loops over the keys up to the tile's last token.
    """
    keys_computed = keys_seen = num_padding_pairs = 0
    for length in work.lengths:
        for start in range(0, length, num_rows):
            end = min(start + num_rows, length)
            keys = -(-end // num_keys) * num_keys
            keys_computed, keys_seen = keys_computed + keys, keys_seen + end
            num_padding_pairs += num_rows * keys - (end - start) * end
    return Cost(
        calls=1,
        num_pairs=num_rows * keys_computed,
        num_padding_pairs=num_padding_pairs,
        num_rows_read=2 * keys_computed,
        num_slots=work.num_blocks * BLOCK_SIZE,
        scores_at_once=num_rows * num_keys,
    )


def make_workload(lengths: tuple[int, ...] = LENGTHS) -> Workload:
    """Return random queries, keys and values of sequences of these lengths."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={lengths} must be positive: pass numbers such as 128,8")
    shape = (3, sum(lengths), NUM_HEADS, HEAD_SIZE)
    return Workload(lengths, *jax.random.normal(jax.random.key(0), shape, jnp.float32))


def climb(*rungs: Any, work: Workload) -> list[str]:
    """Run the versions of attention (`rungs`) in order, and return the lines of the table.

    Raises:
        RuntimeError: the result of a version differs from the result of the previous version.
    """
    lines, before = [HEADER], None
    # By default, GPUs round the float32 operands of a matrix product to fewer bits.
    with jax.default_matmul_precision("highest"):
        for rung in rungs:
            out, seconds = timed(rung.attend, rung.prepare(work))
            if before is not None and not np.allclose(out, before, rtol=1e-4, atol=1e-5):
                worst = np.max(np.abs(out - before))
                raise RuntimeError(
                    f"{rung.TITLE}: differs from the previous version of attention by {worst:.2g}"
                )
            lines.append(line(rung.TITLE, seconds, rung.cost(work)))
            before = out
    return lines


def timed(attend, arguments: tuple) -> tuple[np.ndarray, float]:
    """Call `attend` once as a warm-up, then five times.

    Returns:
        The result on the host, and the minimum seconds of the five calls.
    """
    out, times = jax.block_until_ready(attend(*arguments)), []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(attend(*arguments))
        times.append(time.perf_counter() - start)
    return np.asarray(out), min(times)


HEADER = (
    f"{'':34}{'ms':>8}{'calls':>7}{'MFLOP':>8}{'on padding':>12}{'KV read':>10}{'slots':>7}"
    f"{'scores':>10}"
)


def line(title: str, seconds: float, cost: Cost) -> str:
    """Return the table line of one version of attention, with the columns of `HEADER`."""
    return (
        f"{title:34}{seconds * 1e3:8.2f}{cost.calls:7}{cost.num_flops / 1e6:8.1f}"
        f"{cost.waste:12.1%}{cost.bytes_read / 1024:6.0f} KiB{cost.num_slots:7}"
        f"{cost.scores_at_once * 4 / 1024:6.0f} KiB"
    )


def main(*rungs: Any) -> None:
    """Run the versions of attention on sequences of the lengths in `--lengths`. Print the table."""
    parser = argparse.ArgumentParser(description="Time rungs of the ladder and compare them.")
    default = ",".join(map(str, LENGTHS))
    parser.add_argument("--lengths", default=default, help="tokens of each sequence (%(default)s)")
    text = parser.parse_args().lengths
    try:
        work = make_workload(tuple(map(int, text.split(","))))
    except ValueError:
        parser.error(f"--lengths {text}: pass positive integers, such as {default}")
    print("\n".join(climb(*rungs, work=work)))
