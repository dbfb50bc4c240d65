"""The dashboard's paged memory on the wire: frames, and the state they add up to.

A frame is what changed since the frame before it, plain enough for JSON:

    step     steps the engine took so far
    ids      blocks that changed, as runs: first id, how many, first id, how many ...
    counts   of those blocks, as runs (value, how many ...): block tables and pins that hold it,
             0 if free, -1 if free and its content kept
    hashes   of those blocks, packed uint32: 32 bits of the hash of its content, 0 if not known
    tables   sequences that are new or changed: [seq_id, request_id, index, status, prompt tokens,
             computed tokens, entries of the block table that stay, host blocks, packed new entries]
    grown    seq_id, computed tokens, seq_id, computed tokens ...
    gone     seq_ids that hold nothing any more
    images   [request_id, blocks] of each group in host memory        \\
    pinned   ids of all pinned blocks                                  \\ only if they changed,
    tokens   by block id, the tokens it holds, as far as known         / or there are any
    copies   source, target ... of the blocks that are copied         /

Viewers get no tokens, but where the server shows text:

    text     by block id, the text of each of its tokens

Packed integers are little-endian, in base64. A snapshot is the frame that leads from nothing to the
state, so that a reader needs to understand one form only.
"""

import base64
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jpaged import PoolChanges

Frame = dict[str, Any]

MAX_TEXTS = 10_000
"""Blocks whose text a state keeps for later viewers; the oldest are dropped."""


def encode(changes: PoolChanges, step: int) -> Frame:
    """The frame of some changes, seen after so many steps."""
    blocks = changes.blocks
    frame: Frame = {
        "step": step,
        **_pack_blocks(
            np.array(blocks.block_ids, np.int64),
            np.array(blocks.counts, np.int64),
            np.array(blocks.content_hashes, np.uint32),
        ),
        "tables": [
            [
                *(table.seq_id, table.request_id, table.index, table.status),
                *(table.num_prompt_tokens, table.num_computed_tokens, table.num_kept),
                *(table.num_host_blocks, pack(np.array(table.new_blocks, np.uint32))),
            ]
            for table in changes.tables
        ],
        "grown": [number for pair in changes.grown.items() for number in pair],
        "gone": changes.gone,
    }
    if changes.images is not None:
        frame["images"] = [list(image) for image in changes.images]
    if changes.pinned is not None:
        frame["pinned"] = changes.pinned
    if changes.copies:
        frame["copies"] = [block for copy in changes.copies.items() for block in reversed(copy)]
    if changes.tokens:
        frame["tokens"] = {str(block): ids for block, ids in changes.tokens.items()}
    return frame


def for_viewers(frame: Frame, word: Callable[[int], str] | None = None) -> Frame:
    """The frame for viewers: with the text of its tokens, `word` of each, or without any."""
    shown = {name: part for name, part in frame.items() if name != "tokens"}
    if word is not None and "tokens" in frame:
        shown["text"] = {block: [*map(word, ids)] for block, ids in frame["tokens"].items()}
    return shown


class PoolState:
    """What all frames so far add up to, kept for viewers that begin, or lag.

    Args:
        num_blocks: Blocks of the pool, the null block counted.
    """

    def __init__(self, num_blocks: int):
        self.step = 0
        self.counts = np.zeros(num_blocks, np.int64)
        self.hashes = np.zeros(num_blocks, np.uint32)
        self.tables: dict[int, list[Any]] = {}  # as in a frame, but the last entry an array
        self.images: list[list[Any]] = []
        self.pinned: list[int] = []
        self.text: dict[str, list[str]] = {}

    def apply(self, frame: Frame) -> None:
        """Take the next frame in."""
        self.step = frame["step"]
        ids = expand_ranges(frame["ids"])
        counts, hashes = expand_runs(frame["counts"]), unpack(frame["hashes"])
        if self.text:
            taken = (self.counts[ids] <= 0) & (counts > 0) & (hashes == 0)
            self._forget_text(ids[taken | (counts == 0)].tolist())
        self.counts[ids], self.hashes[ids] = counts, hashes
        for seq_id in frame["gone"]:
            self.tables.pop(seq_id, None)
        for *head, num_kept, num_host_blocks, packed in frame["tables"]:
            before = self.tables.get(head[0])
            kept = unpack("") if before is None else before[-1][:num_kept]
            table = np.concatenate([kept, unpack(packed)])
            self.tables[head[0]] = [*head, num_host_blocks, table]
        for seq_id, num_computed in zip(frame["grown"][::2], frame["grown"][1::2], strict=True):
            self.tables[seq_id][5] = num_computed
        self.images = frame.get("images", self.images)
        self.pinned = frame.get("pinned", self.pinned)
        self._keep_text(frame.get("text", {}))

    def snapshot(self) -> Frame:
        """The frame that leads here from nothing."""
        ids = np.flatnonzero(self.counts)
        frame: Frame = {
            "step": self.step,
            **_pack_blocks(ids, self.counts[ids], self.hashes[ids]),
            "tables": [
                [*head, 0, num_host_blocks, pack(table)]
                for *head, num_host_blocks, table in self.tables.values()
            ],
            "grown": [],
            "gone": [],
            "images": self.images,
            "pinned": self.pinned,
        }
        return {**frame, "text": self.text} if self.text else frame

    def _forget_text(self, block_ids: list[int]) -> None:
        """Of blocks that hold nothing any more, or something else."""
        for block_id in block_ids:
            self.text.pop(str(block_id), None)

    def _keep_text(self, text: dict[str, list[str]]) -> None:
        for block_id, words in text.items():
            self.text.pop(block_id, None)
            self.text[block_id] = words
        while len(self.text) > MAX_TEXTS:
            del self.text[next(iter(self.text))]


def _pack_blocks(ids: np.ndarray, counts: np.ndarray, hashes: np.ndarray) -> Frame:
    return {"ids": ranges_of(ids), "counts": runs_of(counts), "hashes": pack(hashes)}


def pack(numbers: np.ndarray) -> str:
    """Integers below 2**32 as base64."""
    return base64.b64encode(numbers.astype("<u4").tobytes()).decode()


def unpack(packed: str) -> np.ndarray:
    """What `pack` packed."""
    return np.frombuffer(base64.b64decode(packed), "<u4")


def runs_of(values: np.ndarray) -> list[int]:
    """Values as (value, how many) one after the other."""
    return _pairs(values, np.diff(values) != 0)


def ranges_of(ids: np.ndarray) -> list[int]:
    """Rising ids as (first, how many) one after the other."""
    return _pairs(ids, np.diff(ids) != 1)


def expand_runs(runs: list[int]) -> np.ndarray:
    """What `runs_of` was given."""
    return np.repeat(np.array(runs[::2], np.int64), runs[1::2])


def expand_ranges(ranges: list[int]) -> np.ndarray:
    """What `ranges_of` was given."""
    pairs: Iterable[tuple[int, int]] = zip(ranges[::2], ranges[1::2], strict=True)
    parts = [np.arange(first, first + count) for first, count in pairs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _pairs(values: np.ndarray, breaks: np.ndarray) -> list[int]:
    """The first of each part between breaks, and the part's length."""
    if not len(values):
        return []
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    lengths = np.diff(np.concatenate([starts, [len(values)]]))
    return np.stack([values[starts], lengths], axis=1).ravel().tolist()
