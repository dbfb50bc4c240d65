"""A model that gives one request no numbers: it ends with an error, and no other is touched."""

from pathlib import Path
from typing import Any

import pytest
from e2e_options import Engines

from jpaged import Engine, SamplingParams
from tests.covering import covering

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SICK, VOCAB_SIZE = 96, 97
"""The token whose embedding is NaN; its logit is low, so that no request samples it by chance."""

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
    "greedy": ([3, SICK, 4], SamplingParams(temperature=0.0, max_tokens=20)),
    "random": ([SICK] * 40, SamplingParams(n=3, seed=1, top_p=0.9, max_tokens=20)),
    "scored": ([3, 4, 5, SICK], SamplingParams(logprobs=3, prompt_logprobs=1, max_tokens=9)),
    "penalized": ([SICK, 3], SamplingParams(frequency_penalty=0.5, min_tokens=3, max_tokens=9)),
    "search": ([3, SICK], SamplingParams(beam_width=4, max_tokens=9)),
    # Well until it samples the token itself.
    "later": ([3, 4], SamplingParams(logit_bias={SICK: 100.0}, temperature=0.0, max_tokens=9)),
}


def save_checkpoint(folder: Path, *sick: int) -> Path:
    """A random Llama whose embeddings of some tokens are NaN; their logits are low."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
        for token in sick:
            model.model.embed_tokens.weight[token] = float("nan")
            model.lm_head.weight[token] = 0.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sick_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("sick"), SICK)


LOOPS: dict[str, dict[str, Any]] = {"overlapped": {}, "synchronous": {"async_scheduling": False}}


@pytest.fixture(params=[*LOOPS])
def engine(engines: Engines, sick_folder: Path, request: pytest.FixtureRequest) -> Engine:
    options = {"skip_tokenizer_init": True, "num_blocks": 33, "max_num_seqs": 16}
    return engines(sick_folder, **LOOPS[request.param], **options)


def step(engine: Engine, last: dict[str, Any]) -> None:
    """Advance, and keep the last output of each request."""
    last.update((output.request_id, output) for output in engine.step())
    engine.check_integrity()


def answers(output: Any) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.finish_reason) for each in output.outputs]


@pytest.mark.parametrize(
    ("engine", "victim"), covering(LOOPS, VICTIMS, strength=1), indirect=["engine"]
)
def test_nan_logits_of_one_request_end_that_request_only(engine: Engine, victim: str):
    expected = {name: answers(engine.generate(*HEALTHY[name])[0]) for name in HEALTHY}
    prompt, params = VICTIMS[victim]
    for _ in range(2):  # the second time in blocks that held what is no number
        last: dict[str, Any] = {}
        for name in HEALTHY:
            engine.add_request(*HEALTHY[name], request_id=name)
            step(engine, last)
            if name == "random":
                engine.add_request(prompt, params, request_id="victim")
        while engine.has_unfinished_requests:
            step(engine, last)
        assert {name: answers(last[name]) for name in HEALTHY} == expected
        assert last["victim"].finished
        reasons = {each.finish_reason for each in last["victim"].outputs}
        assert reasons == (set() if victim == "search" else {"error"})
        tokens = [token for each in last["victim"].outputs for token in each.token_ids]
        assert tokens == ([SICK] if victim == "later" else [])


@pytest.mark.parametrize(
    ("engine", "victim"), covering(LOOPS, VICTIMS, strength=1), indirect=["engine"]
)
def test_error_of_a_missing_token_names_the_cause(engine: Engine, victim: str):
    with pytest.raises(RuntimeError, match="failed") as caught:
        engine.generate(*VICTIMS[victim])
    assert "logits are NaN or infinite" in str(caught.value.__cause__)
    engine.add_request(*VICTIMS[victim], request_id="victim")
    deltas = []
    while engine.has_unfinished_requests:
        engine.advance()
        deltas += engine.take_deltas()
    assert deltas[-1].finished
    assert "logits are NaN or infinite" in (deltas[-1].error or "")


def test_request_that_forbids_every_token_is_refused(engine: Engine):
    everything = SamplingParams(stop_token_ids=[*range(VOCAB_SIZE)], min_tokens=2, max_tokens=9)
    with pytest.raises(ValueError, match="min_tokens=2 forbids every one of the 97 tokens"):
        engine.generate([3, 4], everything)
    allowed = SamplingParams(stop_token_ids=[*range(1, VOCAB_SIZE)], min_tokens=2, max_tokens=3)
    assert engine.generate([3, 4], allowed)[0].outputs[0].token_ids[0] == 0


def test_nan_in_the_null_block_changes_no_answer(
    engines: Engines, tmp_path: Path, sick_folder: Path
):
    """Padding is written there, as tokens 0, whose embeddings are NaN here."""
    padded = save_checkpoint(tmp_path, 0, SICK)
    prompt, params = HEALTHY["greedy"]
    outputs = [
        engines(folder, skip_tokenizer_init=True, num_blocks=33, max_num_seqs=16).generate(
            [prompt] * 3, params
        )
        for folder in (sick_folder, padded)
    ]
    for output, expected in zip(*outputs, strict=True):
        assert answers(output) == answers(expected)


def test_row_without_token_in_a_burst_ends_its_request_only(engines: Engines, sick_folder: Path):
    """It samples the sick token before the burst."""
    burst, long = 3, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    options = {"skip_tokenizer_init": True, "num_blocks": 33, "num_scheduler_steps": burst}
    engine, (prompt, _) = engines(sick_folder, **options), HEALTHY["greedy"]
    expected = answers(engine.generate(prompt, long)[0])
    engine.add_request(prompt, long, request_id="well")
    engine.add_request(*VICTIMS["later"], request_id="ill")
    last: dict[str, Any] = {}
    with engine.record_steps() as steps:
        while engine.has_unfinished_requests:
            step(engine, last)
    holding = [launch.plans for launch in steps.launches if len(launch.plans) == burst]
    rows = [it.sequence.request.request_id for plans in holding for it in plans[0].scheduled]
    assert {"well", "ill"} == {*rows}
    assert answers(last["ill"]) == [([SICK], "error")]
    assert answers(last["well"]) == expected
    engine.reset_prefix_cache()
    assert answers(engine.generate(prompt, long)[0]) == expected
