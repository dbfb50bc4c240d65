"""Compare the contiguous decoder with the engine, and test how it reuses rows of the cache."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bench.common import random_prompts
from bench.contiguous import BATCHINGS, Decoder, Request, load
from bench.contiguous_steps import Model
from jpaged import Engine, SamplingParams

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt, norms last": {
        "model_type": "opt",
        "ffn_dim": 96,
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 32,
    },
    "qwen3, windows": {"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 32}
    | {"intermediate_size": 48, "num_key_value_heads": 2, "hidden_act": "silu"}
    | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
}
ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
ONE_PREFILL: dict[str, Any] = {"num_slots": 8, "max_len": 128, "max_batched_tokens": 64}
"""Options of a decoder that needs only one prefill program, for prompts of up to 64 tokens."""
ONE_STEP: dict[str, Any] = ONE_PREFILL | {"launch_steps": (1,)}


@pytest.fixture(autouse=True)
def quick_to_compile() -> None:
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    small = {"model_type": "gpt2", "num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 512}
    (folder / "config.json").write_text(json.dumps(TINY | small))
    return load(folder, load_format="dummy")[0]


def greedy(engine: Engine, prompts: list[list[int]], most: list[int], **more: Any) -> list:
    params = [SamplingParams(temperature=0.0, max_tokens=m, **more) for m in most]
    return [list(o.outputs[0].token_ids) for o in engine.generate(prompts, params, use_tqdm=False)]


def requests(vocab_size: int, count: int = 20) -> tuple[list[list[int]], list[int]]:
    rng = np.random.RandomState(0)
    lens, most = rng.randint(1, 65, count), rng.randint(1, 60, count)
    return random_prompts(lens.tolist(), vocab_size), most.tolist()


@pytest.mark.parametrize(
    "family", [pytest.param("opt, norms last", marks=pytest.mark.full), "qwen3, windows"]
)
def test_contiguous_decoder_generates_the_same_tokens_as_the_engine(
    family: str, kept_engines: Callable[..., Engine], tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(TINY | FAMILIES[family]))
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True, "num_blocks": 129}
    engine = kept_engines(tmp_path, **dummy, **ENGINE)
    prompts, most = requests(97)
    expected = greedy(engine, prompts, most)
    assert any(t[-1] == 1 and len(t) < m for t, m in zip(expected, most, strict=True))
    model, eos = load(tmp_path, load_format="dummy")
    for batching in BATCHINGS:
        decoder = Decoder(model, batching, eos_token_ids=eos, **ONE_STEP)
        assert decoder.generate(prompts, most, ignore_eos=False) == expected


@pytest.mark.full
def test_contiguous_decoder_with_several_steps_per_launch_generates_the_same_tokens(
    kept_engines: Callable[..., Engine],
):
    options = ENGINE | {"max_model_len": 256}
    engine = kept_engines(skip_tokenizer_init=True, num_blocks=129, **options)
    prompts, most = requests(engine.vocab_size)
    expected = greedy(engine, prompts, most, ignore_eos=True)
    model, _ = load()
    for batching in BATCHINGS:
        decoder = Decoder(model, batching, launch_steps=(1, 4), **ONE_PREFILL)
        assert decoder.generate(prompts, most) == expected


def drive(decoder: Decoder, given: list[Request]) -> Iterator[list[Request]]:
    """Serve the requests. After each step, yield the requests that ended, and check that each
    running request has a different cache row.
    """
    for request in given:
        decoder.add(request)
    while decoder.num_unfinished:
        yield decoder.step()
        assert len(decoder.running) <= decoder.num_slots
        assert decoder.batch_size == decoder.num_unfinished - len(decoder.waiting)
        assert len(set(map(id, decoder.running.values()))) == len(decoder.running)


@pytest.mark.parametrize("batching", BATCHINGS)
def test_free_cache_rows_are_reused_immediately_or_after_the_static_batch(
    batching: str, tiny: Model
):
    decoder = Decoder(tiny, batching, **ONE_STEP)
    given = [Request([65 + i], 40 if i == 0 else 3) for i in range(20)]
    turns = list(drive(decoder, given))
    ends = {id(request): turn for turn, ended in enumerate(turns) for request in ended}
    assert len(ends) == 20
    assert [len(request.tokens) for request in given] == [40] + 19 * [3]
    later = [ends[id(request)] > ends[id(given[0])] for request in given[8:]]
    assert all(later) if batching == "static" else not any(later)


def test_static_batch_has_cache_rows_as_long_as_its_longest_request(tiny: Model):
    decoder = Decoder(tiny, "static", widths=(96, 64, 512), **ONE_STEP)
    widths = Counter()
    for most in (60, 100):
        for _ in drive(decoder, [Request([65, 66], most), Request([65], 3)]):
            widths[decoder.width] += 1
    assert set(widths) == {64, 128}
    assert [*decoder.widths] == [64, 96, 128]
    assert Decoder(tiny, "slabs", widths=(64, 96), **ONE_PREFILL).widths == (128,)


def test_row_of_the_cache_stops_growing_at_its_limit(tiny: Model):
    stops = np.array([0, 2, 9, 0, 0, 0, 0, 0], np.int32)
    cache, tokens = tiny.program(8, 128, 4)(tiny.leaves, tiny.empty(8, 128), stops)
    assert cache.lens.tolist() == [0, 2, 4, 0, 0, 0, 0, 0]
    assert tokens.shape == (4, 8)


def test_decoder_with_two_slots_runs_two_requests_at_a_time_and_can_be_cleared(tiny: Model):
    prompts, most = requests(512, 6)
    expected = Decoder(tiny, "slabs", **ONE_STEP).generate(prompts, most)
    few: dict[str, Any] = ONE_PREFILL | {"num_slots": 2, "launch_steps": (1, 4)}
    decoder = Decoder(tiny, "slabs", **few)
    for turn, _ in enumerate(drive(decoder, [Request([7], 50), Request([8], 50), Request([9], 9)])):
        if turn == 5:
            assert len(decoder.running) == 2
            decoder.clear()
            assert not decoder.num_unfinished
    assert decoder.generate(prompts, most) == expected


def test_decoder_launches_single_steps_while_a_row_is_free_for_arrivals(tiny: Model):
    sizes: list[int] = []
    for count in (7, 8):
        decoder = Decoder(tiny, "slabs", launch_steps=(1, 4), arrivals=True, **ONE_PREFILL)
        given = [Request([65], 9) for _ in range(count)]
        sizes.append(len(list(drive(decoder, given))))
    assert sizes[1] < sizes[0]


def test_end_token_frees_the_cache_row_of_the_request(tiny: Model):
    prompt = [65, 66, 67]
    (whole,) = Decoder(tiny, "slabs", **ONE_STEP).generate([prompt], [30])
    end = next(token for token in whole if whole.index(token) > 1)
    for batching in BATCHINGS:
        decoder = Decoder(tiny, batching, eos_token_ids=[end], **ONE_STEP)
        given = [Request(prompt, 30, ignore_eos=False) for _ in range(12)]
        turns = list(drive(decoder, given))
        assert all(request.tokens == whole[: whole.index(end) + 1] for request in given)
        assert len(turns) < 2 * (whole.index(end) + 5)
        assert not decoder.running


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "name"),
    [([], 4, "prompt"), ([512], 4, "prompt"), ([65], 0, "max_tokens"), ([65], 128, "max_tokens")],
)
def test_error_for_an_invalid_request_names_the_field(
    prompt: list[int], max_tokens: int, name: str, tiny: Model
):
    decoder = Decoder(tiny, "static", **ONE_PREFILL)
    with pytest.raises(ValueError, match=rf"^{name}="):
        decoder.add(Request(prompt, max_tokens))
    assert not decoder.num_unfinished


@pytest.mark.parametrize(
    ("name", "value"),
    [("batching", "paged"), ("num_slots", 0), ("max_len", 4096), ("launch_steps", (4,))],
)
def test_error_for_an_invalid_decoder_option_names_the_option(name: str, value: Any, tiny: Model):
    options: dict[str, Any] = {"batching": "slabs", **ONE_PREFILL, name: value}
    with pytest.raises(ValueError, match=rf"^{name}="):
        Decoder(tiny, **options)


def test_warm_up_compiles_every_program_of_a_generation(tiny: Model):
    model: Any = Model.__new__(Model)
    model.__dict__.update(tiny.__dict__)
    decoder = Decoder(model, "static", widths=(64,), launch_steps=(1, 4), **ONE_PREFILL)
    compiled = Counter()

    def program(*shape: int) -> Any:
        compiled[shape] += 1
        return tiny.program(*shape)

    model.program = program
    decoder.warm_up(64)
    warm = set(compiled)
    work = requests(512, 10)
    expected = Decoder(tiny, "static", **ONE_STEP).generate(*work)
    assert decoder.generate(*work) == expected
    assert set(compiled) == warm
