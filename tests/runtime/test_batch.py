from typing import Any

import jax.numpy as jnp
import numpy as np

from jpaged.core.plan import ScheduledSequence
from jpaged.core.request import Sequence
from jpaged.runtime.batch import (
    TOKEN_ON_DEVICE,
    device_order,
    pack_decode,
    pack_prefill,
    query_start_loc,
    unpack_decode,
    unpack_prefill,
)
from jpaged.runtime.sampler import ROW_WIDTH

# number of batch rows (the last is padding), and number of blocks per row of the block table
R, M = 5, 4
SAMPLING = np.arange(R * ROW_WIDTH, dtype=np.int32).reshape(R, ROW_WIDTH)


def sequence(token_ids: list[int], table: list[int]) -> Sequence:
    return Sequence(0, token_ids, len(token_ids), block_table=table)


def test_packed_decode_batch_unpacks_unchanged():
    known = ScheduledSequence(sequence([5, 6, 7], [3]), 2, 1, True)
    pending = ScheduledSequence(sequence([5, 6, 7, 8], [2, 9]), 4, 1, True, ((1, 9),))
    options = {"sampling_table": SAMPLING, "num_rows": 8, "max_blocks": M}
    packed = pack_decode((known, pending), np.array([3, 0]), **options)
    batch = unpack_decode(jnp.asarray(packed))
    assert batch.tokens.tolist()[:3] == [7, TOKEN_ON_DEVICE, 0]
    assert batch.rows.tolist() == [3, 0] + [R - 1] * 6
    assert batch.seq_lens.tolist() == [3, 5] + [0] * 6
    # A row without a new block gets an index past the end of the block table, so that the device
    # drops the update.
    assert batch.block_indices.tolist() == [M, 1] + [M] * 6
    assert batch.block_ids.tolist()[:2] == [0, 9]
    assert batch.is_output.tolist() == [True, True] + [False] * 6
    assert np.array_equal(batch.sampling, SAMPLING[[3, 0] + [R - 1] * 6])


def test_packed_prefill_batch_unpacks_unchanged():
    chunk = ScheduledSequence(sequence([1, 2, 3, 4, 5], [7, 8]), 1, 3, False, ((0, 7),))
    decode = ScheduledSequence(sequence([9, 9], [4]), 2, 1, True)
    sizes: Any = {"num_tokens": 16, "batch_size": 8}
    packed = pack_prefill(
        (chunk, decode), np.array([1, 2]), sampling_table=SAMPLING, max_blocks=M, **sizes
    )
    batch = unpack_prefill(jnp.asarray(packed), **sizes)
    assert batch.tokens.tolist()[:5] == [2, 3, 4, TOKEN_ON_DEVICE, 0]
    assert batch.rows.tolist() == [1, 2] + [R - 1] * 6
    assert batch.query_lens.tolist() == [3, 1] + [0] * 6
    assert batch.seq_lens.tolist() == [4, 3] + [0] * 6
    assert batch.is_output.tolist() == [False, True] + [False] * 6
    assert batch.block_tables.tolist()[:3] == [[7, 8, 0, 0], [4, 0, 0, 0], [0] * 4]
    assert query_start_loc(batch.query_lens).tolist() == [0, 3] + [4] * 7


def test_prefill_computes_sequences_with_one_token_first():
    spans = [(0, 7), (5, 1), (9, 1), (9, 2), (0, 1), (9, 1)]  # first token, number of tokens
    scheduled = tuple(ScheduledSequence(sequence([], []), *span, True) for span in spans)
    assert device_order(scheduled).tolist() == [1, 2, 4, 5, 0, 3]
    assert device_order(()).tolist() == []
