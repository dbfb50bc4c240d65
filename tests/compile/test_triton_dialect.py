"""Test that the name of the Triton dialect is optional: JAX lowers kernels without it."""

import sys

import pytest

from jpaged.compile.triton_dialect import register_triton_dialect

DIALECT = "jaxlib.mlir.dialects.tt"


def test_dialect_gets_the_name_that_mlir_looks_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, DIALECT, raising=False)
    register_triton_dialect()
    assert sys.modules[DIALECT].__name__ == "jaxlib.triton.dialect"


@pytest.mark.parametrize("missing", ["jaxlib.mlir.dialects", "jaxlib.triton.dialect"])
def test_triton_dialect_is_not_registered_if_jaxlib_lacks_a_dialect_module(
    monkeypatch: pytest.MonkeyPatch, missing: str
):
    monkeypatch.delitem(sys.modules, DIALECT, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    register_triton_dialect()
    assert DIALECT not in sys.modules
