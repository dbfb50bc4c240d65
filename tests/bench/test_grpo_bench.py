"""Test the GRPO benchmark on a CPU with a tiny model."""

from argparse import Namespace

import jax
import pytest

from bench import common, grpo

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SIZES = Namespace(
    prompts=2, samples=2, prompt_len=8, answer_len=4, rows=2, steps=1, pool_gib=0.01, shape="tiny"
)


@pytest.mark.full
@pytest.mark.parametrize("system", ["jpaged", "contiguous"])
def test_grpo_benchmark_reports_the_seconds_of_each_part_of_a_training_step(
    monkeypatch: pytest.MonkeyPatch, system: str
):
    for shapes in (common.SHAPES, common.ALL_SHAPES):
        monkeypatch.setitem(shapes, "tiny", common.SHAPES["qwen3-0.6b"] | TINY)
    monkeypatch.setattr(grpo, "MAX_NUM_SEQS", 8)
    # The tests run with strict promotion rules of JAX. The measured code needs the default rules:
    # it combines arrays of different dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        row = grpo.measure(system, SIZES)
    parts = [row[f"{part}_s"] for part in ("rollout", "scoring", "update", "hand-over")]
    assert row["step_s"] == pytest.approx(sum(parts))
    assert min(parts) > 0
