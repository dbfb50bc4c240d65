"""The picture in a real browser: what it shows, and how it is used."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browsing import find_browser, serving
from pool_replica import PoolReplica
from server_process import ServerProcess

from jpaged import Engine, SamplingParams
from jpaged.serve.dashboard.sampler import PoolSampler

KEY = "open-sesame-42"
WAIT = 20_000  # milliseconds
Pages = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = find_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Continuous integration is root in a container, where Chromium has no sandbox.
        options = {"executable_path": path, "args": ["--no-sandbox"]}
        with playwright.chromium.launch(**options) as launched:
            yield launched


@pytest.fixture(scope="module")
def server(browser: Any, real_server: ServerProcess) -> str:
    return real_server.url


@pytest.fixture
def pages(browser: Any, server: str) -> Iterator[Pages]:
    """Opens the page; fails at the end if anything went wrong in it."""
    contexts, problems = [], []

    def note(message: Any) -> None:
        if message.type in ("error", "warning"):
            problems.append(message.text)

    def open_page(address: str = server, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.on("console", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address)
        return page

    open_page.problems = problems  # pyright: ignore[reportFunctionMemberAccess]
    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def opened(pages: Pages, pace: str = "live", **options: Any) -> Any:
    page = pages(**options)
    page.wait_for_selector("#line.live")
    page.select_option("#pace", pace)
    return page


def send(page: Any, prompt: str, samples: int = 1, tokens: int = 40, heat: float = 0.0) -> None:
    """Fill the form, send it, and wait for the answers."""
    page.fill("#prompt", prompt)
    for name, value in (("samples", samples), ("tokens", tokens), ("heat", heat)):
        page.fill(f"#{name}", str(value))
    num_before = page.locator("article").count()
    page.click("#send")
    until(page, f"document.querySelectorAll('article').length > {num_before}")
    until(page, "!jpaged.prompts.running.size")


def first_step(page: Any) -> None:
    """Show a stopped picture's first step in which a request holds blocks. Frames come on a line of
    their own, perhaps after the answers, and one may have been taken while it still waited."""
    while not any(count > 0 for count in counts(page)):
        until(page, "jpaged.player.waiting.length > 0")
        page.click("#step")


def until(page: Any, condition: str) -> None:
    """Wait for a JavaScript condition (the page's policy keeps Playwright's own way out)."""
    end = time.monotonic() + WAIT / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never came: {condition}"
        page.wait_for_timeout(20)


def counts(page: Any) -> list[int]:
    return page.evaluate("[...jpaged.state.pool.counts]")


def test_it_loads_with_nothing_from_elsewhere(pages: Pages, server: str):
    asked = []
    page = pages(address="about:blank")
    page.on("request", lambda request: asked.append(request.url))
    answer = page.goto(server)
    page.wait_for_selector("#line.live")
    assert all(url.startswith(server) for url in asked)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.inner_text("#pool-size") == "128 blocks of 16 tokens"
    assert page.evaluate("document.querySelectorAll('input:not([id])').length") == 0
    unlabelled = (
        "[...document.querySelectorAll('input, select, textarea')].filter(e => !e.labels[0])"
    )
    assert page.evaluate(f"{unlabelled}.length") == 0


def test_a_request_is_seen_from_its_first_block_to_the_last(pages: Pages):
    page = opened(pages, pace="0")
    send(page, "Count from 1 to 30")
    assert "1, 2, 3" in page.inner_text("article pre")
    until(page, "jpaged.player.waiting.length > 10")
    page.focus("#grid")
    used, said = [], set()
    while page.evaluate("jpaged.player.waiting.length"):
        page.keyboard.press(".")
        used.append(sum(count > 0 for count in counts(page)))
        page.keyboard.press("n")
        said.add(re.sub(r"\d+", "N", page.inner_text("#said")))
    assert max(used) == 4  # 18 tokens asked, 40 answered
    assert set(used) == {0, 2, 3, 4}
    assert used[-1] == 0
    assert any("used, held by cmpl-" in text and "of N slots filled" in text for text in said)
    assert any("text “Count from N to ”" in text for text in said)
    assert page.evaluate("jpaged.player.waiting.length") == 0


def test_samples_share_their_prompt_and_copy_its_last_block(pages: Pages):
    page = opened(pages, pace="0")
    before = page.evaluate("jpaged.state.stats.num_block_copies")
    send(page, "Sort 31, 4, 15, 92, 6 and 535", samples=4, heat=2.0)
    until(page, "jpaged.player.waiting.length > 3")
    shared = 0
    while page.evaluate("jpaged.player.waiting.length") and not shared:
        page.click("#step")
        shared = sum(count == 4 for count in counts(page))
    assert shared >= 1
    until(page, "document.querySelectorAll('#tables tr').length == 4")
    assert page.inner_text("#tables").count("\u00d74") >= 4
    block = page.evaluate("jpaged.state.pool.counts.indexOf(4)")
    page.evaluate(f"jpaged.grid.select({block}, true)")
    assert page.inner_text("#said").startswith(f"Block {block}: shared by 4, held by cmpl-")
    assert page.locator("#block .holder").count() == 4
    assert page.locator("#block .slot.filled").count() == 16
    page.select_option("#pace", "live")
    until(page, "!jpaged.state.pool.sequences.size")
    assert max(counts(page)) <= 0
    until(page, "document.getElementById('tables').innerText.startsWith('No sequence')")
    assert page.evaluate("jpaged.state.stats.num_block_copies") == before + 3
    until(page, "document.querySelector('article .asked').style.borderLeftColor")


def test_prompts_that_go_out_together_are_one_request(pages: Pages):
    """A browser has six lines to a server: of sixteen requests ten would wait for the others."""
    page = opened(pages, pace="0")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    send(page, "\n---\n".join(f"Count from {i} to {i + 30}" for i in range(1, 9)))
    assert len([url for url in asked if url.endswith("/v1/completions")]) == 1
    answers = page.locator("article .asked")
    assert answers.count() == 8
    for i in range(8):
        assert answers.nth(i).locator(".question").inner_text().startswith(f"Count from {i + 1} ")
        assert answers.nth(i).locator("pre").inner_text().startswith(f"{i + 1}, {i + 2}, {i + 3}")
    most = 0
    while page.evaluate("jpaged.player.waiting.length"):
        page.evaluate("jpaged.player.step()")
        most = max(most, page.evaluate("jpaged.state.pool.sequences.size"))
    assert most == 8
    colours = "[...document.querySelectorAll('.asked')].map(part => part.style.borderLeftColor)"
    until(page, f"new Set({colours}.filter(Boolean)).size == 8")


def test_what_happened_is_told(pages: Pages):
    page = opened(pages, pace="0")
    assert page.inner_text("#happened").startswith("No step yet")
    send(page, "Sort 31, 4, 15, 92, 6 and 535", samples=4, heat=2.0)
    until(page, "jpaged.player.waiting.length > 3")
    told = []
    while page.evaluate("jpaged.player.waiting.length"):
        page.click("#step")
        until(page, "!jpaged.state.panels")
        told.append(page.inner_text("#happened"))
    count = lambda what: sum(int(re.search(rf"(\d+) {what}", text)[1]) for text in told)  # pyright: ignore # noqa: E731
    assert all(re.match(r"Step [\d,]+\b", text) for text in told)
    assert count("copied on write") == 3
    assert count("taken") >= 2
    assert count("given back") == count("taken") + count("copied") + count("found in the cache")
    assert count("shared") >= 1
    page.emulate_media(color_scheme="dark")  # painted again, nothing happened
    page.wait_for_timeout(400)
    assert page.inner_text("#happened") == told[-1]


def test_the_charts_tell_of_the_time_that_is_shown(pages: Pages):
    page = opened(pages, pace="0")
    until(page, "jpaged.charts.before")
    tokens = "jpaged.charts.before.stats.num_generated_tokens"
    before = page.evaluate(tokens)
    send(page, "Count from 1 to 30")
    page.wait_for_timeout(700)
    assert page.evaluate(tokens) == before
    in_use = page.locator("#charts figure").nth(1).locator("p")
    for _ in range(3):
        page.click("#step")
    until(page, "!jpaged.state.panels")
    num_used = sum(count > 0 for count in counts(page))
    assert in_use.inner_text() == f"{100 * num_used / 128:.1f} %" != "0.0 %"
    page.select_option("#pace", "live")
    until(page, f"{tokens} == {before + 40}")
    until(page, "!jpaged.state.panels")
    assert in_use.inner_text() == "0 %"


@pytest.mark.full
def test_what_is_said_of_a_block_is_kept_true(pages: Pages):
    page = opened(pages, pace="0")
    send(page, "Count from 1 to 30")
    first_step(page)
    page.focus("#grid")
    page.keyboard.press("n")
    first = page.inner_text("#block .holder")
    page.keyboard.press(".")
    page.keyboard.press(".")
    until(page, "!jpaged.state.panels")
    [sequence] = page.evaluate("[...jpaged.state.pool.sequences.values()]")
    told = page.inner_text("#block .holder")
    assert told != first
    assert told.endswith(f"{sequence['computed']} tokens computed")
    assert page.locator("#block .chip").count() == len(sequence["blocks"])


@pytest.mark.full
def test_space_goes_on_at_the_pace_before(pages: Pages):
    page = opened(pages, pace="5")
    page.focus("#grid")
    for pace in ("0", "5"):
        page.keyboard.press(" ")
        assert page.input_value("#pace") == pace


@pytest.mark.full
def test_a_page_out_of_sight_rests(pages: Pages):
    page = opened(pages)
    page.evaluate("jpaged.disconnectHidden()")
    until(page, "document.getElementById('line').innerText.startsWith('disconnected')")
    assert page.get_attribute("body", "class") == "old"
    page.wait_for_timeout(2500)
    assert page.inner_text("#line").startswith("disconnected")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector("#line.live")
    page.select_option("#pace", "0")
    page.evaluate("jpaged.disconnectHidden()")  # somebody may come back to what waits
    page.wait_for_timeout(100)
    assert page.inner_text("#line") == "live"


def test_why_the_stream_ended_is_told(pages: Pages):
    page = opened(pages)
    error = 'data: {"error": {"message": "the engine is not running"}}\n\ndata: [DONE]\n\n'
    page.route("**/picture/events", lambda route: route.fulfill(body=error))
    page.evaluate("jpaged.state.listening.abort()")
    until(page, "document.getElementById('line').innerText.startsWith('the engine is not running')")
    page.unroute("**/picture/events")
    page.wait_for_selector("#line.live")


def test_a_line_on_which_nothing_comes_is_given_up(pages: Pages):
    page = opened(pages)
    assert page.evaluate(SILENT) == ["ping", "nothing arrived for 0 seconds"]


SILENT = """async () => {
  const { readEvents } = await import("/picture/stream.js");
  const body = new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode("event: ping\\ndata: 1\\n\\n"));
    },
  });
  const told = [];
  try {
    for await (const { name } of readEvents(new Response(body), 50)) told.push(name);
  } catch (error) {
    told.push(error.message);
  }
  return told;
}"""


def test_an_event_ends_only_at_a_newline(pages: Pages):
    """JSON has the other ends of lines as they are, and JavaScript's patterns know them."""
    page = opened(pages)
    assert page.evaluate(LINE_ENDS) == [["frames", "a\u2028b"], ["message", "\u2029\u0085\n"]]


LINE_ENDS = r"""async () => {
  const { readEvents } = await import("/picture/stream.js");
  const body = 'event: frames\ndata: "a\u2028b"\n\n' + 'data: "\u2029\u0085\\n"\n\n';
  const told = [];
  for await (const event of readEvents(new Response(body))) {
    told.push([event.name, JSON.parse(event.data)]);
  }
  return told;
}"""


@pytest.mark.full
def test_a_server_that_comes_again_is_shown_anew(pages: Pages, compilation_cache: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with serving(compilation_cache, "--port", port) as address:
        page = pages(address=address)
        page.wait_for_selector("#line.live")
        page.select_option("#pace", "live")
        send(page, "Count from 1 to 30")
        until(page, "jpaged.charts.before?.stats.num_generated_tokens == 40")
        name, number = page.evaluate("[...jpaged.state.pool.requests].at(-1)")
    page.wait_for_selector("#line.down")
    until(page, "document.getElementById('line').innerText.startsWith('the server does not')")
    frozen = page.evaluate("jpaged.charts.before")
    page.wait_for_timeout(700)
    assert page.evaluate("jpaged.charts.before") == frozen is None
    with serving(compilation_cache, "--port", port):
        page.wait_for_selector("#line.live")
        assert page.get_attribute("body", "class") == ""
        assert page.evaluate(f"jpaged.state.pool.requests.get('{name}')") == number
        send(page, "Count from 1 to 9", tokens=10)
        until(page, "jpaged.charts.before?.stats.num_generated_tokens == 10")
        assert page.evaluate("[...jpaged.state.pool.requests.values()].at(-1)") > number
        values = "jpaged.charts.charts.flatMap(c => c.points.flatMap(p => p?.values ?? []))"
        assert min(page.evaluate(values)) >= 0
        page.close()
    pages.problems.clear()  # pyright: ignore[reportFunctionMemberAccess]


def test_it_is_walked_by_keyboard(pages: Pages):
    page = opened(pages)
    page.keyboard.press("Tab")  # the skip link
    page.keyboard.press("Enter")
    page.focus("#grid")
    where = lambda: page.evaluate("jpaged.grid.selected")  # noqa: E731
    columns = page.evaluate("jpaged.grid.columns")
    for key, block in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowDown", 2 + columns),
        ("ArrowLeft", 1 + columns),
        ("ArrowUp", 1),
        ("ArrowUp", 1),
        ("End", 128),
        ("ArrowRight", 128),
        ("Home", 1),
    ):
        page.keyboard.press(key)
        assert where() == block, key
    assert page.inner_text("#said").startswith("Block 1: ")
    assert page.get_attribute("#said", "aria-live") == "polite"
    page.keyboard.press(" ")
    assert page.input_value("#pace") == "0"
    send(page, "Count from 1 to 9")
    until(page, "jpaged.player.waiting.length > 3")
    page.click("#step")
    page.focus("#grid")
    page.keyboard.press("End")
    page.keyboard.press("p")
    last = where()
    assert counts(page)[last] == 1
    page.keyboard.press("t")  # around the block table
    page.wait_for_selector("#block .chip.here")
    assert page.inner_text("#block .chip.here") == str(where())


def test_what_is_pointed_at_is_described(pages: Pages):
    page = opened(pages)
    size = page.evaluate("jpaged.grid.size")
    # Once the grid stays where it is: what is above it may still grow.
    page.locator("#grid").hover(position={"x": 2.5 * size, "y": 0.5 * size})
    assert page.inner_text("#said").startswith("Block 3: ")


@pytest.mark.full
def test_light_and_dark(pages: Pages):
    page = opened(pages, color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    cells = page.locator("#grid").screenshot()
    assert page.evaluate(background) == "rgb(246, 246, 243)"
    page.emulate_media(color_scheme="dark")
    until(page, f"{background} === 'rgb(20, 23, 28)'")
    page.wait_for_timeout(100)
    assert page.locator("#grid").screenshot() != cells


@pytest.mark.parametrize(
    "width",
    [360, pytest.param(800, marks=pytest.mark.full), pytest.param(1600, marks=pytest.mark.full)],
)
def test_it_fits_the_window(pages: Pages, width: int):
    page = opened(pages, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("jpaged.grid.columns * jpaged.grid.size") <= width


@pytest.mark.full
def test_nothing_flashes_for_those_who_want_it_calm(pages: Pages):
    calm = opened(pages, reduced_motion="reduce")
    lively = opened(pages)
    for page in (calm, lively):
        page.evaluate("jpaged.grid.flash([1, 2, 3], 'take')")
    assert calm.evaluate("jpaged.grid.flashes.size") == 0
    assert lively.evaluate("jpaged.grid.flashes.size") == 3


def test_markup_in_prompts_is_text(pages: Pages):
    page = opened(pages, pace="0")
    markup = "<img src=x onerror=alert(1)><b>bold</b>"
    send(page, markup, tokens=8)
    first_step(page)
    page.focus("#grid")
    page.keyboard.press("n")
    assert page.inner_text(".question") == markup
    assert "text “" in page.inner_text("#said")
    assert page.evaluate("document.querySelectorAll('main img, main b').length") == 0


@pytest.mark.full
def test_text_does_not_turn_a_sentence_around(pages: Pages):
    page = opened(pages, pace="0")
    send(page, "up\u202edown\nlast", tokens=8)
    first_step(page)
    page.focus("#grid")
    page.keyboard.press("n")
    said = page.inner_text("#said")
    assert "down⏎last" in said
    assert "\u202e" not in said


def test_a_frame_that_does_not_fit_is_followed_by_a_snapshot(pages: Pages):
    page = opened(pages)
    first = page.evaluate_handle("jpaged.state.pool")
    changes = {"blocks": [[1], [1], [0]], "copies": {}, "gone": []}
    page.evaluate("frame => jpaged.player.push([frame])", {"step": 1, "changes": changes})
    page.wait_for_selector("#line.down")
    page.wait_for_selector("#line.live")
    assert page.evaluate("before => jpaged.state.pool !== before", first)
    assert max(counts(page)) <= 0
    assert "tables" in pages.problems.pop()  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.full
def test_those_who_listen_hear_what_they_asked_for(pages: Pages):
    """Not each token of a block that happens to be in view."""
    page = opened(pages, pace="0")
    send(page, "Count from 1 to 30")
    first_step(page)
    until(page, "!jpaged.state.panels")  # the step's own sentence, drawn a moment after it
    page.focus("#grid")
    page.keyboard.press("n")
    assert page.get_attribute("#said", "aria-live") == "polite"
    until(page, "!jpaged.state.panels")
    page.keyboard.press(".")
    until(page, "!jpaged.state.panels")
    assert page.get_attribute("#said", "aria-live") == "off"


@pytest.mark.full
def test_a_calculator_is_called(pages: Pages, compilation_cache: Path):
    """The page runs it, and the model answers with what it computed."""
    with serving(compilation_cache, "--max-model-len", "1024") as address:
        page = opened(pages, address=address)
        options = page.locator("#preset option")
        label = next(text for text in options.all_inner_texts() if "calculator" in text)
        page.select_option("#preset", label=label)
        assert page.input_value("#prompt") == "What is 48273 * 9164?"
        page.click("#send")
        until(page, "document.querySelectorAll('article').length == 1")
        until(page, "!jpaged.prompts.running.size")
        assert page.inner_text("article pre").splitlines() == [
            'call: calculator {"expression": "48273 * 9164"}',
            "result: 442373772",
            "48273 * 9164 = 442373772",
        ]
        page.fill("#prompt", "Divide 7 by 0\n---\nSort pear, apple, fig")
        page.click("#send")
        until(page, "document.querySelectorAll('article').length == 3")
        until(page, "!jpaged.prompts.running.size")
        told = page.locator("article").all_inner_texts()
        assert any("result: Error: division by zero" in text for text in told)
        assert any("apple, fig, pear" in text for text in told)
        page.goto("about:blank")


def test_an_error_of_the_server_is_shown(pages: Pages):
    page = opened(pages)
    send(page, "x" * 600)
    assert "256" in page.inner_text(".foot")  # the longest sequence
    assert pages.problems.pop().startswith("Failed to load resource")  # pyright: ignore


@pytest.mark.full
def test_a_hundred_thousand_blocks(pages: Pages, record_property: Callable):
    page = opened(pages)
    times = page.evaluate(LARGE_POOL)
    print(times)
    for name, milliseconds in times.items():
        record_property(name, milliseconds)
    assert times["whole"] < 1500  # two slow cores without a graphics card
    assert times["change"] < 100
    assert page.evaluate("jpaged.grid.columns * jpaged.grid.size") <= 1280


def test_the_page_shows_what_the_engine_holds(pages: Pages, engines: Callable[..., Engine]):
    """Samples, beams, ends and swaps in a pool that is too small for them."""
    engine, replica = (
        engines(num_blocks=21, preemption_mode="swap", swap_space=0.002),
        PoolReplica(),
    )
    sampler = PoolSampler(engine, clock=lambda: 0.0, work_clock=lambda: 0.0)
    first = sampler.fetch().snapshot
    assert first is not None
    diffs, held = [first], [{}]
    for i in range(6):
        kinds = ({"n": 3, "temperature": 2.0}, {"beam_width": 3, "n": 3}, {"temperature": 0.0})
        params = SamplingParams(max_tokens=60, ignore_eos=True, **kinds[i % 3])  # pyright: ignore
        engine.add_request("Count from 1 to 20" * (1 + i % 2), params, request_id=f"r{i}")
    rounds = 0
    while engine.has_unfinished_requests:
        engine.step()
        rounds += 1
        if rounds == 30:
            engine.abort("r2")
        diffs += sampler.fetch().diffs
        held += [engine.block_map()] * (len(diffs) - len(held))
    assert engine.stats().num_swapped_out_blocks > 0
    page = opened(pages)
    seen = page.evaluate(REPLAY, [msgspec.to_builtins(frame, str_keys=True) for frame in diffs])
    assert len(seen) == len(diffs) > 40
    for frame, infos, shown in zip(diffs, held, seen, strict=True):
        replica.take(frame.changes)
        assert shown["counts"] == [replica.counts.get(i, 0) for i in range(21)]
        assert shown["hashes"] == [replica.hashes.get(i, 0) for i in range(21)]
        assert shown["tables"] == {str(i): table for i, table in replica.tables.items()}
        assert shown["computed"] == {str(i): n for i, n in replica.computed.items()}
        assert shown["images"] == [[*image] for image in replica.images]
        assert shown["numLogical"] == sum(map(len, replica.tables.values()))
        used = [i for i, info in infos.items() if info.ref_cnt]
        assert shown["numUsed"] == len(used)
        assert shown["numWasted"] == sum(16 - infos[i].num_filled_slots for i in used)
        for block in used:  # in the colour of one who holds it
            assert shown["owners"][block] in infos[block].request_ids


REPLAY = """async (frames) => {
  const { Pool } = await import("/picture/pool.js");
  const pool = new Pool({ num_blocks: 21, block_size: 16 });
  return frames.map((frame) => {
    pool.apply(frame);
    const names = new Map([...pool.requests].map(([name, number]) => [number, name]));
    const all = [...pool.sequences];
    const each = (part) => Object.fromEntries(all.map(([id, s]) => [id, s[part]]));
    const { numLogical, numUsed, numWasted, swapEntries: images } = pool;
    const owners = [...pool.owners].map((number) => names.get(number) ?? "");
    const blocks = { counts: [...pool.counts], hashes: [...pool.hashes], owners };
    return { ...blocks, numLogical, numUsed, numWasted, images,
      tables: structuredClone(each("blocks")), computed: each("computed") };
  });
}"""


LARGE_POOL = """async () => {
  const { Pool } = await import("/picture/pool.js");
  const pool = new Pool({ num_blocks: 100001, block_size: 16 });
  const nothing = { blocks: [[], [], []], tables: [], grown: {}, gone: [], images: null,
    pinned: null, copies: {} };
  const ids = Array.from({ length: 91000 }, (_, i) => i + 1);
  const counts = ids.map((id) => (id <= 80000 ? 1 : id <= 81000 ? 2 : -1));
  const tables = Array.from({ length: 250 }, (_, s) => {
    const blocks = Array.from({ length: 320 }, (_, i) => 1 + ((s + 250 * i) % 80000));
    return [s, `r${s}`, 0, "running", 9, 5110, 0, blocks, 0];
  });
  const changes = { ...nothing, blocks: [ids, counts, ids], tables };
  const timed = (work) => { const t = performance.now(); work(); return performance.now() - t; };
  const times = { apply: timed(() => pool.apply({ step: 0, changes, text: {} })) };
  times.layout = timed(() => jpaged.grid.show(pool));
  times.whole = jpaged.grid.drawTime;
  const fresh = Array.from({ length: 256 }, (_, i) => 90000 + i);
  const blocks = [fresh, fresh.map(() => 1), fresh.map(() => 0)];
  const grown = Object.fromEntries(tables.map(([seq]) => [seq, 5111]));
  const next = { step: 1, changes: { ...nothing, blocks, grown }, text: {} };
  times.change = timed(() => {
    jpaged.grid.update(pool.apply(next).changed);
    jpaged.grid.drawDirty();
  });
  return times;
}"""


@pytest.mark.full
def test_a_server_with_a_key_asks_for_it(pages: Pages, compilation_cache: Path):
    with serving(compilation_cache, "--api-key", KEY) as address:
        with pytest.raises(Exception, match="INVALID_AUTH"):  # there is no user to ask
            pages(address=address)
        known = {"username": "anybody", "password": KEY}
        page = opened(pages, "0", address=address, http_credentials=known)
        send(page, "Count from 1 to 9")
        assert "1, 2, 3" in page.inner_text("article pre")
        first_step(page)
        page.focus("#grid")
        page.keyboard.press("n")
        assert "used, held by" in page.inner_text("#said")
        assert "text" not in page.inner_text("#said")  # unless told to show it
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert KEY not in page.evaluate(kept)
        ending = time.monotonic()
    assert time.monotonic() - ending < 4  # an open page does not keep the server from ending
    page.wait_for_selector("#line.down")
    page.close()
    pages.problems.clear()  # pyright: ignore[reportFunctionMemberAccess]
