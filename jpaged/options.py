"""Dataclasses of options: each field declares a default, a check, a command-line flag and its help.

    @dataclass(frozen=True)
    class Config(Options):
        block_size: int = integer(16, low=1, help="number of tokens in a block")

Creating a `Config` checks every field. `add_flags` adds `--block-size` to a command line, and
`read_options` returns the options that the command line sets. Every error names the option, its
value and the accepted values.
"""

import argparse
import difflib
import math
import numbers
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, NoReturn, cast

from jpaged.errors import RequestError, RequestTypeError

_BYTE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Option:
    """The declaration of an option: its check, and its flag on a command line.

    Attributes:
        check: Function of the option's name and value. Raises TypeError or ValueError if the value
            is invalid.
        value_type: int, float or bool for a number or a switch; None for other options.
        low: Lowest valid number, or lowest number in a collection; None for no bound.
        above: Bound that a valid number must exceed; None for no bound.
        high: Highest valid number, or highest number in a collection; None for no bound.
        server_max: Highest number that the HTTP server accepts if `high` is None.
        help: Text for `--help`, to which the default is added in brackets. Empty: no flag.
        metavar: Name of the value in `--help`.
        flags: Flags with dashes; empty: one flag, derived from the option's name. A switch that is
            on by default also has a `--no-` variant of each flag.
        group: Heading of the option in `--help`; empty: the `group` of the dataclass.
        nargs: Number of values, as in argparse; several values form a list.
        action: Action of the flag, as in argparse.
        parse: Function that converts the text of a value. Raises ValueError or
            argparse.ArgumentTypeError if the text is invalid.
        default_text: The default as shown in `--help`; None: `str` of the default.
    """

    check: Callable[[str, Any], None]
    value_type: type | None = None
    low: float | None = None
    above: float | None = None
    high: float | None = None
    server_max: float | None = None
    help: str = ""
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    group: str = ""
    nargs: str | None = None
    action: str | None = None
    parse: Callable[[str], Any] = str
    default_text: str | None = None


class Options:
    """Base class of option dataclasses. Creating an instance checks every field.

    Fields are declared with `integer`, `number`, `switch`, `choice` or `option`. The class argument
    `group` is the heading of the options in `--help`.

    Raises:
        TypeError, ValueError: A value is invalid. The message names the option, its value and the
            accepted values.
    """

    _group: ClassVar[str] = ""

    def __init_subclass__(cls, group: str = "") -> None:
        cls._group = group

    def __post_init__(self) -> None:
        for name, (default, option) in declared_options(type(self)).items():
            value = getattr(self, name)
            if value is not default:
                option.check(name, value)


def integer(
    default: int | None,
    *,
    low: int,
    high: int | None = None,
    requirement: str = "",
    allow_none: bool = False,
    unit: str = "",
    metavar: str = "N",
    **others: Any,
) -> Any:
    """Return a dataclass field for an integer option.

    Args:
        default: Default value. If the default is None, None is a valid value.
        low: Lowest valid integer.
        high: Highest valid integer; None for no bound.
        requirement: Description of the valid values for errors, as in "an integer, 1 or more".
        allow_none: Whether None is a valid value although the default is an integer.
        unit: "bytes" makes the flag accept values such as 800M and 20G.
        metavar: Name of the value in `--help`.
        **others: Other attributes of `Option`.
    """
    requirement = requirement or f"an integer, {low} or more"

    def check(name: str, value: object) -> None:
        if value is not None or not (allow_none or default is None):
            check_int(name, value, low=low, high=high, requirement=requirement)

    parse = parse_bytes if unit == "bytes" else _make_parser(int, requirement)
    default_text = _format_bytes(default) if unit == "bytes" and default else None
    attributes = {
        "value_type": int,
        "low": low,
        "high": high,
        "parse": parse,
        "default_text": default_text,
    }
    return option(default, check, metavar=metavar, **attributes | others)


def number(
    default: float | None,
    requirement: str = "",
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    unit: str = "",
    **others: Any,
) -> Any:
    """Return a dataclass field for an option that is a finite number.

    Args:
        default: Default value. If the default is None, None is a valid value.
        requirement: Description of the valid values, such as "of seconds above 0". Error messages
            print the description after the words "a number". Empty: derived from the bounds.
        low: Lowest valid number; None for no bound.
        above: Bound that a valid number must exceed; None for no bound.
        high: Highest valid number; None for no bound.
        unit: Unit of the default in `--help`, such as "s".
        **others: Other attributes of `Option`.
    """
    requirement = requirement or _describe_range(low, above, high)

    def check(name: str, value: object) -> None:
        if value is not None or default is not None:
            check_float(name, value, requirement, low=low, above=above, high=high)

    bounds = {"value_type": float, "low": low, "above": above, "high": high}
    parse = _make_parser(float, f"a number {requirement}")
    default_text = None if default is None else f"{default:g} {unit}".strip()
    return option(
        default, check, **bounds | {"parse": parse, "default_text": default_text} | others
    )


def _describe_range(low: float | None, above: float | None, high: float | None) -> str:
    """Return a description of the bounds, such as "at least 0".

    Error messages print the description after the words "a number".
    """
    if high is None:
        least = "that is finite" if low is None else f"at least {low}"
        return least if above is None else f"above {above}"
    return f"from {low} to {high}" if above is None else f"above {above} and at most {high}"


def switch(default: bool, **others: Any) -> Any:
    """Return a dataclass field for an option that is True or False.

    The flag turns the option on. If the default is True, a `--no-` variant turns the option off.
    """
    return option(
        default, check_bool, value_type=bool, default_text="on" if default else "", **others
    )


def choice(default: str | None, choices: Collection[str], **others: Any) -> Any:
    """Return a dataclass field for a string out of `choices`. A None default allows None too."""

    def check(name: str, value: object) -> None:
        if value not in choices and (value is not None or default is not None):
            known = ", ".join(choices)
            raise RequestError(name, f"is not supported; choose one of {known}", value=repr(value))

    return option(default, check, metavar=f"{{{','.join(choices)}}}", **others)


def option(
    default: Any, check: Callable[[str, Any], None] = lambda name, value: None, **others: Any
) -> Any:
    """Return a dataclass field whose values `check` validates.

    Args:
        default: Default value, which is not checked.
        check: Function of the option's name and value. Raises TypeError or ValueError if the value
            is invalid. By default every value is valid.
        **others: Other attributes of `Option`.
    """
    return field(default=default, metadata={"option": Option(check, **others)})


@cache
def declared_options(options: type[Options]) -> dict[str, tuple[Any, Option]]:
    """Return the default and the declaration of each option, by name."""
    declared = [f for f in fields(cast(Any, options)) if "option" in f.metadata]
    return {f.name: (f.default, f.metadata["option"]) for f in declared}


class CommandLine(argparse.ArgumentParser):
    """An argument parser that reports an error in one line on stderr and exits with code 2.

    An unknown option is reported before any other error, with a suggestion if a known option has a
    similar name. Options cannot be abbreviated.
    """

    def __init__(self, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse `args` (default: `sys.argv`). Exit with code 2 if an argument is invalid."""
        args = sys.argv[1:] if args is None else list(args)
        unknown = self._unknown_option(args)
        if unknown is not None:
            near = nearest_option(unknown, self._option_string_actions)
            remedy = f"see {self.prog} --help" if near is None else f"did you mean {near}?"
            self.error(f"unknown option {unknown}: {remedy}")
        parsed, left = self.parse_known_args(args, namespace)
        if left:
            self.error(f"unexpected argument {left[0]!r}: quote a value that has spaces")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the message in one line on stderr, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def _unknown_option(self, args: Sequence[str]) -> str | None:
        """Return the first argument that looks like an option but is unknown, or None.

        Call this before argparse, which would treat the value after an unknown option as a
        positional argument.

        The argument after an option that needs a value is never returned. It may be a secret, such
        as an API key that begins with "-", and the caller prints the result.
        """
        needs_value = False
        for argument in args:
            if argument == "--":
                return None
            name, _, _ = argument.partition("=")
            known = self._option_string_actions.get(name)
            if known is None and not needs_value and re.fullmatch(r"-[^\s\d.]\S*", name):
                return name
            takes_value = known is not None and known.nargs not in (0, "?", "*")
            needs_value = takes_value and name == argument
        return None


def nearest_option(name: str, known: Iterable[str]) -> str | None:
    """Return the known option that the user probably meant; None if no option is similar.

    An option that begins with `name` is preferred to an option with a similar spelling.
    """
    by_word = {option.strip("-"): option for option in known}
    word = name.strip("-").replace("_", "-")
    longer = [other for other in by_word if len(word) > 2 and other.startswith(word)]
    near = longer or difflib.get_close_matches(word, by_word, 1)
    return by_word[near[0]] if near else None


def add_flags(
    parser: argparse.ArgumentParser,
    options: type[Options],
    defaults: Mapping[str, Any] | None = None,
    exclude: Collection[str] = (),
) -> None:
    """Add command-line flags for options to a parser.

    An option receives a flag only if the option has a help text.

    Args:
        parser: Parser that receives the flags, under the headings of their groups.
        options: Option dataclass.
        defaults: Defaults to show in `--help` instead of the defaults of the dataclass.
        exclude: Names of options that receive no flag.
    """
    groups: dict[str, Any] = {}
    for name, (default, declared) in declared_options(options).items():
        if not declared.help or name in exclude:
            continue
        group = declared.group or options._group
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        flag_default = (defaults or {}).get(name, default)
        default_text = declared.default_text if flag_default is default else f"{flag_default:g}"
        groups[group].add_argument(
            *(declared.flags or (f"--{name.replace('_', '-')}",)),
            dest=name,
            default=argparse.SUPPRESS,
            help=declared.help + _format_default(flag_default, default_text),
            **_argparse_options(declared, default),
        )


def _argparse_options(declared: Option, default: Any) -> dict[str, Any]:
    if default is True:
        return {"action": argparse.BooleanOptionalAction}
    if default is False:
        return {"action": "store_true"}
    known = {"metavar": declared.metavar, "nargs": declared.nargs, "action": declared.action}
    return {"type": declared.parse} | {name: it for name, it in known.items() if it is not None}


def _format_default(default: Any, default_text: str | None) -> str:
    default_text = (
        ("" if default in (None, ()) else str(default)) if default_text is None else default_text
    )
    return f" ({default_text.replace('%', '%%')})" if default_text else ""


def read_options(
    args: argparse.Namespace, options: type[Options], exclude: Collection[str] = ()
) -> dict[str, Any]:
    """Return the options that the command line sets, by name.

    Args:
        args: Parsed arguments of a parser with the flags of `add_flags`.
        options: Option dataclass.
        exclude: Names of options to omit.
    """
    names = [
        name for name in declared_options(options) if hasattr(args, name) and name not in exclude
    ]
    return {name: getattr(args, name) for name in names}


def parse_bytes(text: str) -> int:
    """Convert text such as "123456", "800M" or "20G" to a number of bytes. K, M, G and T are powers
    of 1024.

    Raises:
        argparse.ArgumentTypeError: The text is not a number of bytes.
    """
    unit = _BYTE_UNITS.get(text[-1:].upper())
    try:
        number = int(float(text[:-1]) * unit) if unit else int(text)
    except (ValueError, OverflowError):
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 800M or 20G")
    return number


def _format_bytes(number: int) -> str:
    fitting = [(unit, size) for unit, size in _BYTE_UNITS.items() if not number % size]
    return f"{number // fitting[-1][1]}{fitting[-1][0]}" if fitting else str(number)


def _make_parser(value_type: type, requirement: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return value_type(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {requirement}") from None

    return parse


def check_bool(name: str, value: object) -> None:
    """Raise RequestTypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise RequestTypeError(name, "must be True or False", value=repr(value))


def check_int(
    name: str, value: object, *, low: int, high: int | None = None, requirement: str = ""
) -> None:
    """Check that a value is an integer within bounds.

    Args:
        name: Name of the option or field, for errors.
        value: Value to check.
        low: Lowest valid integer.
        high: Highest valid integer; None for no bound.
        requirement: Description of the valid values, for errors. Empty: derived from `low`.

    Raises:
        RequestTypeError: The value is not an integer. A bool does not count as an integer.
        RequestError: The value is out of bounds.
    """
    requirement = requirement or f"an integer, {low} or more"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestTypeError(
            name,
            f"is a {type(value).__name__}",
            value=repr(value),
            remedy=f"it must be {requirement}",
        )
    if int(value) < low or (high is not None and int(value) > high):
        raise RequestError(
            name, "is out of range", value=str(value), remedy=f"it must be {requirement}"
        )


def check_float(
    name: str,
    value: object,
    requirement: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> None:
    """Check that a value is a finite number within bounds.

    Args:
        name: Name of the option or field, for errors.
        value: Value to check.
        requirement: Description of the valid values, such as "above 0". Error messages print the
            description after the words "a number".
        low: Lowest valid number; None for no bound.
        above: Bound that a valid number must exceed; None for no bound.
        high: Highest valid number; None for no bound.

    Raises:
        RequestTypeError: The value is not a number. A bool does not count as a number.
        RequestError: The value is not finite or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kind = type(value).__name__
        raise RequestTypeError(
            name, f"is a {kind}", value=repr(value), remedy=f"it must be a number {requirement}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    is_within = (
        (low is None or number >= low)
        and (above is None or number > above)
        and (high is None or number <= high)
    )
    if not (math.isfinite(number) and is_within):
        raise RequestError(
            name, "is out of range", value=str(value), remedy=f"it must be a number {requirement}"
        )
