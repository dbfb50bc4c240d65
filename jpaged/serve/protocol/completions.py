"""What `/v1/completions` takes."""

from dataclasses import dataclass
from typing import Any

from jpaged.serve.errors import bad_field
from jpaged.serve.options import Limits
from jpaged.serve.protocol.record import of
from jpaged.serve.protocol.rules import (
    Flag,
    Integer,
    Nothing,
    Schema,
    TokenIds,
    check_length,
    refuse,
)
from jpaged.serve.protocol.sampling import MAX_LOGPROBS, SamplingFields

Prompt = str | list[int]

_MAX_IDS = 2**24
_IDS = TokenIds(_MAX_IDS)


class Prompts:
    """One prompt or several, each text or token ids."""

    def read(self, value: Any, path: str) -> list[Prompt]:
        """The prompts, in a list also if it is one."""
        if isinstance(value, list):
            check_length(path, value, _MAX_IDS, 1)
            if not isinstance(value[0], (str, list)):
                return [_IDS.read(value, path)]
            return [_prompt(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return [_prompt(value, path)]

    def schema(self) -> Schema:
        """The four forms."""
        text = {"type": "string", "minLength": 1}
        token_id = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
        ids = {"type": "array", "items": token_id, "minItems": 1}
        several = [{"type": "array", "items": one, "minItems": 1} for one in (text, ids)]
        return {"anyOf": [text, ids, *several]}


@dataclass(frozen=True)
class CompletionRequest(SamplingFields):
    """The fields of `/v1/completions`."""

    prompt: list[Prompt] = of(Prompts())
    max_tokens: int = of(Integer(0, 2**31 - 1), 16, "0 only with echo")
    echo: bool = of(Flag(), False, "the prompt comes before the answer")
    logprobs: int | None = of(Integer(0, MAX_LOGPROBS), None)
    add_special_tokens: bool = of(Flag(), True, "such as the token that begins a text")
    suffix: None = of(Nothing("", hint="this model fills no gaps"), None)

    def check(self, limits: Limits) -> None:
        """Raise ApiError for what no rule of a single field sees."""
        super().check(limits)
        check_length("prompt", self.prompt, limits.max_prompts, 1)
        if not self.max_tokens and not self.echo:
            raise bad_field("max_tokens", "max_tokens=0 makes no answer: only echo=true allows it")


def _prompt(value: Any, path: str) -> Prompt:
    if isinstance(value, str):
        if not value:
            refuse(path, value, "is empty: give at least one character")
        return value
    if isinstance(value, list):
        check_length(path, value, _MAX_IDS, 1)
        return _IDS.read(value, path)
    return refuse(path, value, "must be a string or an array of token ids")
