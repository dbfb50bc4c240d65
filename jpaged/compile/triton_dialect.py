"""Make MLIR find the Triton dialect's Python module, so that lowering a Triton kernel is fast."""

import sys
from importlib import import_module
from importlib.util import find_spec

_NAME = "jaxlib.mlir.dialects.tt"


def register_triton_dialect() -> None:
    """Register jaxlib's module of the Triton dialect under the name that MLIR looks up.

    MLIR's Python bindings look up the module of a dialect by the dialect's name, which is `tt`. The
    module has another name (JAX 0.10.2 to 0.12), and MLIR does not remember a failed lookup.
    Without this function, each Triton operation searches three folders, which takes a third of the
    time to lower a Triton kernel.
    """
    if _NAME in sys.modules:
        return
    try:
        # `find_spec` raises an error if jaxlib has no folder of dialects.
        if find_spec(_NAME) is None:
            sys.modules[_NAME] = import_module("jaxlib.triton.dialect")
    except ImportError:  # Another version of jaxlib: lowering works, but takes longer.
        return
