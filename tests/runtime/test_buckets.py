import pytest

from jpaged.core.plan import SchedulingGoal
from jpaged.runtime.buckets import Buckets, make_buckets, round_up


def test_each_compiled_decode_batch_size_is_at_most_twice_the_previous_size():
    buckets = make_buckets(256, 8192).decode_batch_sizes
    assert buckets == (8, 16, 32, 48, 64, 96, 128, 192, 256)
    assert make_buckets(1, 64).decode_batch_sizes == (8,)


def test_number_of_logits_rows_is_padded_to_a_few_sizes():
    assert make_buckets(256, 8192).logits_row_sizes == (8, 16, 32, 64, 128, 256)
    assert make_buckets(150, 8192).logits_row_sizes == (8, 16, 32, 64, 128, 192)
    assert make_buckets(1, 64).logits_row_sizes == (8,)
    more = make_buckets(400, 8192)
    assert more.logits_row_sizes == (8, 16, 32, 64, 128, 256, 320, 384, 448)
    assert [more.num_logits_rows(seqs) for seqs in (8, 48, 192, 320)] == [8, 64, 256, 320]


@pytest.mark.parametrize("max_num_seqs", [1, 20, 48, 190, 256, 320, 512])
def test_each_batch_size_has_a_compiled_sampling_program(max_num_seqs: int):
    buckets = make_buckets(max_num_seqs, 8192, burst_steps=4)
    assert {*buckets.prefill_batch_sizes, *buckets.burst_batch_sizes} <= {*buckets.logits_row_sizes}


@pytest.mark.parametrize(
    ("max_num_seqs", "steps", "sizes"),
    [
        (1, 4, (8,)),
        (9, 4, (8, 16)),
        (20, 4, (8, 32)),
        (48, 4, (8, 32, 48)),
        (190, 4, (8, 32, 64, 128, 192)),
        (256, 4, (8, 32, 64, 128, 256)),
        (320, 4, (8, 32, 64, 128, 256)),
        (256, 64, (8, 32)),
        (256, 1, ()),
    ],
)
def test_multi_step_decode_programs_have_few_batch_sizes_and_limited_rows(
    max_num_seqs, steps, sizes
):
    assert make_buckets(max_num_seqs, 8192, burst_steps=steps).burst_batch_sizes == sizes


def test_large_batches_use_multi_step_decode_only_for_throughput():
    """Multi-step decode is compiled for only some batch sizes. Small batches are padded to one of
    these sizes. A large batch runs single steps if multi-step decode would need extra padding."""
    buckets = make_buckets(256, 8192, burst_steps=4)

    def has_burst(goal: SchedulingGoal) -> list[int]:
        return [n for n in range(1, 257) if buckets.has_burst(n, goal)]

    few = [*range(1, 33)]
    more = [*range(49, 65), *range(97, 129), *range(193, 257)]
    assert has_burst(SchedulingGoal.LATENCY) == few
    assert has_burst(SchedulingGoal.THROUGHPUT) == few + more
    assert not make_buckets(256, 8192).has_burst(1, SchedulingGoal.THROUGHPUT)


def test_at_most_half_of_a_prefill_step_above_64_tokens_is_padding():
    assert make_buckets(16, 512).prefill_token_sizes == (64, 128, 256, 384, 512)
    assert make_buckets(8, 300).prefill_token_sizes == (64, 128, 256, 384)
    tokens = make_buckets(256, 8192).prefill_token_sizes
    assert tokens == (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def test_prefill_buckets_between_powers_of_two_are_compiled_only_for_many_sequences():
    def token_sizes(max_num_seqs: int, num_seqs: int) -> list[int]:
        shapes = make_buckets(max_num_seqs, 8192).prefill_shapes
        return [tokens for tokens, seqs in shapes if seqs == num_seqs]

    assert token_sizes(256, 8) == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    many = [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert token_sizes(256, 256) == many
    # A step of 384 tokens cannot have 512 sequences, so 384 tokens have no bucket of 512 sequences.
    # For 384 tokens, there is a bucket of 8 sequences instead.
    assert token_sizes(512, 8) == [64, 128, 256, 384, 512, 1024, 2048, 4096, 8192]


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "shape"),
    [
        (1, 1, (64, 8)),
        (64, 9, (256, 256)),
        (260, 4, (384, 256)),
        (400, 4, (512, 8)),
        (400, 200, (512, 256)),
        (1100, 1, (1536, 256)),
        (2000, 8, (2048, 8)),
        (5000, 1, (6144, 256)),
        (8192, 8, (8192, 8)),
        (8192, 256, (8192, 256)),
    ],
)
def test_prefill_step_gets_the_smallest_bucket_that_fits(
    num_tokens: int, num_seqs: int, shape: tuple[int, int]
):
    assert make_buckets(256, 8192).prefill_shape(num_tokens, num_seqs) == shape


def test_option_for_few_compiled_programs_gives_few_token_buckets():
    assert make_buckets(16, 512, few_programs=True).prefill_token_sizes == (64, 512)


def test_small_max_num_seqs_has_one_prefill_batch_size():
    assert make_buckets(16, 512).prefill_batch_sizes == (16,)
    assert make_buckets(256, 512).prefill_batch_sizes == (8, 256)


@pytest.mark.parametrize("max_num_seqs", [1, 8, 31, 100, 256])
@pytest.mark.parametrize("budget", [256, 300, 8192])
def test_each_prefill_step_within_the_limits_fits_a_compiled_shape(max_num_seqs: int, budget: int):
    buckets = make_buckets(max_num_seqs, budget)
    shapes = buckets.prefill_shapes
    assert list(shapes) == sorted(set(shapes))
    for num_seqs in {1, max_num_seqs // 2 or 1, max_num_seqs}:
        assert round_up(buckets.decode_batch_sizes, num_seqs) >= num_seqs
        for num_tokens in {num_seqs, 65, budget} - set(range(num_seqs)):
            tokens, seqs = buckets.prefill_shape(num_tokens, num_seqs)
            assert tokens >= num_tokens
            assert seqs >= num_seqs
            assert (tokens, seqs) in shapes


def test_step_above_the_largest_bucket_is_refused():
    with pytest.raises(ValueError, match="size 9 is above the largest bucket 8"):
        round_up((8,), 9)
    with pytest.raises(ValueError, match="65 tokens and 3 sequences is above the largest"):
        Buckets((8,), ((64, 8),)).prefill_shape(65, 3)
