"""Request fields of conversations: messages, tools and options of the chat template."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from jpaged import TOOL_CALL_FAMILIES
from jpaged.serve.errors import ApiError, field_error
from jpaged.serve.http.bodies import BODY_NAME, parse_json
from jpaged.serve.http.exchange import encode_large_json
from jpaged.serve.options import ServeConfig

MAX_TOOLS = 128
"""Maximum number of tools per request, and of tool calls per message, as in OpenAI's API."""

MAX_TOOLS_BYTES = 1024 * 1024
"""Maximum size of the JSON text of all tools of a request, in bytes."""

_MAX_ARGUMENTS_VALUES = 64 * 1024
"""Maximum number of JSON values in a tool call's arguments, as `parse_json` counts them."""

TEXT_ONLY = "only text is supported"
_CONTENT_ONLY = "only content is supported"
_DEPRECATED_FUNCTION_CALL = "deprecated: send tool_calls instead"
_FUNCTION_NAME_RULE = "1 to 64 letters, digits, _ and -"
_STRICT_DESCRIPTION = "true: arguments match the schema even if tool_choice does not force a call"

Identifier = Annotated[str, Meta(max_length=1000)]
Scalar = Annotated[str, Meta(max_length=1000)] | bool | int | float
TemplateVariables = Annotated[dict[str, Scalar], Meta(max_length=32)]
FunctionName = Annotated[
    str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}(?!\n)$", description=_FUNCTION_NAME_RULE)
]
CalledFunctionName = Annotated[str, Meta(min_length=1, max_length=256)]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of JSON objects in request bodies. A field that is null takes its default."""

    drops_unknown_nulls: ClassVar[bool] = False
    """Whether unknown fields are accepted if their value is null."""


class FunctionDefinition(Body, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], Meta(description="a JSON schema")] | None = None
    strict: Annotated[bool, Meta(description=_STRICT_DESCRIPTION)] | None = None


class ChatTool(Body, frozen=True, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    @property
    def template_dict(self) -> dict[str, Any]:
        """The tool as a dict for chat templates. Fields that are None are left out."""
        own = self.function
        kept = {"name": own.name, "description": own.description, "parameters": own.parameters}
        return {"type": "function", "function": {k: v for k, v in kept.items() if v is not None}}

    @property
    def grammar_dict(self) -> dict[str, Any]:
        """The tool as a dict for `jpaged.parsing.tool_grammar.call_grammar`."""
        own = self.function
        kept = {"name": own.name, "parameters": own.parameters, "strict": own.strict}
        return {"type": "function", "function": kept}


class ChosenFunction(Body, frozen=True, kw_only=True):
    """The name of the function that the model must call."""

    name: FunctionName


class ChosenTool(Body, frozen=True, kw_only=True):
    """The tool that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


ChatTools = Annotated[list[ChatTool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class FunctionCall(Body, frozen=True, kw_only=True):
    """The function and the arguments of a tool call."""

    drops_unknown_nulls: ClassVar[bool] = True
    name: CalledFunctionName
    arguments: Annotated[str, Meta(description="JSON text of an object; may be empty")]


class ToolCall(Body, frozen=True, kw_only=True):
    """A tool call in an assistant message. Clients send back tool calls of earlier answers."""

    drops_unknown_nulls: ClassVar[bool] = True
    function: FunctionCall
    id: Identifier | None = None
    type: Literal["function"] = "function"

    @property
    def template_dict(self) -> dict[str, Any]:
        """The tool call as a dict for chat templates, with the arguments still as JSON text."""
        own = {"name": self.function.name, "arguments": self.function.arguments}
        template_dict = {"type": "function", "function": own}
        return template_dict if self.id is None else {"id": self.id, **template_dict}


class TextPart(Body, frozen=True, kw_only=True):
    """A text part of a message."""

    type: Annotated[Literal["text"], Meta(description=f"{TEXT_ONLY}; the server fetches no URLs")]
    text: str


class ChatMessage(Body, frozen=True, kw_only=True):
    """One message of a conversation. Clients may send an earlier answer's message unchanged."""

    drops_unknown_nulls: ClassVar[bool] = True
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Annotated[None, Meta(description=_DEPRECATED_FUNCTION_CALL)] = None
    tool_call_id: Annotated[str, Meta(max_length=1000, description="for role tool")] | None = None
    name: Annotated[str, Meta(max_length=1000, description="for role tool")] | None = None
    reasoning_content: (
        Annotated[str, Meta(description="for chat templates that include reasoning")] | None
    ) = None
    refusal: Annotated[Literal[""], Meta(description=_CONTENT_ONLY)] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0, description=_CONTENT_ONLY)] | None = None

    @property
    def text(self) -> str:
        """The text of the content. Parts are joined by line breaks."""
        return content_text(self.content)

    @property
    def template_dict(self) -> dict[str, Any]:
        """The message as a dict for chat templates, with tool-call arguments still as JSON text."""
        template_dict: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.role == "assistant":
            if self.reasoning_content is not None:
                template_dict["reasoning_content"] = self.reasoning_content
            if self.tool_calls:
                template_dict["tool_calls"] = [call.template_dict for call in self.tool_calls]
        elif self.role == "tool":
            for name in ("tool_call_id", "name"):
                if (value := getattr(self, name)) is not None:
                    template_dict[name] = value
        return template_dict


ChatMessages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


def content_text(content: str | Sequence[Any] | None) -> str:
    """Return the text of a message's content. Parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def to_chat_tool(tool: Any, parameters: dict[str, Any] | None) -> ChatTool:
    """Return the `ChatTool` for a tool of another API.

    Args:
        tool: An object with the fields `name`, `description` and `strict`.
        parameters: The JSON schema of the arguments.
    """
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict
    )
    return ChatTool(type="function", function=function)


def check_required_fields(item: Any, path: str, *names: str) -> None:
    """Raise ApiError if `item` lacks one of the fields `names`, which its `type` requires."""
    for name in names:
        if getattr(item, name) is None:
            own = f"{path}.{name}"
            raise field_error(own, "is missing", remedy=f"it is required for type {item.type!r}")


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Check messages for combinations of fields that are invalid.

    Raises:
        ApiError: A message has neither content nor tool calls, a message that is not from the
            assistant has tool calls, or the arguments of a call are not a JSON object.
    """
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        calls = message.tool_calls or ()
        if message.content is None and not calls:
            raise field_error(f"{path}.content", "is missing", remedy="it is required")
        if calls and message.role != "assistant":
            path = f"{path}.tool_calls"
            raise field_error(
                path,
                ": only a message with role 'assistant' may have tool calls",
                value=format_value(calls),
            )
        for j, call in enumerate(calls):
            own = f"{path}.tool_calls[{j}].function.arguments"
            _check_arguments(own, call.function.arguments)


def _check_arguments(path: str, arguments: str) -> None:
    why = ""
    try:
        value = parse_json(arguments.encode(), _MAX_ARGUMENTS_VALUES) if arguments else {}
    except ApiError as error:
        value, why = None, f" ({str(error.with_renamed_fields({BODY_NAME: 'the text'}))[:200]})"
    if not isinstance(value, dict):
        must = "must be the JSON text of an object: correct it, or omit the call"
        raise field_error(path, f"{must}{why}", value=format_value(arguments))


def check_tools(tools: Sequence[ChatTool] | None, choice: str | ChosenTool | None = None) -> None:
    """Check tools for combinations of fields that are invalid.

    Raises:
        ApiError: The JSON text of the tools is larger than `MAX_TOOLS_BYTES`, two tools have the
            same name, or `choice` needs a tool that is not in `tools`.
    """
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        repeated_name = next(name for i, name in enumerate(names) if name in names[:i])
        raise field_error(
            "tools", f"has the function {repeated_name!r} twice", remedy="use different names"
        )
    size = len(encode_large_json([tool.template_dict for tool in tools])) if tools else 0
    if size > MAX_TOOLS_BYTES:
        what = f"{size} bytes of JSON: at most {MAX_TOOLS_BYTES} are allowed"
        shorten = "; shorten descriptions or "
        raise field_error("tools", f"has {what}{shorten}", "parameters")
    if choice is None or choice in ("none", "auto"):
        return
    named = choice.function.name if isinstance(choice, ChosenTool) else None
    if named is not None and named not in names:
        known = ", ".join(names)[:200] or "none"
        problem = f"names the function {named!r}, which is not in tools: {known}"
        raise field_error("tool_choice", problem)
    if not names:
        raise field_error("tool_choice", "needs tools to choose from", value=repr(choice))


def check_tools_enabled(tools: Sequence[ChatTool], config: ServeConfig) -> None:
    """Raise ApiError if a request has tools but the server does not parse tool calls."""
    if tools and not (config.enable_auto_tool_choice and config.tool_call_parser):
        families = "|".join(TOOL_CALL_FAMILIES)
        need = f"--enable-auto-tool-choice --tool-call-parser {families}"
        problem = f"needs a server started with {need}, or tool_choice='none'"
        raise field_error("tools", problem, value=format_value(tools))


class TemplateFields:
    """Request fields for the chat template. All request bodies with messages have these fields."""

    __slots__ = ()
    messages: list[ChatMessage] | None
    tools: list[ChatTool] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None

    def check_template(self, allowed: Collection[str]) -> None:
        """Raise ApiError for a variable that is not in `allowed`, or for contradictory fields."""
        for name in self.chat_template_kwargs or {}:
            if name not in allowed:
                known = ", ".join(sorted(allowed)) or "none"
                problem = f"has {name[:60]!r}, but this server only allows: {known}"
                raise field_error("chat_template_kwargs", problem)
        if self.continue_final_message and self.add_generation_prompt:
            problem = "needs add_generation_prompt=false"
            raise field_error("continue_final_message", problem, value="true")

    @property
    def offered_tools(self) -> list[ChatTool]:
        """The tools that the prompt describes to the model."""
        return self.tools or []

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as dicts for chat templates, with tool-call arguments still as JSON text."""
        return [each.template_dict for each in self.messages or ()]

    @property
    def template_options(self) -> dict[str, Any]:
        """The variables of the chat template, including tools."""
        tools = [each.template_dict for each in self.offered_tools]
        return {
            **(self.chat_template_kwargs or {}),
            **({"tools": tools} if tools else {}),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


def format_value(value: Any) -> str:
    """Return a JSON value for an error message, shortened to at most 60 characters."""
    if isinstance(value, (dict, list)):
        return f"({'object' if isinstance(value, dict) else 'array'} of {len(value)})"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > 10**30:
        return "(a huge integer)"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
