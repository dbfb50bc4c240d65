"""Strict JAX and run-time shape checks for every test."""

import warnings

from jaxtyping import install_import_hook

# Before the first import of either package: every annotated function checks its shapes.
install_import_hook(["jpaged", "pallas_kernels"], "beartype.beartype")

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
warnings.filterwarnings("ignore", message=".*beartype.*PEP.*")
