"""Hugging Face checkpoint folders: finding them, their config, and their tensors, never copied.

A safetensors file is 8 bytes of header length, a JSON header (name -> dtype, shape, byte range) and
the tensors' bytes (https://huggingface.co/docs/safetensors). The header is read here rather than by
the safetensors package because the loader needs views into the mapped file: the package hands out
copies, and a copy of a shard's only tensor would already double the host's memory.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUPPORTED_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_DOWNLOADED = [
    "config*.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
]
_NOT_DOWNLOADED = ["*/*", "consolidated*.safetensors", "adapter_*"]
_MAX_HEADER_BYTES = 100_000_000
_MAX_NAMED = 10


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the file, tensor or parameter."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `offset` and `num_bytes` count bytes of `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def view(self, mapped: np.ndarray) -> np.ndarray:
        """The tensor inside `mapped`, the bytes of `file`; reads nothing yet."""
        raw = mapped[self.offset : self.offset + self.num_bytes]
        return raw.view(SUPPORTED_DTYPES[self.dtype]).reshape(self.shape)


def map_file(file: Path) -> np.ndarray:
    """The file's bytes, mapped read-only; unmapped when the last view of them is gone."""
    return np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)


def named_list(names: list[str]) -> str:
    """The first few of the names, and how many more there are."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def resolve_checkpoint(model: str | Path) -> Path:
    """The folder of a model's files, downloaded first if `model` is a hub id.

    Only config, tokenizer and safetensors files are fetched; code from the repository never is.

    Args:
        model: a local folder, or `name` / `owner/name` on the Hugging Face hub.

    Raises:
        CheckpointError: neither a folder nor a hub id that can be fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise CheckpointError(f"model={str(model)!r} is a file; give the folder that holds it.")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(model)):
        raise CheckpointError(
            f"model={str(model)!r} is not a folder (looked for {folder.absolute()}) and cannot be "
            "a Hugging Face id; give an existing folder or an id like 'Qwen/Qwen3-0.6B'."
        )
    return _download(str(model), folder.absolute())


def _download(model: str, tried: Path) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, allow_patterns=_DOWNLOADED, ignore_patterns=_NOT_DOWNLOADED)
        )
    except (OSError, ValueError, RuntimeError) as error:  # what httpx and the hub client raise
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"model={model!r}: no folder {tried}, and the Hugging Face hub gave no such model: "
            f"{type(error).__name__}: {reason[0] if reason else 'no reason given'}. Give a local "
            "folder with config.json and *.safetensors, or check the id, the network and, for "
            "gated models, the login (`hf auth login`)."
        ) from error


def read_config(folder: Path) -> dict:
    """The folder's config.json.

    Raises:
        CheckpointError: it is missing, not valid JSON or not an object.
    """
    return _read_json_object(Path(folder) / "config.json", "a Hugging Face model folder has one")


def _read_json_object(file: Path, remedy: str) -> dict:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; {remedy}.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not an object.")
    return content


def read_tensors(folder: Path) -> list[TensorInfo]:
    """All tensors of a checkpoint, from its headers alone, in the order they lie in its files.

    A name held by two files appears twice. An index, where there is one, must agree with the files.

    Raises:
        CheckpointError: no safetensors file, a broken file, or files that contradict the index.
    """
    folder = Path(folder)
    if (folder / SINGLE_NAME).is_file():
        return list(_read_header(folder / SINGLE_NAME))
    if (folder / INDEX_NAME).is_file():
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
            f"{folder} holds {named_list(pickled)} but no .safetensors file. Pickled weights are "
            "never opened, since opening them can run code. Convert them: in a place you trust, "
            "load the model with transformers and call `save_pretrained`, which writes safetensors."
        )
    raise CheckpointError(
        f"{folder} holds no .safetensors file (it holds: {named_list(names) or 'nothing'}). If the "
        "model is published only as .bin or .pt files, convert it to safetensors first."
    )


def _read_indexed(folder: Path) -> list[TensorInfo]:
    index = folder / INDEX_NAME
    shard_of = _read_json_object(index, "it names the shards").get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(x, str) for x in shard_of.values()):
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names.")
    shards = sorted(set(shard_of.values()))
    if foreign := [name for name in shards if Path(name).name != name]:
        raise CheckpointError(f"{index} names files outside its folder: {named_list(foreign)}.")
    if absent := [name for name in shards if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{index} names shards that are missing: {named_list(absent)}; fetch them again."
        )
    tensors = [tensor for name in shards for tensor in _read_header(folder / name)]
    _check_against_index(index, shard_of, tensors)
    return tensors


def _check_against_index(
    index: Path, shard_of: Mapping[str, str], tensors: list[TensorInfo]
) -> None:
    held = {(tensor.name, tensor.file.name) for tensor in tensors}
    indexed = set(shard_of.items())
    problems = []
    if absent := sorted(indexed - held):
        listed = named_list([f"{name} in {shard}" for name, shard in absent])
        problems.append(f"{len(absent)} tensors of the index are not in their shard: {listed}")
    if extra := sorted(held - indexed):
        listed = named_list([f"{name} in {shard}" for name, shard in extra])
        problems.append(f"{len(extra)} tensors of the shards are not in the index: {listed}")
    if problems:
        raise CheckpointError(f"{index} and its shards disagree: " + "; ".join(problems) + ".")


def _read_header(file: Path) -> Iterator[TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file} is no safetensors file or is cut short ({size} bytes); fetch it again."
            )
        raw = opened.read(header_bytes)
    data_start = 8 + header_bytes
    for name, entry in _parse_header(file, raw).items():
        if name != "__metadata__":
            yield _tensor_info(file, name, entry, data_start, size)


def _parse_header(file: Path, raw: bytes) -> dict:
    def unique(pairs: list[tuple[str, object]]) -> dict:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise CheckpointError(f"{file} holds {named_list(twice)} twice.")
        return dict(pairs)

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: its header is not valid JSON: {error}.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its header is not a JSON object.")
    return header


def _tensor_info(file: Path, name: str, entry: Any, data_start: int, size: int) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(axis) for axis in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the header's entry for {name} is malformed.") from error
    if min((begin, *shape)) < 0 or end < begin or data_start + end > size:
        raise CheckpointError(
            f"{file}: {name} lies outside the file, which is cut short or broken; fetch it again."
        )
    known = SUPPORTED_DTYPES.get(dtype)
    if known is not None and math.prod(shape) * known.itemsize != end - begin:
        raise CheckpointError(
            f"{file}: {name} has {end - begin} bytes, which is not a {dtype} of shape {shape}."
        )
    return TensorInfo(name, file, dtype, shape, data_start + begin, end - begin)
