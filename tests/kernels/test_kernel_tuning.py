"""The choice of launch parameters: pure, within limits, overridden by a device's table."""

import itertools
import json

import pytest

from pallas_kernels import tuning


def _decode(**changes):
    facts = {
        "batch": 64,
        "num_kv_heads": 8,
        "head_size": 128,
        "itemsize": 2,
        "max_context": 4096,
    }
    return tuning.decode_config(**{**facts, **changes})


def test_decode_splits_fill_the_chip():
    assert [_decode(batch=b).num_splits for b in (1, 8, 16, 64, 256)] == [32, 32, 4, 1, 1]


def test_decode_has_no_more_splits_than_tiles():
    assert _decode(batch=1, max_context=64).num_splits == 1


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_are_powers_of_two_within_limits(itemsize):
    for head_size, group, tokens in itertools.product((32, 80, 256), (1, 3, 71), (1, 100, 8192)):
        decode = _decode(head_size=head_size, itemsize=itemsize)
        prefill = tuning.prefill_config(
            num_tokens=tokens, batch=8, group=group, head_size=head_size, itemsize=itemsize
        )
        for size in (decode.tile_tokens, prefill.tile_tokens, prefill.tile_rows):
            assert size >= 16
            assert size & (size - 1) == 0
        assert prefill.tile_rows >= group


@pytest.fixture
def some_gpus_table(tmp_path, monkeypatch):
    size = "head_size=128,itemsize=2"
    table = {"decode": {size: {"tile_tokens": 32}}, "write": {size: {"chunk": 512}}}
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "Some_GPU.json").write_text(json.dumps(table))
    monkeypatch.setattr(tuning.resources, "files", lambda _: tmp_path)
    yield
    tuning._table.cache_clear()


@pytest.mark.usefixtures("some_gpus_table")
def test_a_table_overrides_fields():
    facts = {"head_size": 128, "itemsize": 2, "device_kind": "Some GPU"}
    assert tuning.move_config("write", **facts).chunk == 512
    assert tuning.move_config("copy", **facts).chunk == tuning.MoveConfig().chunk
    assert _decode(device_kind="Some GPU").tile_tokens == 32
    assert _decode(device_kind="Some GPU", head_size=64).tile_tokens == 64
    assert _decode(device_kind="Other GPU").tile_tokens == 64
