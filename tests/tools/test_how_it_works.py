"""Test that the pictures and numbers of docs/how_it_works.md equal a run of the allocator."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from examples.ladder import rung_1_naive, rung_5_ragged, workload
from examples.ladder.__main__ import RUNGS
from jpaged import EngineConfig
from tools.how_it_works import scenes
from tools.how_it_works.__main__ import FOLDER
from tools.how_it_works.figures import FIGURES

ROOT = Path(__file__).parents[2]
PAGE = "\n".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("how_it_works.md", "ladder.md")
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", FIGURES)
def test_committed_picture_is_current_small_and_complete(name: str):
    text = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert FIGURES[name]() == text, "run python -m tools.how_it_works"
    root = ElementTree.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert len(text) < 20_000
    assert "prefers-color-scheme:dark" in text
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert 0 <= x < x + w <= width
        assert 0 <= y < y + h <= height
    for words in root.iter(f"{SVG}text"):
        assert 0 < float(words.attrib["y"]) < height - 8
        length = len(words.text or "") * 7.5
        place = words.attrib.get("text-anchor", "start")
        left = float(words.attrib["x"]) - length * {"start": 0, "middle": 0.5, "end": 1}[place]
        assert 0 <= left < left + length <= width, words.text


def test_pages_contain_exactly_the_drawn_pictures():
    assert set(re.findall(r"\(how_it_works/(\w+)\.svg\)", PAGE)) == set(FIGURES)
    assert {file.stem for file in FOLDER.iterdir()} == set(FIGURES)


def test_links_of_the_pages_exist():
    links = re.findall(r"\]\((?!http|#)([^)#]+)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    assert len(links) > 20


def test_page_has_the_cost_table_of_the_attention_versions():
    work = workload.make_workload()
    for rung in RUNGS:
        cost, number, title = rung.cost(work), rung.TITLE[0], rung.TITLE[2:]
        path = Path(str(rung.__file__)).relative_to(ROOT)
        row = (
            f"| {number} [{title}](../{path}) | {cost.calls} | {cost.num_flops / 1e6:.1f} "
            f"| {cost.waste:.1%} | {cost.bytes_read // 1024} | {cost.num_slots} "
            f"| {cost.scores_at_once * 4 // 1024} |"
        )
        assert row in PAGE.splitlines()


def numbers_of_the_page() -> list[str]:
    """Return passages that docs/how_it_works.md should contain, with the numbers of a run."""
    work = workload.make_workload()
    naive = rung_1_naive.cost(work)
    seen = sum(n * (n + 1) // 2 for n in work.lengths)
    longest = max(work.lengths)
    seen_padded = len(work.lengths) * longest * (longest + 1) // 2
    before, after = scenes.searching()
    freed = sorted(b for b in before.words if not after.counts[b])
    shared, num_tokens = scenes.shared_prefix()
    turns, num_blocks = scenes.pressing()
    return_step = next(i for i, t in enumerate(turns, 1) if i > 6 and "C" in t.num_tokens)
    preempted_step = next(i for i, t in enumerate(turns, 1) if t.preempted)
    num_output = turns[return_step - 1].num_tokens["C"] - 5
    num_prefix = scenes.BLOCK_SIZE * sum(count == 2 for count in shared.counts.values())
    return [
        f"has {naive.num_pairs:,} pairs of a query and a key. Only {work.num_real_pairs:,} of them "
        f"are pairs of tokens: {naive.waste:.1%} are padding",
        f"which leaves {seen_padded:,} pairs. Only {seen:,} of these are pairs of tokens: "
        f"{1 - seen / seen_padded:.1%} are padding",
        f"Only {sum(work.lengths)} of the {naive.num_slots} slots hold a token",
        f"{work.num_blocks} blocks for all four sequences",
        f"a *pool* of *blocks* of {workload.BLOCK_SIZE} slots",
        f"with {workload.NUM_HEADS} heads of {workload.HEAD_SIZE} elements",
        f"tiles of {rung_5_ragged.TILE} queries",
        f"A block has {scenes.BLOCK_SIZE} slots in the pictures, "
        f"and {EngineConfig().block_size} by default in jpaged",
        f"four beams of {len(before.tables[0].block_table)} blocks each are held in "
        f"{len(before.words)} blocks",
        f"blocks {freed[0]}, {freed[1]}, {freed[2]} and {freed[3]}, which only they held, are free",
        f"B's prompt has {num_prefix + num_tokens[0]} tokens. A has computed {num_prefix} of these "
        f"tokens, so B's first step computes {num_tokens[0]}",
        f"and the pool has {num_blocks} blocks",
        f"A's prompt takes {turns[0].num_tokens['A']} tokens of the budget, and B gets the "
        f"{turns[0].num_tokens['B']}",
        f"In step {preempted_step} the blocks run out",
        f"In step {return_step}, C comes back and computes "
        f"{turns[return_step - 1].num_tokens['C']} tokens",
        f"the {turns[2].num_tokens['C']} of the prompt, and the {num_output} that C had already",
    ]


def test_numbers_on_the_page_equal_those_of_a_run():
    text = " ".join(PAGE.split())
    assert [passage for passage in numbers_of_the_page() if passage not in text] == []


def test_block_tables_equal_those_of_the_paper():
    assert [s.table("A").block_table for s in scenes.decoding()] == [(7, 1), (7, 1), (7, 1, 3)]
    assert [s.table("A").filled for s in scenes.decoding()] == [[4, 3], [4, 4], [4, 4, 1]]
    both = scenes.two_requests()
    assert (both.table("A").block_table, both.table("B").block_table) == ((7, 1, 3), (5, 2))


def test_blocks_in_block_table_order_hold_the_tokens_of_the_sequence():
    snapshot, query = scenes.attending()
    words = [w for b in snapshot.table("A").block_table for w in snapshot.words[b]]
    assert words == [*scenes.GETTYSBURG.split(), "fathers", "brought", "forth"]
    assert query == "forth"


def test_samples_share_a_block_until_one_of_them_writes():
    before, copied, later = scenes.sampling()
    assert before.counts[1] == 1
    assert copied.copies == {3: 1}
    assert [later.table("A", i).block_table for i in (0, 1)] == [(7, 3), (7, 1)]
    assert (later.counts[7], later.counts[1], later.counts[3]) == (2, 1, 1)
    assert later.words[3][-1] == "fathers"
    assert later.words[1][-1] == "mothers"


def test_beams_share_the_blocks_of_their_common_prefixes():
    before, after = scenes.searching()
    tables = [set(t.block_table) for t in before.tables]
    assert len(tables) == len(after.tables) == 4
    assert len(set.intersection(*tables)) == 1  # the block of the prompt
    assert sum(len(t.block_table) for t in before.tables) == 16
    assert len(before.words) == 9
    assert len([b for b in before.words if after.counts[b] == 0]) == 4
    assert sorted(after.counts.values())[-3:] == [4, 4, 4]
    assert after.copies == {}


def test_common_prefix_is_computed_once():
    snapshot, num_tokens = scenes.shared_prefix()
    assert snapshot.table("A").block_table[:5] == snapshot.table("B").block_table[:5]
    assert sum(count == 2 for count in snapshot.counts.values()) == 5
    assert num_tokens == [4, 1]


def test_request_that_arrived_last_is_preempted_and_resumes():
    turns, num_blocks = scenes.pressing()
    assert [t.preempted for t in turns if t.preempted] == [("C",)]
    assert min(t.num_free for t in turns) == 0
    assert max(sum(t.num_tokens.values()) for t in turns) <= 8
    assert num_blocks == 8


def test_step_without_unfinished_requests_raises_runtime_error():
    with pytest.raises(RuntimeError, match="no unfinished request: add one"):
        scenes.Scene([1, 2]).step()
