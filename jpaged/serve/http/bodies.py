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

from jpaged.serve.errors import ApiError, field_error, unavailable_error
from jpaged.serve.options import Limits

_BUFFERED_BYTES_KEY = "jpaged.held"

T = TypeVar("T")

BODY_NAME = "the body"
"""What errors call the text that `parse_json` reads."""

MAX_JSON_DEPTH = 32
"""Arrays and objects within each other, at most."""

_MAX_INLINE_BYTES = 16 * 1024
"""Bytes of a body that is parsed in the event loop, in a millisecond or two at most."""

_SPEC_FIELDS = {"structured_outputs", "response_format", "text", "output_config", "tools"}
"""Fields that may have schemas or grammars: checking a small one can take a tenth of a second."""

_SCAN_CHUNK_BYTES = 256 * 1024
"""Bytes that are counted in one go."""

_LONG_STRING_BYTES = 16 * 1024
"""Bytes of a string above which it is decoded apart from the rest of its body."""

_STRING_CHUNK_BYTES = 64 * 1024
"""Bytes of a long string that are decoded in one call, in a quarter of a millisecond."""

_ESCAPE_SIZE = 6  # bytes, of \uXXXX
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_BYTE_POSITION = re.compile(r"\(byte (\d+)\)")
_MAX_SEARCHED_BYTES = 2**20
"""Bytes of a body in which a lone surrogate is looked for: ten milliseconds."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_MAX_DIGITS = 64
"""A number of so many digits in a row may be refused, one of twice as many always is."""

_DIGITS_PER_VALUE = 8
"""So many in a row may count as a value more, and twice as many do: one of 63 digits takes seven
times as long to build as one of 15."""

_EIGHT_TRUE_BYTES = np.uint64(0x0101010101010101)
"""So many truth values, each a byte, seen as one number."""

_MAX_EXACT_FLOAT = 2**53
"""Below it a float is one integer."""

_SCALAR_TYPES = frozenset({int, float, bool, str, type(None)})

_VALUE_COUNTS = np.zeros(256, np.uint8)
_VALUE_COUNTS[list(b",:")] = 1
_VALUE_COUNTS[list(b'".')] = 3
_VALUE_COUNTS[list(b"[{")] = 4  # with the first value in it, whose like the others have a comma for


class BodyReader:
    """Reads the bodies of requests, large ones one at a time in a thread of its own.

    All that are held, from their arrival until the answers, are bounded together.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="body")
        self._num_buffered_bytes = 0

    @contextmanager
    def track_buffered_bytes(self, scope: Scope) -> Iterator[None]:
        """Holds the body that is read for a request as long as the block lasts."""
        scope[_BUFFERED_BYTES_KEY] = 0
        try:
            yield
        finally:
            self._num_buffered_bytes -= scope[_BUFFERED_BYTES_KEY]

    async def read(self, request: Request, convert: Callable[[Any], T], max_values: int) -> T:
        """What `convert` makes of the JSON value in the body; it runs in any thread.

        Args:
            request: Whose body has not been read yet.
            make: Raises ApiError for a value that is not acceptable.
            max_values: As `parse_json` takes them.

        Raises:
            ApiError: 413 if the body is too large, 503 if all bodies are, 400 if it has too many
                values, is no JSON, or ambiguous, or does not come, 415 if it is not said to be
                JSON; what `convert` raises.
        """
        body = await self._read_body(request)
        if len(body) <= _MAX_INLINE_BYTES:
            value = parse_json(body, max_values)
            if not (isinstance(value, dict) and value.keys() & _SPEC_FIELDS):
                return convert(value)
            work = partial(convert, value)
        else:
            work = lambda: convert(parse_json(body, max_values))  # noqa: E731
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _read_body(self, request: Request) -> bytearray:
        limits, limit = self._limits, self._limits.max_body_bytes
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":  # also what a page of another site could send unasked
            raise ApiError(415, "send JSON, with the header Content-Type: application/json")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise _too_large_error(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > limit:
                        raise _too_large_error(limit)
                    if self._num_buffered_bytes + len(chunk) > limits.max_total_body_bytes:
                        raise unavailable_error(
                            "too much is being asked at the moment: try again later"
                        )
                    self._num_buffered_bytes += len(chunk)
                    request.scope[_BUFFERED_BYTES_KEY] += len(chunk)
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
    num_names, string_spans = _scan_body(body, max_values)
    try:
        value = _decode(body, string_spans) if string_spans else _decoder.decode(body)
    except UnicodeDecodeError:
        raise _invalid_json_error(_describe_utf8_error(body)) from None
    except RecursionError:
        raise _too_deep_error() from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise _lone_surrogate_error(body) or _invalid_json_error(reason) from None
    if _count_names(value) < num_names:
        raise _duplicate_name_error(body)
    return value


def _scan_body(body: bytes | bytearray, max_values: int) -> tuple[int, list[tuple[int, int]]]:
    """Count the names in all objects of `body`, and find its long strings, if it is JSON.

    Each piece is seen by numpy, which lets other threads run meanwhile.

    Returns:
        The number of names, and for each string longer than `_LONG_STRING_BYTES` where it begins and ends
        in `body`, without its quotes.

    Raises:
        ApiError: there are too many values, or one is a number of too many digits.
    """
    weight, num_names, at, in_string, string_start = 1, 0, 0, np.uint8(0), 0
    string_spans: list[tuple[int, int]] = []
    while at < len(body):
        start, chunk = at, body[at : at + _SCAN_CHUNK_BYTES]
        at += len(chunk)
        if at < len(body) and _ends_in_escape(chunk):  # what it escapes is in the next one
            chunk, at = chunk[:-1], at - 1
        if in_string and b'"' not in chunk:
            continue
        if b"\\" in chunk:  # what is escaped ends no string
            chunk = chunk.replace(b"\\\\", b"..").replace(b'\\"', b"..")
        codes = np.frombuffer(chunk, np.uint8)
        quotes = codes == ord('"')
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ in_string
        in_string, outside = inside[-1], inside == 0  # of its quotes the last is outside
        quote_positions = np.flatnonzero(quotes)
        if len(quote_positions):
            starts = np.concatenate(([string_start - start], quote_positions[:-1] + 1))
            are_long = outside[quote_positions] & (quote_positions - starts > _LONG_STRING_BYTES)
            found = np.stack((starts, quote_positions), 1)[are_long] + start
            string_spans += [(begin, end) for begin, end in found.tolist()]
            string_start = start + int(quote_positions[-1]) + 1
        weight += int(_VALUE_COUNTS[codes[outside]].sum(dtype=np.int64))
        weight += _count_digit_groups(codes, outside)
        if weight > max_values:
            raise _too_many_values_error(max_values)
        num_names += int(np.count_nonzero((codes == ord(":")) & outside))
    return num_names, string_spans


def _ends_in_escape(chunk: bytes | bytearray) -> bool:
    """Whether the last byte is a backslash that is not escaped itself."""
    return chunk.endswith(b"\\") and (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 == 1


def _decode(body: bytes | bytearray, string_spans: list[tuple[int, int]]) -> Any:
    """Decode a body, with its long strings decoded separately, in pieces.

    A random number replaces each long string in the decoder's input, and the decoder's hook for
    numbers returns the string. A client cannot guess these numbers.

    Args:
        body: JSON in UTF-8.
        texts: Start and end of each long string, from `_scan_body`.

    Raises:
        ApiError: a long string is the name of a field.
        msgspec.DecodeError, UnicodeDecodeError: the body is not valid; positions are those in
            `body`.
    """
    secret = secrets.randbits(64)
    values: dict[str, str] = {}
    shortened_body, at, shifts = bytearray(), 0, []
    for i, (start, end) in enumerate(string_spans):
        if body[end + 1 : end + 64].lstrip()[:1] == b":":
            raise _invalid_json_error(f"a name is longer than {_LONG_STRING_BYTES} bytes")
        number = f"0e{secret}{i:04}"
        values[number] = _decode_string(body, start, end)
        shortened_body += b"%b %b " % (
            body[at : start - 1],
            number.encode(),
        )  # apart from other digits
        at = end + 1
        shifts.append((len(shortened_body), at - len(shortened_body)))
    shortened_body += body[at:]

    def hook(number: str) -> Any:
        return values[number] if number in values else _parse_number(number)

    try:
        return msgspec.json.Decoder(float_hook=hook).decode(shortened_body)
    except msgspec.DecodeError as error:
        raise _shift_position(error, shifts) from None


def _decode_string(body: bytes | bytearray, start: int, end: int) -> str:
    """Decode the string that is between two places of a body."""
    chunks = []
    while start < end:
        stop = min(start + _STRING_CHUNK_BYTES, end)
        if stop < end:
            stop = start + _last_boundary(body[start : stop + 1])
        try:
            chunks.append(_decoder.decode(b'"%b"' % body[start:stop]))
        except msgspec.DecodeError as error:
            raise _shift_position(error, [(0, start - 1)]) from None
        start = stop
    return "".join(chunks)


def _last_boundary(chunk: bytes | bytearray) -> int:
    """The last place in a piece of a string where no character or escape is cut in two."""
    end = len(chunk) - 1
    at = chunk.rfind(b"\\", end - _ESCAPE_SIZE, end)
    if at >= 0 and _ends_in_escape(chunk[: at + 1]):
        high = at - _ESCAPE_SIZE
        is_pair = _HIGH_SURROGATE.match(chunk, high) and _ends_in_escape(chunk[: high + 1])
        return high if is_pair else at
    for _ in range(3):  # bytes of a character after its first one
        end -= chunk[end] & 0xC0 == 0x80
    return end


def _shift_position(
    error: msgspec.DecodeError, shifts: list[tuple[int, int]]
) -> msgspec.DecodeError:
    """Return the error with its place in the whole body.

    Args:
        error: Names a place in what was decoded.
        shifts: Places in what was decoded, in order, and what to add from there on.
    """

    def shifted_position(found: re.Match[str]) -> str:
        position = int(found[1])
        return f"(byte {position + max((by for at, by in shifts if at <= position), default=0)})"

    return msgspec.DecodeError(_BYTE_POSITION.sub(shifted_position, str(error)))


def _count_digit_groups(codes: np.ndarray, outside: np.ndarray) -> int:
    """What long numbers count beyond one: the rows that the codes make and digits fill.

    Raises:
        ApiError: digits of one number fill a row of `_MAX_DIGITS`.
    """
    size = len(codes) // _MAX_DIGITS * _MAX_DIGITS
    are_digits = (codes[:size] - np.uint8(ord("0")) < 10) & outside[:size]
    rows = are_digits.view(np.uint64) == _EIGHT_TRUE_BYTES
    if rows.reshape(-1, _MAX_DIGITS // _DIGITS_PER_VALUE).all(1).any():
        raise _invalid_json_error("a number is too long")
    return int(np.count_nonzero(rows))


def _parse_number(text: str) -> float:
    """A number with a fraction or an exponent; 3.0 is the integer 3."""
    number = float(text)
    if not math.isfinite(number):
        raise _invalid_json_error(f"the number {text[:40]} is out of range")
    return int(number) if number.is_integer() and abs(number) < _MAX_EXACT_FLOAT else number


# A float of many digits takes the decoder's own way of reading it 10 us, this one 0.3.
_decoder = msgspec.json.Decoder(float_hook=_parse_number)


def _count_names(value: Any) -> int:
    """Of all objects; level by level, so that no depth exhausts the stack."""
    level, found = _child_containers([value]), 0
    for _ in range(MAX_JSON_DEPTH):
        found += sum(len(each) for each in level if isinstance(each, dict))
        level = [c for each in level for c in _child_containers(each)]
    if level:
        raise _too_deep_error()
    return found


def _child_containers(value: dict[str, Any] | list[Any]) -> list[dict[str, Any] | list[Any]]:
    """The arrays and objects right in one."""
    items = value.values() if isinstance(value, dict) else value
    if _SCALAR_TYPES.issuperset(map(type, items)):  # of a prompt's token ids it takes no time
        return []
    return [item for item in items if isinstance(item, (dict, list))]


def _duplicate_name_error(body: bytes | bytearray) -> ApiError:
    """The error that tells which name."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                problem = "", BODY_NAME, f" names {name[:60]!r} twice"
                raise field_error(name[:60], *problem, shows_path=False)
            seen.add(name)

    try:
        json.loads(body, object_pairs_hook=check)
    except ApiError as error:
        return error
    return field_error("", "", BODY_NAME, " names a field twice")


def _lone_surrogate_error(body: bytes | bytearray) -> ApiError | None:
    """Return an error that names the field with a lone surrogate, or None.

    A body above `_MAX_SEARCHED_BYTES` bytes is not searched: other requests would wait.
    """
    if len(body) > _MAX_SEARCHED_BYTES:
        return None
    try:
        stack: list[tuple[str, Any]] = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return None
    while stack:
        path, value = stack.pop()
        if isinstance(value, list):
            stack += [(f"{path}[{i}]", it) for i, it in enumerate(value)]
        elif isinstance(value, dict):
            stack += [
                (f"{path}.{_replace_surrogates(name)}".lstrip("."), it)
                for name, it in value.items()
            ]
            value = "".join(value)
        if isinstance(value, str) and _SURROGATE.search(value):
            if not path:
                return field_error(
                    "", "", BODY_NAME, " has a lone surrogate", remedy="leave it out"
                )
            return field_error(path, "has a lone surrogate", remedy="leave it out")
    return None


def _replace_surrogates(name: str) -> str:
    return _SURROGATE.sub("?", name[:60])


def _describe_utf8_error(body: bytes | bytearray) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    return "it is not UTF-8"


def _too_large_error(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes: send less at a time")


def _too_many_values_error(limit: int) -> ApiError:
    counted = "strings, fractions, arrays and objects count as four, long numbers by their digits"
    problem = f" has more than {limit} JSON values ({counted})"
    remedy = "send less at a time, or raise the server's --max-body-values"
    return field_error("", "", BODY_NAME, problem, remedy=remedy)


def _too_deep_error() -> ApiError:
    return field_error("", "", BODY_NAME, f" is nested more than {MAX_JSON_DEPTH} deep")


def _invalid_json_error(reason: str) -> ApiError:
    return field_error("", "", BODY_NAME, f" is no JSON that can be read: {reason}")
