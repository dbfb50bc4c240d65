"""Draw each picture of docs/how_it_works.md as SVG from the states of the scenes."""

from collections.abc import Callable
from itertools import pairwise

from examples.ladder import rung_1_naive, rung_2_two_pass, rung_5_ragged
from examples.ladder.workload import BLOCK_SIZE as LADDER_BLOCK_SIZE
from examples.ladder.workload import make_workload
from tools.how_it_works import scenes
from tools.how_it_works.drawing import SLOT_HEIGHT, Picture, slot_width
from tools.how_it_works.scenes import BLOCK_SIZE, Snapshot, Table

ROW = 32
TOP = 92
LABEL = 68
"""Width in pixels of the space for the name of a block, left of the pool."""


def paged_attention() -> str:
    """Draw figure 5: a query attends to keys and values in blocks anywhere in the pool."""
    snapshot, query = scenes.attending()
    (table,) = snapshot.tables
    width = _slot_width(snapshot)
    picture = Picture(760, 394, "Figure 5: a query attends to blocks that lie anywhere in the pool")
    pool_x = 310
    ys = _pool(picture, pool_x, snapshot, lambda _: "a", width)
    middle = sum(ys[b] for b in table.block_table) / len(table.block_table)
    picture.text(24, middle - 24, "query of the token")
    picture.box(24, middle - 14, 120, 30, "b")
    picture.text(84, middle + 6, query, "strong", "middle")
    for offset, block_id in enumerate(sorted(table.block_table)):
        picture.arrow(144, middle + (offset - 1) * 8, pool_x - LABEL, ys[block_id], "b")
    for index, block_id in enumerate(table.block_table):
        words = f"logical block {index}"
        picture.text(pool_x + 4 * width + 14, ys[block_id] + 4, words, "dim")
    order = ", ".join(map(str, table.block_table))
    caption = f"{table.num_computed_tokens} tokens; the block table names blocks {order}."
    _caption(picture, caption)
    return picture.render()


def block_table() -> str:
    """Draw figure 6: the block table maps logical blocks to physical blocks."""
    *_, snapshot = scenes.decoding()
    (table,) = snapshot.tables
    width = _slot_width(snapshot)
    picture = Picture(1000, 394, "Figure 6: the block table of request A")
    table_x, pool_x = 410, 710
    picture.text(24, TOP - 18, "logical blocks of A", "strong")
    picture.text(table_x, TOP - 18, "block table", "strong")
    picture.text(table_x, TOP + 4, "physical block", "dim small")
    picture.text(table_x + 92, TOP + 4, "filled", "dim small")
    ys = _pool(picture, pool_x, snapshot, lambda _: "a", width)
    for index, (block_id, filled) in enumerate(zip(table.block_table, table.filled, strict=True)):
        y = TOP + 30 + index * ROW
        picture.text(24, y + 4, str(index), "dim")
        picture.slots(44, y - 12, snapshot.words[block_id], "a", width)
        picture.box(table_x, y - 12, 90, SLOT_HEIGHT, "card", r=0)
        picture.box(table_x + 90, y - 12, 50, SLOT_HEIGHT, "card", r=0)
        picture.text(table_x + 45, y + 4, str(block_id), anchor="middle")
        picture.text(table_x + 115, y + 4, str(filled), anchor="middle")
        picture.arrow(48 + 4 * width, y, table_x - 4, y)
        picture.arrow(table_x + 142, y, pool_x - LABEL, ys[block_id], "a")
    _caption(picture, "Dashed slots are reserved for the next tokens; gray blocks are free.")
    return picture.render()


def two_requests() -> str:
    """Draw figure 7: two requests in one pool."""
    snapshot = scenes.two_requests()
    sides = (("request A", snapshot.table("A"), "a"), ("request B", snapshot.table("B"), "b"))
    return _mapping(
        "Figure 7: two requests in one pool",
        snapshot,
        sides,
        "Neither request is contiguous, and neither waits for a contiguous stretch to be free.",
    )


def parallel_sampling() -> str:
    """Draw figure 8: two samples share the blocks of a prompt until one of them writes."""
    *_, copied, later = scenes.sampling()
    ((copy, source),) = copied.copies.items()
    samples = [later.table("A", index) for index in (0, 1)]
    sides = (("sample A1", samples[0], "a"), ("sample A2", samples[1], "b"))
    caption = (
        f"Both samples hold block {samples[0].block_table[0]}. A1 was about to write in block "
        f"{source}, which A2 held too: it was copied to block {copy} first."
    )
    title = "Figure 8: two samples of one prompt, and a copy on write"
    return _mapping(title, later, sides, caption, (source, copy))


def shared_prefix() -> str:
    """Draw figure 10: two prompts with a common prefix."""
    snapshot, _ = scenes.shared_prefix()
    sides = (("request A", snapshot.table("A"), "a"), ("request B", snapshot.table("B"), "b"))
    num_shared = sum(count > 1 for count in snapshot.counts.values())
    caption = f"The {num_shared} full blocks of the common prefix are computed once and held twice."
    title = "Figure 10: two prompts with one prefix"
    return _mapping(title, snapshot, sides, caption, joined=True)


def beam_search() -> str:
    """Draw figure 9: the blocks of four beams as a tree, before and after two of the beams end."""
    before, after = scenes.searching()
    words = {**before.words, **after.words}
    levels, column, box_width, box_height = len(before.tables[0].block_table), 208, 176, 44
    ys = _tree(before, after, first_y=134, leaf_gap=104, child_gap=52)
    picture = Picture(24 + (levels + 1) * column, 550, "Figure 9: beam search, four beams")
    tables = [*before.tables, *after.tables]
    places = {(b, level) for table in tables for level, b in enumerate(table.block_table)}
    for block_id, level in sorted(places, key=lambda place: (place[1], ys[place[0]])):
        x, y, count = 24 + level * column, ys[block_id], after.counts[block_id]
        look = "s" if count > 1 else "a" if count else "empty dashed"
        picture.box(x, y - box_height / 2, box_width, box_height, look)
        state = f"held by {count}" if count else "given back"
        picture.text(x + 8, y - 5, f"block {block_id}", "strong" if count else "dim")
        picture.text(x + box_width - 8, y - 5, state, "dim small", "end")
        picture.text(x + 8, y + 14, " ".join(words[block_id]), "" if count else "dim")
    edges = {(level, *pair) for t in tables for level, pair in enumerate(pairwise(t.block_table))}
    for level, parent, child in sorted(edges):
        x = 24 + level * column + box_width
        picture.arrow(x + 1, ys[parent], x + column - box_width - 1, ys[child])
    x = 24 + levels * column - (column - box_width) / 2
    picture.line(x, 60, x, 506, "dotted")
    picture.text(x - 10, 70, "before the step", "dim", "end")
    picture.text(x + 10, 70, "after it", "dim")
    *freed, last = (b for b in sorted(before.words) if not after.counts[b])
    freed = f"{', '.join(map(str, freed))} and {last}"
    caption = (
        f"The best four continuations come from two beams; blocks {freed} of the others are given "
        f"back. Blocks copied: {len(after.copies)}."
    )
    _caption(picture, caption)
    return picture.render()


def steps() -> str:
    """Draw what each request computes in each step, and which request is preempted."""
    turns, num_blocks = scenes.pressing()
    cell, left, kinds = 74, 116, {"A": "a", "B": "b", "C": "c"}
    right = left + len(turns) * cell
    picture = Picture(right + 18, 372, "Steps of the scheduler in a pool that is too small")
    picture.text(24, 66, "step", "dim small")
    for number, turn in enumerate(turns):
        x = left + number * cell
        middle = x + cell / 2 - 3
        picture.text(middle, 66, str(number + 1), "dim small", "middle")
        for row, (name, kind) in enumerate(kinds.items()):
            if name not in turn.statuses:
                continue
            tokens, is_preempted = turn.num_tokens.get(name), name in turn.preempted
            look = kind if tokens else "bad" if is_preempted else "empty dashed"
            words = str(tokens) if tokens else "preempted" if is_preempted else "waits"
            picture.box(x, 78 + row * 46, cell - 6, 36, look)
            size = "small" if not tokens else "strong" if tokens > 1 else ""
            picture.text(middle, 101 + row * 46, words, size, "middle")
        used = num_blocks - turn.num_free
        picture.box(x, 320 - used * 10, cell - 6, used * 10, "s", r=0)
        picture.text(middle, 334 - used * 10, str(used), "small", "middle")
    for row, name in enumerate(kinds):
        picture.text(24, 101 + row * 46, f"request {name}", "strong")
    picture.text(24, 276, "blocks held")
    picture.text(24, 292, f"of {num_blocks}", "dim small")
    picture.line(left, 320 - num_blocks * 10, right - 6, 320 - num_blocks * 10, "dotted")
    picture.line(left, 320, right - 6, 320)
    _caption(picture, "Tokens that each request computes in a step; bold: prefill.")
    return picture.render()


def padding() -> str:
    """Draw the (query, key) pairs that the naive kernel computes, and below, the pairs that the
    ragged kernel computes.

    Each sequence has a square with a row per query and a column per key. Pairs that a kernel
    computes only for padding are red.
    """
    work = make_workload()
    longest, gap = max(work.lengths), 24
    picture = Picture(4 * (longest + gap) + 180, 470, "Queries against keys: what is computed")
    *_, tiles = rung_5_ragged.prepare(work)
    costs = [rung.cost(work) for rung in (rung_1_naive, rung_5_ragged)]
    labels = ("naive", "ragged")
    for row, (label, cost) in enumerate(zip(labels, costs, strict=True)):
        y = 70 + row * (longest + 60)
        picture.text(24, y + 16, label, "strong")
        picture.text(24, y + 38, f"{cost.waste:.1%} padding")
        picture.text(24, y + 58, f"{cost.num_pairs:,} pairs", "dim")
        picture.text(24, y + 78, f"{cost.num_slots} slots held", "dim")
        for index, length in enumerate(work.lengths):
            x = 156 + index * (longest + gap)
            if row == 0:
                picture.box(x, y, longest, longest, "bad", r=0)
                picture.box(x, y, length, length, "a", r=0)
            for sequence, _, at, rows in tiles.tolist() if row == 1 else ():
                if sequence == index:
                    keys = -(-(at + rows) // LADDER_BLOCK_SIZE) * LADDER_BLOCK_SIZE
                    picture.box(x, y + at, keys, rung_5_ragged.TILE, "bad", r=0)
                    picture.box(x, y + at, at + rows, rows, "a", r=0)
            picture.line(x, y, x + length, y + length)
            picture.text(x, y + longest + 20, f"{length} tokens", "dim")
    _caption(picture, "Blue: two tokens. Red: padding. Right of the diagonal a query sees no key.")
    return picture.render()


def slots() -> str:
    """Draw the slots that a contiguous cache and a block pool hold for the same sequences."""
    work, scale, kinds, left = make_workload(), 7, "abcs", 122
    longest, size = max(work.lengths), LADDER_BLOCK_SIZE
    picture = Picture(left + longest * scale + 24, 362, "Slots held for the same four sequences")
    picture.text(24, 76, "contiguous", "strong")
    picture.text(24, 94, f"{rung_1_naive.cost(work).num_slots} slots", "dim")
    for row, (length, kind) in enumerate(zip(work.lengths, kinds, strict=True)):
        y = 60 + row * 34
        _filled(picture, left, y, length, longest, scale, kind)
        words = f"{length} tokens" if length > size else str(length)
        picture.text(left + length * scale / 2, y + 16, words, anchor="middle")
    picture.text(24, 238, "blocks", "strong")
    picture.text(24, 256, f"{rung_2_two_pass.cost(work).num_slots} slots", "dim")
    owners = {
        block_id: (kind, min(size, length - index * size))
        for table, length, kind in zip(work.block_tables(), work.lengths, kinds, strict=True)
        for index, block_id in enumerate(table)
    }
    per_row = longest // size
    for block_id in range(1 + work.num_blocks):
        x = left + block_id % per_row * size * scale
        y = 222 + block_id // per_row * 52
        kind, filled = owners.get(block_id, ("free", size))
        picture.text(x + 4, y - 4, f"block {block_id}", "dim small")
        _filled(picture, x, y, filled, size, scale, kind)
    _caption(
        picture, "One colour a sequence; red slots are held and empty. Block 0 is for padding."
    )
    return picture.render()


FIGURES: dict[str, Callable[[], str]] = {
    "slots": slots,
    "padding": padding,
    "fig05_paged_attention": paged_attention,
    "fig06_block_table": block_table,
    "fig07_two_requests": two_requests,
    "fig08_parallel_sampling": parallel_sampling,
    "fig09_beam_search": beam_search,
    "fig10_shared_prefix": shared_prefix,
    "steps": steps,
}
"""Maps each file name in docs/how_it_works/, without `.svg`, to the function that draws it."""


def _mapping(
    title: str,
    snapshot: Snapshot,
    sides: tuple[tuple[str, Table, str], tuple[str, Table, str]],
    caption: str,
    copy: tuple[int, int] | None = None,
    joined: bool = False,
) -> str:
    """Draw a sequence on each side of the pool, with arrows from logical to physical blocks.

    `copy` names a block and the block to which it was copied. If `joined` is true, the words of a
    logical block are drawn as one text.
    """
    width = _slot_width(snapshot)
    block, gap, held_by = BLOCK_SIZE * width, 100, 56
    side = slot_width(" ".join(words) for words in snapshot.words.values()) if joined else block
    pool_x = 44 + side + gap + LABEL
    right_x = pool_x + block + held_by + gap
    bottom = TOP + len(snapshot.counts) * ROW
    picture = Picture(int(right_x + side + 44), bottom + 52, title)
    kinds = {b: kind for _, table, kind in sides for b in table.block_table}
    kinds |= {b: "s" for b, count in snapshot.counts.items() if count > 1}
    ys = _pool(picture, pool_x, snapshot, lambda block_id: kinds[block_id], width)
    picture.text(pool_x + block + held_by / 2, TOP - 18, "held by", "dim small", "middle")
    for block_id, y in ys.items():
        count = snapshot.counts[block_id]
        look = "strong" if count > 1 else "dim"
        if count:
            picture.text(pool_x + block + held_by / 2, y + 4, str(count), look, "middle")
    for heading, table, kind in sides:
        is_left = table is sides[0][1]
        x = 44 if is_left else right_x
        picture.text(x, TOP - 18, heading, "strong")
        for index, block_id in enumerate(table.block_table):
            y, words = TOP + 12 + index * ROW, snapshot.words[block_id]
            picture.text(24 if is_left else x + side + 10, y + 4, str(index), "dim")
            if joined:
                picture.box(x, y - 12, side, SLOT_HEIGHT, kinds[block_id])
                picture.text(x + side / 2, y + 4, " ".join(words), anchor="middle")
            else:
                picture.slots(x, y - 12, words, kinds[block_id], width)
            if is_left:
                picture.arrow(x + side + 4, y, pool_x - LABEL, ys[block_id], kind)
            else:
                picture.arrow(x - 4, y, pool_x + block + held_by, ys[block_id], kind)
    if copy is not None:
        x, start, end = pool_x + block / 2, ys[copy[0]] + 12, ys[copy[1]] - 12
        picture.down(x, start, end)
        picture.text(x + 10, (start + end) / 2 + 4, "copied on write", "small")
    _caption(picture, caption)
    return picture.render()


def _tree(
    before: Snapshot, after: Snapshot, first_y: float, leaf_gap: float, child_gap: float
) -> dict[int, float]:
    """Return the y coordinate of each block in a drawing of beam search as a tree of blocks.

    In the tree, each block of a beam is the parent of the beam's next block. The last blocks of the
    beams are the leaves. A step of beam search leads from the state `before` to the state `after`.

    Args:
        before: State whose leaves are `leaf_gap` apart. A parent is in the middle of its children.
        after: State whose leaves are in the middle of their parent, `child_gap` apart.
        first_y: The y coordinate of the first leaf of `before`.
        leaf_gap: Distance between leaves of `before`.
        child_gap: Distance between leaves of `after` with the same parent.
    """
    order = [b for table in before.tables for b in table.block_table]
    paths = sorted((t.block_table for t in before.tables), key=lambda p: [*map(order.index, p)])
    ys = {path[-1]: first_y + rank * leaf_gap for rank, path in enumerate(paths)}
    for level in range(len(paths[0]) - 2, -1, -1):
        for block_id in {path[level] for path in paths}:
            children = {path[level + 1] for path in paths if path[level] == block_id}
            ys[block_id] = sum(ys[child] for child in children) / len(children)
    heirs: dict[int, list[int]] = {}
    for *_, parent, child in (table.block_table for table in after.tables):
        heirs.setdefault(parent, []).append(child)
    for parent, children in heirs.items():
        for index, child in enumerate(children):
            ys[child] = ys[parent] + (index - (len(children) - 1) / 2) * child_gap
    return ys


def _pool(
    picture: Picture, x: float, snapshot: Snapshot, kind_of: Callable[[int], str], width: float
) -> dict[int, float]:
    """Draw the physical blocks below each other, and return the y coordinate of each block."""
    picture.text(x, TOP - 18, "physical blocks", "strong")
    ys = {}
    for row, block_id in enumerate(snapshot.counts):
        y = TOP + 12 + row * ROW
        words = snapshot.words.get(block_id, [])
        picture.text(x - 8, y + 4, f"block {block_id}", "dim" if not words else "", "end")
        picture.slots(x, y - 12, words, kind_of(block_id) if words else "free", width)
        ys[block_id] = y
    return ys


def _filled(
    picture: Picture, x: float, y: float, filled: int, size: int, scale: int, kind: str
) -> None:
    """Draw a row of `size` slots, each `scale` wide. The first `filled` slots hold tokens."""
    picture.box(x, y, filled * scale, SLOT_HEIGHT, kind, r=0)
    if filled < size:
        picture.box(x + filled * scale, y, (size - filled) * scale, SLOT_HEIGHT, "bad", r=0)


def _slot_width(snapshot: Snapshot) -> float:
    return slot_width(word for words in snapshot.words.values() for word in words)


def _caption(picture: Picture, words: str) -> None:
    picture.text(24, picture.height - 20, words, "dim")
