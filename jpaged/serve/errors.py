"""Errors that the server sends to clients as HTTP responses."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jpaged import errors

_ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_STATUS_BY_KIND = {errors.ErrorKind.UNAVAILABLE: 503, errors.ErrorKind.INTERNAL: 500}


class ApiError(Exception):
    """An error that the server sends as the response to a request.

    Args:
        status: The HTTP status.
        info: The parts of the error, or its message. Must not contain file paths of the server.
        code: The error's `code` field in OpenAI's format, such as "context_length_exceeded".
        headers: Additional HTTP headers of the response, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        info: errors.ErrorInfo | str,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.info = errors.ErrorInfo("", (info,)) if isinstance(info, str) else info
        super().__init__(str(self.info))
        self.status, self.code, self.headers = status, code, headers

    @property
    def param(self) -> str | None:
        """Path of the invalid request field. None if no field is invalid, or the status is 5xx."""
        return self.info.path or None if self.status < 500 else None

    def with_renamed_fields(self, names: Mapping[str, str]) -> "ApiError":
        """Return the same error with field paths renamed by `errors.rename_path`."""
        info = self.info.with_renamed_fields(names)
        return ApiError(self.status, info, code=self.code, headers=self.headers)

    @property
    def body(self) -> dict[str, Any]:
        """The error as a JSON object in OpenAI's format."""
        return {
            "error": {
                "message": str(self),
                "type": _ERROR_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def field_error(path: str, *problem: str, code: str | None = None, **info: Any) -> ApiError:
    """Return a 400 error for an invalid request field.

    Args:
        path, problem: See `errors.RequestError`.
        code: The error's `code` field in OpenAI's format.
        **info: Other arguments of `errors.RequestError`.
    """
    return ApiError(400, errors.RequestError(path, *problem, **info).info, code=code)


def context_length_error(path: str, *problem: str, **info: Any) -> ApiError:
    """Return a 400 error for a prompt that is too long, alone or together with `max_tokens`."""
    info["kind"] = errors.ErrorKind.TOO_LARGE
    return field_error(path, *problem, code="context_length_exceeded", **info)


def error_from_info(info: errors.ErrorInfo) -> ApiError:
    """Return the HTTP error for an error of the engine or the tokenizer.

    For an internal error, the HTTP error does not contain the error's text.
    """
    status = _STATUS_BY_KIND.get(info.kind, 400)
    if status == 500:
        return internal_error()
    return ApiError(status, info, headers={"Retry-After": "1"} if status == 503 else None)


def internal_error() -> ApiError:
    """Return a 500 error that refers to the log. The caller must log the cause."""
    return ApiError(500, "the request failed on the server: see the server's log")


def unavailable_error(message: str, retry_after: int = 5) -> ApiError:
    """Return a 503 error that asks the client to retry after `retry_after` seconds."""
    info = errors.ErrorInfo("", (message,), kind=errors.ErrorKind.UNAVAILABLE)
    return ApiError(503, info, headers={"Retry-After": str(retry_after)})


def log_line(text: str) -> None:
    """Write a line to the log, which is stderr. Do nothing if stderr is closed."""
    with suppress(OSError):
        print(f"jpaged: {text}", file=sys.stderr, flush=True)
