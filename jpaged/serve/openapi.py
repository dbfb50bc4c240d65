"""`/openapi.json`, made of the same structs that requests are read by."""

from typing import Any

from jpaged import __version__
from jpaged.serve.auth import OPEN_PATHS
from jpaged.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    components,
)

_BODIES: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionRequest, "Complete prompts."),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/tokenize": (TokenizeRequest, "The token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "The text of token ids."),
}
_READS = {
    "/v1/models": "What the model may be called.",
    "/health": "200 as long as the engine's loop goes round, else 503.",
    "/ready": "200 as long as new requests are welcome, else 503.",
    "/ping": "The same as /health.",
    "/version": "jpaged's version.",
    "/load": "Requests in flight.",
    "/metrics": "Figures for Prometheus, with vLLM's names.",
    "/openapi.json": "This.",
}
_STREAMED = ("/v1/completions", "/v1/chat/completions")
_ERRORS = {
    "400": "A field is not acceptable; `param` names it.",
    "403": "The Host is not one that this server has (`--allowed-hosts`).",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "415": "The body is not said to be JSON.",
    "429": "This client has its share in flight; Retry-After says when to come back.",
    "500": "The request failed on the server.",
    "503": "The server is full, starts, hangs or shuts down; Retry-After says when to come back.",
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


def openapi() -> dict[str, Any]:
    """The API, as OpenAPI 3.1 has it."""
    reads = {path: {"get": _operation(path, meaning)} for path, meaning in _READS.items()}
    posts = {path: {"post": _post(path)} for path in _BODIES}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": __version__},
        "paths": posts | reads,
        "components": {
            "schemas": components(*(body for body, _ in _BODIES.values())) | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(path: str) -> dict[str, Any]:
    record, meaning = _BODIES[path]
    schema = {"$ref": f"#/components/schemas/{record.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return _operation(path, meaning, _ERRORS) | {"requestBody": body}


def _operation(path: str, meaning: str, errors: dict[str, str] | None = None) -> dict[str, Any]:
    told = dict(errors or {"503": _ERRORS["503"]})
    told |= {} if path in OPEN_PATHS else _DENIED
    answers = {status: _error(text) for status, text in told.items()}
    return {"summary": meaning, "responses": {"200": _success(path), **answers}}


def _success(path: str) -> dict[str, Any]:
    if path in OPEN_PATHS:
        return {"description": "Yes."}
    kinds = ["text/plain"] if path == "/metrics" else ["application/json"]
    kinds += ["text/event-stream"] if path in _STREAMED else []
    return {"description": "The answer.", "content": {kind: {} for kind in kinds}}


def _error(meaning: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": meaning, "content": {"application/json": {"schema": schema}}}
