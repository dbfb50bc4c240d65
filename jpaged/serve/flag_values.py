"""What flags may be worth: numbers with their units, and keys that can match."""

import argparse
from typing import Any

from jpaged.serve.hosts import host_name

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def count(text: str) -> int:
    """A number of things, from 0 on."""
    return _bounded(text, int, "a count, such as 100")


def positive_count(text: str) -> int:
    """A number of things, of which there must be one."""
    return _not_zero(text, count(text), "give a count of 1 or more, such as 100")


def seconds(text: str) -> float:
    """A time, which may be none."""
    return _bounded(text, float, "a number of seconds, such as 30")


def positive_seconds(text: str) -> float:
    """A time in which something can happen."""
    return _not_zero(text, seconds(text), "give more than 0 seconds, such as 30")


def positive_bytes(text: str) -> int:
    """A number of bytes, and at least one."""
    return _not_zero(text, num_bytes(text), "give a number of bytes, such as 800M or 20G")


def num_bytes(text: str) -> int:
    """A number of bytes: '123456', '800M', '20G' (powers of 1024)."""
    unit = _UNITS.get(text[-1:].upper())
    try:
        number = int(float(text[:-1]) * unit) if unit else int(text)
    except (ValueError, OverflowError):
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 800M or 20G")
    return number


def check_key(key: str, number: int) -> None:
    """Check that a header can bring the API key as it is.

    Raises:
        ValueError: it cannot; the words name it by its number, for it is a secret.
    """
    if not key:
        raise ValueError("api_key= is empty, and so is no secret: give a key, or leave it out")
    if key != key.strip() or not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"api_key= (number {number}) could never match: a key has printable ASCII characters "
            "alone, and no space before or after them"
        )


def check_name(name: str, number: int) -> None:
    """Check that clients can write, and logs and metrics show, a model's name.

    Raises:
        ValueError: they cannot.
    """
    if not name or name != name.strip() or not name.isprintable():
        raise ValueError(
            f"served_model_name= (number {number}) is {name!r}: give a name of printable "
            "characters, with no space before or after it"
        )


def read_host(text: str) -> str:
    """A name for `--allowed-hosts`, as it is compared."""
    name = host_name(text)
    if not name or not text.isprintable() or any(char in text for char in "/@ "):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a host name, such as llm.example.com, or * for any"
        )
    return name


def _not_zero(text: str, number: Any, remedy: str) -> Any:
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} would refuse every request: {remedy}")
    return number


def _bounded(text: str, kind: Any, what: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = -1
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number
