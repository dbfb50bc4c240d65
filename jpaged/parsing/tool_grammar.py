"""Grammars of answers that must or may call a tool, as each family's parser reads calls back."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jpaged.parsing.tool_calls import TOOL_CALL_FAMILIES, Tool, types_in
from jpaged.structured_outputs import StructuredOutputs, bounds
from jpaged.structured_outputs.schemas import ANNOTATIONS, unescaped

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT = {"type": "object"}
_DEFINITIONS = ("$defs", "definitions")
_NAME_OTHERS = {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
_NOT_IN_TAGS = _NAME_OTHERS - {"additionalProperties"} | {"minProperties", "maxProperties"}
_MOST_REFERENCES = 8
_LEAST_OF_A_PARAMETER = 64
"""Characters of `qwen3_xml`'s rules for a parameter, at least."""


def call_grammar(
    family: str,
    tools: Sequence[Tool],
    *,
    name: str | None = None,
    parallel: bool = True,
    special_ids: Mapping[str, int] | None = None,
    or_text: bool = False,
    or_form: StructuredOutputs | None = None,
) -> StructuredOutputs:
    """What an answer of calls obeys, whose arguments obey their function's schema.

    Where it may be something else, arguments are held to the schema only of functions that are
    `strict`; those of others are some JSON object, or of `qwen3_xml` some parameters.

    Args:
        family: One of `TOOL_CALL_FAMILIES`.
        tools: As OpenAI writes them.
        name: The only one that may be called; None: any.
        parallel: Whether there may be several calls.
        special_ids: By text the special tokens of the tokenizer, of which families use some.
        or_text: Whether it may have text before, between and after the calls, or no calls. Where
            the text comes to what begins a call, a call it is.
        or_form: What it may obey instead of calling: a form of kind `json` or `json_object`.

    Raises:
        TypeError, ValueError: a schema cannot be enforced, naming `tools[i].function.parameters`
            and the place in it; there is no such function; all schemas are too large; or calls
            look like what `or_form` asks for, as those of `llama3_json` do.
    """
    if family not in TOOL_CALL_FAMILIES:
        raise ValueError(f"family={family!r} must be one of {', '.join(TOOL_CALL_FAMILIES)}")
    chosen = [
        (f"tools[{i}].function.parameters", tool["function"])
        for i, tool in enumerate(tools)
        if name in (None, tool["function"]["name"])
    ]
    if not chosen:
        raise ValueError(f"name={name!r} must be that of one of the tools")
    if or_form is not None and family == "llama3_json":
        raise ValueError(
            "tools cannot be called in an answer that may be JSON instead, for llama3_json writes "
            "calls as JSON too: let tool_choice be 'none' or 'required', or ask for no form"
        )
    is_forced = not or_text and or_form is None
    rules = _Rules(chosen, parallel, special_ids or {}, is_forced, or_text)
    held = [(path, _parameters(function)) for path, function in chosen if rules.holds(function)]
    _check_sizes(family, held)  # before any is checked, which takes longer
    for path, schema in held:
        _check_parameters(path, schema)
    text = "\n".join([*_FAMILIES[family](rules), *rules.start(or_form)]) + "\n"
    try:
        return StructuredOutputs(grammar=text, name="tools")
    except ValueError as error:  # too large together
        raise ValueError(str(error).replace("tools.grammar", "tools")) from None


def _check_sizes(family: str, held: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError if one of the schemas, or all together, are certainly too large."""
    total = 0
    for path, schema in held:
        try:
            size = len(_json(schema))
        except (TypeError, ValueError, RecursionError):  # `_check_parameters` says what is wrong
            continue
        bounds.SOURCE.check(path, size)
        total += _least_size(family, schema, size)
    bounds.SOURCE.check("tools", total)


def _check_parameters(path: str, schema: Any) -> None:
    """Raise unless a schema can be enforced; errors call it `path`."""
    try:
        StructuredOutputs(json=schema, name="_")
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("_.json", path)) from None
    if schema.get("type", "object") != "object":
        raise ValueError(f"{path}.type={schema['type']!r} must be 'object'")


def _least_size(family: str, schema: Any, size: int) -> int:
    """How many characters of a grammar a schema of `size` has at least: all of them, or a tag for
    each parameter."""
    if family != "qwen3_xml":
        return size
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return _LEAST_OF_A_PARAMETER * len(properties) if isinstance(properties, dict) else 0


def _parameters(function: Mapping[str, Any]) -> Any:
    return _NO_ARGUMENTS if function.get("parameters") is None else function["parameters"]


class _Rules:
    """What the families' grammars have in common."""

    def __init__(
        self,
        functions: list[tuple[str, Mapping[str, Any]]],
        parallel: bool,
        special_ids: Mapping[str, int],
        is_forced: bool,
        has_text: bool,
    ):
        self.functions, self._parallel, self._special_ids = functions, parallel, special_ids
        self._is_forced, self._has_text = is_forced, has_text
        self._opening, self._text = "", "/(?s:.+)/"
        self._seen: set[str] = set()
        self._repeats = False

    def holds(self, function: Mapping[str, Any]) -> bool:
        """Whether a function's arguments must obey its schema."""
        return self._is_forced or bool(function.get("strict"))

    def tag(self, text: str) -> str:
        """A text that is one token, where the tokenizer has it as a special one."""
        own = self._special_ids.get(text)
        return _literal(text) if own is None else f"<[{own}]>"

    def opening(self, tag: str) -> str:
        """The tag that begins a call: nothing, where the text before the call ends with it."""
        self._opening = tag
        self.not_in_text(tag)
        return "" if self._has_text and not self.has(tag) else self.tag(tag)

    def not_in_text(self, *looks: str, start: str = "") -> None:
        """What the family's parser takes for calls: anywhere, or as the answer's first character
        that is no blank."""
        self._seen |= {*looks}
        self._text = f"/[^\\s{re.escape(start)}](?s:.*)/" if start else self._text

    def has(self, text: str) -> bool:
        """Whether the tokenizer has it as a special token."""
        return text in self._special_ids

    def calls(self, start: str, between: str, end: str, *, more: bool = True) -> Iterator[str]:
        """The rules of calls in a row: what begins it, lies between calls, and ends it.

        Args:
            more: Whether text may come between the calls.
        """
        # Where there may be text, it is also what comes between such calls.
        in_a_row = self._parallel and not (more and self._has_text)
        again = f"({between} call)*" if in_a_row else ""
        yield " ".join(f"calls: {start} call {again} {end}".split())
        names = " | ".join(f"call_{i}" for i in range(len(self.functions)))
        yield f"call: {names}"
        self._repeats = more and self._parallel

    def start(self, or_form: StructuredOutputs | None) -> Iterator[str]:
        """The rules of the whole answer."""
        cases = ["said" if self._has_text else "calls"]
        if or_form is not None:
            cases.append("form")
            schema = {} if or_form.json is None else json.loads(or_form.json)
            yield f"form: {_json_rule(schema if or_form.json else _ANY_OBJECT)}"
        yield f"start: {' | '.join(cases)}"
        if self._has_text:
            yield from self._around_calls()

    def _around_calls(self) -> Iterator[str]:
        """The rules of text, in which a call's opening begins one, and nothing else looks so."""
        how_often = "*" if self._repeats else "?"
        yield f"TEXT: {self._text} & {_without(*self._seen)}"
        if not self._opening:
            yield "said: calls | TEXT?"
        elif self.has(self._opening):
            yield f"said: (TEXT? calls){how_often} TEXT?"
        else:  # the tag belongs to the text, which is greedy
            yield f"said: (lead calls){how_often} TEXT?"
            others = self._seen - {self._opening}
            but = f" & {_without(*others)}" if others else ""
            yield f"lead[lazy]: /(?s:.*){re.escape(self._opening)}/{but}"

    def objects(self, opening: str, key: str, closing: str) -> Iterator[str]:
        """The rules of calls that are JSON objects, with their arguments under `key`."""
        for i, (_, function) in enumerate(self.functions):
            head = _literal(f'{{"name": "{function["name"]}", "{key}": ')
            yield f"call_{i}: {opening} {head} arguments_{i} {_literal('}')} {closing}".rstrip()
            yield f"arguments_{i}: {self.arguments(function)}"

    def arguments(self, function: Mapping[str, Any]) -> str:
        """A function's arguments as JSON."""
        return _json_rule(_arguments_of(function) if self.holds(function) else _ANY_OBJECT)


def _hermes(rules: _Rules) -> Iterator[str]:
    opening = f"{rules.opening('<tool_call>')} {_literal(_BREAK)}"
    closing = f"{_literal(_BREAK)} {rules.tag('</tool_call>')}"
    yield from rules.calls("", _literal(_BREAK), "")
    yield from rules.objects(opening, "arguments", closing)


def _llama3_json(rules: _Rules) -> Iterator[str]:
    rules.not_in_text("<|python_tag|>", start="{")
    yield from rules.calls("", _literal("; "), "", more=False)
    yield from rules.objects("", "parameters", "")


def _mistral(rules: _Rules) -> Iterator[str]:
    tag = rules.opening("[TOOL_CALLS]")
    if not rules.has("[ARGS]"):  # before Mistral's tokenizers of 2025
        opening = f"{tag} {_literal('[')}"
        yield from rules.calls(opening, _literal(", "), _literal("]"), more=False)
        yield from rules.objects("", "arguments", "")
        return
    yield from rules.calls("", "", "")
    for i, (_, function) in enumerate(rules.functions):
        head = f"{tag} {_literal(function['name'])} {rules.tag('[ARGS]')}"
        yield f"call_{i}: {head} arguments_{i}"
        yield f"arguments_{i}: {rules.arguments(function)}"


def _qwen3_xml(rules: _Rules) -> Iterator[str]:
    yield from rules.calls("", _literal(_BREAK), "")
    rules.not_in_text("<function=")
    opening, closing = rules.opening("<tool_call>"), rules.tag("</tool_call>")
    for i, (path, function) in enumerate(rules.functions):
        head = _literal(f"\n<function={function['name']}>\n")
        if not rules.holds(function):
            yield f"call_{i}: {opening} {head} rest_{i} {closing}"
            yield f'rest_{i}[suffix="</function>\\n"]: /(?s:.*)/'
            continue
        schema = _parameters(function)
        if others := sorted(schema.keys() & _NOT_IN_TAGS):
            raise ValueError(
                f"{path}.{others[0]} cannot be enforced in this family's calls, which have a tag "
                "for each parameter: name all of them in properties"
            )
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        for key in required:
            if key not in properties:
                raise ValueError(f"{path}.required names {key!r}, which properties must have")
        body = [head]
        for j, (key, own) in enumerate(properties.items()):
            if not key or set(key) & set("<>\n"):
                raise ValueError(f"{path}.properties has {key!r}, which no tag can have")
            yield from _xml_value(f"{path}.properties.{key}", f"value_{i}_{j}", own, schema)
            parameter = f"{_literal(f'<parameter={key}>{_BREAK}')} value_{i}_{j} {_literal(_BREAK)}"
            body.append(parameter if key in required else f"({parameter})?")
        body.append(_literal("</function>\n"))
        yield f"call_{i}: {opening} {' '.join(body)} {closing}"


def _xml_value(path: str, rule: str, own: Any, whole: Mapping[str, Any]) -> Iterator[str]:
    """The rules of a value with its closing tag: text as it is, or JSON."""
    types, end = types_in(own, whole), "\n</parameter>"
    if "string" not in types:
        definitions = {key: whole[key] for key in _DEFINITIONS if key in whole}
        yield f"{rule}: {rule}_json {_literal(end)}"
        yield f"{rule}_json: {_json_rule({**own, **definitions})}"
        return
    asked = _asked(own, whole)
    if asked.keys() == {"anyOf"}:  # null or one thing: the parser reads "null" as null
        cases = [_asked(it, whole) for it in asked["anyOf"]]
        asked = next(iter(it for it in cases if it != {"type": "null"}), {})
        asked = asked if len(cases) <= 2 else {}
    choices = [asked["const"]] if "const" in asked else asked.get("enum", [])
    is_plain = asked.keys() <= {"type", "enum", "const"} and all(
        isinstance(it, str) and it == it.strip("\n") and "</parameter>" not in it for it in choices
    )
    if not (asked and is_plain and types <= {"string", "null"}):
        raise ValueError(
            f"{path} cannot be enforced in this family's calls: let it be a plain string, a string "
            "of an enum, or of other types than a string"
        )
    if choices:
        yield f"{rule}: ({' | '.join(map(_literal, choices))}) {_literal(end)}"
    else:
        yield f'{rule}[suffix="</parameter>"]: /(?s:.*)/'


def _asked(schema: Any, whole: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema asks, itself or where it refers to."""
    for _ in range(_MOST_REFERENCES):
        schema = {} if isinstance(schema, bool) else schema
        asked = {key: it for key, it in schema.items() if key not in ANNOTATIONS}
        if asked.keys() != {"$ref"}:
            return asked
        schema = whole
        for step in asked["$ref"].removeprefix("#/").split("/"):
            schema = schema[unescaped(step)]
    return {}


def _arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of arguments: of parameters that are named, no others, unless it says so."""
    schema = {"type": "object", **_parameters(function)}
    named = schema.get("properties")
    is_plain = not schema.keys() & _NAME_OTHERS and set(schema.get("required", ())) <= {
        *(named or ())
    }
    return {**schema, "additionalProperties": False} if named and is_plain else schema


def _json_rule(schema: Any) -> str:
    return f"%json {_json(schema)}"


def _json(schema: Any) -> str:
    return json.dumps(schema, separators=(",", ":"))


def _without(*texts: str) -> str:
    """What has none of these texts."""
    return f"~/(?s:.*)({'|'.join(map(re.escape, sorted(texts)))})(?s:.*)/"


def _literal(text: str) -> str:
    return json.dumps(text)


_BREAK = "\n"

_FAMILIES: Mapping[str, Callable[[_Rules], Iterator[str]]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "qwen3_xml": _qwen3_xml,
}
