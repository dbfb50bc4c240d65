"""`/v1/chat/completions`: chat events as OpenAI's messages and the deltas of its chunks."""

from jpaged import CallStart, TextDelta
from jpaged.serve.api.chat_events import Event
from jpaged.serve.api.generation import ChatGeneration, ChoicesGeneration, Json, finite

_REST: Json = {"logprobs": None, "finish_reason": None}
"""Fields of the chunks that have no tokens of their own."""


class Chat(ChatGeneration, ChoicesGeneration):
    """One request of `/v1/chat/completions`."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _whole_fields(self) -> Json:
        body: Json = {}
        if self._asked.return_token_ids:
            body["prompt_token_ids"] = self._prompts[0]
        if self._asked.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._shown_prompt_logprobs(0)
        return body

    def _chunks(self, number: int, delta: TextDelta, *, is_first: bool) -> list[Json]:
        """Return one choice per event. The last one has what belongs to the tokens."""
        answer = self._answer(number)
        deltas = list(filter(None, map(_delta, answer.add(delta))))
        if deltas and delta.finished and "tool_calls" in deltas[-1]:
            deltas.append({})  # OpenAI sends the finish reason of calls in a chunk without a delta
        if not deltas and (not self._is_parsed or self._has_more_than_text(delta)):
            deltas = [{}]
        chunks: list[Json] = []
        if is_first:
            chunks.append({"index": number, "delta": {"role": "assistant", "content": ""}, **_REST})
        if deltas:
            *others, last = deltas
            chunks += [{"index": number, "delta": each, **_REST} for each in others]
            own = {"logprobs": self._logprobs(delta), **self._ending(delta)}
            own["finish_reason"] = answer.finish_reason
            chunks.append({"index": number, "delta": last, **own})
        return chunks

    def _has_more_than_text(self, delta: TextDelta) -> bool:
        return delta.finished or bool(delta.logprobs) or self._asked.return_token_ids

    def _choice(self, number: int, answer: TextDelta) -> Json:
        items = self._answer(number).items
        content = "".join(item.text for item in items if item.kind == "content")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self._has_reasoning:
            reasoning = "".join(item.text for item in items if item.kind == "reasoning")
            message["reasoning_content"] = reasoning or None
        if calls := [_call(item.call, item.text) for item in items if item.call is not None]:
            message["content"] = content or None
            message["tool_calls"] = calls
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(answer),
            **self._ending(answer),
            "finish_reason": self._answer(number).finish_reason,
        }

    def _logprobs(self, delta: TextDelta) -> Json | None:
        num_top = self._asked.num_logprobs
        if num_top is None:
            return None
        content = []
        for token_id, found in zip(delta.token_ids, delta.logprobs or (), strict=True):
            best = sorted(found.items(), key=lambda item: -item[1].logprob)[:num_top]
            top = [self._scored(each, own.logprob) for each, own in best]
            content.append(self._scored(token_id, found[token_id].logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _scored(self, token_id: int, logprob: float) -> Json:
        """Return a token and its log-probability. A part of a character has bytes but no text."""
        own = list(self._texts.token_bytes(token_id))
        return {"token": self._shown(token_id), "logprob": finite(logprob), "bytes": own}


def _delta(event: Event) -> Json | None:
    """Return the delta that OpenAI's stream has for an event; None if it has none."""
    what, item, text = event
    if what == "text":
        if item.call is None:
            return {"content" if item.kind == "content" else "reasoning_content": text}
        return {"tool_calls": [{"index": item.call.index, "function": {"arguments": text}}]}
    if what == "start" and item.call is not None:
        return {"tool_calls": [{"index": item.call.index, **_call(item.call, "")}]}
    return None


def _call(start: CallStart, arguments: str) -> Json:
    function = {"name": start.name, "arguments": arguments}
    return {"id": start.id, "type": "function", "function": function}
