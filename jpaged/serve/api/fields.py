"""Request fields of OpenAI's APIs, with vLLM's extensions.

Each request body is a `msgspec.Struct`. Annotations declare the types and bounds of the fields.
msgspec checks the fields and writes the published JSON schema. `parse_body` adds three rules: a
field that is null takes its default, an unknown field is an error that suggests a similar name, and
errors contain the field's path, its value and the accepted values.
"""

import difflib
import re
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec import Meta
from typing_extensions import override

from jpaged import SamplingParams, StructuredOutputs, options
from jpaged.errors import error_info
from jpaged.serve.api.conversation import (
    TEXT_ONLY,
    Body,
    ChatMessages,
    ChatTool,
    ChatTools,
    ChosenTool,
    Identifier,
    Scalar,
    TemplateFields,
    TemplateVariables,
    ToolChoice,
    check_messages,
    check_tools,
    format_value,
)
from jpaged.serve.api.response_format import (
    SPEC_DESCRIPTION,
    ResponseFormat,
    StructuredOutputsFields,
    requested_spec,
)
from jpaged.serve.errors import ApiError, field_error
from jpaged.serve.options import Limits

T = TypeVar("T", bound="Body")
OpenApiSchema = dict[str, Any]
PromptInput = str | list[int]

MAX_TOKEN_IDS = 4096
_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
_MAX_FLOAT = 1e6
"""Maximum of float parameters for which `SamplingParams` declares no maximum."""

_SAMPLING_OPTIONS = options.declared_options(SamplingParams)


def _bounds(parameter: str, description: str | None = None) -> Meta:
    """Return the bounds of the request field for the `SamplingParams` parameter `parameter`.

    The server's bounds replace missing bounds.
    """
    own: Any = _SAMPLING_OPTIONS[parameter][1]
    if own.value_type is bool:
        return Meta(description=description)
    if own.value_type is int:
        # msgspec accepts only bounds of at most 63 bits. Only the bounds of `seed` are larger.
        high = min(own.high or own.server_max or _MAX_INT32, _MAX_INT64)
        return Meta(ge=own.low, le=high, description=description)
    high = _MAX_FLOAT if own.high is None else own.high
    if own.above is not None:
        return Meta(gt=own.above, le=high, description=description)
    return Meta(ge=-_MAX_FLOAT if own.low is None else own.low, le=high, description=description)


_MODEL_DESCRIPTION = "a name from /v1/models; default: the first"
_BEAM_SEARCH_DESCRIPTION = "search for the best answers; beams: beam_width, else best_of, else n"
_CACHE_SALT_DESCRIPTION = "prompts share cached prefixes only if their salts are equal"
_TRUNCATION_DESCRIPTION = "keep only this many tokens at the end; -1: as many as fit the model"

TokenId = Annotated[int, Meta(ge=0, le=_MAX_INT32)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]
NonEmptyText = Annotated[str, Meta(min_length=1)]
NumLogprobs = Annotated[int, _bounds("logprobs")]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
LogitBias = Annotated[float, _bounds("logit_bias")]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1000, description=_CACHE_SALT_DESCRIPTION)]
TruncationLength = Annotated[int, Meta(ge=-1, le=_MAX_INT32, description=_TRUNCATION_DESCRIPTION)]
TokensAsIds = Annotated[bool, Meta(description='write tokens in logprobs as "token_id:17"')]
TokenIdText = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,8})(?!\n)$")]

_NO_EFFECT = "accepted but ignored"
EchoedValue = Annotated[Any, Meta(description=_NO_EFFECT)]
"""A field that has no effect. The answer repeats its value."""

IGNORED_FIELDS: dict[str, tuple[str, ...]] = {
    # Completions and Chat
    "SamplingFields": (
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "request_id"),
        *("safety_identifier", "service_tier", "spaces_between_special_tokens", "store", "user"),
    ),
    "StreamOptions": ("include_obfuscation",),
    "JsonSchema": ("description",),
    "FunctionCall": ("parsed_arguments",),
    "ToolCall": ("index",),
    # Responses
    "ResponsesRequest": (
        *("include", "max_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
        *("reasoning", "safety_identifier", "service_tier", "stream_options"),
    ),
    "ContentPart": ("annotations", "logprobs"),
    "InputItem": ("encrypted_content", "id", "phase", "status", "summary"),
    "TextOptions": ("verbosity",),
    # Messages
    "CountTokensRequest": ("cache_control", "inference_geo", "speed"),
    "MessagesRequest": ("metadata", "service_tier"),
    "TextBlock": ("cache_control", "citations"),
    "ContentBlock": ("cache_control", "caller", "citations", "data", "signature"),
    "CustomTool": ("cache_control", "eager_input_streaming", "input_examples"),
    "ThinkingConfig": ("budget_tokens", "display"),
    "OutputConfig": ("effort",),
}
"""Fields that `parse_body` accepts and drops, by class name. They apply to subclasses too."""

NoTemplate = Annotated[Literal[""], Meta(description="only the server sets the template")]


class StreamOptions(Body, frozen=True, kw_only=True):
    """Options for the token counts in a stream."""

    include_usage: Annotated[bool, Meta(description="send a last chunk with the token counts")] = (
        False
    )
    continuous_usage_stats: Annotated[
        bool, Meta(description="send the token counts in every chunk")
    ] = False


_EXCLUDED_PARAMETERS = {"max_tokens", "logprobs", "detokenize", "structured_outputs"}
"""Parameters of `SamplingParams` that endpoints define differently or do not have."""

_DESCRIPTIONS = {
    "n": "number of answers per prompt",
    "best_of": "number of samples, of which the n most likely are returned",
    "temperature": "0: always take the most likely token",
    "top_k": "0 or -1: keep all tokens",
    "ignore_eos": "continue after the model's end token",
    "length_penalty": "for beam search",
}


def _sampling_param_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and default of each request field taken from `SamplingParams`."""
    for name, (default, own) in _SAMPLING_OPTIONS.items():
        if own.value_type is not None and name not in _EXCLUDED_PARAMETERS:
            hint: Any = Annotated[own.value_type, _bounds(name, _DESCRIPTIONS.get(name))]
            yield name, hint | None if default is None else hint, default


_SamplingParamFields: Any = msgspec.defstruct(
    "_SamplingParamFields", _sampling_param_fields(), frozen=True, kw_only=True
)


class SamplingFields(Body, _SamplingParamFields, frozen=True, kw_only=True, dict=True):
    """Fields that completion and chat requests have in common.

    Most numbers and booleans are copied from `SamplingParams`, together with their bounds.
    """

    model: Annotated[Identifier, Meta(description=_MODEL_DESCRIPTION)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: Annotated[dict[TokenIdText, LogitBias], Meta(max_length=MAX_TOKEN_IDS)] | None = (
        None
    )
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=2**20)] | None = None
    use_beam_search: Annotated[bool, Meta(description=_BEAM_SEARCH_DESCRIPTION)] = False
    early_stopping: bool | Literal["never"] = False
    stream: Annotated[bool, Meta(description="server-sent events")] = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31, description="lower is served earlier")] = 0
    cache_salt: CacheSalt | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: TokensAsIds = False
    truncate_prompt_tokens: TruncationLength | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: (
        Annotated[StructuredOutputsFields, Meta(description=SPEC_DESCRIPTION)] | None
    ) = None

    def __post_init__(self) -> None:
        """Raise ApiError for an invalid structured-output spec.

        The check is slow, but it does not block the event loop: bodies with a spec are built in a
        separate thread.
        """
        _ = self.spec

    @cached_property
    def spec(self) -> StructuredOutputs | None:
        """The structured-output spec of each answer. None if answers are free text."""
        return requested_spec(self.response_format, self.structured_outputs)

    @property
    def spec_path(self) -> str:
        """Path of the field that contains the structured-output spec."""
        if self.structured_outputs is None or self.spec is None:
            return "response_format.json_schema.schema"
        return f"structured_outputs.{self.spec.kind}"

    @property
    def effective_stream_options(self) -> StreamOptions:
        """`stream_options`, or the defaults if the request has none."""
        return self.stream_options or StreamOptions()

    @property
    def num_sequences(self) -> int:
        """Maximum number of sequences that run at the same time for the request."""
        return max(self.n, self.best_of or 0, self.beam_width or 0)

    def check(self, limits: Limits) -> None:
        """Raise ApiError for fields that contradict each other or exceed the server's limits."""
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "needs stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "cannot be streamed: set stream=false")
        if self.truncate_prompt_tokens == 0:
            raise field_error(
                "truncate_prompt_tokens", "leaves an empty prompt: use 1 or more", value="0"
            )
        for name in ("n", "best_of", "beam_width"):
            if (getattr(self, name) or 1) > limits.max_n:
                raise field_error(
                    name,
                    f"exceeds this server's maximum of {limits.max_n}",
                    value=f"{getattr(self, name)}",
                )

    def sampling_params(self, max_tokens: int | None, **others: Any) -> SamplingParams:
        """Return the request's `SamplingParams`.

        Args:
            max_tokens: Maximum number of tokens that the engine generates per sequence.
            **others: Parameters that override the request's parameters.

        Raises:
            ApiError: The parameters are invalid or contradict each other.
        """
        width = self.beam_width
        if self.use_beam_search:
            width = width or self.best_of or self.n
        parameters: dict[str, Any] = {name: getattr(self, name) for name in _SHARED_PARAMETERS}
        parameters["beam_width"] = width
        parameters["structured_outputs"] = self.spec
        parameters["best_of"] = None if width else self.best_of
        for name in ("stop_token_ids", "allowed_token_ids"):
            parameters[name] = parameters[name] and list(dict.fromkeys(parameters[name]))
        if self.logit_bias is not None:
            parameters["logit_bias"] = {
                int(token_id): it for token_id, it in self.logit_bias.items()
            }
        try:
            return SamplingParams(**(parameters | others), max_tokens=max_tokens)
        except (TypeError, ValueError) as error:
            raise ApiError(400, error_info(error)) from None


_SHARED_PARAMETERS = sorted(
    {*SamplingFields.__struct_fields__} & {*_SAMPLING_OPTIONS} - {"structured_outputs"}
)
"""Names of `SamplingParams` fields that are copied from a request."""


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The request body of `/v1/completions`."""

    prompt: (
        NonEmptyText
        | Annotated[
            list[NonEmptyText | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
            Meta(min_length=1),
        ]
    )
    max_tokens: Annotated[int, Meta(ge=0, le=_MAX_INT32, description="0 needs echo=true")] = 16
    echo: Annotated[bool, Meta(description="return the prompt before the answer")] = False
    logprobs: NumLogprobs | None = None
    add_special_tokens: Annotated[
        bool, Meta(description="add special tokens, such as the one that begins a text")
    ] = True
    suffix: Annotated[Literal[""], Meta(description="infilling is not supported")] | None = None

    def __post_init__(self) -> None:
        """Raise ApiError if `prompt` is a list that mixes token ids with other prompts."""
        super().__post_init__()
        if not isinstance(self.prompt, str):
            is_ids, kinds = type(self.prompt[0]) is int, set(map(type, self.prompt))
            if kinds != {int} if is_ids else int in kinds:
                mismatch_index = next(
                    i for i, it in enumerate(self.prompt) if (type(it) is int) != is_ids
                )
                what = "a token id" if is_ids else "a string or an array of token ids"
                _raise_bad_value(
                    f"prompt[{mismatch_index}]",
                    self.prompt[mismatch_index],
                    f"must be {what}, like the items before it",
                )

    @property
    def prompts(self) -> list[PromptInput]:
        """The prompts as a list, even if there is only one."""
        is_one = isinstance(self.prompt, str) or type(self.prompt[0]) is int
        return cast(list[PromptInput], [self.prompt] if is_one else self.prompt)

    @property
    @override
    def num_sequences(self) -> int:
        return super().num_sequences * len(self.prompts)

    @override
    def check(self, limits: Limits) -> None:
        super().check(limits)
        if len(self.prompts) > limits.max_prompts:
            most = f"at most {limits.max_prompts} are allowed"
            raise field_error("prompt", f"contains {len(self.prompts)} prompts", remedy=most)
        if not self.max_tokens and not self.echo:
            raise field_error(
                "max_tokens", "gives no answer", value="0", remedy="use 1 or more, or set echo=true"
            )


AddGenerationPrompt = Annotated[
    bool, Meta(description="end with the start of an assistant message")
]
ContinueFinalMessage = Annotated[bool, Meta(description="continue the last message")]


class ChatRequest(SamplingFields, TemplateFields, frozen=True, kw_only=True):
    """The request body of `/v1/chat/completions`."""

    messages: ChatMessages
    max_tokens: Annotated[int, _bounds("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, _bounds("max_tokens")] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    add_special_tokens: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] = False
    modalities: (
        Annotated[list[Annotated[Literal["text"], Meta(description=TEXT_ONLY)]], Meta(max_length=1)]
        | None
    ) = None
    tools: ChatTools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: at most one call")] = True
    add_generation_prompt: AddGenerationPrompt = True
    continue_final_message: ContinueFinalMessage = False
    chat_template_kwargs: TemplateVariables | None = None
    chat_template: NoTemplate | None = None

    def __post_init__(self) -> None:
        """Raise ApiError for invalid messages, tools or structured-output specs."""
        super().__post_init__()
        check_messages(self.messages)
        check_tools(self.tools, self.tool_choice)
        if self.must_call and self.structured_outputs is not None:
            what = "requires tool calls, which structured_outputs excludes"
            raise field_error("tool_choice", what, remedy="omit one of the two fields")

    @override
    def check(self, limits: Limits) -> None:
        super().check(limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs=true")
        for name in ("beam_width", "use_beam_search"):
            if self.has_call_grammar and getattr(self, name):
                what = "required tools, strict tools, or tools and response_format"
                raise field_error(
                    name, f"cannot be combined with {what}", remedy="use sampling instead"
                )
        if self.add_special_tokens:
            remedy = "the chat template adds special tokens"
            raise field_error("add_special_tokens", "must be false", value="true", remedy=remedy)

    @property
    def must_call(self) -> bool:
        """Whether the answer must consist of tool calls alone."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def has_call_grammar(self) -> bool:
        """Whether a grammar constrains the tool calls of the answer.

        True if the model must call a tool, if a tool is strict, or if `response_format` constrains
        answers without tool calls.
        """
        tools = self.offered_tools
        if not tools or self.structured_outputs is not None:
            return False
        is_strict = any(tool.function.strict for tool in tools)
        return self.must_call or is_strict or self.spec is not None

    def part_specs(self) -> Iterator[tuple[str, StructuredOutputs]]:
        """Yield path and structured-output spec for each schema within the tool-call grammar."""
        if self.spec is not None and not self.must_call:
            yield self.spec_path, self.spec
        chosen = self.tool_choice
        for i, tool in enumerate(self.offered_tools):
            own = tool.function
            if isinstance(chosen, ChosenTool):
                is_constrained = chosen.function.name == own.name
            else:
                is_constrained = self.must_call or own.strict
            if is_constrained and own.parameters is not None:
                path = f"tools[{i}].function.parameters"
                yield path, StructuredOutputs(json=own.parameters)

    @property
    @override
    def offered_tools(self) -> list[ChatTool]:
        """The tools that the prompt describes to the model; [] if `tool_choice` is "none"."""
        return [] if self.tool_choice == "none" else super().offered_tools

    @property
    def num_logprobs(self) -> int | None:
        """Number of candidates returned per token. None: return no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_answer_tokens(self) -> int | None:
        """Maximum number of tokens per answer. None: as many as fit the context."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class TokenizeRequest(Body, TemplateFields, frozen=True, kw_only=True):
    """The request body of `/tokenize`: a prompt or messages."""

    model: Identifier | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    tools: ChatTools | None = None
    add_special_tokens: Annotated[bool, Meta(description="for prompt only")] = True
    return_token_strs: bool = False
    add_generation_prompt: AddGenerationPrompt = True
    continue_final_message: ContinueFinalMessage = False
    chat_template_kwargs: TemplateVariables | None = None
    chat_template: NoTemplate | None = None

    def __post_init__(self) -> None:
        """Raise ApiError for invalid messages or tools."""
        check_messages(self.messages or ())
        check_tools(self.tools)

    def check(self) -> None:
        """Raise ApiError unless exactly one of `prompt` and `messages` is given."""
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "give either prompt or messages", shows_path=False)


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """The request body of `/detokenize`."""

    model: Identifier | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]


# The following functions convert parsed JSON to request bodies.


def parse_body(body: type[T], value: Any) -> T:
    """Convert a JSON value to an instance of the request body class `body`.

    Raises:
        ApiError: 400: The value is not an object, or a field is missing, unknown or invalid.
    """
    try:
        return msgspec.convert(_drop_ignored_fields(body, value, ""), body)
    except msgspec.ValidationError as error:
        raise _validation_error(body, value, str(error)) from None


def _drop_ignored_fields(body: type[Body], value: Any, path: str) -> Any:
    """Return the value without ignored fields and without fields that are null.

    Raises:
        ApiError: A field is unknown.
    """
    if not isinstance(value, dict):
        return value
    fields, ignored, kept = _field_types(body), _ignored_fields(body), {}
    for name, item in value.items():
        if name in ignored:
            continue
        if name not in fields and not (item is None and body.drops_unknown_nulls):
            _raise_unknown_field(name, path, [*fields, *ignored])
        if item is None:
            continue
        inner, in_list, is_literal = fields[name]
        if inner is not None:
            own_path = f"{path}.{name}" if path else name
            if not in_list:
                item = _drop_ignored_fields(inner, item, own_path)
            elif isinstance(item, list):
                item = [
                    _drop_ignored_fields(inner, it, f"{own_path}[{i}]") for i, it in enumerate(item)
                ]
        if is_literal:
            item = _truncate_strings(item)
        kept[name] = item
    return kept


@cache
def _ignored_fields(body: type[Body]) -> frozenset[str]:
    """Return the names of the fields that a body accepts and ignores."""
    return frozenset(name for c in body.__mro__ for name in IGNORED_FIELDS.get(c.__name__, ()))


def _truncate_strings(item: Any) -> Any:
    """Shorten a string, or the strings in a list, before msgspec checks them.

    The field allows only a few short values. msgspec's error would quote a long string completely,
    and msgspec would hold the GIL meanwhile.
    """
    if isinstance(item, list):
        return [_truncate_strings(it) for it in item[:_MAX_QUOTED_CHARACTERS]]
    return item[:_MAX_QUOTED_CHARACTERS] if isinstance(item, str) else item


@cache
def _field_types(body: type[Body]) -> dict[str, tuple[type[Body] | None, bool, bool]]:
    """Return a description of each field of a body class.

    Returns:
        A dict by field name. Each value is a tuple of three: the body class of the field's value or
        of its items (or None), whether the field's value is a list of this class, and whether only
        a few values are allowed.
    """

    def leaves(hint: Any, in_list: bool = False) -> Iterator[tuple[Any, bool]]:
        kind, inner = get_origin(hint), get_args(hint)
        if kind is Literal or not inner:
            yield kind or hint, in_list
            return
        for each in inner:
            yield from leaves(each, in_list or kind is list)

    found = {}
    for field in msgspec.structs.fields(body):
        own = list(leaves(field.type))
        bodies = (it for it in own if isinstance(it[0], type) and issubclass(it[0], Body))
        inner, in_list = next(bodies, (None, False))
        found[field.name] = inner, in_list, any(kind is Literal for kind, _ in own)
    return found


def _raise_unknown_field(name: str, path: str, known: list[str]) -> NoReturn:
    named = repr(name if len(name) <= 60 else name[:57] + "...")
    near = difflib.get_close_matches(name[:60], known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    where, start = (f" of {path}", f"{path}.") if path else ("", "")
    problem = f"unknown or unsupported field {named}{where}{hint}"
    raise field_error(start + name[:60], problem, shows_path=False)


# The error for an invalid field takes the path of the field from msgspec's message, and the
# accepted values from the JSON schema of the body.

_ERROR_PATH = re.compile(r" - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`$")
_MAX_QUOTED_CHARACTERS = 500
_PATH_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])")
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")


def _validation_error(body: type[Body], value: Any, message: str) -> ApiError:
    """Return the error for a request body that msgspec rejected with the text `message`."""
    # Search only the end of the message, which may quote a value of several megabytes.
    found = _ERROR_PATH.search(message[-_MAX_QUOTED_CHARACTERS:])
    path, schema = "", component_schemas(body)[body.__name__]
    for name, index, _ in _PATH_STEP.findall(found["path"] if found else ""):
        if name:
            value, schema = value[name], _schema_part(schema, "properties")[name]
            path += f".{name}" if path else name
        elif index:
            value, schema = value[int(index)], _schema_part(schema, "items")
            path += f"[{index}]"
        else:  # msgspec does not report the key, so find an item that msgspec rejects
            schema = _schema_part(schema, "additionalProperties")
            key = next(key for key, item in value.items() if not _is_accepted(schema, item))
            value = value[key]
            path += f".{key[:60]}"
    if missing := _MISSING_FIELD.search(message[:_MAX_QUOTED_CHARACTERS]):
        path += f".{missing[1]}" if path else missing[1]
        return field_error(path, "is missing", remedy="it is required")
    if found and found["key"]:
        key = next(key for key in value if not re.fullmatch(get_args(TokenIdText)[1].pattern, key))
        return field_error(path, f"has the key {format_value(key)}, which is not a token id")
    what = _describe_schema(_resolve_ref(schema))
    if not path:
        return field_error("", f"the body={format_value(value)} must be {what}")
    return field_error(path, f"must be {what}", value=format_value(value))


def _is_accepted(schema: OpenApiSchema, item: Any) -> bool:
    """Return whether msgspec accepts an item of `logit_bias` or of `chat_template_kwargs`."""
    try:
        msgspec.convert(item, LogitBias if schema.get("type") == "number" else Scalar)
    except msgspec.ValidationError:
        return False
    return True


@cache
def component_schemas(*bodies: type[Body]) -> dict[str, OpenApiSchema]:
    """Return the JSON schemas of body classes and of all classes nested in them, by class name."""
    template = "#/components/schemas/{name}"
    _, schemas = msgspec.json.schema_components(bodies, ref_template=template)
    for name, schema in schemas.items():
        body = _find_body(name)
        schema["additionalProperties"] = {"type": "null"} if body.drops_unknown_nulls else False
        fields = schema["properties"]
        for field in sorted(_ignored_fields(body)):
            fields[field] = {"description": _NO_EFFECT, "default": None}
        for field, own in fields.items():
            # Null stands for the default, so a field with a default accepts null.
            if own.get("default") is not None:
                outer_keywords = {
                    key: own.pop(key) for key in ("default", "description") if key in own
                }
                fields[field] = {"anyOf": [own, {"type": "null"}], **outer_keywords}
    return schemas


def _resolve_ref(schema: OpenApiSchema) -> OpenApiSchema:
    """Return the schema that a `$ref` points to, or the schema itself if it has no `$ref`."""
    if "$ref" not in schema:
        return schema
    name = schema["$ref"].rpartition("/")[2]
    return component_schemas(_find_body(name))[name]


@cache
def _find_body(name: str) -> type[Body]:
    def self_and_subclasses(kind: type[Body]) -> Iterator[type[Body]]:
        yield kind
        for each in kind.__subclasses__():
            yield from self_and_subclasses(each)

    return next(each for each in self_and_subclasses(Body) if each.__name__ == name)


def _schema_part(schema: OpenApiSchema, part: str) -> OpenApiSchema:
    """Return the value of the keyword `part` in the first `anyOf` alternative that has it."""
    kinds = map(_resolve_ref, schema.get("anyOf", [schema]))
    return next(each[part] for each in kinds if part in each)


def _describe_schema(schema: OpenApiSchema) -> str:
    """Describe in words which values a schema accepts."""
    # The description of a body class is its docstring, which does not list the accepted values.
    has_note = "description" in schema and "properties" not in schema
    note = f" ({schema['description']})" if has_note else ""
    if "anyOf" in schema:
        kinds = [
            _describe_schema(_resolve_ref(it)) for it in schema["anyOf"] if it.get("type") != "null"
        ]
        return " or ".join(kinds) + note
    if schema.get("maxItems") == 0 or schema.get("enum") == [""] or schema.get("type") == "null":
        return "left out" + note
    if "enum" in schema:
        return " or ".join(map(format_value, schema["enum"])) + note
    words, size_unit = _TYPE_DESCRIPTIONS[schema["type"]]
    if "maximum" in schema:  # every numeric field of a request body has a maximum
        start = "above" if "exclusiveMinimum" in schema else "from"
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        words += f" {start} {_format_bound(low)} to {_format_bound(schema['maximum'])}"
    min_size, max_size = (
        next((schema[each] for each in names if each in schema), 0) for names in _SIZE_KEYWORDS
    )
    if min_size or max_size:
        words += (
            f" of {min_size} to {max_size} {size_unit}"
            if max_size
            else f" of at least {min_size} {size_unit}"
        )
    return words + note


def _format_bound(number: Any) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


_TYPE_DESCRIPTIONS = {
    "boolean": ("true or false", ""),
    "integer": ("an integer", ""),
    "number": ("a number", ""),
    "string": ("a string", "characters"),
    "array": ("an array", "items"),
    "object": ("an object", "fields"),
}
_SIZE_KEYWORDS = (("minLength", "minItems"), ("maxLength", "maxItems", "maxProperties"))


def _raise_bad_value(path: str, value: Any, what: str) -> NoReturn:
    raise field_error(path, what, value=format_value(value))
