"""Test the dtypes of a step, and that its compiled program does not copy the pool."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from harness import NUM_SEQS, NUM_TOKENS, TABLE_WIDTH, paged_step, poisoned_pool
from hf_models import config_of

from jpaged.models import experts
from jpaged.models.attention import AttentionInputs
from jpaged.models.decoder import Decoder
from pallas_kernels import FP8, Backend
from tests.covering import covering

DTYPE_CASES = {"gpt2-untied-inner", "opt-350m", "llama3-biases", "mistral-window", "qwen2", "qwen3"}
DTYPE_CASES |= {"gemma3"}


def abstract_inputs(rows: int, *, decode: bool):
    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    starts = None if decode else integers(NUM_SEQS + 1)
    # `AttentionInputs` does not accept a ShapeDtypeStruct as a field, so build it inside
    # `eval_shape`.
    attention = jax.eval_shape(
        lambda *arrays: AttentionInputs(*arrays, backend=Backend.XLA),
        *(integers(NUM_SEQS, TABLE_WIDTH), integers(NUM_SEQS), integers(rows), starts),
    )
    return integers(rows), integers(rows), attention


def abstract_step(case: str, dtype, pool_dtype, *, decode: bool):
    config = config_of(case)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype))
    graphdef, state = nnx.split(model)
    pool = jax.eval_shape(lambda: poisoned_pool(model, pool_dtype))
    rows = NUM_SEQS if decode else NUM_TOKENS
    token_ids, positions, attention = abstract_inputs(rows, decode=decode)
    return (graphdef, state, token_ids, positions, pool, attention), rows


DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]


@pytest.mark.parametrize(
    ("case", "dtype"),
    covering(
        sorted(DTYPE_CASES), DTYPES, strength=1, keep=lambda case, dtype: dtype == jnp.bfloat16
    ),
)
def test_step_has_the_expected_dtypes(case, dtype):
    for decode, pool_dtype in ((False, dtype), (True, jnp.bfloat16)):
        step, rows = abstract_step(case, dtype, pool_dtype, decode=decode)
        logits, pool = paged_step.eval_shape(*step)
        assert (logits.shape, logits.dtype) == ((rows, 97), jnp.float32)
        assert {leaf.dtype for leaf in jax.tree.leaves(pool)} == {jnp.dtype(pool_dtype)}


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize(("dtype", "name"), [(jnp.float32, "f32"), (FP8, "u16")])
def test_kv_cache_pool_is_updated_in_place(dtype, name, decode):
    step, _ = abstract_step("llama3-biases", jnp.float32, dtype, decode=decode)
    larger = jax.tree.map(lambda x: x.update(shape=(100 * x.shape[0], *x.shape[1:])), step[4])
    compiled: list[Any] = [
        paged_step.lower(*step[:4], pool, step[5]).compile() for pool in (step[4], larger)
    ]
    assert len({it.memory_analysis().temp_size_in_bytes for it in compiled}) == 1
    program = compiled[0].as_text()
    leaves = jax.tree.leaves(step[4])
    (shape,) = {leaf.shape for leaf in leaves}
    assert program.count("may-alias") + program.count("must-alias") == len(leaves)
    pool_type = re.escape(f"{name}[{','.join(map(str, shape))}]")
    assert re.search(pool_type, program)
    assert not re.search(rf"= {pool_type}\S* copy\(", program)
    assert not re.search(rf"= \({pool_type}.* copy-start\(", program)


def test_token_count_of_attention_inputs_excludes_padding_rows_at_the_end():
    nothing = jnp.zeros(0, jnp.int32)

    def inputs(seq_lens: list[int], starts: list[int] | None = None, *, num_queries: int = 1):
        lens = jnp.asarray(seq_lens, jnp.int32)
        given = None if starts is None else jnp.asarray(starts, jnp.int32)
        tables = jnp.zeros((len(seq_lens), 1), jnp.int32)
        step = tables, lens, nothing, given, Backend.XLA
        return AttentionInputs(*step, num_queries=num_queries)

    assert inputs([3, 0, 5, 0]).num_tokens == 3
    assert inputs([3, 0, 5, 0], num_queries=2).num_tokens == 6
    assert inputs([0, 0]).num_tokens == 0
    assert inputs([4, 9, 0], [0, 4, 9, 9]).num_tokens == 9


@pytest.mark.parametrize("decode", [True, False])
def test_expert_routing_gets_the_number_of_tokens_without_padding(
    monkeypatch: pytest.MonkeyPatch, decode: bool
):
    counts, route = [], experts.route

    def record(*args: Any, **options: Any) -> Any:
        counts.append(options["num_tokens"])
        return route(*args, **options)

    monkeypatch.setattr(experts, "route", record)
    step, _ = abstract_step("mixtral", jnp.float32, jnp.float32, decode=decode)
    paged_step.eval_shape(*step)
    assert counts
    assert all(count is not None and count.shape == () for count in counts)
