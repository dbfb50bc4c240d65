"""The server's options and its command line, whose flags have the names of `vllm serve`'s."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jpaged import REASONING_FAMILIES, TOOL_CALL_FAMILIES, EngineConfig, __version__, options
from jpaged.errors import RequestError, error_info

_DESCRIPTION = """\
Serve a language model over OpenAI's HTTP API, its KV cache paged.

With no argument: the small model that comes with jpaged, on http://127.0.0.1:8000, for this machine
only. Look at http://127.0.0.1:8000/ to see the blocks, or ask:

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "Count from 1 to 20", "max_tokens": 100, "temperature": 0}'
"""
_EXAMPLES = """\
examples:
  python -m jpaged.serve --model Qwen/Qwen3-0.6B --port 9000
  python -m jpaged.serve --model ./llama --served-model-name llama --host 0.0.0.0 --api-key SECRET
  python -m jpaged.serve --preemption-mode auto --swap-space 16 --scheduling-policy priority

SIGTERM or Ctrl-C: no new requests, those in flight end within --shutdown-timeout; a second signal
ends the server at once.
"""
_EMBEDDED_MODEL_NAME = "jpaged-tiny"
_EMBEDDED_MODEL_OPTIONS: dict[str, Any] = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}
"""How the embedded model writes calls and reasoning, unless flags or a template say otherwise."""
_MIB = 2**20
_HOST_PORT_PATTERN = re.compile(r"(?:\[([^][]+)\]|([^][:]*))(?::[0-9]*)?")


def _count_option(default: int | None, help: str, *, low: int = 1) -> Any:
    requirement = "an integer, 1 or more, such as 100" if low else "a count, such as 100"
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
        remedy = "give the address to listen at, 127.0.0.1 for this machine or 0.0.0.0 for others"
        raise RequestError(name, "is empty", value="", remedy=remedy)


def _check_api_keys(name: str, keys: Sequence[str]) -> None:
    """Raise ValueError unless a header can bring each key; words name it by its number alone."""
    for number, key in enumerate(keys, 1):
        if not key:
            remedy = "give a key, or leave it out"
            raise RequestError("api_key", "is empty, and so is no secret", value="", remedy=remedy)
        if key != key.strip() or not (key.isascii() and key.isprintable()):
            raise RequestError(
                "api_key",
                f"(number {number}) could never match",
                value="",
                remedy="a key has printable ASCII characters, and no space before or after them",
            )


def _check_model_names(name: str, names: Sequence[str]) -> None:
    """Raise ValueError unless clients can write, and logs and metrics show, each name."""
    for number, each in enumerate(names, 1):
        if not each or each != each.strip() or not each.isprintable():
            raise RequestError(
                "served_model_name",
                f"(number {number}) is {each!r}",
                value="",
                remedy="give a name of printable characters, with no space before or after it",
            )


def _read_host(text: str) -> str:
    name = normalize_host(text)
    if not name or not text.isprintable() or any(char in text for char in "/@ "):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a host name, such as llm.example.com, or * for any"
        )
    return name


def _read_template(path_text: str) -> str:
    path = Path(path_text)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("no regular file")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        message = f"{path_text} cannot be read ({why}): give a file with a Jinja template"
        raise argparse.ArgumentTypeError(message) from error


@dataclass(frozen=True)
class Limits(options.Options, group="limits (what is refused, and when)"):
    """Bounds on what clients may send and ask, and for how long, as the help of each says.

    Without a flag are `max_header_bytes`, of a request's line and headers, and `body_timeout`, the
    seconds for a body to arrive from the end of its headers on.
    """

    max_num_queued_reqs: int = _count_option(
        1024, "503 for a request that would wait behind so many sequences", low=0
    )
    max_num_client_reqs: int | None = _count_option(
        None, "429 for a client (an API key; without keys an address) with so many in flight"
    )
    max_body_bytes: int = _bytes_option(8 * _MIB, "413 for a larger body")
    max_body_values: int = _count_option(
        256 * 1024,
        "400 for a body of more JSON values; strings, fractions, arrays and objects are four, long "
        "numbers one more for about every eight digits; "
        "a prompt of --max-model-len token ids is always taken",
        low=0,
    )
    max_total_body_bytes: int = _bytes_option(
        1024 * _MIB, "503 when the bodies of all requests in flight would be larger together"
    )
    max_header_bytes: int = options.integer(32 * 1024, low=1)
    max_prompts: int = _count_option(256, "prompts in a request")
    max_n: int = _count_option(64, "answers to a prompt: n, best_of, beams")
    max_connections: int = _count_option(4096, "open connections")
    body_timeout: float = options.number(30.0, "of seconds above 0", above=0)
    queue_timeout: float = _seconds_option(600.0, "longest wait for the first token")
    request_timeout: float = _seconds_option(3600.0, "longest time that a request takes in all")
    stall_timeout: float = _seconds_option(
        60.0, "longest time that a client leaves an answer unread"
    )
    text_timeout: float = _seconds_option(
        10.0, "longest time to tokenise a prompt, its chat template included"
    )
    health_timeout: float = _seconds_option(
        30.0, "time without a turn of the loop after which /health is red"
    )
    hang_timeout: float = _seconds_option(
        300.0, "time without a turn of the loop after which the engine is ended"
    )
    start_timeout: float = _seconds_option(
        3600.0, "longest start of the engine, which is ended then"
    )


@dataclass(frozen=True)
class ServeConfig(options.Options, group="the server"):
    """How the server presents itself, as the help of each option says.

    Attributes:
        model_names: What clients may call the model; the first is what the server calls it.
        template_variables: Variables of a template that clients may set.
        limits: What clients may ask for.
    """

    host: str = options.option(
        "127.0.0.1",
        _check_host,
        metavar="HOST",
        help="address to listen at; 127.0.0.1: this machine only",
    )
    port: int = options.integer(
        8000,
        low=0,
        high=2**16 - 1,
        requirement="a port, 0 to 65535",
        metavar="PORT",
        help="port to listen at; 0: a free one",
    )
    api_keys: tuple[str, ...] = options.option(
        (),
        _check_api_keys,
        flags=("--api-key",),
        nargs="+",
        action="extend",
        metavar="KEY",
        help="requests need one of these",
    )
    share_prefix_cache_across_keys: bool = options.switch(
        False, help="let keys find each other's cached prefixes, and so tell what the others asked"
    )
    allowed_hosts: tuple[str, ...] | None = options.option(
        None,
        parse=_read_host,
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names besides this machine's own by which it may be asked, * for any; unset: any "
        "with --api-key or where others can reach the --host, else none",
    )
    model_names: tuple[str, ...] = options.option(
        (_EMBEDDED_MODEL_NAME,),
        _check_model_names,
        flags=("--served-model-name",),
        nargs="+",
        action="extend",
        metavar="NAME",
        help="what clients may call the model; one or several; unset: as --model",
        default_text="",
    )
    shutdown_timeout: float = options.number(
        30.0,
        "of seconds, such as 30",
        low=0,
        high=1e9,
        unit="s",
        metavar="S",
        help="longest time to drain",
    )
    chat_template: str | None = options.option(
        None, parse=_read_template, metavar="FILE", help="a Jinja template instead of the model's"
    )
    enable_auto_tool_choice: bool = options.switch(
        False, help="let the model call the tools that requests offer; needs --tool-call-parser"
    )
    tool_call_parser: str | None = options.choice(
        None, TOOL_CALL_FAMILIES, help="how the model writes tool calls"
    )
    reasoning_parser: str | None = options.choice(
        None, REASONING_FAMILIES, help="how the model writes reasoning; unset: it is content"
    )
    template_variables: tuple[str, ...] = options.option(
        ("enable_thinking", "thinking"),
        flags=("--allowed-chat-template-kwargs",),
        nargs="*",
        metavar="NAME",
        help="what clients may set of the template",
        default_text="enable_thinking thinking",
    )
    allow_special_tokens: bool = options.switch(
        False,
        flags=("--allow-special-tokens-in-messages",),
        help="text such as <|im_end|> in a message is the token, as which it can end the message",
    )
    dashboard: bool = options.switch(True, help="a picture of the memory at /")
    dashboard_text: bool = options.switch(
        False, flags=("--dashboard-show-text",), help="prompts and answers in the picture"
    )
    log_requests: bool = options.switch(True, help="a line in the log for each request")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise RequestError(
                "enable_auto_tool_choice",
                f"needs --tool-call-parser ({', '.join(TOOL_CALL_FAMILIES)}): how the model writes "
                "tool calls",
                value="True",
            )


@dataclass(frozen=True)
class Flags:
    """What the command line asks.

    Attributes:
        engine: Options of `Engine`.
        serve: How to present it.
    """

    engine: dict[str, Any]
    serve: ServeConfig


def build_parser() -> argparse.ArgumentParser:
    """The command line, with its help."""
    parser = options.CommandLine(
        prog="python -m jpaged.serve", description=_DESCRIPTION, epilog=_EXAMPLES
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--version", action="version", version=f"jpaged {__version__}")
    for declared in (ServeConfig, Limits, EngineConfig):
        options.add_flags(parser, declared)
    return parser


def read_flags(argv: Sequence[str] | None = None) -> Flags:
    """The command line `argv` (default: the process's); mistakes end the process with code 2."""
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
        raise ValueError(f"two models are named: {args.model_tag} and --model {model}")
    if model is not None:
        if not model.strip():
            remedy = "give a folder or a hub id, or leave it out for the embedded model"
            raise RequestError("model", "is empty", value="", remedy=remedy)
        engine["model"] = model
    EngineConfig(**engine)
    limits = Limits(**options.read_options(args, Limits))
    if limits.max_total_body_bytes < limits.max_body_bytes:
        raise RequestError(
            "max_total_body_bytes",
            f"is less than --max-body-bytes {limits.max_body_bytes}, which one body may have",
            value=f"{limits.max_total_body_bytes}",
            remedy="raise it",
        )
    given = options.read_options(args, ServeConfig)
    serve_options: dict[str, Any] = {
        name: tuple(it) if isinstance(it, list) else it for name, it in given.items()
    }
    serve_options.setdefault("model_names", (_default_model_name(model),))
    if model is None and "chat_template" not in serve_options:
        serve_options = _EMBEDDED_MODEL_OPTIONS | serve_options
    return Flags(engine | {"verbose": True}, ServeConfig(**serve_options, limits=limits))


def _default_model_name(model: str | None) -> str:
    """What clients call a model: a hub id as it is, of a folder the last part of its path."""
    if model is None:
        return _EMBEDDED_MODEL_NAME
    path = Path(model)
    return path.resolve().name if path.is_dir() or path.is_absolute() else model


def normalize_host(host: str) -> str:
    """A Host without its port, as it is compared: 'Example.com:80' is 'example.com'."""
    host = host.strip().lower()
    match = _HOST_PORT_PATTERN.fullmatch(host)
    return (match[1] or match[2] if match else host).removesuffix(".")
