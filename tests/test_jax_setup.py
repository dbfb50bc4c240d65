"""What an engine's start sets in its process, and that it is as before afterwards."""

import gc

import pytest

from jpaged.jax_setup import without_collections


class Node:
    """Something that the collector walks."""


@pytest.mark.parametrize("enabled", [True, False])
def test_what_a_start_makes_is_old_at_its_end(enabled: bool):
    """Whether the caller has switched the collector off, it leaves as it was."""
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with without_collections():
            assert not gc.isenabled()
            node = Node()
        assert gc.isenabled() is enabled
        old = any(it is node for it in gc.get_objects(generation=2))
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert old is enabled
