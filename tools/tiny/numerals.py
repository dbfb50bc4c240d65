"""Numbers written out in words."""

from __future__ import annotations

_UNITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_UNITS += ["eleven", "twelve"]
_UNITS += [stem + "teen" for stem in ("thir", "four", "fif", "six", "seven", "eigh", "nine")]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def number_words(n: int) -> str:
    """Return an integer of at most four digits in words: "minus twenty-one" for -21.

    Raises:
        ValueError: `n` has more than four digits.
    """
    if abs(n) > 9999:
        raise ValueError(f"n must have at most four digits, got {n}")
    if n < 0:
        return "minus " + number_words(-n)
    if n < 20:
        return _UNITS[n]
    if n < 100:
        tens, rest = divmod(n, 10)
        return _TENS[tens - 2] + ("-" + _UNITS[rest] if rest else "")
    size, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    head, rest = divmod(n, size)
    return f"{_UNITS[head]} {name}" + (" " + number_words(rest) if rest else "")
