"""What requests may ask: OpenAI's fields, and vLLM's for what OpenAI does not have.

Each body is a `msgspec.Struct` whose annotations hold the types and bounds of its fields; msgspec
checks them, and writes the published JSON schema. `read` adds what msgspec does not have: null and
a missing field mean the default, an unknown field is refused with the name it is near to, and
errors name the field's path, its value and what it must be.
"""

import difflib
import re
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec import Meta

from jpaged import SamplingParams, StructuredOutputs, options
from jpaged.errors import info_of
from jpaged.serve.api.conversation import (
    TEXT_ONLY,
    Body,
    ChosenTool,
    Messages,
    Name,
    Scalar,
    Template,
    Tool,
    ToolChoice,
    Tools,
    Variables,
    check_messages,
    check_tools,
    shown,
)
from jpaged.serve.api.response_format import FORM, AnswerForm, ResponseFormat, form_of
from jpaged.serve.errors import ApiError, bad_field
from jpaged.serve.options import Limits

T = TypeVar("T", bound="Body")
Schema = dict[str, Any]
Prompt = str | list[int]

MAX_TOKEN_IDS = 4096
_INT31, _INT64 = 2**31 - 1, 2**63 - 1
_LARGEST = 1e6
"""The largest number with a fraction, where `SamplingParams` has no bound."""

_SAMPLING = options.options_of(SamplingParams)


def _bounds(parameter: str, description: str | None = None) -> Meta:
    """The bounds that `SamplingParams` declares, and where it has none, those of a server."""
    own: Any = _SAMPLING[parameter][1]
    if own.kind is bool:
        return Meta(description=description)
    if own.kind is int:
        # `seed` alone goes beyond 63 bits; msgspec takes no bound that does.
        high = min(own.high or own.served_high or _INT31, _INT64)
        return Meta(ge=own.low, le=high, description=description)
    high = _LARGEST if own.high is None else own.high
    if own.above is not None:
        return Meta(gt=own.above, le=high, description=description)
    return Meta(ge=-_LARGEST if own.low is None else own.low, le=high, description=description)


_WHICH_MODEL = "one of /v1/models; nothing means the first"
_HOW_MANY_BEAMS = "search with beam_width (else best_of, n) beams"
_WHO_SHARES = "prompts share cached prefixes only with others of their salt"
_WHAT_IS_KEPT = "keep the last so many; -1: as many as the model takes"

Id = Annotated[int, Meta(ge=0, le=_INT31)]
Ids = Annotated[list[Id], Meta(max_length=MAX_TOKEN_IDS)]
Text = Annotated[str, Meta(min_length=1)]
NumTop = Annotated[int, _bounds("logprobs")]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
Bias = Annotated[float, _bounds("logit_bias")]
Salt = Annotated[str, Meta(min_length=1, max_length=1000, description=_WHO_SHARES)]
NumKept = Annotated[int, Meta(ge=-1, le=_INT31, description=_WHAT_IS_KEPT)]
AsIds = Annotated[bool, Meta(description='in logprobs: "token_id:17"')]
IdAsText = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,8})(?!\n)$")]

_NO_EFFECT = "accepted, and without effect here"
Echoed = Annotated[Any, Meta(description=_NO_EFFECT)]
"""A field without effect that an answer repeats as it was sent."""

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
    "Part": ("annotations", "logprobs"),
    "InputItem": ("encrypted_content", "id", "phase", "status", "summary"),
    "TextOptions": ("verbosity",),
    # Messages
    "CountTokensRequest": ("cache_control", "inference_geo", "speed"),
    "MessagesRequest": ("metadata", "service_tier"),
    "TextBlock": ("cache_control", "citations"),
    "Block": ("cache_control", "caller", "citations", "data", "signature"),
    "CustomTool": ("cache_control", "eager_input_streaming", "input_examples"),
    "Thinking": ("budget_tokens", "display"),
    "OutputConfig": ("effort",),
}
"""Fields that `read` accepts and drops, by the class of the body. Subclasses accept them too."""

NoTemplate = Annotated[Literal[""], Meta(description="templates come from the server alone")]


class StreamOptions(Body, frozen=True, kw_only=True):
    """What a stream has in addition to the answer."""

    include_usage: Annotated[bool, Meta(description="a last chunk with the token counts")] = False
    continuous_usage_stats: Annotated[bool, Meta(description="token counts in every chunk")] = False


_OWN_FORMS = {"max_tokens", "logprobs", "detokenize", "structured_outputs"}
"""Parameters that each endpoint has in a form of its own, or that are none over HTTP."""

_DESCRIPTIONS = {
    "n": "answers to each prompt",
    "best_of": "sample so many, return the n likeliest",
    "temperature": "0 takes the likeliest token",
    "top_k": "0 or -1 keep all tokens",
    "ignore_eos": "go on past the model's own end token",
    "length_penalty": "of beams",
}


def _plain_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and default of each parameter that HTTP has as `SamplingParams` has it."""
    for name, (default, own) in _SAMPLING.items():
        if own.kind is not None and name not in _OWN_FORMS:
            hint: Any = Annotated[own.kind, _bounds(name, _DESCRIPTIONS.get(name))]
            yield name, hint | None if default is None else hint, default


_Plain: Any = msgspec.defstruct("_Plain", _plain_fields(), frozen=True, kw_only=True)


class SamplingFields(Body, _Plain, frozen=True, kw_only=True, dict=True):
    """The fields that completions and chats have in common: parameters of the sampler, of which
    numbers and switches are as `SamplingParams` declares them, and what else is asked."""

    model: Annotated[Name, Meta(description=_WHICH_MODEL)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Ids | None = None
    logit_bias: Annotated[dict[IdAsText, Bias], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[list[Id], Meta(max_length=2**20)] | None = None
    use_beam_search: Annotated[bool, Meta(description=_HOW_MANY_BEAMS)] = False
    early_stopping: bool | Literal["never"] = False
    stream: Annotated[bool, Meta(description="server-sent events")] = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31, description="lower is served earlier")] = 0
    cache_salt: Salt | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: AsIds = False
    truncate_prompt_tokens: NumKept | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[AnswerForm, Meta(description=FORM)] | None = None

    def __post_init__(self) -> None:
        """Raise ApiError for a form of answers that cannot be had; here, since bodies are read in
        a thread."""
        _ = self.form

    @cached_property
    def form(self) -> StructuredOutputs | None:
        """What each answer must obey."""
        return form_of(self.response_format, self.structured_outputs)

    @property
    def form_path(self) -> str:
        """Where that was asked."""
        if self.structured_outputs is None or self.form is None:
            return "response_format.json_schema.schema"
        return f"structured_outputs.{self.form.kind}"

    @property
    def options(self) -> StreamOptions:
        """What a stream has in addition to the answer."""
        return self.stream_options or StreamOptions()

    @property
    def num_sequences(self) -> int:
        """Sequences that may run for it at a time."""
        return max(self.n, self.best_of or 0, self.beam_width or 0)

    def check(self, limits: Limits) -> None:
        """Raise ApiError for fields that contradict each other or exceed the server's limits."""
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "is for stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_field("prompt_logprobs", "cannot be streamed")
        if self.truncate_prompt_tokens == 0:
            raise bad_field("truncate_prompt_tokens", "leaves no prompt", value="0")
        for name in ("n", "best_of", "beam_width"):
            if (getattr(self, name) or 1) > limits.max_n:
                raise bad_field(
                    name, f": at most {limits.max_n} here", value=f"{getattr(self, name)}"
                )

    def sampling_params(self, max_tokens: int | None, **others: Any) -> SamplingParams:
        """What is asked of the sampler.

        Args:
            max_tokens: As the engine shall take it.
            **others: Parameters that the endpoints write differently.

        Raises:
            ApiError: parameters that do not go together.
        """
        width = self.beam_width
        if self.use_beam_search:
            width = width or self.best_of or self.n
        asked: dict[str, Any] = {name: getattr(self, name) for name in _SAME_NAMES}
        asked["beam_width"] = width
        asked["structured_outputs"] = self.form
        asked["best_of"] = None if width else self.best_of
        for name in ("stop_token_ids", "allowed_token_ids"):
            asked[name] = asked[name] and list(dict.fromkeys(asked[name]))
        if self.logit_bias is not None:
            asked["logit_bias"] = {int(token_id): it for token_id, it in self.logit_bias.items()}
        try:
            return SamplingParams(**(asked | others), max_tokens=max_tokens)
        except (TypeError, ValueError) as error:
            raise ApiError(400, info_of(error)) from None


_SAME_NAMES = sorted({*SamplingFields.__struct_fields__} & {*_SAMPLING} - {"structured_outputs"})
"""Parameters that all requests have under their own names."""


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields of `/v1/completions`."""

    prompt: (
        Text
        | Annotated[list[Text | Id | Annotated[list[Id], Meta(min_length=1)]], Meta(min_length=1)]
    )
    max_tokens: Annotated[int, Meta(ge=0, le=_INT31, description="0 only with echo")] = 16
    echo: Annotated[bool, Meta(description="the prompt comes before the answer")] = False
    logprobs: NumTop | None = None
    add_special_tokens: Annotated[
        bool, Meta(description="such as the token that begins a text")
    ] = True
    suffix: Annotated[Literal[""], Meta(description="this model fills no gaps")] | None = None

    def __post_init__(self) -> None:
        """Raise ApiError for a mixed list; here, since bodies are read in a thread."""
        super().__post_init__()
        if not isinstance(self.prompt, str):
            is_ids, kinds = type(self.prompt[0]) is int, set(map(type, self.prompt))
            if kinds != {int} if is_ids else int in kinds:
                odd = next(i for i, it in enumerate(self.prompt) if (type(it) is int) != is_ids)
                what = "a token id" if is_ids else "a string or an array of token ids"
                _refuse(f"prompt[{odd}]", self.prompt[odd], f"must be {what}, like those before it")

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, in a list also if it is one."""
        is_one = isinstance(self.prompt, str) or type(self.prompt[0]) is int
        return cast(list[Prompt], [self.prompt] if is_one else self.prompt)

    @property
    def num_sequences(self) -> int:
        """Sequences that may run for it at a time."""
        return super().num_sequences * len(self.prompts)

    def check(self, limits: Limits) -> None:
        """Raise ApiError for fields that contradict each other or exceed the server's limits."""
        super().check(limits)
        if len(self.prompts) > limits.max_prompts:
            most = f"at most {limits.max_prompts} are allowed"
            raise bad_field("prompt", f"has {len(self.prompts)} entries", remedy=most)
        if not self.max_tokens and not self.echo:
            raise bad_field(
                "max_tokens", "makes no answer", value="0", remedy="only echo=true allows it"
            )


OpensAnswer = Annotated[bool, Meta(description="open the assistant's answer")]
GoesOn = Annotated[bool, Meta(description="go on with the last message")]


class ChatRequest(SamplingFields, Template, frozen=True, kw_only=True):
    """The fields of `/v1/chat/completions`."""

    messages: Messages
    max_tokens: Annotated[int, _bounds("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, _bounds("max_tokens")] | None = None
    logprobs: bool = False
    top_logprobs: NumTop | None = None
    add_special_tokens: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] = False
    modalities: (
        Annotated[list[Annotated[Literal["text"], Meta(description=TEXT_ONLY)]], Meta(max_length=1)]
        | None
    ) = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: one call at most")] = True
    add_generation_prompt: OpensAnswer = True
    continue_final_message: GoesOn = False
    chat_template_kwargs: Variables | None = None
    chat_template: NoTemplate | None = None

    def __post_init__(self) -> None:
        """Raise ApiError for messages and tools that are none; here, in the bodies' thread."""
        super().__post_init__()
        check_messages(self.messages)
        check_tools(self.tools, self.tool_choice)
        if self.must_call and self.structured_outputs is not None:
            what = "asks for calls, and structured_outputs for another form"
            raise bad_field("tool_choice", what, remedy="leave one of them out")

    def check(self, limits: Limits) -> None:
        """Raise ApiError for fields that contradict each other or exceed the server's limits."""
        super().check(limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_field("top_logprobs", "needs logprobs=true")
        for name in ("beam_width", "use_beam_search"):
            if self.holds_calls and getattr(self, name):
                what = "tools that must be called or are strict, or come with a form of the answer"
                raise bad_field(name, f"cannot go with {what}", remedy="sample instead")
        if self.add_special_tokens:
            remedy = "the template writes its own"
            raise bad_field("add_special_tokens", "must be false", value="true", remedy=remedy)

    @property
    def must_call(self) -> bool:
        """Whether an answer is nothing but calls."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def holds_calls(self) -> bool:
        """Whether a grammar says how tools are called: if they must be, if arguments must obey
        their schema, or if an answer without calls must obey one."""
        tools = self.offered_tools
        if not tools or self.structured_outputs is not None:
            return False
        is_strict = any(tool.function.strict for tool in tools)
        return self.must_call or is_strict or self.form is not None

    def forms_within(self) -> Iterator[tuple[str, StructuredOutputs]]:
        """What parts of an answer that may call obey, each with its path."""
        if self.form is not None and not self.must_call:
            yield self.form_path, self.form
        chosen = self.tool_choice
        for i, tool in enumerate(self.offered_tools):
            own = tool.function
            if isinstance(chosen, ChosenTool):
                is_held = chosen.function.name == own.name
            else:
                is_held = self.must_call or own.strict
            if is_held and own.parameters is not None:
                path = f"tools[{i}].function.parameters"
                yield path, StructuredOutputs(json=own.parameters)

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of: none, if it shall not call any."""
        return [] if self.tool_choice == "none" else super().offered_tools

    @property
    def num_logprobs(self) -> int | None:
        """Candidates told of for each token."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def longest(self) -> int | None:
        """Tokens of an answer at most; None for as many as fit."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class TokenizeRequest(Body, Template, frozen=True, kw_only=True):
    """The fields of `/tokenize`: a prompt or messages."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: Annotated[bool, Meta(description="of a prompt")] = True
    return_token_strs: bool = False
    add_generation_prompt: OpensAnswer = True
    continue_final_message: GoesOn = False
    chat_template_kwargs: Variables | None = None
    chat_template: NoTemplate | None = None

    def __post_init__(self) -> None:
        """Raise ApiError for messages and tools that are none; here, in the bodies' thread."""
        check_messages(self.messages or ())
        check_tools(self.tools)

    def check(self) -> None:
        """Raise ApiError unless there is just one thing to tokenise."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_field("prompt", "give either prompt or messages", shows_path=False)


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """The fields of `/detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[Id], Meta(max_length=2**20)]


# From JSON to a body.


def read(body: type[T], value: Any) -> T:
    """A `body` of a JSON value.

    Raises:
        ApiError: 400: it is no object, or a field is missing, unknown or not acceptable.
    """
    try:
        return msgspec.convert(_known(body, value, ""), body)
    except msgspec.ValidationError as error:
        raise _explained(body, value, str(error)) from None


def _known(body: type[Body], value: Any, path: str) -> Any:
    """Return the value without ignored fields and without nulls, which stand for a default.

    Raises:
        ApiError: a field is unknown.
    """
    if not isinstance(value, dict):
        return value
    fields, ignored, kept = _fields(body), _ignored(body), {}
    for name, item in value.items():
        if name in ignored:
            continue
        if name not in fields and not (item is None and body.drops_unknown_nulls):
            _refuse_unknown(name, path, [*fields, *ignored])
        if item is None:
            continue
        inner, in_list, is_word = fields[name]
        if inner is not None:
            own_path = f"{path}.{name}" if path else name
            if not in_list:
                item = _known(inner, item, own_path)
            elif isinstance(item, list):
                item = [_known(inner, it, f"{own_path}[{i}]") for i, it in enumerate(item)]
        if is_word:
            item = _shortened(item)
        kept[name] = item
    return kept


@cache
def _ignored(body: type[Body]) -> frozenset[str]:
    """Return the names of the fields that a body accepts and ignores."""
    return frozenset(name for c in body.__mro__ for name in IGNORED_FIELDS.get(c.__name__, ()))


def _shortened(item: Any) -> Any:
    """What should be a word: msgspec would quote it whole, holding the interpreter meanwhile."""
    if isinstance(item, list):
        return [_shortened(it) for it in item[:_LONGEST]]
    return item[:_LONGEST] if isinstance(item, str) else item


@cache
def _fields(body: type[Body]) -> dict[str, tuple[type[Body] | None, bool, bool]]:
    """By field: the body that its value is, or that its items are; which of the two; whether it is
    one of some words."""

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


def _refuse_unknown(name: str, path: str, known: list[str]) -> NoReturn:
    named = repr(name if len(name) <= 60 else name[:57] + "...")
    near = difflib.get_close_matches(name[:60], known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    where, start = (f" of {path}", f"{path}.") if path else ("", "")
    problem = f"unknown or unsupported field {named}{where}{hint}"
    raise bad_field(start + name[:60], problem, shows_path=False)


# What an error says: msgspec tells where, the schema what must be there.

_WHERE = re.compile(r" - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`$")
_LONGEST = 500
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])")
_MISSING = re.compile(r"missing required field `(\w+)`")


def _explained(body: type[Body], value: Any, message: str) -> ApiError:
    """The error for what msgspec says of a value."""
    found = _WHERE.search(message[-_LONGEST:])  # it may begin with the value, of megabytes
    path, schema = "", components(body)[body.__name__]
    for name, index, _ in _STEP.findall(found["path"] if found else ""):
        if name:
            value, schema = value[name], _with(schema, "properties")[name]
            path += f".{name}" if path else name
        elif index:
            value, schema = value[int(index)], _with(schema, "items")
            path += f"[{index}]"
        else:  # msgspec does not say which item of an object it is
            schema = _with(schema, "additionalProperties")
            key = next(key for key, item in value.items() if not _accepts(schema, item))
            value = value[key]
            path += f".{key[:60]}"
    if missing := _MISSING.search(message[:_LONGEST]):
        path += f".{missing[1]}" if path else missing[1]
        return bad_field(path, "is missing", remedy="it is required")
    if found and found["key"]:
        key = next(key for key in value if not re.fullmatch(get_args(IdAsText)[1].pattern, key))
        return bad_field(path, f"has the key {shown(key)}, which is no token id")
    what = _must_be(_resolved(schema))
    if not path:
        return bad_field("", f"the body={shown(value)} must be {what}")
    return bad_field(path, f"must be {what}", value=shown(value))


def _accepts(schema: Schema, item: Any) -> bool:
    """Whether an item of one of the two fields that are objects of scalars is acceptable."""
    try:
        msgspec.convert(item, Bias if schema.get("type") == "number" else Scalar)
    except msgspec.ValidationError:
        return False
    return True


@cache
def components(*bodies: type[Body]) -> dict[str, Schema]:
    """The JSON schemas of bodies, and of those within them, by name."""
    template = "#/components/schemas/{name}"
    _, schemas = msgspec.json.schema_components(bodies, ref_template=template)
    for name, schema in schemas.items():
        body = _body_named(name)
        schema["additionalProperties"] = {"type": "null"} if body.drops_unknown_nulls else False
        fields = schema["properties"]
        for field in sorted(_ignored(body)):
            fields[field] = {"description": _NO_EFFECT, "default": None}
        for field, own in fields.items():
            if own.get("default") is not None:  # null stands for it
                told = {key: own.pop(key) for key in ("default", "description") if key in own}
                fields[field] = {"anyOf": [own, {"type": "null"}], **told}
    return schemas


def _resolved(schema: Schema) -> Schema:
    """The schema itself, where it refers to a body's."""
    if "$ref" not in schema:
        return schema
    name = schema["$ref"].rpartition("/")[2]
    return components(_body_named(name))[name]


@cache
def _body_named(name: str) -> type[Body]:
    def all_of(kind: type[Body]) -> Iterator[type[Body]]:
        yield kind
        for each in kind.__subclasses__():
            yield from all_of(each)

    return next(each for each in all_of(Body) if each.__name__ == name)


def _with(schema: Schema, part: str) -> Schema:
    """A part of that alternative of a schema which has it."""
    kinds = map(_resolved, schema.get("anyOf", [schema]))
    return next(each[part] for each in kinds if part in each)


def _must_be(schema: Schema) -> str:
    """In words what a schema accepts."""
    # A body's own description says what it is, not what it must be.
    has_note = "description" in schema and "properties" not in schema
    note = f" ({schema['description']})" if has_note else ""
    if "anyOf" in schema:
        kinds = [_must_be(_resolved(it)) for it in schema["anyOf"] if it.get("type") != "null"]
        return " or ".join(kinds) + note
    if schema.get("maxItems") == 0 or schema.get("enum") == [""] or schema.get("type") == "null":
        return "left out" + note
    if "enum" in schema:
        return " or ".join(map(shown, schema["enum"])) + note
    words, counted = _KINDS[schema["type"]]
    if "maximum" in schema:  # as all numbers here
        start = "above" if "exclusiveMinimum" in schema else "from"
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        words += f" {start} {_bound(low)} to {_bound(schema['maximum'])}"
    least, most = (next((schema[each] for each in names if each in schema), 0) for names in _SIZES)
    if least or most:
        words += f" of {least} to {most} {counted}" if most else f" of at least {least} {counted}"
    return words + note


def _bound(number: Any) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


_KINDS = {
    "boolean": ("true or false", ""),
    "integer": ("an integer", ""),
    "number": ("a number", ""),
    "string": ("a string", "characters"),
    "array": ("an array", "items"),
    "object": ("an object", "fields"),
}
_SIZES = (("minLength", "minItems"), ("maxLength", "maxItems", "maxProperties"))


def _refuse(path: str, value: Any, what: str) -> NoReturn:
    raise bad_field(path, what, value=shown(value))
