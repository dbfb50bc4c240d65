"""Check regular expressions and grammars before llguidance reads them.

The checks limit repetitions and nesting, refuse characters that an answer cannot contain, and find
the JSON schemas in a grammar.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from jpaged.errors import RequestError, short_repr
from jpaged.structured_outputs import bounds

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters that a JSON string in an answer cannot contain.

llguidance allows these characters only as \\u escapes, and `GrammarCompiler` forbids \\u escapes.
"""

# The two patterns below match texts from clients, and `re` holds the GIL while it matches.
# Possessive repeats (`*+`) and the group `unclosed` prevent backtracking, so that matching takes
# linear time.
_REGEX_TOKEN = re.compile(
    r"""
    \\ (?: [xuU] \{ \s*+ (?P<braced> [0-9a-fA-F]++ ) \s*+ \}
         | x (?P<x> [0-9a-fA-F]{2} ) | u (?P<u> [0-9a-fA-F]{4} ) | U (?P<U> [0-9a-fA-F]{8} )
         | (?P<named> [av] ) | . )
    | (?P<class> \[ \^? \]? (?: \\. | \[:\^?[a-z]{1,10}:\] | [^\]\\] )*+ \] )
    | (?P<unclosed> \[ )
    | (?P<count> \{ \s*+ (?P<least> [0-9]++ )? \s*+ (?: , \s*+ (?P<most> [0-9]++ )? \s*+ )? \} )
    | (?P<quantifier> [?*+] )
    | (?P<open> \( (?: \? (?: P?<[^<>()]{1,100}> | [a-zA-Z-]{0,10} :? ) )? )
    | (?P<close> \) )
    | [^\\\[({?*+)]++
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
"""One syntax element of a regular expression, for example the start of a group."""

_LARK_TOKEN = re.compile(
    r"""
    (?P<comment> (?: \# | // ) [^\n]*+ )
    | (?P<string> "(?: \\. | [^"\\] )*+" i? )
    | (?P<regex> / (?: \\. | [^/\\] )++ / [imslux]*+ )
    | (?P<unclosed> ["/] )
    | (?P<special> <[^<>\s]++> )
    | (?P<schema> %json )
    | (?P<range> ~ \s*+ [0-9]++ (?: \s*+ \.\. \s*+ [0-9]++ )?
               | \{ \s*+ [0-9]*+ \s*+ ,? \s*+ [0-9]*+ \s*+ \} )
    | (?P<rule> : )
    | (?P<open> [(\[{] ) | (?P<close> [)\]}] )
    | (?P<space> [\s?*+]++ )
    | [A-Za-z0-9_|!.,=>&-]++
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
"""One syntax element of a grammar in llguidance's Lark syntax.

Elements that the checks treat alike match the same group of the pattern."""

_MAX_DIGITS = 9  # a repetition count with 10 or more digits exceeds `bounds.NESTED_REPETITIONS`

_WHITESPACE: Any = re.compile(r"[ \t\r\n]*")


def check_characters(path: str, text: str) -> None:
    """Raise ValueError if a string of a JSON schema has a character that no answer can contain."""
    if (found := _UNWRITABLE.search(text)) is not None:
        raise RequestError(
            path,
            f"has the control character U+{ord(found[0]):04X}, which an answer cannot contain",
            remedy="remove it",
        )


def check_pattern(path: str, text: str) -> None:
    """Check a regular expression of a schema.

    Raises:
        ValueError: The expression exceeds a limit, or contains a character that no answer can
            contain. llguidance would ignore the character.
    """
    check_characters(path, text)
    check_regex(path, text)
    for token in _REGEX_TOKEN.finditer(text):
        digits = token["braced"] or token["x"] or token["u"] or token["U"]
        code = int(digits, 16) if digits else {"a": 7, "v": 11}.get(token["named"] or "", 32)
        if code < 0x110000:
            check_characters(path, chr(code))


def check_regex(path: str, text: str) -> None:
    """Raise ValueError if a regular expression exceeds a limit or has an unclosed "["."""
    bounds.SOURCE_LENGTH.check(path, len(text))
    repeats, num_quantifiers = _RepetitionCounter(path), 0
    for token in _REGEX_TOKEN.finditer(text):
        if token["unclosed"]:
            raise _unclosed_error(path, text, token.start())
        if token["open"]:
            repeats.open_group()
        elif token["close"]:
            repeats.close_group()
        elif token["count"]:
            repeats.repeat_last(
                max(_parse_count(token["most"] or "1"), _parse_count(token["least"] or "1"))
            )
        elif not token["quantifier"]:
            repeats.add_item()
        num_quantifiers += bool(token["count"] or token["quantifier"])
        bounds.QUANTIFIERS.check(path, num_quantifiers)


def check_grammar_text(path: str, text: str, check_schema: Callable[[str, object], None]) -> None:
    """Check a grammar in Lark syntax, and its JSON schemas with `check_schema`.

    Raises:
        TypeError, ValueError: The grammar exceeds a limit, or a schema cannot be enforced.
    """
    repeats, num_rules, num_schemas, position = _RepetitionCounter(path), 0, 0, 0
    while (token := _LARK_TOKEN.match(text, position)) is not None:
        position = token.end()
        if token["unclosed"]:
            raise _unclosed_error(path, text, token.start())
        if token["schema"]:
            schema_path = f"{path}.%json[{num_schemas}]"
            schema, position = _parse_schema(schema_path, text, position)
            check_schema(schema_path, schema)
            num_schemas += 1
        elif "%json" in token[0]:
            # The text contains "%json" where this check expects no schema. If llguidance read a
            # schema there, the schema would be unchecked.
            raise RequestError(
                path,
                f"has %json within {token[0][:40]!r}",
                remedy="use %json only in front of a schema",
            )
        elif token["regex"]:
            check_regex(f"{path}.{token[0][:40]}", token["regex"])
            repeats.add_item()
        elif token["range"]:
            repeats.repeat_last(max(map(_parse_count, re.findall("[0-9]+", token[0])), default=1))
        elif token["open"]:
            repeats.open_group()
        elif token["close"]:
            repeats.close_group()
        elif not token["space"]:
            repeats.add_item()
        num_rules += bool(token["rule"])
        bounds.GRAMMAR_RULES.check(path, num_rules)


def _unclosed_error(path: str, text: str, position: int) -> ValueError:
    return RequestError(path, f"opens {text[position : position + 20]!r} and does not close it")


def _parse_count(digits: str) -> int:
    return int(digits) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS


class _RepetitionCounter:
    """Counter of nested repetitions in a regular expression or a grammar.

    For example, `(a{10}){20}` repeats `a` 200 times. `check_regex` and `check_grammar_text` call
    one method for each character, group start, group end and repetition count in the text. The
    methods raise ValueError if groups are nested too deeply, or if nested counts multiply to too
    many repetitions.
    """

    def __init__(self, path: str):
        self._path = path
        # For each open group, the largest product of nested repetition counts.
        self._group_products = [1]
        # Product of the repetition counts of the last item (a character or a group) and inside it.
        self._last_product = 1

    def add_item(self) -> None:
        """Process a character, or another item that is not a group. If a repetition count follows
        the item, call `repeat_last` next."""
        self._last_product = 1

    def open_group(self) -> None:
        """Process the start of a group, such as the `(` of `(ab)`. Raise ValueError if groups are
        nested too deeply."""
        self._group_products.append(1)
        self._last_product = 1
        bounds.GROUP_DEPTH.check(self._path, len(self._group_products) - 1)

    def close_group(self) -> None:
        """Process the end of a group, such as the `)` of `(ab)`. Ignore an end without a start:
        llguidance reports that error."""
        self._last_product = self._group_products.pop() if len(self._group_products) > 1 else 1
        self._group_products[-1] = max(self._group_products[-1], self._last_product)

    def repeat_last(self, count: int) -> None:
        """Multiply the repetitions of the last character or group by `count`."""
        self._last_product *= max(count, 1)
        self._group_products[-1] = max(self._group_products[-1], self._last_product)
        bounds.NESTED_REPETITIONS.check(self._path, self._last_product)


def replace_schemas(text: str, write_schema: Callable[[object], str]) -> str:
    """Return a grammar's text with each JSON schema replaced by the result of `write_schema`."""
    parts, position, start = [], 0, 0
    while (token := _LARK_TOKEN.match(text, position)) is not None:
        position = token.end()
        if token["schema"]:
            parts.append(text[start:position])
            schema, position = _parse_schema("", text, position)
            parts.append(" " + write_schema(schema))
            start = position
    return "".join([*parts, text[start:]])


def _parse_schema(path: str, text: str, position: int) -> tuple[object, int]:
    """Return the JSON schema that starts at `position` in a grammar, and its end position."""
    start = _WHITESPACE.match(text, position).end()
    return _decode_json(path, lambda decoder: decoder.raw_decode(text, start))


def parse_json(path: str, text: str) -> Any:
    """Return the value of a JSON text. Errors name `path`.

    Raises:
        ValueError: The text is not JSON, or an object in the text has a name twice.
    """
    return _decode_json(path, lambda decoder: decoder.decode(text))


def _decode_json(path: str, decode: Callable[[json.JSONDecoder], Any]) -> Any:
    duplicates: list[str] = []

    def object_from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            duplicates.append(Counter(name for name, _ in pairs).most_common(1)[0][0])
        return found

    try:
        value = decode(json.JSONDecoder(object_pairs_hook=object_from_pairs))
    except (ValueError, RecursionError) as error:
        raise RequestError(path, f"is not valid JSON: {error}") from None
    if duplicates:
        raise RequestError(
            path,
            f"has the name {short_repr(duplicates[0])} twice in an object",
            remedy="remove one",
        )
    return value
