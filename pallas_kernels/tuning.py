"""Launch parameters of the Triton kernels: a frozen config an op, and pure functions to choose it.

A heuristic sees static facts only. `tuned/<device kind>.json`, where there is one, overrides fields
of its choice: `{"decode": {"head_size=128,itemsize=2": {"tile_tokens": 64}}, ...}`. An empty entry
says that the op was swept and the heuristic stays; `"swept"`, for readers only, says when, and with
what. Nothing is ever tuned while serving.
"""

import dataclasses
import functools
import json
from importlib import resources

MAX_SPLIT_ROWS = 256  # above, a product has tiles enough, and its parts cost more than they save
MIN_PART_DEPTH = 128
UNSPLIT_WIDTH = 132 * 128  # columns that give each SM of a large GPU a tile of 128
SMALL_BATCH = 8  # rows that mostly stand for fewer sequences


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Of paged_decode.py: keys a tile, most splits of a sequence, warps, pipeline stages, the
    programs that the splits in use should come to, and the least tiles that are worth a split.

    Where there are sequences enough, `share_percent` of their mean length is what a split should
    have, in place of an even share of `target_programs`: only the longer ones are split.
    """

    tile_tokens: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 2
    target_programs: int = 528
    min_tiles: int = 1
    share_percent: int | None = None


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Of paged_prefill.py: query rows (tokens x group) and keys a tile, warps, pipeline stages."""

    tile_rows: int
    tile_tokens: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class MoveConfig:
    """Of kv_write.py and block_copy.py: elements a program moves, warps."""

    chunk: int = 2048
    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Of rope_write.py: rows (heads of tokens; a power of two) a program, warps."""

    tile_rows: int
    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Of add_norm.py, where one program has a whole row: columns loaded at once, warps."""

    tile: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class GatedConfig:
    """Of silu.py: columns a program, warps."""

    tile: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class TruncationConfig:
    """Of truncation.py: tokens a program, a load, a load that is packed; loads in flight; tokens
    collected of a strip.

    Loads and what is collected are powers of two; a chunk is a whole number of turns of either.
    """

    chunk: int = 10240
    tile: int = 256
    packed_tile: int = 512
    loads: int = 4
    capacity: int = 128

    def num_turns(self, tile: int) -> int:
        """Of a program's loop with loads of `tile`."""
        return self.chunk // (tile * self.loads)


@dataclasses.dataclass(frozen=True)
class ScoresConfig:
    """Of scores.py: tokens a program, warps of either launch, tokens a turn of a rank that is
    counted; powers of two."""

    chunk: int = 4096
    scan_warps: int = 4
    finish_warps: int = 4
    rank_tile: int = 4096


def decode_config(
    *,
    batch: int,
    num_kv_heads: int,
    head_size: int,
    itemsize: int,
    max_context: int,
    num_cores: int = 132,
    device_kind: str = "",
) -> DecodeConfig:
    """For `batch` sequences of at most `max_context` tokens on a GPU of `num_cores` SMs."""
    tile = _key_tile(head_size, itemsize)
    # About two programs an SM keep the memory busy; a split should have a tile of its own to read.
    # The smallest bucket may hold a lone sequence; splits that it does not use cost little.
    rows = 1 if batch <= SMALL_BATCH else batch
    wanted = _power_of_two(-(-2 * num_cores // (rows * num_kv_heads)))
    programs, many = batch * num_kv_heads, wanted == 1
    if many and programs > 12 * num_cores:  # an SM has more at once if their tiles are small
        tile = min(tile, 32)
    # A long sequence among short ones may have more splits than all could have.
    splits = max(1, min(max(wanted, 8), 32, -(-max_context // tile)))
    config = DecodeConfig(
        tile,
        splits,
        # Of many programs the warps have less to wait for.
        num_warps=2 if itemsize <= 2 and (many or splits == 1) else 4,
        target_programs=4 * num_cores,
        share_percent=(110 if programs <= 4 * num_cores else 150) if many else None,
    )
    return _tuned("decode", head_size, itemsize, device_kind, config)


def takes_decode_rows_apart(*, num_tokens: int, batch: int) -> bool:
    """Whether a ragged batch launches decode attention besides, for its one-token sequences.

    One of them fills a tile of its own in prefill attention, and reads its keys at half the speed.
    In the smallest bucket a launch more costs as much as it saves.
    """
    return SMALL_BATCH < batch <= num_tokens


def prefill_config(
    *,
    num_tokens: int,
    batch: int,
    group: int,
    head_size: int,
    itemsize: int,
    device_kind: str = "",
) -> PrefillConfig:
    """For `num_tokens` query tokens of `batch` sequences, `group` query heads a KV head.

    Two warp groups of 128 rows each are the fastest on long sequences, as far as registers hold
    the float32 output; short sequences waste less of a small tile.
    """
    group_rows = _power_of_two(group)
    key_tile = _key_tile(head_size, itemsize)
    row_bytes = _power_of_two(head_size) * itemsize
    if num_tokens // batch * group_rows < 2048 or row_bytes > 512 or itemsize > 2:
        config = PrefillConfig(max(64, group_rows), min(32, key_tile), num_warps=4, num_stages=2)
    else:
        rows = max(256 if row_bytes <= 256 else 128, group_rows)
        config = PrefillConfig(rows, key_tile, num_warps=8, num_stages=2)
    return _tuned("prefill", head_size, itemsize, device_kind, config)


def move_config(op: str, *, head_size: int, itemsize: int, device_kind: str = "") -> MoveConfig:
    """For `op`, "write" or "copy": 2,048 elements a program keep any GPU's memory busy."""
    return _tuned(op, head_size, itemsize, device_kind, MoveConfig())


def rope_config(*, head_size: int, itemsize: int, device_kind: str = "") -> RopeConfig:
    """Whole heads of 1,024 elements in all: eight a thread, a 16-byte load in bfloat16."""
    config = RopeConfig(max(1, 1024 // _power_of_two(head_size)))
    return _tuned("rope_write", head_size, itemsize, device_kind, config)


def norm_config(*, size: int, itemsize: int) -> NormConfig:
    """For rows of `size` and an update of `itemsize` bytes an element: 16 bytes a thread."""
    elements = 32 * 16 // itemsize  # a warp
    tile = max(elements, min(32 * elements, _power_of_two(size)))
    return NormConfig(tile, num_warps=tile // elements)


def gated_config(*, num_tokens: int, size: int) -> GatedConfig | None:
    """For rows of `size` gates; None where XLA's own kernel is the better one.

    XLA splits a narrow product of few rows, and sums its parts where it computes the activation;
    before another kernel it would do so in one more. Else threads of eight elements keep the memory
    busy, and twice the threads of four are sooner done where there are few. Times on an H200:
    bench/NOTES.md.
    """
    if 2 * size < UNSPLIT_WIDTH and num_tokens <= MAX_SPLIT_ROWS:
        return None
    return GatedConfig(1024, num_warps=8 if num_tokens * size <= 1 << 20 else 4)


def product_parts(*, num_tokens: int, depth: int, width: int, itemsize: int) -> int:
    """Parts of a product of `num_tokens` rows by a weight [depth, width].

    A narrow weight gives too few tiles to keep the memory busy unless its depth is split as well.
    The numbers are the fastest in whole decode steps on an H200 (bench/NOTES.md).
    Float32 is not split: what is computed in it is meant to be reproducible.
    """
    if num_tokens > MAX_SPLIT_ROWS or itemsize > 2:
        return 1
    deep = depth >= 2048
    if num_tokens <= 16:
        parts = _parts_by_width(width, 4, 8 if deep else 4, 2 if deep else 1)
    elif num_tokens <= 64:
        parts = _parts_by_width(width, 8, 8 if deep else 4, 2 if deep else 1)
    elif num_tokens <= 128:
        parts = _parts_by_width(width, 4, 1 if deep else 2, 1)
    else:
        parts = _parts_by_width(width, 4, 2 if deep else 1, 2 if deep else 1)
    while parts > 1 and depth % (parts * MIN_PART_DEPTH):
        parts //= 2
    return parts


def _parts_by_width(width, upto_2048, upto_4096, upto_8192):
    """Wider weights have tiles enough."""
    if width > 8192:
        return 1
    return upto_2048 if width <= 2048 else upto_4096 if width <= 4096 else upto_8192


def _key_tile(head_size, itemsize):
    """Keys a tile: 16 KiB of keys, from 16 to 64; more spills or starves the pipeline."""
    return max(16, min(64, 16384 // (_power_of_two(head_size) * itemsize)))


def _power_of_two(value):
    """The least power of two that is no less."""
    return 1 << (value - 1).bit_length()


def _tuned(op, head_size, itemsize, device_kind, config):
    """Override the heuristic's choice by the device's table."""
    entry = _table(device_kind).get(op, {}).get(f"head_size={head_size},itemsize={itemsize}", {})
    return dataclasses.replace(config, **entry)


@functools.lru_cache
def _table(device_kind):
    name = device_kind.replace(" ", "_").replace("/", "_")
    file = resources.files("pallas_kernels") / "tuned" / f"{name}.json"
    return json.loads(file.read_text()) if name and file.is_file() else {}
