"""Choose the replica for a request, and the number of replicas. This module does not need Ray.

A replica caches the KV of prompt prefixes. Asking every replica about every request would be slow,
so the router remembers the prefixes that it sent to each replica. A prompt is cut into pieces of 64
bytes. The digest of a piece covers the piece and all earlier pieces, so it identifies a prefix.
"""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

PIECE = 64
"""Number of bytes of a piece: about 16 tokens, which is the size of a KV block."""

MAX_PIECES = 1024
"""Maximum number of pieces per prompt. The router ignores text after the first 64 KiB."""

MAX_EXTRA_LOAD = 16
"""A replica comes last if its requests in flight exceed the lowest number by more than this."""

WAITING_PER_REPLICA = 4
"""If more requests than this number wait per replica, replicas are added."""


class _Asked(msgspec.Struct):
    """The fields of a request body that determine the prompt's prefix.

    The values of the fields are not parsed, which saves time.
    """

    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")


def pieces_of(body: bytes, owner: bytes = b"") -> list[bytes]:
    """Return the digests of the prompt's prefixes, shortest first.

    Args:
        body: Body of the request. If the body is not JSON or has no prompt, the result is empty:
            any replica can reject such a request.
        owner: API key of the request. Replicas have a separate prefix cache for each API key and
            cache salt.
    """
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return []
    text = bytes(asked.messages) or bytes(asked.prompt)
    digest = hashlib.blake2b(b"%d:%b%b" % (len(owner), owner, bytes(asked.cache_salt))).digest()
    digests = []
    # Leave out a partial last piece, because a longer prompt with the same prefix would have a
    # longer piece there, with another digest.
    for start in range(0, min(len(text) - PIECE + 1, MAX_PIECES * PIECE), PIECE):
        piece = text[start : start + PIECE]
        digest = hashlib.blake2b(digest + piece, digest_size=16).digest()
        digests.append(digest)
    return digests


class PrefixMemory:
    """Record of the prompt prefixes that each replica received. A prompt is a sequence of pieces of
    equal length. A digest identifies the prefix that ends with a piece.

    Args:
        max_pieces: Maximum number of prompt pieces that are remembered. The least recently used
            pieces are forgotten first, as in the prefix cache of a replica.
    """

    def __init__(self, max_pieces: int = 1 << 18):
        self._max_pieces = max_pieces
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    def rank(
        self,
        pieces: Sequence[bytes],
        loads: Mapping[str, int],
        max_extra_load: int = MAX_EXTRA_LOAD,
    ) -> list[str]:
        """Return the replicas, the best one for a prompt first.

        A replica that knows a longer prefix comes first, then one with a lower load, then one that
        was used less recently. A replica whose load is more than `max_extra_load` above the lowest
        load comes last. Another replica then computes the prefix again. That takes less time than
        waiting in the queue, and later requests can use both replicas.

        Args:
            pieces: Digests from `pieces_of`.
            loads: Number of requests in flight, by replica.
            max_extra_load: Maximum of (load - lowest load) of a replica that does not come last.
        """
        known = self._num_known(pieces, loads)
        limit = min(loads.values(), default=0) + max_extra_load

        def order(replica: str) -> tuple[bool, int, int, int]:
            load = loads[replica]
            return load > limit, -known[replica], load, self._last_turn.get(replica, 0)

        return sorted(loads, key=order)

    def note(self, pieces: Sequence[bytes], replica: str) -> None:
        """Record that a prompt with these digests (from `pieces_of`) was sent to a replica."""
        self._turn += 1
        self._last_turn[replica] = self._turn
        # Iterate in reverse order, so that longer prefixes are evicted before shorter ones.
        for piece in reversed(pieces):
            self._holders.setdefault(piece, set()).add(replica)
            self._holders.move_to_end(piece)
        while len(self._holders) > self._max_pieces:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Remove all records of a replica that has ended."""
        self._last_turn.pop(replica, None)
        for piece, holders in [*self._holders.items()]:
            holders.discard(replica)
            if not holders:
                del self._holders[piece]

    def _num_known(self, pieces: Sequence[bytes], loads: Mapping[str, int]) -> Counter[str]:
        """Return how many pieces of the prompt, from its start, each replica has received
        before."""
        known = Counter[str]()
        holders = set(loads)
        for piece in pieces:
            holders &= self._holders.get(piece, set())
            if not holders:
                break
            known.update(holders)
        return known


def num_replicas(current: int, num_waiting: float, busy: float) -> int:
    """Return the number of replicas that should run.

    The number rises if more than `WAITING_PER_REPLICA` requests wait per replica. The number falls
    by one if no request waits, and if more than half of the batch rows would still be free with one
    replica less.

    Args:
        current: Current number of replicas.
        num_waiting: Number of waiting requests of all replicas.
        busy: Sum over the replicas of (running sequences / maximum batch size).
    """
    if num_waiting > WAITING_PER_REPLICA * current:
        return max(current + 1, math.ceil(num_waiting / WAITING_PER_REPLICA))
    if num_waiting == 0 and busy < (current - 1) / 2:
        return current - 1
    return current
