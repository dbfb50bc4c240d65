"""Errors as OpenAI's clients know them."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """An error that is the answer to a request.

    Args:
        status: The HTTP status.
        message: For people; names the field, never a path of this machine.
        param: The field at fault.
        code: A word for programs.
        headers: Of the answer, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def bad_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A field of the request is not acceptable."""
    return ApiError(400, message, param, code=code)


def too_long(param: str, message: str) -> ApiError:
    """The prompt, or it and the answer, are more than the model takes; programs know the code."""
    return bad_field(param, message, "context_length_exceeded")


def refusal(message: str) -> ApiError:
    """An error of the engine about a parameter, whose message begins with NAME=VALUE."""
    name = message.partition("=")[0].partition("[")[0]
    return ApiError(400, message, name if name.isidentifier() else None)


def failed() -> ApiError:
    """The server failed; the log has the cause."""
    return ApiError(500, "the request failed on the server, whose log says why")


def fault_of(reason: str) -> ApiError:
    """Why a request failed in the engine: by its own grammar, for want of the process that makes
    masks, or else by the server's fault."""
    path = reason.partition(" ")[0]
    if path == "structured_outputs:" and reason.endswith(": retry"):
        return not_serving(reason, 1)
    return bad_field(path, reason) if path.startswith("structured_outputs.") else failed()


def not_serving(message: str, retry_after: int = 5) -> ApiError:
    """The server cannot take or finish a request now."""
    return ApiError(503, message, headers={"Retry-After": str(retry_after)})


def say(text: str) -> None:
    """Write a line to the log; a log that is closed does not end the server."""
    with suppress(OSError):
        print(f"jpaged: {text}", file=sys.stderr, flush=True)
