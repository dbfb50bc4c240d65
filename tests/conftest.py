"""Strict JAX and run-time shape checks for every test."""

from jaxtyping import install_import_hook

# Before the first import of either package: every function with arrays checks their shapes.
install_import_hook(["jpaged.models", "jpaged.runtime", "pallas_kernels"], "beartype.beartype")

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
