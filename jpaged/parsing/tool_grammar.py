"""Grammars of answers that must or may call a tool: what the grammars of all families share."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jpaged.errors import ErrorKind, RequestError
from jpaged.parsing.tool_calls import ToolDefinition
from jpaged.parsing.tool_families import load_family
from jpaged.structured_outputs import StructuredOutputs, bounds

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT = {"type": "object"}
_OPEN_OBJECT_KEYWORDS = {
    "additionalProperties",
    "patternProperties",
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
}


def call_grammar(
    family: str,
    tools: Sequence[ToolDefinition],
    *,
    name: str | None = None,
    parallel: bool = True,
    special_ids: Mapping[str, int] | None = None,
    or_text: bool = False,
    or_form: StructuredOutputs | None = None,
) -> StructuredOutputs:
    """Return the grammar of answers that call tools with arguments that obey the tools' schemas.

    If the answer may be something else (`or_text`, `or_form`), only the arguments of `strict`
    functions must obey their schema. Arguments of other functions are any JSON object, or in
    `qwen3_xml` any parameters.

    Args:
        family: One of `TOOL_CALL_FAMILIES`.
        tools: The tools, in OpenAI's format.
        name: The only function that may be called. None: any of the tools.
        parallel: Whether the answer may have several calls.
        special_ids: Ids of the tokenizer's special tokens by their text.
        or_text: Whether the answer may have text before, between and after calls, or no calls. An
            opening tag in the text always begins a call.
        or_form: Structured outputs of kind `json` or `json_object` that the answer may obey
            instead of calling a tool.

    Raises:
        TypeError, ValueError: There is no such family or function; a schema cannot be enforced,
            with its path from `tools[i].function.parameters` on; the schemas are too large
            together; or calls are indistinguishable from what `or_form` asks for (`llama3_json`).
    """
    module = load_family(family)
    functions = [
        (f"tools[{i}].function.parameters", tool["function"])
        for i, tool in enumerate(tools)
        if name in (None, tool["function"]["name"])
    ]
    if not functions:
        raise RequestError("name", "must be that of one of the tools", value=repr(name))
    if or_form is not None and module.Grammar.is_bare_json:
        raise RequestError(
            "tools",
            f"cannot be called in an answer that may be JSON instead, for {family} writes calls as "
            "JSON too",
            remedy="let tool_choice be 'none' or 'required', or ask for no form",
            kind=ErrorKind.UNSUPPORTED,
        )
    grammar: CallGrammar = module.Grammar(
        module.Parser.opening_tags, functions, parallel, special_ids or {}, or_text, or_form
    )
    return grammar.build()


@dataclass
class CallGrammar:
    """The rules of answers with calls, in llguidance's variant of Lark's syntax.

    A family's subclass defines `_call_rules`. `parallel` and `special_ids` are as in
    `call_grammar`.

    Attributes:
        opening_tags: Texts that the family's parser takes for the beginning of a call. A generated
            call begins with the first one.
        functions: Pairs (path, function) for the functions that may be called. The path is that of
            the function's parameters, for errors.
        has_text: Whether the answer may have text next to calls, or text without calls.
        alternative: Specification that the answer may obey instead of calling a function.
        is_bare_json: Whether a generated call is a JSON object without a tag. Text in the answer
            then must not begin with a brace.
    """

    opening_tags: Sequence[str]
    functions: Sequence[tuple[str, Mapping[str, Any]]]
    parallel: bool
    special_ids: Mapping[str, int]
    has_text: bool
    alternative: StructuredOutputs | None
    is_bare_json: ClassVar[bool] = False

    def build(self) -> StructuredOutputs:
        """Return the grammar; raise TypeError or ValueError if a schema cannot be enforced."""
        enforced = [
            (path, tool_parameters(function))
            for path, function in self.functions
            if self._is_enforced(function)
        ]
        self._check_sizes(enforced)  # before the schemas are checked, which takes longer
        for path, schema in enforced:
            _check_parameters(path, schema)
        text = "\n".join([*self._call_rules(), *self._answer_rules()]) + "\n"
        try:
            return StructuredOutputs(grammar=text)
        except RequestError as error:  # the schemas are too large together
            raise error.with_renamed_fields({"structured_outputs.grammar": "tools"}) from None

    def _call_rules(self) -> Iterator[str]:
        """Yield the rules of calls: those of `_sequence_rules`, and `call_i` of each function."""
        raise NotImplementedError

    @property
    def _is_one_list(self) -> bool:
        """Whether all calls of an answer are one list, which text cannot interrupt."""
        return False

    def _min_rules_size(self, schema: Any, num_characters: int) -> int:
        """Return a lower bound of the number of characters of a schema's rules.

        Args:
            schema: A function's parameters, not checked yet.
            num_characters: Length of the schema as JSON.
        """
        return num_characters

    def _is_enforced(self, function: Mapping[str, Any]) -> bool:
        """Return whether a function's arguments must obey its schema."""
        is_forced = not self.has_text and self.alternative is None
        return is_forced or bool(function.get("strict"))

    def _is_special(self, text: str) -> bool:
        """Return whether the tokenizer has a special token of this text."""
        return text in self.special_ids

    def _tag_rule(self, text: str) -> str:
        """Return a tag as its special token, or as text if the tokenizer has no such token."""
        return f"<[{self.special_ids[text]}]>" if self._is_special(text) else literal(text)

    def _opening_rule(self) -> str:
        """Return the tag that begins a call, or nothing if the text before the call includes it."""
        tag = self.opening_tags[0]
        return "" if self.has_text and not self._is_special(tag) else self._tag_rule(tag)

    def _arguments_rule(self, function: Mapping[str, Any]) -> str:
        """Return the body of the rule of a function's arguments as JSON."""
        return json_rule(_closed_schema(function) if self._is_enforced(function) else _ANY_OBJECT)

    def _sequence_rules(self, start: str, separator: str, end: str) -> Iterator[str]:
        """Yield the rules `calls` (calls in sequence, without text between them) and `call`."""
        repeats = self.parallel and (self._is_one_list or not self.has_text)
        again = f"({separator} call)*" if repeats else ""
        yield " ".join(f"calls: {start} call {again} {end}".split())
        yield f"call: {' | '.join(f'call_{i}' for i in range(len(self.functions)))}"

    def _json_call_rules(self, opening: str, key: str, closing: str) -> Iterator[str]:
        """Yield the rules of calls that are JSON objects, with their arguments under `key`."""
        for i, (_, function) in enumerate(self.functions):
            head = literal(f'{{"name": "{function["name"]}", "{key}": ')
            yield f"call_{i}: {opening} {head} arguments_{i} {literal('}')} {closing}".rstrip()
            yield f"arguments_{i}: {self._arguments_rule(function)}"

    def _answer_rules(self) -> Iterator[str]:
        """Yield the rules of the whole answer."""
        cases = ["said" if self.has_text else "calls"]
        if self.alternative is not None:
            cases.append("form")
            schema = self.alternative.json
            yield f"form: {json_rule(json.loads(schema) if schema else _ANY_OBJECT)}"
        yield f"start: {' | '.join(cases)}"
        if self.has_text:
            yield from self._text_rules()

    def _text_rules(self) -> Iterator[str]:
        """Yield the rules of an answer with text, in which an opening tag always begins a call."""
        tag, *other_tags = self.opening_tags
        text = r"/[^\s\{](?s:.*)/" if self.is_bare_json else "/(?s:.+)/"
        again = "*" if self.parallel and not self._is_one_list else "?"
        yield f"TEXT: {text} & {_excluding_texts(self.opening_tags)}"
        if self.is_bare_json:
            yield "said: calls | TEXT?"
        elif self._is_special(tag):
            yield f"said: (TEXT? calls){again} TEXT?"
        else:  # text is greedy, and so must include the tag
            yield f"said: (lead calls){again} TEXT?"
            but = f" & {_excluding_texts(other_tags)}" if other_tags else ""
            yield f"lead[lazy]: /(?s:.*){re.escape(tag)}/{but}"

    def _check_sizes(self, schemas: Sequence[tuple[str, Any]]) -> None:
        """Raise ValueError if a schema, or all of them together, are certainly too large."""
        total = 0
        for path, schema in schemas:
            try:
                size = len(_compact_json(schema))
            except (
                TypeError,
                ValueError,
                RecursionError,
            ):  # `_check_parameters` raises a better one
                continue
            bounds.SOURCE_LENGTH.check(path, size)
            total += self._min_rules_size(schema, size)
        bounds.SOURCE_LENGTH.check("tools", total)


def tool_parameters(function: Mapping[str, Any]) -> Any:
    """Return the schema of a function's parameters; without one it has no parameters."""
    return _NO_ARGUMENTS if function.get("parameters") is None else function["parameters"]


def json_rule(schema: Any) -> str:
    """Return the body of a rule that matches JSON that obeys a schema."""
    return f"%json {_compact_json(schema)}"


def literal(text: str) -> str:
    """Return a text as a rule refers to it."""
    return json.dumps(text)


LINE_BREAK = literal("\n")


def _check_parameters(path: str, schema: Any) -> None:
    """Raise unless a schema can be enforced; errors call it `path`."""
    try:
        StructuredOutputs(json=schema)
    except RequestError as error:
        raise error.with_renamed_fields({"structured_outputs.json": path}) from None
    if schema.get("type", "object") != "object":
        raise RequestError(f"{path}.type", "must be 'object'", value=repr(schema["type"]))


def _closed_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments.

    Add `additionalProperties: false` if `properties` is not empty and has all required names, and
    no keyword may allow other names.
    """
    schema = {"type": "object", **tool_parameters(function)}
    named = schema.get("properties")
    if (
        named
        and not schema.keys() & _OPEN_OBJECT_KEYWORDS
        and {*schema.get("required", ())} <= {*named}
    ):
        schema["additionalProperties"] = False
    return schema


def _compact_json(schema: Any) -> str:
    return json.dumps(schema, separators=(",", ":"))


def _excluding_texts(texts: Sequence[str]) -> str:
    """Return a terminal that matches everything that contains none of the texts."""
    return f"~/(?s:.*)({'|'.join(map(re.escape, sorted(texts)))})(?s:.*)/"
