"""The fields that completions and chats have in common, and what they ask of the sampler."""

from dataclasses import dataclass
from typing import Any

from jpaged import SamplingParams
from jpaged.serve.errors import bad_field, refusal
from jpaged.serve.options import Limits
from jpaged.serve.protocol.record import Nested, of
from jpaged.serve.protocol.rules import (
    COUNT,
    INT64,
    ByTokenId,
    Choice,
    Either,
    Flag,
    Ignored,
    Integer,
    ListOf,
    Number,
    Text,
    TokenIds,
)

MAX_TOKEN_IDS = 4096
MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
MAX_LOGPROBS = 20
MAX_PRIORITY = 2**31

_STOP = Text(MAX_STOP_LENGTH, least=1)


@dataclass(frozen=True)
class StreamOptions:
    """What a stream has beside the answer."""

    include_usage: bool = of(Flag(), False, "a last chunk with the token counts")
    continuous_usage_stats: bool = of(Flag(), False, "token counts in every chunk")
    include_obfuscation: None = of(Ignored(), None)


@dataclass(frozen=True)
class SamplingFields:
    """How answers are made: OpenAI's names, and vLLM's for what OpenAI does not have."""

    model: str | None = of(Text(1000), None, "one of /v1/models; nothing means the first")
    n: int = of(Integer(1, 2**16), 1, "answers to each prompt")
    best_of: int | None = of(Integer(1, 2**16), None, "sample so many, return the n likeliest")
    temperature: float | None = of(Number(0, 1e6), None, "0 takes the likeliest token")
    top_p: float = of(Number(0, 1, above=True), 1.0)
    top_k: int = of(Integer(-1, 2**31 - 1), 0, "0 or -1 keep all tokens")
    min_p: float = of(Number(0, 1), 0.0)
    frequency_penalty: float = of(Number(-2, 2), 0.0)
    presence_penalty: float = of(Number(-2, 2), 0.0)
    repetition_penalty: float = of(Number(0, 1e6, above=True), 1.0)
    seed: int | None = of(Integer(-INT64 - 1, INT64), None)
    stop: list[str] | str | None = of(Either(string=_STOP, array=ListOf(_STOP, MAX_STOPS)), None)
    stop_token_ids: list[int] | None = of(TokenIds(MAX_TOKEN_IDS, as_set=True), None)
    include_stop_str_in_output: bool = of(Flag(), False)
    ignore_eos: bool = of(Flag(), False, "go on past the model's own end token")
    min_tokens: int = of(COUNT, 0)
    logit_bias: dict[int, float] | None = of(ByTokenId(Number(-100, 100), MAX_TOKEN_IDS), None)
    allowed_token_ids: list[int] | None = of(TokenIds(2**20, as_set=True), None)
    prompt_logprobs: int | None = of(Integer(0, MAX_LOGPROBS), None)
    skip_special_tokens: bool = of(Flag(), True)
    use_beam_search: bool = of(Flag(), False, "search with beam_width (else best_of, n) beams")
    beam_width: int | None = of(Integer(1, 2**16), None)
    length_penalty: float = of(Number(-1e6, 1e6), 1.0, "of beams")
    early_stopping: bool | str = of(Either(boolean=Flag(), string=Choice("never")), False)
    stream: bool = of(Flag(), False, "server-sent events")
    stream_options: StreamOptions | None = of(Nested(StreamOptions), None)
    priority: int = of(Integer(-MAX_PRIORITY, MAX_PRIORITY), 0, "lower is served earlier")
    cache_salt: str | None = of(
        Text(1000, least=1), None, "prompts share cached prefixes only with others of their salt"
    )
    return_token_ids: bool = of(Flag(), False)
    return_tokens_as_token_ids: bool = of(Flag(), False, 'in logprobs: "token_id:17"')
    truncate_prompt_tokens: int | None = of(
        Integer(-1, 2**31 - 1), None, "keep the last so many; -1: as many as the model takes"
    )
    spaces_between_special_tokens: None = of(Ignored(), None)
    request_id: None = of(Ignored(), None)
    user: None = of(Ignored(), None)
    metadata: None = of(Ignored(), None)
    store: None = of(Ignored(), None)
    service_tier: None = of(Ignored(), None)
    safety_identifier: None = of(Ignored(), None)
    prompt_cache_key: None = of(Ignored(), None)
    prompt_cache_retention: None = of(Ignored(), None)

    @property
    def options(self) -> StreamOptions:
        """What a stream has beside the answer."""
        return self.stream_options or StreamOptions()

    def check(self, limits: Limits) -> None:
        """Raise ApiError for what no rule of a single field sees."""
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "stream_options is for stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_field("prompt_logprobs", "prompt_logprobs cannot be streamed")
        if self.truncate_prompt_tokens == 0:
            raise bad_field("truncate_prompt_tokens", "truncate_prompt_tokens=0 leaves no prompt")
        for name in ("n", "best_of", "beam_width"):
            if (getattr(self, name) or 1) > limits.max_n:
                raise bad_field(name, f"{name}={getattr(self, name)}: at most {limits.max_n} here")

    def sampling_params(self, max_tokens: int | None, **others: Any) -> SamplingParams:
        """What is asked of the sampler.

        Args:
            max_tokens: As the engine shall take it.
            **others: Parameters that the endpoints write differently.

        Raises:
            ApiError: parameters that do not go together.
        """
        width = self._width
        asked: dict[str, Any] = {name: getattr(self, name) for name in _SAME_NAME}
        asked |= {"best_of": None if width else self.best_of, "beam_width": width}
        asked |= {"temperature": 1.0 if self.temperature is None else self.temperature}
        try:
            return SamplingParams(**(asked | others), max_tokens=max_tokens)
        except (TypeError, ValueError) as error:
            raise refusal(str(error)) from None

    @property
    def _width(self) -> int | None:
        if self.use_beam_search:
            return self.beam_width or self.best_of or self.n
        return self.beam_width


_SAME_NAME = (
    "n",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "prompt_logprobs",
    "skip_special_tokens",
    "length_penalty",
    "early_stopping",
)
