"""What all rungs share: sequences, what a rung costs, the check against the one before, a table.

A rung is a module with `TITLE`; `prepare(work)`, which lays the workload out as the rung wants it;
`attend(*prepared)`, the attention of all tokens, which is what is timed; and `cost(work)`.
"""

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LENGTHS = (128, 64, 32, 8)
NUM_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 64, 16
GARBAGE = 99.0  # in each slot that holds no token: a rung that lets one count is found out


class Workload(NamedTuple):
    """The prompts of several sequences: T tokens back to back, each a query, a key and a value."""

    lengths: tuple[int, ...]
    q: jax.Array  # [T, N, H]
    k: jax.Array  # [T, N, H]
    v: jax.Array  # [T, N, H]

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the sequences: only the last of each may be partly filled."""
        return sum(-(-length // BLOCK_SIZE) for length in self.lengths)

    @property
    def num_real_pairs(self) -> int:
        """Pairs of two tokens of one sequence: the squares that padding does not touch."""
        return sum(length * length for length in self.lengths)

    @property
    def sequence(self) -> np.ndarray:
        """The sequence of each token, [T]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def position(self) -> np.ndarray:
        """The position of each token in its sequence, [T]."""
        return np.concatenate([np.arange(length) for length in self.lengths])

    def padded(self, flat: jax.Array) -> jax.Array:
        """[B, Lmax, N, H]: a rectangle of which the longest sequence alone fills its row."""
        shape = (len(self.lengths), max(self.lengths), *flat.shape[1:])
        return jnp.full(shape, GARBAGE).at[self.sequence, self.position].set(flat)

    def unpadded(self, padded: jax.Array) -> jax.Array:
        """[T, N, H] from `padded`'s [B, Lmax, N, H]."""
        return padded[self.sequence, self.position]

    def block_tables(self) -> list[list[int]]:
        """The blocks of each sequence, in order: from anywhere in the pool, as in a busy one."""
        counts = [-(-length // BLOCK_SIZE) for length in self.lengths]
        blocks = 1 + np.random.default_rng(0).permutation(sum(counts))  # block 0 belongs to padding
        return [part.tolist() for part in np.split(blocks, np.cumsum(counts)[:-1])]

    def pool(self, flat: jax.Array) -> jax.Array:
        """[P, S, N, H]: each token in slot `position % S` of its `position // S`-th block."""
        tables = self.block_tables()
        pairs = zip(self.sequence, self.position // BLOCK_SIZE, strict=True)
        blocks = np.array([tables[sequence][index] for sequence, index in pairs])
        shape = (1 + sum(map(len, tables)), BLOCK_SIZE, *flat.shape[1:])
        return jnp.full(shape, GARBAGE).at[blocks, self.position % BLOCK_SIZE].set(flat)


class Cost(NamedTuple):
    """What a rung spends; a pair is one query with one key, of every head."""

    calls: int  # that Python makes to the device
    num_pairs: int  # computed
    num_padding_pairs: int  # of these, those whose query or key is no token
    num_rows_read: int  # keys and values read, each [N, H]
    num_slots: int  # of KV cache held
    scores_at_once: int  # floats of scores alive at a time; of a kernel, in one of its programs
    flops_per_pair: int = 4 * HEAD_SIZE  # q . k, and p . v, each a multiplication and an addition

    @property
    def num_flops(self) -> int:
        """All that are computed."""
        return self.num_pairs * NUM_HEADS * self.flops_per_pair

    @property
    def waste(self) -> float:
        """The share of the FLOPs that padding takes, 0 to 1."""
        return self.num_padding_pairs / self.num_pairs

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values."""
        return self.num_rows_read * NUM_HEADS * HEAD_SIZE * 4


def tiled_cost(work: Workload, num_rows: int, num_keys: int) -> Cost:
    """The cost of a kernel whose programs take `num_rows` queries of one sequence and loop over
    `num_keys` keys at a time, up to the tile's own last token."""
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
    """Random queries, keys and values of these sequences."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={lengths} must be positive: give one number or more, as 128,8")
    shape = (3, sum(lengths), NUM_HEADS, HEAD_SIZE)
    return Workload(lengths, *jax.random.normal(jax.random.key(0), shape, jnp.float32))


def climb(*rungs: Any, work: Workload) -> list[str]:
    """Run rungs one after the other; a line of the table for each.

    Raises:
        RuntimeError: a rung's result is not that of the one before.
    """
    lines, before = [HEADER], None
    with jax.default_matmul_precision("highest"):  # a GPU would round float32 to fewer bits
        for rung in rungs:
            out, seconds = timed(rung.attend, rung.prepare(work))
            if before is not None and not np.allclose(out, before, rtol=1e-4, atol=1e-5):
                worst = np.max(np.abs(out - before))
                raise RuntimeError(f"{rung.TITLE}: differs from the rung before by {worst:.2g}")
            lines.append(line(rung.TITLE, seconds, rung.cost(work)))
            before = out
    return lines


def timed(attend, arguments: tuple) -> tuple[np.ndarray, float]:
    """The result on the host, and the least seconds of five calls after one that compiles."""
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
    """One rung as a line under `HEADER`."""
    return (
        f"{title:34}{seconds * 1e3:8.2f}{cost.calls:7}{cost.num_flops / 1e6:8.1f}"
        f"{cost.waste:12.1%}{cost.bytes_read / 1024:6.0f} KiB{cost.num_slots:7}"
        f"{cost.scores_at_once * 4 / 1024:6.0f} KiB"
    )


def main(*rungs: Any) -> None:
    """What `python -m` of a rung does: the rungs given, on the lengths of the command line."""
    parser = argparse.ArgumentParser(description="Rungs of the ladder, timed and compared.")
    default = ",".join(map(str, LENGTHS))
    parser.add_argument("--lengths", default=default, help="tokens of each sequence (%(default)s)")
    text = parser.parse_args().lengths
    try:
        work = make_workload(tuple(map(int, text.split(","))))
    except ValueError:
        parser.error(f"--lengths {text}: give positive whole numbers, as {default}")
    print("\n".join(climb(*rungs, work=work)))
