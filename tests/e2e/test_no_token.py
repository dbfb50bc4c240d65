"""Test that NaN logits end a request with an error and change no other request."""

from pathlib import Path
from typing import Any

import pytest
from e2e_options import SINGLE_STEP_LOOPS, Engines, answers, final_updates
from random_models import random_model

from jpaged import Engine, SamplingParams
from tests.covering import covering

torch = pytest.importorskip("torch")

BAD, VOCAB_SIZE = 96, 97
"""The embedding of token `BAD` is NaN. Its logit is low, so that no request samples it."""

HEALTHY: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": ([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=20)),
    "random": ([8, 9], SamplingParams(n=2, seed=1, top_k=10, max_tokens=20)),
    "scored": ([5, 6, 8, 9], SamplingParams(seed=2, top_k=10, max_tokens=20, logprobs=2)),
    "penalized": (
        [10] * 30,
        SamplingParams(temperature=0.0, presence_penalty=0.5, min_tokens=9, max_tokens=20),
    ),
    "search": ([11, 12], SamplingParams(beam_width=3, max_tokens=12)),
}
VICTIMS: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": ([3, BAD, 4], SamplingParams(temperature=0.0, max_tokens=20)),
    "random": ([BAD] * 40, SamplingParams(n=3, seed=1, top_p=0.9, max_tokens=20)),
    "scored": ([3, 4, 5, BAD], SamplingParams(logprobs=3, prompt_logprobs=1, max_tokens=9)),
    "penalized": ([BAD, 3], SamplingParams(frequency_penalty=0.5, min_tokens=3, max_tokens=9)),
    "search": ([3, BAD], SamplingParams(beam_width=4, max_tokens=9)),
    # A logit bias makes this request sample `BAD`. The logits of the request are finite before
    # that.
    "later": ([3, 4], SamplingParams(logit_bias={BAD: 100.0}, temperature=0.0, max_tokens=9)),
}


def save_checkpoint(folder: Path, *bad_tokens: int) -> Path:
    """Save a random Llama checkpoint. The embeddings of `bad_tokens` are NaN, and the logits of
    these tokens are low."""
    model = random_model(
        "llama",
        seed=3,
        std=0.2,
        vocab_size=VOCAB_SIZE,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        for token in bad_tokens:
            model.model.embed_tokens.weight[token] = float("nan")
            model.lm_head.weight[token] = 0.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def nan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("nan"), BAD)


OPTIONS = {"skip_tokenizer_init": True, "num_blocks": 33, "max_num_seqs": 16}


@pytest.fixture(params=[*SINGLE_STEP_LOOPS])
def engine(engines: Engines, nan_folder: Path, request: pytest.FixtureRequest) -> Engine:
    return engines(nan_folder, **SINGLE_STEP_LOOPS[request.param], **OPTIONS)


def step(engine: Engine, last: dict[str, Any]) -> None:
    """Run a step, check the engine's block counts, and store the last output of each request in
    `last`."""
    last.update((output.request_id, output) for output in engine.step())
    engine.check_integrity()


@pytest.mark.parametrize(
    ("engine", "victim"), covering(SINGLE_STEP_LOOPS, VICTIMS, strength=1), indirect=["engine"]
)
def test_nan_logits_of_one_request_end_that_request_only(engine: Engine, victim: str):
    expected = {name: answers(engine.generate(*HEALTHY[name])) for name in HEALTHY}
    prompt, params = VICTIMS[victim]
    for _ in range(2):  # the second run reuses blocks that held NaN
        last: dict[str, Any] = {}
        for name in HEALTHY:
            engine.add_request(*HEALTHY[name], request_id=name)
            step(engine, last)
            if name == "random":
                engine.add_request(prompt, params, request_id="victim")
        while engine.has_unfinished_requests:
            step(engine, last)
        assert {name: answers([last[name]]) for name in HEALTHY} == expected
        assert last["victim"].finished
        reasons = {each.finish_reason for each in last["victim"].outputs}
        assert reasons == (set() if victim == "search" else {"error"})
        tokens = [token for each in last["victim"].outputs for token in each.token_ids]
        assert tokens == ([BAD] if victim == "later" else [])


@pytest.mark.parametrize(
    ("engine", "victim"), covering(SINGLE_STEP_LOOPS, VICTIMS, strength=1), indirect=["engine"]
)
def test_error_of_a_request_with_nan_logits_names_the_cause(engine: Engine, victim: str):
    with pytest.raises(RuntimeError, match="failed") as caught:
        engine.generate(*VICTIMS[victim])
    assert "logits are NaN or infinite" in str(caught.value.__cause__)
    engine.add_request(*VICTIMS[victim], request_id="victim")
    assert "logits are NaN or infinite" in (final_updates(engine)["victim"].error or "")


def test_request_that_forbids_every_token_is_refused(engine: Engine):
    everything = SamplingParams(stop_token_ids=[*range(VOCAB_SIZE)], min_tokens=2, max_tokens=9)
    with pytest.raises(ValueError, match="min_tokens=2 forbids every one of the 97 tokens"):
        engine.generate([3, 4], everything)
    allowed = SamplingParams(stop_token_ids=[*range(1, VOCAB_SIZE)], min_tokens=2, max_tokens=3)
    assert engine.generate([3, 4], allowed)[0].outputs[0].token_ids[0] == 0


def test_nan_in_the_null_block_changes_no_answer(
    engines: Engines, tmp_path: Path, nan_folder: Path
):
    """Padding has token id 0, whose embedding is NaN in this model. Steps write the KV of padding
    to the null block."""
    prompt, params = HEALTHY["greedy"]
    expected, found = (
        engines(folder, **OPTIONS).generate([prompt] * 3, params)
        for folder in (nan_folder, save_checkpoint(tmp_path, 0, BAD))
    )
    assert answers(found) == answers(expected)


def test_nan_logits_in_a_multi_step_decode_end_one_request_only(engines: Engines, nan_folder: Path):
    """One request samples the token `BAD`, whose embedding is NaN, in the step before the
    multi-step decode."""
    burst, long = 3, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    options = {**OPTIONS, "max_num_seqs": 8, "num_scheduler_steps": burst}
    engine, (prompt, _) = engines(nan_folder, **options), HEALTHY["greedy"]
    expected = answers(engine.generate(prompt, long))
    engine.add_request(prompt, long, request_id="healthy")
    engine.add_request(*VICTIMS["later"], request_id="victim")
    last: dict[str, Any] = {}
    with engine.record_steps() as steps:
        while engine.has_unfinished_requests:
            step(engine, last)
    holding = [launch.plans for launch in steps.launches if len(launch.plans) == burst]
    rows = [it.sequence.request.request_id for plans in holding for it in plans[0].scheduled]
    assert {"healthy", "victim"} == {*rows}
    (failed,) = last["victim"].outputs
    assert ([*failed.token_ids], failed.finish_reason) == ([BAD], "error")
    assert answers([last["healthy"]]) == expected
    engine.reset_prefix_cache()
    assert answers(engine.generate(prompt, long)) == expected
