"""The embedded model's own tests run it in `transformers` on torch, where that is installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["test_asset.py"]
