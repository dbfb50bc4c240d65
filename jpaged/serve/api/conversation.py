"""What requests may say of a conversation: its messages, the tools that the model is told of, and
how a template writes both out."""

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
"""Tools that a request may offer, and calls that a message may have, as OpenAI has it."""

MAX_TOOLS_BYTES = 1024 * 1024
"""Of the JSON of all tools."""

_MAX_ARGUMENTS_VALUES = 64 * 1024
"""Values in a call's arguments, as `parse_json` counts them."""

TEXT_ONLY = "text is all that goes in and out"
_CONTENT_ONLY = "messages have their content alone"
_DEPRECATED_FUNCTION_CALL = "send tool_calls, which took its place"
_FUNCTION_NAME_RULE = "letters, digits, _ and -, at most 64"
_STRICT_DESCRIPTION = "arguments obey the schema also where the model chooses to call"

Identifier = Annotated[str, Meta(max_length=1000)]
Scalar = Annotated[str, Meta(max_length=1000)] | bool | int | float
TemplateVariables = Annotated[dict[str, Scalar], Meta(max_length=32)]
FunctionName = Annotated[
    str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}(?!\n)$", description=_FUNCTION_NAME_RULE)
]
CalledFunctionName = Annotated[str, Meta(min_length=1, max_length=256)]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object. A default that is not null stands for null too."""

    drops_unknown_nulls: ClassVar[bool] = False
    """Whether a field that it does not have may be null, which asks for nothing."""


class FunctionDefinition(Body, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], Meta(description="a JSON schema")] | None = None
    strict: Annotated[bool, Meta(description=_STRICT_DESCRIPTION)] | None = None


class ChatTool(Body, frozen=True, kw_only=True):
    """A tool that the model is told of."""

    type: Literal["function"]
    function: FunctionDefinition

    @property
    def template_dict(self) -> dict[str, Any]:
        """As templates take it: without what was not given."""
        own = self.function
        kept = {"name": own.name, "description": own.description, "parameters": own.parameters}
        return {"type": "function", "function": {k: v for k, v in kept.items() if v is not None}}

    @property
    def grammar_dict(self) -> dict[str, Any]:
        """As a grammar takes it."""
        own = self.function
        kept = {"name": own.name, "parameters": own.parameters, "strict": own.strict}
        return {"type": "function", "function": kept}


class ChosenFunction(Body, frozen=True, kw_only=True):
    """The name of a function."""

    name: FunctionName


class ChosenTool(Body, frozen=True, kw_only=True):
    """The tool that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


ChatTools = Annotated[list[ChatTool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class FunctionCall(Body, frozen=True, kw_only=True):
    """What was called."""

    drops_unknown_nulls: ClassVar[bool] = True
    name: CalledFunctionName
    arguments: Annotated[str, Meta(description="JSON text of an object; may be empty")]


class ToolCall(Body, frozen=True, kw_only=True):
    """A call that the model made, sent back as it came."""

    drops_unknown_nulls: ClassVar[bool] = True
    function: FunctionCall
    id: Identifier | None = None
    type: Literal["function"] = "function"

    @property
    def template_dict(self) -> dict[str, Any]:
        """As templates take it, but for the arguments, which are JSON text."""
        own = {"name": self.function.name, "arguments": self.function.arguments}
        template_dict = {"type": "function", "function": own}
        return template_dict if self.id is None else {"id": self.id, **template_dict}


class TextPart(Body, frozen=True, kw_only=True):
    """A piece of a message."""

    type: Annotated[
        Literal["text"], Meta(description=f"{TEXT_ONLY}, and nothing is fetched from anywhere")
    ]
    text: str


class ChatMessage(Body, frozen=True, kw_only=True):
    """One message of a conversation, such as an answer that is sent back as it came."""

    drops_unknown_nulls: ClassVar[bool] = True
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Annotated[None, Meta(description=_DEPRECATED_FUNCTION_CALL)] = None
    tool_call_id: Annotated[str, Meta(max_length=1000, description="of role tool")] | None = None
    name: Annotated[str, Meta(max_length=1000, description="of role tool")] | None = None
    reasoning_content: (
        Annotated[str, Meta(description="for templates that write what was thought")] | None
    ) = None
    refusal: Annotated[Literal[""], Meta(description=_CONTENT_ONLY)] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0, description=_CONTENT_ONLY)] | None = None

    @property
    def text(self) -> str:
        """The content; its parts are joined by line breaks."""
        return content_text(self.content)

    @property
    def template_dict(self) -> dict[str, Any]:
        """As templates take it, but for the arguments of calls, which are JSON text."""
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
    """Return the text of a message's content; its parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def to_chat_tool(own: Any, parameters: dict[str, Any] | None) -> ChatTool:
    """Return a function as a tool of a chat, given a tool that has the other fields itself."""
    function = FunctionDefinition(
        name=own.name, description=own.description, parameters=parameters, strict=own.strict
    )
    return ChatTool(type="function", function=function)


def check_required_fields(item: Any, path: str, *names: str) -> None:
    """Raise ApiError unless an item of several kinds has the fields that its `type` needs."""
    for name in names:
        if getattr(item, name) is None:
            own = f"{path}.{name}"
            raise field_error(own, "is missing", remedy=f"it is required of type {item.type!r}")


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Check what the fields of messages do not tell one by one.

    Raises:
        ApiError: a message without content; calls that are not the assistant's; arguments that are
            no JSON object.
    """
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        calls = message.tool_calls or ()
        if message.content is None and not calls:
            raise field_error(f"{path}.content", "is missing", remedy="it is required")
        if calls and message.role != "assistant":
            path = f"{path}.tool_calls"
            raise field_error(
                path, ": only an assistant's message has calls", value=format_value(calls)
            )
        for j, call in enumerate(calls):
            own = f"{path}.tool_calls[{j}].function.arguments"
            _check_arguments(own, call.function.arguments)


def _check_arguments(path: str, arguments: str) -> None:
    why = ""
    try:
        value = parse_json(arguments.encode(), _MAX_ARGUMENTS_VALUES) if arguments else {}
    except ApiError as error:
        value, why = None, f" ({str(error.with_renamed_fields({BODY_NAME: 'it'}))[:200]})"
    if not isinstance(value, dict):
        must = "must be the JSON text of an object: mend it, or leave the call out"
        raise field_error(path, f"{must}{why}", value=format_value(arguments))


def check_tools(tools: Sequence[ChatTool] | None, choice: str | ChosenTool | None = None) -> None:
    """Check what the fields of tools do not tell one by one.

    Raises:
        ApiError: too many bytes, a name twice, or a choice that cannot be had.
    """
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        repeated_name = next(name for i, name in enumerate(names) if name in names[:i])
        raise field_error(
            "tools", f"names the function {repeated_name!r} twice", remedy="each needs its own"
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
    """Raise ApiError for tools, if the server does not look for calls in answers."""
    if tools and not (config.enable_auto_tool_choice and config.tool_call_parser):
        families = "|".join(TOOL_CALL_FAMILIES)
        need = f"--enable-auto-tool-choice --tool-call-parser {families}"
        problem = f"needs a server started with {need}; or tool_choice='none'"
        raise field_error("tools", problem, value=format_value(tools))


class TemplateFields:
    """How a conversation is written out: what bodies with messages have in common."""

    __slots__ = ()
    messages: list[ChatMessage] | None
    tools: list[ChatTool] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None

    def check_template(self, allowed: Collection[str]) -> None:
        """Raise ApiError for variables that are not `allowed`, and for contradictions."""
        for name in self.chat_template_kwargs or {}:
            if name not in allowed:
                known = ", ".join(sorted(allowed)) or "none"
                problem = f"has {name[:60]!r}; allowed here: {known}"
                raise field_error("chat_template_kwargs", problem)
        if self.continue_final_message and self.add_generation_prompt:
            problem = "needs add_generation_prompt=false"
            raise field_error("continue_final_message", problem, value="true")

    @property
    def offered_tools(self) -> list[ChatTool]:
        """The tools that the model is told of."""
        return self.tools or []

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as templates take them, but for calls' arguments, which are JSON text."""
        return [each.template_dict for each in self.messages or ()]

    @property
    def template_options(self) -> dict[str, Any]:
        """For the template."""
        tools = [each.template_dict for each in self.offered_tools]
        return {
            **(self.chat_template_kwargs or {}),
            **({"tools": tools} if tools else {}),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


def format_value(value: Any) -> str:
    """A JSON value in an error, shortened."""
    if isinstance(value, (dict, list)):
        return f"({'object' if isinstance(value, dict) else 'array'} of {len(value)})"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > 10**30:
        return "(a huge integer)"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
