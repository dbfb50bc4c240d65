"""The ASGI application, its routes, and the OpenAPI description of these routes."""

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged import __version__
from jpaged.serve.api.chat import ChatCompletionsGeneration
from jpaged.serve.api.completions import CompletionsGeneration
from jpaged.serve.api.conversation import Body, check_tools_enabled
from jpaged.serve.api.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    component_schemas,
    parse_body,
)
from jpaged.serve.api.messages import (
    ANTHROPIC_ERROR_SCHEMA,
    CountTokensRequest,
    MessagesGeneration,
    MessagesRequest,
    anthropic_error_response,
)
from jpaged.serve.api.messages import failure_event as messages_failure
from jpaged.serve.api.responses import ResponsesGeneration, ResponsesRequest
from jpaged.serve.api.responses import failure_event as responses_failure
from jpaged.serve.dashboard.broadcast import dashboard_routes
from jpaged.serve.engine.tokenizing_process import TokenizeJob
from jpaged.serve.errors import ApiError
from jpaged.serve.http.access import UNAUTHENTICATED_PATHS, Access, client_id
from jpaged.serve.http.bodies import BodyReader
from jpaged.serve.http.connections import SurplusGuard
from jpaged.serve.http.control import ControlEndpoints
from jpaged.serve.http.exchange import (
    GeneratorResponse,
    encode_json,
    encode_large_json,
    error_response,
    json_response,
    to_api_error,
)
from jpaged.serve.http.metrics import CONTENT_TYPE
from jpaged.serve.http.serving import ServerState

_POST_ENDPOINTS: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionRequest, "Complete prompts."),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, with OpenAI's Responses API."),
    "/v1/messages": (MessagesRequest, "Answer a conversation, with Anthropic's Messages API."),
    "/v1/messages/count_tokens": (CountTokensRequest, "Count a conversation's tokens."),
    "/tokenize": (TokenizeRequest, "Return the token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "Return the text of token ids."),
}
MESSAGES_PATH = "/v1/messages"
"""Path of the Messages API. Errors at this path and below it have Anthropic's format."""

_PING_PATH = "/ping"
_MODEL_PATH = "/v1/models/{name}"
_GET_ENDPOINTS = {
    "/v1/models": "List the names of the model.",
    _MODEL_PATH: "Describe the model under one of its names.",
    "/health": "Return 200 while the engine's loop runs, else 503.",
    "/ready": "Return 200 while the server accepts new requests, else 503.",
    _PING_PATH: "Return the same status as /health.",
    "/version": "Return the version of jpaged.",
    "/load": "Return the number of requests in flight.",
    "/metrics": "Return metrics for Prometheus, with vLLM's names.",
    "/openapi.json": "Return this OpenAPI description.",
}
_STREAMING_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_MODEL_NOT_FOUND = {"404": "No model has this name."}
_GET_ERRORS = {
    "403": "The Host header is not allowed (`--allowed-hosts`).",
    "503": (
        "The server is starting, full, unresponsive or shutting down: retry after Retry-After "
        "seconds."
    ),
}
_POST_ERRORS = {
    "400": "A field is invalid; the error names the field.",
    **_MODEL_NOT_FOUND,
    "413": "The body is too large.",
    "415": "The Content-Type is not application/json.",
    "429": "This client has too many requests in flight: retry after Retry-After seconds.",
    "500": "The request failed on the server.",
    **_GET_ERRORS,
}
_MODEL_NAME_PARAMETER = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
}
_SECURITY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer"},
    "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_UNAUTHORIZED = {"401": "The API key is missing or wrong."}
_NULLABLE_STRING = {"type": ["string", "null"]}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_STRING,
                "code": _NULLABLE_STRING,
            },
        }
    },
}

T = TypeVar("T", bound=Body)

_MAX_EXTRA_VALUES = 64 * 1024
"""Maximum number of JSON values in a body, not counting the token ids of a prompt."""

_MAX_INLINE_SIZE = 16 * 1024
"""Maximum size of an answer that the event loop encodes as JSON, in characters or tokens.

Larger answers are encoded in a thread.
"""


def build_openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the HTTP API."""
    paths: dict[str, Any] = {
        path: {"get": _operation(path, description)} for path, description in _GET_ENDPOINTS.items()
    }
    paths[_PING_PATH]["post"] = paths[_PING_PATH]["get"]
    paths[_MODEL_PATH] |= {"parameters": [_MODEL_NAME_PARAMETER]}
    schemas = component_schemas(*(body for body, _ in _POST_ENDPOINTS.values()))
    return {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": __version__},
        "paths": {path: {"post": _post_operation(path)} for path in _POST_ENDPOINTS} | paths,
        "components": {
            "schemas": schemas | {"Error": _ERROR_SCHEMA, "AnthropicError": ANTHROPIC_ERROR_SCHEMA},
            "securitySchemes": _SECURITY_SCHEMES,
        },
        "security": [{}, *({name: []} for name in _SECURITY_SCHEMES)],
    }


def _post_operation(path: str) -> dict[str, Any]:
    body_type, description = _POST_ENDPOINTS[path]
    schema = {"$ref": f"#/components/schemas/{body_type.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return _operation(path, description, _POST_ERRORS) | {"requestBody": body}


def _operation(path: str, description: str, errors: dict[str, str] = _GET_ERRORS) -> dict[str, Any]:
    errors_by_status = errors | (_MODEL_NOT_FOUND if path == _MODEL_PATH else {})
    errors_by_status |= {} if path in UNAUTHENTICATED_PATHS else _UNAUTHORIZED
    answers = {status: _error_description(path, text) for status, text in errors_by_status.items()}
    if path in UNAUTHENTICATED_PATHS:
        answers["503"] = {"description": "The server is not healthy, or not ready."}
    return {"summary": description, "responses": {"200": _success_response(path), **answers}}


def _success_response(path: str) -> dict[str, Any]:
    if path in UNAUTHENTICATED_PATHS:
        return {"description": "The server is healthy, or ready."}
    media_types = ["text/plain"] if path == "/metrics" else ["application/json"]
    media_types += ["text/event-stream"] if path in _STREAMING_PATHS else []
    return {"description": "The answer.", "content": {media_type: {} for media_type in media_types}}


def _error_description(path: str, description: str) -> dict[str, Any]:
    name = "AnthropicError" if _is_anthropic_path(path) else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def make_app(serving: ServerState) -> ASGIApp:
    """Return the server's ASGI application, which refuses requests on surplus connections."""
    return SurplusGuard(App(serving), _format_error)


class App:
    """ASGI application that checks access, calls the endpoints and formats their errors."""

    def __init__(self, serving: ServerState):
        self._serving = serving
        config = serving.config
        self._access = Access(config.api_keys, config.allowed_hosts, has_dashboard=config.dashboard)
        self._control_access = Access(
            config.control_api_keys, config.allowed_hosts, has_dashboard=False
        )
        self._bodies = BodyReader(config.limits)
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route(MESSAGES_PATH, self._messages, methods=["POST"]),
            Route(f"{MESSAGES_PATH}/count_tokens", self._count_tokens, methods=["POST"]),
            Route("/v1/models", self._list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._retrieve_model, methods=["GET"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route(_PING_PATH, self._health, methods=["GET", "POST"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/load", self._load, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
        ]
        if config.dashboard:
            routes += dashboard_routes(serving)
        self._control_routes: list[Route] = []
        if config.control_api_keys:
            self._control_routes = ControlEndpoints(serving, self._bodies).routes
            routes += self._control_routes
        self._router = Router(routes, redirect_slashes=False, default=_raise_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request.

        An error before the response has started is sent in the format of the API.
        """
        started = False

        async def send_and_watch_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        if scope["type"] != "http":
            return
        try:
            # Let the routes match the path instead of comparing strings. A route also matches a
            # path with a line break at its end, and a path below the `root_path` of a program that
            # mounts the server.
            is_control = any(it.matches(scope)[0] is not Match.NONE for it in self._control_routes)
            (self._control_access if is_control else self._access).check(scope)
            # If "app" is set in the scope, Starlette's routes raise errors instead of sending plain
            # text.
            scope = {**scope, "app": self}
            with self._bodies.track_buffered_bytes(scope):
                await self._router(scope, receive, send_and_watch_start)
        except Exception as error:
            if started:
                raise
            await _format_error(scope["path"], to_api_error(error))(scope, receive, send)

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, CompletionsGeneration, "cmpl-")

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, ChatCompletionsGeneration, "chatcmpl-")

    async def _responses(self, request: Request) -> Response:
        response_options = {"format_error_event": responses_failure}
        return await self._generate(
            request, ResponsesRequest, ResponsesGeneration, "resp_", **response_options
        )

    async def _messages(self, request: Request) -> Response:
        response_options = {
            "format_error_event": messages_failure,
            "format_error": anthropic_error_response,
        }
        return await self._generate(
            request, MessagesRequest, MessagesGeneration, "msg_", **response_options
        )

    async def _generate(
        self,
        request: Request,
        body_type: type[SamplingFields] | type[ResponsesRequest] | type[MessagesRequest],
        generation_type: type[CompletionsGeneration]
        | type[ChatCompletionsGeneration]
        | type[ResponsesGeneration]
        | type[MessagesGeneration],
        prefix: str,
        **response_options: Any,
    ) -> Response:
        """Read and check a request body, and return the response that generates the answer."""
        serving = self._serving
        config = serving.config
        serving.check_engine()
        request_body: Any = await self._read_body(request, body_type)
        model = serving.model_name(request_body.model)
        if isinstance(request_body, SamplingFields):
            request_body.check(config.limits)
        if isinstance(request_body, ChatRequest):
            request_body.check_template(config.template_variables)
            check_tools_enabled(request_body.offered_tools, config)
        elif isinstance(request_body, (ResponsesRequest, MessagesRequest)):
            check_tools_enabled(request_body.chat.offered_tools, config)
        request_id, client = f"{prefix}{uuid.uuid4().hex}", self._client_id(request)
        new_generation = generation_type(serving, request_body, request_id, model, client)
        stall_timeout = config.limits.stall_timeout
        return GeneratorResponse(
            new_generation.iter_body(),
            is_stream=request_body.stream,
            stall_timeout=stall_timeout,
            **response_options,
        )

    async def _count_tokens(self, request: Request) -> Response:
        serving = self._serving
        request_body = await self._read_body(request, CountTokensRequest)
        serving.model_name(request_body.model)
        chat = request_body.chat
        job = TokenizeJob(messages=chat.template_messages, options=chat.template_options)

        async def answer() -> dict[str, Any]:
            result = await serving.tokenizing.tokenize(job, "messages")
            return {"input_tokens": len(result.token_ids)}

        return self._respond_when_ready(request, answer, format_error=anthropic_error_response)

    async def _tokenize(self, request: Request) -> Response:
        serving, tokenizing = self._serving, self._serving.tokenizing
        request_body = await self._read_body(request, TokenizeRequest)
        serving.model_name(request_body.model)
        request_body.check()
        strings = request_body.return_token_strs
        if request_body.messages is None:
            path, job = (
                "prompt",
                TokenizeJob(request_body.prompt, request_body.add_special_tokens, strings=strings),
            )
        else:
            request_body.check_template(serving.config.template_variables)
            messages, options = request_body.template_messages, request_body.template_options
            path, job = "messages", TokenizeJob(messages=messages, options=options, strings=strings)

        async def answer() -> dict[str, Any]:
            result = await tokenizing.tokenize(job, path)
            return {
                "count": len(result.token_ids),
                "max_model_len": tokenizing.max_model_len,
                "tokens": result.token_ids,
                "token_strs": result.strings,
            }

        return self._respond_when_ready(request, answer)

    async def _detokenize(self, request: Request) -> Response:
        serving = self._serving
        request_body = await self._read_body(request, DetokenizeRequest)
        serving.model_name(request_body.model)

        async def answer() -> dict[str, Any]:
            return {"prompt": await serving.tokenizing.decode(request_body.tokens)}

        return self._respond_when_ready(request, answer)

    async def _read_body(self, request: Request, body_type: type[T]) -> T:
        """Read the body of a request, and convert it to `body_type`.

        The limit on JSON values is high enough for a prompt of token ids with the model's maximum
        length.
        """
        serving = self._serving
        min_limit = serving.tokenizing.max_model_len + _MAX_EXTRA_VALUES
        max_values = max(serving.config.limits.max_body_values, min_limit)
        return await self._bodies.read(
            request, lambda value: parse_body(body_type, value), max_values
        )

    def _respond_when_ready(
        self,
        request: Request,
        compute: Callable[[], Awaitable[dict[str, Any]]],
        **response_options: Any,
    ) -> Response:
        """Return a response whose JSON body is the result of `compute`.

        The request counts as in flight, and a disconnect of the client cancels the computation.
        """
        serving, client = self._serving, self._client_id(request)

        async def body_chunks() -> AsyncGenerator[bytes, None]:
            with serving.admit(client, 0):
                answer = await compute()
                size = sum(len(it) for it in answer.values() if isinstance(it, (str, list)))
                if size <= _MAX_INLINE_SIZE:
                    yield encode_json(answer)
                else:
                    yield await serving.run_in_thread(lambda: encode_large_json(answer))

        stall_timeout = serving.config.limits.stall_timeout
        return GeneratorResponse(
            body_chunks(), is_stream=False, stall_timeout=stall_timeout, **response_options
        )

    def _client_id(self, request: Request) -> str:
        return client_id(request.scope, has_keys=bool(self._serving.config.api_keys))

    async def _list_models(self, request: Request) -> Response:
        names = self._serving.config.model_names
        return json_response({"object": "list", "data": [self._model_card(name) for name in names]})

    async def _retrieve_model(self, request: Request) -> Response:
        return json_response(
            self._model_card(self._serving.model_name(request.path_params["name"]))
        )

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._serving.is_healthy else 503)

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._serving.is_ready else 503)

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def _load(self, request: Request) -> Response:
        return json_response({"server_load": self._serving.num_requests})

    async def _metrics(self, request: Request) -> Response:
        serving = self._serving
        text = serving.metrics.text(serving.engine.stats)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, request: Request) -> Response:
        return json_response(build_openapi())

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._serving.start_time,
            "owned_by": "jpaged",
            "root": self._serving.config.model_names[0],
            "parent": None,
            "max_model_len": self._serving.tokenizing.max_model_len,
        }


def _is_anthropic_path(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def _format_error(path: str, error: ApiError) -> Response:
    """Return an error response in the format of the API at `path`."""
    return anthropic_error_response(error) if _is_anthropic_path(path) else error_response(error)


async def _raise_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise ApiError(404, "this path does not exist: /openapi.json lists the paths of this server")
