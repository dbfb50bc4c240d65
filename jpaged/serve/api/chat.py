"""`/v1/chat/completions`: chat events as OpenAI's messages and the deltas of its chunks."""

from jpaged import CallStart, TextDelta
from jpaged.serve.api.chat_events import ChatGeneration, Event, Item
from jpaged.serve.api.generation import ChoicesGeneration, Json, finite, prompt_logprobs


class Chat(ChatGeneration, ChoicesGeneration):
    """One request of `/v1/chat/completions`."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _whole_fields(self) -> Json:
        body: Json = {}
        if self._asked.return_token_ids:
            body["prompt_token_ids"] = self._prompts[0]
        if self._asked.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs.get(0, [None]))
        return body

    def _chunks(self, number: int, delta: TextDelta, *, is_first: bool) -> list[Json]:
        """Return one choice per event. The last one has what belongs to the tokens."""
        answer = self._answer(number)
        deltas = [each for event in answer.add(delta) if (each := _delta(event)) is not None]
        if deltas and delta.finished and "tool_calls" in deltas[-1]:
            deltas.append({})  # OpenAI sends the finish reason of calls in a chunk without a delta
        has_tokens = delta.finished or bool(delta.logprobs) or self._asked.return_token_ids
        if not deltas and (has_tokens or not self._is_parsed):
            deltas = [{}]
        rest = {"logprobs": None, "finish_reason": None}
        chunks: list[Json] = [{"index": number, "delta": each, **rest} for each in deltas]
        if chunks:
            chunks[-1] |= {"logprobs": self._logprobs(delta), **self._ending(delta)}
            chunks[-1]["finish_reason"] = answer.finish_reason
        if is_first:
            role = {"role": "assistant", "content": ""}
            chunks.insert(0, {"index": number, "delta": role, **rest})
        return chunks

    def _choice(self, number: int, answer: TextDelta) -> Json:
        events = self._answer(number)
        return {
            "index": number,
            "message": self._message(events.items),
            "logprobs": self._logprobs(answer),
            **self._ending(answer),
            "finish_reason": events.finish_reason,
        }

    def _message(self, items: list[Item]) -> Json:
        """Return the message of a whole answer."""
        content = "".join(item.text for item in items if item.kind == "content")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self._has_reasoning:
            reasoning = "".join(item.text for item in items if item.kind == "reasoning")
            message["reasoning_content"] = reasoning or None
        if calls := [_call(item.call, item.text) for item in items if item.call is not None]:
            message["content"] = content or None
            message["tool_calls"] = calls
        return message

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
    call = event.item.call
    if call is None:
        name = "content" if event.item.kind == "content" else "reasoning_content"
        return {name: event.text} if event.what == "text" else None
    if event.what == "start":
        return {"tool_calls": [{"index": call.index, **_call(call, "")}]}
    if event.what == "text":
        return {"tool_calls": [{"index": call.index, "function": {"arguments": event.text}}]}
    return None


def _call(start: CallStart, arguments: str) -> Json:
    function = {"name": start.name, "arguments": arguments}
    return {"id": start.id, "type": "function", "function": function}
