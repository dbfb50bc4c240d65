"""Options of the server and its command line. Flags are named as in `vllm serve`."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jpaged import REASONING_FAMILIES, TOOL_CALL_FAMILIES, EngineConfig, __version__, options
from jpaged.errors import RequestError, error_info

_DESCRIPTION = """\
Serve a language model with a paged KV cache over OpenAI's and Anthropic's HTTP APIs.

Without arguments, the server runs the small model that comes with jpaged. It listens on
http://127.0.0.1:8000, which only this machine can reach. Open http://127.0.0.1:8000/ to see the
dashboard, or send a request:

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "Count from 1 to 20", "max_tokens": 100, "temperature": 0}'
"""
_EXAMPLES = """\
examples:
  python -m jpaged.serve --model Qwen/Qwen3-0.6B --port 9000
  python -m jpaged.serve --model ./llama --served-model-name llama --host 0.0.0.0 --api-key SECRET
  python -m jpaged.serve --preemption-mode auto --swap-space 16 --scheduling-policy priority

After SIGTERM or Ctrl-C the server refuses new requests, and requests in flight have
--shutdown-timeout to finish. A second signal ends the server immediately.
"""
_EMBEDDED_MODEL_NAME = "jpaged-tiny"
_DEFAULT_MODEL_NAME = "model"
"""Name of a model that `jpaged.serve.serve` serves, unless `model_names` is given."""
_EMBEDDED_MODEL_OPTIONS: dict[str, Any] = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}
"""Parser options for the bundled model. Flags override them; --chat-template disables them."""
_MIB = 2**20
_HOST_PORT_PATTERN = re.compile(r"(?:\[([^][]+)\]|([^][:]*))(?::[0-9]*)?")


def _count_option(default: int | None, help: str, *, low: int = 1) -> Any:
    requirement = (
        "an integer, 1 or more, such as 100" if low else "an integer, 0 or more, such as 100"
    )
    return options.integer(default, low=low, high=10**9, requirement=requirement, help=help)


def _bytes_option(default: int, help: str) -> Any:
    requirement = "a number of bytes, such as 800M or 20G"
    return options.integer(
        default, low=1, requirement=requirement, unit="bytes", metavar="BYTES", help=help
    )


def _seconds_option(default: float, help: str) -> Any:
    requirement = "of seconds above 0, such as 30"
    return options.number(default, requirement, above=0, high=1e9, unit="s", metavar="S", help=help)


def _check_host(name: str, host: str) -> None:
    if not host.strip():
        remedy = "use 127.0.0.1 to accept this machine only, or 0.0.0.0 to accept all machines"
        raise RequestError(name, "is empty", value="", remedy=remedy)


def _check_api_keys(name: str, keys: Sequence[str]) -> None:
    """Raise RequestError for an API key that no header can contain. The error does not show it."""
    name = name.removesuffix("s")
    for number, key in enumerate(keys, 1):
        if not key:
            remedy = f"pass a key, or omit --{name.replace('_', '-')}"
            raise RequestError(name, "is empty", value="", remedy=remedy)
        if key != key.strip() or not (key.isascii() and key.isprintable()):
            raise RequestError(
                name,
                f"(number {number}) can never match the key of a request",
                value="",
                remedy="use printable ASCII characters, with no space at the start or end",
            )


def _check_model_names(name: str, names: Sequence[str]) -> None:
    """Raise RequestError for a name that is empty, unprintable, or begins or ends with a space."""
    for number, each in enumerate(names, 1):
        if not each or each != each.strip() or not each.isprintable():
            raise RequestError(
                "served_model_name",
                f"(number {number}) has the invalid value {each!r}",
                value="",
                remedy="use printable characters, with no space at the start or end",
            )


def _read_host(text: str) -> str:
    name = normalize_host(text)
    if not name or not text.isprintable() or any(char in text for char in "/@ "):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a host name: pass a name such as llm.example.com, or * for any"
        )
    return name


def _read_folder(text: str) -> Path:
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder: pass an existing folder")
    return folder.resolve()


def _read_template(path_text: str) -> str:
    path = Path(path_text)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("not a regular file")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        message = f"{path_text} cannot be read ({why}): pass a file with a Jinja template"
        raise argparse.ArgumentTypeError(message) from error


@dataclass(frozen=True)
class Limits(options.Options, group="limits on requests"):
    """Limits on the number, size and duration of requests. The help texts describe the flags.

    Attributes:
        max_header_bytes: Maximum size of a request's first line and headers together. This limit
            has no flag.
        body_timeout: Maximum time from the end of the headers to the end of the body, in seconds.
            This limit has no flag.
    """

    max_num_queued_reqs: int = _count_option(
        1024, "maximum number of sequences that wait in the queue; 503 above it", low=0
    )
    max_num_client_reqs: int | None = _count_option(
        None,
        "maximum number of requests in flight per client (API key, or address if the server has no "
        "keys); 429 above it",
    )
    max_body_bytes: int = _bytes_option(8 * _MIB, "maximum size of a body; 413 above it")
    max_body_values: int = _count_option(
        256 * 1024,
        "maximum number of JSON values in a body; 400 above it. A string, fraction, array or "
        "object counts as four, and a long number as one more for about every eight digits. A "
        "prompt of --max-model-len token ids is always accepted",
        low=0,
    )
    max_total_body_bytes: int = _bytes_option(
        1024 * _MIB, "maximum total size of the bodies of all requests in flight; 503 above it"
    )
    max_header_bytes: int = options.integer(32 * 1024, low=1)
    max_prompts: int = _count_option(256, "maximum number of prompts per request")
    max_n: int = _count_option(64, "maximum number of answers per prompt: n, best_of, beams")
    max_connections: int = _count_option(4096, "maximum number of open connections")
    body_timeout: float = options.number(30.0, "of seconds above 0", above=0)
    queue_timeout: float = _seconds_option(600.0, "maximum wait for the first token")
    request_timeout: float = _seconds_option(3600.0, "maximum duration of a request")
    stall_timeout: float = _seconds_option(
        60.0, "maximum time that a client may leave an answer unread"
    )
    text_timeout: float = _seconds_option(
        10.0, "maximum time to apply the chat template and tokenize the prompt"
    )
    health_timeout: float = _seconds_option(
        30.0, "time without a turn of the engine loop after which /health returns 503"
    )
    hang_timeout: float = _seconds_option(
        300.0, "time without a turn of the engine loop after which the engine is killed"
    )
    start_timeout: float = _seconds_option(
        3600.0, "maximum time for the engine to start, after which the engine is killed"
    )


@dataclass(frozen=True)
class ServeConfig(options.Options, group="the server"):
    """Options of the HTTP server. The help texts describe the flags.

    Attributes:
        model_names: Names that clients may use for the model. The first name is the default.
        template_variables: Names of the chat-template variables that clients may set.
        limits: Limits on requests.
    """

    host: str = options.option(
        "127.0.0.1",
        _check_host,
        metavar="HOST",
        help="address to listen on; with 127.0.0.1, only this machine can connect",
    )
    port: int = options.integer(
        8000,
        low=0,
        high=2**16 - 1,
        requirement="a port, 0 to 65535",
        metavar="PORT",
        help="port to listen on; 0 selects a free port",
    )
    api_keys: tuple[str, ...] = options.option(
        (),
        _check_api_keys,
        flags=("--api-key",),
        nargs="+",
        action="extend",
        metavar="KEY",
        help="accepted API keys; each request must have one of the keys",
    )
    share_prefix_cache_across_keys: bool = options.switch(
        False,
        help="share cached prefixes between API keys; clients can then detect others' prompts",
    )
    control_api_keys: tuple[str, ...] = options.option(
        (),
        _check_api_keys,
        flags=("--control-api-key",),
        nargs="+",
        action="extend",
        metavar="KEY",
        help="keys of /pause, /resume, /sleep, /wake_up, /is_paused, /is_sleeping and "
        "/update_weights, which no other key can use; unset: the server has no such paths",
    )
    weights_folder: Path | None = options.option(
        None,
        parse=_read_folder,
        metavar="FOLDER",
        help="folder whose subfolders of safetensors files /update_weights may read",
    )
    allowed_hosts: tuple[str, ...] | None = options.option(
        None,
        parse=_read_host,
        nargs="+",
        action="extend",
        metavar="NAME",
        help="host names that requests may use in addition to this machine's own names; * accepts "
        "any name; unset: any name with --api-key or if other machines can reach --host, else none",
    )
    model_names: tuple[str, ...] = options.option(
        (_EMBEDDED_MODEL_NAME,),
        _check_model_names,
        flags=("--served-model-name",),
        nargs="+",
        action="extend",
        metavar="NAME",
        help="one or more names that clients may use for the model; unset: taken from --model",
        default_text="",
    )
    shutdown_timeout: float = options.number(
        30.0,
        "of seconds, such as 30",
        low=0,
        high=1e9,
        unit="s",
        metavar="S",
        help="maximum time for requests in flight to finish at shutdown",
    )
    chat_template: str | None = options.option(
        None,
        parse=_read_template,
        metavar="FILE",
        help="file with a Jinja template that replaces the model's chat template",
    )
    enable_auto_tool_choice: bool = options.switch(
        False, help="let the model call the tools that requests offer; needs --tool-call-parser"
    )
    tool_call_parser: str | None = options.choice(
        None, TOOL_CALL_FAMILIES, help="format in which the model writes tool calls"
    )
    reasoning_parser: str | None = options.choice(
        None,
        REASONING_FAMILIES,
        help="format in which the model writes reasoning; unset: reasoning is part of the content",
    )
    template_variables: tuple[str, ...] = options.option(
        ("enable_thinking", "thinking"),
        flags=("--allowed-chat-template-kwargs",),
        nargs="*",
        metavar="NAME",
        help="names of the chat-template variables that clients may set",
        default_text="enable_thinking thinking",
    )
    allow_special_tokens: bool = options.switch(
        False,
        flags=("--allow-special-tokens-in-messages",),
        help="turn text such as <|im_end|> in messages into special tokens that can end a message",
    )
    dashboard: bool = options.switch(True, help="serve a dashboard of the block pool at /")
    dashboard_text: bool = options.switch(
        False, flags=("--dashboard-show-text",), help="show prompts and answers on the dashboard"
    )
    log_requests: bool = options.switch(True, help="log a line for each request")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.api_keys) & set(self.control_api_keys):
            raise RequestError(
                "control_api_key",
                "is also an --api-key",
                remedy="use another key, because clients must not pause the engine",
            )
        if self.weights_folder is not None and not self.control_api_keys:
            raise RequestError(
                "weights_folder",
                "needs --control-api-key",
                value=str(self.weights_folder),
                remedy="set a key, or omit the folder",
            )
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise RequestError(
                "enable_auto_tool_choice",
                f"needs --tool-call-parser: choose one of {', '.join(TOOL_CALL_FAMILIES)}",
                value="True",
            )


@dataclass(frozen=True)
class Flags:
    """The options that the command line sets.

    Attributes:
        engine: Keyword arguments of `Engine`.
        serve: Options of the HTTP server.
    """

    engine: dict[str, Any]
    serve: ServeConfig


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `python -m jpaged.serve`."""
    parser = options.CommandLine(
        prog="python -m jpaged.serve", description=_DESCRIPTION, epilog=_EXAMPLES
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--version", action="version", version=f"jpaged {__version__}")
    for declared in (ServeConfig, Limits, EngineConfig):
        options.add_flags(parser, declared)
    return parser


def read_flags(argv: Sequence[str] | None = None) -> Flags:
    """Parse the arguments `argv` (default: `sys.argv`). Exit with code 2 if they are invalid."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return _build_flags(args)
    except (OSError, TypeError, ValueError) as error:
        parser.error(error_info(error).command_line_text)


def _build_flags(args: argparse.Namespace) -> Flags:
    engine = options.read_options(args, EngineConfig)
    model = engine.get("model", args.model_tag)
    if args.model_tag not in (None, model):
        raise ValueError(f"two models are named: {args.model_tag} and --model {model}; pass one")
    if model is not None:
        if not model.strip():
            remedy = "pass a folder or a hub id, or omit it for the bundled model"
            raise RequestError("model", "is empty", value="", remedy=remedy)
        engine["model"] = model
    EngineConfig(**engine)
    limits = _make_limits(options.read_options(args, Limits))
    given = options.read_options(args, ServeConfig)
    serve_options: dict[str, Any] = {
        name: tuple(it) if isinstance(it, list) else it for name, it in given.items()
    }
    serve_options.setdefault("model_names", (_default_model_name(model),))
    if model is None and "chat_template" not in serve_options:
        serve_options = _EMBEDDED_MODEL_OPTIONS | serve_options
    return Flags(engine | {"verbose": True}, ServeConfig(**serve_options, limits=limits))


def _make_limits(given: Mapping[str, Any]) -> Limits:
    limits = Limits(**given)
    if limits.max_total_body_bytes < limits.max_body_bytes:
        raise RequestError(
            "max_total_body_bytes",
            f"is less than --max-body-bytes {limits.max_body_bytes}",
            value=f"{limits.max_total_body_bytes}",
            remedy=f"use {limits.max_body_bytes} or more",
        )
    return limits


def make_serve_config(given: Mapping[str, Any]) -> ServeConfig:
    """Return the options of a server, from keyword arguments of Python.

    Args:
        given: Fields of `ServeConfig`, except `limits`, and fields of `Limits`.

    Raises:
        TypeError, ValueError: An option is unknown or invalid.
    """
    names = [{it.name for it in fields(kind)} for kind in (ServeConfig, Limits)]
    unknown = given.keys() - (names[0] | names[1]) | (given.keys() & {"limits"})
    if unknown:
        raise TypeError(
            f"{min(unknown)} is not an option of the server: pass fields of ServeConfig and Limits"
        )
    limits = {name: it for name, it in given.items() if name in names[1]}
    server = {name: it for name, it in given.items() if name in names[0]}
    server.setdefault("model_names", (_DEFAULT_MODEL_NAME,))
    return ServeConfig(**server, limits=_make_limits(limits))


def _default_model_name(model: str | None) -> str:
    """Return the hub id of a model, or the last part of the path if the model is a folder."""
    if model is None:
        return _EMBEDDED_MODEL_NAME
    path = Path(model)
    return path.resolve().name if path.is_dir() or path.is_absolute() else model


def normalize_host(host: str) -> str:
    """Return a Host header in lower case without port: 'Example.com:80' gives 'example.com'."""
    host = host.strip().lower()
    match = _HOST_PORT_PATTERN.fullmatch(host)
    return (match[1] or match[2] if match else host).removesuffix(".")
