"""Test OpenAI's client, and requests of lm-eval and of vLLM's benchmark, with a server process."""

import asyncio
import json
import math
from typing import Any

import httpx
import openai
import pytest
from server_process import ServerProcess

QUESTION, ANSWER = "Count from 3 to 7", "\n3, 4, 5, 6, 7"
MESSAGES: Any = [{"role": "user", "content": "Reverse stone"}]
MODEL = "jpaged-tiny"


@pytest.fixture
def client(real_server: ServerProcess):
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def test_openai_client_lists_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "jpaged"


def test_openai_client_completes_several_prompts(client: openai.OpenAI):
    made = client.completions.create(
        model=MODEL, prompt=[QUESTION, "Reverse stone"], temperature=0, max_tokens=64, logprobs=1
    )
    assert [choice.text for choice in made.choices] == [ANSWER, "\nenots"]
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []).startswith(ANSWER)


def test_openai_client_streams_a_completion_with_usage(client: openai.OpenAI):
    options: Any = {"include_usage": True}
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=QUESTION,
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options=options,
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 15


def test_openai_client_chats_with_logprobs(client: openai.OpenAI):
    made = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=1
    )
    assert made.choices[0].message.content == "enots"
    assert made.choices[0].finish_reason == "stop"
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert [entry.token for entry in logprobs.content or []][:5] == list("enots")


def test_returned_message_is_accepted_in_the_next_request(client: openai.OpenAI):
    made = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
    answer = made.choices[0].message
    dumped = answer.model_dump()
    assert {"tool_calls", "function_call", "audio", "annotations"} <= set(dumped)
    own = {**dumped, "reasoning_content": None, "annotations": []}
    for message in (answer, dumped, own):
        messages: Any = [*MESSAGES, message, *MESSAGES]
        again = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        assert again.choices[0].message.role == "assistant"


def test_openai_client_streams_a_chat(client: openai.OpenAI):
    with client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, stream=True
    ) as chunks:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "enots"


def test_openai_stream_helper_assembles_the_final_completion(client: openai.OpenAI):
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0) as chunks:
        made = chunks.get_final_completion()
    assert made.choices[0].message.content == "enots"


def test_vllm_fields_in_extra_body_reach_the_sampler(client: openai.OpenAI):
    made = client.completions.create(
        model=MODEL,
        prompt=QUESTION,
        temperature=0,
        max_tokens=4,
        extra_body={"allowed_token_ids": [65], "ignore_eos": True, "top_k": 1},
    )
    assert made.choices[0].text == "AAAA"


def test_openai_client_raises_matching_error_classes(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    long: Any = [{"role": "user", "content": "a" * 2000}]
    for messages, most in ((MESSAGES, 1000), (long, 1)):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as too_long:
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=most)
        assert too_long.value.code == "context_length_exceeded"


def test_twenty_concurrent_streams_return_correct_text(real_server: ServerProcess):
    async def ask(client: openai.AsyncOpenAI, last: int) -> str:
        chunks = await client.completions.create(
            model=MODEL,
            prompt=f"Count from 1 to {last}",
            temperature=0,
            max_tokens=100,
            stream=True,
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def scenario() -> None:
        base = f"{real_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="-", max_retries=0) as client:
            made = await asyncio.gather(*(ask(client, last) for last in range(2, 22)))
        assert made == [f"\n{', '.join(map(str, range(1, k + 1)))}" for k in range(2, 22)]

    asyncio.run(scenario())


def test_server_answers_after_clients_close_their_streams_early(
    client: openai.OpenAI, real_server: ServerProcess
):
    for _ in range(5):
        chunks = client.completions.create(
            model=MODEL,
            prompt="Hello",
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(chunks))
        chunks.close()
    for _ in range(100):
        if not httpx.get(f"{real_server.url}/load").json()["server_load"]:
            break
    assert client.completions.create(model=MODEL, prompt=QUESTION, temperature=0).choices


def lm_eval_scores(url: str, inputs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Return the two scores that lm-eval computes for each input.

    The scores are the log-likelihood of the continuation, and whether greedy decoding would
    generate the continuation.

    Args:
        url: URL of the server.
        inputs: Pairs of token-id lists: a context, and the continuation of the context.
    """
    asked = {
        "model": MODEL,
        "prompt": [context + continuation for context, continuation in inputs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
    answer.raise_for_status()
    scores = []
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    for choice, (context, _) in zip(choices, inputs, strict=True):
        start = len(context)
        own = choice["logprobs"]["token_logprobs"][start:-1]
        top = choice["logprobs"]["top_logprobs"][start:-1]
        is_greedy = all(o == max(t.values()) for o, t in zip(own, top, strict=True))
        scores.append((sum(own), is_greedy))
    return scores


def test_lm_eval_scores_match_transformers(real_server: ServerProcess):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from jpaged.config import EMBEDDED_MODEL

    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype="float32")
    pairs = [
        (QUESTION, ANSWER),
        (QUESTION, "\n3, 4, 9"),
        ("Reverse stone", "\nenots"),
        ("What is 17 + 25?", "\n42"),
        ("What is 17 + 25?", "\n43"),
        ("x" * 40, "yz"),
        ("é", "ü"),
    ]
    inputs = [(list(a.encode()), list(b.encode())) for a, b in pairs]
    for _ in range(2):  # the second round hits the prefix cache
        scores = lm_eval_scores(real_server.url, inputs)
        for (context, continuation), (score, is_greedy) in zip(inputs, scores, strict=True):
            ids = torch.tensor([context + continuation])
            with torch.no_grad():
                logits = model(ids).logits[0].double().log_softmax(-1)
            rows = logits[len(context) - 1 : -1]
            expected = rows.gather(1, ids[0, len(context) :, None]).sum().item()
            assert math.isclose(score, expected, rel_tol=1e-4, abs_tol=1e-3)
            assert is_greedy == (rows.argmax(-1) == ids[0, len(context) :]).all().item()


async def benchmark_request(url: str, prompt: str, output_len: int) -> tuple[str, int, int]:
    """Send a request as vLLM's serving benchmark does.

    Returns:
        The text, and the numbers of prompt and completion tokens in the last chunk.
    """
    asked = {
        "model": MODEL,
        "prompt": prompt,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": output_len,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    text, counted = "", {}
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{url}/v1/completions", json=asked) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            data = line.strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if choices := event.get("choices"):
                text += choices[0].get("text") or ""
            elif usage := event.get("usage"):
                counted = usage
    return text, counted["prompt_tokens"], counted["completion_tokens"]


def test_vllm_benchmark_requests_get_exact_token_counts(real_server: ServerProcess):
    url = real_server.url
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == MODEL
    counted = httpx.post(f"{url}/tokenize", json={"model": MODEL, "prompt": "a" * 30}).json()
    assert counted["count"] == 30

    async def scenario() -> None:
        runs = (benchmark_request(url, "a" * (20 + i), 10 + i) for i in range(16))
        for i, (text, num_prompt, num_output) in enumerate(await asyncio.gather(*runs)):
            assert text
            assert (num_prompt, num_output) == (20 + i, 10 + i)

    asyncio.run(scenario())
    assert httpx.get(f"{url}/metrics").text.count("vllm:")
