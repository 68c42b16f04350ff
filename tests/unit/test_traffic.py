"""What `tools/traffic.py` foretells of a small model, beside what was counted by hand."""

from __future__ import annotations

from tools.traffic import Collective, exposed_bytes, step_traffic

BLOCK = [(6, 2), (3,)]
REST = [(5, 2)]


def test_bytes_of_a_step_on_two_replicas_of_four_shards() -> None:
    """Rows fill up to multiples of 4: a block has 8 · 2 + 4 = 20 numbers, the rest 8 · 2 = 16; all are 56."""
    found = step_traffic([BLOCK, BLOCK], REST, replicas=2, shards=4, micro_batches=3)
    # The first block is gathered 2 · 3 times, the last block and the rest once, in 2 bytes; sums take 4 bytes.
    assert found == {
        "all_gather": Collective(count=8, ranks=4, size_bytes=(6 * 20 + 20 + 16) * 2),
        "reduce_scatter": Collective(count=3, ranks=4, size_bytes=224),
        "all_reduce": Collective(count=3, ranks=2, size_bytes=56, passes=2),
    }
    # A rank sends three quarters of what is gathered and scattered, and half of a sum, twice.
    assert {kind: collective.sent_bytes for kind, collective in found.items()} == {
        "all_gather": 234,
        "reduce_scatter": 168,
        "all_reduce": 56,
    }


def test_replicas_alone_gather_nothing_and_fill_nothing_up() -> None:
    found = step_traffic([BLOCK, BLOCK], REST, replicas=8, shards=1, micro_batches=3)
    assert found == {"all_reduce": Collective(count=3, ranks=8, size_bytes=(15 + 15 + 10) * 4, passes=2)}
    assert found["all_reduce"].sent_bytes == 280  # 2 · 160 · 7/8


def test_one_rank_sends_nothing() -> None:
    assert step_traffic([BLOCK, BLOCK], REST, replicas=1, shards=1) == {}
    assert exposed_bytes(REST, replicas=1, shards=1) == 0


def test_what_no_computation_hides_is_the_rest_once() -> None:
    """16 numbers: 24 bytes of 32 to gather, 48 of 64 to scatter, and a shard's 16 twice by half."""
    assert exposed_bytes(REST, replicas=2, shards=4) == 24 + 48 + 16
