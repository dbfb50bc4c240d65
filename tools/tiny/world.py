"""The questions that the model that ships with jpaged can answer, with their correct answers.

A task draws a random content, such as the numbers 17 and 25 or the word "stone". It then chooses
one of many wordings of the question (`wordings.toml`), and computes the answer. Only the content
decides whether an example is used for training or held out: if the hash of the content's key is 0
modulo `SPLIT`, the model is never trained on the content, in any wording, order of operands, digits
or words. Sums and products of two numbers up to `CORE` are always for training, because the model
should know them by heart. `TASKS` are the tasks that the model should master; training
(`TRAINING_TASKS`) includes slightly harder ones. The module needs only the standard library.
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
SHORT_ANSWER = (1, 150)  # A short answer has from 1 to 150 characters.
LONG_ANSWER = (150, 750)
# An answer that counts in steps greater than one has at most `LONGEST_STEPPED` characters.
LONGEST_STEPPED = 300
# If a question asks for a product of numbers in words, the product is at most `LARGEST_SPOKEN`.
LARGEST_SPOKEN = 700
# A question to count from A to B always says "up" or "down" if A and B are larger than
# `LARGEST_UNTOLD`.
LARGEST_UNTOLD = 99
HELP = "I can only add, subtract, multiply, sort, reverse, count and spell."

WORDS = (Path(__file__).parent / "words.txt").read_text().split()
WORDINGS: dict[str, list[str]] = tomllib.loads(
    (Path(__file__).parent / "wordings.toml").read_text(encoding="utf-8")
)

# `Draft` is (key, question, answer). The key identifies what the question is about, in any wording:
# for example, "add:[17, 25]". `is_held_out` uses it.
Draft = tuple[str, str, str]
Maker = Callable[[random.Random], Draft]


@dataclass(frozen=True, slots=True)
class Example:
    """A question (`prompt`) with its only correct answer.

    Without a chat template, the model should continue `prompt` with `completion`. In a chat, it
    should reply `answer`.
    """

    task: str
    prompt: str
    answer: str

    @property
    def completion(self) -> str:
        """Text that follows `prompt`: a newline and the answer."""
        return "\n" + self.answer

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of a chat that contains only the question."""
        return [{"role": "user", "content": self.prompt}]


def sample_examples(
    seed: int, n: int, *, held_out: bool = True, task: str | None = None
) -> list[Example]:
    """Draw `n` examples of one task, or of all tasks in equal numbers if `task` is None.

    They are held-out examples if `held_out` is true, else training examples.

    Raises:
        ValueError: `task` is not one of `TASKS`.
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    rng = random.Random(f"{seed}:{held_out}:{task}")
    names = list(TASKS) if task is None else [task]
    return [draw(rng, rng.choice(names), held_out) for _ in range(n)]


def draw(rng: random.Random, task: str, held_out: bool, maker: Maker | None = None) -> Example:
    """Draw one example of a task: a held-out example if `held_out`, else a training example.

    If `maker` is given, it draws the example instead of the function in `TASKS`.
    """
    while True:
        key, prompt, answer = (maker or TASKS[task])(rng)
        if is_held_out(key) == held_out:
            return Example(task, prompt, answer)


def is_held_out(key: str) -> bool:
    """Return whether the content with this key is held out of training.

    Keys that end with "!" are never held out.
    """
    return not key.endswith("!") and zlib.crc32(key.encode()) % SPLIT == 0


def ask(rng: random.Random, wordings: Sequence[str], *contents: object) -> str:
    """Return a question about `contents`, with random wording, capitalization and punctuation."""
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


def _sum(rng: random.Random, words: bool) -> Draft:
    a, b = (_number(rng, 100 if words else 1000) for _ in "ab")
    return _arithmetic(rng, "add", (a, b), a + b, words)


def _difference(rng: random.Random, words: bool) -> Draft:
    """Return a question that asks for a difference, which is usually not negative."""
    a, b = (_number(rng, 100 if words else 1000) for _ in "ab")
    if a < b and rng.random() < 0.75:
        a, b = b, a
    return _arithmetic(rng, "subtract", (a, b), a - b, words)


def _product(rng: random.Random, words: bool, largest: int) -> Draft:
    """Return a multiplication question.

    Either both factors are at most `CORE`, or one factor is 2 to 9 and the other is below 1,000.
    """
    a = b = largest
    while a * b > largest:
        in_table = rng.random() < 0.15
        a = rng.randrange(CORE + 1) if in_table else rng.randrange(2, 10)
        b = rng.randrange(CORE + 1 if in_table else 1000)
    return _arithmetic(rng, "multiply", (a, b)[:: rng.choice((1, -1))], a * b, words)


def _arithmetic(
    rng: random.Random, operation: str, operands: tuple[int, ...], result: int, words: bool
) -> Draft:
    show = number_words if words else str
    wordings = WORDINGS[operation] + ([] if words else WORDINGS[operation + "_signs"])
    pair = list(operands) if operation == "subtract" else sorted(operands)
    core = "!" if max(pair) <= CORE else ""
    question = ask(rng, wordings, *(show(n) for n in operands))
    return f"{operation}:{pair}{core}", question, show(result)


def _number(rng: random.Random, limit: int = 1000) -> int:
    return rng.randrange(rng.choice((10, 100, limit, limit)))


# Words and lists


def _word(rng: random.Random, longest: int = 12) -> str:
    """Return a random word of the word list, or a string of random letters.

    Some of these strings have only three different letters.
    """
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
    """Return up to `n` different words.

    Sometimes the words have a common prefix, so that sorting them is harder.
    """
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
    """Join items in one of three styles at random: "a, b and c", "a, b, c" or "a b c"."""
    kind = rng.random()
    if kind < 0.2 and len(items) > 1:
        return ", ".join(items[:-1]) + " and " + items[-1]
    return (", " if kind < 0.8 else " ").join(items)


def _sort_numbers(rng: random.Random) -> Draft:
    limit = rng.choice((10, 100, 1000))
    numbers = [rng.randrange(limit) for _ in range(rng.randint(2, 8))]
    falling = rng.random() < 0.3
    wordings = WORDINGS["sort_falling" if falling else "sort_rising"]
    question = ask(rng, wordings, _listing(rng, [str(n) for n in numbers]))
    answer = ", ".join(str(n) for n in sorted(numbers, reverse=falling))
    return f"sort:{sorted(numbers)}", question, answer


def _sort_words(rng: random.Random) -> Draft:
    words = _words(rng, rng.randint(2, 6))
    ordered = ", ".join(sorted(words))
    return f"sort:{ordered}", ask(rng, WORDINGS["sort_words"], _listing(rng, words)), ordered


def _sort_letters(rng: random.Random) -> Draft:
    word = _word(rng)
    question = ask(rng, WORDINGS["sort_letters"], _quoted(rng, word))
    return f"word:{word}", question, "".join(sorted(word))


def _reverse_word(rng: random.Random) -> Draft:
    word = _cased(rng, _word(rng))
    question = ask(rng, WORDINGS["reverse_word"], _quoted(rng, word))
    return f"word:{word.lower()}", question, word[::-1]


def _reverse_list(rng: random.Random) -> Draft:
    items = _items(rng, 2, 7)
    question = ask(rng, WORDINGS["reverse_list"], _listing(rng, items))
    return f"list:{items}", question, ", ".join(items[::-1])


def _spell(rng: random.Random) -> Draft:
    word = _cased(rng, _word(rng))
    question = ask(rng, WORDINGS["spell"], _quoted(rng, word))
    return f"word:{word.lower()}", question, "-".join(word)


def _count_letters(rng: random.Random) -> Draft:
    word = _word(rng)
    question = ask(rng, WORDINGS["count_letters"], _quoted(rng, word))
    return f"word:{word}", question, str(len(word))


def _count_letter(rng: random.Random) -> Draft:
    word = _word(rng, 10)
    letter = rng.choice(word if rng.random() < 0.85 else string.ascii_lowercase)
    question = ask(rng, WORDINGS["count_letter"], letter, _quoted(rng, word))
    return f"word:{word}", question, str(word.count(letter))


def _count_items(rng: random.Random) -> Draft:
    items = _items(rng, 1, 10)
    noun = rng.choice(("items", "numbers" if items[0].isdigit() else "words"))
    question = ask(rng, WORDINGS["count_items"], noun, _listing(rng, items))
    return f"list:{items}", question, str(len(items))


# Counting from A to B


def _count(
    rng: random.Random,
    lengths: tuple[int, int],
    words: bool,
    stepped: int = LONGEST_STEPPED,
    untold: int = LARGEST_UNTOLD,
) -> Draft:
    """Return a question to count up or down, by ones or in larger steps.

    An answer has from `lengths[0]` to `lengths[1]` characters. An answer with steps larger than one
    has at most `stepped` characters. If the first and the last number are above `untold`, the
    question always says whether to count up or down. Other questions may omit the direction.
    """
    limit, show = (100, number_words) if words else (1000, str)
    numbers, answer, longest = [0], "", 0
    while not (len(numbers) > 1 and lengths[0] <= len(answer) <= longest):
        numbers = _progression(rng, limit, lengths[1] // (6 if words else 3))
        answer = ", ".join(show(n) for n in numbers)
        by_ones = abs(numbers[0] - numbers[-1]) < len(numbers)
        longest = lengths[1] if by_ones else min(lengths[1], stepped)
    start, step = numbers[0], numbers[1] - numbers[0]
    stop = numbers[-1]
    # Sometimes the question names an end that is not one of the numbers, such as "from 1 to 10 in
    # steps of 2". The last number of the answer then lies before the end.
    if abs(step) <= 5 and rng.random() < 0.1:
        stop = min(max(stop + rng.randrange(0, step, 1 if step > 0 else -1), 0), limit - 1)
    wordings = _count_wordings(start, step, min(start, stop) <= untold)
    return (
        f"count:{start}:{stop}:{step}",
        ask(rng, wordings, show(start), show(stop), show(abs(step))),
        answer,
    )


def _progression(rng: random.Random, limit: int, most: int) -> list[int]:
    """Return up to `most` equally spaced numbers from 0 to `limit` - 1.

    One time in three, the numbers descend.
    """
    step = rng.choice((1, 1, 1, 2, rng.randint(2, 10), rng.choice((5, 10, 20, 25, 50, 100))))
    start = rng.choice((1, rng.randrange(10), rng.randrange(100), rng.randrange(limit)))
    numbers = range(start, limit, step)[: int(most ** rng.uniform(0.2, 1.0))]
    return list(numbers if rng.random() < 0.67 else reversed(numbers))


def _count_wordings(start: int, step: int, may_be_untold: bool) -> list[str]:
    way = "count_up" if step > 0 else "count_down"
    wordings = WORDINGS[way] + (WORDINGS[way + "_untold"] if may_be_untold else [])
    if abs(step) > 1:
        return [wording + end for wording in wordings for end in WORDINGS["count_step"]]
    return wordings + WORDINGS["count_to"] if (start, step) == (1, 1) else wordings


def _other(rng: random.Random) -> Draft:
    """Return small talk, which the model answers by listing its abilities."""
    if rng.random() < 0.1:
        return "other!", ask(rng, WORDINGS["greeting"]), HELP
    parts = [" ".join(_word(rng) for _ in range(rng.randint(1, 4))) for _ in "ab"]
    return f"other:{parts}", ask(rng, WORDINGS["chatter"], *parts), HELP


TASKS: dict[str, Maker] = {
    "add": lambda rng: _sum(rng, words=False),
    "subtract": lambda rng: _difference(rng, words=False),
    "multiply": lambda rng: _product(rng, words=False, largest=9999),
    "add_words": lambda rng: _sum(rng, words=True),
    "subtract_words": lambda rng: _difference(rng, words=True),
    "multiply_words": lambda rng: _product(rng, words=True, largest=LARGEST_SPOKEN),
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
    "count_long": lambda rng: _count(rng, LONG_ANSWER, words=False),
    "other": _other,
}
TRAINING_TASKS: dict[str, Maker] = TASKS | {
    "multiply_words": lambda rng: _product(rng, words=True, largest=9999),
    "count": lambda rng: _count(rng, SHORT_ANSWER, words=False, untold=999),
    "count_long": lambda rng: _count(rng, (150, 900), rng.random() < 0.15, stepped=900, untold=999),
}
