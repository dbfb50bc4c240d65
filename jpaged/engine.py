"""The engine: requests in, tokens out, one step at a time.

    schedule -> launch -> read -> update

In the overlapped loop the step that is read is the one launched a turn ago, so that the device
always has its next step waiting; in the synchronous loop it is the step just launched. Both give
the same tokens.
"""

import difflib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jpaged.config import MAX_LOGPROBS, EngineConfig, LoopMode
from jpaged.core.plan import Emitted, StepPlan
from jpaged.core.request import FinishReason, Request, StopCriteria
from jpaged.detokenizer import Detokenizer
from jpaged.inputs import Prompt, normalize_prompt, normalize_prompts, pair_params
from jpaged.metrics import EngineStats, RequestMetrics
from jpaged.outputs import RequestOutput, TextDelta
from jpaged.request_state import RequestState
from jpaged.runtime.model_runner import StepHandle, StepResult
from jpaged.sampling_params import SamplingParams
from jpaged.startup import build_parts
from jpaged.tokenizer import Tokenizer

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that no two requests of an engine share a seed


class Engine:
    """Serves one model from a paged KV cache.

    Args:
        model: A local folder, a Hugging Face hub id, or None for the embedded model.
        **options: The other fields of `EngineConfig`, by name.

    Raises:
        ValueError: an option is unknown, out of range, or does not fit the model or the device.
    """

    def __init__(self, model: str | Path | None = None, **options: Any):
        _check_options(options)
        self.config = EngineConfig(model=model, **options)
        parts = build_parts(self.config)
        self.tokenizer: Tokenizer | None = parts.tokenizer
        self.runtime_config = parts.runtime_config
        self.model_config = parts.model_config
        self.memory_account = parts.memory_account
        self._eos_token_ids = parts.eos_token_ids
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._requests: dict[str, RequestState] = {}
        self._sampling: dict[int, SamplingParams] = {}
        self._in_flight: deque[StepHandle] = deque()
        self._failure: BaseException | None = None
        self._undelivered: dict[str, RequestState] = {}
        self._arrivals = itertools.count()
        self._counts = dict.fromkeys(("prompt", "generated", "steps", "preempted", "finished"), 0)
        self._peak_used_blocks = 0

    # Requests

    def add_request(
        self,
        prompt: object,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt; `step` brings its outputs.

        Args:
            prompt: A string, a list of token ids, or a dict with either.
            params: How to sample; None stands for `SamplingParams()`.
            request_id: Unique among unfinished requests; None makes one.

        Returns:
            The request's id.

        Raises:
            TypeError, ValueError: the prompt or a parameter is not acceptable, or the request could
                never fit; nothing is queued then.
            RuntimeError: a step failed earlier.
        """
        self._check_alive()
        checked = self._tokenize(normalize_prompt(prompt, vocab_size=self.vocab_size))
        (own,) = pair_params(params, 1)
        return self._add(checked, own, request_id)

    def abort(self, request_id: str) -> None:
        """End a request in any state and give its blocks back; an unknown id is no error.

        A step in flight that holds the request finishes first, and then its blocks are free.
        """
        state = self._requests.get(request_id)
        if state is not None:
            self._scheduler.abort(request_id)
            self._retire(state)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to deliver."""
        return bool(self._scheduler.has_unfinished or self._in_flight or self._undelivered)

    # The loop

    def step(self) -> list[RequestOutput]:
        """Advance by one step.

        Returns:
            The requests that got a token or ended in the step that was read; empty in the turn
            that only fills the overlapped loop's pipeline.
        """
        kept, self._undelivered = self._undelivered, {}
        advanced = {state.request_id: state for state in self._advance()}
        return [state.output() for state in (kept | advanced).values()]

    def _advance(self) -> list[RequestState]:
        """Launch a step and read one; gives the requests that the read one advanced."""
        self._check_alive()
        plan = self._scheduler.schedule()
        if plan is not None:
            self._launch(plan)
        overlapped = self.config.loop_mode is LoopMode.OVERLAPPED
        num_ahead = int(overlapped and plan is not None)
        return self._consume() if len(self._in_flight) > num_ahead else []

    def _launch(self, plan: StepPlan) -> None:
        try:
            self._in_flight.append(self._runner.launch(plan, self._sampling))
        except BaseException as error:
            # The plan counts as launched: what the device holds now is unknown.
            self._failure = error
            raise
        self._counts["steps"] += 1
        self._counts["preempted"] += len(plan.preempted)
        self._peak_used_blocks = max(self._peak_used_blocks, self._num_used_blocks())

    def _check_alive(self) -> None:
        if self._failure is not None:
            message = "the engine failed in an earlier step: make a new one"
            raise RuntimeError(message) from self._failure

    def _consume(self) -> list[RequestState]:
        """Read the oldest step in flight. An interrupt while waiting for it loses nothing."""
        handle = self._in_flight[0]
        result = handle.read()
        self._in_flight.popleft()
        self._take_prompt_logprobs(handle, result)
        index = {item.sequence.seq_id: i for i, item in enumerate(handle.plan.scheduled)}
        emitted = self._scheduler.update(handle.plan, result.token_ids)
        return [self._take(token, result, index[token.sequence.seq_id]) for token in emitted]

    def _take(self, emitted: Emitted, result: StepResult, index: int) -> RequestState:
        state = self._requests[emitted.request.request_id]
        stopped = state.accept(emitted, result.logprobs, index)
        self._counts["generated"] += 1
        if stopped and not emitted.request.is_finished:
            self._scheduler.finish(state.request_id, FinishReason.STOP)
        if emitted.request.is_finished:
            self._retire(state)
        return state

    def _take_prompt_logprobs(self, handle: StepHandle, result: StepResult) -> None:
        if not result.prompt_logprobs:
            return
        states = {s.request.sequences[0].seq_id: s for s in self._requests.values()}
        for item in handle.plan.scheduled:
            scores = result.prompt_logprobs.get(item.sequence.seq_id)
            if scores is not None and item.sequence.seq_id in states:
                states[item.sequence.seq_id].accept_prompt_logprobs(item, scores)

    def _retire(self, state: RequestState) -> None:
        state.finish()
        self._counts["finished"] += 1
        for sequence in state.request.sequences:
            del self._sampling[sequence.seq_id]
        del self._requests[state.request_id]

    # Whole generations

    def generate(
        self,
        prompts: object,
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts and wait for all of them.

        Args:
            prompts: One prompt or a list; each a string, a list of token ids, or a dict.
            params: One for all, or one for each.
            use_tqdm: Show a progress bar; None shows it for more than one prompt on a terminal.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            TypeError, ValueError: a prompt or a parameter is not acceptable; none was started.
        """
        checked = normalize_prompts(prompts, vocab_size=self.vocab_size)
        pairs = list(
            zip(map(self._tokenize, checked), pair_params(params, len(checked)), strict=True)
        )
        ids: list[str] = []
        disable = None if use_tqdm is None and len(pairs) > 1 else not use_tqdm
        try:
            ids.extend(self._add(prompt, own, None) for prompt, own in pairs)
            with tqdm(total=len(ids), desc="Generating", disable=disable, unit="req") as bar:
                done = self._run_until_finished(set(ids), bar.update)
        finally:
            # An error or Ctrl-C leaves nothing behind.
            for request_id in ids:
                self.abort(request_id)
        return [done[request_id] for request_id in ids]

    def stream(
        self, prompt: object, params: SamplingParams | None = None
    ) -> Generator[TextDelta, None, None]:
        """Complete one prompt, yielding its text as it grows; dropping the stream aborts it.

        Raises:
            TypeError, ValueError: the prompt or a parameter is not acceptable (at once, not at the
                first delta).
        """
        request_id = self.add_request(prompt, params)
        deltas = self._deltas(request_id)
        # A generator that was never started does not run its `finally`.
        weakref.finalize(deltas, self.abort, request_id)
        return deltas

    def chat(
        self,
        messages: list[Any],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, written out by the tokenizer's chat template.

        Args:
            messages: A list of {"role": ..., "content": ...}, or a list of such lists.
            params: As for `generate`.
            use_tqdm: As for `generate`.
            **template_options: Passed to the chat template.
        """
        many = bool(messages) and isinstance(messages[0], (list, tuple))
        conversations = messages if many else [messages]
        prompts = [self.render_chat(c, **template_options) for c in conversations]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def render_chat(self, messages: list[Mapping[str, Any]], **template_options: Any) -> list[int]:
        """The token ids of a conversation, ready for the answer.

        Raises:
            ValueError: there is no tokenizer or no chat template, or a message is malformed.
        """
        tokenizer = self._need_tokenizer("chat")
        return tokenizer.apply_chat_template(messages, **template_options)

    def _deltas(self, request_id: str) -> Generator[TextDelta, None, None]:
        state, num_sent = self._requests[request_id], 0
        try:
            while num_sent == 0 or not state.request.is_finished:
                if self._advance_for({request_id}):
                    delta = state.delta(num_sent)
                    num_sent += len(delta.token_ids)
                    yield delta
        finally:
            self.abort(request_id)

    def _run_until_finished(
        self, ids: set[str], advance: Callable[[int], object]
    ) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        while len(done) < len(ids):
            finished = [s for s in self._advance_for(ids) if s.request.is_finished]
            done.update((state.request_id, state.output()) for state in finished)
            advance(len(finished))
        return done

    def _advance_for(self, ids: set[str]) -> list[RequestState]:
        """Advance, and give what concerns `ids`; the rest waits for the next `step`."""
        states = self._advance()
        others = {s.request_id: s for s in states if s.request_id not in ids}
        self._undelivered |= others
        return [state for state in states if state.request_id in ids]

    # Accounts

    @property
    def vocab_size(self) -> int:
        """Width of the logits; every token id is below it."""
        return self.runtime_config.vocab_size

    def stats(self) -> EngineStats:
        """The pool and the queues now, and counts since the start."""
        scheduler, counts = self._scheduler, self._counts
        return EngineStats(
            block_size=self.runtime_config.block_size,
            num_blocks=self.runtime_config.num_blocks - 1,
            num_free_blocks=scheduler.block_manager.num_free_blocks,
            peak_used_blocks=self._peak_used_blocks,
            num_waste_slots=self._num_waste_slots(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=counts["preempted"],
            num_prompt_tokens=counts["prompt"],
            num_generated_tokens=counts["generated"],
            num_steps=counts["steps"],
            num_finished=counts["finished"],
        )

    def check_integrity(self) -> None:
        """Prove the block census; raises `IntegrityError` if a block is lost or shared wrongly."""
        self._scheduler.check_integrity()

    def shutdown(self) -> None:
        """Abort every request and wait for the device; nothing is left to deliver."""
        for request_id in list(self._requests):
            self.abort(request_id)
        while self._in_flight:
            self._consume()
        self._undelivered.clear()

    def _num_used_blocks(self) -> int:
        return self.runtime_config.num_blocks - 1 - self._scheduler.block_manager.num_free_blocks

    def _num_waste_slots(self) -> int:
        sequences = [s for r in self._scheduler.running.values() for s in r.sequences]
        slots = sum(len(s.block_table) for s in sequences) * self.runtime_config.block_size
        return slots - sum(s.num_computed_tokens for s in sequences)

    # Taking a request in

    def _tokenize(self, prompt: Prompt) -> Prompt:
        if prompt.token_ids is not None or prompt.text is None:
            return prompt
        ids = self._need_tokenizer("a text prompt").encode(prompt.text)
        return normalize_prompt(
            {"prompt": prompt.text, "prompt_token_ids": ids}, vocab_size=self.vocab_size
        )

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer and skip_tokenizer_init=True loaded none: "
                "give token ids, or make the engine with skip_tokenizer_init=False"
            )
        return self.tokenizer

    def _add(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> str:
        arrival = next(self._arrivals)
        params = self._with_seed(params, arrival)
        params.validate_for(self.vocab_size, MAX_LOGPROBS, self._eos_token_ids)
        if self.tokenizer is None and params.stop_strings:
            self._need_tokenizer(f"stop={params.stop!r}")
        request_id = request_id or f"request-{arrival}"
        state = self._make_state(request_id, prompt, params, seq_id=arrival)
        self._scheduler.add(state.request)
        self._requests[request_id] = state
        self._sampling[arrival] = params
        self._counts["prompt"] += len(prompt.token_ids or ())
        return request_id

    def _make_state(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, seq_id: int
    ) -> RequestState:
        token_ids = prompt.token_ids or []
        stop = StopCriteria(
            max_tokens=params.max_tokens or self.runtime_config.max_model_len,
            min_tokens=params.min_tokens,
            stop_token_ids=params.ending_ids(self._eos_token_ids),
        )
        return RequestState(
            request=Request.from_prompt(request_id, token_ids, stop, seq_id=seq_id),
            params=params,
            prompt=prompt,
            detokenizer=Detokenizer(self.tokenizer, token_ids, params),
            tokenizer=self.tokenizer,
            eos_token_ids=self._eos_token_ids,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )

    def _with_seed(self, params: SamplingParams, arrival: int) -> SamplingParams:
        if params.seed is not None:
            return params
        return replace(params, seed=(self.config.seed + (arrival + 1) * _SEED_STRIDE) % 2**64)


def _check_options(options: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(EngineConfig)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"unknown engine option {name!r}; {hint}")
