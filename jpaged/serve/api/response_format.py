"""The forms that requests may ask of an answer: OpenAI's `response_format`, vLLM's
`structured_outputs`, calls that a model must or may make. All become `StructuredOutputs`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from jpaged import StructuredOutputs, call_grammar
from jpaged.errors import info_of
from jpaged.serve.api.conversation import Body, ChosenTool, Tool
from jpaged.serve.errors import ApiError, bad_field

_STRICT = "an answer obeys its schema also where this is false"
FORM = "json, regex, choice, grammar or json_object: just one"

Schema = Annotated[dict[str, Any], Meta(description="a JSON schema")]
FormName = Annotated[
    str,
    Meta(max_length=64, pattern=r"^[^\x00-\x1f\x7f]+(?!\n)$", description="no control characters"),
]


class JsonSchema(Body, frozen=True, kw_only=True):
    """A schema and its name."""

    name: FormName
    schema: Schema | None = None
    strict: Annotated[bool, Meta(description=_STRICT)] | None = None


class ResponseFormat(Body, frozen=True, kw_only=True):
    """The form of the answer, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class AnswerForm(Body, frozen=True, kw_only=True):
    """The form of the answer, as vLLM has it: just one of these."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(description="in Lark's syntax")] | None = None
    json_object: bool | None = None


def form_of(format: ResponseFormat | None, form: AnswerForm | None) -> StructuredOutputs | None:
    """What an answer must obey; None for nothing.

    Raises:
        ApiError: both are given, or one is not acceptable.
    """
    if format is not None and format.type != "json_schema" and format.json_schema is not None:
        problem = f"is for type 'json_schema', not {format.type!r}"
        raise bad_field("response_format.json_schema", problem)
    asks = format is not None and format.type != "text"
    if form is not None:
        if asks:
            problem = "and response_format both ask for a form"
            raise bad_field("structured_outputs", problem, remedy="give one of them")
        own = {name: getattr(form, name) for name in form.__struct_fields__}
        return _made({name: it for name, it in own.items() if it is not None}, {})
    if format is None or not asks:
        return None
    if format.type == "json_object":
        return _made({"json_object": True}, _AS_FORMAT)
    if format.json_schema is None:
        remedy = "it is required with type 'json_schema'"
        raise bad_field("response_format.json_schema", "is missing", remedy=remedy)
    return _made({"json": format.json_schema.schema or {}}, _AS_FORMAT)


def form_of_calls(
    family: str,
    tools: Sequence[Tool],
    choice: str | ChosenTool | None,
    form: StructuredOutputs | None,
    *,
    parallel: bool,
    special_ids: Mapping[str, int],
) -> StructuredOutputs:
    """What an answer obeys that must or may call tools; it may take some milliseconds.

    Args:
        family: How the model writes calls.
        tools: Those that the model is told of.
        choice: Whether it must call one, and which.
        form: What an answer without calls obeys; None: it may be any text.
        parallel: Whether there may be several calls.
        special_ids: By text the special tokens.

    Raises:
        ApiError: a grammar cannot hold arguments to the parameters' schema, or not in such an
            answer.
    """
    told = [tool.asked for tool in tools]
    how: dict[str, Any] = {"parallel": parallel, "special_ids": special_ids}
    if isinstance(choice, ChosenTool):
        how |= {"name": choice.function.name, "parallel": False}
    elif choice != "required":
        how |= {"or_text": form is None, "or_form": form}
    try:
        return call_grammar(family, told, **how)
    except (TypeError, ValueError) as error:
        raise ApiError(400, info_of(error)) from None


_AS_FORMAT = {"structured_outputs.json": "response_format.json_schema.schema"}


def _made(fields: dict[str, Any], names: Mapping[str, str]) -> StructuredOutputs:
    """Return the specification that some fields ask for; errors call these fields by `names`."""
    try:
        return StructuredOutputs(**fields)
    except (TypeError, ValueError) as error:
        raise ApiError(400, info_of(error).renamed(names)) from None
