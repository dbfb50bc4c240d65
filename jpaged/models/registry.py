"""Which class implements which `model_type`."""

from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM
from jpaged.models.gpt2 import GPT2
from jpaged.models.llama import Llama
from jpaged.models.opt import OPT
from jpaged.models.qwen import Qwen2, Qwen3

_CLASSES: dict[str, type[CausalLM]] = {
    "gpt2": GPT2,
    "opt": OPT,
    "llama": Llama,
    "mistral": Llama,  # a sliding window is all that differs, and the config has it
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}
SUPPORTED_MODEL_TYPES = tuple(_CLASSES)


def model_class(config: ModelConfig) -> type[CausalLM]:
    """The class of `config.model_type`: `model_class(config)(config, dtype=...)` builds the model.

    Raises:
        ValueError: no such model type.
    """
    if config.model_type not in _CLASSES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ValueError(f"model_type={config.model_type!r} is not supported; use {supported}")
    return _CLASSES[config.model_type]
