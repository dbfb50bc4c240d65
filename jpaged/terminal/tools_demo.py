"""Demo of tool calls (`python -m jpaged --tools-demo`). The model calls a calculator, which runs in
this process, and answers with the result."""

import ast
import contextlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from jpaged.parsing.answer import AnswerParser
from jpaged.parsing.stream import CallArguments, CallEnd, CallStart, Content, ParserEvent, Reasoning
from jpaged.sampling_params import SamplingParams
from jpaged.terminal.session import interrupt_flag

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
QUESTIONS = (
    "What is 48273 * 9164?",
    "Divide 1000000 by 7",
    "Calculate (12.5 + 7.25) * 16",
    "Sort pear, apple, fig",
)
"""Default questions of the demo. The last question needs no calculator."""

MAX_EXPRESSION_LENGTH = 200
"""Maximum number of characters in an expression for the calculator."""

_ALLOWED_CHARACTERS = re.compile(r"[-+*/(). 0-9eE]+")
_UNSUPPORTED_MESSAGE = "only numbers, + - * / and parentheses can be computed"
_MAX_EXACT_DIGITS = 15
_MAX_MODEL_CALLS = 8

_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}

DemoMessage = dict[str, Any]


def calculate(expression: str) -> str:
    """Compute an expression of numbers, + - * / and parentheses.

    Integers of up to 15 digits are exact. Other results have ten significant digits.

    Raises:
        ValueError: The expression is invalid, has more than `MAX_EXPRESSION_LENGTH` characters,
            divides by zero, or has a result that is too large.
    """
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError(f"the expression has more than {MAX_EXPRESSION_LENGTH} characters")
    if not _ALLOWED_CHARACTERS.fullmatch(expression):
        raise ValueError(_UNSUPPORTED_MESSAGE if expression else "the expression is empty")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
        exact = value.denominator == 1 and abs(value.numerator) < 10**_MAX_EXACT_DIGITS
        return str(value.numerator) if exact else f"{float(value):.10g}"
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None


def _evaluate(node: ast.AST) -> Fraction:
    """Compute an expression from its syntax tree. Python code in the expression is never run."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if isinstance(node.value, float) and math.isinf(node.value):
            raise OverflowError
        return Fraction(repr(node.value))
    raise ValueError(_UNSUPPORTED_MESSAGE)


def run_tool_call(name: str, arguments: str) -> str:
    """Run a tool call of the model.

    Args:
        name: Name of the tool.
        arguments: Arguments of the call as JSON text.

    Returns:
        The result. For an invalid call, a text that explains the error to the model.
    """
    try:
        parsed = json.loads(arguments)
        if name != CALCULATOR["function"]["name"]:
            raise ValueError(f"there is no tool {name!r}")
        if not isinstance(parsed, dict) or not isinstance(parsed.get("expression"), str):
            raise ValueError("the argument 'expression' must be a string")
        return calculate(parsed["expression"])
    except (ValueError, RecursionError) as error:
        return f"Error: {error}"


class ToolsDemo:
    """Conversations in which the model can call a calculator. Every step is printed to stdout.

    Attributes:
        is_interrupted: Whether Ctrl-C interrupted the last conversation.

    Args:
        engine: Engine whose model has a chat template with tools.
        params: Sampling parameters of each message of the model.
        family: Format in which the model writes tool calls, one of `TOOL_CALL_FAMILIES`.
        reasoning: Format in which the model writes reasoning, one of `REASONING_FAMILIES`.

    Raises:
        ValueError: The chat template ignores tools.
    """

    def __init__(
        self,
        engine: "Engine",
        params: SamplingParams,
        *,
        family: str = "hermes",
        reasoning: str = "qwen3",
    ):
        self._engine = engine
        # Keep special tokens in the text, because the tags of tool calls may be special tokens.
        self._params = replace(params, skip_special_tokens=False)
        self.is_interrupted = False
        self._family, self._reasoning = family, reasoning
        messages = [{"role": "user", "content": "a"}]
        if engine.render_chat(messages) == engine.render_chat(messages, tools=[CALCULATOR]):
            raise ValueError(
                "--tools-demo: the chat template of the model ignores tools; omit --model to use "
                "the bundled model, or choose a model whose template supports tools"
            )

    def ask(self, question: str) -> list[DemoMessage]:
        """Ask a question and run the model's tool calls, until the model answers without a call.

        The conversation also ends at Ctrl-C, or after the maximum number of messages of the model.

        Returns:
            The messages of the conversation in OpenAI's format. After Ctrl-C, the last message may
            be incomplete.
        """
        printer, messages = _StepPrinter(), [{"role": "user", "content": question}]
        printer.print_step("question", question)
        with interrupt_flag() as interrupted:
            for _ in range(_MAX_MODEL_CALLS):
                message = self._generate_message(messages, printer, interrupted)
                messages.append(message)
                if interrupted.is_set() or "tool_calls" not in message:
                    break
                for call in message["tool_calls"]:
                    function = call["function"]
                    result = run_tool_call(function["name"], function["arguments"])
                    printer.print_step("result", result)
                    tool_message = {"role": "tool", "tool_call_id": call["id"], "content": result}
                    messages.append(tool_message)
        printer.end_line()
        self.is_interrupted = interrupted.is_set()
        return messages

    def _generate_message(
        self, messages: Sequence[DemoMessage], printer: "_StepPrinter", interrupted: threading.Event
    ) -> DemoMessage:
        """Return the next message of the model, and print the message while it is generated."""
        content, calls = "", list[DemoMessage]()
        prompt_messages = [_parse_call_arguments(message) for message in messages]
        prompt = self._engine.render_chat(prompt_messages, tools=[CALCULATOR])
        for event in self._stream_events(prompt, interrupted):
            printer.print_event(event)
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallStart):
                function = {"name": event.name, "arguments": ""}
                calls.append({"id": event.id, "type": "function", "function": function})
            elif isinstance(event, CallArguments):
                calls[event.index]["function"]["arguments"] += event.text
        message: DemoMessage = {"role": "assistant", "content": content}
        return message | {"tool_calls": calls} if calls else message

    def _stream_events(
        self, prompt: list[int], interrupted: threading.Event
    ) -> Iterator[ParserEvent]:
        parser = AnswerParser(
            reasoning=self._reasoning, tool_calls=self._family, tools=[CALCULATOR]
        )
        with contextlib.closing(self._engine.stream(prompt, self._params)) as deltas:
            for delta in deltas:
                yield from parser.feed(delta.text)
                if interrupted.is_set():
                    return
        yield from parser.end()


def _parse_call_arguments(message: DemoMessage) -> DemoMessage:
    """Return a copy of a message for chat templates, which need tool-call arguments as objects.

    Arguments that are not valid JSON stay text.
    """
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        with contextlib.suppress(ValueError, RecursionError):
            function = {**function, "arguments": json.loads(function["arguments"])}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


class _StepPrinter:
    """Prints the steps of a conversation to stdout, each on a line with a label such as "call"."""

    def __init__(self) -> None:
        self._label = ""

    def print_step(self, label: str, text: str) -> None:
        """Print one line with a label and a text, such as "question" and the user's question."""
        self._begin_line(label)
        print(text, end="", flush=True)
        self.end_line()

    def print_event(self, event: ParserEvent) -> None:
        """Print new text of the model. If the label of the text ("thought", "answer" or "call")
        changes, start a new line."""
        if isinstance(event, CallStart):
            self._begin_line("call")
            print(event.name, end=" ")
        elif isinstance(event, CallEnd):
            self.end_line()
        else:
            label = {Reasoning: "thought", Content: "answer"}.get(type(event), "call")
            if self._label != label:
                self._begin_line(label)
            print(event.text, end="", flush=True)

    def end_line(self) -> None:
        """Print a newline if the current line has text."""
        if self._label:
            print(flush=True)
        self._label = ""

    def _begin_line(self, label: str) -> None:
        self.end_line()
        print(f"{label:<9} ", end="")
        self._label = label
