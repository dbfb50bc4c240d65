"""The engine as its users meet it: requests in, tokens and text out."""

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from jpaged.config import EngineConfig
from jpaged.core.plan import SchedulingGoal, StepPlan
from jpaged.engine.loop import EngineLoop, defer_interrupts
from jpaged.engine.preprocessing import (
    PIN_PARAMS,
    normalize_prompt,
    normalize_prompts,
    pair_params,
    pair_priorities,
)
from jpaged.engine.request_state import RequestState
from jpaged.engine.startup import EngineParts, build_parts
from jpaged.engine.step_recorder import StepRecorder
from jpaged.observe.pool_changes import PoolWatch
from jpaged.observe.pool_report import (
    BlockInfo,
    MemoryReport,
    SequenceInfo,
    block_map,
    block_tables,
    memory_report,
)
from jpaged.observe.statistics import EngineStats
from jpaged.options import check_int
from jpaged.outputs import CompletionOutput, RequestDelta, RequestOutput, TextDelta
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer


class Engine:
    """Serves one model from a paged KV cache. Not thread-safe: one thread drives it.

    What the process has once an engine is made, the engine among it, is frozen (`gc.freeze`): freed
    as ever when nothing refers to it, but cycles in it are not looked for any more.

    Args:
        model: A local folder, a Hugging Face hub id, or None for the embedded model.
        **options: The other fields of `EngineConfig`, by name.

    Raises:
        TypeError, ValueError: an option is unknown, out of range, or does not fit the model or
            the device.
    """

    def __init__(self, model: str | Path | None = None, **options: Any):
        config = EngineConfig.from_options(model, options)
        self._assemble(config, build_parts(config))

    @classmethod
    def from_parts(cls, config: EngineConfig, parts: EngineParts) -> "Engine":
        """An engine of the parts that `build_parts(config)` gave, perhaps with another scheduler in
        place of theirs: one whose block manager allocates otherwise, for a comparison."""
        engine = cls.__new__(cls)
        engine._assemble(config, parts)
        return engine

    def _assemble(self, config: EngineConfig, parts: EngineParts) -> None:
        self.config = config
        self.runtime_config = parts.runtime_config
        self.model_config = parts.model_config
        self.folder = parts.folder
        self.memory_account = parts.memory_account
        self._runner = parts.runner
        self._preprocessor = parts.preprocessor
        mask_client = parts.preprocessor.mask_client
        self._loop = EngineLoop(parts.scheduler, parts.runner, self.config.loop_mode, mask_client)

    def add_request(
        self,
        prompt: object,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt; `step` brings its outputs. A grammar for it is compiled while others run;
        if that fails, the request ends with an error.

        Args:
            prompt: A string, a list of token ids, or a dict with either and perhaps a "cache_salt".
            params: How to sample; None stands for `SamplingParams()`.
            request_id: Unique among unfinished requests; None makes one.
            priority: Lower is served earlier and preempted later; other than 0 only with
                scheduling_policy="priority".

        Returns:
            The request's id.

        Raises:
            TypeError, ValueError: the prompt or a parameter is not acceptable, or the request could
                never fit; nothing is queued then.
            RuntimeError: a step failed earlier.
        """
        state = self._make_state(prompt, params, priority, request_id)
        state.is_polled = True
        self._loop.add([state])
        return state.request_id

    def abort(self, request_id: str) -> None:
        """End a request in any state and give its blocks back; an unknown id is no error.

        No output of it follows. A step in flight that holds the request finishes first, and then
        its blocks are free.
        """
        state = self._loop.requests.get(request_id)
        if state is not None:
            self._loop.abort(state)
            return
        for ended in [each for each in self._loop.undelivered if each.request_id == request_id]:
            del self._loop.undelivered[ended]

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to deliver."""
        return self._loop.has_work or bool(self._loop.undelivered)

    @property
    def has_work(self) -> bool:
        """Whether `advance` has anything left to do, delivered or not."""
        return self._loop.has_work

    def step(self) -> list[RequestOutput]:
        """Advance by one step, or by a burst of them (`num_scheduler_steps`).

        Returns:
            The requests of `add_request` that got tokens or ended since the last call (a beam
            search only at its end); empty in a turn that only fills the overlapped loop's pipeline.

        Raises:
            RuntimeError: a step failed, now or earlier.
        """
        self.advance()
        with defer_interrupts():  # asking for a text decodes it, which must not be interrupted
            outputs = [self._make_output(state) for state in list(self._loop.undelivered)]
        self._loop.undelivered = {}
        return outputs

    def _make_output(self, state: RequestState) -> RequestOutput:
        try:
            return state.output()
        except Exception:  # of this request alone
            self._loop.abort(state)
            count = state.params.n if state.samples else 0  # of a search that failed there are none
            failed = [
                CompletionOutput(index=i, text="", token_ids=[], finish_reason="error")
                for i in range(count)
            ]
            return RequestOutput(
                request_id=state.request_id,
                prompt=state.prompt,
                prompt_token_ids=state.prompt_token_ids,
                prompt_logprobs=None,
                outputs=failed,
                finished=True,
            )

    def advance(self) -> None:
        """`step` without its outputs: `take_deltas` brings what is new. Raises as `step`."""
        self._loop.advance(SchedulingGoal.LATENCY)

    def take_deltas(self) -> list[RequestDelta]:
        """What the requests of `add_request` grew by since the last call of this method.

        Costs what the new tokens cost; `step` gives all of a request again. Use one of the two.
        """
        states, self._loop.undelivered = self._loop.undelivered, {}
        return [self._take_delta(state) for state in states]

    def _take_delta(self, state: RequestState) -> RequestDelta:
        try:
            return state.take_delta()
        except Exception as error:  # of this request alone
            self._loop.abort(state)
            last = TextDelta("", finish_reason="error", request_id=state.request_id)
            return RequestDelta(state.request_id, [last], finished=True, error=repr(error))

    def _make_state(
        self,
        prompt: object,
        params: SamplingParams | None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> RequestState:
        """The preprocessor's `make_request_state`, of one prompt and its parameters as the caller gave
        them; it is told which ids are in use."""
        normalized = normalize_prompt(prompt, vocab_size=self.vocab_size)
        (sampling_params,), in_use = pair_params(params, 1), self._loop.requests
        make = self._preprocessor.make_request_state
        return make(normalized, sampling_params, priority, request_id=request_id, ids_in_use=in_use)

    # Whole generations

    def generate(
        self,
        prompts: object,
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts and wait for all of them.

        Args:
            prompts: One prompt or a list; each a string, a list of token ids, or a dict.
            params: One for all, or one for each.
            use_tqdm: Show a progress bar; None shows it for more than one prompt on a terminal.
            priority: One for each prompt, as in `add_request`.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            TypeError, ValueError: a prompt or a parameter is not acceptable; none was started.
            RuntimeError: a step failed.
        """
        normalized = normalize_prompts(prompts, vocab_size=self.vocab_size)
        per_prompt = (
            pair_params(params, len(normalized)),
            pair_priorities(priority, len(normalized)),
        )
        in_use = self._loop.requests
        states = [
            self._preprocessor.make_request_state(*each, ids_in_use=in_use)
            for each in zip(normalized, *per_prompt, strict=True)
        ]
        for state in states:
            state.check_grammar()
        disable = None if use_tqdm is None and len(states) > 1 else not use_tqdm
        with tqdm(total=len(states), desc="Generating", disable=disable, unit="req") as bar:
            return self._run_to_end(states, SchedulingGoal.THROUGHPUT, bar.update)

    def _run_to_end(
        self, states: list[RequestState], goal: SchedulingGoal, on_ended: Callable[[int], object]
    ) -> list[RequestOutput]:
        """Run requests to their ends; an error or Ctrl-C leaves nothing of them behind.

        If one of them is refused, none is started. Each output is made when its request has ended,
        its texts too, which others' steps hide in the overlapped loop.
        """
        unfinished, outputs = set(states), dict[RequestState, RequestOutput]()
        try:
            self._loop.add(states)
            while unfinished:
                ended = unfinished.intersection(self._loop.advance(goal))
                unfinished -= ended
                on_ended(len(ended))
                for state in ended:
                    state.raise_if_failed()
                outputs |= {state: state.output() for state in ended}
        finally:
            with defer_interrupts():  # a second Ctrl-C too
                for state in states:
                    self._loop.abort(state)
        return [outputs[state] for state in states]

    def beam_search(
        self,
        prompts: object,
        *,
        beam_width: int,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        ignore_eos: bool = False,
        n: int | None = None,
        priority: list[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """`generate` with a beam search for the most probable answers to each prompt.

        Args:
            prompts, priority, use_tqdm: As for `generate`.
            beam_width: Beams of each search.
            max_tokens, length_penalty, early_stopping, ignore_eos: As in `SamplingParams`.
            n: Answers to return; None returns all `beam_width`.

        Returns:
            One output a prompt, its answers best first, each with its `score`.

        Raises:
            TypeError, ValueError, RuntimeError: as `generate`.
        """
        if beam_width is None:
            raise TypeError("beam_width=None: give the number of beams, 1 or more")
        check_int("beam_width", beam_width, low=1)  # before `n`, which it also stands for
        params = SamplingParams(
            n=beam_width if n is None else n,
            beam_width=beam_width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
        )
        return self.generate(prompts, params, priority=priority, use_tqdm=use_tqdm)

    def stream(self, prompt: object, params: SamplingParams | None = None) -> Generator[TextDelta]:
        """Complete one prompt, yielding its text as it grows; dropping the stream aborts it.

        With n above 1 the samples' deltas come interleaved, each with its `index`; the stream ends
        when every sample had its last one, which has a `finish_reason`.

        Raises:
            TypeError, ValueError: the prompt or a parameter is not acceptable (at once, not at the
                first delta), or which answers are wanted is known only at the end (beam_width, or
                best_of above n).
            RuntimeError: a step failed.
        """
        (sampling_params,) = pair_params(params, 1)
        sampling_params.check_streamable()
        state = self._make_state(prompt, sampling_params)
        state.check_grammar()
        deltas = _stream_deltas(self._loop, state)
        # A generator that was never started does not run its `finally`. Before the request is
        # queued, after which a Ctrl-C may come at once.
        weakref.finalize(deltas, self._loop.abort, state)
        try:
            self._loop.add([state])
        except BaseException:  # a traceback that somebody keeps would keep the stream
            self._loop.abort(state)
            raise
        return deltas

    def chat(
        self,
        messages: list[Any],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        priority: list[int] | None = None,
        use_tqdm: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, written out by the tokenizer's chat template.

        Args:
            messages: A list of {"role": ..., "content": ...}, or a list of such lists.
            params, priority, use_tqdm: As for `generate`.
            **template_options: As of `render_chat`.

        Raises:
            TypeError, ValueError: as `render_chat` and `generate`.
        """
        if "sampling_params" in template_options:  # vLLM's name, which a template would ignore
            raise TypeError("chat(sampling_params=...): give it as params, the second argument")
        many = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], list)
        conversations = messages if many else [messages]
        prompts = [self.render_chat(c, **template_options) for c in conversations]
        return self.generate(prompts, params, priority=priority, use_tqdm=use_tqdm)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_options: Any
    ) -> list[int]:
        """The token ids of a conversation, ready for the answer.

        Args:
            messages: Dicts with a `role` and a `content`.
            **template_options: Passed to the chat template; but with `allow_special_tokens=True`
                text of messages such as `<|im_end|>` becomes the special token, as which it can
                end a message and begin another. Otherwise it is the text that it is.

        Raises:
            TypeError, ValueError: there is no tokenizer or no chat template, or a message is
                malformed.
        """
        tokenizer = self._preprocessor.require_tokenizer("chat")
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
                off, or the pin leaves too few blocks for an unfinished request to end.
            RuntimeError: a step failed, or the prefix's hash is another's.
        """
        prefix = self._preprocessor.cut_to_full_blocks(prompt, self.runtime_config.block_size)
        scheduler, wanted = self._loop.scheduler, (prefix.token_ids or [], prefix.cache_salt)
        self._loop.check_alive()
        pin = scheduler.pin_prefix(*wanted)
        while pin is None:
            in_use = self._loop.requests
            state = self._preprocessor.make_request_state(prefix, PIN_PARAMS, ids_in_use=in_use)
            self._run_to_end([state], SchedulingGoal.LATENCY, int)
            pin = scheduler.pin_prefix(*wanted)
            # Where others run, they may have its blocks: it may have been preempted while its token
            # was on the way. To compute it again is to wait for them at most.
            if pin is None and not scheduler.has_unfinished_requests:
                message = "the prefix's hash is that of another: reset_prefix_cache() first"
                raise RuntimeError(message)
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

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with `skip_tokenizer_init`."""
        return self._preprocessor.tokenizer

    @property
    def vocab_size(self) -> int:
        """Width of the logits; every token id is below it."""
        return self.runtime_config.vocab_size

    def abort_all(self) -> None:
        """Abort every request, wait for the device and forget undelivered outputs."""
        for state in list(self._loop.requests.values()):
            self._loop.abort(state)
        self._loop.drain()
        self._loop.undelivered.clear()

    # What the engine says of its memory and its queues

    def stats(self) -> EngineStats:
        """The pool and the queues now, and counts since the start."""
        return self._loop.stats()

    def block_map(self) -> dict[int, BlockInfo]:
        """Every block of the pool now, by id: its state, who holds it, what it has. O(blocks)."""
        return block_map(self._loop.scheduler)

    def block_tables(self) -> list[SequenceInfo]:
        """Every sequence now, with its block table. O(held blocks)."""
        return block_tables(self._loop.scheduler)

    def watch_pool(self, num_token_blocks: int = 0) -> PoolWatch:
        """Begin to watch the pool: `look` tells each time what changed. O(changes) a look.

        Args:
            num_token_blocks: For how many blocks at most a look tells their tokens.
        """
        return PoolWatch(self._loop.scheduler, num_token_blocks, self._loop.watches)

    def memory_report(self) -> MemoryReport:
        """What the pool's slots are used for now, and what sharing saves. O(held blocks)."""
        return memory_report(self._loop.scheduler)

    def record_steps(
        self, before: Callable[[Sequence[StepPlan]], object] = lambda plans: None
    ) -> StepRecorder:
        """A context that records what the engine launches: plans, and programs by their shapes.

        Args:
            before: Called with the plans of each launch before it.
        """
        return StepRecorder(self._runner, before)

    def check_integrity(self) -> None:
        """Prove the block census; raises `IntegrityError` if a block is lost or shared wrongly."""
        self._loop.scheduler.check_integrity()


def _stream_deltas(loop: EngineLoop, state: RequestState) -> Generator[TextDelta, None, None]:
    """A request's answers as they grow, each to its last delta; closing it early aborts it."""
    try:
        while state.undelivered_samples:
            if not any(
                sample.has_update for sample in state.undelivered_samples
            ):  # others may have advanced it
                loop.advance(SchedulingGoal.LATENCY)
            yield from state.take_sample_deltas()
        state.raise_if_failed()
    finally:
        loop.abort(state)
