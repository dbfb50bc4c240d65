"""Train small tokenizers for tests, with the structure of those of GPT-2, Qwen and LLaMA 2."""

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jpaged.text.tokenizer import Tokenizer

EOS, START = "<|end|>", "<|start|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    "{% if tone is defined %}{{ tone }}{% endif %}"
)
CORPUS = [
    "the end of the stop. END STOP stopping the world",
    "hello world, hello there! The world ends here.",
    "你好世界 你好 こんにちは 世界",
    "😀😃 héllo e\u0301 ñandú 👩\u200d👩\u200d👧",
    "    def f(x):\n        return x\n\n",
] * 4


@functools.cache
def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOS, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@functools.cache
def metaspace_backend() -> Backend:
    """Return a tokenizer backend like LLaMA 2's: "▁" stands for a space, with byte fallback."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS[:2] * 4, trainer)
    state = json.loads(backend.to_str())
    vocab = state["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    state["model"]["byte_fallback"] = True
    backend = Backend.from_str(json.dumps(state))
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return backend


def _with_byte_tokens(backend: Backend) -> Tokenizer:
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, additional_special_tokens=[START]
    )
    hf.chat_template = CHAT_TEMPLATE
    return Tokenizer(hf)


def _with_llama_tokens(backend: Backend, **options: str) -> Tokenizer:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **tokens, **options))


@functools.cache
def byte_level() -> Tokenizer:
    return _with_byte_tokens(byte_level_backend())


@functools.cache
def metaspace() -> Tokenizer:
    return _with_llama_tokens(metaspace_backend())


_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def qwen_like() -> Tokenizer:
    """Return a tokenizer like Qwen's: NFC, Qwen's splitting, an added token that is not special."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[EOS, START], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>"])
    return _with_byte_tokens(backend)


@functools.cache
def llama_like() -> Tokenizer:
    """Return a tokenizer like LLaMA 2's: no pre-tokenizer, a space prepended to each text."""
    state = json.loads(metaspace_backend().to_str())
    state["pre_tokenizer"] = None
    backend = Backend.from_str(json.dumps(state))
    prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([prepend, replace])
    backend.add_special_tokens(["<unk>", AddedToken("<s>", normalized=True), "</s>"])
    return _with_llama_tokens(backend, chat_template=TEMPLATES["llama-2"])


TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "chatml": "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] | trim }}"
    "{{ '<|end|>' + '\n' }}{% endfor %}",
    "llama-2": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{{ m.content.strip() }} [/INST]{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}"
    "{% endfor %}",
    "thinking": "{% macro told(m) %}<|start|>{{ m.role }}\n{{ m.content.split('</think>')[-1]"
    ".lstrip('\n') }}<|end|>{% endmacro %}{% for m in messages %}{{ told(m) }}{% endfor %}",
    "gemma": "{{ bos_token }}{% set told = messages[0].content + '\n\n' if messages[0].role =="
    " 'system' else '' %}{% for m in messages if m.role != 'system' %}{{ '<|start|>' + ('model' if"
    " m.role == 'assistant' else m.role) + '\n' + (told if loop.first else '') }}"
    "{{ m.content | trim }}{{ '<|end|>\n' }}{% endfor %}",
    "roles": "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}",
}
"""Chat templates by name. They differ in how they write the content of messages."""


@functools.cache
def mistral_like() -> Tokenizer:
    """Return a tokenizer that prepends a space only to the first word of a prompt."""
    state = json.loads(metaspace_backend().to_str())
    state["pre_tokenizer"]["prepend_scheme"] = "first"
    backend = Backend.from_str(json.dumps(state))
    return _with_llama_tokens(backend, chat_template=TEMPLATES["llama-2"])


END_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"


@functools.cache
def full_width_like() -> Tokenizer:
    """Return a tokenizer that searches for `</s>` after NFKC normalization of the text."""
    state = json.loads(byte_level_backend().to_str())
    backend = Backend.from_str(json.dumps(state))
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("</s>", normalized=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.hf_tokenizer.save_pretrained(folder)
    return folder
