"""Test the training dialogues: correct answers, the chat template, and held-out content."""

import json
import random
import re

import jsonschema
import pytest
from transformers import AutoTokenizer

from jpaged.parsing.answer import AnswerParser
from jpaged.parsing.stream import CallArguments, CallStart, Content
from jpaged.terminal.tools_demo import calculate, run_tool_call
from tools.tiny.data import BatchShape, dialogue_document, make_batch, pack, raw_document
from tools.tiny.dialogues import TASKS, Dialogue, column_sums, draw_calculation, sample_dialogues
from tools.tiny.tokenizer import IM_END, save_tokenizer
from tools.tiny.world import Example


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 1536)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("task", TASKS)
def test_training_documents_equal_the_text_of_the_chat_template(tokenizer, task):
    for dialogue in sample_dialogues(1, 25, task):
        document = dialogue_document(dialogue)
        options = {"tools": list(dialogue.tools) or None, "tokenize": False}
        opened = tokenizer.apply_chat_template(
            dialogue.messages[:-1],
            add_generation_prompt=True,
            enable_thinking=dialogue.thought is not None,
            **options,
        )
        prompt = tokenizer(opened).input_ids
        assert document.ids[: len(prompt)] == prompt
        answer = document.ids[len(prompt) : -1]
        assert all(document.loss[len(prompt) : -1])
        assert not document.loss[len(prompt) - 1]
        assert answer.index(IM_END) == len(answer) - 1
        written = tokenizer.apply_chat_template(dialogue.messages, **options)
        if dialogue.thought is None:
            assert tokenizer(written).input_ids == document.ids
        else:  # The chat template leaves out the reasoning of earlier turns.
            thought = f"<think>\n{dialogue.thought}\n</think>\n\n"
            assert written == tokenizer.decode(document.ids).replace(thought, "")


def last_parts(tokenizer, dialogue: Dialogue, message: int) -> tuple[str, str, str]:
    """Return what jpaged's parser reads from one message: content, tool name and arguments."""
    document = dialogue_document(Dialogue(dialogue.messages[: message + 1], dialogue.tools))
    text = tokenizer.decode(document.ids).rpartition("<|im_start|>assistant\n")[2]
    parser = AnswerParser(tool_calls="hermes", reasoning="qwen3", tools=dialogue.tools)
    events = [*parser.feed(text.removesuffix("<|im_end|>\n")), *parser.end()]
    return (
        "".join(each.text for each in events if isinstance(each, Content)),
        "".join(each.name for each in events if isinstance(each, CallStart)),
        "".join(each.text for each in events if isinstance(each, CallArguments)),
    )


def test_tool_calls_of_dialogues_parse_and_have_correct_results(tokenizer):
    for dialogue in sample_dialogues(2, 60, "calculator"):
        *_, question, call, result, answer = dialogue.messages
        content, name, arguments = last_parts(tokenizer, dialogue, len(dialogue.messages) - 3)
        function = call["tool_calls"][0]["function"]
        assert (content, name) == ("", dialogue.tools[0]["function"]["name"])
        assert json.loads(arguments) == function["arguments"]
        jsonschema.validate(json.loads(arguments), dialogue.tools[0]["function"]["parameters"])
        (expression,) = function["arguments"].values()
        result_text = run_tool_call("calculator", json.dumps({"expression": expression}))
        if result_text.startswith("Error"):
            assert result["content"].startswith("Error: ")
            assert answer["content"] == f"The {name} says: {result['content']}"
        else:
            assert result["content"] == result_text
            assert answer["content"] == f"{expression} = {result_text}"
        assert question["role"] == "user"


def test_calculator_expressions_match_the_question():
    rng = random.Random(0)
    for _ in range(300):
        made = draw_calculation(rng)
        numbers = re.findall(r"[\d.]*\d", made.question)
        if numbers:
            assert sorted(re.findall(r"[\d.]*\d", made.expression)) == sorted(numbers)


@pytest.mark.parametrize("task", ["json_answer", "json_extract", "think_json"])
def test_json_answers_match_their_schema(task):
    for dialogue in sample_dialogues(3, 60, task):
        text = "\n".join(message["content"] for message in dialogue.messages[:-1])
        found = [m.start() for m in re.finditer(r"\{", text)]
        schema, _ = json.JSONDecoder().raw_decode(text[found[0] :])
        answer = json.loads(dialogue.messages[-1]["content"])
        jsonschema.validate(answer, schema)
        assert list(answer) == list(schema["properties"])
        for value in answer.values():
            if task == "json_extract":
                assert str(value) in text


def test_reasoning_is_arithmetically_correct():
    for task in ("think_add", "think_multiply", "think_words"):
        for dialogue in sample_dialogues(4, 60, task):
            for step in (dialogue.thought or "").split(", "):
                left, equals, right = step.partition(" = ")
                assert not equals or calculate(left) == right
    assert column_sums(48, 957) == "8 + 7 = 15, 4 + 5 + 1 = 10, 0 + 9 + 1 = 10, 0 + 0 + 1 = 1"


def test_held_out_content_is_not_in_the_training_data():
    def expressions(held_out: bool, n: int) -> set[str]:
        chats = sample_dialogues(5, n, "calculator", held_out=held_out)
        calls = [m["tool_calls"][0] for c in chats for m in c.messages if "tool_calls" in m]
        return {text for call in calls for text in call["function"]["arguments"].values()}

    assert not expressions(True, 200) & expressions(False, 2000)


def test_samples_are_reproducible_and_unknown_tasks_are_refused():
    assert sample_dialogues(7, 5, "calculator") == sample_dialogues(7, 5, "calculator")
    with pytest.raises(ValueError, match="task must be one of calculator"):
        sample_dialogues(0, 1, "weather")


def test_every_row_begins_with_a_new_document():
    sizes = []

    def next_document(room: int):
        sizes.append(room)
        return raw_document(Example("spell", "a" * (60 if room == 100 else 40), "b"))

    rows = pack(next_document, 3, 100)
    assert sizes.count(100) == 3
    assert (rows.segments.max(axis=1) == 1).all()
    with pytest.raises(ValueError, match="a document has 103 tokens, but a row has only 100"):
        pack(lambda _: raw_document(Example("spell", "a" * 100, "b")), 1, 100)


def test_long_training_rows_contain_tool_calls_and_chats_of_many_turns():
    _, long = make_batch(1, 2, BatchShape(short_rows=1, long_rows=12))
    texts = [bytes(int(i) for i in row if i < 256).decode() for row in long.tokens]
    assert any("<tool_response>" in text for text in texts)
    assert any('"properties"' in text for text in texts)
    assert sum(text.count("assistant\n") > 12 for text in texts) > 2
    assert (long.segments > 0).mean() > 0.9
