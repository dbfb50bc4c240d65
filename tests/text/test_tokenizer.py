import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from text_helpers import (
    CHAT_TEMPLATE,
    EOS,
    START,
    byte_level,
    byte_level_backend,
    llama_like,
    metaspace,
    mistral_like,
    qwen_like,
    save,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import jpaged.text.tokenizer
from jpaged.text.tokenizer import Tokenizer, check_messages

TEXTS = ["hello world", "  two  spaces", "你好 😀 e\u0301", f"a{EOS}b", "", "def f():\n\treturn"]
USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize("text", TEXTS)
def test_encoded_text_decodes_unchanged(text: str):
    ids = byte_level().encode(text)
    assert byte_level().decode(ids) == text


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("declared", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_tokenizer_loaded_from_a_folder_behaves_like_autotokenizer(
    make, declared: str, tmp_path: Path
):
    folder = save(make(), tmp_path)
    edit(folder / "tokenizer_config.json", tokenizer_class=declared)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    ours, reference = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.eos_token_id, ours.bos_token_id) == (
        reference.eos_token_id,
        reference.bos_token_id,
    )
    assert ours.vocab_size == len(reference) == len(make().hf_tokenizer)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == reference.encode(text) == make().encode(text)
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip
            )


def test_post_processor_of_the_tokenizer_adds_the_bos_token(tmp_path: Path):
    folder = save(metaspace(), tmp_path)
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    single = [start, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    edit(folder / "tokenizer.json", post_processor=template)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("hello")
    assert ids == [tokenizer.bos_token_id, *metaspace().encode("hello")]
    assert tokenizer.encode("hello", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"


def test_vocabulary_and_merges_load_without_tokenizer_json(tmp_path: Path):
    """OPT's checkpoint has GPT-2's two files and adds a token before the text."""
    byte_level_backend().model.save(str(tmp_path))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": START,
        "eos_token": EOS,
        "unk_token": EOS,
        "add_bos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("hello world") == [
        tokenizer.bos_token_id,
        *byte_level().encode("hello world"),
    ]


def test_tokenizer_lists_special_tokens_and_can_skip_them_while_decoding():
    tokenizer = byte_level()
    ids = tokenizer.encode(f"a{START}b{EOS}")
    assert tokenizer.special_token_ids == {ids[1], ids[-1]}
    assert tokenizer.eos_token_id == ids[-1]
    assert tokenizer.bos_token_id is None
    assert tokenizer.decode(ids) == f"a{START}b{EOS}"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_ids_beyond_the_vocabulary_decode_to_empty_text():
    tokenizer = byte_level()
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_lone_surrogate_error_names_its_position():
    with pytest.raises(ValueError, match=r"prompt has a lone surrogate \(U\+D83D\) at character 2"):
        byte_level().encode("ab\ud83d")


def test_folder_without_a_tokenizer_is_rejected(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no tokenizer could be .*skip_tokenizer_init"):
        Tokenizer.from_folder(tmp_path)


def test_code_in_a_checkpoint_never_runs(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    auto_map = {"AutoTokenizer": ["tokenization_evil.Evil", None]}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": auto_map})
    )
    mark = tmp_path / "ran"
    (tmp_path / "tokenization_evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        Tokenizer.from_folder(tmp_path)
    assert not mark.exists()


# Long texts

WORDS = ("hello", "the world", "end", "it's", "12345", "你好 世界", "é", "\n", "\n\n", "f(1)", "😀")
MAKERS = [byte_level, metaspace, mistral_like, qwen_like, llama_like]


def prose(num_words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice(" \n  ") for _ in range(num_words))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("special", [True, False])
def test_encoding_only_the_last_tokens_of_a_text_equals_the_end_of_the_full_encoding(
    make, special: bool
):
    tokenizer = make()
    for seed, length in enumerate([0, 1, 10, 2000, 4000, 6000]):
        text = prose(length, seed) + f"{EOS} and the end of the world"
        whole = tokenizer.encode(text, add_special_tokens=special)
        for last in (1, 2, 17, 100, 10**6):
            ids = tokenizer.encode(text, add_special_tokens=special, last=last)
            assert ids == whole[-last:]


@pytest.mark.parametrize("make", MAKERS)
def test_last_tokens_of_a_text_without_word_boundaries_are_encoded(make):
    """The requested number of tokens is returned, and they decode to the end of the text."""
    tokenizer = make()
    for text in ("你好世界" * 20_000, "7" * 60_000, " " * 60_000, "hello" * 12_000):
        ids = tokenizer.encode(text, add_special_tokens=False, last=50)
        assert len(ids) == 50
        assert text.endswith(tokenizer.decode(ids).lstrip("�"))


def test_only_part_of_a_long_text_is_tokenized_to_get_the_last_tokens_or_check_the_length(
    monkeypatch: pytest.MonkeyPatch,
):
    tokenizer, text = byte_level(), prose(200_000)
    looked_at = watch_encode(tokenizer, monkeypatch)
    ids = tokenizer.encode(text, last=20)
    assert len(ids) == 20
    assert sum(looked_at) < 50_000 < len(text)
    looked_at.clear()
    assert tokenizer.is_longer(text, 1000)
    assert sum(looked_at) < 50_000
    # This text is so short that `is_longer` tokenizes all of it.
    assert not tokenizer.is_longer("a" * 5000, 1000)
    assert tokenizer.is_longer("\n" * 50_000, 1000) == (len(tokenizer.encode("\n" * 50_000)) > 1000)


def test_is_longer_returns_whether_a_text_has_more_tokens_than_a_limit():
    tokenizer = byte_level()
    for text in (prose(20_000), "hello world " * 5000, "你" * 20_000):
        num = len(tokenizer.encode(text))
        assert not tokenizer.is_longer(text, num)
        assert tokenizer.is_longer(text, num // 10)


def watch_encode(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list. Each later call of the tokenizer's `encode` appends the length of its text."""
    lengths, encode = list[int](), tokenizer.hf_tokenizer.encode

    def watched(text: str, **options: object) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer.hf_tokenizer, "encode", watched)
    return lengths


# Chat


def test_chat_template_renders_all_messages():
    tokenizer = byte_level()
    messages = [USER, {"role": "assistant", "content": "hi"}]
    opened = tokenizer.apply_chat_template(messages)
    text = f"{START}user\nhello{EOS}{START}assistant\nhi{EOS}"
    assert opened == tokenizer.encode(f"{text}{START}assistant\n")
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == tokenizer.encode(
        text
    )
    assert tokenizer.apply_chat_template([USER], tone="!") == tokenizer.encode(
        f"{START}user\nhello{EOS}{START}assistant\n!"
    )


def test_chat_template_argument_is_used(tmp_path: Path):
    ids = metaspace().apply_chat_template([USER], chat_template="{{ messages[0].content }}")
    assert metaspace().decode(ids, skip_special_tokens=True) == "hello"


def test_tokenizer_without_a_chat_template_is_rejected():
    assert not metaspace().has_chat_template
    with pytest.raises(ValueError, match="no chat template: pass chat_template="):
        metaspace().apply_chat_template([USER])


def test_failing_chat_template_raises_value_error():
    with pytest.raises(ValueError, match="template refused the messages: no such role"):
        byte_level().apply_chat_template([{"role": "forbidden", "content": "x"}])
    with pytest.raises(ValueError, match="template refused the messages"):
        byte_level().apply_chat_template([USER], chat_template="{{ 1 + messages[0].content }}")
    with pytest.raises(ValueError, match="template refused the messages"):
        byte_level().apply_chat_template([USER], chat_template="{% broken")


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("hello", TypeError, "messages must be a list .* got str"),
        (USER, TypeError, "messages must be a list .* got dict"),
        ([], ValueError, "messages is empty"),
        ([USER, "x"], TypeError, r"messages\[1\] must be a dict, got str"),
        ([{"content": "x"}], ValueError, r"messages\[0\] has no 'role'"),
        ([{"role": "user"}], ValueError, r"messages\[0\] has no 'content'"),
        ([{"role": 1, "content": "x"}], TypeError, r"messages\[0\]\['role'\] must be a string"),
        ([{"role": "", "content": "x"}], ValueError, r"messages\[0\]\['role'\] is empty"),
        ([{"role": "user", "content": None}], TypeError, r"\['content'\] must be .* NoneType"),
        ([{"role": "user", "content": "\udc00"}], ValueError, r"\['content'\] has a lone surr"),
    ],
)
def test_malformed_messages_are_rejected(messages: object, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        check_messages(messages)


def test_message_with_tool_calls_may_lack_content():
    check_messages([{"role": "assistant", "content": None, "tool_calls": [{}]}])
    check_messages([{"role": "assistant", "tool_calls": [{}]}])


def test_saved_chat_template_is_loaded(tmp_path: Path):
    tokenizer = Tokenizer.from_folder(save(byte_level(), tmp_path))
    assert tokenizer.hf_tokenizer.chat_template == CHAT_TEMPLATE
    assert type(tokenizer.hf_tokenizer) is PreTrainedTokenizerFast


def test_loading_imports_neither_jax_nor_torch_and_prints_nothing(tmp_path: Path):
    folder = save(byte_level(), tmp_path)
    code = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
        "import jpaged.text.detokenizer, jpaged.serve.http.lifecycle\n"
        "import jpaged.outputs, jpaged.terminal.session\n"
        "import jpaged.serve.engine.tokenizing_process\n"
        "from jpaged.text.tokenizer import Tokenizer\n"
        f"Tokenizer.from_folder({str(folder)!r}).encode('hello')\n"
        "assert not {'jax', 'torch'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def edit(path: Path, **entries: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_vocabulary_is_searched_for_word_boundaries_only_once(monkeypatch: pytest.MonkeyPatch):
    tokenizer = Tokenizer(byte_level().hf_tokenizer)
    tokenizer.prepare()
    looks: list[object] = []
    monkeypatch.setattr(jpaged.text.tokenizer, "splits_at_words", looks.append)
    text = "hello the end of the world. " * 400
    assert tokenizer.encode(text, last=20) == tokenizer.encode(text)[-20:]
    assert not looks
