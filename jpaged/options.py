"""Options, each declared once: its default, what it may be, its flag and that flag's help.

    @dataclass(frozen=True)
    class Config(Options):
        block_size: int = integer(16, low=1, help="tokens in a block")

Making a `Config` checks every field; `add_flags` gives a command line `--block-size`, and
`read_options` reads what was given. Every error names the option, its value and what it may be.
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
    """An option of a dataclass: what it may be, and how a command line has it.

    Attributes:
        check: Raises TypeError or ValueError for (its name, a value that it may not have).
        kind: The type of a number or a switch; None of other options.
        low, above, high: Bounds of a number, or of the numbers in it; the second is excluded.
        served_high: The highest number that a server takes, where `high` is none.
        help: For `--help`; empty: the option is no flag. The default follows it in brackets.
        metavar: What stands for the value.
        names: With dashes; none: the option's own name. A switch has a `--no-` form of each.
        group: The heading under which `--help` has it; empty: that of all of the dataclass.
        nargs, action: As argparse has them; several values make a list.
        parse: Reads a value; ValueError or argparse.ArgumentTypeError if it is none.
        shown: The default as people write it; None: as Python does.
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
    """The base of dataclasses whose fields are made by the functions below: checks the fields.

    Raises:
        TypeError, ValueError: naming the option, its value and what it may be.
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
    """A field for an integer.

    Args:
        default: With None, None may be given too.
        low, high: Its bounds.
        what: What it must be, for errors.
        none: Whether None may be given though it is not the default.
        unit: "bytes" lets the flag take 800M and 20G.
        metavar: As of `Option`.
        **others: The rest of `Option`.
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
    """A field for a finite number; `requirement` says after "a number" which, else as of `integer`."""
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
    """The bounds in words, after "a number"."""
    if high is None:
        least = "but neither NaN nor infinite" if low is None else f"at least {low}"
        return least if above is None else f"above {above}"
    return f"from {low} to {high}" if above is None else f"above {above} and at most {high}"


def switch(default: bool, **others: Any) -> Any:
    """A field for True or False. The flag of one that is off turns it on; of one that is on, it has
    a `--no-` form that turns it off."""
    return option(
        default, check_bool, value_type=bool, default_text="on" if default else "", **others
    )


def choice(default: str | None, choices: Collection[str], **others: Any) -> Any:
    """A field for one of some words, or None where that is the default."""

    def check(name: str, value: object) -> None:
        if value not in choices and (value is not None or default is not None):
            known = ", ".join(choices)
            raise RequestError(name, f"is not supported; choose one of {known}", value=repr(value))

    return option(default, check, metavar=f"{{{','.join(choices)}}}", **others)


def option(
    default: Any, check: Callable[[str, Any], None] = lambda name, value: None, **others: Any
) -> Any:
    """A field that `check` checks; `others` has the rest of `Option`."""
    return field(default=default, metadata={"option": Option(check, **others)})


@cache
def declared_options(options: type[Options]) -> dict[str, tuple[Any, Option]]:
    """By name each option's default and what it is."""
    declared = [f for f in fields(cast(Any, options)) if "option" in f.metadata]
    return {f.name: (f.default, f.metadata["option"]) for f in declared}


class CommandLine(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line on stderr and exits with code 2.

    An unknown option is reported before any other mistake, together with the known option that is
    spelled most like it. Options cannot be abbreviated.
    """

    def __init__(self, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse `args` (default: the process's arguments)."""
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
        """Exit with code 2 and the message in one line."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def _unknown_option(self, args: Sequence[str]) -> str | None:
        """Return the first argument that looks like an option and is none.

        argparse itself would take the next argument, the option's value, for a positional one. An
        argument that stands where an option needs its value is left to argparse, which names the
        option that lacks a value and does not show what may be a secret.
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
    """Return the option that `name` was probably meant to be: one that begins with it, or else one
    that is spelled like it."""
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
    """Add a flag for every option that has help.

    Args:
        parser: Gets the flags, under the headings of their groups.
        options: A dataclass.
        defaults: Defaults of this command line, where they are not the dataclass's.
        leave_out: Options that are no flags of this command line.
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
    """The options of a dataclass that were given as flags."""
    names = [
        name for name in declared_options(options) if hasattr(args, name) and name not in exclude
    ]
    return {name: getattr(args, name) for name in names}


def parse_bytes(text: str) -> int:
    """A number of bytes: '123456', '800M', '20G' (powers of 1024)."""
    unit = _BYTE_UNITS.get(text[-1:].upper())
    try:
        number = int(float(text[:-1]) * unit) if unit else int(text)
    except (ValueError, OverflowError):
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 800M or 20G")
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


# Checks: each error names the option, its value and what it may be.


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise RequestTypeError(name, "must be True or False", value=repr(value))


def check_int(
    name: str, value: object, *, low: int, high: int | None = None, requirement: str = ""
) -> None:
    """Raise TypeError unless it is an integer (no bool), ValueError unless within the bounds."""
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
    """Raise TypeError unless it is a number, ValueError unless finite and within the bounds."""
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
