"""Endpoints that pause the engine, let it sleep, and update its weights, with vLLM's names.

The server has these endpoints only with `--control-api-key`, and they accept only the keys of this
flag. Weights come only from safetensors files below `--weights-folder`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.serve.api.conversation import Body
from jpaged.serve.api.fields import parse_body
from jpaged.serve.errors import ApiError, field_error
from jpaged.serve.http.bodies import BodyReader
from jpaged.serve.http.exchange import json_response
from jpaged.serve.http.serving import ServerState

_MAX_BODY_VALUES = 64


class UpdateWeightsRequest(Body, frozen=True, kw_only=True):
    """The request body of `/update_weights`.

    Attributes:
        path: Folder of safetensors files, relative to `--weights-folder`.
        version: See `Engine.update_weights`.
    """

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    # JSON clients read larger numbers inexactly.
    version: Annotated[int, Meta(ge=0, le=2**53 - 1)] | None = None


class ControlEndpoints:
    """The endpoints of one server. All of them answer with the state of the engine.

    Attributes:
        routes: The routes.
    """

    def __init__(self, serving: ServerState, bodies: BodyReader):
        self._serving, self._bodies = serving, bodies
        self.routes = [
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._call("resume"), methods=["POST"]),
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._call("wake_up"), methods=["POST"]),
            Route("/is_paused", self._call("state"), methods=["GET"]),
            Route("/is_sleeping", self._call("state"), methods=["GET"]),
            Route("/update_weights", self._update_weights, methods=["POST"]),
        ]

    def _call(self, action: str) -> Callable[[Request], Any]:
        """Return an endpoint that calls a method of the engine without arguments."""

        async def endpoint(request: Request) -> Response:
            _check_parameters(request.query_params, ())
            return await self._run(action)

        return endpoint

    async def _pause(self, request: Request) -> Response:
        given = request.query_params
        _check_parameters(given, ("mode", "recompute"))
        recompute = given.get("recompute", "false")
        if recompute not in ("true", "false"):
            problem = {"value": repr(recompute[:100]), "remedy": "pass true or false"}
            raise field_error("recompute", "is unknown", **problem)
        mode = given.get("mode", "keep")
        return await self._run("pause", mode=mode, recompute=recompute == "true")

    async def _sleep(self, request: Request) -> Response:
        _check_parameters(request.query_params, ("level",))
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            problem = {"value": repr(level[:100]), "remedy": "pass 1 or 2"}
            raise field_error("level", "is unknown", **problem)
        return await self._run("sleep", level=int(level))

    async def _update_weights(self, request: Request) -> Response:
        _check_parameters(request.query_params, ())
        body = await self._bodies.read(
            request, lambda value: parse_body(UpdateWeightsRequest, value), _MAX_BODY_VALUES
        )
        folder = find_weights_folder(self._serving.config.weights_folder, body.path)
        return await self._run("update_weights", path=str(folder), version=body.version)

    async def _run(self, action: str, **arguments: Any) -> Response:
        result = await self._serving.engine.control(action, **arguments)
        return json_response(
            {
                "is_paused": result.is_paused,
                "is_sleeping": result.is_sleeping,
                "weights_version": result.weights_version,
            }
        )


def find_weights_folder(root: Path | None, path: str) -> Path:
    """Return the folder that a client names, after following symbolic links.

    Raises:
        ApiError: 403 if the server has no `--weights-folder`, or the folder is outside it; 400 if
            the folder does not exist.
    """
    if root is None:
        raise ApiError(
            403, "the server has no weights folder: start the server with --weights-folder FOLDER"
        )
    try:
        folder = (root / path).resolve()
        is_inside, exists = folder.is_relative_to(root.resolve()), folder.is_dir()
    except (OSError, ValueError) as error:  # for example a null byte
        raise field_error("path", "is not a valid path: pass the name of a folder") from error
    if not is_inside:
        raise ApiError(403, "path is outside --weights-folder: pass the name of a subfolder")
    if not exists:
        raise field_error("path", "is not a folder below --weights-folder: pass an existing one")
    return folder


def _check_parameters(given: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Raise ApiError for an unknown query parameter."""
    for name in given:
        if name not in known:
            remedy = f"use {' or '.join(known)}" if known else "omit it"
            raise field_error(name[:100], f"is not a parameter of this path: {remedy}")
