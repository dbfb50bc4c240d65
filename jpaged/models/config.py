"""What a model is: `ModelConfig`, derived once from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling.

    `factor` serves "linear" and "llama3"; the other three fields "llama3" alone.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Everything the computation of a model depends on, and its special tokens.

    Attributes:
        model_type: Hugging Face's name of the family.
        head_size: width of one head; `num_heads * head_size` need not be `hidden_size`.
        embedding_size: width of the token embedding; differs from `hidden_size` only where OPT
            projects between the two.
        activation: Hugging Face's name of the feed-forward activation.
        norm_eps: epsilon of every norm.
        sliding_windows: for each layer the number of keys a query sees (itself included), or None
            for all earlier keys.
        rope: rotary embedding; None for models with learned positions.
        tie_word_embeddings: the output head is the token embedding.
        qkv_bias, output_bias, mlp_bias: which projections have biases.
        pre_norm: norms come before attention and feed-forward (False: after the residual sum).
        final_norm: a norm follows the last layer.
        norm_affine: LayerNorms have weights and biases.
        eos_token_ids: tokens that end a text; empty when the config names none.
        checkpoint_dtype: dtype the config declares for the weights ("bfloat16" ...), or None.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_position_embeddings: int
    embedding_size: int
    activation: str
    norm_eps: float
    sliding_windows: tuple[int | None, ...]
    rope: RopeConfig | None
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    pre_norm: bool
    final_norm: bool
    norm_affine: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str | None

    @property
    def attention_scale(self) -> float:
        """Factor on the dot products of queries and keys."""
        return self.head_size**-0.5

    @property
    def sizes(self) -> str:
        """The fields that decide how large the parameters are, by their names in a config."""
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
        }
        return ", ".join(f"{name}={value}" for name, value in sizes.items())

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the content of a `config.json`, of transformers 4 or 5.

        Fields left out take transformers' defaults, except sizes, which must be there.

        Raises:
            ValueError: a missing or malformed field, or one whose value changes the computation in
                a way that is not implemented; the message has the field, the value and what is
                supported.
        """
        from jpaged.models.hf_config import read_hf_config

        return read_hf_config(config)
