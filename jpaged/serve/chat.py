"""`/v1/chat/completions`: a conversation to a job, and its answers as OpenAI writes them."""

from collections.abc import Sequence

from jpaged import TextDelta
from jpaged.serve.answers import Tally
from jpaged.serve.generation import Body, Choice, Generation
from jpaged.serve.logprobs import TokenText, chat_logprobs, prompt_logprobs
from jpaged.serve.protocol import ChatRequest
from jpaged.serve.run import Job


class ChatChoice(Choice):
    """Writes one answer.

    Args:
        asked: The request.
        index: The choice's.
        token_text: The text of a token alone.
    """

    def __init__(self, asked: ChatRequest, index: int, token_text: TokenText):
        self._asked, self._index, self._token_text = asked, index, token_text
        self._is_open = False

    def grow(self, delta: TextDelta, tally: Tally) -> list[Body]:
        """A choice with the growth; before the first, one that says whose message it is."""
        chunks = []
        if not self._is_open:
            self._is_open = True
            chunks.append(self._chunk({"role": "assistant", "content": ""}))
        chunk = self._chunk({"content": delta.text} if delta.text else {})
        return [*chunks, chunk | self._ending(delta)]

    def whole(self, answer: TextDelta, tally: Tally) -> Body:
        """A choice with a message."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": self._index, "message": message, **self._ending(answer)}

    def _chunk(self, delta: Body) -> Body:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _ending(self, delta: TextDelta) -> Body:
        ending = {
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._asked.return_token_ids:
            ending["token_ids"] = list(delta.token_ids)
        return ending

    def _logprobs(self, delta: TextDelta) -> Body | None:
        if self._asked.num_logprobs is None:
            return None
        return chat_logprobs(
            delta.token_ids,
            delta.logprobs or (),
            self._asked.num_logprobs,
            self._token_text,
            as_ids=self._asked.return_tokens_as_token_ids,
        )


class Chat(Generation):
    """One request of `/v1/chat/completions`."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"
    _asked: ChatRequest

    @property
    def num_prompts(self) -> int:
        """Prompts to answer."""
        return 1

    async def jobs(self) -> list[Job]:
        """One job."""
        asked, texts = self._asked, self.serving.texts
        params = asked.sampling_params(asked.longest, logprobs=asked.num_logprobs)
        keep = asked.truncate_prompt_tokens
        last = texts.num_kept(asked.longest, keep)
        ids = await texts.render(asked.messages, asked.template_options, last=last)
        ids = texts.fitted(ids, "messages", asked.longest, keep)
        return [self.job(0, ids, params)]

    async def choices(self, jobs: Sequence[Job]) -> list[Choice]:
        """Who writes the answers."""
        token_text = self.serving.texts.token_text
        return [ChatChoice(self._asked, i, token_text) for i in range(self._asked.n)]

    def opening(self, tally: Tally) -> Body:
        """The prompt's own part of a whole answer."""
        body: Body = {}
        if self._asked.return_token_ids:
            body["prompt_token_ids"] = tally.prompts[0]
        if self._asked.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(tally.prompt_logprobs.get(0, [None]))
        return body
