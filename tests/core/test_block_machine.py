"""Random work on the block manager against a naive model that predicts every block id."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jpaged.core.block_manager import BlockManager
from jpaged.core.request import Sequence

BLOCK_SIZE, NUM_USABLE = 3, 9


class BlockMachine(RuleBasedStateMachine):
    """The model is a list of free ids, oldest first, and each sequence's table."""

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(NUM_USABLE + 1, BLOCK_SIZE)
        self.sequences: list[Sequence] = []
        self.free = list(range(1, NUM_USABLE + 1))
        self.tables: dict[int, list[int]] = {}
        self.num_made = 0

    def make(self) -> Sequence:
        sequence = Sequence(self.num_made, [1], 1)
        self.num_made += 1
        self.tables[sequence.seq_id] = []
        return sequence

    def model_refs(self) -> Counter[int]:
        return Counter(block_id for table in self.tables.values() for block_id in table)

    def model_append(self, sequence: Sequence, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """What append must do, one token at a time; returns the copies."""
        table, copies = self.tables[sequence.seq_id], ()
        for position in range(
            sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        ):
            if position % BLOCK_SIZE == 0:
                table.append(self.free.pop(0))
            elif self.model_refs()[table[-1]] > 1:
                copies += ((table[-1], self.free[0]),)
                table[-1] = self.free.pop(0)
        return copies

    def model_need(self, sequence: Sequence, num_tokens: int) -> int:
        start, table = sequence.num_computed_tokens, self.tables[sequence.seq_id]
        edges = sum(p % BLOCK_SIZE == 0 for p in range(start, start + num_tokens))
        return edges + (start % BLOCK_SIZE > 0 and self.model_refs()[table[-1]] > 1)

    def grow(self, sequence: Sequence, num_tokens: int, is_new: bool) -> None:
        before = list(sequence.block_table)
        copies = self.model_append(sequence, num_tokens)
        fill = self.manager.allocate if is_new else self.manager.append
        changes = fill(sequence, num_tokens)
        sequence.num_computed_tokens += num_tokens
        assert changes.copies == copies
        for index, block_id in changes.updates:
            before[index : index + 1] = [block_id]
        assert before == sequence.block_table

    @rule(num_tokens=st.integers(1, 10))
    def allocate(self, num_tokens: int):
        fits = -(-num_tokens // BLOCK_SIZE) <= len(self.free)
        assert self.manager.can_allocate(num_tokens) == fits
        if fits:
            self.sequences.append(self.make())
            self.grow(self.sequences[-1], num_tokens, is_new=True)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_tokens=st.integers(1, 7))
    def append(self, data: st.DataObject, num_tokens: int):
        sequence = data.draw(st.sampled_from(self.sequences))
        fits = self.model_need(sequence, num_tokens) <= len(self.free)
        assert self.manager.can_append(sequence, num_tokens) == fits
        if fits:
            self.grow(sequence, num_tokens, is_new=False)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject):
        parent = data.draw(st.sampled_from(self.sequences))
        child = self.make()
        self.manager.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        self.tables[child.seq_id] = list(self.tables[parent.seq_id])
        self.sequences.append(child)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def touch_a_free_block(self, data: st.DataObject):
        """As a prefix hit on a freed block would."""
        block_id = data.draw(st.sampled_from(self.free))
        sequence = self.make()
        self.manager.pool.touch([block_id])
        sequence.block_table, sequence.num_computed_tokens = [block_id], BLOCK_SIZE
        self.free.remove(block_id)
        self.tables[sequence.seq_id] = [block_id]
        self.sequences.append(sequence)

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
        assert [b.block_id for b in self.manager.pool.free_block_queue] == self.free
        for sequence in self.sequences:
            assert sequence.block_table == self.tables[sequence.seq_id]
            waste = len(sequence.block_table) * BLOCK_SIZE - sequence.num_computed_tokens
            assert 0 <= waste < BLOCK_SIZE
        used = len(set().union(*self.tables.values()))
        assert self.manager.pool.census() == (len(self.free), used, 0, NUM_USABLE)

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
