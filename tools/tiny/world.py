"""The small world the embedded model knows: questions with true answers.

A task draws a content (17 and 25, the word "stone"), words it as a question in one of many ways
(`wordings.toml`) and computes the answer. The split into training and held-out examples is made on
the content alone: one whose key hashes to 0 modulo `SPLIT` is never trained on, whatever the
wording, the order of its operands, digits or words. Sums and products of two operands up to `CORE`
are facts to know by heart and stay on the training side. Needs only the standard library.
"""

from __future__ import annotations

import random
import string
import tomllib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.tiny.numerals import number_words

SPLIT = 16
CORE = 12
SHORT_ANSWER = (1, 150)  # characters
LONG_ANSWER = (150, 900)  # characters
HELP = "I can only add, subtract, multiply, sort, reverse, count and spell."

WORDS = (Path(__file__).parent / "words.txt").read_text().split()
WORDINGS: dict[str, list[str]] = tomllib.loads(
    (Path(__file__).parent / "wordings.toml").read_text(encoding="utf-8")
)

Draft = tuple[str, str, str]  # the content's key, the question, the answer
Maker = Callable[[random.Random], Draft]


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its one true answer.

    The model follows the bare `prompt` with `completion`; in a chat it replies `answer`.
    """

    task: str
    prompt: str
    answer: str

    @property
    def completion(self) -> str:
        """What follows `prompt` word for word: a newline, then the answer."""
        return "\n" + self.answer

    @property
    def messages(self) -> list[dict[str, str]]:
        """The question as a chat of one turn."""
        return [{"role": "user", "content": self.prompt}]


def sample_examples(
    seed: int, n: int, *, held_out: bool = True, task: str | None = None
) -> list[Example]:
    """Draw `n` examples, of one task or of all in equal shares, held out of training or not.

    Raises:
        ValueError: `task` is not one of `TASKS`.
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    rng = random.Random(f"{seed}:{held_out}:{task}")
    names = list(TASKS) if task is None else [task]
    return [draw(rng, rng.choice(names), held_out) for _ in range(n)]


def draw(rng: random.Random, task: str, held_out: bool) -> Example:
    """Draw one example from one side of the split."""
    while True:
        key, prompt, answer = TASKS[task](rng)
        if is_held_out(key) == held_out:
            return Example(task, prompt, answer)


def is_held_out(key: str) -> bool:
    """Tell the side of the split a content is on; keys that end in "!" are always trained on."""
    return not key.endswith("!") and zlib.crc32(key.encode()) % SPLIT == 0


def _ask(rng: random.Random, wordings: Sequence[str], *contents: object) -> str:
    """Put the contents as a question: politely or not, capital or not, final mark or not."""
    text = rng.choice(wordings).format(*contents)
    command = text[-1] not in "?="
    if command and text[0].islower() and rng.random() < 0.1:
        text = "please " + text
    if rng.random() < 0.75:
        text = text[0].upper() + text[1:]
    if command:
        return text + rng.choice(("", "", "."))
    return text[:-1] if text[-1] == "?" and rng.random() < 0.3 else text


# Arithmetic


def _arithmetic(rng: random.Random, operation: str, words: bool) -> Draft:
    limit, show = (100, number_words) if words else (1000, str)
    a, b = _factors(rng) if operation == "multiply" else (_number(rng, limit) for _ in "ab")
    if operation == "subtract":
        a, b = (b, a) if a < b and rng.random() < 0.75 else (a, b)
        result, pair = a - b, [a, b]
    else:
        result, pair = (a + b if operation == "add" else a * b), sorted((a, b))
    wordings = WORDINGS[operation] + ([] if words else WORDINGS[operation + "_signs"])
    core = "!" if max(a, b) <= CORE else ""
    return f"{operation}:{pair}{core}", _ask(rng, wordings, show(a), show(b)), show(result)


def _factors(rng: random.Random) -> list[int]:
    """Two numbers of the times table, or one of a single digit and one of up to three."""
    if rng.random() < 0.15:
        return [rng.randrange(CORE + 1), rng.randrange(CORE + 1)]
    return [rng.randrange(2, 10), rng.randrange(1000)][:: rng.choice((1, -1))]


def _number(rng: random.Random, limit: int = 1000) -> int:
    return rng.randrange(rng.choice((10, 100, limit, limit)))


# Words and lists


def _word(rng: random.Random, longest: int = 12) -> str:
    """A word of the list, or random letters, at times of few kinds."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(WORDS)
    letters = string.ascii_lowercase if kind < 0.8 else rng.sample(string.ascii_lowercase, 3)
    return "".join(rng.choices(letters, k=rng.randint(1 if kind > 0.95 else 3, longest)))


def _quoted(rng: random.Random, word: str) -> str:
    mark = rng.choice(("'", '"')) if rng.random() < 0.15 else ""
    return mark + word + mark


def _cased(rng: random.Random, word: str) -> str:
    return rng.choice((str.capitalize, str.upper))(word) if rng.random() < 0.1 else word


def _words(rng: random.Random, n: int) -> list[str]:
    """Up to n different words; at times some share a stem, which makes them harder to sort."""
    words = [_word(rng, 8) for _ in range(n)]
    if rng.random() < 0.3:
        stem = rng.choice(WORDS)[: rng.randint(1, 3)]
        words[: rng.randint(1, n)] = [stem + _word(rng, 4)[:6] for _ in range(n)]
    chosen = list(dict.fromkeys(words))
    rng.shuffle(chosen)
    return chosen[:n]


def _items(rng: random.Random, fewest: int, most: int) -> list[str]:
    n = rng.randint(fewest, most)
    return [str(_number(rng)) for _ in range(n)] if rng.random() < 0.4 else _words(rng, n)


def _listing(rng: random.Random, items: Sequence[str]) -> str:
    """The items as people write a list: with commas, with a last "and", or with spaces."""
    kind = rng.random()
    if kind < 0.2 and len(items) > 1:
        return ", ".join(items[:-1]) + " and " + items[-1]
    return (", " if kind < 0.8 else " ").join(items)


def _sort_numbers(rng: random.Random) -> Draft:
    limit = rng.choice((10, 100, 1000))
    numbers = [rng.randrange(limit) for _ in range(rng.randint(2, 8))]
    falling = rng.random() < 0.3
    wordings = WORDINGS["sort_falling" if falling else "sort_rising"]
    question = _ask(rng, wordings, _listing(rng, [str(n) for n in numbers]))
    answer = ", ".join(str(n) for n in sorted(numbers, reverse=falling))
    return f"sort:{sorted(numbers)}", question, answer


def _sort_words(rng: random.Random) -> Draft:
    words = _words(rng, rng.randint(2, 6))
    ordered = ", ".join(sorted(words))
    return f"sort:{ordered}", _ask(rng, WORDINGS["sort_words"], _listing(rng, words)), ordered


def _sort_letters(rng: random.Random) -> Draft:
    word = _word(rng)
    question = _ask(rng, WORDINGS["sort_letters"], _quoted(rng, word))
    return f"word:{word}", question, "".join(sorted(word))


def _reverse_word(rng: random.Random) -> Draft:
    word = _cased(rng, _word(rng))
    question = _ask(rng, WORDINGS["reverse_word"], _quoted(rng, word))
    return f"word:{word.lower()}", question, word[::-1]


def _reverse_list(rng: random.Random) -> Draft:
    items = _items(rng, 2, 7)
    question = _ask(rng, WORDINGS["reverse_list"], _listing(rng, items))
    return f"list:{items}", question, ", ".join(items[::-1])


def _spell(rng: random.Random) -> Draft:
    word = _cased(rng, _word(rng))
    question = _ask(rng, WORDINGS["spell"], _quoted(rng, word))
    return f"word:{word.lower()}", question, "-".join(word)


def _count_letters(rng: random.Random) -> Draft:
    word = _word(rng)
    question = _ask(rng, WORDINGS["count_letters"], _quoted(rng, word))
    return f"word:{word}", question, str(len(word))


def _count_letter(rng: random.Random) -> Draft:
    word = _word(rng, 10)
    letter = rng.choice(word if rng.random() < 0.85 else string.ascii_lowercase)
    question = _ask(rng, WORDINGS["count_letter"], letter, _quoted(rng, word))
    return f"word:{word}", question, str(word.count(letter))


def _count_items(rng: random.Random) -> Draft:
    items = _items(rng, 1, 10)
    noun = rng.choice(("items", "numbers" if items[0].isdigit() else "words"))
    question = _ask(rng, WORDINGS["count_items"], noun, _listing(rng, items))
    return f"list:{items}", question, str(len(items))


# Counting from A to B


def _count(rng: random.Random, lengths: tuple[int, int], words: bool) -> Draft:
    """Count up or down, by ones or in steps, with an answer of `lengths` characters."""
    limit, show = (100, number_words) if words else (1000, str)
    numbers, answer = [0], ""
    while not (len(numbers) > 1 and lengths[0] <= len(answer) <= lengths[1]):
        numbers = _progression(rng, limit, lengths[1] // (6 if words else 3))
        answer = ", ".join(show(n) for n in numbers)
    start, step = numbers[0], numbers[1] - numbers[0]
    stop = numbers[-1]
    if abs(step) <= 5 and rng.random() < 0.1:  # the last step stops short of the number asked for
        stop = min(max(stop + rng.randrange(0, step, 1 if step > 0 else -1), 0), limit - 1)
    wordings = _count_wordings(start, step)
    return (
        f"count:{start}:{stop}:{step}",
        _ask(rng, wordings, show(start), show(stop), show(abs(step))),
        answer,
    )


def _progression(rng: random.Random, limit: int, most: int) -> list[int]:
    """Up to `most` numbers in 0..limit-1, equally far apart, one time in three falling."""
    step = rng.choice((1, 1, 1, 2, rng.randint(2, 10), rng.choice((5, 10, 20, 25, 50, 100))))
    start = rng.choice((1, rng.randrange(10), rng.randrange(100), rng.randrange(limit)))
    numbers = range(start, limit, step)[: int(most ** rng.uniform(0.2, 1.0))]
    return list(numbers if rng.random() < 0.67 else reversed(numbers))


def _count_wordings(start: int, step: int) -> list[str]:
    wordings = WORDINGS["count_up" if step > 0 else "count_down"]
    if abs(step) > 1:
        return [wording + end for wording in wordings for end in WORDINGS["count_step"]]
    return wordings + WORDINGS["count_to"] if (start, step) == (1, 1) else wordings


def _other(rng: random.Random) -> Draft:
    """Small talk, which the model answers by saying what it can do."""
    if rng.random() < 0.1:
        return "other!", _ask(rng, WORDINGS["greeting"]), HELP
    parts = [" ".join(_word(rng) for _ in range(rng.randint(1, 4))) for _ in "ab"]
    return f"other:{parts}", _ask(rng, WORDINGS["chatter"], *parts), HELP


TASKS: dict[str, Maker] = {
    "add": lambda rng: _arithmetic(rng, "add", words=False),
    "subtract": lambda rng: _arithmetic(rng, "subtract", words=False),
    "multiply": lambda rng: _arithmetic(rng, "multiply", words=False),
    "add_words": lambda rng: _arithmetic(rng, "add", words=True),
    "subtract_words": lambda rng: _arithmetic(rng, "subtract", words=True),
    "multiply_words": lambda rng: _arithmetic(rng, "multiply", words=True),
    "sort_numbers": _sort_numbers,
    "sort_words": _sort_words,
    "sort_letters": _sort_letters,
    "reverse_word": _reverse_word,
    "reverse_list": _reverse_list,
    "spell": _spell,
    "count_letters": _count_letters,
    "count_letter": _count_letter,
    "count_items": _count_items,
    "count": lambda rng: _count(rng, SHORT_ANSWER, words=False),
    "count_words": lambda rng: _count(rng, SHORT_ANSWER, words=True),
    "count_long": lambda rng: _count(rng, LONG_ANSWER, words=rng.random() < 0.15),
    "other": _other,
}
