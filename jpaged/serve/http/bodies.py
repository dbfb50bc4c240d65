"""Requests' bodies: bounded as they arrive, counted before they are built, and JSON of one meaning.

What another client is sent must not wait for a body. So its values are counted before any of them
is built, and a large one is parsed in a thread of its own: no call into C holds the interpreter for
long, and Python code gives way. Long strings are decoded in pieces: 8 MB of escapes in one call
took 17 to 30 ms.
"""

import asyncio
import json
import math
import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from jpaged.serve.errors import ApiError, bad_field, not_serving
from jpaged.serve.options import Limits

_HELD = "jpaged.held"

T = TypeVar("T")

BODY = "the body"
"""What errors call the text that `parse_json` reads."""

MAX_DEPTH = 32
"""Arrays and objects within each other, at most."""

_AT_ONCE = 16 * 1024
"""Bytes of a body that is parsed in the event loop, in a millisecond or two at most."""

_FORMS = {"structured_outputs", "response_format", "text", "output_config", "tools"}
"""Fields that may have schemas or grammars: checking a small one can take a tenth of a second."""

_PIECE = 256 * 1024
"""Bytes that are counted in one go."""

_LONG_TEXT = 16 * 1024
"""Bytes of a string above which it is decoded apart from the rest of its body."""

_TEXT_PIECE = 64 * 1024
"""Bytes of a long string that are decoded in one call, in a quarter of a millisecond."""

_ESCAPE_SIZE = 6  # bytes, of \uXXXX
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_PLACE = re.compile(r"\(byte (\d+)\)")
_MOST_SEARCHED = 2**20
"""Bytes of a body in which a lone surrogate is looked for: ten milliseconds."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_DIGITS = 64
"""A number of so many digits in a row may be refused, one of twice as many always is."""

_COUNTED_DIGITS = 8
"""So many in a row may count as a value more, and twice as many do: one of 63 digits takes seven
times as long to build as one of 15."""

_EIGHT_TRUE = np.uint64(0x0101010101010101)
"""So many truth values, each a byte, seen as one number."""

_EXACT = 2**53
"""Below it a float is one integer."""

_PLAIN = frozenset({int, float, bool, str, type(None)})

_WEIGHTS = np.zeros(256, np.uint8)
_WEIGHTS[list(b",:")] = 1
_WEIGHTS[list(b'".')] = 3
_WEIGHTS[list(b"[{")] = 4  # with the first value in it, whose like the others have a comma for


class BodyReader:
    """Reads the bodies of requests, large ones one at a time in a thread of its own.

    All that are held, from their arrival until the answers, are bounded together.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="body")
        self._num_held = 0

    @contextmanager
    def held_for(self, scope: Scope) -> Iterator[None]:
        """Holds the body that is read for a request as long as the block lasts."""
        scope[_HELD] = 0
        try:
            yield
        finally:
            self._num_held -= scope[_HELD]

    async def read(self, request: Request, make: Callable[[Any], T], max_values: int) -> T:
        """What `make` makes of the JSON value in the body; it runs in any thread.

        Args:
            request: Whose body has not been read yet.
            make: Raises ApiError for a value that is not acceptable.
            max_values: As `parse_json` takes them.

        Raises:
            ApiError: 413 if the body is too large, 503 if all bodies are, 400 if it has too many
                values, is no JSON, or ambiguous, or does not come, 415 if it is not said to be
                JSON; what `make` raises.
        """
        body = await self._body(request)
        if len(body) <= _AT_ONCE:
            value = parse_json(body, max_values)
            if not (isinstance(value, dict) and value.keys() & _FORMS):
                return make(value)
            work = partial(make, value)
        else:
            work = lambda: make(parse_json(body, max_values))  # noqa: E731
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _body(self, request: Request) -> bytearray:
        limits, most = self._limits, self._limits.max_body_bytes
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also what a page of another site could send unasked
            raise ApiError(415, "send JSON, with the header Content-Type: application/json")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > most:
            raise _too_large(most)
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > most:
                        raise _too_large(most)
                    if self._num_held + len(chunk) > limits.max_total_body_bytes:
                        raise not_serving("too much is being asked at the moment: try again later")
                    self._num_held += len(chunk)
                    request.scope[_HELD] += len(chunk)
                    body += chunk
        except TimeoutError:
            raise ApiError(400, "the body did not arrive in time") from None
        except ClientDisconnect:
            raise ApiError(400, "the client is gone") from None
        return body


def parse_json(body: bytes | bytearray, max_values: int) -> Any:
    """The JSON value of `body`.

    Args:
        body: In UTF-8.
        max_values: A whole number, true, false or null counts as one; a string (a name in an object
            too), a fraction, an array or an object as four, a long number as one more for about
            every eight digits: about what it takes to build them.

    Raises:
        ApiError: it has more values; it is no JSON in UTF-8, has NaN or an infinity, names a key
            twice or at great length, is nested too deep, or has a lone surrogate.
    """
    num_names, texts = _count(body, max_values)
    try:
        value = _decode(body, texts) if texts else _decoder.decode(body)
    except UnicodeDecodeError:
        raise _no_json(_not_utf8(body)) from None
    except RecursionError:
        raise _too_deep() from None
    except msgspec.DecodeError as error:
        why = str(error).removeprefix("JSON is malformed: ")
        raise _lone_surrogate(body) or _no_json(why) from None
    if _num_names(value) < num_names:
        raise _named_twice(body)
    return value


def _count(body: bytes | bytearray, max_values: int) -> tuple[int, list[tuple[int, int]]]:
    """Count the names in all objects of `body`, and find its long strings, if it is JSON.

    Each piece is seen by numpy, which lets other threads run meanwhile.

    Returns:
        The number of names, and for each string longer than `_LONG_TEXT` where it begins and ends
        in `body`, without its quotes.

    Raises:
        ApiError: there are too many values, or one is a number of too many digits.
    """
    weight, num_names, at, in_string, opened = 1, 0, 0, np.uint8(0), 0
    texts: list[tuple[int, int]] = []
    while at < len(body):
        start, piece = at, body[at : at + _PIECE]
        at += len(piece)
        if at < len(body) and _ends_in_escape(piece):  # what it escapes is in the next one
            piece, at = piece[:-1], at - 1
        if in_string and b'"' not in piece:
            continue
        if b"\\" in piece:  # what is escaped ends no string
            piece = piece.replace(b"\\\\", b"..").replace(b'\\"', b"..")
        codes = np.frombuffer(piece, np.uint8)
        quotes = codes == ord('"')
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ in_string
        in_string, outside = inside[-1], inside == 0  # of its quotes the last is outside
        places = np.flatnonzero(quotes)
        if len(places):
            begins = np.concatenate(([opened - start], places[:-1] + 1))
            are_long = outside[places] & (places - begins > _LONG_TEXT)
            found = np.stack((begins, places), 1)[are_long] + start
            texts += [(begin, end) for begin, end in found.tolist()]
            opened = start + int(places[-1]) + 1
        weight += int(_WEIGHTS[codes[outside]].sum(dtype=np.int64))
        weight += _weight_of_digits(codes, outside)
        if weight > max_values:
            raise _too_many(max_values)
        num_names += int(np.count_nonzero((codes == ord(":")) & outside))
    return num_names, texts


def _ends_in_escape(piece: bytes | bytearray) -> bool:
    """Whether the last byte is a backslash that is not escaped itself."""
    return piece.endswith(b"\\") and (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1


def _decode(body: bytes | bytearray, texts: list[tuple[int, int]]) -> Any:
    """Decode a body, with its long strings decoded separately, in pieces.

    A random number replaces each long string in the decoder's input, and the decoder's hook for
    numbers returns the string. A client cannot guess these numbers.

    Args:
        body: JSON in UTF-8.
        texts: Start and end of each long string, from `_count`.

    Raises:
        ApiError: a long string is the name of a field.
        msgspec.DecodeError, UnicodeDecodeError: the body is not valid; positions are those in
            `body`.
    """
    secret = secrets.randbits(64)
    values: dict[str, str] = {}
    kept, at, cuts = bytearray(), 0, []
    for i, (start, end) in enumerate(texts):
        if body[end + 1 : end + 64].lstrip()[:1] == b":":
            raise _no_json(f"a name is longer than {_LONG_TEXT} bytes")
        number = f"0e{secret}{i:04}"
        values[number] = _text(body, start, end)
        kept += b"%b %b " % (body[at : start - 1], number.encode())  # apart from other digits
        at = end + 1
        cuts.append((len(kept), at - len(kept)))
    kept += body[at:]

    def hook(number: str) -> Any:
        return values[number] if number in values else _number(number)

    try:
        return msgspec.json.Decoder(float_hook=hook).decode(kept)
    except msgspec.DecodeError as error:
        raise _moved(error, cuts) from None


def _text(body: bytes | bytearray, start: int, end: int) -> str:
    """Decode the string that is between two places of a body."""
    pieces = []
    while start < end:
        stop = min(start + _TEXT_PIECE, end)
        if stop < end:
            stop = start + _last_boundary(body[start : stop + 1])
        try:
            pieces.append(_decoder.decode(b'"%b"' % body[start:stop]))
        except msgspec.DecodeError as error:
            raise _moved(error, [(0, start - 1)]) from None
        start = stop
    return "".join(pieces)


def _last_boundary(piece: bytes | bytearray) -> int:
    """The last place in a piece of a string where no character or escape is cut in two."""
    end = len(piece) - 1
    at = piece.rfind(b"\\", end - _ESCAPE_SIZE, end)
    if at >= 0 and _ends_in_escape(piece[: at + 1]):
        high = at - _ESCAPE_SIZE
        is_pair = _HIGH_SURROGATE.match(piece, high) and _ends_in_escape(piece[: high + 1])
        return high if is_pair else at
    for _ in range(3):  # bytes of a character after its first one
        end -= piece[end] & 0xC0 == 0x80
    return end


def _moved(error: msgspec.DecodeError, shifts: list[tuple[int, int]]) -> msgspec.DecodeError:
    """Return the error with its place in the whole body.

    Args:
        error: Names a place in what was decoded.
        shifts: Places in what was decoded, in order, and what to add from there on.
    """

    def moved(found: re.Match[str]) -> str:
        place = int(found[1])
        return f"(byte {place + max((by for at, by in shifts if at <= place), default=0)})"

    return msgspec.DecodeError(_PLACE.sub(moved, str(error)))


def _weight_of_digits(codes: np.ndarray, outside: np.ndarray) -> int:
    """What long numbers count beyond one: the rows that the codes make and digits fill.

    Raises:
        ApiError: digits of one number fill a row of `_DIGITS`.
    """
    size = len(codes) // _DIGITS * _DIGITS
    are_digits = (codes[:size] - np.uint8(ord("0")) < 10) & outside[:size]
    rows = are_digits.view(np.uint64) == _EIGHT_TRUE
    if rows.reshape(-1, _DIGITS // _COUNTED_DIGITS).all(1).any():
        raise _no_json("a number is too long")
    return int(np.count_nonzero(rows))


def _number(text: str) -> float:
    """A number with a fraction or an exponent; 3.0 is the integer 3."""
    number = float(text)
    if not math.isfinite(number):
        raise _no_json(f"the number {text[:40]} is out of range")
    return int(number) if number.is_integer() and abs(number) < _EXACT else number


# A float of many digits takes the decoder's own way of reading it 10 us, this one 0.3.
_decoder = msgspec.json.Decoder(float_hook=_number)


def _num_names(value: Any) -> int:
    """Of all objects; level by level, so that no depth exhausts the stack."""
    level, found = _containers([value]), 0
    for _ in range(MAX_DEPTH):
        found += sum(len(each) for each in level if isinstance(each, dict))
        level = [c for each in level for c in _containers(each)]
    if level:
        raise _too_deep()
    return found


def _containers(value: dict[str, Any] | list[Any]) -> list[dict[str, Any] | list[Any]]:
    """The arrays and objects right in one."""
    items = value.values() if isinstance(value, dict) else value
    if _PLAIN.issuperset(map(type, items)):  # of a prompt's token ids it takes no time
        return []
    return [item for item in items if isinstance(item, (dict, list))]


def _named_twice(body: bytes | bytearray) -> ApiError:
    """The error that tells which name."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                problem = "", BODY, f" names {name[:60]!r} twice"
                raise bad_field(name[:60], *problem, shows_path=False)
            seen.add(name)

    try:
        json.loads(body, object_pairs_hook=check)
    except ApiError as error:
        return error
    return bad_field("", "", BODY, " names a field twice")


def _lone_surrogate(body: bytes | bytearray) -> ApiError | None:
    """Return an error that names the field with a lone surrogate, or None.

    A body above `_MOST_SEARCHED` bytes is not searched: other requests would wait.
    """
    if len(body) > _MOST_SEARCHED:
        return None
    try:
        left: list[tuple[str, Any]] = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return None
    while left:
        path, value = left.pop()
        if isinstance(value, list):
            left += [(f"{path}[{i}]", it) for i, it in enumerate(value)]
        elif isinstance(value, dict):
            left += [(f"{path}.{_printable(name)}".lstrip("."), it) for name, it in value.items()]
            value = "".join(value)
        if isinstance(value, str) and _SURROGATE.search(value):
            if not path:
                return bad_field("", "", BODY, " has a lone surrogate", remedy="leave it out")
            return bad_field(path, "has a lone surrogate", remedy="leave it out")
    return None


def _printable(name: str) -> str:
    return _SURROGATE.sub("?", name[:60])


def _not_utf8(body: bytes | bytearray) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    return "it is not UTF-8"


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes: send less at a time")


def _too_many(most: int) -> ApiError:
    counted = "strings, fractions, arrays and objects count as four, long numbers by their digits"
    problem = f" has more than {most} JSON values ({counted})"
    remedy = "send less at a time, or raise the server's --max-body-values"
    return bad_field("", "", BODY, problem, remedy=remedy)


def _too_deep() -> ApiError:
    return bad_field("", "", BODY, f" is nested more than {MAX_DEPTH} deep")


def _no_json(why: str) -> ApiError:
    return bad_field("", "", BODY, f" is no JSON that can be read: {why}")
