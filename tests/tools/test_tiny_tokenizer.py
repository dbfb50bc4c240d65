"""Test the bundled tokenizer: one token per byte, special tokens and the chat template."""

import pytest
from transformers import AutoTokenizer

from tools.tiny.data import chat_document
from tools.tiny.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCAB_SIZE, save_tokenizer
from tools.tiny.world import sample_examples


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 1536)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "text", ["Count from 1 to 20.\n", "naïve 😀 é \x00\t\r\n  two  spaces", ""]
)
def test_token_ids_are_the_bytes_of_the_text(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_the_expected_ids(tokenizer):
    assert VOCAB_SIZE % 8 == 0
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(256, VOCAB_SIZE))
    assert tokenizer.decode([72, 105, 258, 256], skip_special_tokens=True) == "Hi"


def test_chat_template_equals_the_training_format(tokenizer):
    assert tokenizer.chat_template == CHAT_TEMPLATE
    example = sample_examples(0, 1)[0]
    messages = [
        {"role": "system", "content": "Answer briefly."},
        *example.messages,
        {"role": "assistant", "content": example.answer},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer(text).input_ids == chat_document([example], "Answer briefly.").ids
    opened = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(opened + example.answer)
