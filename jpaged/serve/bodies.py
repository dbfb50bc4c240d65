"""Requests' bodies: bounded as they arrive, counted before they are built, and JSON of one meaning.

What another client is sent must not wait for a body. So its values are counted before any of them
is built, and a large one is parsed in a thread of its own: no call into C holds the interpreter for
long, and Python code gives way.
"""

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from jpaged.serve.api_errors import ApiError, not_serving
from jpaged.serve.options import Limits

_HELD = "jpaged.held"

T = TypeVar("T")

MAX_DEPTH = 32
"""Arrays and objects within each other, at most."""

_AT_ONCE = 16 * 1024
"""Bytes of a body that is parsed in the event loop, in a millisecond or two at most."""

_FORMS = {"structured_outputs", "response_format", "text", "output_config", "tools"}
"""Fields that may have schemas or grammars: checking a small one can take a tenth of a second."""

_PIECE = 256 * 1024
"""Bytes that are counted in one go."""

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

    async def _body(self, request: Request) -> bytes:
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
        return bytes(body)


def parse_json(body: bytes, max_values: int) -> Any:
    """The JSON value of `body`.

    Args:
        body: In UTF-8.
        max_values: A whole number, true, false or null counts as one; a string (a name in an object
            too), a fraction, an array or an object as four, a long number as one more for about
            every eight digits: about what it takes to build them.

    Raises:
        ApiError: it has more values; it is no JSON in UTF-8, has NaN or an infinity, names a key
            twice, is nested too deep, or has a lone surrogate.
    """
    num_names = _count(body, max_values)
    try:
        value = _decoder.decode(body)
    except UnicodeDecodeError:
        raise _no_json(_not_utf8(body)) from None
    except RecursionError:
        raise _too_deep() from None
    except msgspec.DecodeError as error:
        raise _no_json(str(error).removeprefix("JSON is malformed: ")) from None
    if _num_names(value) < num_names:
        raise _named_twice(body)
    return value


def _count(body: bytes, max_values: int) -> int:
    """The names in all objects of `body`, if it is JSON: what is outside of strings tells.

    Each piece is seen by numpy, which lets other threads run meanwhile.

    Raises:
        ApiError: there are too many values, or one is a number of too many digits.
    """
    weight, num_names, at, in_string = 1, 0, 0, np.uint8(0)
    while at < len(body):
        piece = body[at : at + _PIECE]
        at += len(piece)
        if b"\\" in piece:  # what is escaped ends no string
            piece = piece.replace(b"\\\\", b"..").replace(b'\\"', b"..")
            if piece.endswith(b"\\") and at < len(body):  # what it escapes is in the next one
                piece, at = piece[:-1], at - 1
        codes = np.frombuffer(piece, np.uint8)
        inside = np.bitwise_xor.accumulate((codes == ord('"')).view(np.uint8)) ^ in_string
        in_string, outside = inside[-1], inside == 0  # of its quotes the last is outside
        weight += int(_WEIGHTS[codes[outside]].sum(dtype=np.int64))
        weight += _weight_of_digits(codes, outside)
        if weight > max_values:
            raise _too_many(max_values)
        num_names += int(np.count_nonzero((codes == ord(":")) & outside))
    return num_names


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


def _named_twice(body: bytes) -> ApiError:
    """The error that tells which name."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ApiError(400, f"the body names {name[:60]!r} twice", name[:60])
            seen.add(name)

    try:
        json.loads(body, object_pairs_hook=check)
    except ApiError as error:
        return error
    return ApiError(400, "the body names a field twice")


def _not_utf8(body: bytes) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    return "it is not UTF-8"


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes: send less at a time")


def _too_many(most: int) -> ApiError:
    counted = "strings, fractions, arrays and objects count as four, long numbers by their digits"
    what = f"the body has more than {most} JSON values ({counted})"
    return ApiError(400, f"{what}: send less at a time, or raise the server's --max-body-values")


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested more than {MAX_DEPTH} deep")


def _no_json(why: str) -> ApiError:
    return ApiError(400, f"the body is no JSON that can be read: {why}")
