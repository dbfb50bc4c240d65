"""Test finding a checkpoint and reading its headers."""

import json
import os
import re
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jpaged.models.checkpoint import (
    FILE_DTYPES,
    CheckpointError,
    check_model,
    read_config,
    read_generation_config,
    read_rows,
    read_tensor_infos,
    resolve_checkpoint,
)


def write_shards(folder, shards, index=None):
    for name, tensors in shards.items():
        save_file({key: np.ones(2, np.float32) for key in tensors}, folder / name)
    if index is not None:
        content = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(content)


def names(folder):
    return sorted(tensor.name for tensor in read_tensor_infos(folder))


@pytest.fixture
def no_download(monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("fetched")
    )


@pytest.mark.usefixtures("no_download")
def test_model_folder_is_used_without_the_network(tmp_path):
    assert resolve_checkpoint(tmp_path) == tmp_path.resolve()
    assert resolve_checkpoint(str(tmp_path)) == tmp_path.resolve()


def test_only_config_tokenizer_and_safetensors_are_downloaded_for_a_hub_id(tmp_path, monkeypatch):
    published = [
        "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "vocab.json",
        "merges.txt", "chat_template.jinja", "special_tokens_map.json",
        "pytorch_model.bin", "modeling_custom.py", "original/consolidated.00.pth",
        "consolidated.safetensors", "onnx/model.safetensors", "README.md",
    ]  # fmt: skip

    def fetch(repo_id, *, allow_patterns, ignore_patterns):
        assert repo_id == "owner/some-model"
        fetched = huggingface_hub.utils.filter_repo_objects(
            published, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert list(fetched) == published[:10]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    (tmp_path / "model.safetensors").touch()
    assert resolve_checkpoint("owner/some-model") == tmp_path


RESPONSE: Any = SimpleNamespace(headers={}, status_code=404, request=None)
UNREACHABLE = "could not reach the model hub: {}; check the network, or pass a local folder"


def without_network(cause):
    error = errors.LocalEntryNotFoundError("no snapshot folder\nand a long story")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (without_network(RuntimeError("no route.")), UNREACHABLE.format("RuntimeError: no route")),
        (without_network(None), UNREACHABLE.format("LocalEntry.*: no snapshot folder")),
        (ConnectionError(111, "refused"), UNREACHABLE.format("Conn.*refused")),
        (errors.HfHubHTTPError("503 busy", response=RESPONSE), UNREACHABLE.format(".*503 busy")),
        (Exception(), UNREACHABLE.format("Exception: no reason given")),
        (errors.RepositoryNotFoundError("404", response=RESPONSE), "no such model: .*auth login"),
        (errors.GatedRepoError("403", response=RESPONSE), "is gated: .*hf auth login"),
        (errors.HFValidationError("a..b"), "no such model: check the id"),
        (OSError(28, "No space left"), "not be written: OSError: .*No space left; make room"),
    ],
)
@pytest.mark.parametrize("find", [resolve_checkpoint, check_model])
def test_a_failed_download_names_its_cause_and_remedy(
    tmp_path, monkeypatch, find, error, complaint
):
    def fetch(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    looked_for = rf"model='o/absent' is not a folder \(looked for {tmp_path}/o/absent\), and "
    with pytest.raises(CheckpointError, match=looked_for) as caught:
        find("o/absent")
    (message,) = str(caught.value).splitlines()
    assert re.search(complaint, message)
    assert ("network" in message) == complaint.startswith("could not reach")


def test_check_model_downloads_config_json_once_and_no_other_file(tmp_path, monkeypatch):
    fetched, cached = [], {}

    def fetch(repo_id, *, allow_patterns):
        fetched.append((repo_id, allow_patterns))
        (tmp_path / "config.json").write_text("{}")
        cached[repo_id, "config.json"] = str(tmp_path / "config.json")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *it: cached.get(it))
    check_model("owner/model")
    check_model("owner/model")
    assert fetched == [("owner/model", ["config.json"])]


def test_cached_folder_without_weights_reports_the_network_error(tmp_path, monkeypatch):
    """Without a network, huggingface_hub returns its cached folder, which may lack the weights."""

    def fail(repo_id):
        raise ConnectionError(111, "refused")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *it, **_: str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "model_info", fail)
    with pytest.raises(CheckpointError, match=r"could not reach the model hub: Conn.*refused"):
        resolve_checkpoint("owner/model")
    monkeypatch.setattr(huggingface_hub, "model_info", lambda repo_id: None)
    assert resolve_checkpoint("owner/model") == tmp_path  # the hub can be reached
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(huggingface_hub, "model_info", fail)
    assert resolve_checkpoint("owner/model") == tmp_path


def test_check_model_refuses_a_folder_without_a_valid_config(tmp_path):
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/config\.json is missing"):
        check_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        check_model(tmp_path)


@pytest.mark.parametrize("model", ["./absent", "/absent/folder", "a/b/c", "../x", "spa ce"])
@pytest.mark.usefixtures("no_download")
def test_model_that_is_neither_a_folder_nor_a_hub_id_is_refused_without_a_download(model):
    with pytest.raises(CheckpointError, match=re.escape(repr(model))):
        resolve_checkpoint(model)


@pytest.mark.usefixtures("no_download")
def test_an_empty_path_is_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("") == tmp_path


def test_model_path_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="give the folder"):
        resolve_checkpoint(file)


@pytest.mark.parametrize(
    ("name", "read"),
    [("config.json", read_config), ("generation_config.json", read_generation_config)],
)
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{oops", "not valid JSON"),
        (b"[1]", "holds a list"),
        (b"\xff", "not valid"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
    ],
    ids=["no JSON", "list", "no UTF-8", "nested objects", "nested lists"],
)
def test_invalid_config_json_is_refused(tmp_path, name, read, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"/{name}.*{complaint}.*; .*(one|it)"):
        read(tmp_path)


def test_checkpoint_may_lack_only_the_generation_config(tmp_path):
    assert read_generation_config(tmp_path) == {}
    with pytest.raises(CheckpointError, match=r"/config\.json.*missing.*; .*(one|it)"):
        read_config(tmp_path)


NAMES = ("config.json", "generation_config.json", "model.safetensors", "model-1.safetensors",
         "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja")  # fmt: skip


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["FIFO", "device"]
)
@pytest.mark.parametrize("name", NAMES)
def test_fifo_and_device_files_are_refused(tmp_path, name, make):
    # A FIFO or a device file is refused only if it has the name of a checkpoint file.
    make(tmp_path / "cache.sock")
    assert resolve_checkpoint(tmp_path) == tmp_path
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"/{name} is a FIFO, a socket or a device, not a"):
        resolve_checkpoint(tmp_path)


def test_config_is_returned_unchanged(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "extra": [1]}')
    assert read_config(tmp_path) == {"model_type": "llama", "extra": [1]}


def test_tensors_are_listed_in_file_order_and_can_be_read_in_slices(tmp_path):
    rng = np.random.default_rng(0)
    saved = {
        "f16": rng.normal(size=(2, 3, 4)).astype(np.float16),
        "f32": rng.normal(size=(3, 5)).astype(np.float32),
        "bf16": rng.normal(size=7).astype(ml_dtypes.bfloat16),
        "fp8": rng.normal(size=(3, 5)).astype(ml_dtypes.float8_e4m3fn),
        "large": rng.normal(size=(600, 600)).astype(np.float32),
        "scalar": np.array(0.5, np.float32),
    }
    file = tmp_path / "model.safetensors"
    save_file(saved, file, metadata={"format": "pt"})
    raw = file.read_bytes()
    tensors = read_tensor_infos(tmp_path)
    places = [raw.index(saved[tensor.name].tobytes()) for tensor in tensors]
    assert places == sorted(places)
    assert {tensor.name for tensor in tensors} == saved.keys()
    for tensor in tensors:
        expected = saved[tensor.name]
        rows = slice(1, 3) if tensor.shape else slice(None)
        read, wanted = read_rows(tensor, rows), expected[rows] if tensor.shape else expected
        assert (tensor.file, tensor.shape) == (file, expected.shape)
        assert FILE_DTYPES[tensor.dtype] == read.dtype == expected.dtype
        assert (read.shape, read.tobytes()) == (wanted.shape, wanted.tobytes())


def test_single_safetensors_file_takes_precedence(tmp_path):
    write_shards(tmp_path, {"model.safetensors": ["a"], "other.safetensors": ["b"]})
    assert names(tmp_path) == ["a"]


def test_only_shards_in_the_index_are_read(tmp_path):
    shards = {"m-1.safetensors": ["a", "b"], "m-2.safetensors": ["c"], "else.safetensors": ["z"]}
    index = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
    write_shards(tmp_path, shards, index)
    assert names(tmp_path) == ["a", "b", "c"]


def test_shards_without_an_index_are_all_read(tmp_path):
    write_shards(tmp_path, {"m-1.safetensors": ["a"], "m-2.safetensors": ["b"]})
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ({"a": "m-1.safetensors", "c": "gone.safetensors"}, r"missing: gone\.safetensors"),
        ({"a": "m-1.safetensors"}, r"1 tensors .* not in the index: b in m-1\.safetensors"),
        ({"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-1.safetensors"},
         r"not in their shard: c in m-1\.safetensors"),
        ({"a": "../m-1.safetensors"}, r"outside its folder: \.\./m-1\.safetensors"),
        (["a"], "weight_map"),
    ],
)  # fmt: skip
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path, index, complaint):
    write_shards(tmp_path, {"m-1.safetensors": ["a", "b"]}, index)
    with pytest.raises(CheckpointError, match=complaint):
        read_tensor_infos(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_without_opening_the_file(tmp_path, name):
    (tmp_path / name).symlink_to("/nowhere")  # opening it would raise FileNotFoundError
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.*save_pretrained"):
        read_tensor_infos(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file \(it holds: config\.json\)"):
        read_tensor_infos(tmp_path)


def header(entry):
    raw = json.dumps(entry).encode() if isinstance(entry, dict) else entry
    return len(raw).to_bytes(8, "little") + raw


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "header too small"),
        (b"\xff" * 8, "header too large"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "invalid header length"),
        (header(b"oops"), "invalid JSON"),
        (header(b"[]"), "invalid JSON"),
        (header({"a": GOOD}) + bytes(7), "not fully covered"),
        (header({"a": GOOD}) + bytes(9), "not fully covered"),
        (header({"a": GOOD, "b": GOOD}) + bytes(8), "offset for tensor `[ab]`"),
        (header({"a": {**GOOD, "data_offsets": [8, 0]}}) + bytes(8), "offset for tensor `a`"),
        (header({"a": {**GOOD, "shape": [3]}}) + bytes(8), "invalid shape"),
        (header({"a": {"dtype": "F32"}}), "missing field `shape`"),
        (header({"a": []}), "invalid JSON"),
        (header({"a": {**GOOD, "dtype": "F99"}}) + bytes(8), "F99"),
    ],
)
def test_error_for_a_broken_file_names_the_file_and_the_reason(tmp_path, content, complaint):
    (tmp_path / "model.safetensors").write_bytes(content)
    remedy = r"model\.safetensors is not a safetensors file, or is .* corrupt; fetch it again"
    with pytest.raises(CheckpointError, match=rf"{remedy} \(.*{complaint}") as caught:
        read_tensor_infos(tmp_path)
    assert isinstance(caught.value.__cause__, SafetensorError)


def test_duplicate_tensor_name_in_a_header_is_refused(tmp_path):
    """The safetensors package would accept the header, and keep the last of the two entries."""
    twice = json.dumps({"a": GOOD, "b": GOOD | {"dtype": "I32"}}).replace("b", "a").encode()
    (tmp_path / "model.safetensors").write_bytes(header(twice) + bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has several .* one name: a;"):
        read_tensor_infos(tmp_path)
