"""Small tokenizers trained on the spot: byte-level (GPT-2, Qwen) and metaspace (LLaMA 2)."""

import functools
import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jpaged.tokenizer import Tokenizer

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
    """As LLaMA 2's: words begin with a metaspace, unknown characters fall back to bytes."""
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
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=byte_level_backend(),
            eos_token=EOS,
            additional_special_tokens=[START],
            chat_template=CHAT_TEMPLATE,
        )
    )


@functools.cache
def metaspace() -> Tokenizer:
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=metaspace_backend(),
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
        )
    )


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.hf_tokenizer.save_pretrained(folder)
    return folder
