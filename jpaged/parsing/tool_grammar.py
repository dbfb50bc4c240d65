"""Grammars for answers that must or may call a tool, and the base class of all such grammars."""

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
    or_json: StructuredOutputs | None = None,
) -> StructuredOutputs:
    """Return a grammar for answers that call tools, with arguments that match the tools' schemas.

    If a call is optional (`or_text` or `or_json`), the grammar enforces only the schemas of
    functions with `strict`. For other functions, the grammar accepts any JSON object as arguments,
    or any parameters if the family is `qwen3_xml`.

    Args:
        family: One of `TOOL_CALL_FAMILIES`.
        tools: The tools, in OpenAI's format.
        name: The only function that may be called. None: the answer may call any of `tools`.
        parallel: Whether the answer may have several calls.
        special_ids: Mapping from the text of each special token of the tokenizer to the token's id.
        or_text: Whether the answer may contain text before, between and after calls, or may contain
            no call. In such text, an opening tag always begins a call.
        or_json: Structured-output specification of kind `json` or `json_object`. The answer may
            match it instead of calling a tool.

    Raises:
        TypeError, ValueError: `family` or `name` is unknown; a schema cannot be enforced (the path
            begins with `tools[i].function.parameters`); all schemas together are too large; or
            `or_json` is given although the family writes calls as bare JSON (`llama3_json`).
    """
    module = load_family(family)
    functions = [
        (f"tools[{i}].function.parameters", tool["function"])
        for i, tool in enumerate(tools)
        if name in (None, tool["function"]["name"])
    ]
    if not functions:
        raise RequestError("name", "must be the name of one of the tools", value=repr(name))
    if or_json is not None and module.Grammar.is_bare_json:
        raise RequestError(
            "tools",
            f"cannot be combined with a JSON response format, because {family} writes calls as "
            "JSON too",
            remedy="set tool_choice to 'none' or 'required', or omit the response format",
            kind=ErrorKind.UNSUPPORTED,
        )
    grammar: CallGrammar = module.Grammar(
        module.Parser.opening_tags, functions, parallel, special_ids or {}, or_text, or_json
    )
    return grammar.build()


@dataclass
class CallGrammar:
    """Builder of a grammar for answers with calls, in llguidance's variant of the Lark syntax.

    Each family has a subclass, which defines `_call_rules`.

    Attributes:
        opening_tags: Tags with which the family's calls may begin. Generated calls begin with the
            first tag.
        functions: Pairs (path, function) of the functions that may be called. Errors about the
            function's parameters begin with the path.
        parallel: Whether the answer may have several calls.
        special_ids: Mapping from the text of each special token of the tokenizer to the token's id.
        has_text: Whether the answer may contain text before, between and after calls, or only text.
        alternative: Structured-output specification that the answer may match instead of calling a
            function.
        is_bare_json: Whether a call is a JSON object without a tag. If true, an answer that is text
            must not begin with a brace.
    """

    opening_tags: Sequence[str]
    functions: Sequence[tuple[str, Mapping[str, Any]]]
    parallel: bool
    special_ids: Mapping[str, int]
    has_text: bool
    alternative: StructuredOutputs | None
    is_bare_json: ClassVar[bool] = False

    def build(self) -> StructuredOutputs:
        """Return the grammar.

        Raises:
            TypeError, ValueError: A schema cannot be enforced.
        """
        enforced = [
            (path, tool_parameters(function))
            for path, function in self.functions
            if self._is_enforced(function)
        ]
        # Check the sizes of all schemas first, because `_check_parameters` is slow for large
        # schemas.
        self._check_sizes(enforced)
        for path, schema in enforced:
            _check_parameters(path, schema)
        text = "\n".join([*self._call_rules(), *self._answer_rules()]) + "\n"
        try:
            return StructuredOutputs(grammar=text)
        except RequestError as error:  # each schema fits, but all together are too large
            raise error.with_renamed_fields({"structured_outputs.grammar": "tools"}) from None

    def _call_rules(self) -> Iterator[str]:
        """Yield the grammar rules that match calls: the rules of `_sequence_rules`, and one rule
        for each function. The rule `call_i` matches a call of the function `functions[i]`."""
        raise NotImplementedError

    @property
    def _is_one_list(self) -> bool:
        """Whether all calls of an answer form one list, without text between the calls."""
        return False

    def _min_rules_size(self, schema: Any, num_characters: int) -> int:
        """Return a lower bound for the number of characters in a schema's grammar rules.

        Args:
            schema: Schema of a function's parameters, which may be invalid.
            num_characters: Length of the schema as JSON.
        """
        return num_characters

    def _is_enforced(self, function: Mapping[str, Any]) -> bool:
        """Return whether the grammar enforces the schema of a function's arguments."""
        is_forced = not self.has_text and self.alternative is None
        return is_forced or bool(function.get("strict"))

    def _is_special(self, text: str) -> bool:
        return text in self.special_ids

    def _tag_rule(self, text: str) -> str:
        """Return a grammar rule for a tag: the tokenizer's special token for the tag, or the tag as
        text."""
        return f"<[{self.special_ids[text]}]>" if self._is_special(text) else literal(text)

    def _opening_rule(self) -> str:
        """Return a grammar rule for the tag that begins a call. Return "" if the terminal `lead`
        already matches the tag."""
        tag = self.opening_tags[0]
        return "" if self.has_text and not self._is_special(tag) else self._tag_rule(tag)

    def _arguments_rule(self, function: Mapping[str, Any]) -> str:
        """Return the body of a grammar rule, in Lark syntax, that matches a function's arguments
        written as JSON."""
        return json_rule(_closed_schema(function) if self._is_enforced(function) else _ANY_OBJECT)

    def _sequence_rules(self, start: str, separator: str, end: str) -> Iterator[str]:
        """Yield the grammar rules `calls` and `call`.

        The rule `calls` matches `start`, one or more calls joined by `separator`, and `end`. It
        allows no other text between the calls. The rule `call` matches one call of any function.

        Args:
            start: Part of the rule `calls` before the first call, in Lark syntax; may be "".
            separator: Part between two calls; may be "".
            end: Part after the last call; may be "".
        """
        repeats = self.parallel and (self._is_one_list or not self.has_text)
        again = f"({separator} call)*" if repeats else ""
        yield " ".join(f"calls: {start} call {again} {end}".split())
        yield f"call: {' | '.join(f'call_{i}' for i in range(len(self.functions)))}"

    def _json_call_rules(self, opening: str, key: str, closing: str) -> Iterator[str]:
        """Yield the grammar rules of calls that are JSON objects. The object has the arguments
        under the key `key`."""
        for i, (_, function) in enumerate(self.functions):
            head = literal(f'{{"name": "{function["name"]}", "{key}": ')
            yield f"call_{i}: {opening} {head} arguments_{i} {literal('}')} {closing}".rstrip()
            yield f"arguments_{i}: {self._arguments_rule(function)}"

    def _answer_rules(self) -> Iterator[str]:
        cases = ["said" if self.has_text else "calls"]
        if self.alternative is not None:
            cases.append("form")
            schema = self.alternative.json
            yield f"form: {json_rule(json.loads(schema) if schema else _ANY_OBJECT)}"
        yield f"start: {' | '.join(cases)}"
        if self.has_text:
            yield from self._text_rules()

    def _text_rules(self) -> Iterator[str]:
        """Yield the grammar rules of an answer with text, in which each opening tag begins a
        call."""
        tag, *other_tags = self.opening_tags
        text = r"/[^\s\{](?s:.*)/" if self.is_bare_json else "/(?s:.+)/"
        again = "*" if self.parallel and not self._is_one_list else "?"
        yield f"TEXT: {text} & {_exclude_texts(self.opening_tags)}"
        if self.is_bare_json:
            yield "said: calls | TEXT?"
        elif self._is_special(tag):
            yield f"said: (TEXT? calls){again} TEXT?"
        else:
            # The terminal TEXT is greedy, so before a call, it could match the start of the tag.
            # Use the lazy terminal `lead` instead, which matches the text up to and including the
            # first tag.
            yield f"said: (lead calls){again} TEXT?"
            but = f" & {_exclude_texts(other_tags)}" if other_tags else ""
            yield f"lead[lazy]: /(?s:.*){re.escape(tag)}/{but}"

    def _check_sizes(self, schemas: Sequence[tuple[str, Any]]) -> None:
        """Raise ValueError if the grammar rules of one schema, or of all schemas together, are
        certainly too large."""
        total = 0
        for path, schema in schemas:
            try:
                size = len(_compact_json(schema))
            except (TypeError, ValueError, RecursionError):
                continue  # skip the schema, because `_check_parameters` raises a clearer error
            bounds.SOURCE_LENGTH.check(path, size)
            total += self._min_rules_size(schema, size)
        bounds.SOURCE_LENGTH.check("tools", total)


def tool_parameters(function: Mapping[str, Any]) -> Any:
    """Return the schema of a function's parameters. For a function without a schema, return a
    schema that forbids all parameters."""
    return _NO_ARGUMENTS if function.get("parameters") is None else function["parameters"]


def json_rule(schema: Any) -> str:
    """Return the body of a grammar rule for JSON that matches a schema."""
    return f"%json {_compact_json(schema)}"


def literal(text: str) -> str:
    """Return a text as a quoted string for a grammar rule."""
    return json.dumps(text)


LINE_BREAK = literal("\n")


def _check_parameters(path: str, schema: Any) -> None:
    """Raise an error if the grammar cannot enforce a schema of parameters. The error begins with
    `path`."""
    try:
        StructuredOutputs(json=schema)
    except RequestError as error:
        raise error.with_renamed_fields({"structured_outputs.json": path}) from None
    if schema.get("type", "object") != "object":
        raise RequestError(f"{path}.type", "must be 'object'", value=repr(schema["type"]))


def _closed_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, which forbids unlisted arguments if possible.

    An argument is unlisted if `properties` does not contain the argument's name.
    `additionalProperties: false` is added under three conditions: `properties` lists at least one
    argument, `properties` lists all required arguments, and no other keyword could allow unlisted
    arguments.
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


def _exclude_texts(texts: Sequence[str]) -> str:
    """Return a grammar terminal that matches all texts in which none of `texts` occurs."""
    return f"~/(?s:.*)({'|'.join(map(re.escape, sorted(texts)))})(?s:.*)/"
