"""Errors about options and fields of requests, and words for messages.

An error keeps the field's path, the field's value and the names of other fields apart from its
words. So an API or a command line that calls a field otherwise can print its own name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self


class ErrorKind(StrEnum):
    """The kind of an error. HTTP answers 503 to UNAVAILABLE, 500 to INTERNAL, 400 to the others."""

    INVALID = "invalid"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


@dataclass(frozen=True)
class ErrorInfo:
    """An error in named parts. Its text is "PATH=VALUE PROBLEM: REMEDY".

    Attributes:
        path: Path of the field at fault, such as "prompt[2]"; empty if no field is at fault.
        problem: What is wrong. The strings alternate: text, path of another field, text, and so on.
        value: The field's value as the text shows it; None if the text does not show it.
        remedy: What to do, as strings like those of `problem`; empty if `problem` says what to do.
        kind: Decides the HTTP status.
        shows_path: Whether the text begins with the path.
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
        """The text for a command line, where an option is called by its flag."""
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
        """Return the same error with other names of fields; see `rename_path`."""

        def text(parts: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(
                rename_path(part, names) if i % 2 else part for i, part in enumerate(parts)
            )

        path = rename_path(self.path, names)
        return replace(self, path=path, problem=text(self.problem), remedy=text(self.remedy))


def rename_path(path: str, names: Mapping[str, str]) -> str:
    """Replace the longest prefix of `path` that is a key of `names` by its new name."""
    prefix_ends = [i for i, character in enumerate(path) if character in ".["]
    for end in (len(path), *reversed(prefix_ends)):
        if path[:end] in names:
            return names[path[:end]] + path[end:]
    return path


class RequestError(ValueError):
    """An option or a field of a request cannot be accepted.

    Args:
        path, problem, value, kind, shows_path: See `ErrorInfo`.
        remedy: What to do: one string, or alternating texts and paths as in `ErrorInfo`.
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
        """Return the error that says `info`."""
        others = {name: getattr(info, name) for name in ("value", "remedy", "kind", "shows_path")}
        return cls(info.path, *info.problem, **others)

    def with_renamed_fields(self, names: Mapping[str, str]) -> Self:
        """Return the same error with other names of fields; see `rename_path`."""
        return self.from_info(self.info.with_renamed_fields(names))


class RequestTypeError(RequestError, TypeError):
    """The value of an option or a field has a type that cannot be accepted."""


def error_info(error: BaseException) -> ErrorInfo:
    """Return the parts of a `RequestError`; for any other error, an `ErrorInfo` with its text."""
    if isinstance(error, RequestError):
        return error.info
    return ErrorInfo("", (str(error) or type(error).__name__,))


def short_repr(value: object) -> str:
    """A value as code, for errors: at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def format_count(number: int, noun: str, plural: str = "", *, number_format: str = "") -> str:
    """Return the number and its noun, for messages: "1 block", "2 blocks".

    Args:
        number: How many there are.
        noun: What is counted.
        plural: The noun after other numbers than 1; empty: the noun with an s.
        form: The number's format; "," writes 2,000.
    """
    return f"{number:{number_format}} {noun if number == 1 else plural or f'{noun}s'}"
