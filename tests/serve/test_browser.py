"""Test the dashboard page in a browser: what the page shows, and its controls."""

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
        # Continuous integration runs as root in a container, where Chromium's sandbox fails.
        options = {"executable_path": path, "args": ["--no-sandbox"]}
        with playwright.chromium.launch(**options) as launched:
            yield launched


@pytest.fixture(scope="module")
def server(browser: Any, real_server: ServerProcess) -> str:
    return real_server.url


@pytest.fixture
def pages(browser: Any, server: str) -> Iterator[Pages]:
    """Return a function that opens the dashboard in a browser page. After the test, fail if a page
    logged an error."""
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


def open_live(pages: Pages, pace: str = "live", **options: Any) -> Any:
    page = pages(**options)
    page.wait_for_selector("#line.live")
    page.select_option("#pace", pace)
    return page


def send(page: Any, prompt: str, samples: int = 1, tokens: int = 40, heat: float = 0.0) -> None:
    """Fill in the request form of the page, send the request, and wait for the answers."""
    page.fill("#prompt", prompt)
    for name, value in (("samples", samples), ("tokens", tokens), ("heat", heat)):
        page.fill(f"#{name}", str(value))
    num_before = page.locator("article").count()
    page.click("#send")
    until(page, f"document.querySelectorAll('article').length > {num_before}")
    until(page, "!jpaged.prompts.running.size")


def show_first_used_step(page: Any) -> None:
    """Advance a paused page to the first step in which a request holds blocks.

    A separate connection reports changes of the KV block pool to the page. The changes may arrive
    after the answers. A waiting request has no blocks.
    """
    while not any(count > 0 for count in counts(page)):
        until(page, "jpaged.player.waiting.length > 0")
        page.click("#step")


def until(page: Any, condition: str) -> None:
    """Wait until a JavaScript condition is true.

    The page's Content-Security-Policy blocks Playwright's own `wait_for_function`.
    """
    end = time.monotonic() + WAIT / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never came: {condition}"
        page.wait_for_timeout(20)


def counts(page: Any) -> list[int]:
    return page.evaluate("[...jpaged.state.pool.counts]")


def test_page_loads_only_from_its_own_server(pages: Pages, server: str):
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


def test_page_shows_a_request_from_its_first_block_until_its_blocks_are_free(pages: Pages):
    page = open_live(pages, pace="0")
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
    assert max(used) == 4  # 58 tokens (18 of the prompt and 40 generated) fill 4 blocks
    assert set(used) == {0, 2, 3, 4}
    assert used[-1] == 0
    assert any("used, held by cmpl-" in text and "of N slots filled" in text for text in said)
    assert any("text “Count from N to ”" in text for text in said)
    assert page.evaluate("jpaged.player.waiting.length") == 0


def test_page_shows_that_samples_share_prompt_blocks_and_copy_the_last_one(pages: Pages):
    page = open_live(pages, pace="0")
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


def test_page_sends_several_prompts_as_one_request(pages: Pages):
    """A browser opens at most six connections to a server, so separate requests would queue."""
    page = open_live(pages, pace="0")
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


def test_step_summary_on_the_page_counts_block_events(pages: Pages):
    page = open_live(pages, pace="0")
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
    page.emulate_media(color_scheme="dark")  # this makes the page draw again without a new step
    page.wait_for_timeout(400)
    assert page.inner_text("#happened") == told[-1]


def test_dashboard_charts_match_the_displayed_step(pages: Pages):
    page = open_live(pages, pace="0")
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
def test_block_details_update_with_each_step(pages: Pages):
    page = open_live(pages, pace="0")
    send(page, "Count from 1 to 30")
    show_first_used_step(page)
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
def test_space_key_pauses_and_resumes_at_the_previous_speed(pages: Pages):
    page = open_live(pages, pace="5")
    page.focus("#grid")
    for pace in ("0", "5"):
        page.keyboard.press(" ")
        assert page.input_value("#pace") == pace


@pytest.mark.full
def test_hidden_dashboard_page_disconnects_unless_its_playback_is_paused(pages: Pages):
    page = open_live(pages)
    page.evaluate("jpaged.disconnectHidden()")
    until(page, "document.getElementById('line').innerText.startsWith('disconnected')")
    assert page.get_attribute("body", "class") == "old"
    page.wait_for_timeout(2500)
    assert page.inner_text("#line").startswith("disconnected")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector("#line.live")
    page.select_option("#pace", "0")
    page.evaluate("jpaged.disconnectHidden()")  # a paused page stays connected
    page.wait_for_timeout(100)
    assert page.inner_text("#line") == "live"


def test_page_shows_the_stream_error_and_reconnects(pages: Pages):
    page = open_live(pages)
    error = 'data: {"error": {"message": "the engine is not running"}}\n\ndata: [DONE]\n\n'
    page.route("**/picture/events", lambda route: route.fulfill(body=error))
    page.evaluate("jpaged.state.listening.abort()")
    until(page, "document.getElementById('line').innerText.startsWith('the engine is not running')")
    page.unroute("**/picture/events")
    page.wait_for_selector("#line.live")


def test_dashboard_event_reader_times_out_on_a_silent_stream(pages: Pages):
    page = open_live(pages)
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


def test_dashboard_event_reader_splits_events_only_at_newlines(pages: Pages):
    """JSON leaves U+2028, U+2029 and U+0085 unescaped, and JavaScript treats some as line ends."""
    page = open_live(pages)
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
def test_page_reconnects_to_a_restarted_server(pages: Pages, compilation_cache: Path):
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


def test_keyboard_moves_the_block_selection(pages: Pages):
    page = open_live(pages)
    page.keyboard.press("Tab")  # the first Tab focuses the link that skips navigation
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
    page.keyboard.press("t")  # moves along the block table
    page.wait_for_selector("#block .chip.here")
    assert page.inner_text("#block .chip.here") == str(where())


def test_hovering_a_block_describes_it(pages: Pages):
    page = open_live(pages)
    size = page.evaluate("jpaged.grid.size")
    # `hover` waits until the grid stops moving: the elements above it may still grow.
    page.locator("#grid").hover(position={"x": 2.5 * size, "y": 0.5 * size})
    assert page.inner_text("#said").startswith("Block 3: ")


@pytest.mark.full
def test_page_uses_the_light_or_dark_color_scheme_of_the_system(pages: Pages):
    page = open_live(pages, color_scheme="light")
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
def test_page_fits_the_window_width(pages: Pages, width: int):
    page = open_live(pages, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("jpaged.grid.columns * jpaged.grid.size") <= width


@pytest.mark.full
def test_page_does_not_flash_blocks_if_the_user_prefers_reduced_motion(pages: Pages):
    calm = open_live(pages, reduced_motion="reduce")
    lively = open_live(pages)
    for page in (calm, lively):
        page.evaluate("jpaged.grid.flash([1, 2, 3], 'take')")
    assert calm.evaluate("jpaged.grid.flashes.size") == 0
    assert lively.evaluate("jpaged.grid.flashes.size") == 3


def test_markup_in_prompts_is_shown_as_text(pages: Pages):
    page = open_live(pages, pace="0")
    markup = "<img src=x onerror=alert(1)><b>bold</b>"
    send(page, markup, tokens=8)
    show_first_used_step(page)
    page.focus("#grid")
    page.keyboard.press("n")
    assert page.inner_text(".question") == markup
    assert "text “" in page.inner_text("#said")
    assert page.evaluate("document.querySelectorAll('main img, main b').length") == 0


@pytest.mark.full
def test_bidi_control_characters_are_removed_from_block_text(pages: Pages):
    page = open_live(pages, pace="0")
    send(page, "up\u202edown\nlast", tokens=8)
    show_first_used_step(page)
    page.focus("#grid")
    page.keyboard.press("n")
    said = page.inner_text("#said")
    assert "down⏎last" in said
    assert "\u202e" not in said


def test_page_fetches_a_snapshot_if_a_change_of_the_kv_block_pool_is_invalid(pages: Pages):
    page = open_live(pages)
    first = page.evaluate_handle("jpaged.state.pool")
    changes = {"blocks": [[1], [1], [0]], "copies": {}, "gone": []}
    page.evaluate("frame => jpaged.player.push([frame])", {"step": 1, "changes": changes})
    page.wait_for_selector("#line.down")
    page.wait_for_selector("#line.live")
    assert page.evaluate("before => jpaged.state.pool !== before", first)
    assert max(counts(page)) <= 0
    assert "tables" in pages.problems.pop()  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.full
def test_screen_reader_announces_selection_but_not_later_steps(pages: Pages):
    page = open_live(pages, pace="0")
    send(page, "Count from 1 to 30")
    show_first_used_step(page)
    until(page, "!jpaged.state.panels")  # the page draws the step's summary a moment after the step
    page.focus("#grid")
    page.keyboard.press("n")
    assert page.get_attribute("#said", "aria-live") == "polite"
    until(page, "!jpaged.state.panels")
    page.keyboard.press(".")
    until(page, "!jpaged.state.panels")
    assert page.get_attribute("#said", "aria-live") == "off"


@pytest.mark.full
def test_page_runs_the_calculator_tool_call(pages: Pages, compilation_cache: Path):
    with serving(compilation_cache, "--max-model-len", "1024") as address:
        page = open_live(pages, address=address)
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


def test_page_shows_a_server_error(pages: Pages):
    page = open_live(pages)
    send(page, "x" * 600)
    assert "256" in page.inner_text(".foot")  # the error names the maximum length
    assert pages.problems.pop().startswith("Failed to load resource")  # pyright: ignore


@pytest.mark.full
def test_page_draws_a_hundred_thousand_blocks_quickly(pages: Pages, record_property: Callable):
    page = open_live(pages)
    times = page.evaluate(LARGE_POOL)
    print(times)
    for name, milliseconds in times.items():
        record_property(name, milliseconds)
    assert times["whole"] < 1500  # milliseconds; drawing is slow without a GPU
    assert times["change"] < 100
    assert page.evaluate("jpaged.grid.columns * jpaged.grid.size") <= 1280


def test_blocks_on_the_page_equal_the_engines_blocks_at_each_step(
    pages: Pages, engines: Callable[..., Engine]
):
    """Run sampling, beam search and an abort. The pool is too small, so blocks are swapped out."""
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
    page = open_live(pages)
    seen = page.evaluate(REPLAY, [msgspec.to_builtins(frame, str_keys=True) for frame in diffs])
    assert len(seen) == len(diffs) > 40
    for frame, infos, shown in zip(diffs, held, seen, strict=True):
        replica.take(frame.changes)
        assert shown["counts"] == [replica.counts.get(i, 0) for i in range(21)]
        assert shown["hashes"] == [replica.hashes.get(i, 0) for i in range(21)]
        assert shown["tables"] == {str(i): table for i, table in replica.tables.items()}
        assert shown["computed"] == {str(i): n for i, n in replica.computed.items()}
        assert shown["swapEntries"] == [[*entry] for entry in replica.swap_entries]
        assert shown["numLogical"] == sum(map(len, replica.tables.values()))
        used = [i for i, info in infos.items() if info.ref_cnt]
        assert shown["numUsed"] == len(used)
        assert shown["numWasted"] == sum(16 - infos[i].num_filled_slots for i in used)
        for block in used:  # the page shows the block in the colour of a request that holds it
            assert shown["owners"][block] in infos[block].request_ids


REPLAY = """async (frames) => {
  const { Pool } = await import("/picture/pool.js");
  const pool = new Pool({ num_blocks: 21, block_size: 16 });
  return frames.map((frame) => {
    pool.apply(frame);
    const names = new Map([...pool.requests].map(([name, number]) => [number, name]));
    const all = [...pool.sequences];
    const each = (part) => Object.fromEntries(all.map(([id, s]) => [id, s[part]]));
    const { numLogical, numUsed, numWasted, swapEntries } = pool;
    const owners = [...pool.owners].map((number) => names.get(number) ?? "");
    const blocks = { counts: [...pool.counts], hashes: [...pool.hashes], owners };
    return { ...blocks, numLogical, numUsed, numWasted, swapEntries,
      tables: structuredClone(each("blocks")), computed: each("computed") };
  });
}"""


LARGE_POOL = """async () => {
  const { Pool } = await import("/picture/pool.js");
  const pool = new Pool({ num_blocks: 100001, block_size: 16 });
  const nothing = { blocks: [[], [], []], tables: [], grown: {}, gone: [], swap_entries: null,
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
def test_page_of_a_server_with_an_api_key_requires_it(pages: Pages, compilation_cache: Path):
    with serving(compilation_cache, "--api-key", KEY) as address:
        with pytest.raises(Exception, match="INVALID_AUTH"):  # the test passes no key
            pages(address=address)
        known = {"username": "anybody", "password": KEY}
        page = open_live(pages, "0", address=address, http_credentials=known)
        send(page, "Count from 1 to 9")
        assert "1, 2, 3" in page.inner_text("article pre")
        show_first_used_step(page)
        page.focus("#grid")
        page.keyboard.press("n")
        assert "used, held by" in page.inner_text("#said")
        assert "text" not in page.inner_text("#said")  # needs --dashboard-show-text
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert KEY not in page.evaluate(kept)
        ending = time.monotonic()
    assert time.monotonic() - ending < 4  # an open page does not delay the shutdown
    page.wait_for_selector("#line.down")
    page.close()
    pages.problems.clear()  # pyright: ignore[reportFunctionMemberAccess]
