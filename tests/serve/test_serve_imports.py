"""Test that the server imports no module of the engine, only the public names of jpaged."""

import ast
from pathlib import Path

import pytest

import jpaged

FOLDER = Path(jpaged.__file__).parent / "serve"
SHARED = ("errors", "options", "processes")
ALLOWED = ("jpaged.serve.", "jpaged.errors")
MODULES = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_server_modules_import_only_public_names(module: Path):
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if name == "jpaged":
                assert {alias.name for alias in node.names} <= {*jpaged.__all__, *SHARED}
            else:
                assert not name.startswith("jpaged.") or name.startswith(ALLOWED)
            names = [name]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            assert not any(each.startswith("jpaged") for each in names)
        else:
            continue
        assert not {each.partition(".")[0] for each in names} & {"pickle", "jax", "marshal"}
