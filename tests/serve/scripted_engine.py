"""An engine that returns answers that the test supplies."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from jpaged import Engine, Logprob, RequestDelta, SamplingParams, TextDelta
from jpaged.errors import ErrorInfo


class ScriptedEngine:
    """A stand-in for `Engine` that answers each request with the next entry of a script.

    When the script is empty, the wrapped engine answers the request.

    Attributes:
        script: One entry per request. An entry is a list of answers. An answer is a list of texts,
            one text per step.
        reasons: One finish reason per entry of `script`.
        errors: Errors for requests whose finish reason is "error", in order of arrival.
        prompts: Prompts of the requests that the script answers, as text.
        params: Sampling parameters of the requests that the script answers.
    """

    def __init__(self, engine: Engine):
        self._engine: Any = engine
        self.script: deque[Sequence[Sequence[str]]] = deque()
        self.reasons: deque[str] = deque()
        self.errors: deque[ErrorInfo] = deque()
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self._open: dict[str, tuple[list[deque[str]], str, bool]] = {}
        self._deltas: list[RequestDelta] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def say(self, *answers: str, size: int = 0, reason: str = "stop") -> None:
        """Add the answers of one request to the script.

        Args:
            answers: Texts of the answers.
            size: Number of characters per step; 0 for a whole answer in one step.
            reason: Finish reason of the answers.
        """
        cut = [
            [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
            for text in answers
        ]
        self.script.append(cut)
        self.reasons.append(reason)

    @property
    def has_work(self) -> bool:
        return bool(self._open) or self._engine.has_work

    def add_request(
        self, prompt: Any, params: SamplingParams, *, request_id: str, priority: int
    ) -> None:
        if not self.script:
            self._engine.add_request(prompt, params, request_id=request_id, priority=priority)
            return
        self.prompts.append(self._engine.tokenizer.decode(prompt["prompt_token_ids"]))
        self.params.append(params)
        pieces = [deque(own or [""]) for own in self.script.popleft()]
        has_scores = params.logprobs is not None
        self._open[request_id] = pieces, self.reasons.popleft(), has_scores

    def advance(self) -> None:
        if not self._open:
            self._engine.advance()
            return
        for name, (answers, reason, has_scores) in list(self._open.items()):
            deltas = []
            for i, own in enumerate(answers):
                if own:
                    piece = own.popleft()
                    scores = [{7: Logprob(-1.0, 1, "x")}] if has_scores else None
                    why = None if own else reason
                    deltas.append(TextDelta(piece, (7,), why, logprobs=scores, index=i))
            is_over = not any(answers)
            info = self.errors.popleft() if is_over and reason == "error" else None
            error = None if info is None else str(info)
            self._deltas.append(
                RequestDelta(name, deltas, finished=is_over, error=error, error_info=info)
            )
            if is_over:
                del self._open[name]

    def take_deltas(self) -> list[RequestDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas + self._engine.take_deltas()

    def abort(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._engine.abort(request_id)
