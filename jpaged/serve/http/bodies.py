"""Request bodies: read with size limits, check the number of values, and parse as strict JSON.

Parsing a body must not delay the tokens of other requests. So the values of a body are counted
before any value is built, and a large body is parsed in a separate thread. That thread must not
hold the interpreter lock for long, so long strings are decoded in chunks. Decoding 8 MB of escapes
in one call took 17 to 30 ms.
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
"""Name of the body in the errors of `parse_json`."""

MAX_JSON_DEPTH = 32
"""Maximum nesting depth of arrays and objects."""

_MAX_INLINE_BYTES = 16 * 1024
"""Maximum size of a body that the event loop parses, which takes at most 1 or 2 ms."""

_SPEC_FIELDS = {"structured_outputs", "response_format", "text", "output_config", "tools"}
"""Fields that may contain schemas or grammars. Checking even a small schema can take 0.1 s."""

_SCAN_CHUNK_BYTES = 256 * 1024
"""Number of bytes of a body that `_scan_body` scans at a time."""

_LONG_STRING_BYTES = 16 * 1024
"""Size above which a string is decoded separately from the rest of the body."""

_STRING_CHUNK_BYTES = 64 * 1024
"""Number of bytes of a long string that are decoded per call, which takes 0.25 ms."""

_ESCAPE_SIZE = 6  # number of bytes in an escape like \uXXXX
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_BYTE_POSITION = re.compile(r"\(byte (\d+)\)")
_MAX_SEARCHED_BYTES = 2**20
"""Maximum size of a body that is searched for a lone surrogate, which takes 10 ms."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_MAX_DIGITS = 64
"""Number of bytes per group when a body is divided into groups to find long numbers.

A body is refused if one group contains only digits. So a number with this many digits is refused if
the number fills a group. A number with twice as many digits always fills a group.
"""

_DIGITS_PER_VALUE = 8
"""Number of bytes per group when digits are counted. A group of digits counts as one JSON value.

Building a number with 63 digits takes seven times as long as building one with 15 digits.
"""

_EIGHT_TRUE_BYTES = np.uint64(0x0101010101010101)
"""Eight bytes of numpy's True, viewed as one uint64."""

_MAX_EXACT_FLOAT = 2**53
"""Bound below which an integral float stands for exactly one integer."""

_SCALAR_TYPES = frozenset({int, float, bool, str, type(None)})

# Weight of each byte outside strings. The sum over a body is the weight of the body's JSON values,
# as in `parse_json`. A comma or a colon adds 1 for the value after it. A closing quote or a decimal
# point adds 3, because a string or a fraction takes longer to build. An opening bracket adds 4: 3
# for the array or object, and 1 for the first item inside, which has no comma before it.
_VALUE_COUNTS = np.zeros(256, np.uint8)
_VALUE_COUNTS[list(b",:")] = 1
_VALUE_COUNTS[list(b'".')] = 3
_VALUE_COUNTS[list(b"[{")] = 4


class BodyReader:
    """Reads the bodies of requests, and parses large bodies one at a time in a separate thread.

    `Limits.max_total_body_bytes` limits the total size of the bodies of all unanswered requests.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="body")
        self._num_buffered_bytes = 0

    @contextmanager
    def track_buffered_bytes(self, scope: Scope) -> Iterator[None]:
        """Count the body of a request towards the total size until the `with` block ends."""
        scope[_BUFFERED_BYTES_KEY] = 0
        try:
            yield
        finally:
            self._num_buffered_bytes -= scope[_BUFFERED_BYTES_KEY]

    async def read(self, request: Request, convert: Callable[[Any], T], max_values: int) -> T:
        """Read the body of a request, parse its JSON, and return the converted value.

        Args:
            request: Request whose body has not been read yet.
            convert: Converts the JSON value, possibly in another thread. It raises ApiError for a
                value that is not acceptable.
            max_values: Maximum number of JSON values; see `parse_json`.

        Raises:
            ApiError: 413 if the body is too large; 503 if the total size of all bodies is too
                large; 415 for another Content-Type than JSON; 400 if the body arrives too late.
                Errors of `parse_json` and `convert` are raised too.
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
        # Refuse other content types, because a page of another site can send them without a CORS
        # preflight.
        if media_type != "application/json":
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
                            "too many request bodies are being read: try again later"
                        )
                    self._num_buffered_bytes += len(chunk)
                    request.scope[_BUFFERED_BYTES_KEY] += len(chunk)
                    body += chunk
        except TimeoutError:
            raise ApiError(400, "the body did not arrive in time: send it faster") from None
        except ClientDisconnect:
            raise ApiError(400, "the client disconnected before its body arrived") from None
        return body


def parse_json(body: bytes | bytearray, max_values: int) -> Any:
    """Parse a JSON text strictly, and return its value.

    Each value has a weight, because some values take longer to build. An integer, true, false or
    null has weight 1. A string, a key, a decimal fraction, an array or an object has weight 4. In a
    long number, about every eight digits add 1.

    Args:
        body: JSON text in UTF-8.
        max_values: Maximum sum of the weights of all values in the body.

    Raises:
        ApiError: The body has too many values, is not JSON in UTF-8, or contains NaN or an
            infinity. It repeats a key in an object, has a key that is too long, is nested too
            deep, or has a lone surrogate.
    """
    num_names, string_spans = _scan_body(body, max_values)
    try:
        value = _decode(body, string_spans) if string_spans else _decoder.decode(body)
    except UnicodeDecodeError:  # raised by msgspec below version 0.23
        raise _invalid_json_error(_describe_utf8_error(body)) from None
    except RecursionError:
        raise _too_deep_error() from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        if "UTF-8" in reason:  # the message has no position
            reason = _describe_utf8_error(body)
        raise _lone_surrogate_error(body) or _invalid_json_error(reason) from None
    if _count_names(value) < num_names:
        raise _duplicate_name_error(body)
    return value


def _scan_body(body: bytes | bytearray, max_values: int) -> tuple[int, list[tuple[int, int]]]:
    """Count the keys of all objects in a body, and find its long strings.

    If the body is not valid JSON, the results have no meaning. Chunks are scanned by numpy, which
    lets other threads run.

    Returns:
        Number of keys; start and end in `body` of each string longer than `_LONG_STRING_BYTES`,
        without its quotes.

    Raises:
        ApiError: The body has too many values, or a number with too many digits.
    """
    weight, num_names, at, in_string, string_start = 1, 0, 0, np.uint8(0), 0
    string_spans: list[tuple[int, int]] = []
    while at < len(body):
        start, chunk = at, body[at : at + _SCAN_CHUNK_BYTES]
        at += len(chunk)
        if at < len(body) and _ends_in_escape(chunk):  # do not split an escape
            chunk, at = chunk[:-1], at - 1
        if in_string and b'"' not in chunk:
            continue
        if b"\\" in chunk:  # ignore escaped quotes, which do not end a string
            chunk = chunk.replace(b"\\\\", b"..").replace(b'\\"', b"..")
        codes = np.frombuffer(chunk, np.uint8)
        quotes = codes == ord('"')
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ in_string
        in_string, outside = inside[-1], inside == 0  # a closing quote counts as outside the string
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
    """Return whether the last byte is a backslash that starts an escape."""
    return chunk.endswith(b"\\") and (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 == 1


def _decode(body: bytes | bytearray, string_spans: list[tuple[int, int]]) -> Any:
    """Decode a body, and decode its long strings separately, in chunks.

    A random number replaces each long string in the decoder's input, and the decoder's hook for
    numbers returns the string. A client cannot guess these numbers.

    Args:
        body: JSON in UTF-8.
        string_spans: Start and end of each long string, from `_scan_body`.

    Raises:
        ApiError: A long string is a key of an object.
        msgspec.DecodeError, UnicodeDecodeError: The body is not valid JSON in UTF-8. Positions in
            the message of a DecodeError are positions in `body`.
    """
    secret = secrets.randbits(64)
    values: dict[str, str] = {}
    shortened_body, at, shifts = bytearray(), 0, []
    for i, (start, end) in enumerate(string_spans):
        if body[end + 1 : end + 64].lstrip()[:1] == b":":
            raise _invalid_json_error(f"a key is longer than {_LONG_STRING_BYTES} bytes")
        number = f"0e{secret}{i:04}"
        values[number] = _decode_string(body, start, end)
        # Replace the long string by `number`, with a space on each side. In invalid JSON, digits
        # may directly precede or follow the string. The spaces separate these digits from `number`.
        shortened_body += b"%b %b " % (body[at : start - 1], number.encode())
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
    """Decode the JSON string in `body[start:end]`, in chunks."""
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
    """Return the last index where a cut splits neither a character nor an escape sequence."""
    end = len(chunk) - 1
    at = chunk.rfind(b"\\", end - _ESCAPE_SIZE, end)
    if at >= 0 and _ends_in_escape(chunk[: at + 1]):
        high = at - _ESCAPE_SIZE
        is_pair = _HIGH_SURROGATE.match(chunk, high) and _ends_in_escape(chunk[: high + 1])
        return high if is_pair else at
    for _ in range(3):  # a UTF-8 character has at most 3 continuation bytes
        end -= chunk[end] & 0xC0 == 0x80
    return end


def _shift_position(
    error: msgspec.DecodeError, shifts: list[tuple[int, int]]
) -> msgspec.DecodeError:
    """Return the error with its byte position converted to a position in the whole body.

    Args:
        error: Error with a byte position in the decoded text.
        shifts: Pairs `(start, offset)` in ascending order. Add `offset` to the position if it is
            between `start` and the next pair's `start`.
    """

    def shifted_position(found: re.Match[str]) -> str:
        position = int(found[1])
        return f"(byte {position + max((by for at, by in shifts if at <= position), default=0)})"

    return msgspec.DecodeError(_BYTE_POSITION.sub(shifted_position, str(error)))


def _count_digit_groups(codes: np.ndarray, outside: np.ndarray) -> int:
    """Return the number of 8-byte groups of a chunk that contain only digits of JSON numbers.

    Args:
        codes: Bytes of the chunk as numbers. Bytes after the last full 64-byte group are ignored.
        outside: For each byte, whether the byte is outside strings.

    Raises:
        ApiError: A 64-byte group of the chunk contains only digits, so a number is too long.
    """
    size = len(codes) // _MAX_DIGITS * _MAX_DIGITS
    are_digits = (codes[:size] - np.uint8(ord("0")) < 10) & outside[:size]
    rows = are_digits.view(np.uint64) == _EIGHT_TRUE_BYTES
    if rows.reshape(-1, _MAX_DIGITS // _DIGITS_PER_VALUE).all(1).any():
        raise _invalid_json_error("a number is too long")
    return int(np.count_nonzero(rows))


def _parse_number(text: str) -> float:
    """Convert a number with a fraction or an exponent; 3.0 becomes the integer 3."""
    number = float(text)
    if not math.isfinite(number):
        raise _invalid_json_error(f"the number {text[:40]} is out of range")
    return int(number) if number.is_integer() and abs(number) < _MAX_EXACT_FLOAT else number


# For a float with many digits, msgspec's own conversion takes 10 us, but `_parse_number` only 0.3
# us.
_decoder = msgspec.json.Decoder(float_hook=_parse_number)


def _count_names(value: Any) -> int:
    """Count the keys of all objects, without recursion, which could exhaust the stack."""
    level, found = _child_containers([value]), 0
    for _ in range(MAX_JSON_DEPTH):
        found += sum(len(each) for each in level if isinstance(each, dict))
        level = [c for each in level for c in _child_containers(each)]
    if level:
        raise _too_deep_error()
    return found


def _child_containers(value: dict[str, Any] | list[Any]) -> list[dict[str, Any] | list[Any]]:
    """Return the arrays and objects directly inside an array or object."""
    items = value.values() if isinstance(value, dict) else value
    if _SCALAR_TYPES.issuperset(map(type, items)):  # a fast path for token ids
        return []
    return [item for item in items if isinstance(item, (dict, list))]


def _duplicate_name_error(body: bytes | bytearray) -> ApiError:
    """Return the error for an object that has the same key twice. The error names the key."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                problem = "", BODY_NAME, f" has the key {name[:60]!r} twice"
                raise field_error(name[:60], *problem, shows_path=False)
            seen.add(name)

    try:
        json.loads(body, object_pairs_hook=check)
    except ApiError as error:
        return error
    return field_error("", "", BODY_NAME, " has a key twice")


def _lone_surrogate_error(body: bytes | bytearray) -> ApiError | None:
    """Return an error that names the field with a lone surrogate; None if no field has one.

    A body larger than `_MAX_SEARCHED_BYTES` is not searched, because other requests would wait.
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
    return ApiError(413, f"the body is larger than {limit} bytes: send a smaller body")


def _too_many_values_error(limit: int) -> ApiError:
    counted = "strings, fractions, arrays and objects count as four, long numbers by their digits"
    problem = f" has more than {limit} JSON values ({counted})"
    remedy = "send a smaller body, or raise the server's --max-body-values"
    return field_error("", "", BODY_NAME, problem, remedy=remedy)


def _too_deep_error() -> ApiError:
    return field_error("", "", BODY_NAME, f" is nested more than {MAX_JSON_DEPTH} levels deep")


def _invalid_json_error(reason: str) -> ApiError:
    return field_error("", "", BODY_NAME, f" cannot be parsed as JSON: {reason}")
