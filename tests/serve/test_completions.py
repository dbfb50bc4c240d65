"""Test the route `/v1/completions`."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from serve_helpers import ANSWER, QUESTION, Server, events_of

from jpaged import Engine, RequestDelta
from jpaged.serve.api import generation
from jpaged.serve.engine import client as engine_client
from jpaged.serve.engine import worker
from jpaged.serve.engine.tokenizing import TokenizingService

Run = Callable[..., None]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 64}


async def stream(server: Server, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    """Return the decoded events of a stream. Check the response's headers and the last event."""
    async with server.http.stream("POST", path, json={**fields, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [data async for data in events_of(answer)]
    assert events[-1] == "[DONE]"
    return [json.loads(data) for data in events[:-1]]


def test_completion_returns_text_and_usage(serve: Run):
    async def scenario(server: Server) -> None:
        body = await server.complete(prompt=QUESTION, **GREEDY)
        assert body["object"] == "text_completion"
        assert body["model"] == "jpaged-tiny"
        (choice,) = body["choices"]
        assert choice == {
            "index": 0,
            "text": ANSWER,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (17, 15)
        assert usage["total_tokens"] == 32

    serve(scenario)


def test_prompt_can_be_text_or_token_ids_or_a_list_of_prompts(serve: Run):
    ids = list(QUESTION.encode())

    async def scenario(server: Server) -> None:
        for prompt in (QUESTION, [QUESTION], ids, [ids], [QUESTION, ids, "Reverse stone"]):
            body = await server.complete(prompt=prompt, **GREEDY)
            texts = [choice["text"] for choice in body["choices"]]
            assert texts == [ANSWER] if len(texts) == 1 else [ANSWER, ANSWER, "\nenots"]
            assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))

    serve(scenario)


def test_stream_has_the_text_and_finish_reason_of_a_response_without_streaming(serve: Run):
    async def scenario(server: Server) -> None:
        chunks = await stream(server, prompt=QUESTION, **GREEDY)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["stop"]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert not any("usage" in chunk for chunk in chunks)

    serve(scenario)


def test_stream_options_control_usage_chunks(serve: Run):
    async def scenario(server: Server) -> None:
        options = {"include_usage": True}
        *chunks, last = await stream(server, prompt=QUESTION, stream_options=options, **GREEDY)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 15
        assert not any("usage" in chunk for chunk in chunks)
        options = {"continuous_usage_stats": True, "include_usage": True}
        chunks = await stream(server, prompt=QUESTION, stream_options=options, **GREEDY)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 15

    serve(scenario)


def test_choice_i_equals_a_single_request_with_seed_plus_i(serve: Run):
    fields = {"prompt": "Hello", "max_tokens": 12, "temperature": 1.5, "ignore_eos": True}

    async def scenario(server: Server) -> None:
        body = await server.complete(**fields, n=3, seed=5)
        texts = [choice["text"] for choice in body["choices"]]
        for i, text in enumerate(texts):
            alone = await server.complete(**fields, seed=5 + i)
            assert alone["choices"][0]["text"] == text
        chunks = await stream(server, **fields, n=3, seed=5)
        streamed = ["", "", ""]
        for chunk in chunks:
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert streamed == texts
        assert body["usage"]["completion_tokens"] == 36
        assert body["usage"]["prompt_tokens"] == 5

    serve(scenario)


def test_beam_search_answers_are_returned_best_first_also_in_a_stream(serve: Run, engine: Any):
    found = engine.beam_search(QUESTION, beam_width=3, max_tokens=20)[0]
    expected = [answer.text for answer in found.outputs]

    async def scenario(server: Server) -> None:
        fields = {"prompt": QUESTION, "max_tokens": 20, "n": 3, "temperature": 0}
        body = await server.complete(**fields, use_beam_search=True)
        assert [choice["text"] for choice in body["choices"]] == expected
        body = await server.complete(**{**fields, "n": 1}, beam_width=3)
        assert [choice["text"] for choice in body["choices"]] == expected[:1]
        chunks = await stream(server, **fields, use_beam_search=True)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == expected

    serve(scenario)


def test_best_of_stream_sends_each_answer_in_one_chunk(serve: Run):
    fields = {"prompt": "Hello", "max_tokens": 8, "temperature": 1.5, "seed": 3, "best_of": 4}

    async def scenario(server: Server) -> None:
        body = await server.complete(**fields, n=2)
        chunks = await stream(server, **fields, n=2)
        texts = [choice["text"] for choice in body["choices"]]
        assert [chunk["choices"][0]["text"] for chunk in chunks] == texts

    serve(scenario)


def test_stop_strings_and_tokens_end_the_answer(serve: Run):
    async def scenario(server: Server) -> None:
        for fields, text, why in (
            ({"stop": ", 5"}, "\n3, 4", ", 5"),
            ({"stop": ["7", "6"]}, "\n3, 4, 5, ", "6"),
            ({"stop": "6", "include_stop_str_in_output": True}, "\n3, 4, 5, 6", "6"),
            ({"stop_token_ids": [ord("5")]}, "\n3, 4, ", ord("5")),
        ):
            body = await server.complete(prompt=QUESTION, **GREEDY, **fields)
            (choice,) = body["choices"]
            assert (choice["text"], choice["stop_reason"]) == (text, why)
            assert choice["finish_reason"] == "stop"

    serve(scenario)


def test_max_tokens_min_tokens_and_ignore_eos_set_the_length(serve: Run):
    async def scenario(server: Server) -> None:
        body = await server.complete(prompt=QUESTION, temperature=0)
        assert body["usage"]["completion_tokens"] == 15  # the default limit is 16
        body = await server.complete(prompt=QUESTION, temperature=0, max_tokens=4)
        assert body["choices"][0]["finish_reason"] == "length"
        body = await server.complete(prompt=QUESTION, temperature=0, max_tokens=30, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 30
        body = await server.complete(prompt=QUESTION, temperature=0, max_tokens=30, min_tokens=20)
        assert body["usage"]["completion_tokens"] >= 20

    serve(scenario)


def test_echo_returns_prompt_logprobs_before_the_answers(serve: Run):
    async def scenario(server: Server) -> None:
        fields = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "logprobs": 2}
        body = await server.complete(**fields, echo=True)
        (choice,) = body["choices"]
        found = choice["logprobs"]
        assert choice["text"].startswith("ab")
        assert found["tokens"][:2] == ["a", "b"]
        assert found["text_offset"] == [0, 1, 2, 3]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert all(len(top) >= 2 for top in found["top_logprobs"][1:])
        for token, own, top in list(
            zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        )[1:]:
            assert top[token] == own
        answer = (await server.complete(**fields))["choices"][0]["logprobs"]
        assert answer["tokens"] == found["tokens"][2:]
        assert answer["token_logprobs"] == pytest.approx(found["token_logprobs"][2:], abs=1e-4)
        chunks = await stream(server, **fields, echo=True)
        for name in ("tokens", "text_offset"):
            told = [each for c in chunks for each in c["choices"][0]["logprobs"][name]]
            assert told == found[name]

    serve(scenario)


def test_processed_logprobs_are_normalized_over_the_tokens_that_top_k_keeps(
    serve: Run, engines: Callable[..., Engine]
):
    """`kept_mass` is the probability of the kept tokens before top-k removes the other tokens."""
    fields = {"prompt": "ab", "max_tokens": 4, "seed": 1, "logprobs": 5, "echo": True}
    fields |= {"temperature": 5.0, "top_k": 2, "ignore_eos": True}

    async def scenario(server: Server) -> None:
        found = (await server.complete(**fields))["choices"][0]["logprobs"]
        assert found["kept_mass"][:2] == [None, None]  # the prompt has two tokens
        assert all(0 < mass < 1 for mass in found["kept_mass"][2:])
        for top in found["top_logprobs"][2:]:
            assert sum(map(math.exp, top.values())) == pytest.approx(1.0)
            assert len(top) == 2
        chunks = await stream(server, **fields)
        masses = [mass for it in chunks for mass in it["choices"][0]["logprobs"]["kept_mass"]]
        assert masses == pytest.approx(found["kept_mass"], abs=1e-6)
        greedy = (await server.complete(**fields | {"temperature": 0}))["choices"][0]["logprobs"]
        assert greedy["kept_mass"] == [None, None, 1.0, 1.0, 1.0, 1.0]
        asked = {"best_of": 3, "prompt": "ab", "logprobs": 1}
        assert (await server.http.post("/v1/completions", json=asked)).status_code == 200
        chat = {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_k": 2}
        chat |= {"temperature": 5.0, "max_tokens": 3, "top_logprobs": 5}
        body = (await server.http.post("/v1/chat/completions", json=chat)).json()
        for entry in body["choices"][0]["logprobs"]["content"]:
            assert 0 < entry["kept_mass"] < 1
            total = sum(math.exp(it["logprob"]) for it in entry["top_logprobs"])
            assert total == pytest.approx(1.0)

    serve(scenario, engines(logprobs_mode="processed_logprobs"))


@pytest.mark.full
def test_processed_logits_are_sent_with_minus_9999_as_the_smallest_value(
    serve: Run, engines: Callable[..., Engine]
):
    async def scenario(server: Server) -> None:
        fields = {"prompt": "ab", "max_tokens": 2, "logprobs": 5, "temperature": 1e-6}
        found = (await server.complete(**fields))["choices"][0]["logprobs"]
        values = [value for top in found["top_logprobs"] for value in top.values()]
        assert max(values) > 1e6
        assert all(value >= -9999 for value in values)
        asked = {"best_of": 3, "prompt": "ab", "logprobs": 1}
        answer = await server.http.post("/v1/completions", json=asked)
        assert answer.status_code == 400
        assert "logprobs=1 cannot be combined with best_of=3" in answer.text

    serve(scenario, engines(logprobs_mode="processed_logits"))


def test_text_offset_counts_characters_not_tokens(serve: Run):
    """Several tokens may form one character."""

    async def scenario(server: Server) -> None:
        fields = {"prompt": "aéb", "max_tokens": 1, "echo": True, "logprobs": 0}
        (choice,) = (await server.complete(**fields))["choices"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3]

    serve(scenario)


def test_echo_omits_tokens_that_the_tokenizer_prepends(serve: Run, monkeypatch: pytest.MonkeyPatch):
    prompt_ids = TokenizingService.prompt_ids

    async def begun(self: TokenizingService, *about: Any) -> list[int]:
        return [min(self.special_ids.values()), *await prompt_ids(self, *about)]

    monkeypatch.setattr(TokenizingService, "prompt_ids", begun)

    async def scenario(server: Server) -> None:
        fields = {"prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": 0}
        (choice,) = (await server.complete(**fields))["choices"]
        assert choice["text"].startswith("ab")
        assert choice["logprobs"]["tokens"][1:3] == ["a", "b"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]

    serve(scenario)


def test_text_offset_of_the_answer_starts_at_the_prompt_length(
    serve: Run, monkeypatch: pytest.MonkeyPatch
):
    """The tokenizer may not know the number of characters of a token."""
    monkeypatch.setattr(TokenizingService, "num_characters", lambda self, token_id: 0)

    async def scenario(server: Server) -> None:
        fields = {"prompt": "abc", "max_tokens": 1, "echo": True, "logprobs": 0}
        (choice,) = (await server.complete(**fields))["choices"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 0, 3]

    serve(scenario)


def test_abort_while_prompt_logprobs_are_computed_returns_finish_reason_abort(
    serve: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker, "LOGPROBS_CHUNK_SIZE", 2)
    put = engine_client.UpdateStream.put

    def cut_after(self: engine_client.UpdateStream, delta: RequestDelta) -> None:
        put(self, delta)
        if delta.prompt_logprobs:
            self.abort()

    monkeypatch.setattr(engine_client.UpdateStream, "put", cut_after)

    async def scenario(server: Server) -> None:
        fields = {"prompt": "abcdef", "max_tokens": 1, "echo": True, "logprobs": 0}
        (choice,) = (await server.complete(**fields))["choices"]
        assert choice["finish_reason"] == "abort"
        assert len(choice["logprobs"]["token_logprobs"]) == 6

    serve(scenario)


def test_json_encoding_in_a_thread_gives_the_same_answers_as_in_the_event_loop(
    serve: Run, monkeypatch: pytest.MonkeyPatch
):
    prompt = "".join(f"{i}, " for i in range(50))
    asked = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2}

    async def scenario(server: Server) -> None:
        made = []
        for bound, part in ((generation.MAX_INLINE_LOGPROBS, 7), (10**9, 10**9)):
            monkeypatch.setattr(generation, "MAX_INLINE_LOGPROBS", bound)
            # number of prompt logprobs per delta
            monkeypatch.setattr(worker, "LOGPROBS_CHUNK_SIZE", part)
            whole = await server.complete(**asked, prompt_logprobs=2, return_token_ids=True)
            chunks = await stream(server, **asked, return_token_ids=True)
            assert len(whole["choices"][0]["logprobs"]["tokens"]) > 150
            for own in (whole, *chunks):
                own.update(id=None, created=None)
            usages = [own.pop("usage", {}) for own in (whole, *chunks)]
            assert usages[0]["total_tokens"] > 150
            made.append(
                [whole["choices"], whole["model"], "".join(map(text_of, chunks)), chunks[0]]
            )
        assert made[0] == made[1]

    serve(scenario)


def text_of(chunk: Any) -> str:
    return "".join(choice["text"] for choice in chunk["choices"])


def test_zero_max_tokens_with_echo_scores_the_prompt_only(serve: Run):
    async def scenario(server: Server) -> None:
        body = await server.complete(prompt=["ab", "c"], max_tokens=0, echo=True, logprobs=0)
        assert [choice["text"] for choice in body["choices"]] == ["ab", "c"]
        assert [len(c["logprobs"]["tokens"]) for c in body["choices"]] == [2, 1]
        assert body["usage"]["completion_tokens"] == 0

    serve(scenario)


def test_prompt_logprobs_use_the_vllm_format(serve: Run):
    async def scenario(server: Server) -> None:
        body = await server.complete(prompt="ab", max_tokens=1, temperature=0, prompt_logprobs=1)
        first, second = body["choices"][0]["prompt_logprobs"]
        assert first is None
        assert set(second[str(ord("b"))]) == {"logprob", "rank", "decoded_token"}
        assert second[str(ord("b"))]["decoded_token"] == "b"

    serve(scenario)


def test_token_ids_are_returned_on_request(serve: Run):
    async def scenario(server: Server) -> None:
        fields = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "return_token_ids": True}
        (choice,) = (await server.complete(**fields))["choices"]
        assert choice["prompt_token_ids"] == [97, 98]
        assert len(choice["token_ids"]) == 2
        body = await server.complete(
            prompt="ab", max_tokens=1, logprobs=0, return_tokens_as_token_ids=True, echo=True
        )
        assert body["choices"][0]["logprobs"]["tokens"][:2] == ["token_id:97", "token_id:98"]

    serve(scenario)


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(serve: Run):
    async def scenario(server: Server) -> None:
        long = "x" * 4000 + QUESTION
        body = await server.complete(prompt=long, **GREEDY, truncate_prompt_tokens=17)
        assert body["choices"][0]["text"] == ANSWER
        body = await server.complete(prompt=long, max_tokens=6, truncate_prompt_tokens=-1)
        assert body["usage"]["prompt_tokens"] == 250

    serve(scenario)


def test_cache_salt_separates_cached_prefixes(serve: Run, engine: Any):
    engine.reset_prefix_cache()

    async def cached(server: Server, **fields: Any) -> int:
        body = await server.complete(prompt="x" * 40, max_tokens=1, **fields)
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def scenario(server: Server) -> None:
        assert await cached(server, cache_salt="a") == 0
        assert await cached(server, cache_salt="b") == 0
        assert await cached(server, cache_salt="a") == 32
        assert await cached(server) == 0

    serve(scenario)


def test_sampling_parameters_reach_the_sampler(serve: Run):
    async def scenario(server: Server) -> None:
        fields = {"prompt": QUESTION, "max_tokens": 4, "temperature": 0}
        body = await server.complete(**fields, allowed_token_ids=[65])
        assert body["choices"][0]["text"] == "AAAA"
        body = await server.complete(**fields, logit_bias={"66": 100})
        assert body["choices"][0]["text"] == "BBBB"
        seeded = {**fields, "temperature": 2.0, "seed": 7}
        texts = [(await server.complete(**seeded))["choices"][0]["text"] for _ in range(2)]
        assert texts[0] == texts[1]
        for extra in (
            {"top_k": 1},
            {"top_p": 1e-6},
            {"min_p": 1.0},
        ):
            body = await server.complete(**{**seeded, "seed": 8}, **extra)
            assert body["choices"][0]["text"] == ANSWER[:4]

    serve(scenario)
