"""Call the block manager at random, and compare each block id with a naive model of the block
manager."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jpaged.core.block_manager import BlockManager
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.request import Sequence

BLOCK_SIZE, NUM_USABLE = 3, 9
tokens = st.integers(0, 1)
salts = st.sampled_from([None, "a"])


class BlockMachine(RuleBasedStateMachine):
    """Compare the block manager with a model: a list of free block ids and one table per sequence.

    Attributes:
        contents: For each block in the prefix cache, the salt and all tokens up to the block's
            end. The block that was registered first comes first.
    """

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(NUM_USABLE + 1, BLOCK_SIZE, PrefixCache(BLOCK_SIZE))
        self.sequences: list[Sequence] = []
        self.free = list(range(1, NUM_USABLE + 1))
        self.tables: dict[int, list[int]] = {}
        self.contents: dict[int, tuple] = {}
        self.num_made = 0

    def make(self, token_ids: list[int], salt: str | None) -> Sequence:
        sequence = Sequence(self.num_made, token_ids, len(token_ids), cache_salt=salt)
        self.num_made += 1
        self.tables[sequence.seq_id] = []
        return sequence

    def model_refs(self) -> Counter[int]:
        return Counter(block_id for table in self.tables.values() for block_id in table)

    def model_append(self, sequence: Sequence, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Imitate `BlockManager.append` one token at a time, and return the block copies."""
        table, copies = self.tables[sequence.seq_id], ()
        for position in range(
            sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        ):
            if position % BLOCK_SIZE == 0:
                table.append(self.model_take())
            elif self.model_refs()[table[-1]] > 1:
                copies += ((table[-1], self.free[0]),)
                table[-1] = self.model_take()
        return copies

    def model_take(self) -> int:
        block_id = self.free.pop(0)
        self.contents.pop(block_id, None)
        return block_id

    def model_content(self, sequence: Sequence, index: int) -> tuple:
        return (sequence.cache_salt, *sequence.token_ids[: (index + 1) * BLOCK_SIZE])

    def model_prefix(self, sequence: Sequence) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * BLOCK_SIZE < len(sequence.token_ids):
            wanted = self.model_content(sequence, len(found))
            block_id = next((b for b, c in self.contents.items() if c == wanted), None)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def model_need(self, sequence: Sequence, num_tokens: int) -> int:
        start, table = sequence.num_computed_tokens, self.tables[sequence.seq_id]
        edges = sum(p % BLOCK_SIZE == 0 for p in range(start, start + num_tokens))
        return edges + (start % BLOCK_SIZE > 0 and self.model_refs()[table[-1]] > 1)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        before = list(sequence.block_table)
        copies = self.model_append(sequence, num_tokens)
        changes = self.manager.append(sequence, num_tokens)
        sequence.num_computed_tokens += num_tokens
        assert changes.copies == copies
        for index, block_id in changes.updates:
            before[index : index + 1] = [block_id]
        assert before == sequence.block_table

    @rule(token_ids=st.lists(tokens, min_size=1, max_size=12), salt=salts)
    def admit(self, token_ids: list[int], salt: str | None):
        sequence = self.make(token_ids, salt)
        prefix = self.manager.find_prefix(sequence)
        hits = [block.block_id for block in prefix]
        assert hits == self.model_prefix(sequence)
        num_missing = len(token_ids) - len(hits) * BLOCK_SIZE
        num_left = len(self.free) - len(set(hits) & set(self.free))
        fits = -(-num_missing // BLOCK_SIZE) <= num_left
        num_revived = sum(block.ref_cnt == 0 for block in prefix)
        num_blocks = self.manager.num_blocks_for(num_missing) + num_revived
        assert self.manager.can_admit(sequence, num_blocks) == fits
        if not fits:
            del self.tables[sequence.seq_id]
            return
        self.tables[sequence.seq_id] += hits
        self.free = [block_id for block_id in self.free if block_id not in hits]
        self.manager.admit(sequence, prefix)
        assert sequence.num_computed_tokens == len(hits) * BLOCK_SIZE
        assert sequence.block_table == hits
        self.grow(sequence, num_missing)
        assert sequence.num_computed_tokens == len(token_ids)
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(tokens, min_size=1, max_size=7))
    def append(self, data: st.DataObject, more: list[int]):
        sequence = data.draw(st.sampled_from(self.sequences))
        fits = self.model_need(sequence, len(more)) <= len(self.free)
        num_blocks = self.manager.num_new_blocks(sequence, len(more))
        assert (num_blocks <= self.manager.num_free_blocks) == fits
        if fits:
            sequence.token_ids += more
            self.grow(sequence, len(more))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_behind=st.integers(0, 4))
    def register(self, data: st.DataObject, num_behind: int):
        """Register the full blocks of a sequence in the prefix cache, without the last
        `num_behind` tokens of the sequence.

        The host knows fewer tokens than the device while some step results are unread.
        """
        sequence = data.draw(st.sampled_from(self.sequences))
        num_tokens = max(sequence.num_computed_tokens - num_behind, 0)
        self.manager.register_full_blocks(sequence, num_tokens)
        table = self.tables[sequence.seq_id]
        for index in range(num_tokens // BLOCK_SIZE):
            self.contents.setdefault(table[index], self.model_content(sequence, index))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject):
        parent = data.draw(st.sampled_from(self.sequences))
        child = self.make(list(parent.token_ids), parent.cache_salt)
        self.manager.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        self.tables[child.seq_id] = list(self.tables[parent.seq_id])
        self.sequences.append(child)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject):
        self.drop(data.draw(st.sampled_from(self.sequences)))

    def drop(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.manager.free(sequence)
        table = self.tables.pop(sequence.seq_id)
        self.free += [block_id for block_id in reversed(table) if not self.model_refs()[block_id]]

    @invariant()
    def agrees_with_the_model(self):
        self.manager.check_integrity(self.sequences)
        assert list(self.manager.pool.free_block_queue) == self.free
        for sequence in self.sequences:
            assert sequence.block_table == self.tables[sequence.seq_id]
            waste = len(sequence.block_table) * BLOCK_SIZE - sequence.num_computed_tokens
            assert 0 <= waste < BLOCK_SIZE
            no_block_taken = self.manager.num_new_blocks(sequence, 1) == 0
            assert self.manager.has_free_slot(sequence) == no_block_taken
        used = len(set().union(*self.tables.values()))
        cached = len(self.contents.keys() & self.free)
        block_counts = (len(self.free) - cached, used, cached, NUM_USABLE)
        assert self.manager.pool.block_counts() == block_counts
        registered = {b.block_id for b in self.manager.pool.blocks if b.cache_entry is not None}
        assert registered == self.contents.keys()

    def teardown(self):
        for sequence in list(self.sequences):
            self.drop(sequence)
        self.manager.check_integrity([])
        assert self.manager.num_free_blocks == NUM_USABLE


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
