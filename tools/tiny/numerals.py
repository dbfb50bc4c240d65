"""Numbers written out in words."""

from __future__ import annotations

_UNITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_UNITS += ["eleven", "twelve"]
_UNITS += [stem + "teen" for stem in ("thir", "four", "fif", "six", "seven", "eigh", "nine")]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def number_words(n: int) -> str:
    """Write out an integer of at most three digits: -21 is "minus twenty-one".

    Raises:
        ValueError: `n` is longer.
    """
    if abs(n) > 999:
        raise ValueError(f"n must have at most three digits, got {n}")
    if n < 0:
        return "minus " + number_words(-n)
    if n < 20:
        return _UNITS[n]
    large, rest = divmod(n, 10 if n < 100 else 100)
    head, link = (_TENS[large - 2], "-") if n < 100 else (_UNITS[large] + " hundred", " ")
    return head + link + number_words(rest) if rest else head
