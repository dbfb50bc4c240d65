"""Simulate XLA's GPU allocator, to test that large buffers keep their addresses if small buffers
get free memory fragments.

A free fragment is a free piece of memory between two buffers that stay allocated.
"""

import itertools
import random
from collections import deque
from typing import NamedTuple

import jax
import pytest

from jpaged.runtime.allocation_guard import (
    FRAGMENT_SIZES,
    buffer_sizes,
    reserve_fragments,
    select_buffers_to_free,
)
from jpaged.runtime.sampler import ROW_WIDTH

TOTAL, VOCAB, NUM_STEPS = 8 * 2**30, 151_936, 60


class Memory:
    """A simulated best-fit allocator in units of 256 bytes, which merges adjacent free ranges.

    An allocation splits a free range that is at least twice as large as the requested size, or at
    least 128 MiB larger.
    """

    def __init__(self, total: int):
        self.free, self.used = {0: total}, {}

    def allocate(self, num_bytes: int) -> int:
        wanted = -(-num_bytes // 256) * 256
        size, address = min((size, at) for at, size in self.free.items() if size >= wanted)
        del self.free[address]
        if size >= 2 * wanted or size - wanted >= 128 * 2**20:
            self.free[address + wanted] = size - wanted
            size = wanted
        self.used[address] = size
        return address

    def release(self, address: int) -> None:
        size = self.used.pop(address)
        size += self.free.pop(address + size, 0)
        before = [at for at, own in self.free.items() if at + own == address]
        for at in before:
            address, size = at, size + self.free.pop(at)
        self.free[address] = size

    def reserve(self) -> list[tuple[int, int]]:
        """Simulate `reserve_fragments`. Return the address and size of each free fragment that the
        function leaves."""
        made = [(self.allocate(size), size) for size in buffer_sizes()]
        places = [made[i] for i in select_buffers_to_free(made)]
        for address, _ in places:
            self.release(address)
        return places


def memory_with_holes(rng: random.Random) -> Memory:
    """Return the memory of an engine that has just started: weights, and free ranges of all sizes
    between them."""
    memory = Memory(TOTAL)
    made = [memory.allocate(256 * int(2 ** rng.uniform(0, 16))) for _ in range(120)]
    for address in made:
        if rng.random() < 0.5:
            memory.release(address)
    return memory


class StepAddresses(NamedTuple):
    logits: int
    temporaries: tuple[int, int]
    rows: int
    positions: int


class Steps:
    """Simulate the buffer allocations of an engine that launches each step while the previous step
    runs."""

    def __init__(self, memory: Memory, num_rows: int, rng: random.Random):
        self.memory, self.num_rows, self.rng = memory, num_rows, rng
        self.uploads, self.tokens = [], deque()

    def run(self) -> StepAddresses:
        allocate, release, rows = self.memory.allocate, self.memory.release, self.num_rows
        self.uploads.append(allocate(rows * (6 + ROW_WIDTH) * 4))
        self.free_uploads()
        outputs = [allocate(n * rows) for n in (VOCAB * 4, 4, 1, ROW_WIDTH * 4, 4)]
        in_forward = allocate(30_000 * rows)
        release(in_forward)
        self.free_uploads()
        self.tokens.append(allocate(4 * rows))
        in_sampling = allocate(VOCAB * 4 * rows + 1000)
        release(in_sampling)
        for address in outputs:
            release(address)
        if len(self.tokens) > 2:
            release(self.tokens.popleft())
        logits, row_params, _, _, positions = outputs
        return StepAddresses(logits, (in_forward, in_sampling), row_params, positions)

    def free_uploads(self) -> None:
        """Free a random number of upload buffers, oldest first, so that at most two remain.

        An upload buffer receives the inputs that the host copies to the device for one step.
        """
        while self.uploads and (len(self.uploads) > 2 or self.rng.random() < 0.5):
            self.memory.release(self.uploads.pop(0))


@pytest.mark.parametrize("num_rows", [8, 48, 64, 256])
def test_large_buffers_change_address_if_no_memory_is_reserved_for_small_buffers(num_rows: int):
    steps = Steps(Memory(TOTAL), num_rows, random.Random(0))
    seen = [steps.run() for _ in range(NUM_STEPS)]
    assert len({step.logits for step in seen}) > 1
    assert len({step.temporaries for step in seen}) > 1


@pytest.mark.parametrize("num_rows", [8, 48, 64, 256, 512])
@pytest.mark.parametrize("seed", range(4))
def test_large_buffers_keep_their_address_if_memory_is_reserved_for_small_buffers(
    num_rows: int, seed: int
):
    rng = random.Random(seed)
    memory = memory_with_holes(rng) if seed else Memory(TOTAL)
    memory.reserve()
    steps = Steps(memory, num_rows, rng)
    assert len({steps.run() for _ in range(NUM_STEPS)}) == 1


@pytest.mark.parametrize("seed", range(10))
def test_at_least_eight_free_memory_fragments_of_each_size_are_left_for_small_buffers(seed: int):
    memory = memory_with_holes(random.Random(seed)) if seed else Memory(TOTAL)
    places = memory.reserve()
    for size in FRAGMENT_SIZES:
        assert sum(own == size for _, own in places) >= 8
    # adjacent free fragments are not merged
    assert all(memory.free[address] == size for address, size in places)


def test_small_buffer_gets_a_free_fragment_of_less_than_twice_its_size():
    memory = Memory(TOTAL)
    places = dict(memory.reserve())
    before = dict(memory.free)
    for size in FRAGMENT_SIZES:
        used = [memory.allocate(n) for n in (size, size // 2 + 1, size - 1) * 2]
        assert {places[address] for address in used} == {size}
        for address in used:
            memory.release(address)
        assert memory.free == before


def test_freed_fragment_lies_between_two_arrays_that_stay_allocated():
    row = [(at, 256) for at in range(0, 256 * 6, 256)]
    assert select_buffers_to_free(row) == {1, 3}
    assert select_buffers_to_free(row[::-1]) == {4, 2}
    apart = [(0, 256), (256, 256), (768, 256), (1024, 256), (1280, 512)]
    assert select_buffers_to_free(apart) == {3}
    assert select_buffers_to_free(row[:2]) == select_buffers_to_free([]) == set()


def test_memory_is_reserved_for_small_buffers_on_each_device():
    devices = jax.local_devices()[:2]
    assert {device for guard in reserve_fragments(devices) for device in guard.devices()} == {
        *devices
    }


def test_arrays_next_to_free_fragments_stay_allocated():
    """`reserve_fragments` allocates buffers, frees at most half of them and returns the rest.

    On a CPU, the buffers may have gaps between them. Fewer buffers are then freed. The test
    therefore accepts any result with at least half of the buffers.
    """
    guards = reserve_fragments(jax.local_devices()[:1])
    assert len(buffer_sizes()) >= len(guards) >= len(buffer_sizes()) // 2
    assert {guard.nbytes for guard in guards} == set(FRAGMENT_SIZES)
    spans = sorted((guard.unsafe_buffer_pointer(), guard.nbytes) for guard in guards)
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(spans))
