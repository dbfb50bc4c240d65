"""Errors as HTTP answers."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jpaged import errors

_ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_STATUS_BY_KIND = {errors.ErrorKind.UNAVAILABLE: 503, errors.ErrorKind.INTERNAL: 500}


class ApiError(Exception):
    """An error with which the server answers a request.

    Args:
        status: The HTTP status.
        info: What is wrong. It must not show file paths of the server.
        code: OpenAI's `code`, an identifier for programs, such as "context_length_exceeded".
        headers: HTTP headers of the answer, such as Retry-After.
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
        """The path of the field at fault, if one is."""
        return self.info.path or None if self.status < 500 else None

    def with_renamed_fields(self, names: Mapping[str, str]) -> "ApiError":
        """Return the same error with other names of fields; see `errors.rename_path`."""
        info = self.info.with_renamed_fields(names)
        return ApiError(self.status, info, code=self.code, headers=self.headers)

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON in OpenAI's form."""
        return {
            "error": {
                "message": str(self),
                "type": _ERROR_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def field_error(path: str, *problem: str, code: str | None = None, **info: Any) -> ApiError:
    """Return the error of a field that cannot be accepted.

    Args:
        path, problem: As of `errors.RequestError`.
        code: A word for programs.
        **info: The other arguments of `errors.RequestError`.
    """
    return ApiError(400, errors.RequestError(path, *problem, **info).info, code=code)


def context_length_error(path: str, *problem: str, **info: Any) -> ApiError:
    """Return the error of a prompt that is too long, by itself or with its answer."""
    info["kind"] = errors.ErrorKind.TOO_LARGE
    return field_error(path, *problem, code="context_length_exceeded", **info)


def error_from_info(info: errors.ErrorInfo) -> ApiError:
    """Return the HTTP error for an error of the engine or the tokenizer.

    The client does not see the text of an internal error.
    """
    status = _STATUS_BY_KIND.get(info.kind, 400)
    if status == 500:
        return internal_error()
    return ApiError(status, info, headers={"Retry-After": "1"} if status == 503 else None)


def internal_error() -> ApiError:
    """Return the error of a server that failed; the log has the cause."""
    return ApiError(500, "the request failed on the server, whose log says why")


def unavailable_error(message: str, retry_after: int = 5) -> ApiError:
    """Return the error of a server that cannot take or finish a request now."""
    info = errors.ErrorInfo("", (message,), kind=errors.ErrorKind.UNAVAILABLE)
    return ApiError(503, info, headers={"Retry-After": str(retry_after)})


def log_line(text: str) -> None:
    """Write a line to the log; a closed log does not end the server."""
    with suppress(OSError):
        print(f"jpaged: {text}", file=sys.stderr, flush=True)
