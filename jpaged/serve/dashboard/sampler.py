"""Samples what the dashboard shows, between the engine's steps.

A sampler stands idle until frames are asked for. Then it samples after steps, as often as a small
share of the time allows. What an idle engine leaves of that share is saved up: a request that comes
by itself is sampled after each of its steps, so that every block can be watched as it is taken,
shared, copied and given back; a busy engine is sampled after some. Frames that were not fetched are
merged. A sampler stops when it is not asked any more, and when it fails; the engine goes on.
"""

import sys
import time
import traceback
from collections.abc import Callable

from jpaged import Engine, PoolWatch
from jpaged.serve.engine.messages import PoolDiff, PoolDiffs

MAX_TIME_FRACTION = 0.02
"""Share of the time that samples after steps may take, and that snapshots may."""

MAX_BUDGET_S = 1.0 * MAX_TIME_FRACTION
"""Seconds of sampling that can be saved up: what an idle second allows."""

MAX_DIFFS = 256
"""Frames kept until they are fetched; what follows comes as one."""

FETCH_TIMEOUT_S = 5.0
"""Seconds without a fetch after which a sampler stops."""

MAX_TOKENS_PER_DIFF = 3200
"""Tokens that one frame tells at most, in whole blocks; the next frames tell the others."""


class PoolSampler:
    """Samples an engine's pool, in the engine's thread.

    Args:
        engine: What to look at.
        clock: Seconds.
        work_clock: CPU seconds of this thread, which waiting for a processor does not add to.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ):
        self._engine = engine
        self._clock, self._work_clock = clock, work_clock
        self._watch: PoolWatch | None = None
        self._diffs: list[PoolDiff] = []
        self._has_failed = False
        self._epoch = self._num_steps = 0
        self._last_fetch = self._snapshot_due = 0.0
        self._budget_s, self._last_budget_update = MAX_BUDGET_S, clock()

    def after_step(self) -> None:
        """Sample, if it is time to; to be called after each step."""
        self._num_steps += 1
        if self._watch is None:
            return
        now = self._clock()
        if now - self._last_fetch > FETCH_TIMEOUT_S:
            self.stop()
            return
        self._budget_s = min(
            MAX_BUDGET_S, self._budget_s + (now - self._last_budget_update) * MAX_TIME_FRACTION
        )
        self._last_budget_update = now
        if self._budget_s > 0 and len(self._diffs) < MAX_DIFFS:
            self._sample(self._watch)

    def fetch(self, snapshot: bool = False, tokens: bool = False) -> PoolDiffs:
        """The frames since the last call. One that starts the sampler, which the first call does
        and the first one after a pause or a failure, gives a snapshot.

        Args:
            snapshot: Whether a snapshot is wanted in any case; it comes with a later call if
                snapshots have taken too much time.
            tokens: Whether frames from the next snapshot on shall tell the blocks' tokens.
        """
        now = self._last_fetch = self._clock()
        snapshot_diff = None
        if self._watch is not None:
            self._sample(self._watch)
        elif not self._has_failed:
            self._epoch += 1
            self._snapshot_due, snapshot = now, True
        diffs, self._diffs = self._diffs, []
        if snapshot and now >= self._snapshot_due and not self._has_failed:
            snapshot_diff = self._make_snapshot(tokens)  # which starts the watch, or another one
        failed, self._has_failed = self._has_failed, False
        return PoolDiffs(self._epoch, diffs, self._engine.stats(), snapshot_diff, failed)

    def stop(self) -> None:
        """Take no samples until the next `fetch`."""
        if self._watch is not None:
            self._watch.close()
        self._watch, self._diffs = None, []

    def _sample(self, watch: PoolWatch) -> None:
        started = self._work_clock()
        diff = self._make_diff(watch)
        if diff is not None and diff.changes:
            self._diffs.append(diff)
        # A fetch samples whatever was saved: the debt is never more than one sample's.
        self._budget_s = max(self._budget_s, 0.0) - (self._work_clock() - started)

    def _make_snapshot(self, tokens: bool) -> PoolDiff | None:
        """The first look of another watch, which takes the place of the one so far."""
        started = self._work_clock()
        self.stop()
        num_token_blocks = MAX_TOKENS_PER_DIFF // self._engine.stats().block_size if tokens else 0
        self._watch = self._engine.watch_pool(num_token_blocks)
        snapshot = self._make_diff(self._watch)
        elapsed = self._work_clock() - started
        self._budget_s -= elapsed
        self._snapshot_due = self._last_fetch + elapsed / MAX_TIME_FRACTION
        return snapshot

    def _make_diff(self, watch: PoolWatch) -> PoolDiff | None:
        """What changed since the last look; None if that fails."""
        try:
            return PoolDiff(self._num_steps, watch.look())
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            self.stop()
            self._has_failed = True
            return None
