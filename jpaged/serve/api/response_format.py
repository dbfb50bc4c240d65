"""Convert request fields that constrain answers to `StructuredOutputs`.

The fields are OpenAI's `response_format`, vLLM's `structured_outputs`, and tools.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from jpaged import StructuredOutputs, call_grammar
from jpaged.errors import error_info
from jpaged.serve.api.conversation import Body, ChatTool, ChosenTool
from jpaged.serve.errors import ApiError, field_error

_STRICT_DESCRIPTION = "ignored: answers always match the schema"
SPEC_DESCRIPTION = "exactly one of json, regex, choice, grammar and json_object"

JsonSchemaDict = Annotated[dict[str, Any], Meta(description="a JSON schema")]
SchemaName = Annotated[
    str,
    Meta(max_length=64, pattern=r"^[^\x00-\x1f\x7f]+(?!\n)$", description="no control characters"),
]


class JsonSchema(Body, frozen=True, kw_only=True):
    """A named JSON schema."""

    name: SchemaName
    schema: JsonSchemaDict | None = None
    strict: Annotated[bool, Meta(description=_STRICT_DESCRIPTION)] | None = None


class ResponseFormat(Body, frozen=True, kw_only=True):
    """The format of the answer, as in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputsFields(Body, frozen=True, kw_only=True):
    """The constraint on the answer, as in vLLM: exactly one of the fields."""

    json: JsonSchemaDict | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(description="a grammar in Lark syntax")] | None = None
    json_object: bool | None = None


def requested_spec(
    format: ResponseFormat | None, spec: StructuredOutputsFields | None
) -> StructuredOutputs | None:
    """Return the structured-output spec that a request asks for, or None for free text.

    Raises:
        ApiError: Both arguments constrain the answer, or an argument is invalid.
    """
    if format is not None and format.type != "json_schema" and format.json_schema is not None:
        problem = f"needs type 'json_schema', not {format.type!r}"
        raise field_error("response_format.json_schema", problem)
    is_constrained = format is not None and format.type != "text"
    if spec is not None:
        if is_constrained:
            problem = "and response_format both constrain the answer"
            raise field_error("structured_outputs", problem, remedy="send only one")
        own = {name: getattr(spec, name) for name in spec.__struct_fields__}
        return _build_spec({name: it for name, it in own.items() if it is not None}, {})
    if format is None or not is_constrained:
        return None
    if format.type == "json_object":
        return _build_spec({"json_object": True}, _RESPONSE_FORMAT_PATHS)
    if format.json_schema is None:
        remedy = "it is required for type 'json_schema'"
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
    """Return the structured-output spec of an answer that must or may call tools.

    This can take some milliseconds.

    Args:
        family: Format in which the model writes tool calls, one of `TOOL_CALL_FAMILIES`.
        tools: The tools that the prompt describes to the model.
        choice: The request's `tool_choice`.
        spec: The spec of an answer without calls. None: such an answer is free text.
        parallel: Whether the answer may have several calls.
        special_ids: Ids of the tokenizer's special tokens by their text.

    Raises:
        ApiError: The grammar cannot enforce a schema, or cannot combine tool calls with `spec`.
    """
    tool_dicts = [tool.grammar_dict for tool in tools]
    grammar_options: dict[str, Any] = {"parallel": parallel, "special_ids": special_ids}
    if isinstance(choice, ChosenTool):
        grammar_options |= {"name": choice.function.name, "parallel": False}
    elif choice != "required":
        grammar_options |= {"or_text": spec is None, "or_json": spec}
    try:
        return call_grammar(family, tool_dicts, **grammar_options)
    except (TypeError, ValueError) as error:
        raise ApiError(400, error_info(error)) from None


_RESPONSE_FORMAT_PATHS = {"structured_outputs.json": "response_format.json_schema.schema"}


def _build_spec(fields: dict[str, Any], names: Mapping[str, str]) -> StructuredOutputs:
    """Return `StructuredOutputs(**fields)`, or raise ApiError if the fields are invalid.

    `names` maps field paths in the error to the paths of the fields in the request.
    """
    try:
        return StructuredOutputs(**fields)
    except (TypeError, ValueError) as error:
        raise ApiError(400, error_info(error).with_renamed_fields(names)) from None
