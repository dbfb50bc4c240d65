"""Test the calculator and the tool conversations of `--tools-demo`."""

import json
import operator
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import jpaged
from jpaged import SamplingParams, TextDelta
from jpaged.__main__ import main
from jpaged.terminal.tools_demo import CALCULATOR, QUESTIONS, ToolsDemo, calculate, run_tool_call

Messages = Sequence[dict[str, Any]]


class ScriptedEngine:
    """An engine that answers each request with the next text in `script`."""

    script: tuple[str, ...] = ()
    writes_tools = True
    press: Callable[[int], None] = staticmethod(lambda i: None)

    def __init__(self, **options: Any):
        self.options, self.prompts, self.is_shut_down = options, list[str](), False
        self.left = list(self.script)
        self.params: SamplingParams | None = None

    def render_chat(self, messages: Messages, tools: Any = None) -> list[int]:
        return list(json.dumps([messages, tools if self.writes_tools else None]).encode())

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[TextDelta]:
        self.prompts.append(bytes(prompt).decode())
        self.params = params
        text = self.left.pop(0)
        for i in range(0, len(text), 7):
            self.press(i)
            yield TextDelta(text[i : i + 7])

    def abort_all(self) -> None:
        self.is_shut_down = True


def call_of(expression: str) -> str:
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def press_ctrl_c_at(index: int) -> Callable[[int], None]:
    return lambda i: os.kill(os.getpid(), signal.SIGINT) if i == index else None


def demo_of(engine: Any, *script: str) -> ToolsDemo:
    engine.left = list(script)
    return ToolsDemo(engine, SamplingParams(temperature=0, max_tokens=64))


# The calculator


def test_calculator_computes_random_expressions():
    rng = random.Random(0)
    for _ in range(200):
        a, b, c = (rng.randint(-999, 999) for _ in "abc")
        signs = rng.choices("+-*", k=2)
        text = f"({a} {signs[0]} {b}) {signs[1]} {c}"
        compute = {"+": operator.add, "-": operator.sub, "*": operator.mul}
        assert calculate(text) == str(compute[signs[1]](compute[signs[0]](a, b), c))
        if c:
            expected = str(a // c) if a % c == 0 else f"{a / c:.10g}"
            assert calculate(f"{a} / {c}") == expected


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("10 - 4 - 3", "3"),
        ("12--5", "17"),
        ("-(2 + 3)", "-5"),
        ("0.1 + 0.2", "0.3"),
        ("12.50 * 4", "50"),
        ("1 / 3", "0.3333333333"),
        (" 7 ", "7"),
        ("333333333333333 * 3", "999999999999999"),
        ("1000000000000000", "1e+15"),
        ("1" + "0" * 40, "1e+40"),
    ],
)
def test_calculator_results_are_exact(expression: str, value: str):
    assert calculate(expression) == value


NOT_ARITHMETIC = [
    "e",
    "2(3)",
    "1; 2",
    "1\x00",
    "2 ** 9999999",
    "__import__('os').system('true')",
    "x",
]
NOT_ARITHMETIC += ["(lambda: 1)()", "[1][0]", "'1' * 9", "True + 1", "1j * 2", "1 < 2", "1 // 2"]


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        *((expression, "only numbers") for expression in NOT_ARITHMETIC),
        ("1 / 0", "division by zero"),
        ("1 / (2 - 2)", "division by zero"),
        ("", "empty"),
        ("1 +", "not an arithmetic expression"),
        ("(" * 199, "not an arithmetic expression"),
        ("1e308 * 1e308", "too large"),
        ("1e999", "too large"),
        ("1" * 201, "more than 200 characters"),
    ],
)
def test_calculator_refuses_everything_but_arithmetic(expression: str, what: str):
    with pytest.raises(ValueError, match=what):
        calculate(expression)


def test_dashboard_and_tools_demo_define_the_same_calculator_tool():
    static = Path(jpaged.__file__).parent / "serve" / "dashboard" / "static"
    script = (static / "tools.js").read_text(encoding="utf-8")
    found = re.search(r"const CALCULATOR = ({.*?^});", script, re.DOTALL | re.MULTILINE)
    assert found
    named = re.sub(r"(\w+):", r'"\1":', found[1])
    assert json.loads(re.sub(r",(\s*[}\]])", r"\1", named)) == CALCULATOR


def test_calculator_returns_a_number_or_an_error_for_random_characters():
    rng = random.Random(1)
    for _ in range(2000):
        text = "".join(rng.choices("0123456789.+-*/() eEj_x'\"[]", k=rng.randint(1, 60)))
        result = run_tool_call("calculator", json.dumps({"expression": text}))
        assert result.startswith("Error: ") or float(result) is not None, text


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculator", '{"expression": "1 + 1"}', "2"),
        ("calculator", '{"expression": 2}', "Error: the argument 'expression' must be a string"),
        ("calculator", "[]", "Error: the argument 'expression' must be a string"),
        ("calculator", "[" * 5000, "Error: "),
        ("calculator", '{"expression": "1', "Error: "),
        ("weather", "{}", "Error: there is no tool 'weather'"),
    ],
)
def test_invalid_tool_calls_return_errors_to_the_model(name: str, arguments: str, result: str):
    assert run_tool_call(name, arguments).startswith(result)


# Conversations


def test_model_calls_the_calculator_and_answers_with_its_result(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
):
    demo = demo_of(engine, call_of("17 * 3"), "17 * 3 = 51")
    messages = demo.ask("What is 17 * 3?")
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    (call,) = messages[1]["tool_calls"]
    assert messages[2] == {"role": "tool", "tool_call_id": call["id"], "content": "51"}
    out = capsys.readouterr().out
    assert out == (
        "question  What is 17 * 3?\n"
        'call      calculator {"expression": "17 * 3"}\n'
        "result    51\n"
        "answer    17 * 3 = 51\n"
    )
    (first, tools), (second, again) = map(json.loads, engine.prompts)
    assert tools == again == [CALCULATOR]
    assert (first, second[0]) == (messages[:1], messages[0])
    assert second[1]["tool_calls"][0]["function"]["arguments"] == {"expression": "17 * 3"}
    assert engine.params is not None
    assert not engine.params.skip_special_tokens


def test_demo_handles_reasoning_and_multiple_or_malformed_tool_calls(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
):
    calls = f"<think>\nTwo.\n</think>\n\n{call_of('1 + 1')}\n{call_of('1 / 0')}"
    broken = '<tool_call>\n{"name": "calculator", "arguments": {"expression": 1 +}}\n</tool_call>'
    demo = demo_of(engine, calls, broken, "Done.")
    messages = demo.ask("?")
    results = [each["content"] for each in messages if each["role"] == "tool"]
    assert results[:2] == ["2", "Error: division by zero"]
    assert results[2].startswith("Error: ")
    assert messages[-1] == {"role": "assistant", "content": "Done."}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line and not line.startswith(" ")][:4] == [
        *("question", "thought", "call", "call")
    ]


def test_conversation_ends_after_the_maximum_number_of_tool_calls(engine: ScriptedEngine):
    demo = demo_of(engine, *[call_of("1 + 1")] * 20)
    assert len(demo.ask("?")) == 1 + 2 * 8


def test_chat_template_without_tools_is_refused(engine: ScriptedEngine):
    engine.writes_tools = False
    with pytest.raises(ValueError, match="ignores tools; omit --model"):
        demo_of(engine)


def test_ctrl_c_keeps_the_text_so_far(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]):
    engine.press = press_ctrl_c_at(7)
    before = signal.getsignal(signal.SIGINT)
    demo = demo_of(engine, "Seven and seven more", "never")
    messages = demo.ask("?")
    assert demo.is_interrupted
    assert messages[-1]["content"] == "Seven and seve"
    assert capsys.readouterr().out == "question  ?\nanswer    Seven and seve\n"
    assert signal.getsignal(signal.SIGINT) is before


# The command line


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedEngine]:
    """Return a list of the engines that the command line creates. Each engine answers "Yes."."""
    engines: list[ScriptedEngine] = []

    def make(**options: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine(**options))
        engines[-1].left = ["Yes."] * len(QUESTIONS)
        return engines[-1]

    monkeypatch.setitem(vars(jpaged), "Engine", make)
    return engines


def test_tools_demo_asks_the_example_questions_or_the_prompt(
    made: list[ScriptedEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["--tools-demo"]) == 0
    out = capsys.readouterr().out
    assert [q in out for q in QUESTIONS] == [True] * len(QUESTIONS)
    assert main(["--tools-demo", "Is it?"]) == 0
    assert capsys.readouterr().out == "question  Is it?\nanswer    Yes.\n"
    assert all(engine.is_shut_down for engine in made)


def test_ctrl_c_ends_the_demo(made: list[ScriptedEngine], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ScriptedEngine, "press", staticmethod(press_ctrl_c_at(0)))
    assert main(["--tools-demo"]) == 130
    assert len(made[0].prompts) == 1
    assert made[0].is_shut_down


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tool-demo"], "unknown option --tool-demo: did you mean --tools-demo?"),
        (["--tools-demo=x"], "ignored explicit argument"),
        (["--tools-demo", "--chat"], "--tools-demo cannot be used with --chat"),
        (["--tools-demo", "--stats"], "--tools-demo cannot be used with --stats"),
        (["--tools-demo", ""], "the prompt is empty"),
        (["--tools-demo", "--n", "2", "--temperature", "1"], "--tools-demo prints one answer"),
        (["--tools-demo", "--beam-width", "2"], "--tools-demo prints one answer"),
    ],
)
def test_invalid_demo_options_are_refused(
    argv: list[str], message: str, made: list[ScriptedEngine], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not made
