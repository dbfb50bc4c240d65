"""Regular expressions and grammars, looked at before llguidance reads them: how much they repeat,
which characters they name, which schemas a grammar has."""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from jpaged.errors import RequestError, brief
from jpaged.structured_outputs import bounds

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that no JSON string of an answer has: they would need \\u, which is not allowed."""

# Both are applied to what clients send, while the interpreter can do nothing else: a repeat that
# has matched is never given back (`*+`), and what is not closed is refused where it opens, so that
# each takes time in proportion to the text.
_PIECE = re.compile(
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
"""A piece of a regular expression."""

_TOKEN = re.compile(
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
"""A token of llguidance's Lark; only what is told apart here."""

_MOST_DIGITS = 9  # of a count; any with more exceeds every bound

_SPACE: Any = re.compile(r"[ \t\r\n]*")


def check_text(path: str, text: str) -> None:
    """Raise ValueError if a text of a schema has a character that no answer can have."""
    if (found := _UNWRITABLE.search(text)) is not None:
        raise RequestError(
            path,
            f"has the control character U+{ord(found[0]):04X}, which no answer can have",
            remedy="leave it out",
        )


def check_pattern(path: str, text: str) -> None:
    """Raise ValueError if a schema's regular expression exceeds a bound, or names a character that
    no answer can have: llguidance would leave it out."""
    check_text(path, text)
    check_regex(path, text)
    for piece in _PIECE.finditer(text):
        digits = piece["braced"] or piece["x"] or piece["u"] or piece["U"]
        code = int(digits, 16) if digits else {"a": 7, "v": 11}.get(piece["named"] or "", 32)
        if code < 0x110000:
            check_text(path, chr(code))


def check_regex(path: str, text: str) -> None:
    """Raise ValueError if a regular expression exceeds a bound, or opens a class for good."""
    bounds.SOURCE.check(path, len(text))
    repeats, num_quantifiers = _Repeats(path), 0
    for piece in _PIECE.finditer(text):
        if piece["unclosed"]:
            raise _unclosed(path, text, piece.start())
        if piece["open"]:
            repeats.open()
        elif piece["close"]:
            repeats.close()
        elif piece["count"]:
            repeats.repeat(max(_count(piece["most"] or "1"), _count(piece["least"] or "1")))
        elif not piece["quantifier"]:
            repeats.once()
        num_quantifiers += bool(piece["count"] or piece["quantifier"])
        bounds.QUANTIFIERS.check(path, num_quantifiers)


def check_grammar_text(path: str, text: str, check_schema: Callable[[str, object], None]) -> None:
    """Look at a grammar, and with `check_schema` at the schemas in it.

    Raises:
        TypeError, ValueError: it exceeds a bound, or a schema cannot be enforced.
    """
    repeats, num_rules, num_schemas, position = _Repeats(path), 0, 0, 0
    while (token := _TOKEN.match(text, position)) is not None:
        position = token.end()
        if token["unclosed"]:
            raise _unclosed(path, text, token.start())
        if token["schema"]:
            place = f"{path}.%json[{num_schemas}]"
            schema, position = _schema_at(place, text, position)
            check_schema(place, schema)
            num_schemas += 1
        elif "%json" in token[0]:  # llguidance might read on from another place
            raise RequestError(
                path, f"has %json within {token[0][:40]!r}", remedy="write it otherwise"
            )
        elif token["regex"]:
            check_regex(f"{path}.{token[0][:40]}", token["regex"])
            repeats.once()
        elif token["range"]:
            repeats.repeat(max(map(_count, re.findall("[0-9]+", token[0])), default=1))
        elif token["open"]:
            repeats.open()
        elif token["close"]:
            repeats.close()
        elif not token["space"]:
            repeats.once()
        num_rules += bool(token["rule"])
        bounds.RULES.check(path, num_rules)


def _unclosed(path: str, text: str, position: int) -> ValueError:
    return RequestError(path, f"opens {text[position : position + 20]!r} and does not close it")


def _count(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS


class _Repeats:
    """How often the innermost of what was read may come, by groups that are open."""

    def __init__(self, path: str):
        self._path = path
        self._within = [1]  # of each open group, the largest product
        self._last = 1  # of what a count would repeat

    def once(self) -> None:
        """Something that no count has repeated yet."""
        self._last = 1

    def open(self) -> None:
        """A group begins."""
        self._within.append(1)
        self._last = 1
        bounds.GROUPS.check(self._path, len(self._within) - 1)

    def close(self) -> None:
        """A group ends, and may be repeated; one that has not begun is llguidance's to refuse."""
        self._last = self._within.pop() if len(self._within) > 1 else 1
        self._within[-1] = max(self._within[-1], self._last)

    def repeat(self, count: int) -> None:
        """What came last is repeated. Raises ValueError: too often."""
        self._last *= max(count, 1)
        self._within[-1] = max(self._within[-1], self._last)
        bounds.REPEATED.check(self._path, self._last)


def with_schemas(text: str, written: Callable[[object], str]) -> str:
    """A grammar with each of its schemas as `written`."""
    parts, position, start = [], 0, 0
    while (token := _TOKEN.match(text, position)) is not None:
        position = token.end()
        if token["schema"]:
            parts.append(text[start:position])
            schema, position = _schema_at("", text, position)
            parts.append(" " + written(schema))
            start = position
    return "".join([*parts, text[start:]])


def _schema_at(path: str, text: str, position: int) -> tuple[object, int]:
    """The schema that begins there, and where it ends."""
    start = _SPACE.match(text, position).end()
    return _decoded(path, lambda decoder: decoder.raw_decode(text, start))


def parse_json(path: str, text: str) -> Any:
    """Return the value of a JSON text, which errors call `path`.

    Raises:
        ValueError: it is no JSON, or an object in it has a name twice.
    """
    return _decoded(path, lambda decoder: decoder.decode(text))


def _decoded(path: str, decode: Callable[[json.JSONDecoder], Any]) -> Any:
    twice: list[str] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice.append(Counter(name for name, _ in pairs).most_common(1)[0][0])
        return found

    try:
        value = decode(json.JSONDecoder(object_pairs_hook=made))
    except (ValueError, RecursionError) as error:
        raise RequestError(path, f"is no JSON text: {error}") from None
    if twice:
        raise RequestError(
            path, f"has the name {brief(twice[0])} twice in an object", remedy="leave one out"
        )
    return value
