"""Test to which replica a request is sent, and how many replicas there should be, without Ray."""

import json

import pytest

from examples.replica_choices import (
    MAX_PIECES,
    PIECE,
    WAITING_PER_REPLICA,
    PrefixMemory,
    num_replicas,
    pieces_of,
)

SYSTEM = "You are a helpful assistant. " * 10
IDLE = {"a": 0, "b": 0, "c": 0}


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def num_common(*bodies: bytes) -> int:
    """Return the number of equal 64-byte pieces at the beginning of the prompts of two requests."""
    first, second = map(pieces_of, bodies)
    return sum(x == y for x, y in zip(first, second, strict=False))


def test_equal_prompt_prefixes_have_equal_digests():
    one = body(max_tokens=5, prompt=SYSTEM + "Count from 1 to 5" * 9)
    other = body(prompt=SYSTEM + "Spell 'tree' backwards" * 9, temperature=0)
    assert num_common(one, other) == len(SYSTEM) // PIECE
    assert num_common(one, one) == len(pieces_of(one)) > len(SYSTEM) // PIECE
    # The digest of a piece covers all earlier pieces. If the first pieces differ, all digests
    # differ.
    assert num_common(one, body(prompt="!" + "Count" + SYSTEM)) == 0


def test_conversation_stays_on_its_replica():
    system = {"role": "system", "content": SYSTEM}
    asked = [system, {"role": "user", "content": "Count from 1 to 5, and then to 10. " * 3}]
    later = [*asked, {"role": "assistant", "content": "1, 2"}, {"role": "user", "content": "Why?"}]
    assert pieces_of(body(messages=asked))
    # The last piece of the shorter prompt may contain the bracket that closes its list of messages.
    # The longer prompt has another character there, so this piece may differ.
    common = num_common(body(messages=asked), body(messages=later))
    assert common >= len(pieces_of(body(messages=asked))) - 1


def test_token_id_prompts_are_routed():
    assert num_common(body(prompt=[*range(100)]), body(prompt=[*range(90), 1, 2, 3])) > 3


def test_prompts_with_different_salts_or_api_keys_share_no_prefix():
    plain, salted = body(prompt=SYSTEM), body(prompt=SYSTEM, cache_salt="tenant")
    assert pieces_of(plain) == pieces_of(plain)
    assert num_common(plain, salted) == 0
    assert not set(pieces_of(plain, b"Bearer x")) & set(pieces_of(plain, b"Bearer y"))


DEEP = b'{"prompt":' + b"[" * 100_000


@pytest.mark.parametrize(
    "asked",
    [b"", b"{", b"[1]", b"\xff", DEEP, body(max_tokens=5), body(prompt="a")],
    ids=["empty", "cut", "array", "not UTF-8", "deep", "no prompt", "short"],
)
def test_request_without_a_prompt_has_no_preferred_replica(asked: bytes):
    assert pieces_of(asked) == []
    assert sorted(PrefixMemory().rank([], IDLE)) == [*IDLE]


def test_only_the_beginning_of_long_prompts_is_hashed():
    assert len(pieces_of(body(prompt="x" * (MAX_PIECES + 100) * PIECE))) == MAX_PIECES


def test_replica_with_the_longest_prefix_is_preferred():
    memory = PrefixMemory()
    memory.note([b"1", b"2"], "a")
    memory.note([b"1", b"2", b"3"], "b")
    assert memory.rank([b"1", b"2", b"3", b"4"], IDLE) == ["b", "a", "c"]
    assert memory.rank([b"1", b"2", b"9"], {"a": 3, "b": 4, "c": 0}) == ["a", "b", "c"]


def test_unknown_prompts_are_routed_by_load_then_round_robin():
    memory = PrefixMemory()
    assert memory.rank([b"1"], {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    chosen = []
    for piece in (b"1", b"2", b"3", b"4"):
        chosen.append(memory.rank([piece], IDLE)[0])
        memory.note([piece], chosen[-1])
    assert chosen == ["a", "b", "c", "a"]


def test_overloaded_replica_is_ranked_last():
    memory = PrefixMemory()
    memory.note([b"1"], "a")
    assert memory.rank([b"1"], {"a": 6, "b": 2}, max_extra_load=4) == ["a", "b"]
    assert memory.rank([b"1"], {"a": 7, "b": 2}, max_extra_load=4) == ["b", "a"]


def test_router_forgets_the_prefixes_of_a_removed_replica():
    memory = PrefixMemory()
    memory.note([], "b")
    memory.note([b"1"], "a")
    assert memory.rank([b"1"], {"b": 0}) == ["b"]
    memory.forget("a")
    assert memory.rank([b"1"], {"b": 0, "a": 1}) == ["b", "a"]
    assert memory.rank([b"1"], {"b": 0, "a": 0}) == ["a", "b"]  # "a" had no turn yet


def test_prefix_memory_is_bounded_and_evicts_least_recently_used():
    memory = PrefixMemory(max_pieces=3)
    for pieces in ([b"1", b"2"], [b"3"], [b"1"], [b"4"]):
        memory.note(pieces, "b")
    loads = {"a": 0, "b": 1}
    assert memory.rank([b"1"], loads)[0] == memory.rank([b"4"], loads)[0] == "b"
    assert memory.rank([b"3"], loads)[0] == "b"
    assert memory.rank([b"1", b"2"], {"a": 0, "b": 1})[0] == "b"
    memory.note([b"5"], "b")
    assert memory.rank([b"3"], loads)[0] == "a"


@pytest.mark.parametrize(
    ("current", "num_waiting", "busy", "expected"),
    [
        (2, 0, 1.5, 2),  # the running sequences fill 1.5 replicas
        (2, 0, 0.4, 1),
        (1, 0, 0, 1),
        (2, 2 * WAITING_PER_REPLICA, 2, 2),
        (2, 2 * WAITING_PER_REPLICA + 1, 2, 3),
        (2, 10 * WAITING_PER_REPLICA, 2, 10),
        (3, 1, 0.1, 3),  # a request waits
    ],
)
def test_number_of_replicas_follows_waiting_requests(
    current: int, num_waiting: int, busy: float, expected: int
):
    assert num_replicas(current, num_waiting, busy) == expected
