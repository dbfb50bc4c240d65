"""Skip the tests that run the bundled model in `transformers` if torch is not installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["test_asset.py"]
