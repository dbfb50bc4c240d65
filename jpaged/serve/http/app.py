"""The routes, what surrounds them, and `/openapi.json`, which is made of the same structs."""

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged import __version__
from jpaged.serve.api.chat import Chat
from jpaged.serve.api.completions import Completions
from jpaged.serve.api.conversation import Body, check_calls_are_found
from jpaged.serve.api.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    components,
    read,
)
from jpaged.serve.api.messages import (
    ANTHROPIC_ERROR,
    CountTokensRequest,
    Messages,
    MessagesRequest,
    anthropic_answer,
)
from jpaged.serve.api.messages import failure_event as messages_failure
from jpaged.serve.api.responses import Responses, ResponsesRequest
from jpaged.serve.api.responses import failure_event as responses_failure
from jpaged.serve.dashboard.broadcast import dashboard_routes
from jpaged.serve.engine.tokenizing_process import Order
from jpaged.serve.errors import ApiError
from jpaged.serve.http.access import OPEN_PATHS, Access, client_of
from jpaged.serve.http.bodies import BodyReader
from jpaged.serve.http.connections import SurplusGuard
from jpaged.serve.http.exchange import (
    Exchange,
    as_api_error,
    error_answer,
    json_answer,
    json_bytes,
    large_json,
)
from jpaged.serve.http.metrics import CONTENT_TYPE
from jpaged.serve.http.serving import Serving

_BODIES: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionRequest, "Complete prompts."),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, as OpenAI's Responses API has it."),
    "/v1/messages": (MessagesRequest, "Answer a conversation, as Anthropic's Messages API has it."),
    "/v1/messages/count_tokens": (CountTokensRequest, "Count a conversation's tokens."),
    "/tokenize": (TokenizeRequest, "The token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "The text of token ids."),
}
MESSAGES = "/v1/messages"
"""Errors at this path and below it have Anthropic's format."""

_PING = "/ping"
_MODEL = "/v1/models/{name}"
_READS = {
    "/v1/models": "What the model may be called.",
    _MODEL: "One of the model's names.",
    "/health": "200 as long as the engine's loop goes round, else 503.",
    "/ready": "200 as long as new requests are welcome, else 503.",
    _PING: "The same as /health.",
    "/version": "jpaged's version.",
    "/load": "Requests in flight.",
    "/metrics": "Figures for Prometheus, with vLLM's names.",
    "/openapi.json": "This.",
}
_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_NO_MODEL = {"404": "No model has this name."}
_ERRORS_OF_READS = {
    "403": "The Host header is not allowed (`--allowed-hosts`).",
    "503": (
        "The server is starting, full, unresponsive or shutting down: retry after Retry-After "
        "seconds."
    ),
}
_ERRORS_OF_BODIES = {
    "400": "A field is not acceptable; the error names it.",
    **_NO_MODEL,
    "413": "The body is too large.",
    "415": "The body is not said to be JSON.",
    "429": "This client has its share in flight; Retry-After says when to come back.",
    "500": "The request failed on the server.",
    **_ERRORS_OF_READS,
}
_MODEL_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_DENIED = {"401": "The API key is missing or wrong."}
_NULLABLE_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": _NULLABLE_TEXT,
            },
        }
    },
}

T = TypeVar("T", bound=Body)

_OTHER_VALUES = 64 * 1024
"""Values that a body may have in addition to the token ids of a prompt."""

_LARGE_ANSWER = 16 * 1024
"""Characters or tokens above which an answer is made JSON in a thread."""


def openapi() -> dict[str, Any]:
    """The API, as OpenAPI 3.1 has it."""
    paths: dict[str, Any] = {
        path: {"get": _operation(path, meaning)} for path, meaning in _READS.items()
    }
    paths[_PING]["post"] = paths[_PING]["get"]
    paths[_MODEL] |= {"parameters": [_MODEL_NAME]}
    schemas = components(*(body for body, _ in _BODIES.values()))
    return {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": __version__},
        "paths": {path: {"post": _post(path)} for path in _BODIES} | paths,
        "components": {
            "schemas": schemas | {"Error": _ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": _KEYS,
        },
        "security": [{}, *({name: []} for name in _KEYS)],
    }


def _post(path: str) -> dict[str, Any]:
    record, meaning = _BODIES[path]
    schema = {"$ref": f"#/components/schemas/{record.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return _operation(path, meaning, _ERRORS_OF_BODIES) | {"requestBody": body}


def _operation(
    path: str, meaning: str, errors: dict[str, str] = _ERRORS_OF_READS
) -> dict[str, Any]:
    told = errors | (_NO_MODEL if path == _MODEL else {})
    told |= {} if path in OPEN_PATHS else _DENIED
    answers = {status: _error(path, text) for status, text in told.items()}
    if path in OPEN_PATHS:
        answers["503"] = {"description": "The server is not healthy, or not ready."}
    return {"summary": meaning, "responses": {"200": _success(path), **answers}}


def _success(path: str) -> dict[str, Any]:
    if path in OPEN_PATHS:
        return {"description": "Yes."}
    kinds = ["text/plain"] if path == "/metrics" else ["application/json"]
    kinds += ["text/event-stream"] if path in _STREAMED else []
    return {"description": "The answer.", "content": {kind: {} for kind in kinds}}


def _error(path: str, meaning: str) -> dict[str, Any]:
    name = "AnthropicError" if _is_anthropics(path) else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": meaning, "content": {"application/json": {"schema": schema}}}


def make_app(serving: Serving) -> ASGIApp:
    """The application: endpoints behind Hosts and keys, every failure an answer."""
    return SurplusGuard(App(serving), _refusal)


class App:
    """The endpoints, and what surrounds them."""

    def __init__(self, serving: Serving):
        self._serving = serving
        config = serving.config
        self._access = Access(config.api_keys, config.allowed_hosts, has_page=config.dashboard)
        self._bodies = BodyReader(config.limits)
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route(MESSAGES, self._messages, methods=["POST"]),
            Route(f"{MESSAGES}/count_tokens", self._count_tokens, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._one_model, methods=["GET"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route(_PING, self._health, methods=["GET", "POST"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/load", self._load, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
        ]
        if config.dashboard:
            routes += dashboard_routes(serving)
        self._router = Router(routes, redirect_slashes=False, default=_nowhere)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request.

        An error before the response has started is sent in the format of the API.
        """
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        if scope["type"] != "http":
            return
        try:
            self._access.check(scope)
            # With an app in the scope, routes raise what they refuse, as all here does.
            scope = {**scope, "app": self}
            with self._bodies.held_for(scope):
                await self._router(scope, receive, watched)
        except Exception as error:
            if started:
                raise
            await _refusal(scope["path"], as_api_error(error))(scope, receive, send)

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, Completions, "cmpl-")

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, Chat, "chatcmpl-")

    async def _responses(self, request: Request) -> Response:
        how = {"failure": responses_failure}
        return await self._generate(request, ResponsesRequest, Responses, "resp_", **how)

    async def _messages(self, request: Request) -> Response:
        how = {"failure": messages_failure, "refusal": anthropic_answer}
        return await self._generate(request, MessagesRequest, Messages, "msg_", **how)

    async def _generate(
        self,
        request: Request,
        record: type[SamplingFields] | type[ResponsesRequest] | type[MessagesRequest],
        generation: type[Completions] | type[Chat] | type[Responses] | type[Messages],
        prefix: str,
        **how: Any,
    ) -> Response:
        """Read a body, check what it asks, and begin its answer in the endpoint's words."""
        serving = self._serving
        config = serving.config
        serving.check_engine()
        asked: Any = await self._read(request, record)
        model = serving.model_name(asked.model)
        if isinstance(asked, SamplingFields):
            asked.check(config.limits)
        if isinstance(asked, ChatRequest):
            asked.check_template(config.template_variables)
            check_calls_are_found(asked.offered_tools, config)
        elif isinstance(asked, (ResponsesRequest, MessagesRequest)):  # a chat in other words
            check_calls_are_found(asked.chat.offered_tools, config)
        request_id, client = f"{prefix}{uuid.uuid4().hex}", self._client_of(request)
        made = generation(serving, asked, request_id, model, client)
        stall = config.limits.stall_timeout
        return Exchange(made.pieces(), streams=asked.stream, stall_timeout=stall, **how)

    async def _count_tokens(self, request: Request) -> Response:
        serving = self._serving
        asked = await self._read(request, CountTokensRequest)
        serving.model_name(asked.model)
        chat = asked.chat
        order = Order(messages=chat.conversation, options=chat.template_options)

        async def answer() -> dict[str, Any]:
            done = await serving.tokenizing.tokenized(order, "messages")
            return {"input_tokens": len(done.token_ids)}

        return self._made(request, answer, refusal=anthropic_answer)

    async def _tokenize(self, request: Request) -> Response:
        serving, tokenizing = self._serving, self._serving.tokenizing
        asked = await self._read(request, TokenizeRequest)
        serving.model_name(asked.model)
        asked.check()
        strings = asked.return_token_strs
        if asked.messages is None:
            path, order = "prompt", Order(asked.prompt, asked.add_special_tokens, strings=strings)
        else:
            asked.check_template(serving.config.template_variables)
            told, options = asked.conversation, asked.template_options
            path, order = "messages", Order(messages=told, options=options, strings=strings)

        async def answer() -> dict[str, Any]:
            done = await tokenizing.tokenized(order, path)
            return {
                "count": len(done.token_ids),
                "max_model_len": tokenizing.max_model_len,
                "tokens": done.token_ids,
                "token_strs": done.strings,
            }

        return self._made(request, answer)

    async def _detokenize(self, request: Request) -> Response:
        serving = self._serving
        asked = await self._read(request, DetokenizeRequest)
        serving.model_name(asked.model)

        async def answer() -> dict[str, Any]:
            return {"prompt": await serving.tokenizing.decode(asked.tokens)}

        return self._made(request, answer)

    async def _read(self, request: Request, record: type[T]) -> T:
        """The record in a body, which may always name as many token ids as the model takes."""
        serving = self._serving
        longest = serving.tokenizing.max_model_len + _OTHER_VALUES
        most = max(serving.config.limits.max_body_values, longest)
        return await self._bodies.read(request, lambda value: read(record, value), most)

    def _made(
        self, request: Request, make: Callable[[], Awaitable[dict[str, Any]]], **how: Any
    ) -> Response:
        """An answer that is made while its client waits: one of the client's requests in flight."""
        serving, client = self._serving, self._client_of(request)

        async def piece() -> AsyncGenerator[bytes, None]:
            with serving.admit(client, 0):
                answer = await make()
                size = sum(len(it) for it in answer.values() if isinstance(it, (str, list)))
                if size <= _LARGE_ANSWER:
                    yield json_bytes(answer)
                else:
                    yield await serving.in_thread(lambda: large_json(answer))

        stall = serving.config.limits.stall_timeout
        return Exchange(piece(), streams=False, stall_timeout=stall, **how)

    def _client_of(self, request: Request) -> str:
        return client_of(request.scope, keyed=bool(self._serving.config.api_keys))

    async def _models(self, request: Request) -> Response:
        names = self._serving.config.model_names
        return json_answer({"object": "list", "data": [self._card(name) for name in names]})

    async def _one_model(self, request: Request) -> Response:
        return json_answer(self._card(self._serving.model_name(request.path_params["name"])))

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._serving.is_healthy else 503)

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._serving.is_ready else 503)

    async def _version(self, request: Request) -> Response:
        return json_answer({"version": __version__})

    async def _load(self, request: Request) -> Response:
        return json_answer({"server_load": self._serving.num_requests})

    async def _metrics(self, request: Request) -> Response:
        serving = self._serving
        text = serving.metrics.text(serving.engine.stats)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, request: Request) -> Response:
        return json_answer(openapi())

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._serving.started,
            "owned_by": "jpaged",
            "root": self._serving.config.model_names[0],
            "parent": None,
            "max_model_len": self._serving.tokenizing.max_model_len,
        }


def _is_anthropics(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def _refusal(path: str, error: ApiError) -> Response:
    """Return an error response in the format of the API at `path`."""
    return anthropic_answer(error) if _is_anthropics(path) else error_answer(error)


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    raise ApiError(404, "there is nothing at this address; /openapi.json lists what there is")
