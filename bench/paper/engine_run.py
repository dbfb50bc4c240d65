"""Serve a trace with the real engine in real time, with any of the paper's allocators.

Only the block manager of the engine is replaced. The pool has as many slots as in the paper, so
that memory is the bottleneck. Weights may be random, because end tokens are ignored. The result is
a `bench.paper.simulator.Run`. The time of a step is the time of the loop iteration that launched
the step. If many similar steps follow each other, this time equals the time of the step on the
device.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.paper.allocators import make_manager
from bench.paper.simulator import Run, Tally, Workload, stream_tokens
from bench.paper.traces import Piece, TraceRequest
from jpaged import Engine, SamplingParams
from jpaged.config import EngineConfig
from jpaged.core.plan import SchedulingGoal, StepPlan
from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.engine.startup import build_parts
from jpaged.outputs import RequestDelta


class WatchedScheduler(Scheduler):
    """A scheduler that calls the function `watch` with each plan that it makes.

    Attributes:
        watch: Function that takes a `StepPlan`; None if no function is called.
        requests: Maps the id of each added request to the request. `run_on_engine` removes a
            request when the request has finished.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.watch: Callable[[StepPlan], None] | None = None
        self.requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        self.requests[request.request_id] = request

    def schedule(self, goal: SchedulingGoal = SchedulingGoal.LATENCY) -> StepPlan | None:
        plan = super().schedule(goal)
        if plan is not None and self.watch is not None:
            self.watch(plan)
        return plan


@dataclass(frozen=True)
class Server:
    """An engine that allocates KV cache blocks like one of the compared systems.

    Attributes:
        system: Name of the system, one of `allocators.SYSTEMS`.
        engine: The engine.
        scheduler: Scheduler of the engine.
        block_bytes: Number of bytes of a block of the KV cache.
    """

    system: str
    engine: Engine
    scheduler: WatchedScheduler
    block_bytes: int


def make_server(
    system: str,
    model: str | Path | None = None,
    *,
    num_slots: int,
    block_size: int = 16,
    prefix_caching: bool = False,
    **options: Any,
) -> Server:
    """Start an engine.

    Args:
        system: One of `allocators.SYSTEMS`.
        model: Argument `model` of `Engine`.
        num_slots: Number of tokens that the KV memory holds, without the null block.
        block_size: Number of slots of a block.
        prefix_caching: Whether prompts with a common prefix share blocks; only with "ours".
        **options: Other options of `Engine`.

    Raises:
        TypeError, ValueError: the same errors as `Engine` and `make_manager`.
    """
    config = EngineConfig.from_options(
        model,
        {
            "num_blocks": 1 + num_slots // block_size,
            "block_size": block_size,
            "enable_prefix_caching": prefix_caching,
            "skip_tokenizer_init": True,
            **options,
        },
    )
    parts = build_parts(config)
    runtime, made = parts.runtime_config, parts.scheduler
    manager = make_manager(
        system,
        runtime.num_blocks,
        runtime.block_size,
        runtime.max_model_len,
        prefix_caching=prefix_caching,
    )
    scheduler = WatchedScheduler(made.config, manager, made.swap_space.policy)
    engine = Engine.from_parts(config, dataclasses.replace(parts, scheduler=scheduler))
    return Server(system, engine, scheduler, parts.memory_account.kv_cache // runtime.num_blocks)


def run_on_engine(
    server: Server,
    trace: Sequence[TraceRequest],
    *,
    num_samples: int = 1,
    beam_width: int | None = None,
    give_up_at: float | None = None,
) -> Run:
    """Serve a trace in real time: each request is added at its arrival time.

    Args:
        server: An idle server. It can serve several traces, one after another.
        trace: Requests, sorted by arrival.
        num_samples, beam_width, give_up_at: See `simulate`.

    Raises:
        ValueError: a request can never be served.
        RuntimeError: a request or a step failed.
    """
    prefix_caching = server.scheduler.block_manager.prefix_cache is not None
    if prefix_caching:
        server.engine.reset_prefix_cache()
    vocab_size = server.engine.vocab_size
    work = EngineWorkload(trace, server.system, num_samples, beam_width, vocab_size)
    return _Replay(server, work, give_up_at).run()


class EngineWorkload(Workload):
    """Requests of a trace for an engine.

    The next prompt of a conversation contains the tokens that the engine has generated so far.
    """

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        system: str,
        num_samples: int,
        beam_width: int | None,
        vocab_size: int,
    ):
        super().__init__(trace, system, num_samples, beam_width, True)
        self._vocab_size = vocab_size
        # `_answers[stream][i]` is the token that the engine generated at position i of the
        # conversation with the number `stream`.
        self._answers: dict[int, dict[int, int]] = {}

    def arrive(self, index: int) -> list[tuple[str, list[int], SamplingParams]]:
        """Record that a request of the trace has arrived. Return (id, prompt, parameters) of each
        request to add to the engine.

        Systems that share no blocks get one request per sample or beam.
        """
        self.note_arrival(index)
        max_tokens = self.trace[index].output_len
        common: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
        num_samples = self.width // self.num_apart
        if self.is_search:
            params = SamplingParams(n=self.width, beam_width=self.width, temperature=0.0, **common)
        else:
            is_greedy = num_samples == 1
            params = SamplingParams(
                n=num_samples, temperature=0.0 if is_greedy else 1.0, seed=index, **common
            )
        prompt = self.prompt(index)
        return [(f"{index}.{each}", prompt, params) for each in range(self.num_apart)]

    def prompt(self, index: int) -> list[int]:
        """Return the token ids of a request's prompt, modulo the size of the vocabulary.

        Earlier answers in the prompt are the tokens that the engine has generated.
        """
        given = self.trace[index]
        pieces = given.prompt or ((-1 - index, 0, given.prompt_len),)
        return [token for piece in pieces for token in self._tokens(piece)]

    def _tokens(self, piece: Piece) -> list[int]:
        stream, start, stop = piece
        tokens = [token % self._vocab_size for token in stream_tokens(stream, start, stop)]
        answers = self._answers.get(stream)
        if answers is None:
            return tokens
        places = range(start, stop)
        return [answers.get(i, token) for i, token in zip(places, tokens, strict=True)]

    def note_answer(self, index: int, num_before: int, token_ids: Sequence[int]) -> None:
        """Record generated tokens, for the next prompt of the conversation.

        The request has generated `num_before` tokens before `token_ids`.
        """
        pieces = self.trace[index].prompt
        if pieces:
            stream, _, stop = pieces[-1]
            answers = self._answers.setdefault(stream, {})
            answers.update(enumerate(token_ids, stop + num_before))


class _Replay:
    def __init__(self, server: Server, work: EngineWorkload, give_up_at: float | None):
        self._server, self._work = server, work
        self._give_up_at = math.inf if give_up_at is None else give_up_at
        self._tally = Tally(server.scheduler, work.num_apart)
        self._num_outputs = 0
        self._num_answered: dict[int, int] = {}
        self._start = time.monotonic()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._start

    def run(self) -> Run:
        scheduler = self._server.scheduler
        scheduler.watch = self._tally.note
        try:
            self._serve()
        finally:
            scheduler.watch = None
            scheduler.requests.clear()
        return self._tally.run(
            self._work,
            now=self._now,
            num_outputs=self._num_outputs,
            block_bytes=self._server.block_bytes,
        )

    def _serve(self) -> None:
        work, engine = self._work, self._server.engine
        arrived, turned = 0, self._now
        while work.num_open:
            while arrived < len(work.trace) and work.trace[arrived].arrival <= self._now:
                for request_id, prompt, params in work.arrive(arrived):
                    engine.add_request(prompt, params, request_id=request_id)
                arrived += 1
            if not engine.has_work:
                time.sleep(max(work.trace[arrived].arrival - self._now, 0.0))
                turned = self._now
                continue
            engine.advance()
            before, turned = turned, self._now
            self._tally.spend(turned - before)
            for delta in engine.take_deltas():
                self._take(delta)
            gives_up = (
                self._give_up_at is not None and work.least_latency(turned) > self._give_up_at
            )
            if gives_up:
                engine.abort_all()
                break

    def _take(self, delta: RequestDelta) -> None:
        if delta.error is not None:
            raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
        work, index = self._work, int(delta.request_id.partition(".")[0])
        num_before = self._num_answered.get(index, 0)
        for answer in delta.deltas:
            self._num_outputs += len(answer.token_ids)
            if answer.index == 0:
                work.note_answer(index, num_before, answer.token_ids)
                self._num_answered[index] = num_before + len(answer.token_ids)
        if delta.finished:
            times = delta.metrics
            if times is None or times.first_token_time is None or times.finished_time is None:
                raise RuntimeError(f"request {delta.request_id} ended, but has no recorded times")
            work.note_first(index, times.first_token_time - self._start)
            work.note_end(index, times.finished_time - self._start)
            self._tally.note_end(self._server.scheduler.requests.pop(delta.request_id))
