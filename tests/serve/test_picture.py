"""Test how the dashboard's event stream records pool diffs and sends them to viewers.

A pool diff lists the changes of the KV block pool since the previous pool diff. `PoolSampler`
records pool diffs between engine steps, and `Broadcast` sends them to viewers.
"""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from pool_replica import PoolReplica

from jpaged import Engine, EngineStats, PoolChanges, PoolWatch, SamplingParams
from jpaged.observe.pool_changes import CACHED, ChangedBlocks, TableChange
from jpaged.serve.dashboard import broadcast
from jpaged.serve.dashboard import sampler as sampler_module
from jpaged.serve.dashboard.broadcast import (
    MAX_UNREAD_BYTES,
    MAX_VIEWERS,
    Broadcast,
    Viewer,
    ViewerState,
)
from jpaged.serve.dashboard.sampler import FETCH_TIMEOUT_S, MAX_DIFFS, PoolSampler
from jpaged.serve.engine.messages import PoolDiff, PoolDiffs, decode_report, encode
from jpaged.serve.errors import ApiError, unavailable_error

# Tests of the encoding of KV block pool changes


def table(seq_id: int, computed: int, kept: int, *new: int) -> TableChange:
    return TableChange(seq_id, f"r{seq_id}", 0, "running", 4, computed, kept, new, 0)


def test_kv_block_pool_changes_are_equal_after_encoding_and_decoding():
    changes = PoolChanges(
        ChangedBlocks([1, 2], [2, -1], [77, 2**32 - 1]),
        [table(5, 6, 0, 1, 2)],
        {6: 9},
        [7],
        [("r8", 4)],
        [1],
        {1: [65, 66]},
        {2: 1},
    )
    sent = PoolDiffs(1, [PoolDiff(3, changes)], EngineStats(16, 8, 8, 0), PoolDiff(3, changes))
    assert decode_report(encode(sent)) == sent


def test_large_pool_snapshot_is_small_and_encoded_quickly():
    num_blocks = 100_000
    rng = np.random.RandomState(0)
    ids = (rng.permutation(num_blocks) + 1).tolist()
    hashes = rng.randint(1, 2**31, num_blocks).tolist()
    changes = PoolChanges(
        ChangedBlocks([*range(1, num_blocks + 1)], [1] * num_blocks, hashes),
        [table(s, 6240, 0, *ids[s * 390 : (s + 1) * 390]) for s in range(256)],
    )
    start = time.thread_time()
    size = len(msgspec.json.encode(PoolDiff(0, changes)))
    assert time.thread_time() - start < 0.5
    # The snapshot has four numbers for each of the 100,000 blocks: at most 28 bytes per block.
    assert size < 2_800_000
    blocks = ChangedBlocks([5], [2], [0])
    one = PoolDiff(1, PoolChanges(blocks, grown=dict.fromkeys(range(256), 6241)))
    assert len(msgspec.json.encode(one)) < 4_000


# Tests of `PoolSampler`, which records the changes of the KV block pool


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


def replayed(told: PoolDiffs, replica: PoolReplica) -> list[int]:
    """Apply every diff to the replica of the KV block pool. Return the number of used blocks after
    each diff."""
    num_used = []
    for frame in told.diffs:
        replica.take(frame.changes)
        num_used.append(replica.num_used_blocks)
    return num_used


def fetch_replica(sampler: PoolSampler, tokens: bool = False) -> PoolReplica:
    """Fetch from `PoolSampler` for the first time. Return a replica of the block pool, made from
    the snapshot."""
    replica, told = PoolReplica(), sampler.fetch(tokens=tokens)
    assert told.diffs == []
    assert told.snapshot is not None
    replica.take(told.snapshot.changes)
    return replica


def test_dashboard_records_the_kv_block_pool_changes_of_every_step(engine: Engine):
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    replica = fetch_replica(sampler, tokens=True)
    run(engine, sampler, max_tokens=24, ignore_eos=True)
    told = sampler.fetch()
    assert len(told.diffs) > 24
    assert set(replayed(told, replica)) == {0, 2, 3}
    infos = engine.block_map()
    cached = {i for i, info in infos.items() if info.state == "cached"}
    assert {i for i, count in replica.counts.items() if count == CACHED} == cached
    assert engine.tokenizer is not None
    texts = map(engine.tokenizer.decode, replica.tokens.values())
    assert any("Count from 1 to " in text for text in texts)
    assert (told.stats, told.snapshot) == (engine.stats(), None)


def test_fetch_returns_a_snapshot_and_the_diffs_before_it(engine: Engine):
    """A new viewer starts with the snapshot. An earlier viewer ignores the snapshot and applies the
    diffs."""
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    early = fetch_replica(sampler, tokens=True)
    engine.add_request("Tell it to viewers who come late", SamplingParams(max_tokens=40))
    for _ in range(20):
        engine.step()
        sampler.after_step()
    told, late = sampler.fetch(snapshot=True, tokens=True), PoolReplica()
    replayed(told, early)
    assert told.snapshot is not None
    late.take(told.snapshot.changes)
    assert late.tables == early.tables != {}
    run(engine, sampler)
    rest = sampler.fetch()
    assert replayed(rest, early) == replayed(rest, late)
    assert rest.epoch == told.epoch
    infos = engine.block_map()
    for replica in (early, late):
        counts = {i: CACHED if infos[i].state == "cached" else 0 for i in infos}
        assert {i: replica.counts.get(i, 0) for i in infos} == counts


def test_dashboard_snapshots_use_at_most_two_percent_of_the_engines_time(engine: Engine):
    clock = Clock()
    sampler = PoolSampler(engine, clock=clock, work_clock=SlowWorkClock(0.002))
    given = []
    for _ in range(101):
        given.append(sampler.fetch(snapshot=True).snapshot is not None)
        clock.now += 0.01
    # a snapshot takes 2 ms, and 2 % of the time is allowed: one snapshot per 100 ms
    assert 9 <= sum(given) <= 11


@pytest.mark.parametrize("kind", [{"n": 3, "temperature": 2.0}, {"n": 3, "beam_width": 3}])
def test_pool_sampler_records_every_copy_of_a_kv_block(engine: Engine, kind: dict):
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    replica, before = fetch_replica(sampler), engine.stats().num_block_copies
    run(engine, sampler, prompt="Count", max_tokens=40, ignore_eos=True, **kind)
    num_copies = 0
    for frame in sampler.fetch().diffs:
        replica.take(frame.changes)
        num_copies += len(frame.changes.copies)
        assert all(replica.counts[target] >= 1 for target in frame.changes.copies)
    assert num_copies == engine.stats().num_block_copies - before >= 2


def test_token_limit_applies_to_each_diff_of_the_block_pool(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sampler_module, "MAX_TOKENS_PER_DIFF", 64)
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    run(engine, sampler, prompt=str([*range(50)]), max_tokens=1)
    replica = fetch_replica(sampler, tokens=True)
    told = [len(replica.tokens)]
    for _ in range(100):
        replayed(sampler.fetch(), replica)
        told.append(len(replica.tokens))
    assert told[0] == max(np.diff(told)) == 4  # 4 blocks of 16 tokens are 64 tokens
    assert len(replica.tokens) == engine.stats().num_cached_blocks > 8


def test_pool_sampler_records_tokens_only_if_requested(engine: Engine):
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    replica = fetch_replica(sampler)
    run(engine, sampler, max_tokens=4)
    replayed(sampler.fetch(), replica)
    assert not replica.tokens


class SlowWorkClock(Clock):
    """A clock that advances by `seconds` each time the clock is read.

    `PoolSampler` reads the clock before and after it records changes of the KV block pool. So each
    recording appears to take `seconds`.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_dashboard_skips_steps_if_recording_kv_block_pool_changes_is_slow(engine: Engine):
    clock = Clock()
    # The clock shows 1000 s when `PoolSampler` is created. These 1000 s must not increase the time
    # that `PoolSampler` may spend on recording.
    clock.now = 1000.0
    sampler = PoolSampler(engine, clock=clock, work_clock=SlowWorkClock(1.0))
    sampler.fetch()
    run(engine, sampler, prompt="A prompt that fills a whole block", max_tokens=8)
    # The snapshot of the first `fetch` took more time than `PoolSampler` may use. So `after_step`
    # recorded no step, and only the second `fetch` records changes.
    assert len(sampler.fetch().diffs) == 1


def test_dashboard_records_twenty_successive_steps_after_idle_time(engine: Engine):
    """A step takes 10 ms, and recording the changes of the KV block pool takes 1 ms. `PoolSampler`
    may use only 2 % of the time. So on average, `PoolSampler` can record only every fifth step."""
    clock = Clock()
    sampler = PoolSampler(engine, clock=clock, work_clock=SlowWorkClock(0.001))
    sampler.fetch()
    # Unused recording time is saved up to a maximum of 20 ms. After 2 idle seconds, `PoolSampler`
    # has saved this maximum, which is enough to record 20 steps.
    clock.now = 2.0
    engine.add_request("Count", SamplingParams(max_tokens=100, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
        sampler.after_step()
        clock.now += 0.01
    steps = [frame.step for frame in sampler.fetch().diffs]
    assert steps[:20] == list(range(steps[0], steps[0] + 20))
    assert np.mean(np.diff(steps[30:-1])) == pytest.approx(5, abs=0.5)


def test_frequent_dashboard_fetches_leave_time_to_record_steps(engine: Engine):
    """`PoolSampler` may use 2 % of the time to record changes of the KV pool. Only calls of `fetch`
    may exceed this limit.

    In this test, 50 calls of `fetch` use 20 % of the time. One second later, `PoolSampler` must
    record steps again.
    """
    clock = Clock()
    sampler = PoolSampler(engine, clock=clock, work_clock=SlowWorkClock(0.02))
    sampler.fetch()
    for _ in range(50):
        clock.now += 0.1
        sampler.fetch()
    clock.now += 1.1
    run(engine, sampler, max_tokens=8, ignore_eos=True)
    assert len(sampler.fetch().diffs) > 1


def test_sampler_keeps_256_unfetched_diffs_of_the_kv_block_pool_and_merges_later_changes(
    engine: Engine,
):
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    sampler.fetch()
    for _ in range(4):
        run(engine, sampler, max_tokens=90, ignore_eos=True)
    assert len(sampler.fetch().diffs) == MAX_DIFFS + 1


def test_engine_continues_after_an_error_in_recording_pool_changes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    sampler.fetch()
    with monkeypatch.context() as patch:
        patch.setattr(PoolWatch, "look", lambda self: 1 / 0)
        run(engine, sampler, max_tokens=2)
    assert "ZeroDivisionError" in capsys.readouterr().err
    told = sampler.fetch()
    assert (told.failed, told.diffs, told.snapshot) == (True, [], None)
    anew = sampler.fetch()
    assert (anew.failed, anew.epoch) == (False, told.epoch + 1)
    assert anew.snapshot is not None


def test_dashboard_starts_again_with_a_snapshot_after_a_fetch_timeout(engine: Engine):
    clock = Clock()
    sampler = PoolSampler(engine, clock=clock, work_clock=clock)
    first = sampler.fetch()
    clock.now += FETCH_TIMEOUT_S + 1
    run(engine, sampler, max_tokens=2)
    again = sampler.fetch()
    # `PoolSampler` increases `epoch` by 1 each time it starts to record changes.
    assert again.epoch == first.epoch + 1
    assert again.snapshot is not None
    sampler.stop()
    sampler.stop()


# Tests of `Broadcast`, which sends KV block pool changes to viewers of the dashboard


def diffs_of(*changes: PoolChanges, epoch: int = 1, steps: int = 0) -> PoolDiffs:
    stats = EngineStats(16, 8, 8, 0, num_steps=steps)
    return PoolDiffs(epoch, [PoolDiff(i, change) for i, change in enumerate(changes)], stats)


class Source:
    """A stand-in for `PoolSampler`, whose `fetch` returns prepared changes of the KV block pool.

    `fetch` adds a snapshot of the pool if the caller requests a snapshot. `fetch` also adds a
    snapshot if the `epoch` of the answer is new: `PoolSampler` increases `epoch` at each restart.

    Args:
        answers: Return values of successive calls of `fetch`. The last answer is returned again
            and again, always with an empty list of changes.
        fails: Whether `fetch` raises an error when only the last answer is left.
    """

    def __init__(self, *answers: PoolDiffs, fails: bool = False):
        self.answers = list(answers)
        self.fails = fails
        self.num_asked = self.epoch = 0
        self.is_over = False
        self.replica = PoolReplica()

    async def fetch(self, snapshot: bool) -> PoolDiffs:
        self.num_asked += 1
        told = replace(self.answers[0], diffs=[])
        if len(self.answers) > 1:
            told = self.answers.pop(0)
        elif self.fails:
            raise unavailable_error("the engine is not running")
        if told.epoch != self.epoch:
            self.epoch, self.replica, snapshot = told.epoch, PoolReplica(), True
        for frame in told.diffs:
            self.replica.take(frame.changes)
        if snapshot:
            held = [block for block, count in self.replica.counts.items() if count]
            blocks = ChangedBlocks(held, [1] * len(held), [0] * len(held))
            told = replace(told, snapshot=PoolDiff(0, PoolChanges(blocks)))
        return told


def broadcast_of(source: Source) -> Broadcast:
    description = {"num_blocks": 9, "block_size": 16}
    return Broadcast(source.fetch, description, is_over=lambda: source.is_over, interval=0.001)


def parse(event: bytes) -> tuple[str, dict]:
    name, data, *_ = event.decode().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def held_blocks(snapshot: dict) -> list[int]:
    block_ids, _, _ = snapshot["frame"]["changes"]["blocks"]
    return block_ids


BLOCK = PoolChanges(ChangedBlocks([3], [1], [0]))
FREED = PoolChanges(ChangedBlocks([3], [0], [0]))


def test_viewer_gets_a_snapshot_and_then_diffs():
    async def watch() -> None:
        source = Source(diffs_of(BLOCK), diffs_of(FREED, steps=1), diffs_of(steps=1))
        hub = broadcast_of(source)
        async with aclosing(hub.stream_events()) as events, aclosing(hub.stream_events()) as late:
            # No changes are fetched until a dashboard viewer reads the first event.
            assert source.num_asked == 0
            name, snapshot = parse(await anext(events))
            assert (name, snapshot["pool"]["num_blocks"]) == ("snapshot", 9)
            assert held_blocks(snapshot) == [3]
            name, news = parse(await anext(events))
            assert (name, news["frames"][0]["changes"]["blocks"]) == ("frames", [[3], [0], [0]])
            assert news["stats"]["num_steps"] == 1
            assert held_blocks(parse(await anext(late))[1]) == []

    asyncio.run(watch())


def test_viewer_streams_end_when_the_server_shuts_down():
    async def watch() -> None:
        source = Source(diffs_of(BLOCK))
        hub = broadcast_of(source)
        async with aclosing(hub.stream_events()) as events:
            await anext(events)
            source.is_over = True
            assert [event async for event in events] == []
        with pytest.raises(ApiError, match="shutting down"):
            await anext(hub.stream_events())

    asyncio.run(watch())


def test_viewer_streams_fail_when_the_engine_fails():
    async def watch() -> None:
        hub = broadcast_of(Source(diffs_of(BLOCK), diffs_of(), fails=True))
        async with aclosing(hub.stream_events()) as events:
            await anext(events)
            with pytest.raises(ApiError, match="not running"):
                await anext(events)
        assert hub.num_viewers == 0

    asyncio.run(watch())


def test_viewer_streams_fail_if_recording_kv_block_pool_changes_fails():
    async def watch() -> None:
        bad = PoolDiffs(1, [], EngineStats(16, 8, 8, 0), failed=True)
        hub = broadcast_of(Source(diffs_of(BLOCK), bad, diffs_of(epoch=2)))
        async with aclosing(hub.stream_events()) as events:
            await anext(events)
            with pytest.raises(ApiError, match="log"):
                await anext(events)
        async with aclosing(hub.stream_events()) as events:  # a reconnecting viewer gets a snapshot
            assert parse(await anext(events))[0] == "snapshot"

    asyncio.run(watch())


def test_no_kv_block_pool_changes_are_fetched_without_dashboard_viewers():
    async def watch() -> None:
        source = Source(diffs_of(BLOCK), diffs_of())
        hub = broadcast_of(source)
        async with aclosing(hub.stream_events()) as events:
            await anext(events)
        await asyncio.sleep(0.02)
        asked = source.num_asked
        await asyncio.sleep(0.02)
        assert (hub.num_viewers, source.num_asked) == (0, asked)
        # Fetching resumes when the next dashboard viewer connects.
        async with aclosing(hub.stream_events()) as events:
            assert held_blocks(parse(await anext(events))[1]) == [3]

    asyncio.run(watch())


def test_slow_viewer_gets_a_snapshot_instead_of_missed_diffs():
    big = PoolChanges(swap_entries=[("x" * (MAX_UNREAD_BYTES // 3), 1)])

    async def watch() -> None:
        answers = [diffs_of(big, steps=i) for i in range(8)]
        hub = broadcast_of(
            Source(diffs_of(), *answers, diffs_of(BLOCK, steps=9), diffs_of(steps=9))
        )
        async with aclosing(hub.stream_events()) as events:
            await anext(events)
            await asyncio.sleep(0.1)  # during this time the viewer does not read
            name, snapshot = parse(await anext(events))
            assert (name, held_blocks(snapshot)) == ("snapshot", [3])

    asyncio.run(watch())


def test_unread_bytes_of_a_viewer_are_bounded():
    viewer, part = Viewer(), bytes(MAX_UNREAD_BYTES // 3)
    viewer.add_unread(part)
    assert viewer.take_unread() == b""  # a new viewer gets nothing before the snapshot
    viewer.start_from(bytes(2 * MAX_UNREAD_BYTES))
    viewer.add_unread(part)
    assert [len(viewer.take_unread()) for _ in range(3)] == [2 * MAX_UNREAD_BYTES, len(part), 0]
    for state in [ViewerState.FOLLOWING] * 3 + [ViewerState.BEHIND] * 2:
        viewer.add_unread(part)
        assert viewer.state is state
    assert (viewer.take_unread(), viewer.state) == (b"", ViewerState.WAITING)


def test_long_block_text_causes_no_further_snapshots(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """After each snapshot, the server sends the text of all blocks again. If long text caused a
    snapshot, snapshots would never end."""
    monkeypatch.setattr(sampler_module, "MAX_TOKENS_PER_DIFF", 50 * 16)
    sampler = PoolSampler(engine, clock=Clock(), work_clock=Clock())
    for number in range(10):
        run(engine, sampler, prompt=str([number] * 60), max_tokens=1)
    # A diff may contain the text of at most 50 blocks.
    assert engine.stats().num_cached_blocks > 100
    given: list[bool] = []

    async def fetch(snapshot: bool) -> PoolDiffs:
        for _ in range(10):  # first let the viewers read all earlier events
            await asyncio.sleep(0)
        told = sampler.fetch(snapshot, tokens=True)
        given.append(told.snapshot is not None)
        return told

    async def read(hub: Broadcast, told: dict[str, list[str]]) -> None:
        async with aclosing(hub.stream_events()) as events:
            async for message in events:
                for event in message.split(b"\n\n")[:-1]:
                    name, content = parse(event)
                    for frame in content["frames"] if name == "frames" else [content["frame"]]:
                        told.update(frame["text"])

    async def watch() -> None:
        hub = Broadcast(fetch, {}, lambda token: 500 * "x", interval=0.001)
        everything: list[dict[str, list[str]]] = [{}, {}]
        async with asyncio.TaskGroup() as group:
            tasks = []
            for told in everything:
                tasks.append(group.create_task(read(hub, told)))
                num_before = len(given)
                while len(given) < num_before + 10:
                    await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
        assert [len(told) for told in everything] == [engine.stats().num_cached_blocks] * 2

    asyncio.run(watch())
    assert sum(given) == 2  # one snapshot per viewer


def test_dashboard_viewers_get_a_snapshot_when_sampling_of_the_kv_pool_restarts():
    async def watch() -> None:
        hub = broadcast_of(Source(diffs_of(BLOCK), diffs_of(FREED, epoch=2), diffs_of(epoch=2)))
        async with aclosing(hub.stream_events()) as events:
            names = [parse(await anext(events))[0] for _ in range(2)]
        assert names == ["snapshot", "snapshot"]

    asyncio.run(watch())


def test_dashboard_viewers_get_a_snapshot_when_sampling_restarts_with_an_empty_kv_pool():
    """After the restart, no block is used and the statistics are the same as before. Viewers must
    still get a snapshot."""

    async def watch() -> None:
        hub = broadcast_of(Source(diffs_of(BLOCK), diffs_of(), PoolDiffs(2, [], diffs_of().stats)))
        async with aclosing(hub.stream_events()) as events:
            assert held_blocks(parse(await anext(events))[1]) == [3]
            name, snapshot = parse(await asyncio.wait_for(anext(events), 1))
        assert (name, held_blocks(snapshot)) == ("snapshot", [])

    asyncio.run(watch())


def test_viewers_get_a_snapshot_after_a_broadcast_failure():
    """Diffs are lost in the failure, so viewers cannot apply later diffs without a new snapshot."""
    asked = []

    async def fetch(snapshot: bool) -> PoolDiffs:
        asked.append(snapshot)
        return diffs_of(PoolChanges(tokens={1: [0]}), steps=len(asked))

    async def watch() -> None:
        hub = Broadcast(fetch, {"num_blocks": 9}, lambda token: str(1 // token), interval=0.001)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await anext(hub.stream_events())
        assert asked == [True, True]

    asyncio.run(watch())


def test_broadcast_failure_ends_the_stream_of_a_slow_viewer():
    """A new viewer restarts the broadcast before the slow viewer notices that diffs are lost."""
    good, bad = (diffs_of(PoolChanges(tokens={1: [token]}), steps=token) for token in (1, 0))
    source = Source(diffs_of(), bad, good)

    async def watch() -> None:
        hub = Broadcast(source.fetch, {}, lambda token: str(1 // token), interval=0.001)
        async with aclosing(hub.stream_events()) as slow, aclosing(hub.stream_events()) as late:
            await anext(slow)
            # The second fetch returns `bad`, which contains token 0. The text function of
            # `hub` divides by the token, so the broadcast fails.
            while source.num_asked < 2:
                await asyncio.sleep(0.001)
            assert parse(await anext(late))[0] == "snapshot"
            with pytest.raises(ZeroDivisionError):
                await anext(slow)

    asyncio.run(watch())


def test_block_text_is_omitted_unless_enabled():
    """Token ids are never sent."""

    async def watch(word: Callable[[int], str] | None) -> list[dict]:
        source = Source(diffs_of(), diffs_of(PoolChanges(tokens={1: [65, 66]})), diffs_of())
        hub = Broadcast(source.fetch, {}, word, interval=0.001)
        async with aclosing(hub.stream_events()) as events:
            await anext(events)
            return parse(await anext(events))[1]["frames"]

    [shown], [hidden] = asyncio.run(watch(chr)), asyncio.run(watch(None))
    assert (shown["text"], hidden["text"]) == ({"1": ["A", "B"]}, {})
    assert shown["changes"]["tokens"] == hidden["changes"]["tokens"] == {}


def test_text_of_a_snapshot_is_sent_to_all_viewers():
    """The diffs after a snapshot do not contain the text that the snapshot contains."""
    told = PoolDiff(7, PoolChanges(ChangedBlocks([1], [1], [0]), tokens={1: [65, 66]}))

    async def watch() -> None:
        source = Source(diffs_of(BLOCK), replace(diffs_of(), snapshot=told), diffs_of())
        hub = Broadcast(source.fetch, {}, chr, interval=0.001)
        async with aclosing(hub.stream_events()) as events:
            await anext(events)
            _, news = parse(await anext(events))
        [frame] = news["frames"]
        assert (frame["text"], frame["changes"]["blocks"]) == ({"1": ["A", "B"]}, [[], [], []])

    asyncio.run(watch())


def test_dashboard_viewers_above_the_maximum_are_rejected():
    async def watch() -> None:
        hub = broadcast_of(Source(diffs_of()))
        async with AsyncExitStack() as stack:
            for _ in range(MAX_VIEWERS):
                await anext(await stack.enter_async_context(aclosing(hub.stream_events())))
            with pytest.raises(ApiError, match=f"{MAX_VIEWERS} dashboards are open"):
                await anext(hub.stream_events())

    asyncio.run(watch())


def test_idle_dashboard_stream_sends_a_heartbeat(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broadcast, "HEARTBEAT_S", 0.01)

    async def watch() -> None:
        async with aclosing(broadcast_of(Source(diffs_of())).stream_events()) as events:
            await anext(events)
            assert (await anext(events)).startswith(b":")

    asyncio.run(watch())
