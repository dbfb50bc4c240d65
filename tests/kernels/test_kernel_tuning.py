"""Test the choice of launch parameters and the tables of tuned devices."""

import itertools
import json
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import FP8_PAIR_DTYPE, LayerKV, tuning
from pallas_kernels.attention import tuning as attention_tuning
from pallas_kernels.attention.tile_ops import AttentionSpec
from pallas_kernels.gemm import tuning as gemm_tuning
from pallas_kernels.gemm.tuning import GemmProblem
from pallas_kernels.kv_cache import triton as kv_cache_triton
from pallas_kernels.norm.triton import norm_config


def _decode(**changes):
    facts = {"batch": 64, "num_kv_heads": 8, "head_size": 128, "itemsize": 2, "max_context": 4096}
    return attention_tuning.decode_config(**{**facts, **changes})


def test_decode_splits_fill_the_gpu():
    assert [_decode(batch=b).num_splits for b in (1, 8, 16, 64, 256)] == [32, 32, 8, 8, 8]
    # A context of 64 tokens is one key tile, and a split has at least one tile.
    assert _decode(batch=1, max_context=64).num_splits == 1
    percents = [_decode(batch=b).split_percent_of_mean for b in (8, 16, 48, 64, 192, 256)]
    assert percents == [None, None, 110, 110, 150, 150]


def test_decode_of_large_batches_uses_small_tiles_and_few_warps():
    assert [_decode(batch=b).tile_tokens for b in (64, 192, 256)] == [64, 64, 32]
    assert _decode(batch=256, head_size=512).tile_tokens == 16
    assert [_decode(batch=b, itemsize=1).tile_tokens for b in (64, 256)] == [64, 64]
    assert [_decode(batch=b).num_warps for b in (1, 256)] == [4, 2]
    assert _decode(batch=256, itemsize=4).num_warps == 4


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_attention_tiles_are_powers_of_two_of_at_least_16(itemsize):
    for head_size, group, tokens in itertools.product((2, 32, 80, 256), (1, 3, 71), (1, 100, 8192)):
        decode = _decode(head_size=head_size, itemsize=itemsize)
        prefill = attention_tuning.prefill_config(
            num_tokens=tokens, batch=8, group=group, head_size=head_size, itemsize=itemsize
        )
        for size in (decode.tile_tokens, prefill.tile_tokens, prefill.tile_rows):
            assert size >= 16
            assert size & (size - 1) == 0
        assert prefill.tile_rows >= group


def test_head_size_is_padded_to_a_power_of_two_of_at_least_16():
    widths = {1: 16, 8: 16, 12: 16, 16: 16, 24: 32, 64: 64, 80: 128, 96: 128, 128: 128, 200: 256}
    options = {"scale": 1.0, "soft_cap": None, "sliding_window": None}

    def width(head_size: int, dtype: Any) -> int:
        pool = LayerKV(*[jnp.zeros((2, 16, 1, head_size), dtype)] * 2)
        return AttentionSpec.for_pool(2, pool, np.zeros((1, 1), np.int32), **options).width

    assert {size: width(size, jnp.bfloat16) for size in widths} == widths
    in_fp8 = {size: max(least, 32) for size, least in widths.items() if size % 2 == 0}
    assert {size: width(size // 2, FP8_PAIR_DTYPE) for size in in_fp8} == in_fp8


@pytest.mark.parametrize("itemsize", [2, 4])
def test_each_thread_of_the_norm_kernel_loads_16_bytes(itemsize):
    for size in (24, 64, 1000, 1024, 4096, 5120, 16384):
        config = norm_config(size=size, itemsize=itemsize)
        assert config.tile * itemsize == 16 * 32 * config.num_warps
        assert 1 <= config.num_warps <= 32
        # A tile covers the row, unless that would take more than 32 warps. The tile is less than
        # twice as wide as the row.
        assert size <= config.tile < 2 * max(size, 32 * 16 // itemsize) or config.num_warps == 32


def test_gated_silu_of_few_rows_uses_twice_as_many_threads():
    """A program computes 1,024 columns, with 8 warps for few rows and 4 warps for many rows."""
    few, many = (gemm_tuning.gated_silu_config(num_tokens=rows, size=14336) for rows in (64, 256))
    assert few == gemm_tuning.GatedSiluConfig(1024, num_warps=8)
    assert many == gemm_tuning.GatedSiluConfig(1024, num_warps=4)


def test_gated_silu_after_a_small_gemm_uses_xla():
    def has_kernel(rows: int, size: int) -> bool:
        return gemm_tuning.gated_silu_config(num_tokens=rows, size=size) is not None

    sizes = itertools.product((8, 256, 512), (3072, 14336))
    assert [has_kernel(*size) for size in sizes] == [False, True, False, True, True, True]


# Maps a number of rows to two lists, for Qwen3-0.6B and for Llama-3.1-8B. A list has the number of
# splits of four GEMMs: qkv projection, output projection, gate and up, and down.
MEASURED_SPLITS = {
    8: ([4, 4, 1, 4], [2, 8, 1, 8]),
    64: ([4, 8, 1, 8], [2, 8, 1, 8]),
    128: ([2, 4, 1, 4], [1, 1, 1, 1]),
    256: ([1, 4, 1, 4], [2, 2, 1, 2]),
    512: ([1, 1, 1, 1], [1, 1, 1, 1]),
}


@pytest.mark.parametrize("rows", [*MEASURED_SPLITS])
def test_gemm_uses_the_fastest_measured_number_of_splits(rows):
    def splits(depth, width, itemsize=2):
        return gemm_tuning.num_splits(GemmProblem(rows, depth, width, itemsize))

    small = [splits(1024, 4096), splits(2048, 1024), splits(1024, 6144), splits(3072, 1024)]
    large = [splits(4096, 6144), splits(4096, 4096), splits(4096, 28672), splits(14336, 4096)]
    assert (small, large) == MEASURED_SPLITS[rows]
    assert splits(14336, 4096, itemsize=4) == 1


def test_hopper_prefill_is_chosen_only_if_supported():
    facts = {"head_size": 128, "block_size": 16, "itemsize": 2, "is_plain_causal": True}
    runs = partial(attention_tuning.runs_hopper_prefill, **facts)
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"):
        assert runs(device_kind=name)
    assert not runs(device_kind="NVIDIA A100-SXM4-80GB")
    assert not runs(device_kind="")
    others = {"head_size": 64, "block_size": 48, "itemsize": 4, "is_plain_causal": False}
    for name, value in others.items():
        assert not runs(device_kind="NVIDIA H200", **{name: value})
    sizes = [1, 2, 4, 7, 8, 16, 24, 32, 64, 96, 128, 136, 192, 256]
    supported = [s for s in sizes if runs(device_kind="NVIDIA H200", block_size=s)]
    # These block sizes divide a key tile, or are multiples of a key tile.
    assert supported == [8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("num_tokens", [64, 8192, 2**17])
def test_buffer_for_converted_fp8_kv_blocks_grows_with_the_number_of_tokens(num_tokens):
    facts = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "itemsize": 2}
    config = attention_tuning.widening_config(num_tokens=num_tokens, **facts)
    assert config.max_blocks == max(2**28 // (16 * 8 * 128 * 2 * 2), num_tokens // 8)


def _few_rows(rows, depth, width, **changes) -> Any:
    facts = {"itemsize": 2, "num_cores": 132, "device_kind": "NVIDIA H200"}
    return gemm_tuning.few_rows_config(GemmProblem(rows, depth, width, **(facts | changes)))


def test_hopper_gemm_splits_give_at_most_one_program_per_sm():
    splits = {
        rows: [_few_rows(rows, *shape).num_splits for shape in ((1024, 4096), (2048, 1024))]
        for rows in (8, 64, 96, 128, 192, 256)
    }
    few, many = [2, 8], [1, 4]
    assert splits == {8: few, 64: few, 96: many, 128: many, 192: many, 256: many}
    tiles = [_few_rows(rows, 1024, 4096).tile_rows for rows in (8, 64, 96, 128, 192, 256)]
    assert tiles == [8, 64, 48, 64, 96, 128]
    # The GEMM needs 96 programs. With tiles of 64 rows, it would need 192.
    assert _few_rows(128, 1024, 6144).tile_rows == 128
    # A K dimension of 320 is 5 steps of 64. An odd number of steps cannot be split.
    assert _few_rows(64, 320, 1024).num_splits == 1
    assert _few_rows(64, 512, 64).num_splits == 4  # At least 128 per split.


def test_hopper_gemm_reads_a_large_weight_once():
    for rows in (8, 64, 96, 128):
        config = _few_rows(rows, 14336, 4096)
        assert (config.tile_rows, config.num_splits) == (rows, 2)
    assert _few_rows(64, 4096, 14336, num_factors=2).tile_rows == 64


def test_hopper_gemm_prefetch_is_limited_for_large_weights():
    # The GEMM with width 4096 has 128 programs, and the GEMM with width 14336 has 112.
    for rows in (8, 64, 128):
        assert _few_rows(rows, 14336, 4096).num_stages == 8
    # This GEMM has 96 programs, so a quarter of the SMs is idle.
    assert _few_rows(8, 4096, 6144).num_stages == 10
    for rows in (8, 64, 128):
        assert _few_rows(rows, 4096, 14336, num_factors=2).num_stages == 4
    # With 256 rows there are two tiles of rows, and both read the whole weight.
    assert _few_rows(256, 1024, 3072, num_factors=2).num_stages == 6


def test_hopper_gemm_fits_the_shared_memory_of_an_sm():
    num_supported = 0
    for rows, depth, width, factors, cores in itertools.product(
        range(8, 257, 8), (1024, 8192), (64, 1024, 8448, 8512, 14336, 16896), (1, 2), (78, 132)
    ):
        config = _few_rows(rows, depth, width, num_factors=factors, num_cores=cores)
        if config is None:
            continue
        num_supported += 1
        tiles = rows // config.tile_rows * width // (64 * config.num_consumers)
        assert config.num_splits * tiles <= cores
        step = (config.tile_rows + 64 * factors * config.num_consumers) * 64 * 2
        out = config.num_consumers * config.tile_rows * 64 * (2 if config.num_splits == 1 else 4)
        assert config.num_stages >= 3
        assert config.num_stages * step + out < tuning.MAX_SHARED_BYTES - 1024
    assert num_supported > 200


def test_hopper_gemm_computes_two_tiles_per_program_if_there_are_few_sms():
    """With one tile per program, there would be more programs than SMs."""
    assert _few_rows(64, 1024, 8448).num_consumers == 1
    assert _few_rows(64, 1024, 8576).num_consumers == 2
    # The GEMM has 133 tiles. An odd number of tiles cannot be paired.
    assert _few_rows(64, 1024, 8512) is None
    assert _few_rows(256, 1024, 6144) == gemm_tuning.FewRowsConfig(1, 128, 2, 6)
    assert _few_rows(64, 4096, 16896).num_consumers == 2
    # The GEMM would need 136 programs of two tiles, but there are 132 SMs.
    assert _few_rows(64, 4096, 17408) is None


def test_hopper_gemm_is_chosen_for_few_rows_on_hopper():
    assert _few_rows(64, 1024, 4096) is not None
    others = {"device_kind": "NVIDIA A100", "num_cores": None, "itemsize": 4}
    for name, value in others.items():
        assert _few_rows(64, 1024, 4096, **{name: value}) is None
    sizes = [(rows, 1024, 4096) for rows in (0, 12, 264, 72 + 128)]
    sizes += [(64, 1000, 4096), (64, 1024, 4100), (192, 4096, 4096)]
    sizes += [(64, 0, 64), (64, 1024, 0), (64, 0, 0)]
    assert [_few_rows(*size) for size in sizes] == [None] * len(sizes)
    assert _few_rows(64, 1024, 3072, num_factors=2).num_splits == 1
    # The gate weight and the up weight have 2**24 numbers in total. For more than 128 rows, XLA
    # computes GEMMs whose weights have more than 2**23 numbers in total.
    assert _few_rows(192, 2048, 4096, num_factors=2) is None


def _gated_gemm(rows, depth, width, **changes) -> Any:
    facts: Any = {"itemsize": 2, "num_cores": 132, "device_kind": "NVIDIA H200"} | changes
    return gemm_tuning.many_rows_config(GemmProblem(rows, depth, width, num_factors=2, **facts))


def test_hopper_gated_gemm_of_many_rows_runs_only_if_it_keeps_sms_busy():
    counts = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
    wide, narrow = (
        [rows for rows in counts if _gated_gemm(rows, *shape)]
        for shape in ((4096, 14336), (1024, 3072))
    )
    # With a width of 14,336, the GEMM has at least 112 tiles for any number of rows.
    assert wide == [*counts]
    # With a width of 3,072 and fewer than 2,048 rows, many of the 132 SMs would be idle while the
    # other SMs compute the last tiles.
    assert narrow == [2048, 3072, 4096, 6144, 8192]


def test_hopper_gated_gemm_of_many_rows_needs_whole_tiles():
    config = _gated_gemm(256, 4096, 14336)
    assert config == gemm_tuning.ManyRowsConfig(num_stages=4, num_programs=132)
    step, out = (128 + 2 * 128) * 64 * 2, 128 * 128 * 2
    assert config.num_stages * step + out < tuning.MAX_SHARED_BYTES - 1024
    others = {"device_kind": "NVIDIA A100", "num_cores": None, "itemsize": 4}
    for name, value in others.items():
        assert _gated_gemm(256, 4096, 14336, **{name: value}) is None
    sizes = [(0, 4096, 14336), (192, 4096, 14336), (256, 4000, 14336)]
    sizes += [(256, 4096, 14400), (256, 0, 14336), (256, 4096, 0)]
    assert [_gated_gemm(*size) for size in sizes] == [None] * len(sizes)


def test_k_dimension_is_a_multiple_of_the_number_of_gemm_splits():
    for depth in (32, 80, 768, 2560):
        count = gemm_tuning.num_splits(GemmProblem(8, depth, 1024, itemsize=2))
        assert depth % count == 0


def _fp8(rows, depth, width, factors=1, *, grouped=False, kind="NVIDIA H200") -> Any:
    """Return the few-rows configuration and the many-rows configuration of an FP8 GEMM."""
    gemm = GemmProblem(rows, depth, width, 1, factors, num_cores=132, device_kind=kind)
    few = gemm_tuning.few_fp8_rows_config(gemm, grouped=grouped)
    return few, gemm_tuning.many_fp8_rows_config(gemm, grouped=grouped)


@pytest.mark.parametrize("grouped", [False, True])
def test_fp8_gemm_tiles_fit_shared_memory_and_divide_the_weight_evenly(grouped):
    shapes = itertools.product((1024, 1920, 4096, 14336), (1024, 6144, 14336, 28672), (1, 2))
    for (depth, width, factors), rows in itertools.product(shapes, (8, 24, 64, 120, 192, 256)):
        few, _ = _fp8(rows, depth, width, factors, grouped=grouped)
        if few is None:
            continue
        stage = (few.num_consumers * factors * 64 + few.tile_rows) * 128
        out = few.num_consumers * few.tile_rows * 64 * (2 if few.num_splits == 1 else 4)
        assert few.num_stages * stage + out + 2048 <= tuning.MAX_SHARED_BYTES
        assert few.num_stages >= 2
        assert few.tile_rows <= 128
        assert depth % (few.num_splits * 128) == width % (few.num_consumers * 64) == 0


def test_channel_scaled_gemms_use_xla_if_the_kernel_leaves_sms_idle():
    # The kernel would need 224 programs, but there are 132 SMs.
    assert _fp8(64, 4096, 28672)[0] is None
    assert _fp8(64, 4096, 28672, grouped=True)[0] is not None
    # With 96 wide tiles, 36 of 132 SMs would be idle. With 192 narrow tiles, 72 SMs would be idle
    # in the second round.
    assert _fp8(512, 4096, 6144)[1] is None
    assert _fp8(512, 4096, 6144, grouped=True)[1] is not None
    # The GEMM has 128 narrow tiles or 64 wide tiles. Narrow tiles keep more SMs busy.
    assert _fp8(512, 4096, 4096)[1].num_factors == 1
    assert _fp8(8192, 4096, 4096)[1].num_factors == 2
    assert _fp8(2048, 1024, 1024)[1].num_factors == 1
    # A tile of a gated GEMM always has two blocks of columns: one of the gate, one of up.
    assert _fp8(256, 4096, 14336, 2)[1].num_factors == 2


@pytest.mark.parametrize("grouped", [False, True])
def test_hopper_fp8_gemms_need_a_hopper_gpu_and_whole_tiles(grouped):
    for kind in ("NVIDIA A100", ""):
        assert _fp8(64, 4096, 4096, grouped=grouped, kind=kind)[0] is None
        assert _fp8(512, 4096, 4096, grouped=grouped, kind=kind)[1] is None
    for rows, depth, width in ((12, 4096, 4096), (64, 4160, 4096), (64, 4096, 4000), (0, 128, 128)):
        assert _fp8(rows, depth, width, grouped=grouped) == (None, None)
    assert _fp8(320, 4096, 4096, grouped=grouped) == (None, None)


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Create a table of tuned parameters, and return the name of its GPU.

    Tables are cached by name, so each test gets a new name.
    """
    size = "head_size=128,itemsize=2"
    table = {"decode": {size: {"tile_tokens": 32}}, "write": {size: {"chunk": 512}}}
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / f"{tmp_path.name}.json").write_text(json.dumps(table))
    monkeypatch.setattr(tuning.resources, "files", lambda _: tmp_path)
    return tmp_path.name


def test_tuned_table_of_a_gpu_overrides_launch_parameters(gpu):
    facts = {"head_size": 128, "itemsize": 2, "device_kind": gpu}
    assert kv_cache_triton.move_config("write", **facts).chunk == 512
    assert kv_cache_triton.move_config("copy", **facts).chunk == kv_cache_triton.MoveConfig().chunk
    assert _decode(device_kind=gpu).tile_tokens == 32
    assert _decode(device_kind=gpu, head_size=64).tile_tokens == 64
    assert _decode(device_kind="Other GPU").tile_tokens == 64
