"""Hugging Face checkpoint folders: finding them, their config, the tensors they hold, and the rules
by which tensors become parameters.

This module does not import JAX, so that a model that cannot be found is refused before JAX starts.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

INDEX_FILE_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"
SUPPORTED_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
FP8_FILE_DTYPE = "F8_E4M3"
FILE_DTYPES = SUPPORTED_DTYPES | {FP8_FILE_DTYPE: np.dtype(ml_dtypes.float8_e4m3fn)}
"""Of tensors in checkpoints."""

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_DOWNLOAD_PATTERNS = [
    "config*.json",
    "generation_config.json",
    "hf_quant_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
]
_IGNORE_PATTERNS = ["*/*", "consolidated*.safetensors", "adapter_*"]
_MAX_LISTED_NAMES = 10

_READ_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken")
"""Of the files that are read of a checkpoint, here and by its tokenizer's class."""


_SUFFIX_ALIASES = (
    (".weight_scale", ".weight_scale_inv"),
    (".input_scale", ".activation_scale"),
    (".self_attn.k_scale", ".self_attn.k_proj.k_scale"),
    (".self_attn.v_scale", ".self_attn.v_proj.v_scale"),
    (".self_attn.k_scale", ".self_attn.k_proj.output_scale"),
    (".self_attn.v_scale", ".self_attn.v_proj.output_scale"),
    (".self_attn.k_scale", ".self_attn.attn.k_scale"),
    (".self_attn.v_scale", ".self_attn.attn.v_scale"),
    (".self_attn.kv_scale", ".self_attn.attn.kv_scale"),
)
"""Ends of names that differ in checkpoints in FP8, where what they name does not."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the file, tensor or parameter."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, as its file's header describes it; `byte_offset` is the byte of the
    file at which it begins."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    byte_offset: int = 0


@dataclass(frozen=True)
class WeightRule:
    """Where one tensor of a checkpoint goes.

    A parameter's path is the dotted path of its `nnx.Param` in the model, without `Linear.format`,
    such as `layers.0.attention.qkv.weight`. Several rules may fill one (fused) parameter, a piece
    each.

    Attributes:
        source: the tensor's name, without the prefix of the `WeightRules`.
        target: path of the parameter. None: the tensor is known and not needed, such as the copy of
            a tied output head.
        shape: the piece's shape in the parameter's layout; None for the parameter's whole shape.
        file_axes: for each axis of the tensor in the file, the axes of the piece that it joins,
            the slowest first: ((1, 2), (0,)) where a piece [D, heads, H] lies as [heads * H, D].
            None: the file's axes are the piece's.
        axis: the axis of the parameter along which the piece lies.
        start: index along `axis` at which the piece begins.
        add: a number added to every value once it has the parameter's dtype.
        fills: the tensor is a single number, with which the piece is filled.
        scale: path of the parameter [*outputs] that gets the scales where the tensor is brought to
            FP8 as it is loaded, one for each of the piece's outputs, its first axes; None where it
            is kept as it is.
    """

    source: str
    target: str | None
    shape: tuple[int, ...] | None = None
    file_axes: tuple[tuple[int, ...], ...] | None = None
    axis: int = 0
    start: int = 0
    addend: float = 0.0
    is_scalar: bool = False
    scale_path: str | None = None


@dataclass(frozen=True)
class WeightRules:
    """Where the tensors of a model's checkpoints go.

    Attributes:
        rules: one for each tensor and parameter that it fills.
        prefix: regular expression of what may stand before the base model's names, so before all
            but the output head's.
        unneeded: regular expression of the names, without prefix, of more tensors that are known
            and not needed, such as causal-mask buffers.
        head_prefix: regular expression of what may stand before the output head's name.
    """

    rules: Sequence[WeightRule]
    prefix: str = ""
    ignored_pattern: str = ""
    head_prefix: str = ""

    def find(self, name: str) -> WeightRule | None:
        """The first rule of the tensor of that name; None if it is unknown."""
        return next(iter(self.find_all(name)), None)

    def find_all(self, name: str) -> Sequence[WeightRule]:
        """The rules of the tensor of that name; none if it is unknown."""
        prefix = self.head_prefix if name.endswith("lm_head.weight") else self.prefix
        source = re.sub(f"^(?:{prefix})", "", name)
        if self.ignored_pattern and re.fullmatch(self.ignored_pattern, source):
            return [WeightRule(source, None)]
        for name, alias in _SUFFIX_ALIASES:
            source = source.removesuffix(alias) + name if source.endswith(alias) else source
        return self._rules_by_source.get(source, ())

    @cached_property
    def _rules_by_source(self) -> dict[str, list[WeightRule]]:
        found: dict[str, list[WeightRule]] = {}
        for rule in self.rules:
            found.setdefault(rule.source, []).append(rule)
        return found


def open_safetensors(file: Path) -> safe_open:
    """The file, mapped and its header checked, but none of its tensors read.

    Raises:
        CheckpointError: it cannot be opened, is cut short or is no safetensors file.
    """
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is no safetensors file, or cut short or broken; fetch it again ({error})."
        ) from error


def format_names(names: list[str]) -> str:
    """The first few of the names, and how many more there are."""
    more = len(names) - _MAX_LISTED_NAMES
    return ", ".join(names[:_MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


def check_model(model: str | Path) -> None:
    """Refuse a model that cannot be found, before JAX or a device starts for it.

    If `model` is a hub id, only config.json is downloaded.

    Raises:
        CheckpointError: as `resolve_checkpoint` and `read_config` raise it.
    """
    folder = _local_folder(model)
    if folder is None:
        from huggingface_hub import snapshot_download, try_to_load_from_cache

        with _convert_hub_errors(str(model)):
            cached_path = try_to_load_from_cache(str(model), "config.json")
            if isinstance(
                cached_path, str
            ):  # the network is not needed, and is asked for the rest later
                folder = Path(cached_path).parent
            else:
                folder = Path(snapshot_download(str(model), allow_patterns=["config.json"]))
    read_config(folder)


def resolve_checkpoint(model: str | Path) -> Path:
    """The folder of a model's files, downloaded first if `model` is a hub id.

    Only config, tokenizer and safetensors files are fetched; code from the repository never is.

    Args:
        model: a local folder, or `name` / `owner/name` on the Hugging Face hub.

    Raises:
        CheckpointError: neither a folder nor a hub id that can be fetched, or a folder with
            something in a file's place that might never end.
    """
    folder = _local_folder(model)
    if folder is None:
        from huggingface_hub import model_info, snapshot_download

        with _convert_hub_errors(str(model)):
            fetched = snapshot_download(
                str(model), allow_patterns=_DOWNLOAD_PATTERNS, ignore_patterns=_IGNORE_PATTERNS
            )
            folder = Path(fetched)
            if not any(folder.glob("*.safetensors")):
                # Without a network it gives what is there: maybe the config of `check_model` alone.
                model_info(str(model))
    return folder


def _local_folder(model: str | Path) -> Path | None:
    """Return the folder that `model` names on this machine; None if it can only be a hub id.

    Raises:
        CheckpointError: it is neither.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        _refuse_special_files(folder)
        return folder.resolve()
    if folder.exists():
        raise CheckpointError(f"model={str(model)!r} is a file; give the folder that holds it.")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(model)):
        raise CheckpointError(
            f"model={str(model)!r} is not a folder (looked for {folder.absolute()}) and cannot be "
            "a Hugging Face id; give an existing folder or an id like 'Qwen/Qwen3-0.6B'."
        )
    return None


def _refuse_special_files(folder: Path) -> None:
    """Refuse a FIFO, a socket or a device, of which reading may wait for ever or never end."""
    for path in sorted(folder.iterdir()):
        is_read = path.name.endswith(_READ_SUFFIXES) and path.exists()
        if is_read and not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                f"{path} is a FIFO, a socket or a device, no regular file: put the checkpoint's "
                "own there, or take it away."
            )


@contextmanager
def _convert_hub_errors(model: str) -> Iterator[None]:
    """Raise what fails in the block, a download of the hub's `model`, as a CheckpointError."""
    try:
        yield
    except Exception as error:  # the hub's client also raises what its HTTP library raises
        folder = Path(model).expanduser().absolute()
        raise CheckpointError(
            f"model={model!r} is not a folder (looked for {folder}), and {_hub_error_text(error)}."
        ) from error


def _hub_error_text(error: Exception) -> str:
    """Return why a download from the hub failed, and the remedy."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError):  # the request failed, and no cache helps
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return (
            "the model on the hub is gated: request access on its hub page, then run "
            "`hf auth login`"
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return (
            "the model hub has no such model: check the id, pass a local folder or, for a private "
            "model, run `hf auth login`"
        )
    lines = str(error).strip(" .\n").splitlines()
    reason = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    is_network_error = isinstance(error, (ConnectionError, TimeoutError))
    if isinstance(error, OSError) and error.errno is not None and not is_network_error:
        return f"its download could not be written: {reason}; make room, or set HF_HOME"
    return f"could not reach the model hub: {reason}; check the network, or pass a local folder"


def read_config(folder: Path) -> dict:
    """The folder's config.json, with what ModelOpt writes next to it as its `quantization_config`.

    Raises:
        CheckpointError: it is missing, not valid JSON or not an object.
    """
    folder = Path(folder)
    config = _read_json_object(folder / "config.json", "a Hugging Face model folder has one")
    modelopt_file = folder / "hf_quant_config.json"
    if config.get("quantization_config") is None and modelopt_file.is_file():
        content = _read_json_object(modelopt_file, "fetch it again")
        if not isinstance(kept := content.get("quantization"), dict):
            raise CheckpointError(f"{modelopt_file} has no object 'quantization'; fetch it again.")
        config["quantization_config"] = {"quant_method": "modelopt", **kept}
    return config


def read_generation_config(folder: Path) -> dict:
    """The folder's generation_config.json; nothing if it has none.

    Raises:
        CheckpointError: it is not valid JSON or not an object.
    """
    file = Path(folder) / "generation_config.json"
    remedy = "fetch it again, or delete it: config.json alone suffices"
    return _read_json_object(file, remedy) if file.exists() else {}


def _read_json_object(file: Path, remedy: str) -> dict:
    if not file.is_file():
        problem = "is no regular file" if file.exists() else "is missing"
        raise CheckpointError(f"{file} {problem}; {remedy}.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}; {remedy}.") from error
    except RecursionError:
        message = f"{file} is nested too deeply to be read; {remedy}."
        raise CheckpointError(message) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); {remedy}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not an object; {remedy}.")
    return content


def read_tensor_infos(folder: Path) -> list[TensorInfo]:
    """All tensors of a checkpoint, from its headers alone, in the order they lie in its files.

    A name held by two files appears twice. An index, where there is one, must agree with the files.

    Raises:
        CheckpointError: no safetensors file, a broken file, or files that contradict the index.
    """
    folder = Path(folder)
    if (folder / SINGLE_FILE_NAME).is_file():
        return _read_header(folder / SINGLE_FILE_NAME)
    if (folder / INDEX_FILE_NAME).is_file():
        return _read_indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        _refuse_without_safetensors(folder)
    return [tensor for file in files for tensor in _read_header(file)]


def _refuse_without_safetensors(folder: Path) -> None:
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    pickled = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickled:
        raise CheckpointError(
            f"{folder} holds {format_names(pickled)} but no .safetensors file. Pickled weights are "
            "never opened, since opening them can run code. Convert them: in a place you trust, "
            "load the model with transformers and call `save_pretrained`, which writes safetensors."
        )
    raise CheckpointError(
        f"{folder} holds no .safetensors file (it holds: {format_names(names) or 'nothing'}). If the "
        "model is published only as .bin or .pt files, convert it to safetensors first."
    )


def _read_indexed(folder: Path) -> list[TensorInfo]:
    index = folder / INDEX_FILE_NAME
    files_by_tensor = _read_json_object(index, "it names the shards").get("weight_map")
    if not isinstance(files_by_tensor, dict) or not all(
        isinstance(x, str) for x in files_by_tensor.values()
    ):
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names.")
    shards = sorted(set(files_by_tensor.values()))
    if foreign := [name for name in shards if Path(name).name != name]:
        raise CheckpointError(f"{index} names files outside its folder: {format_names(foreign)}.")
    if absent := [name for name in shards if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{index} names shards that are missing: {format_names(absent)}; fetch them again."
        )
    tensors = [tensor for name in shards for tensor in _read_header(folder / name)]
    held, indexed = {(it.name, it.file.name) for it in tensors}, set(files_by_tensor.items())
    problems = []
    for what, pairs in (
        ("tensors of the index are not in their shard", indexed - held),
        ("tensors of the shards are not in the index", held - indexed),
    ):
        listed = format_names([f"{name} in {shard}" for name, shard in sorted(pairs)])
        problems += [f"{len(pairs)} {what}: {listed}"] if pairs else []
    if problems:
        raise CheckpointError(f"{index} and its shards disagree: {'; '.join(problems)}.")
    return tensors


def _read_header(file: Path) -> list[TensorInfo]:
    with open_safetensors(file) as opened:
        starts = _read_byte_offsets(file)
        slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
        return [
            TensorInfo(
                name, file, tensor_slice.get_dtype(), tuple(tensor_slice.get_shape()), starts[name]
            )
            for name, tensor_slice in slices
        ]


def _read_byte_offsets(file: Path) -> dict[str, int]:
    """At which byte each tensor begins, from a header that has been checked.

    Raises:
        CheckpointError: two entries have one name: of those for the same bytes, the safetensors
            package keeps the last.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(size), object_pairs_hook=list)
    counts = Counter(name for name, _ in entries)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise CheckpointError(f"{file} holds {format_names(twice)} twice.")
    first = 8 + size
    tensors = ((name, dict(entry)) for name, entry in entries if name != "__metadata__")
    return {name: first + entry["data_offsets"][0] for name, entry in tensors}


def read_rows(tensor: TensorInfo, rows: slice) -> np.ndarray:
    """These rows of a tensor, or the number that one of no axes is; as its file has them.

    Raises:
        CheckpointError: the file is not what it was when its header was read.
    """
    if not tensor.shape:
        with open_safetensors(tensor.file) as opened:
            return opened.get_tensor(tensor.name)
    if tensor.dtype != FP8_FILE_DTYPE:
        with open_safetensors(tensor.file) as opened:  # closing it gives back the pages just read
            return opened.get_slice(tensor.name)[rows]
    # The safetensors package has no numpy arrays of these.
    row = math.prod(tensor.shape[1:])
    first, last, _ = rows.indices(tensor.shape[0])
    count, first_byte = (last - first) * row, tensor.byte_offset + first * row
    read = np.fromfile(tensor.file, np.uint8, count, offset=first_byte)
    if read.size != count:
        raise CheckpointError(f"{tensor.file} is shorter than it was; fetch it again.")
    return read.view(FILE_DTYPES[tensor.dtype]).reshape(-1, *tensor.shape[1:])
