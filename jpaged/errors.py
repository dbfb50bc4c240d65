"""Errors about options and request fields, and helpers that format values for messages.

An error stores the path and the value of the field separately from the message text. An API or a
command line that has another name for the field can thus print its own name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self


class ErrorKind(StrEnum):
    """The kind of an error. The HTTP status is 503 for UNAVAILABLE, 500 for INTERNAL, else 400."""

    INVALID = "invalid"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


@dataclass(frozen=True)
class ErrorInfo:
    """An error message in parts. `str` returns "PATH=VALUE PROBLEM: REMEDY".

    Attributes:
        path: Path of the invalid field, such as "prompt[2]"; empty if no field is invalid.
        problem: Description of the error, as strings to join. Every second string is the path of
            another field, such as "max_tokens" in ("exceeds ", "max_tokens", " by 2").
        value: Text of the field's value; None if the message omits the value.
        remedy: Advice to the user, as strings in the same way as `problem`; empty if `problem`
            includes the advice.
        kind: Kind of error, which determines the HTTP status.
        shows_path: Whether the message begins with the path.
    """

    path: str
    problem: tuple[str, ...]
    value: str | None = None
    remedy: tuple[str, ...] = ()
    kind: ErrorKind = ErrorKind.INVALID
    shows_path: bool = True

    def __str__(self) -> str:
        head = self.path if self.shows_path else ""
        return self._format_text(head if self.value is None else f"{head}={self.value}")

    @property
    def command_line_text(self) -> str:
        """Message for a command line: "--block-size 3 ..." instead of "block_size=3 ..."."""
        is_option = self.shows_path and self.value is not None and self.path.isidentifier()
        if not is_option:
            return str(self)
        return self._format_text(f"--{self.path.replace('_', '-')} {self.value}".rstrip())

    def _format_text(self, head: str) -> str:
        problem = "".join(self.problem)
        separator = " " if head and problem and problem[0] not in ":[" else ""
        words = f"{head}{separator}{problem}"
        return f"{words}: {''.join(self.remedy)}" if self.remedy else words

    def with_renamed_fields(self, names: Mapping[str, str]) -> "ErrorInfo":
        """Return a copy of the message with other names for the fields.

        `names` maps prefixes of field paths to new prefixes; see `rename_path`.
        """

        def text(parts: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(
                rename_path(part, names) if i % 2 else part for i, part in enumerate(parts)
            )

        path = rename_path(self.path, names)
        return replace(self, path=path, problem=text(self.problem), remedy=text(self.remedy))


def rename_path(path: str, names: Mapping[str, str]) -> str:
    """Return the path of a renamed field.

    For example, {"prompt": "input"} changes "prompt[2]" to "input[2]".

    Args:
        path: Path of the field.
        names: New prefixes by old prefix. The longest old prefix that matches is replaced. A
            prefix ends before a "." or "[", or at the end of `path`.
    """
    prefix_ends = [i for i, character in enumerate(path) if character in ".["]
    for end in (len(path), *reversed(prefix_ends)):
        if path[:end] in names:
            return names[path[:end]] + path[end:]
    return path


class RequestError(ValueError):
    """The error for an invalid option or request field.

    Args:
        path, problem, value, kind, shows_path: See `ErrorInfo`.
        remedy: Advice to the user: one string, or several strings as in `ErrorInfo`.
    """

    def __init__(
        self,
        path: str,
        *problem: str,
        value: str | None = None,
        remedy: str | tuple[str, ...] = (),
        kind: ErrorKind = ErrorKind.INVALID,
        shows_path: bool = True,
    ):
        remedy = (remedy,) if isinstance(remedy, str) else remedy
        self.info = ErrorInfo(path, problem, value, remedy, kind, shows_path)
        super().__init__(str(self.info))

    @classmethod
    def from_info(cls, info: ErrorInfo) -> Self:
        """Return an error with the parts in `info`."""
        others = {name: getattr(info, name) for name in ("value", "remedy", "kind", "shows_path")}
        return cls(info.path, *info.problem, **others)

    def with_renamed_fields(self, names: Mapping[str, str]) -> Self:
        """Return a copy of the error with other names for the fields.

        `names` maps prefixes of field paths to new prefixes; see `rename_path`.
        """
        return self.from_info(self.info.with_renamed_fields(names))


class RequestTypeError(RequestError, TypeError):
    """The error for an option or request field whose value has a wrong type."""


def error_info(error: BaseException) -> ErrorInfo:
    """Return the parts of a `RequestError`, or an `ErrorInfo` with the text of any other error."""
    if isinstance(error, RequestError):
        return error.info
    return ErrorInfo("", (str(error) or type(error).__name__,))


def short_repr(value: object) -> str:
    """Return the `repr` of a value for a message, cut to at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def format_count(number: int, noun: str, plural: str = "", *, number_format: str = "") -> str:
    """Return a number with its noun in the singular or plural: "1 block", "2 blocks".

    Args:
        number: Number of items.
        noun: Singular noun of the items.
        plural: Plural noun; empty appends an "s" to `noun`.
        number_format: Format specification of the number; "," writes 2,000.
    """
    return f"{number:{number_format}} {noun if number == 1 else plural or f'{noun}s'}"
