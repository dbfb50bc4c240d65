"""The `Engine` class: the public Python API for generating text with one model."""

import shutil
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from tqdm import tqdm

from jpaged.config import EngineConfig
from jpaged.core.plan import SchedulingGoal, StepPlan
from jpaged.engine.loop import EngineLoop, PauseMode, defer_interrupts
from jpaged.engine.preprocessing import (
    PIN_PARAMS,
    SCORE_PARAMS,
    normalize_prompt,
    normalize_prompts,
    pair_completions,
    pair_params,
    pair_priorities,
)
from jpaged.engine.request_state import RequestState
from jpaged.engine.startup import (
    EngineParts,
    build_jax_model_parts,
    build_parts,
    resolve_tokenizer,
)
from jpaged.engine.step_recorder import StepRecorder
from jpaged.errors import format_count
from jpaged.models.jax_model import JaxModel
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
from jpaged.outputs import (
    CompletionOutput,
    CompletionScore,
    RequestDelta,
    RequestOutput,
    TextDelta,
)
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer

Output = TypeVar("Output")


class Engine:
    """Serves one model from a paged KV cache. Not thread-safe: call an engine from one thread only.

    Creating an engine calls `gc.freeze`: the garbage collector then no longer examines the objects
    that exist at that time, including the engine. Objects without references are still freed.

    With a `JaxModel`, the engine calls two functions of the caller to compute the model
    (docs/your_model.md). Creating such an engine does not call `gc.freeze`, and changes no setting
    of JAX.

    Args:
        model: Local folder, Hugging Face hub id, `JaxModel`, or None for the bundled model.
        params: Parameters of a `JaxModel`, a pytree of JAX arrays on the first local device, or on
            a mesh of local devices in which only one axis is longer than 1. The engine uses the
            arrays without a copy: do not donate them.
        tokenizer: Tokenizer of a `JaxModel`: a folder, or a tokenizer of transformers. None for
            token ids only.
        **options: Other fields of `EngineConfig`, by name.

    Raises:
        TypeError, ValueError: An option is unknown, out of range, or does not fit the model or the
            device.
    """

    def __init__(
        self,
        model: str | Path | JaxModel | None = None,
        *,
        params: Any = None,
        tokenizer: Any = None,
        **options: Any,
    ):
        if isinstance(model, JaxModel):
            config = EngineConfig.from_options(None, options)
            folder, is_temporary = resolve_tokenizer(tokenizer)
            if folder is not None and is_temporary:
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._assemble(config, build_jax_model_parts(config, model, params, folder))
            return
        for name, value in (("params", params), ("tokenizer", tokenizer)):
            if value is not None:
                raise TypeError(
                    f"{name} needs model=JaxModel(...): omit {name}, or pass a JaxModel"
                )
        config = EngineConfig.from_options(model, options)
        self._assemble(config, build_parts(config))

    @classmethod
    def from_parts(cls, config: EngineConfig, parts: EngineParts) -> "Engine":
        """Return an engine that uses the given parts, such as the scheduler.

        Args:
            config: The configuration of the engine.
            parts: Result of `build_parts(config)`. The scheduler may be replaced by another one,
                for example to compare block managers.
        """
        engine = cls.__new__(cls)
        engine._assemble(config, parts)
        return engine

    def _assemble(self, config: EngineConfig, parts: EngineParts) -> None:
        self.config = config
        self.runtime_config = parts.runtime_config
        self.model_config = parts.model_config
        self.folder = parts.folder
        self.tokenizer_folder = parts.tokenizer_folder
        self.memory_account = parts.memory_account
        self._runner = parts.runner
        self._parameters = parts.parameters
        self._preprocessor = parts.preprocessor
        mask_client = parts.preprocessor.mask_client
        self._loop = EngineLoop(
            parts.scheduler,
            parts.runner,
            self.config.loop_mode,
            mask_client,
            parts.parameters.shared_names,
        )

    def add_request(
        self,
        prompt: object,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt and return its request id. `step` or `take_deltas` returns the outputs.

        If the request has a grammar, the mask worker compiles the grammar while other requests run.
        If the compilation fails, the request ends with an error.

        Args:
            prompt: A string, a list of token ids, or a dict with either and optionally a
                "cache_salt".
            params: Sampling parameters; None for `SamplingParams()`.
            request_id: An id that no unfinished request has; None to generate an id.
            priority: Requests with lower numbers are served earlier and preempted later. Numbers
                other than 0 require scheduling_policy="priority".

        Returns:
            The id of the request.

        Raises:
            TypeError, ValueError: The prompt or a parameter is invalid, or the request can never
                fit into the pool. The request is not queued.
            RuntimeError: An earlier step failed.
        """
        state = self._make_state(prompt, params, priority, request_id)
        state.is_polled = True
        self._loop.add([state])
        return state.request_id

    def abort(self, request_id: str) -> None:
        """End a request in any state and free its blocks. Do nothing if the id is unknown.

        The engine returns no more outputs of the request. If a step in flight contains the request,
        the blocks are freed after that step.
        """
        state = self._loop.requests.get(request_id)
        if state is not None:
            self._loop.abort(state)
            return
        for ended in [each for each in self._loop.undelivered if each.request_id == request_id]:
            del self._loop.undelivered[ended]

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a request is unfinished, a step is in flight, or an output awaits delivery."""
        return self._loop.has_work or bool(self._loop.undelivered)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step is in flight.

        Unlike `has_unfinished_requests`, this property ignores outputs that await delivery.
        """
        return self._loop.has_work

    def step(self) -> list[RequestOutput]:
        """Advance by one step, or by one burst of `num_scheduler_steps` steps.

        Returns:
            Outputs of the requests from `add_request` that received tokens or ended since the last
            call. A beam search has an output only when the search ends. The list may be empty. For
            example, the first call of the overlapped loop only launches a step. The second call
            then returns the tokens of that first step.

        Raises:
            RuntimeError: This step or an earlier step failed, or a parameter of a `JaxModel` was
                deleted or donated. In the second case, the engine is paused and keeps its requests.
        """
        self.advance()
        # Delay a Ctrl-C, which would lose text if it interrupted the detokenizer.
        with defer_interrupts():
            outputs = [self._make_output(state) for state in list(self._loop.undelivered)]
        self._loop.undelivered = {}
        return outputs

    def _make_output(self, state: RequestState) -> RequestOutput:
        try:
            return state.output()
        # An error while an output is created fails only the request of this output.
        except Exception:
            self._loop.abort(state)
            # A beam search that failed has no answers.
            count = state.params.n if state.samples else 0
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
        """Do the work of `step` without returning outputs. `take_deltas` returns the new tokens.

        Do nothing while the engine is paused or sleeping.

        Raises:
            RuntimeError: As for `step`.
        """
        if self.is_paused or self.is_sleeping:
            self._loop.check_alive()
        else:
            self._loop.advance(SchedulingGoal.LATENCY)

    def take_deltas(self) -> list[RequestDelta]:
        """Return the new tokens of each request from `add_request` since the previous call.

        The call takes time proportional to the number of new tokens. In contrast, `step` returns
        the whole output of each request. Do not use both `step` and `take_deltas` with one engine.
        """
        states, self._loop.undelivered = self._loop.undelivered, {}
        return [self._take_delta(state) for state in states]

    def _take_delta(self, state: RequestState) -> RequestDelta:
        try:
            return state.take_delta()
        # An error while a delta is created fails only the request of this delta.
        except Exception as error:
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
        """Return a new request with the prompt and the parameters of the caller."""
        normalized = normalize_prompt(prompt, vocab_size=self.vocab_size)
        (sampling_params,), in_use = pair_params(params, 1), self._loop.requests
        make = self._preprocessor.make_request_state
        return make(normalized, sampling_params, priority, request_id=request_id, ids_in_use=in_use)

    # Generation

    def generate(
        self,
        prompts: object,
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one or more prompts and wait until all answers are finished.

        Args:
            prompts: One prompt or a list of prompts. A prompt is a string, a list of token ids, or
                a dict as in `add_request`.
            params: One `SamplingParams` for all prompts, or a list with one per prompt.
            use_tqdm: Whether to show a progress bar. None shows a progress bar for several prompts
                if stderr is a terminal.
            priority: A list with one priority per prompt, as in `add_request`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            TypeError, ValueError: A prompt or a parameter is invalid. No request is started.
            RuntimeError: A step failed.
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
            return self._run_to_end(
                states, SchedulingGoal.THROUGHPUT, bar.update, RequestState.output
            )

    def _run_to_end(
        self,
        states: list[RequestState],
        goal: SchedulingGoal,
        on_ended: Callable[[int], object],
        make_output: Callable[[RequestState], Output],
    ) -> list[Output]:
        """Run requests until all have ended, and return their outputs in the order of `states`.

        If one request is refused, no request starts. An error or a Ctrl-C aborts all requests. Each
        output is created as soon as its request ends. In the overlapped loop, the device computes
        the next step of other requests while the host creates the output.

        Args:
            states: Requests to run, not queued yet.
            goal: Goal of the steps.
            on_ended: Function that is called after each step, with the number of requests that
                ended in the step.
            make_output: Function that returns the output of a request that has ended.
        """
        self._loop.check_running()
        unfinished, outputs = set(states), dict[RequestState, Output]()
        try:
            self._loop.add(states)
            while unfinished:
                ended = unfinished.intersection(self._loop.advance(goal))
                unfinished -= ended
                on_ended(len(ended))
                for state in ended:
                    state.raise_if_failed()
                outputs |= {state: make_output(state) for state in ended}
        finally:
            with defer_interrupts():  # Delay a second Ctrl-C until all requests are aborted.
                for state in states:
                    self._loop.abort(state)
        return [outputs[state] for state in states]

    def score_completions(
        self, prompts: object, completions: object, *, use_tqdm: bool | None = None
    ) -> list[CompletionScore]:
        """Return the log-probabilities of given completions.

        The engine computes each prompt together with its completion. The engine also samples one
        token after each completion, and discards this token. If several completions share a prompt,
        the KV of the prompt's full blocks is computed once. Later completions find these blocks in
        the prefix cache.

        Args:
            prompts: A list of prompts, as in `generate`, or one prompt for all completions.
            completions: The completion of each prompt, as a string or a list of token ids. Pass a
                list with one completion per prompt, or a single completion. If a prompt has several
                completions, repeat the prompt. A text completion of a text prompt is tokenized
                together with the prompt.
            use_tqdm: As in `generate`.

        Returns:
            One score per completion, in the order of `completions`.

        Raises:
            TypeError, ValueError: A prompt or completion is invalid, or both together have
                `max_model_len` tokens or more. No request is started.
            RuntimeError: A step failed.
        """
        pairs = pair_completions(prompts, completions, vocab_size=self.vocab_size)
        groups, states = dict[tuple, list[RequestState]](), list[RequestState]()
        in_use, block_size = self._loop.requests, self.runtime_config.block_size
        for i, (prompt, completion) in enumerate(pairs):
            joined, num_tokens = self._preprocessor.join_completion(
                prompt, completion, f"completions[{i}]"
            )
            state = self._preprocessor.make_request_state(
                joined, SCORE_PARAMS, ids_in_use=in_use, first_scored_position=num_tokens
            )
            self._loop.scheduler.check(state.request)
            prefix = (joined.token_ids or [])[: (num_tokens - 1) // block_size * block_size]
            is_cached = self.config.enable_prefix_caching and prefix
            key = (*prefix, joined.cache_salt) if is_cached else ("not cached", i)
            groups.setdefault(key, []).append(state)
            states.append(state)
        disable = None if use_tqdm is None and len(states) > 1 else not use_tqdm
        scores: dict[RequestState, CompletionScore] = {}
        with tqdm(total=len(states), desc="Scoring", disable=disable, unit="req") as bar:
            for part in self._split_into_runs(list(groups.values())):
                found = self._run_to_end(
                    part, SchedulingGoal.THROUGHPUT, bar.update, RequestState.completion_score
                )
                scores |= dict(zip(part, found, strict=True))
        return [scores[state] for state in states]

    def _split_into_runs(self, groups: list[list[RequestState]]) -> Iterator[list[RequestState]]:
        """Yield lists of requests for the caller to run one after another. In this order, most
        requests find their prompt's prefix in the prefix cache.

        A group of requests shares a prefix. The method takes several groups at a time, and yields
        one or two lists. The first list has one request of each group, which computes the prefix.
        The second list has all other requests of the groups, which find the prefixes in the cache.
        An empty second list is left out.

        The prompts of a first list take at most half of the free blocks, so that the prefixes stay
        cached until the second list runs. A single group may take more. Groups of one request do
        not count, because their blocks need not stay cached.

        Args:
            groups: Groups of requests. All prompts of a group begin with the same full blocks.
        """
        max_blocks = self._loop.scheduler.block_manager.num_free_blocks // 2
        chosen, num_blocks = list[list[RequestState]](), 0
        for group in [*groups, None]:
            needed = 0
            if group is not None and len(group) > 1:
                needed = -(-len(group[0].prompt_token_ids) // self.runtime_config.block_size)
            if group is None or (chosen and needed and num_blocks + needed > max_blocks):
                yield [each[0] for each in chosen]
                if others := [state for each in chosen for state in each[1:]]:
                    yield others
                chosen, num_blocks = [], 0
            if group is not None:
                chosen.append(group)
                num_blocks += needed

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
        """Search for the most probable answers to each prompt with a beam search.

        Args:
            prompts: As in `generate`.
            beam_width: Number of beams per prompt.
            max_tokens: As in `SamplingParams`.
            length_penalty: As in `SamplingParams`.
            early_stopping: As in `SamplingParams`.
            ignore_eos: As in `SamplingParams`.
            n: Number of answers to return per prompt; None for `beam_width`.
            priority: As in `generate`.
            use_tqdm: As in `generate`.

        Returns:
            One output per prompt. The answers are sorted best first, and each answer has a `score`.

        Raises:
            TypeError, ValueError, RuntimeError: As in `generate`.
        """
        if beam_width is None:
            raise TypeError("beam_width is None: pass the number of beams, at least 1")
        # Check `beam_width` before `n`. Since `n` equals `beam_width` by default, the error about
        # an invalid `beam_width` would otherwise name `n`.
        check_int("beam_width", beam_width, low=1)
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
        """Complete one prompt and return a generator of the new text.

        Closing the generator aborts the request.

        If `n` is above 1, the deltas of the samples are interleaved, and each delta has the `index`
        of its sample. The last delta of each sample has a `finish_reason`.

        Raises:
            TypeError, ValueError: The prompt or a parameter is invalid, or the parameters select
                the answers only at the end (`beam_width`, or `best_of` above `n`). `stream` itself
                raises these errors, before the first delta is requested.
            RuntimeError: A step failed.
        """
        (sampling_params,) = pair_params(params, 1)
        sampling_params.check_streamable()
        self._loop.check_running()
        state = self._make_state(prompt, sampling_params)
        state.check_grammar()
        deltas = _stream_deltas(self._loop, state)
        # A generator that was never started does not run its `finally` block, so a finalizer aborts
        # the request. Create the finalizer before queueing the request, because a Ctrl-C may arrive
        # immediately after the request is queued.
        weakref.finalize(deltas, self._loop.abort, state)
        try:
            self._loop.add([state])
        # Abort the request now: the finalizer may run much later, because the traceback of the
        # error may keep `deltas` alive.
        except BaseException:
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
        """Answer conversations that the tokenizer's chat template turns into prompts.

        Args:
            messages: A list of {"role": ..., "content": ...} dicts, or a list of such lists.
            params: As in `generate`.
            priority: As in `generate`.
            use_tqdm: As in `generate`.
            **template_options: As in `render_chat`.

        Raises:
            TypeError, ValueError, RuntimeError: As in `render_chat` and `generate`.
        """
        if "sampling_params" in template_options:  # vLLM's name for `params`
            raise TypeError(
                "chat() has no argument sampling_params: pass params, the second argument"
            )
        many = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], list)
        conversations = messages if many else [messages]
        prompts = [self.render_chat(c, **template_options) for c in conversations]
        return self.generate(prompts, params, priority=priority, use_tqdm=use_tqdm)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_options: Any
    ) -> list[int]:
        """Return the token ids of a conversation, followed by the start of an assistant message.

        Args:
            messages: Dicts with a `role` and a `content`.
            **template_options: Arguments of the chat template. In addition,
                `allow_special_tokens=True` turns text such as `<|im_end|>` in a message into the
                special token, which can end the message and begin another one. By default, message
                text never becomes a special token.

        Raises:
            TypeError, ValueError: The engine has no tokenizer, the tokenizer has no chat template,
                or a message is malformed.
        """
        tokenizer = self._preprocessor.require_tokenizer("chat")
        return tokenizer.apply_chat_template(messages, **template_options)

    # Prefixes

    def pin_prefix(self, prompt: object) -> int:
        """Compute the KV of the full blocks of a prompt, and keep these blocks in the KV pool until
        `unpin_prefix` is called.

        Other requests continue to run during the call, and `step` returns their outputs later.
        Pinned blocks are not available to other requests.

        Args:
            prompt: A prompt as in `add_request`. Requests that begin with these tokens, and have
                the same `cache_salt`, share the blocks.

        Returns:
            The id of the pin, for `unpin_prefix`.

        Raises:
            TypeError, ValueError: The prompt is invalid or does not fill a block, prefix caching is
                disabled, or the remaining blocks do not suffice for an unfinished request.
            RuntimeError: A step failed, or another cached prefix has the same hash.
        """
        prefix = self._preprocessor.cut_to_full_blocks(prompt, self.runtime_config.block_size)
        scheduler, wanted = self._loop.scheduler, (prefix.token_ids or [], prefix.cache_salt)
        self._loop.check_alive()
        pin = scheduler.pin_prefix(*wanted)
        while pin is None:
            in_use = self._loop.requests
            state = self._preprocessor.make_request_state(prefix, PIN_PARAMS, ids_in_use=in_use)
            self._run_to_end([state], SchedulingGoal.LATENCY, int, RequestState.output)
            pin = scheduler.pin_prefix(*wanted)
            # `_run_to_end` has computed the prefix, but `pin` is None if the prefix is not cached.
            # There are two possible reasons. Unfinished requests may have taken the blocks of the
            # prefix: the loop then computes the prefix again. Or another cached prefix has the same
            # hash: this is the only possible reason if no request is unfinished.
            if pin is None and not scheduler.has_unfinished_requests:
                message = "another cached prefix has the same hash: call reset_prefix_cache()"
                raise RuntimeError(message)
        return pin

    def unpin_prefix(self, pin: int) -> None:
        """Remove a pin. The blocks of the prefix stay cached until the engine needs them for other
        requests.

        Raises:
            ValueError: No pin has the id `pin`.
        """
        self._loop.scheduler.block_manager.pins.unpin(pin)

    def reset_prefix_cache(self) -> None:
        """Remove all cached prefixes, so that later requests compute the KV of whole prompts.

        Raises:
            ValueError: A prefix is pinned.
        """
        self._loop.scheduler.reset_prefix_cache()

    # Weights

    def pause(
        self, mode: Literal["keep", "wait", "abort"] = "keep", *, recompute: bool = False
    ) -> None:
        """Launch no more steps until `resume`, so that `update_weights` can be called.

        While the engine is paused, `add_request` queues requests, and `step` returns outputs that
        are undelivered, without computing anything. `generate` and other calls that wait for
        answers raise RuntimeError.

        Args:
            mode: "keep" lets unfinished requests continue after the pause. "wait" first computes
                all unfinished requests. "abort" ends them, and `step` returns what they have with
                finish_reason="abort".
            recompute: Whether to free the KV of the kept requests, on the device and in host
                memory. After the pause, their tokens are computed again. By default, the requests
                keep their KV, also if the weights are updated.

        Raises:
            ValueError: `mode` is unknown, or `recompute` is set with another mode than "keep".
            RuntimeError: A step failed, or mode="wait" while the engine is paused with unfinished
                requests.
        """
        if mode not in list(PauseMode):
            raise ValueError(f"mode={mode!r} is unknown: pass 'keep', 'wait' or 'abort'")
        if recompute and mode != PauseMode.KEEP:
            raise ValueError(f"recompute=True needs mode='keep', not {mode!r}: omit one of them")
        self._loop.pause(PauseMode(mode), recompute=recompute)

    def resume(self) -> None:
        """End a `pause`. Do nothing if the engine is not paused.

        Raises:
            RuntimeError: An earlier step failed, or a parameter of a `JaxModel` was deleted or
                donated since the last `update_weights`.
        """
        self._loop.resume()

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused: `pause` was called, but `resume` was not called after
        it."""
        return self._loop.is_paused

    def update_weights(
        self, params: Any, version: int | None = None, *, check_finite: bool = False
    ) -> None:
        """Replace the weights of the model, between requests or during a `pause`.

        All arrays are checked before the first one is written. Nothing passes through the host, and
        no step is compiled again. docs/live_weights.md has examples.

        Cached prefixes are removed, because the old weights computed their KV. Unfinished requests
        of a paused engine continue with their old KV, which no other request ever shares. Pinned
        blocks stay allocated, but are not shared again.

        Args:
            params: For a checkpoint, a dict from the names of its tensors to JAX arrays, or an
                `nnx.State` of the family's model. The engine casts, fuses, splits and quantizes the
                arrays on the device, and keeps no reference to them. Or the `Path` of a folder with
                safetensors files, which are read one parameter at a time. For a `JaxModel`, a
                pytree with the structure, shapes, dtypes and sharding of the engine's `params`.
                The engine uses these arrays without a copy, and releases the old ones.
            version: Version number of the new weights, which outputs report. None for the current
                number plus 1.
            check_finite: Whether to refuse arrays with NaN or infinite values. The check reads all
                arrays once.

        Raises:
            TypeError, ValueError: A name, shape, dtype or device is wrong, or an array was deleted
                or is not finite. Or a prefix is pinned while a request is unfinished. The engine
                keeps its weights.
            RuntimeError: A request is unfinished and the engine is not paused, or an earlier step
                failed. The engine keeps its weights.
        """
        if version is not None:
            check_int("version", version, low=0)
        self._loop.check_alive()
        self._check_paused("update_weights")
        write = self._parameters.prepare(params, check_finite=check_finite)
        self._loop.update_weights(write, version)

    def _check_paused(self, name: str) -> None:
        """Raise RuntimeError if a request is unfinished and the engine can launch steps."""
        num_unfinished = len(self._loop.requests)
        if num_unfinished and self.can_advance:
            raise RuntimeError(
                f"{name}: {format_count(num_unfinished, 'request')} unfinished: call pause() "
                "first, or finish or abort all requests"
            )

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Free device memory until `wake_up`.

        While the engine sleeps, it launches no steps, as during a `pause`. Cached prefixes are
        removed. Unfinished requests of a paused engine compute all their tokens again after
        `wake_up`.

        Args:
            level: 1 frees the pool of keys and values. 2 also frees the engine's copy of the
                weights. The caller must then call `update_weights` before the next request, either
                before or after `wake_up`. With a `JaxModel`, 2 only drops the engine's references
                to the arrays.

        Raises:
            ValueError: `level` is not 1 or 2, or a prefix is pinned.
            RuntimeError: A request is unfinished and the engine is not paused, or an earlier step
                failed.
        """
        check_int("level", level, low=1, high=2, requirement="1 or 2")
        self._loop.check_alive()
        self._check_paused("sleep")
        self._loop.sleep(self._parameters.release if level == 2 else None)

    def wake_up(self) -> None:
        """End a `sleep`: allocate the pool again. Do nothing if the engine is not sleeping.

        Raises:
            RuntimeError: The device has too little free memory, and the engine keeps sleeping; or
                an earlier step failed.
        """
        self._loop.wake_up()

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps: `sleep` was called, but `wake_up` was not called after it."""
        return self._loop.is_sleeping

    @property
    def can_advance(self) -> bool:
        """Whether the engine can launch steps: it is awake, is not paused, and has weights."""
        return self._loop.can_advance

    def check_alive(self) -> None:
        """Raise RuntimeError if an earlier step or update has failed and has ended the engine."""
        self._loop.check_alive()

    @property
    def weights_version(self) -> int:
        """Version number of the weights: 0 at the start, then the `version` of the last update."""
        return self._loop.weights_version

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model; None if the engine was created with `skip_tokenizer_init`."""
        return self._preprocessor.tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of logits per token. Every token id is less than `vocab_size`."""
        return self.runtime_config.vocab_size

    def abort_all(self) -> None:
        """Abort all requests, wait for the steps in flight, and discard undelivered outputs."""
        for state in list(self._loop.requests.values()):
            self._loop.abort(state)
        self._loop.drain()
        self._loop.undelivered.clear()

    # The following methods report statistics and the state of the pool.

    def stats(self) -> EngineStats:
        """Return statistics: the current state of the KV pool and of the queues, and counts since
        the engine started."""
        return self._loop.stats()

    def block_map(self) -> dict[int, BlockInfo]:
        """Return the state, holders and content hash of every block in the pool, by block id.

        Takes time proportional to the number of blocks in the pool.
        """
        return block_map(self._loop.scheduler)

    def block_tables(self) -> list[SequenceInfo]:
        """Return every sequence with its block table. Takes time proportional to the number of held
        blocks."""
        return block_tables(self._loop.scheduler)

    def watch_pool(self, num_token_blocks: int = 0) -> PoolWatch:
        """Return a `PoolWatch`. Each call of its method `look` returns the changes of the pool
        since the previous call.

        Each `look` takes time proportional to the number of changes.

        Args:
            num_token_blocks: Maximum number of blocks whose tokens one call of `look` returns.
        """
        return PoolWatch(self._loop.scheduler, num_token_blocks, self._loop.watches)

    def memory_report(self) -> MemoryReport:
        """Return how the slots of the KV pool are used now, and how many more blocks the sequences
        would need if they shared no blocks.

        Takes time proportional to the number of held blocks.
        """
        return memory_report(self._loop.scheduler)

    def record_steps(
        self, before: Callable[[Sequence[StepPlan]], object] = lambda plans: None
    ) -> StepRecorder:
        """Return a context manager that records the plans and the compiled programs of each launch.

        Args:
            before: Function that is called before each launch, with the plans of the launch.
        """
        return StepRecorder(self._runner, before)

    def check_integrity(self) -> None:
        """Check that the engine's records of KV blocks agree.

        For example, the `ref_cnt` of each block must equal the number of block tables and pinned
        prefixes that contain the block.

        Raises:
            IntegrityError: The counts, the block tables or the queues are inconsistent.
        """
        self._loop.scheduler.check_integrity()


def _stream_deltas(loop: EngineLoop, state: RequestState) -> Generator[TextDelta, None, None]:
    """Yield the deltas of all samples of a request until each sample has its last delta.

    Closing the generator aborts the request.
    """
    try:
        while state.undelivered_samples:
            # Run a step only if the request has no undelivered tokens. Another call of the engine
            # may already have run steps of this request.
            if not any(sample.has_update for sample in state.undelivered_samples):
                loop.advance(SchedulingGoal.LATENCY)
            yield from state.take_sample_deltas()
        state.raise_if_failed()
    finally:
        loop.abort(state)
