"""Grammars of answers that must call a tool, in the form that each family's parser reads back."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jpaged.structured_outputs import StructuredOutputs
from jpaged.structured_outputs.schemas import ANNOTATIONS
from jpaged.text.tool_calls import TOOL_CALL_FAMILIES, Tool, types_in

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")
_MOST_REFERENCES = 8


def call_grammar(
    family: str,
    tools: Sequence[Tool],
    *,
    name: str | None = None,
    parallel: bool = True,
    special_ids: Mapping[str, int] | None = None,
) -> StructuredOutputs:
    """What an answer of nothing but calls obeys, whose arguments obey their function's schema.

    Args:
        family: One of `TOOL_CALL_FAMILIES`.
        tools: As OpenAI writes them.
        name: The only one that may be called; None: any.
        parallel: Whether there may be several calls.
        special_ids: By text the special tokens of the tokenizer, of which families use some.

    Raises:
        TypeError, ValueError: a schema cannot be enforced, naming `tools[i].function.parameters`
            and the place in it; or there is no such function.
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
    for path, function in chosen:
        _check_parameters(path, _parameters(function))
    rules = _FAMILIES[family](_Rules(chosen, parallel, special_ids or {}))
    return StructuredOutputs(grammar="\n".join(rules) + "\n", name="tools")


def _check_parameters(path: str, schema: Any) -> None:
    """Raise unless a schema can be enforced; errors call it `path`."""
    try:
        StructuredOutputs(json=schema, name="_")
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("_.json", path)) from None
    if schema.get("type", "object") != "object":
        raise ValueError(f"{path}.type={schema['type']!r} must be 'object'")


def _parameters(function: Mapping[str, Any]) -> Any:
    return _NO_ARGUMENTS if function.get("parameters") is None else function["parameters"]


class _Rules:
    """What the families' grammars have in common."""

    def __init__(
        self,
        functions: list[tuple[str, Mapping[str, Any]]],
        parallel: bool,
        special_ids: Mapping[str, int],
    ):
        self.functions, self._parallel, self._special_ids = functions, parallel, special_ids

    def tag(self, text: str) -> str:
        """A text that is one token, where the tokenizer has it as a special one."""
        own = self._special_ids.get(text)
        return _literal(text) if own is None else f"<[{own}]>"

    def has(self, text: str) -> bool:
        """Whether the tokenizer has it as a special token."""
        return text in self._special_ids

    def calls(self, start: str, between: str, end: str) -> Iterator[str]:
        """The rules of an answer of calls: what begins it, lies between calls, and ends it."""
        more = f"({between} call)*" if self._parallel else ""
        yield f"start: {start} call {more} {end}".rstrip()
        names = " | ".join(f"call_{i}" for i in range(len(self.functions)))
        yield f"call: {names}"

    def objects(self, opening: str, key: str, closing: str) -> Iterator[str]:
        """The rules of calls that are JSON objects, with their arguments under `key`."""
        for i, (_, function) in enumerate(self.functions):
            head = _literal(f'{{"name": "{function["name"]}", "{key}": ')
            yield f"call_{i}: {opening} {head} arguments_{i} {_literal('}')} {closing}".rstrip()
            yield f"arguments_{i}: {_json_rule(_object_of(_parameters(function)))}"


def _hermes(rules: _Rules) -> Iterator[str]:
    opening = f"{rules.tag('<tool_call>')} {_literal(_BREAK)}"
    closing = f"{_literal(_BREAK)} {rules.tag('</tool_call>')}"
    yield from rules.calls("", _literal(_BREAK), "")
    yield from rules.objects(opening, "arguments", closing)


def _llama3_json(rules: _Rules) -> Iterator[str]:
    yield from rules.calls("", _literal("; "), "")
    yield from rules.objects("", "parameters", "")


def _mistral(rules: _Rules) -> Iterator[str]:
    tag = rules.tag("[TOOL_CALLS]")
    if not rules.has("[ARGS]"):  # before Mistral's tokenizers of 2025
        yield from rules.calls(f"{tag} {_literal('[')}", _literal(", "), _literal("]"))
        yield from rules.objects("", "arguments", "")
        return
    yield from rules.calls("", "", "")
    for i, (_, function) in enumerate(rules.functions):
        head = f"{tag} {_literal(function['name'])} {rules.tag('[ARGS]')}"
        yield f"call_{i}: {head} arguments_{i}"
        yield f"arguments_{i}: {_json_rule(_object_of(_parameters(function)))}"


def _qwen3_xml(rules: _Rules) -> Iterator[str]:
    yield from rules.calls("", _literal(_BREAK), "")
    opening, closing = rules.tag("<tool_call>"), rules.tag("</tool_call>")
    for i, (path, function) in enumerate(rules.functions):
        schema = _parameters(function)
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        for key in required:
            if key not in properties:
                raise ValueError(f"{path}.required names {key!r}, which properties must have")
        body = [_literal(f"\n<function={function['name']}>\n")]
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
        for name in asked["$ref"].removeprefix("#/").split("/"):
            schema = schema[name]
    return {}


def _object_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **schema}


def _json_rule(schema: Any) -> str:
    return f"%json {json.dumps(schema, separators=(',', ':'))}"


def _literal(text: str) -> str:
    return json.dumps(text)


_BREAK = "\n"

_FAMILIES: Mapping[str, Callable[[_Rules], Iterator[str]]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "qwen3_xml": _qwen3_xml,
}
