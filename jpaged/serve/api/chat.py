"""`/v1/chat/completions`: render chat events as OpenAI's messages and stream chunks."""

from typing_extensions import override

from jpaged import CallStart, TextDelta
from jpaged.serve.api.chat_events import ChatEvent
from jpaged.serve.api.generation import ChatGeneration, ChoicesGeneration, JsonObject, clamp_logprob

_NO_TOKEN_FIELDS: JsonObject = {"logprobs": None, "finish_reason": None}
"""Fields that end each choice of a stream chunk without tokens."""


class ChatCompletionsGeneration(ChatGeneration, ChoicesGeneration):
    """Runs one request of `/v1/chat/completions` and renders the answer."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    @override
    def _extra_body_fields(self) -> JsonObject:
        body: JsonObject = {}
        if self._api_request.return_token_ids:
            body["prompt_token_ids"] = self._prompts[0]
        if self._api_request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._format_prompt_logprobs(0)
        return body

    @override
    def _chunks(self, number: int, delta: TextDelta, *, is_first: bool) -> list[JsonObject]:
        """Return one choice per chat event. The last choice has the tokens' log-probabilities."""
        answer = self._answer_events(number)
        deltas = list(filter(None, map(_event_delta, answer.add(delta))))
        if deltas and delta.finished and "tool_calls" in deltas[-1]:
            # As OpenAI does, send a last chunk with an empty delta after tool calls.
            deltas.append({})
        if not deltas and (not self._is_parsed or self._has_more_than_text(delta)):
            deltas = [{}]
        chunks: list[JsonObject] = []
        if is_first:
            chunks.append(
                {"index": number, "delta": {"role": "assistant", "content": ""}, **_NO_TOKEN_FIELDS}
            )
        if deltas:
            *others, last = deltas
            chunks += [{"index": number, "delta": each, **_NO_TOKEN_FIELDS} for each in others]
            own = {"logprobs": self._logprobs(delta), **self._finish_fields(delta)}
            own["finish_reason"] = answer.finish_reason
            chunks.append({"index": number, "delta": last, **own})
        return chunks

    def _has_more_than_text(self, delta: TextDelta) -> bool:
        return delta.finished or bool(delta.logprobs) or self._api_request.return_token_ids

    @override
    def _choice(self, number: int, answer: TextDelta) -> JsonObject:
        items = self._answer_events(number).items
        content = "".join(item.text for item in items if item.kind == "content")
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if self._has_reasoning:
            reasoning = "".join(item.text for item in items if item.kind == "reasoning")
            message["reasoning_content"] = reasoning or None
        if calls := [_tool_call(item.call, item.text) for item in items if item.call is not None]:
            message["content"] = content or None
            message["tool_calls"] = calls
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(answer),
            **self._finish_fields(answer),
            "finish_reason": self._answer_events(number).finish_reason,
        }

    def _logprobs(self, delta: TextDelta) -> JsonObject | None:
        num_top = self._api_request.num_logprobs
        if num_top is None:
            return None
        content = []
        for token_id, candidates in zip(delta.token_ids, delta.logprobs or (), strict=True):
            best = sorted(candidates.items(), key=lambda item: -item[1].logprob)[:num_top]
            top = [self._format_logprob(each, own.logprob) for each, own in best]
            chosen = candidates[token_id]
            entry = self._format_logprob(token_id, chosen.logprob)
            content.append(entry | {"top_logprobs": top, "kept_mass": chosen.kept_mass})
        return {"content": content, "refusal": None}

    def _format_logprob(self, token_id: int, logprob: float) -> JsonObject:
        """Return a token's text, log-probability and bytes as a JSON object."""
        own = list(self._tokenizing.token_bytes(token_id))
        return {
            "token": self._format_token(token_id),
            "logprob": clamp_logprob(logprob),
            "bytes": own,
        }


def _event_delta(event: ChatEvent) -> JsonObject | None:
    """Return the delta that OpenAI's stream sends for a chat event; None for other events."""
    event_kind, item, text = event
    if event_kind == "text":
        if item.call is None:
            return {"content" if item.kind == "content" else "reasoning_content": text}
        return {"tool_calls": [{"index": item.call.index, "function": {"arguments": text}}]}
    if event_kind == "start" and item.call is not None:
        return {"tool_calls": [{"index": item.call.index, **_tool_call(item.call, "")}]}
    return None


def _tool_call(start: CallStart, arguments: str) -> JsonObject:
    function = {"name": start.name, "arguments": arguments}
    return {"id": start.id, "type": "function", "function": function}
