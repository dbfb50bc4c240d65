"""What the engine benchmarks share: model shapes, request lengths, floors."""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jpaged import Engine
from jpaged.models.config import ModelConfig
from jpaged.models.formats import UnquantizedFormat
from jpaged.runtime.kv_cache import block_bytes

# The H200's measured limits; the floors below stand on them.
BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 790e12
FP8_FLOPS_PER_SECOND = 2 * FLOPS_PER_SECOND

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
"""The parameters that `--penalties` sets."""

SHAPES: dict[str, dict] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
}

_QWEN2_5 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
UNRECORDED: dict[str, dict] = {
    "qwen2.5-1.5b": {
        **_QWEN2_5,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-14b": {
        **_QWEN2_5,
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "llama-13b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "llama-70b": {
        **SHAPES["llama-3.1-8b"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "rope_scaling": None,
    },
    "opt-13b": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 5120,
        "word_embed_proj_dim": 5120,
        "ffn_dim": 20480,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "torch_dtype": "bfloat16",
    },
}
"""Shapes whose GEMMs are not in XLA's measurements that ship."""

ALL_SHAPES = {**SHAPES, **UNRECORDED}

# How vLLM's figures were taken. The prompts are random, so a prefix cache finds nothing.
AS_VLLM = {"max_model_len": 2048, "max_num_seqs": 256, "enable_prefix_caching": False}


def make_engine(shape: str, **options) -> Engine:
    """An engine of a published shape with random weights; no checkpoint is needed."""
    with shape_folder(shape) as folder:
        dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
        return Engine(folder, **dummy, **(AS_VLLM | options))


@contextmanager
def shape_folder(shape: str | None) -> Iterator[Path | None]:
    """A folder with a shape's `config.json`, while the context lasts; None for no shape."""
    if shape is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(ALL_SHAPES[shape]), encoding="utf-8")
        yield path.parent


FORMATS: dict[str, dict[str, str]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "fp8-weights": {"quantization": "fp8"},
    "fp8-kv": {"kv_cache_dtype": "fp8"},
}
"""An engine's options for what `--format` names."""


def add_format_option(parser: argparse.ArgumentParser) -> None:
    """`--format`: several are measured in one run."""
    what = "of weights and KV cache (bf16)"
    parser.add_argument("--format", choices=[*FORMATS], nargs="+", default=["bf16"], help=what)


def format_of(engine: Engine) -> str:
    """By which of `FORMATS` an engine was made."""
    config = engine.config
    asked = {"quantization": config.quantization, "kv_cache_dtype": config.kv_cache_dtype}
    narrow = {name: value for name, value in asked.items() if value == "fp8"}
    return next(form for form, options in FORMATS.items() if options == narrow)


CASE = "case", "model", "format"
"""What a row of `bench.throughput` or `bench.latency` is known by, as `record` takes it."""


def labelled(row: dict, form: str) -> dict:
    """A row with its format, where that is not what all rows had before there were others."""
    return row if form == "bf16" else row | {"format": form}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """`--logprobs` and `--penalties`, for `sampling_options`."""
    parser.add_argument("--logprobs", type=int, help="log-probabilities of so many tokens")
    parser.add_argument("--penalties", action="store_true", help="all three of them")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """What of `SamplingParams` the command line asks for."""
    return {"logprobs": args.logprobs} | (PENALTIES if args.penalties else {})


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of the given lengths."""
    rng = np.random.RandomState(seed)
    return [rng.randint(0, vocab_size, n).tolist() for n in lengths]


@dataclass(frozen=True)
class Floor:
    """The fewest seconds a model shape needs on the chip: bytes at 4.3 TB/s, FLOPs at 790 T/s, of
    numbers in FP8 at twice that.

    Attributes:
        weight_bytes: Read once a decode step (the token embedding is gathered, not read).
        kv_bytes_per_token: K and V of one token in all layers.
        flops_per_token: Of one token's GEMMs, the output head left out.
        head_flops: Of the output head for one token.
        flops_per_pair: Of attention, for each query token and key it sees.
        gemm_flops_per_second: Of the layers' GEMMs.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    head_flops: float
    flops_per_pair: float
    gemm_flops_per_second: float = FLOPS_PER_SECOND

    @staticmethod
    def of(engine: Engine) -> "Floor":
        """From a running engine's own account; of each device, where several share the model."""
        model = engine.model_config.shard(engine.config.tensor_parallel_size)
        weights = engine.memory_account.weights
        is_narrow = (
            model.quantization is not None and model.quantization.format is not UnquantizedFormat
        )
        dtype = jnp.dtype(model.checkpoint_dtype or "bfloat16")
        table = model.num_embedding_rows * model.embedding_size
        if not model.tie_word_embeddings:
            weights -= dtype.itemsize * table
        return Floor(
            weight_bytes=weights,
            kv_bytes_per_token=block_bytes(model, 1, dtype),
            flops_per_token=2 * _num_factors(model),
            head_flops=2 * table,
            flops_per_pair=4 * model.num_layers * model.num_heads * model.head_size,
            gemm_flops_per_second=FP8_FLOPS_PER_SECOND if is_narrow else FLOPS_PER_SECOND,
        )

    def decode_step(self, num_seqs: int, context: float) -> float:
        """Seconds of a step of `num_seqs` sequences with `context` tokens each on average."""
        kv = num_seqs * context * self.kv_bytes_per_token
        flops = self.head_flops + context * self.flops_per_pair
        a_token = self.flops_per_token / self.gemm_flops_per_second + flops / FLOPS_PER_SECOND
        compute = num_seqs * a_token
        return max((self.weight_bytes + kv) / BYTES_PER_SECOND, compute)

    def prefill(self, lengths: Sequence[int]) -> float:
        """Seconds of prefilling prompts of these lengths."""
        pairs = sum(n * (n + 1) / 2 for n in lengths)
        gemms = sum(lengths) * self.flops_per_token / self.gemm_flops_per_second
        flops = len(lengths) * self.head_flops + pairs * self.flops_per_pair
        return gemms + flops / FLOPS_PER_SECOND

    def generation(
        self, prompts: Sequence[int], outputs: Sequence[int], max_num_seqs: int
    ) -> float:
        """Seconds of serving requests of these lengths, `max_num_seqs` at a time.

        KV is read once for each output token but a sequence's first, over all that precedes it.
        """
        lengths = list(zip(prompts, outputs, strict=True))
        kv_tokens = sum((m - 1) * n + m * (m - 1) / 2 for n, m in lengths)
        num_steps = max(sum(outputs) / max_num_seqs, max(outputs))
        reads = num_steps * self.weight_bytes + kv_tokens * self.kv_bytes_per_token
        return reads / BYTES_PER_SECOND + self.prefill(prompts)


def _num_factors(model: ModelConfig) -> int:
    """Numbers of the projections' weights: what a token is multiplied by, but for the head."""
    return sum(
        math.prod(it.input_shape)
        * sum(size for _, size in it.parts)
        * math.prod(it.trailing_shape)
        * (model.num_layers if path.startswith(("attention.", "mlp.")) else 1)
        for path, it in model.projections.items()
    )
