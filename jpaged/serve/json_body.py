"""A request's body, bounded while it comes in, and JSON that means one thing only."""

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from jpaged.serve.bodies import hold
from jpaged.serve.errors import ApiError
from jpaged.serve.limits import Limits

MAX_DEPTH = 32
"""Of arrays and objects within each other."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, limits: Limits) -> Any:
    """The body's JSON value.

    Raises:
        ApiError: 413 if the body is too large, 503 if all bodies are, 400 if it is no JSON, or
            ambiguous.
    """
    return parse_json(await read_body(request, limits))


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body.

    Raises:
        ApiError: it is too large, is not said to be JSON, or does not come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also what a page of another site could send unasked
        raise ApiError(415, "send JSON, with the header Content-Type: application/json")
    most = limits.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for chunk in request.stream():
                if len(body) + len(chunk) > most:
                    raise _too_large(most)
                hold(request.scope, len(chunk))
                body += chunk
    except TimeoutError:
        raise ApiError(400, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise ApiError(400, "the client is gone") from None
    return bytes(body)


def parse_json(body: bytes) -> Any:
    """The JSON value of `body`.

    Raises:
        ApiError: it is no JSON in UTF-8, has NaN or an infinity, names a key twice, is nested too
            deep, or has a lone surrogate.
    """
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_number,
        )
    except UnicodeDecodeError as error:
        raise _no_json(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} at character {error.pos}") from None
    except ValueError:  # an integer of thousands of digits
        raise _no_json("a number is too long") from None
    _check_depth(value)
    if _SURROGATE.search(body):
        _check_text(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ApiError(400, f"the body names {twice[:60]!r} twice", twice[:60])
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _no_json(f"{name} is no JSON number")


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _no_json(f"the number {text[:40]} is out of range")
    return number


def _check_depth(value: Any) -> None:
    """Level by level, so that no depth exhausts the stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [c for v in level if isinstance(v, (dict, list)) for c in _children(v)]
        if not level:
            return
    raise _too_deep()


def _children(value: dict[str, Any] | list[Any]) -> Any:
    """Those that can have children themselves."""
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, (dict, list))]


def _check_text(value: Any) -> None:
    """Raise if a string anywhere in `value`, which is not deep, has a lone surrogate."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _no_json("a string has a lone surrogate, which is no text") from None
    elif isinstance(value, (dict, list)):
        for item in value if isinstance(value, list) else [*value, *value.values()]:
            _check_text(item)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes: send less at a time")


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested more than {MAX_DEPTH} deep")


def _no_json(why: str) -> ApiError:
    return ApiError(400, f"the body is no JSON that can be read: {why}")
