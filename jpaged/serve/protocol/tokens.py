"""What `/tokenize` and `/detokenize` take."""

from dataclasses import dataclass

from jpaged.serve.errors import bad_field
from jpaged.serve.protocol.chat import MESSAGES, Message, TemplateFields
from jpaged.serve.protocol.record import of
from jpaged.serve.protocol.rules import Flag, Text, TokenIds


@dataclass(frozen=True)
class TokenizeRequest(TemplateFields):
    """The fields of `/tokenize`: a prompt or messages."""

    model: str | None = of(Text(1000), None)
    prompt: str | None = of(Text(), None)
    messages: list[Message] | None = of(MESSAGES, None)
    add_special_tokens: bool = of(Flag(), True, "of a prompt")
    return_token_strs: bool = of(Flag(), False)

    def check(self) -> None:
        """Raise ApiError unless there is just one thing to tokenise."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_field("prompt", "give either prompt or messages")


@dataclass(frozen=True)
class DetokenizeRequest:
    """The fields of `/detokenize`."""

    model: str | None = of(Text(1000), None)
    tokens: list[int] = of(TokenIds(2**20))
