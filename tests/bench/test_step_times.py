"""Test the step-time benchmark, whose rows the device model is fitted to."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench import step_times
from bench.records import record, result_path
from bench.step_times import (
    QUICK,
    Sizes,
    measure,
    merged,
    time_attention,
    time_decode,
    time_prompts,
)
from jpaged import Engine

OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}


@pytest.fixture
def engine(kept_engines: Callable[..., Engine]) -> Engine:
    return kept_engines(skip_tokenizer_init=True, num_blocks=129, **OPTIONS)


def test_every_measured_size_that_fits_in_the_pool_has_a_result_row(engine: Engine):
    sizes = Sizes(
        decode=((2, 40), (8, 300), (9, 40)),
        prefill=((2, 20), (2, 40), (9, 1)),
        mixed=((3, 40, 1, 10),),
        copy=(3,),
        swap=(3,),
        decode_steps=4,
        prefill_steps=3,
        repeats=1,
    )
    rows = list(measure(engine, sizes))
    assert [row["kind"] for row in rows] == ["decode", "prefill", "mixed", "copy_blocks"]
    assert all(row["seconds"] > 0 and row["block_size"] == 16 for row in rows)
    decode, prefill, mixed, copies = rows
    assert len({tuple(row) for row in rows[1:3]}) == 1
    assert (decode["decode_seqs"], decode["padded_tokens"], decode["logits_rows"]) == (2, 8, 8)
    assert 2 * 38 <= decode["context_tokens"] <= 2 * 42
    assert (prefill["prompt_seqs"], prefill["prompt_tokens"]) == (2, 40)
    assert prefill["prompt_pairs"] == 2 * sum(range(1, 21))
    assert (prefill["decode_seqs"], prefill["context_tokens"]) == (0, 0)
    assert (prefill["padded_tokens"], prefill["logits_rows"]) == (64, 8)
    assert (mixed["decode_seqs"], mixed["prompt_tokens"]) == (3, 10)
    assert 3 * 37 <= mixed["context_tokens"] <= 3 * 43
    assert copies["blocks"] == 3
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    engine.check_integrity()


@pytest.mark.full
def test_attention_is_timed_at_every_block_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.kernels.CACHE_BYTES", 1 << 20)
    monkeypatch.setattr("bench.kernels.PROGRAM_BYTES", 1 << 20)
    rows = list(time_attention("opt-13b", replace(QUICK, repeats=1)))
    assert [(row["block_size"], row["decode_seqs"]) for row in rows] == [(8, 2), (16, 2)]
    assert all(row["seconds"] > 0 and row["context_tokens"] == 96 for row in rows)


def test_result_row_has_the_number_of_context_tokens_that_the_timed_steps_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    seen: list[int] = []
    advance, time_turns = Engine.advance, step_times.time_turns

    def watched(self: Engine) -> None:
        seen.append(sum(sequence.num_tokens for sequence in self.block_tables()))
        advance(self)

    def timed(*given) -> float:
        monkeypatch.setattr(Engine, "advance", watched)
        seconds = time_turns(*given)
        monkeypatch.setattr(Engine, "advance", advance)
        return seconds

    monkeypatch.setattr(step_times, "time_turns", timed)
    row = time_decode(engine, 4, 60, 8)
    assert row is not None
    steps = seen[step_times.WARM_TURNS :]
    assert len(steps) == 8
    # The estimate `context_tokens` may differ from the observed mean by two tokens per sequence.
    # The step in flight and rounding may each contribute one token.
    assert abs(row["context_tokens"] - sum(steps) / 8) <= 4 * 2


def test_benchmark_refuses_to_average_unequal_prefill_steps(engine: Engine):
    for _ in range(engine.runtime_config.max_num_seqs + 1):  # one request must wait
        engine.add_request([65] * 60)
    with pytest.raises(RuntimeError, match="the steps differ: use smaller sizes"):
        time_prompts(engine, 2, 30, 4)
    assert not engine.has_unfinished_requests


def test_new_run_replaces_the_recorded_rows_of_the_same_kinds():
    pairs = [("decode", 1), ("decode", 2), ("swap_in", 3), ("decode", 4)]
    *old, last = ({"kind": kind, "block_size": 16, "seconds": it} for kind, it in pairs)
    new = [last]
    assert [row["seconds"] for row in merged(old, new)] == [3, 4]
    assert merged([], new) == new


def test_result_file_name_has_shape_and_device(tmp_path: Path):
    path = record("step_times_opt-13b", [], folder=tmp_path)
    assert path == result_path("step_times_opt-13b", folder=tmp_path)
    assert path.name == "step_times_opt-13b_cpu.json"
