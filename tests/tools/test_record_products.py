"""What is recorded of XLA's measurements; the measuring itself needs a GPU."""

from pathlib import Path

from jpaged.recorded_products import autotuning_folder
from tools.record_products import first_of_each_products, results


def test_results_are_found_by_their_paths_and_nothing_else_is(tmp_path: Path):
    files = {
        "device/one.pb": b"\x80fast",
        "two.textproto": b"faster",
        "device/.tmp_one_7": b"",
        "device/.half.pb": b"",
        "tmp/three.textproto": b"",
    }
    for name, content in files.items():
        file = autotuning_folder(tmp_path) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    assert results(tmp_path) == dict(list(files.items())[:2])
    assert results(tmp_path / "none") == {}


def test_each_kind_of_products_is_measured_once():
    chosen = [recipe.products or () for recipe in first_of_each_products("qwen3-0.6b")]
    decode, prefill = [8, 16, 32, 48, 64, 96, 128, 192, 256], [384, 512, 768, 1024, 1536]
    rows = [*decode, *prefill, 2048, 3072, 4096, 6144, 8192]
    assert sorted(chosen) == [("head", 64), *(("layers", n) for n in rows)]
