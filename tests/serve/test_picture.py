"""The picture on the wire: what goes in comes out, compactly, for pools of any size."""

import asyncio
import json
import time
from contextlib import AsyncExitStack, aclosing

import numpy as np
import pytest

from jpaged import Engine, EngineStats, PoolChanges, PoolWatch, SamplingParams
from jpaged.observe.pool_changes import ChangedBlocks, TableChange
from jpaged.serve.api_errors import ApiError, not_serving
from jpaged.serve.dashboard import broadcast
from jpaged.serve.dashboard.broadcast import MAX_UNREAD, MAX_VIEWERS, Broadcast
from jpaged.serve.dashboard.codec import (
    PoolState,
    encode,
    expand_ranges,
    expand_runs,
    for_viewers,
    pack,
    ranges_of,
    runs_of,
    unpack,
)
from jpaged.serve.dashboard.sampler import MAX_FRAMES, PATIENCE, PoolSampler
from jpaged.serve.messages import PoolFrames

# Numbers


@pytest.mark.parametrize("values", [[], [7], [1, 1, 1], [1, 2, 2, 1], [-1, -1, 0, 3]])
def test_runs(values: list[int]):
    runs = runs_of(np.array(values, np.int64))
    assert expand_runs(runs).tolist() == values
    assert all(type(number) is int for number in runs)


@pytest.mark.parametrize("ids", [[], [7], [1, 2, 3], [1, 3, 4, 9], [*range(5, 900)]])
def test_ranges(ids: list[int]):
    assert expand_ranges(ranges_of(np.array(ids, np.int64))).tolist() == ids


def test_ranges_are_short():
    assert ranges_of(np.arange(5, 900)) == [5, 895]
    assert runs_of(np.ones(900, np.int64)) == [1, 900]


@pytest.mark.parametrize("numbers", [[], [0, 1, 2**32 - 1]])
def test_packed(numbers: list[int]):
    assert unpack(pack(np.array(numbers, np.uint32))).tolist() == numbers


# Frames and the state they add up to


def table(seq_id: int, computed: int, kept: int, *new: int, host: int = 0) -> TableChange:
    return TableChange(seq_id, f"r{seq_id}", 0, "running", 4, computed, kept, new, host)


def test_frames_add_up():
    state = PoolState(9)
    changes = [
        PoolChanges(
            ChangedBlocks([1, 2], [2, 1], [77, 0]),
            tables=[table(5, 6, 0, 1, 2), table(6, 4, 0, 1)],
            tokens={1: [65, 66]},
        ),
        PoolChanges(grown={5: 7}),
        PoolChanges(
            ChangedBlocks([1, 2, 3], [-1, 0, 1], [77, 0, 0]),
            tables=[table(5, 9, 1, 3)],
            gone=[6],
            images=[("r6", 4)],
            pinned=[1],
        ),
    ]
    for step, change in enumerate(changes):
        frame = json.loads(json.dumps(encode(change, step)))
        state.apply(for_viewers(frame, chr))
    assert state.counts.tolist() == [0, -1, 0, 1, 0, 0, 0, 0, 0]
    assert state.hashes[1] == 77
    assert [*state.tables] == [5]
    *head, blocks = state.tables[5]
    assert head == [5, "r5", 0, "running", 4, 9, 0]
    assert blocks.tolist() == [1, 3]
    assert (state.images, state.pinned, state.step) == ([["r6", 4]], [1], 2)
    assert state.text == {"1": ["A", "B"]}


def test_a_snapshot_leads_to_the_same_state():
    state, copy = PoolState(9), PoolState(9)
    change = PoolChanges(
        ChangedBlocks([2, 4], [-1, 1], [0, 9]), tables=[table(5, 6, 0, 4)], pinned=[4]
    )
    state.apply(encode(change, 3))
    copy.apply(json.loads(json.dumps(state.snapshot())))
    assert copy.snapshot() == state.snapshot()
    assert (copy.counts == state.counts).all()


def test_text_is_left_out_unless_wanted():
    frame = encode(PoolChanges(tokens={1: [65, 66]}), 0)
    assert for_viewers(frame, chr)["text"] == {"1": ["A", "B"]}
    shown = for_viewers(frame)
    assert not {"text", "tokens"} & shown.keys()


def test_texts_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jpaged.serve.dashboard.codec.MAX_TEXTS", 2)
    state = PoolState(9)
    for block in (1, 2, 1, 3):
        state.apply(for_viewers(encode(PoolChanges(tokens={block: [65]}), 0), chr))
    assert [*state.text] == ["1", "3"]


def test_text_goes_with_the_block():
    """A new viewer is not told what a block held before another request took it."""
    state = PoolState(9)
    first = PoolChanges(
        ChangedBlocks([1, 2, 3], [1, 1, -1], [7, 8, 9]), tokens={i: [64 + i] for i in (1, 2, 3)}
    )
    then = PoolChanges(ChangedBlocks([1, 2, 3], [0, -1, 1], [0, 8, 0]))  # freed, kept, evicted
    for change in (first, then):
        state.apply(for_viewers(encode(change, 0), chr))
    assert state.snapshot()["text"] == {"2": ["B"]}
    state.apply(encode(PoolChanges(ChangedBlocks([2], [1], [8])), 0))  # found again
    assert state.snapshot()["text"] == {"2": ["B"]}


def test_a_large_pool_is_cheap():
    num_blocks = 100_000
    rng = np.random.RandomState(0)
    ids = rng.permutation(num_blocks) + 1
    hashes = rng.randint(1, 2**31, num_blocks).tolist()
    changes = PoolChanges(
        ChangedBlocks(range(1, num_blocks + 1), [1] * num_blocks, hashes),
        tables=[table(s, 6240, 0, *ids[s * 390 : (s + 1) * 390].tolist()) for s in range(256)],
    )
    state = PoolState(num_blocks + 1)
    state.apply(encode(changes, 0))
    start = time.perf_counter()
    size = len(json.dumps(state.snapshot()))
    assert time.perf_counter() - start < 1.0
    assert size < 1_200_000  # 12 bytes a block: two numbers
    one = PoolChanges(ChangedBlocks([5], [2], [0]), grown=dict.fromkeys(range(256), 6241))
    assert len(json.dumps(encode(one, 1))) < 4_000


# The sampler


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(engine: Engine, sampler: PoolSampler, prompt: str = "Count from 1 to 9", **params) -> None:
    engine.add_request(prompt, SamplingParams(**{"temperature": 0.0, **params}))
    while engine.has_unfinished_requests:
        engine.step()
        sampler.after_step()


def test_a_sampler_shows_every_step(engine: Engine):
    sampler, state = PoolSampler(engine, clock=Clock(), work_clock=Clock()), PoolState(129)
    first = sampler.fetch(tokens=True)
    for frame in first.frames:
        state.apply(frame)
    run(engine, sampler, max_tokens=24, ignore_eos=True)
    last = sampler.fetch(first.epoch)
    assert last.epoch == first.epoch
    assert len(last.frames) > 24
    used = set()
    for frame in last.frames:
        state.apply(for_viewers(frame, chr))
        used.add(int((state.counts > 0).sum()))
    assert used == {0, 2, 3}
    infos = engine.block_map()
    cached = [i for i, info in infos.items() if info.state == "cached"]
    assert np.flatnonzero(state.counts == -1).tolist() == cached
    assert "Count from 1 to " in map("".join, state.text.values())
    assert last.stats == engine.stats()


@pytest.mark.parametrize("kind", [{"n": 3, "temperature": 2.0}, {"n": 3, "beam_width": 3}])
def test_a_sampler_tells_of_every_copy(engine: Engine, kind: dict):
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    epoch, before = sampler.fetch().epoch, engine.stats().num_block_copies
    run(engine, sampler, prompt="Count", max_tokens=40, ignore_eos=True, **kind)
    pairs, counts = [], np.zeros(129, np.int64)
    for frame in sampler.fetch(epoch).frames:
        counts[expand_ranges(frame["ids"])] = expand_runs(frame["counts"])
        copies = frame.get("copies", [])
        pairs += zip(copies[::2], copies[1::2], strict=True)
        assert all(counts[target] >= 1 for target in copies[1::2])
    assert len(pairs) == engine.stats().num_block_copies - before >= 2


def test_a_sampler_tells_no_tokens_unless_asked(engine: Engine):
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    epoch = sampler.fetch().epoch
    run(engine, sampler, max_tokens=4)
    assert not any("tokens" in frame for frame in sampler.fetch(epoch).frames)


class Looks(Clock):
    """A work clock by which every look takes as long as it says."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def __call__(self) -> float:  # before a look, and after it
        self.now += self.seconds
        return self.now


def test_a_sampler_takes_a_small_share_of_the_time(engine: Engine):
    clock = Clock()
    clock.now = 1000.0  # what was before the sampler saves nothing up
    sampler = PoolSampler(engine, clock=clock, work_clock=Looks(1.0))
    epoch = sampler.fetch().epoch
    run(engine, sampler, max_tokens=8, ignore_eos=True)
    assert len(sampler.fetch(epoch).frames) == 1  # all the rest waits for the next question


def test_a_sampler_saves_up_the_time_for_looks_at_a_request_that_comes_by_itself(engine: Engine):
    """Looks take a tenth of a step, so that five times too many are wanted."""
    clock = Clock()
    sampler = PoolSampler(engine, clock=clock, work_clock=Looks(0.001))
    epoch = sampler.fetch().epoch
    clock.now = 2.0  # long enough for all that can be saved: 20 looks
    engine.add_request("Count", SamplingParams(max_tokens=100, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
        sampler.after_step()
        clock.now += 0.01
    steps = [frame["step"] for frame in sampler.fetch(epoch).frames]
    assert steps[:20] == list(range(steps[0], steps[0] + 20))
    assert np.mean(np.diff(steps[30:-1])) == pytest.approx(5, abs=0.5)


def test_fetches_do_not_blind_the_sampler(engine: Engine):
    """They look whatever was saved, again and again, which takes ten times what is allowed."""
    clock = Clock()
    sampler = PoolSampler(engine, clock=clock, work_clock=Looks(0.02))
    epoch = sampler.fetch().epoch
    for _ in range(50):
        clock.now += 0.1
        sampler.fetch(epoch)
    clock.now += 1.1
    run(engine, sampler, max_tokens=8, ignore_eos=True)
    assert len(sampler.fetch(epoch).frames) > 1


def test_unfetched_frames_are_merged(engine: Engine):
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    epoch = sampler.fetch().epoch
    for _ in range(4):
        run(engine, sampler, max_tokens=90, ignore_eos=True)
    assert len(sampler.fetch(epoch).frames) == MAX_FRAMES + 1


def test_a_sampler_that_fails_stops_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    epoch = sampler.fetch().epoch
    with monkeypatch.context() as patch:
        patch.setattr(PoolWatch, "look", lambda self: 1 / 0)
        run(engine, sampler, max_tokens=2)
    assert "ZeroDivisionError" in capsys.readouterr().err
    told = sampler.fetch(epoch)
    assert (told.failed, told.frames) == (True, [])
    anew = sampler.fetch(epoch)
    assert (anew.failed, anew.epoch, len(anew.frames)) == (False, epoch + 1, 1)


def test_a_sampler_stops_when_nobody_asks(engine: Engine):
    clock = Clock()
    sampler = PoolSampler(engine, clock=clock, work_clock=clock)
    first = sampler.fetch()
    clock.now += PATIENCE + 1
    run(engine, sampler, max_tokens=2)
    again = sampler.fetch(first.epoch)
    assert again.epoch == first.epoch + 1  # anew, with all there is
    assert len(again.frames) == 1
    sampler.stop()
    sampler.stop()


# The hub


def shots(*changes: PoolChanges, epoch: int = 1, steps: int = 0) -> PoolFrames:
    stats = EngineStats(16, 8, 8, 0, num_steps=steps)
    return PoolFrames(epoch, [encode(change, i) for i, change in enumerate(changes)], stats)


class Source:
    """Gives what it was given, one a question, and then nothing new; or fails."""

    def __init__(self, *answers: PoolFrames, fails: bool = False):
        self.answers = list(answers)
        self.fails = fails
        self.num_asked = 0
        self.is_over = False

    async def fetch(self, epoch: int) -> PoolFrames:
        self.num_asked += 1
        if len(self.answers) > 1:
            return self.answers.pop(0)
        if self.fails:
            raise not_serving("the engine is not running")
        return PoolFrames(self.answers[0].epoch, [], self.answers[0].stats)


def hub_of(source: Source) -> Broadcast:
    description = {"num_blocks": 9, "block_size": 16}
    return Broadcast(source.fetch, description, is_over=lambda: source.is_over, interval=0.001)


def parse(event: bytes) -> tuple[str, dict]:
    name, data, *_ = event.decode().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


BLOCK = PoolChanges(ChangedBlocks([3], [1], [0]))
FREED = PoolChanges(ChangedBlocks([3], [0], [0]))


def test_a_viewer_gets_a_snapshot_and_then_frames():
    async def watch() -> None:
        source = Source(shots(BLOCK), shots(FREED, steps=1), shots(steps=1))
        hub = hub_of(source)
        async with aclosing(hub.watch()) as events, aclosing(hub.watch()) as late:
            assert source.num_asked == 0  # without viewers
            name, snapshot = parse(await anext(events))
            assert (name, snapshot["pool"]["num_blocks"]) == ("snapshot", 9)
            assert snapshot["frame"]["ids"] == [3, 1]
            name, news = parse(await anext(events))
            assert (name, news["frames"][0]["counts"]) == ("frames", [0, 1])
            assert news["stats"]["num_steps"] == 1
            assert parse(await anext(late))[1]["frame"]["ids"] == []

    asyncio.run(watch())


def test_streams_end_when_the_server_does():
    async def watch() -> None:
        source = Source(shots(BLOCK))
        hub = hub_of(source)
        async with aclosing(hub.watch()) as events:
            await anext(events)
            source.is_over = True
            assert [event async for event in events] == []
        with pytest.raises(ApiError, match="shutting down"):
            await anext(hub.watch())

    asyncio.run(watch())


def test_streams_fail_with_the_engine():
    async def watch() -> None:
        hub = hub_of(Source(shots(BLOCK), shots(), fails=True))
        async with aclosing(hub.watch()) as events:
            await anext(events)
            with pytest.raises(ApiError, match="not running"):
                await anext(events)
        assert hub.num_viewers == 0

    asyncio.run(watch())


def test_streams_fail_with_the_sampler():
    async def watch() -> None:
        bad = PoolFrames(1, [], EngineStats(16, 8, 8, 0), failed=True)
        hub = hub_of(Source(shots(BLOCK), bad, shots(epoch=2)))
        async with aclosing(hub.watch()) as events:
            await anext(events)
            with pytest.raises(ApiError, match="log"):
                await anext(events)
        async with aclosing(hub.watch()) as events:  # a viewer that comes again sees it all
            assert parse(await anext(events))[0] == "snapshot"

    asyncio.run(watch())


def test_nobody_is_asked_when_nobody_watches():
    async def watch() -> None:
        source = Source(shots(BLOCK), shots())
        hub = hub_of(source)
        async with aclosing(hub.watch()) as events:
            await anext(events)
        await asyncio.sleep(0.02)
        asked = source.num_asked
        await asyncio.sleep(0.02)
        assert (hub.num_viewers, source.num_asked) == (0, asked)
        async with aclosing(hub.watch()) as events:  # and again when somebody does
            assert parse(await anext(events))[1]["frame"]["ids"] == [3, 1]

    asyncio.run(watch())


def test_a_slow_viewer_gets_a_snapshot_in_place_of_what_it_missed():
    big = PoolChanges(images=[("x" * (MAX_UNREAD // 3), 1)])

    async def watch() -> None:
        answers = [shots(big, steps=i) for i in range(8)]
        hub = hub_of(Source(shots(), *answers, shots(BLOCK, steps=9), shots(steps=9)))
        async with aclosing(hub.watch()) as events:
            await anext(events)
            await asyncio.sleep(0.1)  # it does not read
            name, snapshot = parse(await anext(events))
            assert (name, snapshot["frame"]["ids"]) == ("snapshot", [3, 1])

    asyncio.run(watch())


def test_a_sampler_that_began_anew_gives_a_snapshot():
    async def watch() -> None:
        hub = hub_of(Source(shots(BLOCK), shots(FREED, epoch=2), shots(epoch=2)))
        async with aclosing(hub.watch()) as events:
            names = [parse(await anext(events))[0] for _ in range(2)]
        assert names == ["snapshot", "snapshot"]

    asyncio.run(watch())


def test_an_empty_pool_that_began_anew_is_shown_too():
    """Nothing is held, and the figures are the same: there is nothing to tell but that."""

    async def watch() -> None:
        hub = hub_of(Source(shots(BLOCK), shots(), PoolFrames(2, [], shots().stats)))
        async with aclosing(hub.watch()) as events:
            assert parse(await anext(events))[1]["frame"]["ids"] == [3, 1]
            name, snapshot = parse(await asyncio.wait_for(anext(events), 1))
        assert (name, snapshot["frame"]["ids"]) == ("snapshot", [])

    asyncio.run(watch())


def test_after_a_fault_in_the_hub_the_sampler_begins_anew():
    """The frames it was about to take are lost: what comes after them does not fit."""
    asked = []

    async def fetch(epoch: int) -> PoolFrames:
        asked.append(epoch)
        return shots(PoolChanges(tokens={1: [0]}), steps=len(asked))

    async def watch() -> None:
        hub = Broadcast(fetch, {"num_blocks": 9}, lambda token: str(1 // token), interval=0.001)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await anext(hub.watch())
        assert asked == [0, 0]

    asyncio.run(watch())


def test_too_many_viewers_are_refused():
    async def watch() -> None:
        hub = hub_of(Source(shots()))
        async with AsyncExitStack() as stack:
            for _ in range(MAX_VIEWERS):
                await anext(await stack.enter_async_context(aclosing(hub.watch())))
            with pytest.raises(ApiError, match=f"{MAX_VIEWERS} watch"):
                await anext(hub.watch())

    asyncio.run(watch())


def test_silence_is_broken_by_a_heartbeat(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broadcast, "HEARTBEAT", 0.01)

    async def watch() -> None:
        async with aclosing(hub_of(Source(shots())).watch()) as events:
            await anext(events)
            assert (await anext(events)).startswith(b":")

    asyncio.run(watch())
