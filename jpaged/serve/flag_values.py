"""What flags may be worth: numbers with their units, and keys that can match."""

import argparse
from typing import Any

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def count(text: str) -> int:
    """A number of things, from 0 on."""
    return _bounded(text, int, "a count, such as 100")


def seconds(text: str) -> float:
    """A time."""
    return _bounded(text, float, "a number of seconds, such as 30")


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


def _bounded(text: str, kind: Any, what: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = -1
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number
