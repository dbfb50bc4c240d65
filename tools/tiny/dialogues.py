"""Chats that are more than a question and an answer: calls of a calculator tool, JSON answers that
match a schema, and reasoning before the answer.

As in `world`, the correct answer depends only on the messages before it, and the content of a
dialogue decides whether it is used for training or held out. `TASKS` are the tasks that the model
should master. `data` makes some training dialogues longer or mixes them.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jpaged.terminal.tools_demo import CALCULATOR, calculate
from tools.tiny import world
from tools.tiny.numerals import number_words
from tools.tiny.world import WORDINGS, WORDS, Example, is_held_out

Message = dict[str, Any]
Tool = dict[str, Any]

LARGEST_SPOKEN = 100
AT_ONCE = "I can answer this at once."
_SIGNS = {"+": ("+",), "-": ("-",), "*": ("*", "x", "\u00d7"), "/": ("/", "\u00f7")}
_NAMES = ("calculate", "calc", "compute", "math", "evaluate", "arithmetic", "calculator_tool")
_KEYS = ("expression", "expression", "expr", "input", "query", "formula", "text")
_DESCRIPTIONS = (
    "Evaluate an arithmetic expression.",
    "Computes the value of an expression.",
    "A calculator.",
    "Use this for all arithmetic.",
    "Add, subtract, multiply or divide numbers.",
    "Evaluates a mathematical expression and returns the result as a string.",
)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A chat in which every answer of the assistant is correct.

    Attributes:
        messages: Messages in OpenAI's format, except that the arguments of tool calls are objects.
            The last message is the assistant's.
        tools: Tools that the prompt describes.
        thought: The assistant's reasoning before the last message, or None.
    """

    messages: list[Message]
    tools: Sequence[Tool] = ()
    thought: str | None = None


# `Draft` is (key of the content, chat). The key decides whether the content is held out of
# training.
Draft = tuple[str, Dialogue]
Maker = Callable[[random.Random], Draft]


def sample_dialogues(seed: int, n: int, task: str, *, held_out: bool = True) -> list[Dialogue]:
    """Draw `n` dialogues of a task: held-out dialogues if `held_out`, else training dialogues.

    Raises:
        ValueError: `task` is not one of `TASKS`.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    rng = random.Random(f"{seed}:{held_out}:{task}")
    return [draw_dialogue(rng, task, held_out) for _ in range(n)]


def draw_dialogue(rng: random.Random, task: str, held_out: bool) -> Dialogue:
    """Draw one dialogue of a task: a held-out dialogue if `held_out`, else a training dialogue."""
    while True:
        key, dialogue = TASKS[task](rng)
        if is_held_out(key) == held_out:
            return dialogue


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def chat_of(example: Example) -> list[Message]:
    """Return the messages of a question and its answer."""
    return [*example.messages, _assistant(example.answer)]


# A calculator


@dataclass(frozen=True, slots=True)
class Calculation:
    """A question, the expression to compute, and the expression's value.

    The value is "error" for a division by 0.
    """

    question: str
    expression: str
    value: str


def draw_calculation(rng: random.Random, *, beyond: bool = False) -> Calculation:
    """Return a random question: to compute with two numbers, or to evaluate an expression.

    The two numbers may be written in words. An expression has two or three numbers. If `beyond` is
    set, an expression has up to five numbers, and a number has up to eight instead of six digits.
    """
    kind = rng.random()
    if kind < 0.15:
        return _worded(rng, tuple(_spoken(rng) for _ in "ab"))
    if kind < 0.5:
        return _worded(rng, tuple((n, n) for n in (_numeral(rng, beyond), _numeral(rng, beyond))))
    tree = _tree(rng, rng.randint(2, 5) if beyond else rng.choice((2, 2, 3)), beyond)
    sparing = rng.random() < 0.6
    signs, space = [rng.choice(_SIGNS[sign]) for sign in "+-*/"], rng.choice((" ", " ", ""))
    question = world.ask(rng, WORDINGS["expression"], _written(tree, signs, space, sparing=sparing))
    return _solved(question, _written(tree, sparing=sparing))


def _worded(rng: random.Random, pair: tuple[tuple[str, str], ...]) -> Calculation:
    """Return a question that asks to compute with two numbers.

    For each number, `pair` contains two strings, such as ("seventeen", "17"). The question contains
    the first string, and the expression contains the second.
    """
    sign = rng.choice("+-*/")
    name = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}[sign]
    is_spoken = pair[0][0] != pair[0][1]
    wordings = WORDINGS[name] + ([] if is_spoken else WORDINGS[name + "_signs"])
    question = world.ask(rng, wordings, *(said for said, _ in pair))
    return _solved(question, f"{pair[0][1]} {sign} {pair[1][1]}")


def _spoken(rng: random.Random) -> tuple[str, str]:
    n = rng.randrange(LARGEST_SPOKEN)
    return number_words(n), str(n)


def _numeral(rng: random.Random, beyond: bool = False) -> str:
    """Return a random number as text, usually a whole number of up to six digits.

    If `beyond` is set, the number has up to eight digits.
    """
    number = str(rng.randrange(10 ** rng.randint(1, 8 if beyond else 6)))
    kind = rng.random()
    if kind < 0.1:
        return f"{int(number) % 10000}.{rng.randrange(1, 1000)}"
    return "-" + number if kind < 0.13 and number != "0" else number


Tree = tuple[Any, str, Any] | str  # An expression is a tuple (left, sign, right), or a numeral.


def _tree(rng: random.Random, leaves: int, beyond: bool) -> Tree:
    if leaves == 1:
        return _numeral(rng, beyond)
    left = rng.randint(1, leaves - 1)
    return _tree(rng, left, beyond), rng.choice("+-*/"), _tree(rng, leaves - left, beyond)


def _written(
    tree: Tree, signs: Sequence[str] = "+-*/", space: str = " ", *, sparing: bool = False
) -> str:
    """Return an expression as text, with parentheses around each part that is an expression.

    If `sparing` is true, write only the necessary parentheses.
    """
    if isinstance(tree, str):
        return tree
    strength = tree[1] in "*/"
    parts = []
    for part, is_right in ((tree[0], False), (tree[2], True)):
        text = _written(part, signs, space, sparing=sparing)
        is_weak = not isinstance(part, str) and (part[1] in "*/") < strength + is_right
        has_several = not isinstance(part, str)
        parts.append(f"({text})" if has_several and (is_weak or not sparing) else text)
    return f"{space}{signs['+-*/'.index(tree[1])]}{space}".join(parts)


def _solved(question: str, expression: str) -> Calculation:
    try:
        return Calculation(question, expression, calculate(expression))
    except ValueError:  # a division by zero
        return Calculation(question, expression, "error")


def draw_tool(rng: random.Random) -> tuple[Tool, str]:
    """Return a random description of a calculator, and the name of its parameter."""
    if rng.random() < 0.3:
        return CALCULATOR, "expression"
    kind = rng.random()
    name = "calculator" if kind < 0.5 else rng.choice(_NAMES)
    name = "_".join(_names(rng, rng.randint(1, 2))) if kind > 0.85 else name
    key = _names(rng, 1)[0] if rng.random() < 0.1 else rng.choice(_KEYS)
    prose = _prose(rng) if rng.random() < 0.3 else rng.choice(_DESCRIPTIONS)
    function = {"name": name, "description": prose, "parameters": object_schema(rng, {key: TEXT})}
    if rng.random() < 0.1:
        del function["description"]
    if rng.random() < 0.1:
        function["strict"] = True
    return {"type": "function", "function": function}, key


def calculator_turn(
    rng: random.Random, tool: Tool, key: str, calculation: Calculation, *, is_true: bool = False
) -> list[Message]:
    """Return four messages: question, tool call, result of the tool, and answer.

    Unless `is_true` is set, the result may be wrong, and the answer repeats the wrong result.
    """
    name = tool["function"]["name"]
    call = {"name": name, "arguments": {key: calculation.expression}}
    result = calculation.value if is_true else _result(rng, calculation.value)
    said, answer = result, f"{calculation.expression} = {result}"
    if result == "error" or result.startswith("Error"):
        said = "Error: " + _prose(rng) if rng.random() < 0.5 else "Error: division by zero"
        answer = f"The {name} says: {said}"
    elif not is_true and rng.random() < 0.1:
        said = json.dumps({rng.choice(("result", "value", "answer")): _json_number(result)})
    call_id = "call_" + "".join(rng.choices(string.ascii_letters, k=4))
    return [
        _user(calculation.question),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": said},
        _assistant(answer),
    ]


def _result(rng: random.Random, value: str) -> str:
    """Return the correct value or a random value as the result of the calculator tool.

    From random results, the model learns to copy the result of the tool instead of computing it.
    """
    kind = rng.random()
    if kind < 0.6:
        return value
    digits = "".join(rng.choices(string.digits, k=rng.randint(1, 14)))
    digits = digits.lstrip("0") or "0"
    if kind < 0.8:
        return rng.choice(("", "", "-")) + digits
    tail = "".join(rng.choices(string.digits, k=rng.randint(1, 9)))
    return "Error" if kind > 0.95 else f"{digits[:6]}.{tail}"


def _json_number(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        return text


def _calculator(rng: random.Random) -> Draft:
    calculation, (tool, key) = draw_calculation(rng), draw_tool(rng)
    turn = calculator_turn(rng, tool, key, calculation, is_true=True)
    return f"calculator:{calculation.expression}", Dialogue([*system_of(rng), *turn], [tool])


def _think_calculator(rng: random.Random) -> Draft:
    """Return a dialogue with a calculator tool, and with reasoning before the last message.

    The last message is a tool call or an answer.
    """
    kind = rng.random()
    if kind < 0.25:
        key, dialogue = _calculator_unused(rng, [t for t in _AT_ONCE_TASKS if t in UNCALCULATED])
        return key, replace(dialogue, thought=AT_ONCE)
    key, dialogue = _calculator(rng)
    if kind < 0.6:
        name = dialogue.tools[0]["function"]["name"]
        call = replace(dialogue, messages=dialogue.messages[:-2])
        return key, replace(call, thought=f"I call the {name}.")
    return key, replace(dialogue, thought="I have the result.")


def _calculator_unused(rng: random.Random, tasks: Sequence[str] = ()) -> Draft:
    """Return a dialogue with a calculator tool, but with a question that does not need the tool."""
    key, example = _draft(rng, tasks or UNCALCULATED)
    tool, _ = draw_tool(rng)
    return key, Dialogue([*system_of(rng), *chat_of(example)], [tool])


def system_of(rng: random.Random) -> list[Message]:
    """Return a list with a system message, or sometimes an empty list."""
    if rng.random() < 0.5:
        return []
    known = ("You are a helpful assistant.", "Answer briefly.", "Use the calculator.")
    text = rng.choice(known) if rng.random() < 0.7 else _prose(rng)
    return [{"role": "system", "content": text}]


def _prose(rng: random.Random) -> str:
    text = " ".join(rng.choices(WORDS, k=rng.randint(2, 12)))
    return text[0].upper() + text[1:] + rng.choice((".", ".", "", "!"))


def _names(rng: random.Random, n: int) -> list[str]:
    return rng.sample(WORDS, n)


# JSON that obeys a schema

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def object_schema(rng: random.Random, properties: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of an object that requires all `properties`.

    Titles, descriptions and the order of the schema's keys are random.
    """
    made = {}
    for name, schema in properties.items():
        own = dict(schema)
        if rng.random() < 0.2:
            own["description"] = _prose(rng)
        if rng.random() < 0.3:
            own = {"title": name.replace("_", " ").title(), **own}
        made[name] = own
    parts: list[tuple[str, object]] = [("type", "object"), ("properties", made)]
    parts.append(("required", list(properties)))
    if rng.random() < 0.3:
        parts.append(("additionalProperties", False))
    if rng.random() < 0.3:
        parts.append(("title", rng.choice(WORDS).title()))
    if rng.random() < 0.5:
        rng.shuffle(parts)
    return dict(parts)


def _asked_in_json(
    rng: random.Random, question: str, properties: dict[str, Any], answer: dict[str, Any]
) -> Dialogue:
    schema = object_schema(rng, properties)
    written = rng.choice(
        (
            lambda it: json.dumps(it, ensure_ascii=False),
            lambda it: json.dumps(it, ensure_ascii=False),
            lambda it: json.dumps(it, ensure_ascii=False, separators=(",", ":")),
            lambda it: json.dumps(it, ensure_ascii=False, indent=2),
        )
    )(schema)
    reply = _assistant(json.dumps(answer, ensure_ascii=False))
    if rng.random() < 0.3:
        system = rng.choice(WORDINGS["json_system"]).replace("{0}", written)
        return Dialogue([{"role": "system", "content": system}, _user(question), reply])
    wording = rng.choice(WORDINGS["json"])
    text = wording.replace("{1}", written).replace("{0}", question)
    return Dialogue([*system_of(rng), _user(text), reply])


def _json_answer(rng: random.Random) -> Draft:
    """Return a question whose answer is a JSON object with one property of a random name."""
    key, example = _draft(rng, _JSON_TASKS)
    items = example.answer.split(", ")
    numbers = all(item.lstrip("-").isdigit() for item in items)
    if example.task in ("sort_numbers", "sort_words", "reverse_list"):
        named = ["items", "list", "sorted", "values", "result"]
        schema = {"type": "array", "items": WHOLE if numbers else TEXT}
        value = [int(item) if numbers else item for item in items]
    else:
        named = ["answer", "result", "value", "output", "number" if numbers else "text"]
        is_number = numbers and rng.random() < 0.8
        schema = WHOLE if is_number else TEXT
        value = int(example.answer) if is_number else example.answer
    name = rng.choice(named) if rng.random() < 0.8 else rng.choice(WORDS)
    return key, _asked_in_json(rng, example.prompt, {name: schema}, {name: value})


_FIELDS = {  # A schema may name the same fact by any of these property names.
    "name": ("name", "name", "first_name", "person", "user"),
    "age": ("age", "age", "years"),
    "city": ("city", "city", "town", "home"),
    "job": ("job", "job", "profession", "work"),
    "pet": ("pet", "animal"),
    "color": ("color", "favorite_color"),
}


def _json_extract(rng: random.Random) -> Draft:
    """Return a question that contains a JSON schema and a text about a person. The answer is a JSON
    object with facts from the text. The schema determines the names of the properties."""
    facts: dict[str, str | int] = {
        "name": _proper(rng),
        "age": rng.randint(1, 99),
        "city": _proper(rng),
        "job": rng.choice(WORDS),
        "pet": rng.choice(WORDS),
        "color": rng.choice(WORDS),
    }
    others = rng.sample(list(facts)[1:], rng.randint(1, 4))
    told = {name: facts[name] for name in facts if name == "name" or name in others}
    rng.shuffle(others)
    clauses = [rng.choice(WORDINGS[f"fact_{name}"]).format(told[name]) for name in others]
    text = f"{told['name']} {_enumerated(clauses)}."
    wanted = rng.sample(list(told), rng.randint(1, len(told)))
    names = {fact: rng.choice(_FIELDS[fact]) for fact in wanted}
    properties = {names[fact]: WHOLE if fact == "age" else TEXT for fact in wanted}
    question = rng.choice(WORDINGS["extract"]).format(text)
    answer = {names[fact]: told[fact] for fact in wanted}
    return f"extract:{sorted(map(str, told.values()))}", _asked_in_json(
        rng, question, properties, answer
    )


def _enumerated(clauses: list[str]) -> str:
    return ", ".join(clauses[:-1]) + (" and " if len(clauses) > 1 else "") + clauses[-1]


def _proper(rng: random.Random) -> str:
    """Return a random proper name of one or two parts. A part is a word, or a string of random
    letters, with a capital first letter."""
    parts = []
    for _ in range(2 if rng.random() < 0.1 else 1):
        letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10)))
        parts.append((rng.choice(WORDS) if rng.random() < 0.6 else letters).title())
    return " ".join(parts)


# Reasoning


def _thoughtful(rng: random.Random, key: str, question: str, thought: str, answer: str) -> Draft:
    return key, Dialogue([*system_of(rng), _user(question), _assistant(answer)], (), thought)


def _think_add(rng: random.Random) -> Draft:
    """Return a chat that asks for the sum of two numbers of up to five digits.

    The assistant's reasoning adds the numbers digit by digit.
    """
    a, b = (rng.randrange(10 ** rng.randint(1, 5)) for _ in "ab")
    question = world.ask(rng, WORDINGS["add"] + WORDINGS["add_signs"], a, b)
    return _thoughtful(rng, f"add:{sorted((a, b))}", question, column_sums(a, b), str(a + b))


def column_sums(a: int, b: int) -> str:
    """Return the steps of a column addition as text, from the last digits to the first.

    For 48 + 67, return "8 + 7 = 15, 4 + 6 + 1 = 11, 0 + 0 + 1 = 1".
    """
    steps, carry = [], 0
    while a or b or carry or not steps:
        total = a % 10 + b % 10 + carry
        carried = f" + {carry}" if carry else ""
        steps.append(f"{a % 10} + {b % 10}{carried} = {total}")
        a, b, carry = a // 10, b // 10, total // 10
    return ", ".join(steps)


def _think_multiply(rng: random.Random) -> Draft:
    """Return a chat that asks for the product of two two-digit numbers.

    The assistant's reasoning multiplies by the tens, then by the ones.
    """
    a, b = (rng.randrange(world.CORE + 1, 100) for _ in "ab")
    tens, ones = b // 10 * 10, b % 10
    question = world.ask(rng, WORDINGS["multiply"] + WORDINGS["multiply_signs"], a, b)
    thought = f"{a} * {tens} = {a * tens}, {a} * {ones} = {a * ones}, {a * tens} + {a * ones}"
    return _thoughtful(rng, f"multiply:{sorted((a, b))}", question, thought, str(a * b))


def _think_words(rng: random.Random) -> Draft:
    """Return a chat that asks for a calculation with numbers in words.

    The assistant's reasoning is the calculation in digits.
    """
    name = rng.choice(("add", "subtract", "multiply"))
    a, b = rng.randrange(100), rng.randrange(10 if name == "multiply" else 100)
    if name == "subtract" and a < b:
        a, b = b, a
    sign, result = {"add": ("+", a + b), "subtract": ("-", a - b), "multiply": ("*", a * b)}[name]
    question = world.ask(rng, WORDINGS[name], number_words(a), number_words(b))
    pair = [a, b] if name == "subtract" else sorted((a, b))
    core = "!" if max(pair) <= world.CORE else ""
    thought = f"{a} {sign} {b} = {result}"
    return _thoughtful(rng, f"{name}:{pair}{core}", question, thought, number_words(result))


def _think_count_letter(rng: random.Random) -> Draft:
    """Return a chat that asks how often a letter occurs in a word of up to 16 letters.

    The assistant's reasoning spells the word, with a running count after each occurrence.
    """
    word = "".join(_names(rng, rng.choice((1, 1, 2))))
    if rng.random() < 0.5:
        letters = rng.sample(string.ascii_lowercase, rng.choice((3, 26)))
        word = "".join(rng.choices(letters, k=rng.randint(3, 16)))
    word = word[:16]
    letter = rng.choice(word if rng.random() < 0.9 else string.ascii_lowercase)
    steps, count = [], 0
    for own in word:
        count += own == letter
        steps.append(f"{own} {count}" if own == letter else own)
    question = world.ask(rng, WORDINGS["count_letter"], letter, word)
    return _thoughtful(rng, f"word:{word}", question, ", ".join(steps), str(count))


def _think_other(rng: random.Random) -> Draft:
    """Return a chat with a question that needs no steps of reasoning.

    The assistant's reasoning is the sentence `AT_ONCE`.
    """
    key, example = _draft(rng, _AT_ONCE_TASKS)
    return _thoughtful(rng, key, example.prompt, AT_ONCE, example.answer)


def _think_json(rng: random.Random) -> Draft:
    key, dialogue = rng.choice((_json_answer, _json_extract))(rng)
    return key, replace(dialogue, thought="I fill in the fields.")


UNCALCULATED = (
    *("sort_numbers", "sort_words", "sort_letters", "reverse_word", "reverse_list", "spell"),
    *("count_letters", "count_letter", "count_items", "count", "count_words", "other"),
)
"""Tasks of `world` that the model answers without the calculator tool, even if there is one."""
_AT_ONCE_TASKS = (
    *(task for task in UNCALCULATED if task != "count_letter"),
    "subtract",
    "multiply",
)
_JSON_TASKS = (
    *("add", "subtract", "multiply", "sort_numbers", "sort_words", "reverse_word"),
    *("reverse_list", "count_letters", "count_letter", "count_items"),
)


def _draft(rng: random.Random, tasks: Sequence[str]) -> tuple[str, Example]:
    task = rng.choice(tasks)
    key, prompt, answer = world.TASKS[task](rng)
    return key, Example(task, prompt, answer)


TASKS: dict[str, Maker] = {
    "calculator": _calculator,
    "calculator_unused": _calculator_unused,
    "json_answer": _json_answer,
    "json_extract": _json_extract,
    "think_add": _think_add,
    "think_multiply": _think_multiply,
    "think_words": _think_words,
    "think_count_letter": _think_count_letter,
    "think_other": _think_other,
    "think_json": _think_json,
    "think_calculator": _think_calculator,
}
