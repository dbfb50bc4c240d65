"""Which replica gets a request, and how many replicas there are: choices that need no Ray.

A replica keeps the KV of prompts that it computed in blocks, by their beginnings. The router cannot
look there without asking each replica about each request, so it remembers which replica it sent
which beginning to: a prompt is cut into pieces of 64 bytes, and a piece is known by a digest of
itself and all before it.
"""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

PIECE = 64
"""Bytes of a prompt that are known as one: some 16 tokens, which is a block."""

MAX_PIECES = 1024
"""Pieces of a prompt that are looked at: two prompts with 64 KiB in common differ little."""

MAX_EXTRA_LOAD = 16
"""By how many requests in flight a replica that knows a prompt may exceed the least loaded one."""

WAITING_PER_REPLICA = 4
"""Waiting requests for each replica beyond which another one is started."""


class _Asked(msgspec.Struct):
    """What of a body decides which replica knows it. Raw JSON: nothing is built of it."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")


def pieces_of(body: bytes, owner: bytes = b"") -> list[bytes]:
    """Digests of the beginnings of the prompt in a request's body, shortest first.

    Args:
        body: As JSON; none for what is not JSON or has no prompt, which any replica may refuse.
        owner: Whose request it is. The prefix caches of owners (API keys) are apart, and so are
            those of salts.
    """
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return []
    text = bytes(asked.messages) or bytes(asked.prompt)
    digest = hashlib.blake2b(b"%d:%b%b" % (len(owner), owner, bytes(asked.cache_salt))).digest()
    digests = []
    # The last piece is left out unless it is full: its beginning is not known by its digest.
    for start in range(0, min(len(text) - PIECE + 1, MAX_PIECES * PIECE), PIECE):
        piece = text[start : start + PIECE]
        digest = hashlib.blake2b(digest + piece, digest_size=16).digest()
        digests.append(digest)
    return digests


class PrefixMemory:
    """Remembers which replicas were sent which beginnings of prompts.

    Args:
        max_pieces: Pieces to remember; those used least recently are forgotten first, as a
            replica's cache forgets its blocks.
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
        """Replicas, the best for a prompt first.

        The one that knows the longest beginning comes first, of equals the least loaded, of equals
        the one whose turn was longest ago. Replicas with more than `max_extra_load` requests in
        flight beyond the least loaded come last: to compute a prefix again costs less than such a
        queue, and from then on two replicas know it.

        Args:
            pieces: As of `pieces_of`.
            loads: Requests in flight of each replica there is.
        """
        known = self._num_known(pieces, loads)
        limit = min(loads.values(), default=0) + max_extra_load

        def order(replica: str) -> tuple[bool, int, int, int]:
            load = loads[replica]
            return load > limit, -known[replica], load, self._last_turn.get(replica, 0)

        return sorted(loads, key=order)

    def note(self, pieces: Sequence[bytes], replica: str) -> None:
        """A replica is sent a prompt."""
        self._turn += 1
        self._last_turn[replica] = self._turn
        for piece in reversed(pieces):  # the longest beginnings are forgotten first
            self._holders.setdefault(piece, set()).add(replica)
            self._holders.move_to_end(piece)
        while len(self._holders) > self._max_pieces:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        """A replica is gone, and its cache with it."""
        self._last_turn.pop(replica, None)
        for piece, holders in [*self._holders.items()]:
            holders.discard(replica)
            if not holders:
                del self._holders[piece]

    def _num_known(self, pieces: Sequence[bytes], loads: Mapping[str, int]) -> Counter[str]:
        """How many leading pieces each replica knows."""
        known = Counter[str]()
        holders = set(loads)
        for piece in pieces:
            holders &= self._holders.get(piece, set())
            if not holders:
                break
            known.update(holders)
        return known


def num_replicas(current: int, num_waiting: float, busy: float) -> int:
    """How many replicas there should be.

    Enough that each has at most `WAITING_PER_REPLICA` waiting requests; one fewer when nothing
    waits and what runs would fill less than half of the others' batches.

    Args:
        current: How many there are.
        num_waiting: Requests that wait for a place in a batch, of all replicas.
        busy: Running sequences over the batch's size, summed over the replicas.
    """
    if num_waiting > WAITING_PER_REPLICA * current:
        return max(current + 1, math.ceil(num_waiting / WAITING_PER_REPLICA))
    if num_waiting == 0 and busy < (current - 1) / 2:
        return current - 1
    return current
