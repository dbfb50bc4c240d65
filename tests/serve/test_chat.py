"""Test `/v1/chat/completions`, `/tokenize`, `/detokenize` and the status routes."""

from collections.abc import Callable
from typing import Any

from serve_helpers import Server, events_of
from test_completions import stream

Run = Callable[..., None]
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Reverse stone"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32}


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    answer = await server.http.post(CHAT, json={"messages": MESSAGES, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_chat_completion_returns_message_and_usage(serve: Run):
    async def scenario(server: Server) -> None:
        body = await ask(server)
        assert body["object"] == "chat.completion"
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": "enots", "refusal": None}
        assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
        assert body["usage"]["completion_tokens"] == 6

    serve(scenario)


def test_chat_stream_begins_with_the_role(serve: Run):
    async def scenario(server: Server) -> None:
        fields = {"messages": MESSAGES, **GREEDY, "stream_options": {"include_usage": True}}
        *chunks, last = await stream(server, CHAT, **fields)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "enots"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["object"] == "chat.completion.chunk"
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)

    serve(scenario)


def test_chat_accepts_earlier_turns_and_joins_text_parts(serve: Run):
    parts = [{"type": "text", "text": "Reverse"}, {"type": "text", "text": "stone"}]
    question = {"role": "user", "content": "What is 17 + 25?"}
    talk = [*MESSAGES, {"role": "assistant", "content": "enots"}, question]

    async def scenario(server: Server) -> None:
        body = await ask(server, messages=talk)
        assert body["choices"][0]["message"]["content"] == "42"
        body = await ask(server, messages=[{"role": "user", "content": parts}], max_tokens=1)
        joined = await ask(
            server, messages=[{"role": "user", "content": "Reverse\nstone"}], max_tokens=1
        )
        assert body["usage"]["prompt_tokens"] == joined["usage"]["prompt_tokens"]

    serve(scenario)


def test_chat_logprobs_contain_tokens_and_bytes_and_top_logprobs(serve: Run):
    async def scenario(server: Server) -> None:
        body = await ask(server, logprobs=True, top_logprobs=2)
        content = body["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content[:5]] == list("enots")
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert content[0]["bytes"] == [ord("e")]
        assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
        body = await ask(server, logprobs=True)
        assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        # 0xC3 is the first byte of a two-byte character.
        body = await ask(server, logprobs=True, allowed_token_ids=[0xC3], max_tokens=1)
        assert body["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xC3]

    serve(scenario)


def test_chat_returns_n_answers_within_the_token_limits(serve: Run):
    async def scenario(server: Server) -> None:
        body = await ask(server, n=3, temperature=1.0, seed=4, max_completion_tokens=5)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] <= 15
        body = await ask(server, max_tokens=None, ignore_eos=True)
        assert body["usage"]["total_tokens"] == 256  # max_model_len

    serve(scenario)


def test_chat_continues_the_final_assistant_message(serve: Run):
    begun = [*MESSAGES, {"role": "assistant", "content": "en"}]

    async def scenario(server: Server) -> None:
        body = await ask(
            server, messages=begun, add_generation_prompt=False, continue_final_message=True
        )
        assert body["choices"][0]["message"]["content"] == "ots"

    serve(scenario)


def test_chat_returns_token_ids_and_prompt_logprobs(serve: Run):
    async def scenario(server: Server) -> None:
        body = await ask(server, return_token_ids=True, prompt_logprobs=0)
        assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
        assert body["choices"][0]["token_ids"][:5] == list(b"enots")
        assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]

    serve(scenario)


def test_tokenize_uses_the_configured_chat_template(serve: Run):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if loud %}!{% endif %}"

    async def scenario(server: Server) -> None:
        async def count(**fields: Any) -> int:
            answer = await server.http.post("/tokenize", json={"messages": MESSAGES, **fields})
            assert answer.status_code == 200, answer.text
            return answer.json()["count"]

        assert await count() == len("Reverse stone")
        assert await count(chat_template_kwargs={"loud": True}) == len("Reverse stone!")

    serve(scenario, chat_template=template, template_variables=frozenset({"loud"}))


def test_tokenize_and_detokenize_round_trip(serve: Run):
    async def scenario(server: Server) -> None:
        fields = {"prompt": "héllo", "return_token_strs": True}
        body = (await server.http.post("/tokenize", json=fields)).json()
        assert body["tokens"] == list("héllo".encode())
        assert (body["count"], body["max_model_len"]) == (6, 256)
        assert body["token_strs"][0] == "h"
        answer = await server.http.post("/detokenize", json={"tokens": body["tokens"]})
        assert answer.json() == {"prompt": "héllo"}
        body = (await server.http.post("/tokenize", json={"messages": MESSAGES})).json()
        assert body["tokens"] == server.engine.render_chat(MESSAGES)

    serve(scenario)


def test_model_names_are_listed_and_checked(serve: Run):
    async def scenario(server: Server) -> None:
        listed = (await server.http.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["a", "b/c"]
        assert listed["data"][0]["max_model_len"] == 256
        assert (await server.http.get("/v1/models/b/c")).json()["id"] == "b/c"
        assert (await server.http.get("/v1/models/d")).status_code == 404
        assert (await ask(server, model="b/c"))["model"] == "b/c"
        assert (await ask(server))["model"] == "a"
        answer = await server.http.post(CHAT, json={"messages": MESSAGES, "model": "d"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"

    serve(scenario, model_names=("a", "b/c"))


def test_status_routes_answer_and_unknown_routes_return_errors(serve: Run):
    async def scenario(server: Server) -> None:
        for path in ("/health", "/ready", "/ping"):
            assert (await server.http.get(path)).status_code == 200
        assert set((await server.http.get("/version")).json()) == {"version"}
        assert (await server.http.get("/load")).json() == {"server_load": 0}
        answer = await server.http.get("/nowhere")
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
        answer = await server.http.get("/v1/completions")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "POST"
        wrong = await server.http.delete("/version")
        assert wrong.status_code == 405
        assert set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD"}
        assert "Method Not Allowed" in answer.json()["error"]["message"]

    serve(scenario)


def test_invalid_streaming_request_returns_400_without_events(serve: Run):
    async def scenario(server: Server) -> None:
        fields = {"messages": MESSAGES, "max_tokens": 10**6, "stream": True}
        async with server.http.stream("POST", CHAT, json=fields) as answer:
            assert answer.status_code == 400
            assert [data async for data in events_of(answer)] == []

    serve(scenario)
