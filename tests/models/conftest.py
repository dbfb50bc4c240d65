"""Most of these tests compare with `transformers` on torch and are left out where that is missing
(continuous integration's environment with the newest JAX)."""

from importlib.util import find_spec

_NEED_TORCH = (
    "test_config.py",
    "test_contiguous_parity.py",
    "test_fp8.py",
    "test_float8_kv.py",
    "test_gemma3.py",
    "test_linear.py",
    "test_load_families.py",
    "test_modules.py",
    "test_parity.py",
    "test_structure.py",
    "test_tied_heads.py",
    "test_weight_rules.py",
)
collect_ignore = [] if find_spec("torch") else list(_NEED_TORCH)
