import numpy as np
import pytest

from jpaged.runtime.batch import RowTable
from jpaged.runtime.sampler import PADDING_PARAMS, SamplerLevel
from jpaged.sampling_params import SamplingParams


def test_batch_row_for_padding_is_never_assigned():
    table = RowTable(3)
    rows = {table.assign(seq_id) for seq_id in (10, 11)}
    assert rows == {0, 1}
    assert np.array_equal(table.sampling_table[2], PADDING_PARAMS)


def test_released_batch_row_is_assigned_again():
    table = RowTable(2)
    assert table.assign(10) == 0
    table.release(10)
    assert 10 not in table
    assert table.assign(11) == 0


def test_assigning_a_second_batch_row_to_a_sequence_is_refused():
    table = RowTable(3)
    table.assign(10)
    with pytest.raises(ValueError, match="sequence 10 already has row"):
        table.assign(10)


def test_sampler_variant_of_a_batch_has_the_features_that_its_rows_need():
    table = RowTable(4)
    greedy, random = table.assign(1), table.assign(2)
    table.set_sampling(random, SamplingParams(temperature=0.5), seed=0)
    assert table.level(np.array([greedy])) == SamplerLevel.GREEDY
    assert table.level(np.array([greedy, random])) == SamplerLevel.RANDOM
    table.release(2)
    assert table.level(np.array([table.assign(3)])) == SamplerLevel.GREEDY
