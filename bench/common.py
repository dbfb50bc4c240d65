"""Model shapes, prompts, engine options and lower bounds that the engine benchmarks share."""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from jpaged import Engine
from jpaged.models.config import ModelConfig
from jpaged.models.formats import UnquantizedFormat
from jpaged.runtime.kv_cache import block_bytes

# Measured limits of the H200, from which `Floor` computes lower bounds.
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
"""Sampling parameters that `--penalties` sets."""

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

SPARSE: dict[str, dict] = {
    "qwen3-30b-a3b": {
        **SHAPES["qwen3-0.6b"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Shapes of published models with experts. Benchmarks run them only if `--model` or `--shape` names
them."""

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
"""Model shapes without XLA autotuning records: jpaged ships none for the GEMMs of these shapes."""

ALL_SHAPES = {**SHAPES, **SPARSE, **UNRECORDED}

# These engine options are the same as in the measurements of vLLM. Prompts are random, so a prefix
# cache would never hit.
AS_VLLM = {"max_model_len": 2048, "max_num_seqs": 256, "enable_prefix_caching": False}


def make_engine(shape: str, **options) -> Engine:
    """Create an engine with random weights for a published model shape (a key of `ALL_SHAPES`)."""
    with shape_folder(shape) as folder:
        dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
        return Engine(folder, **dummy, **(AS_VLLM | options))


EMBEDDED = "embedded"
"""Name of the model that ships with jpaged, for scripts that otherwise take the name of a shape."""


def new_engine(shape: str, **options) -> Engine:
    """Create an engine with the model that ships with jpaged if `shape` is `EMBEDDED`. Otherwise
    create an engine with random weights for the published model shape `shape`."""
    return Engine(None, **options) if shape == EMBEDDED else make_engine(shape, **options)


@contextmanager
def shape_folder(shape: str | None) -> Iterator[Path | None]:
    """Yield a temporary folder with the shape's `config.json`, or None if `shape` is None."""
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
"""Engine options for each value of `--format`."""


def add_format_option(parser: argparse.ArgumentParser) -> None:
    """Add `--format`, which accepts several values."""
    what = "data types of the weights and the KV cache (bf16)"
    parser.add_argument("--format", choices=[*FORMATS], nargs="+", default=["bf16"], help=what)


def add_expert_option(parser: argparse.ArgumentParser) -> None:
    """Add `--enable-expert-parallel`, which needs `--tensor-parallel-size` above 1."""
    what = "place whole experts on the GPUs, instead of splitting the width of each expert"
    parser.add_argument("--enable-expert-parallel", action="store_true", help=what)


def format_of(engine: Engine) -> str:
    """Return the value of `--format` (a key of `FORMATS`) that matches the engine's options."""
    config = engine.config
    asked = {"quantization": config.quantization, "kv_cache_dtype": config.kv_cache_dtype}
    narrow = {name: value for name, value in asked.items() if value == "fp8"}
    return next(form for form, options in FORMATS.items() if options == narrow)


CASE = "case", "model", "format"
"""Keys that identify a row of `bench.throughput` or `bench.latency`: argument `by` of `record`."""


def labelled(row: dict, form: str) -> dict:
    """Return the row with the key "format" added, unless the format is bfloat16."""
    return row if form == "bf16" else row | {"format": form}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add `--logprobs` and `--penalties`, which `sampling_options` reads."""
    parser.add_argument("--logprobs", type=int, help="log-probabilities per output token")
    parser.add_argument("--penalties", action="store_true", help="use all three penalties")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the command line sets."""
    return {"logprobs": args.logprobs} | (PENALTIES if args.penalties else {})


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens, one prompt for each length."""
    rng = np.random.RandomState(seed)
    return [rng.randint(0, vocab_size, n).tolist() for n in lengths]


@dataclass(frozen=True)
class Floor:
    """Lower bounds of the times of steps and generations on an H200, for one model shape.

    The bounds assume 4.3 TB/s, 790 TFLOP/s, and twice the FLOP/s for GEMMs in FP8. The bounds also
    assume that the router of a mixture-of-experts layer chooses all experts equally often.

    Attributes:
        weight_bytes: Bytes of all weights that a decode step may read, including all experts. The
            token embedding does not count, because a step reads only a few rows of it.
        expert_bytes: Bytes of the experts' weights.
        chosen_share: Fraction of the experts that one token chooses.
        kv_bytes_per_token: Bytes of K and V of one token in all layers.
        flops_per_token: FLOPs of one token's GEMMs without the output head.
        head_flops: FLOPs of the output head for one token.
        flops_per_pair: FLOPs of attention for one query token and one key.
        gemm_flops_per_second: Speed of the layers' GEMMs.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    head_flops: float
    flops_per_pair: float
    gemm_flops_per_second: float = FLOPS_PER_SECOND
    expert_bytes: float = 0.0
    chosen_share: float = 1.0

    @staticmethod
    def of(engine: Engine) -> "Floor":
        """Return lower bounds of an engine's times, computed from one device's model shard."""
        whole = cast(ModelConfig, engine.model_config)
        model = whole.shard(engine.config.tensor_parallel_size)
        weights = engine.memory_account.weights
        is_narrow = (
            model.quantization is not None and model.quantization.format is not UnquantizedFormat
        )
        dtype = jnp.dtype(model.checkpoint_dtype or "bfloat16")
        experts = model.experts
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
            expert_bytes=(1 if is_narrow else dtype.itemsize) * _num_expert_weights(model),
            chosen_share=experts.num_experts_per_token / experts.num_experts if experts else 1.0,
        )

    def read_bytes(self, num_seqs: float) -> float:
        """Return the expected number of bytes of weights that a decode step of `num_seqs` sequences
        reads."""
        skipped_share = (1 - self.chosen_share) ** num_seqs
        return self.weight_bytes - self.expert_bytes * skipped_share

    def decode_step(self, num_seqs: int, context: float) -> float:
        """Return the seconds of a decode step of `num_seqs` sequences of `context` tokens each."""
        kv = num_seqs * context * self.kv_bytes_per_token
        flops = self.head_flops + context * self.flops_per_pair
        a_token = self.flops_per_token / self.gemm_flops_per_second + flops / FLOPS_PER_SECOND
        compute = num_seqs * a_token
        return max((self.read_bytes(num_seqs) + kv) / BYTES_PER_SECOND, compute)

    def prefill(self, lengths: Sequence[int]) -> float:
        """Return the seconds to prefill prompts of these lengths."""
        pairs = sum(n * (n + 1) / 2 for n in lengths)
        gemms = sum(lengths) * self.flops_per_token / self.gemm_flops_per_second
        flops = len(lengths) * self.head_flops + pairs * self.flops_per_pair
        return gemms + flops / FLOPS_PER_SECOND

    def generation(
        self, prompts: Sequence[int], outputs: Sequence[int], max_num_seqs: int
    ) -> float:
        """Return the seconds to serve requests of these lengths, `max_num_seqs` at a time.

        The decode step of an output token reads the KV of all tokens before it. A sequence's first
        output token comes from the prefill.
        """
        lengths = list(zip(prompts, outputs, strict=True))
        kv_tokens = sum((m - 1) * n + m * (m - 1) / 2 for n, m in lengths)
        num_steps = max(sum(outputs) / max_num_seqs, max(outputs))
        mean_num_seqs = sum(outputs) / num_steps if num_steps else 0.0
        reads = num_steps * self.read_bytes(mean_num_seqs) + kv_tokens * self.kv_bytes_per_token
        return reads / BYTES_PER_SECOND + self.prefill(prompts)


def _num_expert_weights(model: ModelConfig) -> int:
    """Return the total number of weights of all experts that one device holds."""
    all_experts = [layer.experts for layer in model.layers if layer.experts is not None]
    return sum(
        3 * it.num_local_experts * it.intermediate_size * model.hidden_size for it in all_experts
    )


def _num_factors(model: ModelConfig) -> float:
    """Return the number of weights that the computation of one token uses, without the output head.
    In a mixture-of-experts layer, a token uses only the experts that it chooses.
    """
    num_sparse = sum(layer.experts is not None for layer in model.layers)
    num_layers = {"attention": model.num_layers, "mlp": model.num_layers - num_sparse}
    in_experts = 0.0
    if model.experts is not None:
        share = model.experts.num_experts_per_token / model.experts.num_experts
        router = num_sparse * model.experts.num_experts * model.hidden_size
        in_experts = share * _num_expert_weights(model) + router
    return in_experts + sum(
        math.prod(it.input_shape)
        * sum(size for _, size in it.parts)
        * math.prod(it.trailing_shape)
        * num_layers.get(path.partition(".")[0], 1)
        for path, it in model.projections.items()
    )
