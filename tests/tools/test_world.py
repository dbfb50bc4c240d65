"""Test the training tasks: correct answers, held-out content, and lengths of answers."""

import random
import re
from itertools import groupby

import pytest

from tools.tiny.data import BatchShape, make_batch
from tools.tiny.numerals import number_words
from tools.tiny.world import (
    LONG_ANSWER,
    SHORT_ANSWER,
    TASKS,
    draw,
    is_held_out,
    sample_examples,
)

NUMBERS = {number_words(n): n for n in range(1000)}
NUMERALS = {word for text in NUMBERS for word in text.split()}
TRUE_RESULTS = {
    "add": lambda a, b: {a + b},
    "subtract": lambda a, b: {a - b, b - a},  # A question may name the two numbers in either order.
    "multiply": lambda a, b: {a * b},
}
FITS_WORD = {
    "sort_letters": lambda answer, word: answer == "".join(sorted(word)),
    "reverse_word": lambda answer, word: answer == word[::-1],
    "spell": lambda answer, word: answer == "-".join(word),
    "count_letters": lambda answer, word: answer == str(len(word)),
    "count_letter": lambda answer, word: answer in {str(word.count(x)) for x in word} | {"0"},
}


@pytest.mark.parametrize("operation", TRUE_RESULTS)
@pytest.mark.parametrize("words", [False, True])
def test_arithmetic_answers_are_correct(operation, words):
    for example in sample_examples(1, 200, task=operation + "_words" * words):
        tokens = re.findall(r"[a-z]+(?:-[a-z]+)?", example.prompt.lower())
        runs = [
            " ".join(run) for is_number, run in groupby(tokens, NUMERALS.__contains__) if is_number
        ]
        digits = re.findall(r"\d+", example.prompt)
        a, b = (NUMBERS[run] for run in runs) if words else (int(text) for text in digits)
        show = number_words if words else str
        assert example.answer in {show(n) for n in TRUE_RESULTS[operation](a, b)}


@pytest.mark.parametrize("task", FITS_WORD)
def test_answers_about_the_letters_of_a_word_are_correct(task):
    for example in sample_examples(2, 200, task=task):
        words = re.findall(r"\w+", example.prompt)
        assert any(FITS_WORD[task](example.answer, word) for word in words), example


def test_list_answers_have_the_items_of_the_question():
    for example in sample_examples(3, 200, task="sort_numbers"):
        given = sorted(int(n) for n in re.findall(r"\d+", example.prompt))
        falling = re.search("descending|largest to", example.prompt) is not None
        assert example.answer == ", ".join(map(str, given[::-1] if falling else given))
    for example in sample_examples(3, 200, task="reverse_list"):
        items = example.answer.split(", ")[::-1]
        places = [example.prompt.index(item) for item in items]
        assert len(places) == len(items)


@pytest.mark.parametrize(
    ("task", "lengths"), [("count", SHORT_ANSWER), ("count_long", LONG_ANSWER)]
)
def test_answers_of_counting_tasks_list_the_requested_numbers(task, lengths):
    for example in sample_examples(4, 200, task=task):
        assert lengths[0] <= len(example.answer) <= lengths[1]
        if example.answer[0].isalpha():
            continue
        numbers = [int(n) for n in example.answer.split(", ")]
        asked = [int(n) for n in re.findall(r"\d+", example.prompt)]
        start, stop = asked[:2] if len(asked) > 1 else (1, asked[0])
        step = (asked[2] if len(asked) > 2 else 1) * (1 if stop >= start else -1)
        expected = list(range(start, stop + (1 if step > 0 else -1), step))
        assert numbers == expected


def test_training_and_held_out_data_are_split_by_content():
    assert not is_held_out("multiply:[7, 8]!")
    assert any(is_held_out(f"add:[{a}, 500]") for a in range(100))
    for task in TASKS:
        rng = random.Random(0)
        assert draw(rng, task, held_out=False).task == task
    held_out = {e.prompt.lower().strip(".?") for e in sample_examples(5, 300, task="reverse_word")}
    trained = sample_examples(6, 3000, task="reverse_word", held_out=False)
    assert not held_out & {e.prompt.lower().strip(".?") for e in trained}


def test_samples_are_reproducible_and_unknown_tasks_are_refused():
    assert sample_examples(7, 20) == sample_examples(7, 20)
    assert sample_examples(7, 20) != sample_examples(8, 20)
    with pytest.raises(ValueError, match="task must be one of add"):
        sample_examples(0, 1, task="divide")


def test_example_has_a_raw_form_and_a_chat_form():
    example = sample_examples(9, 1)[0]
    assert example.completion == "\n" + example.answer
    assert example.messages == [{"role": "user", "content": example.prompt}]


def test_number_words_are_correct_and_five_digits_are_refused():
    assert [number_words(n) for n in (0, 13, 40, 42, -7)] == [
        *("zero", "thirteen", "forty", "forty-two", "minus seven")
    ]
    assert number_words(100) == "one hundred"
    assert number_words(891) == "eight hundred ninety-one"
    assert number_words(8010) == "eight thousand ten"
    with pytest.raises(ValueError, match="four digits, got 10000"):
        number_words(10000)


def test_batches_are_reproducible_and_the_loss_counts_only_valid_tokens():
    shape = BatchShape(short_rows=8, long_rows=2)
    first, again = make_batch(3, 5, shape), make_batch(3, 5, shape)
    for rows, same in zip(first, again, strict=True):
        assert (rows.tokens == same.tokens).all()
        assert (rows.segments > 0).mean() > 0.6
        assert not rows.loss[:, 0].any()
        assert set(rows.tokens[rows.loss == 1]) <= set(range(259))
