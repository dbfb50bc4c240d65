"""The forms that requests may ask of an answer: OpenAI's `response_format`, vLLM's
`structured_outputs`, calls that a model must or may make. All become `StructuredOutputs`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from jpaged import StructuredOutputs, call_grammar
from jpaged.errors import error_info
from jpaged.serve.api.conversation import Body, ChatTool, ChosenTool
from jpaged.serve.errors import ApiError, field_error

_STRICT_DESCRIPTION = "an answer obeys its schema also where this is false"
SPEC_DESCRIPTION = "json, regex, choice, grammar or json_object: just one"

JsonSchemaDict = Annotated[dict[str, Any], Meta(description="a JSON schema")]
SchemaName = Annotated[
    str,
    Meta(max_length=64, pattern=r"^[^\x00-\x1f\x7f]+(?!\n)$", description="no control characters"),
]


class JsonSchema(Body, frozen=True, kw_only=True):
    """A schema and its name."""

    name: SchemaName
    schema: JsonSchemaDict | None = None
    strict: Annotated[bool, Meta(description=_STRICT_DESCRIPTION)] | None = None


class ResponseFormat(Body, frozen=True, kw_only=True):
    """The form of the answer, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputsFields(Body, frozen=True, kw_only=True):
    """The form of the answer, as vLLM has it: just one of these."""

    json: JsonSchemaDict | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(description="in Lark's syntax")] | None = None
    json_object: bool | None = None


def requested_spec(
    format: ResponseFormat | None, spec: StructuredOutputsFields | None
) -> StructuredOutputs | None:
    """What an answer must obey; None for nothing.

    Raises:
        ApiError: both are given, or one is not acceptable.
    """
    if format is not None and format.type != "json_schema" and format.json_schema is not None:
        problem = f"is for type 'json_schema', not {format.type!r}"
        raise field_error("response_format.json_schema", problem)
    is_constrained = format is not None and format.type != "text"
    if spec is not None:
        if is_constrained:
            problem = "and response_format both ask for a form"
            raise field_error("structured_outputs", problem, remedy="give one of them")
        own = {name: getattr(spec, name) for name in spec.__struct_fields__}
        return _build_spec({name: it for name, it in own.items() if it is not None}, {})
    if format is None or not is_constrained:
        return None
    if format.type == "json_object":
        return _build_spec({"json_object": True}, _RESPONSE_FORMAT_PATHS)
    if format.json_schema is None:
        remedy = "it is required with type 'json_schema'"
        raise field_error("response_format.json_schema", "is missing", remedy=remedy)
    return _build_spec({"json": format.json_schema.schema or {}}, _RESPONSE_FORMAT_PATHS)


def tool_call_spec(
    family: str,
    tools: Sequence[ChatTool],
    choice: str | ChosenTool | None,
    spec: StructuredOutputs | None,
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
    tool_dicts = [tool.grammar_dict for tool in tools]
    grammar_options: dict[str, Any] = {"parallel": parallel, "special_ids": special_ids}
    if isinstance(choice, ChosenTool):
        grammar_options |= {"name": choice.function.name, "parallel": False}
    elif choice != "required":
        grammar_options |= {"or_text": spec is None, "or_form": spec}
    try:
        return call_grammar(family, tool_dicts, **grammar_options)
    except (TypeError, ValueError) as error:
        raise ApiError(400, error_info(error)) from None


_RESPONSE_FORMAT_PATHS = {"structured_outputs.json": "response_format.json_schema.schema"}


def _build_spec(fields: dict[str, Any], names: Mapping[str, str]) -> StructuredOutputs:
    """Return the specification that some fields ask for; errors call these fields by `names`."""
    try:
        return StructuredOutputs(**fields)
    except (TypeError, ValueError) as error:
        raise ApiError(400, error_info(error).with_renamed_fields(names)) from None
