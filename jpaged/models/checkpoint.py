"""Hugging Face checkpoint folders: download them, read their files, map tensors to parameters.

This module does not import JAX, so that an error about a missing model comes before JAX starts.
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
"""Numpy dtype of each safetensors dtype that checkpoints may use."""

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
_MAX_SMALL_TENSOR_BYTES = 1 << 20
"""Maximum size of a tensor that is read without the safetensors package.

The package parses the header of the file for each tensor. Files of experts have thousands of
tensors, so parsing would take much longer than reading the scales of an expert.
"""

_READ_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of the files in a checkpoint folder that the loader or the tokenizer reads."""


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
"""Pairs of tensor-name suffixes: the suffix that a `WeightRule` has, and a suffix that some FP8
checkpoints use instead."""


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be loaded. The message names the file, tensor or parameter."""


@dataclass(frozen=True)
class TensorInfo:
    """Description of one checkpoint tensor, from its file's header.

    Attributes:
        name: Name of the tensor in the checkpoint.
        file: The safetensors file that holds the tensor.
        dtype: Dtype as safetensors names it, such as "BF16".
        shape: Shape in the file.
        byte_offset: Offset of the tensor's first byte from the beginning of the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    byte_offset: int = 0


@dataclass(frozen=True)
class ScaleAxis:
    """Description of one axis of the FP8 scales of a weight tensor.

    Attributes:
        part_sizes: Sizes of the tensor's parts along the axis. A tensor of a fused projection may
            have several parts, such as q, k and v. Each part begins with a new block.
        block_size: Number of consecutive entries that share a scale. The last block of a part may
            be smaller.
        start: Index of the tensor's first scale in the parameter that holds the scales.
    """

    part_sizes: tuple[int, ...]
    block_size: int = 1
    start: int = 0

    @property
    def size(self) -> int:
        """Size of the weight tensor along this axis of its scales."""
        return sum(self.part_sizes)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Number of scales along this axis for each part of a fused tensor, such as q, k and v."""
        return tuple(-(-size // self.block_size) for size in self.part_sizes)


@dataclass(frozen=True)
class WeightRule:
    """A mapping from one checkpoint tensor to a parameter, or to one part of a fused parameter.

    A parameter has a dotted path, such as `layers.0.attention.qkv.weight`. This is the path of the
    `nnx.Param` in the model, except that the path leaves out the attributes named `format`. A fused
    parameter has several rules, and each rule fills one part of the parameter.

    Attributes:
        source: Name of the tensor, without the prefix of the `WeightRules`.
        target: Path of the parameter. None: the tensor is known but not loaded, such as the copy of
            a tied output head.
        shape: Shape of the filled part ("piece") in the layout of the parameter; None for the shape
            of the whole parameter.
        file_axes: For each axis of the tensor in the file, the axes of the piece that are flattened
            into the file's axis, slowest first. For example, ((1, 2), (0,)) means that a piece
            [D, heads, H] is stored as [heads * H, D]. None: the file has the axes of the piece.
        axis: Axis of the parameter along which the pieces are concatenated.
        start: Index along `axis` at which the piece begins.
        addend: Number added to every value after casting to the parameter's dtype.
        is_scalar: Whether the tensor is a single number that fills the piece.
        scale_path: Path of the parameter for the scales of a tensor that is quantized to FP8 while
            it is loaded. None: the tensor is not quantized while it is loaded.
        scale_axes: The axes of the scales, if blocks of the piece share a scale. The piece is
            reshaped to the sizes of these axes. `update_weights` supports blocks, but the loader of
            files does not. None: one scale per output. The outputs are the first axes of the piece.
        expert: Index along axis 0 of a parameter that stacks the weights of all experts, if the
            tensor holds one expert; otherwise None. `axis` is then another axis.
        is_alternative: Whether the tensor is an alternative layout of tensors that other rules
            read. A checkpoint must contain either the tensors of the other rules or the tensors of
            the alternative rules.
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
    scale_axes: tuple[ScaleAxis, ...] | None = None
    expert: int | None = None
    is_alternative: bool = False

    @property
    def offsets(self) -> dict[int, int]:
        """Index at which the tensor begins within the parameter, by axis of the parameter. On axes
        that are not in the dict, the index is 0."""
        offsets = {self.axis: self.start}
        return offsets if self.expert is None else offsets | {0: self.expert}


@dataclass(frozen=True)
class WeightRules:
    """The rules that map the tensors of a model's checkpoints to parameters.

    Attributes:
        rules: One rule for each pair of a tensor and a parameter that the tensor fills.
        prefix: Regular expression for an optional prefix of tensor names. It does not apply to the
            output head's name.
        ignored_pattern: Regular expression for names of tensors, without prefix, that are not
            loaded, such as causal-mask buffers.
        head_prefix: Regular expression of an optional prefix of the output head's name.
    """

    rules: Sequence[WeightRule]
    prefix: str = ""
    ignored_pattern: str = ""
    head_prefix: str = ""

    def find(self, name: str) -> WeightRule | None:
        """Return the first rule for the checkpoint tensor `name`; None if there is no rule."""
        return next(iter(self.find_all(name)), None)

    def find_all(self, name: str) -> Sequence[WeightRule]:
        """Return all rules for the checkpoint tensor `name`; empty if there is no rule."""
        prefix = self.head_prefix if name.endswith("lm_head.weight") else self.prefix
        source = re.sub(f"^(?:{prefix})", "", name)
        if self.ignored_pattern and re.fullmatch(self.ignored_pattern, source):
            return [WeightRule(source, None)]
        for name, alias in _SUFFIX_ALIASES:
            source = source.removesuffix(alias) + name if source.endswith(alias) else source
        return self._rules_by_source.get(source, ())

    @cached_property
    def _rules_by_source(self) -> dict[str, list[WeightRule]]:
        rules_by_source: dict[str, list[WeightRule]] = {}
        for rule in self.rules:
            rules_by_source.setdefault(rule.source, []).append(rule)
        return rules_by_source


def open_safetensors(file: Path) -> safe_open:
    """Memory-map a safetensors file and check its header, without reading any tensor.

    Raises:
        CheckpointError: The file cannot be opened, is truncated or is not a safetensors file.
    """
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a safetensors file, or is truncated or corrupt; "
            f"fetch it again ({error})."
        ) from error


def format_names(names: list[str]) -> str:
    """Return the first names, joined with commas, and the number of remaining names."""
    more = len(names) - _MAX_LISTED_NAMES
    return ", ".join(names[:_MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


def check_model(model: str | Path) -> None:
    """Check that a model exists and has a readable config, before JAX or a device starts.

    If `model` is a hub id, only config.json is downloaded.

    Raises:
        CheckpointError: The model cannot be found, or config.json cannot be read.
    """
    folder = _local_folder(model)
    if folder is None:
        from huggingface_hub import snapshot_download, try_to_load_from_cache

        with _convert_hub_errors(str(model)):
            cached_path = try_to_load_from_cache(str(model), "config.json")
            if isinstance(cached_path, str):  # the call needs no network if config.json is cached
                folder = Path(cached_path).parent
            else:
                folder = Path(snapshot_download(str(model), allow_patterns=["config.json"]))
    read_config(folder)


def resolve_checkpoint(model: str | Path) -> Path:
    """Return the folder that holds a model's files; a model on the hub is downloaded first.

    Only config, tokenizer and safetensors files are downloaded, and never code.

    Args:
        model: A local folder, or `name` or `owner/name` on the Hugging Face hub.

    Raises:
        CheckpointError: `model` is not a folder and cannot be downloaded, or the folder contains a
            FIFO, a socket or a device.
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
                # Without a network, `snapshot_download` returns a cached folder and raises no
                # error. The folder may hold only config.json, which `check_model` downloaded.
                # `model_info` then raises the network error.
                model_info(str(model))
    return folder


def _local_folder(model: str | Path) -> Path | None:
    """Return the local folder `model`, or None if `model` may be a hub id.

    Raises:
        CheckpointError: `model` is a file, or is neither a folder nor a possible hub id, or the
            folder contains a FIFO, a socket or a device.
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
    """Raise CheckpointError if a file to read is a FIFO, a socket or a device.

    Reading such a file could wait for ever. Files that are never read are not checked.
    """
    for path in sorted(folder.iterdir()):
        is_read = path.name.endswith(_READ_SUFFIXES) and path.exists()
        if is_read and not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                f"{path} is a FIFO, a socket or a device, not a regular file: replace it by the "
                "checkpoint's file, or remove it."
            )


@contextmanager
def _convert_hub_errors(model: str) -> Iterator[None]:
    """Convert any exception of a hub download in the `with` block to a CheckpointError."""
    try:
        yield
    # The HTTP library raises exceptions of many unrelated classes, so catch all exceptions.
    except Exception as error:
        folder = Path(model).expanduser().absolute()
        raise CheckpointError(
            f"model={model!r} is not a folder (looked for {folder}), and {_hub_error_text(error)}."
        ) from error


def _hub_error_text(error: Exception) -> str:
    """Return an error text that says why a download from the hub failed, and what to do."""
    from huggingface_hub import errors

    if isinstance(
        error, errors.LocalEntryNotFoundError
    ):  # The network failed, and no file of the model is cached.
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
    """Return the content of the folder's config.json.

    If config.json has no `quantization_config`, the field is filled from `hf_quant_config.json`,
    which NVIDIA ModelOpt writes next to config.json.

    Raises:
        CheckpointError: config.json is missing, or one of the files does not hold a JSON object.
    """
    folder = Path(folder)
    config = _read_json_object(
        folder / "config.json", "pass a Hugging Face model folder with a valid one"
    )
    modelopt_file = folder / "hf_quant_config.json"
    if config.get("quantization_config") is None and modelopt_file.is_file():
        content = _read_json_object(modelopt_file, "fetch it again")
        if not isinstance(quantization := content.get("quantization"), dict):
            raise CheckpointError(f"{modelopt_file} has no object 'quantization'; fetch it again.")
        config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return config


def read_generation_config(folder: Path) -> dict:
    """Return the content of the folder's generation_config.json; an empty dict if it is missing.

    Raises:
        CheckpointError: The file does not hold a JSON object.
    """
    file = Path(folder) / "generation_config.json"
    remedy = "fetch it again, or delete it: config.json alone suffices"
    return _read_json_object(file, remedy) if file.exists() else {}


def _read_json_object(file: Path, remedy: str) -> dict:
    if not file.is_file():
        problem = "is not a regular file" if file.exists() else "is missing"
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
    """Read the headers of a checkpoint's files, and return all tensors in the order of the files.

    If two files contain the same tensor name, the name appears twice. If the folder has an index,
    its entries must match the tensors in the files.

    Raises:
        CheckpointError: The folder has no safetensors file, a file is broken, or the files
            contradict the index.
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
            "never opened, because opening them can run code. Convert them to safetensors: in a "
            "trusted environment, load the model with transformers and call `save_pretrained`."
        )
    raise CheckpointError(
        f"{folder} holds no .safetensors file (it holds: {format_names(names) or 'nothing'}). If "
        "the model is published only as .bin or .pt files, convert it to safetensors first."
    )


def _read_indexed(folder: Path) -> list[TensorInfo]:
    index = folder / INDEX_FILE_NAME
    files_by_tensor = _read_json_object(index, "fetch it again").get("weight_map")
    if not isinstance(files_by_tensor, dict) or not all(
        isinstance(x, str) for x in files_by_tensor.values()
    ):
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names.")
    shards = sorted(set(files_by_tensor.values()))
    if foreign := [name for name in shards if Path(name).name != name]:
        raise CheckpointError(
            f"{index} names files outside its folder: {format_names(foreign)}; fetch it again."
        )
    if missing := [name for name in shards if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{index} names shards that are missing: {format_names(missing)}; fetch them again."
        )
    tensors = [tensor for name in shards for tensor in _read_header(folder / name)]
    stored, indexed = {(it.name, it.file.name) for it in tensors}, set(files_by_tensor.items())
    problems = []
    for problem, pairs in (
        ("tensors of the index are not in their shard", indexed - stored),
        ("tensors of the shards are not in the index", stored - indexed),
    ):
        listed = format_names([f"{name} in {shard}" for name, shard in sorted(pairs)])
        problems += [f"{len(pairs)} {problem}: {listed}"] if pairs else []
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
    """Return the offset of each tensor's first byte from the beginning of a safetensors file.

    The safetensors package must have checked the header before. If two entries of a header have the
    same name and byte range, the package silently keeps the last entry. This function raises an
    error instead.

    Raises:
        CheckpointError: Two entries of the header have the same name.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(size), object_pairs_hook=list)
    counts = Counter(name for name, _ in entries)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise CheckpointError(
            f"{file} has several tensors with one name: {format_names(twice)}; fetch it again."
        )
    first = 8 + size
    tensors = ((name, dict(entry)) for name, entry in entries if name != "__metadata__")
    return {name: first + entry["data_offsets"][0] for name, entry in tensors}


def read_rows(tensor: TensorInfo, rows: slice) -> np.ndarray:
    """Return rows of a tensor in the dtype of its file; a scalar is read whole.

    Raises:
        CheckpointError: The file has been changed since its header was read.
    """
    shape, dtype = tensor.shape or (1,), FILE_DTYPES[tensor.dtype]
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    is_large = shape[0] * row_bytes > _MAX_SMALL_TENSOR_BYTES
    # The safetensors package cannot return FP8 tensors as numpy arrays.
    if is_large and tensor.dtype != FP8_FILE_DTYPE:
        with open_safetensors(tensor.file) as opened:  # closing the file unmaps its pages
            return opened.get_slice(tensor.name)[rows]
    first, last, _ = rows.indices(shape[0])
    count, first_byte = (last - first) * row_bytes, tensor.byte_offset + first * row_bytes
    read = np.fromfile(tensor.file, np.uint8, count, offset=first_byte)
    if read.size != count:
        raise CheckpointError(
            f"{tensor.file} became shorter while it was read; fetch the file again."
        )
    return read.view(dtype).reshape((last - first, *shape[1:]) if tensor.shape else ())
