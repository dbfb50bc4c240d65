"""The engine as its users meet it: requests in, tokens and text out."""

import weakref
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jpaged.config import EngineConfig
from jpaged.engine_loop import EngineLoop
from jpaged.inputs import Prompt, normalize_prompts, pair_params
from jpaged.intake import PIN_PARAMS
from jpaged.metrics import EngineStats
from jpaged.outputs import RequestOutput, TextDelta
from jpaged.request_state import RequestState
from jpaged.sampling_params import SamplingParams
from jpaged.startup import build_parts
from jpaged.tokenizer import Tokenizer


class Engine:
    """Serves one model from a paged KV cache. Not thread-safe: one thread drives it.

    Args:
        model: A local folder, a Hugging Face hub id, or None for the embedded model.
        **options: The other fields of `EngineConfig`, by name.

    Raises:
        TypeError, ValueError: an option is unknown, out of range, or does not fit the model or
            the device.
    """

    def __init__(self, model: str | Path | None = None, **options: Any):
        self.config = EngineConfig.from_options(model, options)
        parts = build_parts(self.config)
        self.runtime_config = parts.runtime_config
        self.model_config = parts.model_config
        self.memory_account = parts.memory_account
        self._loop = EngineLoop(parts.scheduler, parts.runner, self.config.loop_mode)
        self._intake = parts.intake
        # Advanced requests of `add_request` that no `step` has told of yet (an ordered set).
        self._undelivered: dict[RequestState, None] = {}

    # Requests, one by one

    def add_request(
        self, prompt: object, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> str:
        """Queue a prompt; `step` brings its outputs.

        Args:
            prompt: A string, a list of token ids, or a dict with either and perhaps a "cache_salt".
            params: How to sample; None stands for `SamplingParams()`.
            request_id: Unique among unfinished requests; None makes one.

        Returns:
            The request's id.

        Raises:
            TypeError, ValueError: the prompt or a parameter is not acceptable, or the request could
                never fit; nothing is queued then.
            RuntimeError: a step failed earlier.
        """
        state = self._add_one(prompt, params, request_id)
        state.polled = True
        return state.request_id

    def abort(self, request_id: str) -> None:
        """End a request in any state and give its blocks back; an unknown id is no error.

        No output of it follows. A step in flight that holds the request finishes first, and then
        its blocks are free.
        """
        state = self._loop.requests.get(request_id)
        if state is not None:
            self._abort(state)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to deliver."""
        return self._loop.has_work or bool(self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Advance by one step.

        Returns:
            The requests of `add_request` that got a token or ended since the last call; empty in a
            turn that only fills the overlapped loop's pipeline.

        Raises:
            RuntimeError: a step failed, now or earlier.
        """
        self._advance()
        news, self._undelivered = self._undelivered, {}
        return [state.output() for state in news]

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
            RuntimeError: a step failed.
        """
        checked = normalize_prompts(prompts, vocab_size=self.vocab_size)
        all_params = pair_params(params, len(checked))
        disable = None if use_tqdm is None and len(checked) > 1 else not use_tqdm
        work = list(zip(map(self._intake.tokenize, checked), all_params, strict=True))
        with tqdm(total=len(work), desc="Generating", disable=disable, unit="req") as bar:
            states = self._complete(work, bar.update)
        return [state.output() for state in states]

    def stream(
        self, prompt: object, params: SamplingParams | None = None
    ) -> Generator[TextDelta, None, None]:
        """Complete one prompt, yielding its text as it grows; dropping the stream aborts it.

        Raises:
            TypeError, ValueError: the prompt or a parameter is not acceptable (at once, not at the
                first delta).
            RuntimeError: a step failed.
        """
        state = self._add_one(prompt, params, None)
        deltas = self._deltas(state)
        # A generator that was never started does not run its `finally`.
        weakref.finalize(deltas, self._abort, state)
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

        Raises:
            TypeError, ValueError: as `render_chat` and `generate`.
        """
        many = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], list)
        conversations = messages if many else [messages]
        prompts = [self.render_chat(c, **template_options) for c in conversations]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def render_chat(self, messages: list[Mapping[str, Any]], **template_options: Any) -> list[int]:
        """The token ids of a conversation, ready for the answer.

        Raises:
            TypeError, ValueError: there is no tokenizer or no chat template, or a message is
                malformed.
        """
        tokenizer = self._intake.need_tokenizer("chat")
        return tokenizer.apply_chat_template(messages, **template_options)

    # Prefixes

    def pin_prefix(self, prompt: object) -> int:
        """Compute the KV of a prompt's full blocks now and never evict it until it is unpinned.

        Others run on meanwhile (`step` tells of them later), and can count on so much less room.

        Args:
            prompt: As for `add_request`; requests of its `cache_salt` that begin with it find it.

        Returns:
            The pin, for `unpin_prefix`.

        Raises:
            TypeError, ValueError: the prompt is not acceptable or fills no block, prefix caching is
                off, or beside the pin an unfinished request could never run to its end.
            RuntimeError: a step failed, or the prefix's hash is another's.
        """
        prefix = self._intake.whole_blocks(prompt, self.runtime_config.block_size)
        pin = self._loop.pin_cached(prefix)
        if pin is None:
            self._complete([(prefix, PIN_PARAMS)], int)
            pin = self._loop.pin_computed(prefix)
        return pin

    def unpin_prefix(self, pin: int) -> None:
        """Let a pinned prefix go; it stays cached until its blocks are needed.

        Raises:
            ValueError: there is no such pin.
        """
        self._loop.scheduler.block_manager.pins.unpin(pin)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: no KV computed so far serves a request that comes later.

        Raises:
            ValueError: a prefix is pinned.
        """
        self._loop.scheduler.reset_prefix_cache()

    # Accounts

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with `skip_tokenizer_init`."""
        return self._intake.tokenizer

    @property
    def vocab_size(self) -> int:
        """Width of the logits; every token id is below it."""
        return self.runtime_config.vocab_size

    def stats(self) -> EngineStats:
        """The pool and the queues now, and counts since the start."""
        return self._loop.stats()

    def check_integrity(self) -> None:
        """Prove the block census; raises `IntegrityError` if a block is lost or shared wrongly."""
        self._loop.scheduler.check_integrity()

    def abort_all(self) -> None:
        """Abort every request, wait for the device and forget undelivered outputs."""
        for state in list(self._loop.requests.values()):
            self._abort(state)
        self._loop.drain()
        self._undelivered.clear()

    # Inside

    def _add_one(
        self, prompt: object, params: SamplingParams | None, request_id: str | None
    ) -> RequestState:
        return self._add(self._intake.checked(prompt), pair_params(params, 1)[0], request_id)

    def _add(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> RequestState:
        state = self._intake.make_state(
            prompt, params, request_id=request_id, ids_in_use=self._loop.requests
        )
        self._loop.add(state)
        return state

    def _abort(self, state: RequestState) -> None:
        if self._loop.abort(state):
            self._undelivered.pop(state, None)

    def _advance(self) -> list[RequestState]:
        """Advance by a step, and remember for `step` what its requests were told of."""
        advanced = self._loop.advance()
        self._undelivered |= dict.fromkeys(state for state in advanced if state.polled)
        return advanced

    def _complete(
        self, work: list[tuple[Prompt, SamplingParams]], advance: Callable[[int], object]
    ) -> list[RequestState]:
        """Run requests to their ends; an error or Ctrl-C leaves nothing of them behind."""
        states: list[RequestState] = []
        try:
            for prompt, params in work:
                states.append(self._add(prompt, params, None))
            left = set(states)
            while left:
                ended = {state for state in self._advance() if state.request.is_finished} & left
                left -= ended
                advance(len(ended))
        finally:
            for state in states:
                self._abort(state)
        return states

    def _deltas(self, state: RequestState) -> Generator[TextDelta, None, None]:
        num_sent, ended = 0, False
        try:
            while not ended:
                while not state.has_news(num_sent):  # others may have advanced it meanwhile
                    self._advance()
                delta, ended = state.delta(num_sent), state.request.is_finished
                num_sent += len(delta.token_ids)
                yield delta
        finally:
            self._abort(state)
