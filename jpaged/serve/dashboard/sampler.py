"""Sampling of the KV block pool for the dashboard, between the steps of the engine.

A sampler is idle until pool diffs are fetched. Then it samples after steps, but may use only a
small fraction of the time. While the engine is idle, the time budget for samples grows. So a single
request is sampled after each of its steps, and the dashboard shows every change of its blocks. A
busy engine is sampled after some of its steps only.

A sampler stops when diffs are no longer fetched, or when sampling fails. The engine continues.
"""

import sys
import time
import traceback
from collections.abc import Callable

from jpaged import Engine, PoolWatch
from jpaged.serve.engine.messages import PoolDiff, PoolDiffs

MAX_TIME_FRACTION = 0.02
"""Maximum fraction of the time that samples after steps may take. Snapshots may take the same
fraction in addition."""

MAX_BUDGET_S = 1.0 * MAX_TIME_FRACTION
"""Maximum sampling time that can be saved up, in seconds: the budget of one second."""

MAX_DIFFS = 256
"""Maximum number of unfetched pool diffs; later changes are merged into one diff."""

FETCH_TIMEOUT_S = 5.0
"""Seconds without a fetch after which sampling stops."""

MAX_TOKENS_PER_DIFF = 3200
"""Maximum number of tokens in a pool diff, in whole blocks; later diffs contain the others."""


class PoolSampler:
    """Samples the pool of an engine, in the engine's thread.

    Args:
        engine: Engine to observe.
        clock: Returns the time in seconds.
        work_clock: Returns the CPU time of the thread in seconds, so that waiting for a processor
            does not count as sampling.
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
        """Take a sample if the time budget allows. `EngineWorker` calls this after each step."""
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
        """Return the pool diffs since the last call, and start sampling if it has stopped.

        A call that starts sampling also returns a snapshot. If sampling has failed, the next call
        only reports the failure.

        Args:
            snapshot: Whether to take a snapshot too. Snapshots may take `MAX_TIME_FRACTION` of the
                time. If the previous snapshot is too recent for this limit, take no snapshot.
            tokens: Whether the next snapshot and all later diffs contain the tokens of blocks.
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
            snapshot_diff = self._make_snapshot(tokens)
        failed, self._has_failed = self._has_failed, False
        return PoolDiffs(self._epoch, diffs, self._engine.stats(), snapshot_diff, failed)

    def stop(self) -> None:
        """Stop sampling until the next `fetch`."""
        if self._watch is not None:
            self._watch.close()
        self._watch, self._diffs = None, []

    def _sample(self, watch: PoolWatch) -> None:
        started = self._work_clock()
        diff = self._make_diff(watch)
        if diff is not None and diff.changes:
            self._diffs.append(diff)
        # `fetch` takes a sample even if the time budget is negative. Reset a negative budget to 0
        # before subtracting this sample's time. Otherwise, frequent fetches would lower the budget
        # without limit, and no step would be sampled for a long time.
        self._budget_s = max(self._budget_s, 0.0) - (self._work_clock() - started)

    def _make_snapshot(self, tokens: bool) -> PoolDiff | None:
        """Start a new `PoolWatch`, and return its first diff, which is a snapshot of the pool."""
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
        """Return the changes since the last sample, or None if sampling fails."""
        try:
            return PoolDiff(self._num_steps, watch.look())
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            self.stop()
            self._has_failed = True
            return None
