"""Pack the inputs of a step into one int32 array, and unpack the array on the device.

The host fills the array with numpy, so all inputs of a step need one transfer to the device. The
jitted steps unpack the array with `unpack_decode` and `unpack_prefill`, which take static slices. A
float is stored as its 32 bits. Padding entries have the index of the padding row (see `RowTable`).

    decode  [B, 6 + W]   one row per sequence: `DecodeColumn`, then W sampling parameters
            With speculative decoding [B, 7 + W + 2 n]: then the number of tokens for which the
            row has slots, and n more new block-table entries as pairs (index, block id)
    prefill [T + B * (6 + W + M)]   flat: T tokens, then B rows of `PrefillColumn` (1 column is
            unused) and W sampling parameters, then B block tables of M entries

A token of -1 (`TOKEN_ON_DEVICE`) stands for the token that the row sampled last. The host does not
know that token yet. With speculative decoding, the host does not know the number of tokens either,
and packs a length of -1 (`LENGTH_ON_DEVICE`) with this token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jpaged.core.plan import ScheduledSequence, StepPlan
from jpaged.runtime.buckets import Buckets
from jpaged.runtime.sampler import (
    PADDING_PARAMS,
    ROW_WIDTH,
    SamplerLevel,
    pack_params,
    required_level,
)
from jpaged.sampling_params import SamplingParams

TOKEN_ON_DEVICE = LENGTH_ON_DEVICE = -1


class DecodeColumn:
    """Columns of a packed decode step, in the order of `DecodeBatch`."""

    TOKEN, ROW, SEQ_LEN, BLOCK_INDEX, BLOCK_ID, IS_OUTPUT = range(6)


class PrefillColumn:
    """Columns of the packed rows of a prefill step, in the order of `PrefillBatch`."""

    ROW, QUERY_LEN, SEQ_LEN, IS_OUTPUT, LIMIT = range(5)


_NUM_HEADER_COLUMNS = 6
_SAMPLING_COLUMNS = slice(_NUM_HEADER_COLUMNS, _NUM_HEADER_COLUMNS + ROW_WIDTH)
_LIMIT_COLUMN = _NUM_HEADER_COLUMNS + ROW_WIDTH
_MORE_UPDATES_COLUMNS = slice(_LIMIT_COLUMN + 1, None)


class DecodeBatch(NamedTuple):
    """Inputs of a decode step on the device: one token per sequence."""

    tokens: Int32[Array, "B"]
    rows: Int32[Array, "B"]
    seq_lens: Int32[Array, "B"]
    block_indices: Int32[Array, "B"]
    block_ids: Int32[Array, "B"]
    is_output: Bool[Array, "B"]
    sampling: Int32[Array, "B W"]


class PrefillBatch(NamedTuple):
    """Inputs of a prefill step on the device: any number of tokens per sequence."""

    tokens: Int32[Array, "T"]
    rows: Int32[Array, "B"]
    query_lens: Int32[Array, "B"]
    seq_lens: Int32[Array, "B"]
    is_output: Bool[Array, "B"]
    sampling: Int32[Array, "B W"]
    block_tables: Int32[Array, "B M"]


def decode_key(buckets: Buckets, plan: StepPlan) -> int | None:
    """Return the batch size to which a plan's decode step is padded; None if the plan needs a
    prefill step."""
    return buckets.padded_decode_sizes[len(plan.scheduled)] if plan.is_decode else None


def prefill_key(buckets: Buckets, plan: StepPlan) -> tuple[int, int]:
    """Return the numbers of tokens and sequences to which a plan's prefill step is padded."""
    return buckets.prefill_shape(plan.num_tokens, len(plan.scheduled))


def device_order(scheduled: tuple[ScheduledSequence, ...]) -> np.ndarray:
    """Return the order in which a prefill step computes its sequences.

    Sequences with one token in the step come first, because decode attention computes all of these
    sequences together.

    Returns:
        Indices into `scheduled`, int64 [len(scheduled)].
    """
    key = [item.num_scheduled_tokens != 1 for item in scheduled]
    return np.argsort(np.array(key, np.bool_), kind="stable")


def pack_decode(
    scheduled: tuple[ScheduledSequence, ...],
    rows: np.ndarray | tuple[()],
    limits: Sequence[int] = (),
    *,
    sampling_table: np.ndarray,
    num_rows: int,
    max_blocks: int,
    speculates: bool = False,
    max_block_updates: int = 1,
) -> np.ndarray:
    """Pack the inputs of a decode step.

    Args:
        scheduled: The plan's sequences, each with one token and at most `max_block_updates` new
            blocks.
        rows: Row of each sequence in the arrays on the device, int [len(scheduled)].
        limits: With speculative decoding, the number of tokens for which each sequence has slots
            (`StepPlan.limits`).
        sampling_table: Packed sampling parameters, int32 [R, W]: one entry for each row of the
            arrays on the device. The last row is the padding row.
        num_rows: Number of rows to pad to: the number of rows of the step's logits.
        max_blocks: Number of entries in a block table (M). As a block index, this number means "no
            new block".
        speculates: Whether the engine has speculative decoding.
        max_block_updates: Maximum number of new blocks of a sequence.

    Returns:
        int32 [num_rows, 6 + W], or [num_rows, 5 + W + 2 max_block_updates] with speculative
        decoding.
    """
    num_more = 2 * max_block_updates - 1 if speculates else 0
    packed = np.zeros((num_rows, _NUM_HEADER_COLUMNS + ROW_WIDTH + num_more), np.int32)
    packed[:, DecodeColumn.ROW] = len(sampling_table) - 1  # the padding row
    packed[:, DecodeColumn.BLOCK_INDEX] = max_blocks
    n = len(scheduled)
    if speculates:
        packed[:, _MORE_UPDATES_COLUMNS][:, ::2] = max_blocks
        packed[:n, _LIMIT_COLUMN] = limits
    tokens, seq_lens, is_output = [TOKEN_ON_DEVICE] * n, [0] * n, [False] * n
    for i, (sequence, start, _, is_sampled, block_updates) in enumerate(scheduled):
        seq_lens[i], is_output[i] = start + 1, is_sampled
        if start < len(sequence.token_ids):
            tokens[i] = sequence.token_ids[start]
        elif speculates:
            seq_lens[i] = LENGTH_ON_DEVICE
        if block_updates:
            packed[i, DecodeColumn.BLOCK_INDEX], packed[i, DecodeColumn.BLOCK_ID] = block_updates[0]
            for at, update in enumerate(block_updates[1:]):
                column = _LIMIT_COLUMN + 1 + 2 * at
                packed[i, column : column + 2] = update
    packed[:n, DecodeColumn.TOKEN] = tokens
    packed[:n, DecodeColumn.ROW] = rows
    packed[:n, DecodeColumn.SEQ_LEN] = seq_lens
    packed[:n, DecodeColumn.IS_OUTPUT] = is_output
    packed[:, _SAMPLING_COLUMNS] = sampling_table[packed[:, DecodeColumn.ROW]]
    return packed


def pack_burst(
    scheduled: Sequence[tuple[ScheduledSequence, ...]],
    rows: Sequence[np.ndarray],
    limits: Sequence[Sequence[int]] = (),
    *,
    num_steps: int,
    sampling_table: np.ndarray,
    num_rows: int,
    max_blocks: int,
    speculates: bool = False,
    max_block_updates: int = 1,
) -> np.ndarray:
    """Pack the inputs of a burst, which is several decode steps launched as one program.

    Each step is packed by `pack_decode`. If there are fewer than `num_steps` steps, padding steps
    follow.

    Returns:
        int32 [num_steps, num_rows, C], with the columns of `pack_decode`.
    """
    options: dict[str, Any] = {
        "sampling_table": sampling_table,
        "num_rows": num_rows,
        "max_blocks": max_blocks,
        "speculates": speculates,
        "max_block_updates": max_block_updates,
    }
    steps = zip(scheduled, rows, limits or [()] * len(rows), strict=True)
    packed = [pack_decode(*step, **options) for step in steps]
    padding = [pack_decode((), (), **options)] * (num_steps - len(packed))
    return np.stack(packed + padding)


def unpack_decode(packed: Int32[Array, "B C"]) -> DecodeBatch:
    """Unpack the inputs of a decode step, on the device."""
    *columns, is_output = (packed[:, column] for column in range(_NUM_HEADER_COLUMNS))
    return DecodeBatch._make([*columns, is_output != 0, packed[:, _SAMPLING_COLUMNS]])


def unpack_limits(packed: Int32[Array, "B C"]) -> Int32[Array, "B"]:
    """Return the number of tokens for which each sequence has slots (`StepPlan.limits`).

    The function runs on the device, and unpacks the inputs of a decode step.
    """
    return packed[:, _LIMIT_COLUMN]


def unpack_block_updates(
    packed: Int32[Array, "B C"],
) -> tuple[Int32[Array, "B updates"], Int32[Array, "B updates"]]:
    """Unpack the indices and the block ids of all new block-table entries, on the device."""
    more = packed[:, _MORE_UPDATES_COLUMNS]
    first = DecodeColumn.BLOCK_INDEX, DecodeColumn.BLOCK_ID
    indices, block_ids = (
        jnp.concatenate([packed[:, column][:, None], more[:, i::2]], axis=1)
        for i, column in enumerate(first)
    )
    return indices, block_ids


def pack_prefill(
    scheduled: tuple[ScheduledSequence, ...],
    rows: np.ndarray | tuple[()],
    limits: Sequence[int] = (),
    *,
    sampling_table: np.ndarray,
    num_tokens: int,
    batch_size: int,
    max_blocks: int,
    speculates: bool = False,
) -> np.ndarray:
    """Pack the inputs of a prefill step.

    Args:
        scheduled: The plan's sequences, in the order in which the step computes them.
        rows: Row of each sequence in the arrays on the device, int [len(scheduled)].
        limits: With speculative decoding, the number of tokens for which each sequence has slots
            (`StepPlan.limits`).
        sampling_table: Packed sampling parameters, int32 [R, W]: one entry for each row of the
            arrays on the device. The last row is the padding row.
        num_tokens: Number of tokens to pad to.
        batch_size: Number of sequences to pad to.
        max_blocks: Number of entries in a block table (M).
        speculates: Whether the engine has speculative decoding.

    Returns:
        int32 [num_tokens + batch_size * (6 + W + max_blocks)].
    """
    per_seq = _NUM_HEADER_COLUMNS + ROW_WIDTH + max_blocks
    packed = np.zeros(num_tokens + batch_size * per_seq, np.int32)
    tokens, per_seq, tables = _split_prefill(packed, num_tokens, batch_size)
    per_seq[:, PrefillColumn.ROW] = len(sampling_table) - 1
    at = 0
    for i, item in enumerate(scheduled):
        n, sequence = item.num_scheduled_tokens, item.sequence
        known = sequence.token_ids[item.start : item.start + n]
        tokens[at : at + n] = known if known else TOKEN_ON_DEVICE
        per_seq[i, PrefillColumn.ROW] = rows[i]
        per_seq[i, PrefillColumn.QUERY_LEN] = n
        is_known = known or not speculates
        per_seq[i, PrefillColumn.SEQ_LEN] = item.start + n if is_known else LENGTH_ON_DEVICE
        per_seq[i, PrefillColumn.IS_OUTPUT] = item.is_sampled
        tables[i, : len(sequence.block_table)] = sequence.block_table
        at += n
    if speculates:
        per_seq[: len(scheduled), PrefillColumn.LIMIT] = limits
    per_seq[:, _SAMPLING_COLUMNS] = sampling_table[per_seq[:, PrefillColumn.ROW]]
    return packed


def unpack_prefill(packed: Int32[Array, "X"], *, num_tokens: int, batch_size: int) -> PrefillBatch:
    """Unpack the inputs of a prefill step, on the device."""
    tokens, per_seq, tables = _split_prefill(packed, num_tokens, batch_size)
    *columns, is_output = (per_seq[:, column] for column in range(PrefillColumn.IS_OUTPUT + 1))
    return PrefillBatch._make(
        [tokens, *columns, is_output != 0, per_seq[:, _SAMPLING_COLUMNS], tables]
    )


def unpack_prefill_limits(
    packed: Int32[Array, "X"], *, num_tokens: int, batch_size: int
) -> Int32[Array, "B"]:
    """Return the number of tokens for which each sequence has slots (`StepPlan.limits`).

    The function runs on the device, and unpacks the inputs of a prefill step.
    """
    return _split_prefill(packed, num_tokens, batch_size)[1][:, PrefillColumn.LIMIT]


def query_start_loc(query_lens: Int32[Array, "B"]) -> Int32[Array, "B+1"]:
    """Return the index of each sequence's first token among the step's flattened tokens. The last
    entry is the total number of tokens."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(query_lens, dtype=jnp.int32)])


def _split_prefill(packed, num_tokens: int, batch_size: int):
    """Split a packed prefill step into its tokens, its rows and its block tables. `packed` may be a
    numpy array or a traced array; parts of a numpy array are views."""
    end = num_tokens + batch_size * (_NUM_HEADER_COLUMNS + ROW_WIDTH)
    return (
        packed[:num_tokens],
        packed[num_tokens:end].reshape(batch_size, _NUM_HEADER_COLUMNS + ROW_WIDTH),
        packed[end:].reshape(batch_size, -1),
    )


class RowTable:
    """Table of the row that each running sequence has in the arrays on the device.

    The table also has the sampling parameters of each row. The last row is the padding row and is
    never assigned. All sampling parameters are in one array, so that packing a step selects the
    rows by one index operation instead of a loop.
    """

    def __init__(self, num_rows: int):
        self.sampling_table = np.zeros((num_rows, ROW_WIDTH), np.int32)
        self._levels = np.zeros(num_rows, np.int32)
        self._free_rows = list(range(num_rows - 2, -1, -1))
        self._row_by_seq_id: dict[int, int] = {}
        self.sampling_table[-1] = PADDING_PARAMS

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._row_by_seq_id

    def assign(self, seq_id: int) -> int:
        """Give a sequence that joins the batch a free row in the arrays on the device.

        Tokens of the row are sampled greedily until `set_sampling` is called.

        Raises:
            ValueError: The sequence already has a row.
        """
        if seq_id in self._row_by_seq_id:
            raise ValueError(
                f"sequence {seq_id} already has row {self._row_by_seq_id[seq_id]} in the arrays "
                "on the device: release the row first"
            )
        row = self._row_by_seq_id[seq_id] = self._free_rows.pop()
        self.sampling_table[row], self._levels[row] = PADDING_PARAMS, SamplerLevel.GREEDY
        return row

    def set_sampling(self, row: int, params: SamplingParams, seed: int) -> None:
        """Set the sampling parameters and the seed of the sequence that has the row `row`."""
        self.sampling_table[row], self._levels[row] = (
            pack_params(params, seed),
            required_level(params),
        )

    def row(self, seq_id: int) -> int:
        """Return the row of a sequence in the arrays on the device."""
        return self._row_by_seq_id[seq_id]

    def release(self, seq_id: int) -> None:
        """Free the row that a sequence had in the arrays on the device. Call this method when the
        sequence has left the batch."""
        self._free_rows.append(self._row_by_seq_id.pop(seq_id))

    def rows(self, scheduled: tuple[ScheduledSequence, ...]) -> np.ndarray:
        """Return the row of each scheduled sequence in the arrays on the device.

        The result is int32 [len(scheduled)].
        """
        row_by_seq_id = self._row_by_seq_id
        return np.fromiter(
            (row_by_seq_id[s.sequence.seq_id] for s in scheduled), np.int32, len(scheduled)
        )

    def level(self, rows: np.ndarray) -> SamplerLevel:
        """Return the set of all sampling features that the rows in `rows` need."""
        return SamplerLevel(int(np.bitwise_or.reduce(self._levels[rows])))
