"""Skip the tests that compare with `transformers` where torch is not installed."""

from importlib.util import find_spec

_NEED_TORCH = (
    "test_config_fields.py",
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
