"""Pieces and tasks: every row and byte exactly once, whatever the sizes."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flame.preprocess.plan import (
    COMPRESSION_RATIO,
    MAX_PIECE_BYTES,
    MIN_TASK_BYTES,
    InputFile,
    cut_file,
    plan_tasks,
    random_order,
    target_bytes,
)

MIB = 2**20


def parquet(*groups: tuple[int, int], path: str = "a.parquet") -> InputFile:
    return InputFile(path=path, format="parquet", compression=None, size_bytes=1, mtime_ns=0, groups=groups)


def lines(size: int, *, compression: str | None = None, path: str = "a.jsonl") -> InputFile:
    return InputFile(path=path, format="jsonl", compression=compression, size_bytes=size, mtime_ns=0)


def test_target_is_a_64th_within_its_bounds() -> None:
    assert target_bytes(0, 2**28) == target_bytes(64 * MIB, 2**28) == MIN_TASK_BYTES
    assert target_bytes(6400 * MIB, 2**28) == 100 * MIB
    assert target_bytes(2**50, 2**28) == 4 * 2**28
    assert target_bytes(2**50, 1000) == 4000


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5000)), max_size=20), st.integers(1, 8000))
def test_row_groups_are_cut_without_gap_or_overlap(groups: list[tuple[int, int]], piece_bytes: int) -> None:
    pieces = cut_file(parquet(*groups), piece_bytes)
    read = [group for piece in pieces for group in range(piece.start, piece.stop or 0)]
    assert read == sorted(set(read))
    assert sum(groups[group][0] for group in read) == sum(rows for rows, _ in groups)
    for piece in pieces:
        assert piece.first_row == sum(rows for rows, _ in groups[: piece.start])
        sizes = [groups[group][1] for group in range(piece.start, piece.stop or 0)]
        assert sum(sizes[:-1]) < piece_bytes or not sizes[:-1]


@given(st.integers(0, 10_000), st.integers(1, 3000))
def test_byte_ranges_are_cut_without_gap_or_overlap(size: int, piece_bytes: int) -> None:
    pieces = cut_file(lines(size), piece_bytes)
    assert [byte for piece in pieces for byte in (piece.start, piece.stop)] == [
        edge for start in range(0, size, piece_bytes) for edge in (start, min(start + piece_bytes, size))
    ]


def test_a_compressed_file_is_one_piece_and_counts_thrice() -> None:
    (piece,) = cut_file(lines(100 * MIB, compression="gzip"), MIB)
    assert (piece.start, piece.stop, piece.num_bytes) == (0, None, COMPRESSION_RATIO * 100 * MIB)


def test_tasks_hold_every_piece_once_in_a_seeded_order() -> None:
    files = [lines(3 * MIB + 1, path="a.jsonl"), parquet(*[(10, MIB)] * 40, path="b.parquet"), lines(7, path="c.jsonl")]
    plans = {seed: plan_tasks(files, shard_tokens=2**28, shuffle_seed=seed) for seed in (None, 1, 2)}
    flat = {seed: [piece for task in tasks for piece in task.pieces] for seed, tasks in plans.items()}
    assert Counter(flat[1]) == Counter(flat[None]) == Counter(flat[2])
    assert len({tuple(pieces) for pieces in flat.values()}) == 3
    assert plan_tasks(files, shard_tokens=2**28, shuffle_seed=1) == plans[1]
    assert [(p.path, p.start) for p in flat[None]] == sorted((p.path, p.start) for p in flat[None])
    for tasks in plans.values():
        assert [task.index for task in tasks] == list(range(len(tasks)))
        assert all(task.num_bytes >= MIB for task in tasks[:-1])


def test_tasks_of_a_large_input_are_about_64_and_their_pieces_at_most_32_mib() -> None:
    files = [lines(2**32, path=f"{i}.jsonl") for i in range(4)]
    tasks = plan_tasks(files, shard_tokens=2**28, shuffle_seed=7)
    assert len(tasks) == 64
    assert {piece.num_bytes for task in tasks for piece in task.pieces} == {MAX_PIECE_BYTES}


def test_no_input_is_no_task() -> None:
    assert plan_tasks([parquet(), parquet((0, 0)), lines(0)], shard_tokens=1, shuffle_seed=1) == ()


def test_random_order_is_pinned() -> None:
    """The order is part of the format of a build: these numbers may never change."""
    assert random_order("golden", 10).tolist() == GOLDEN
    assert sorted(random_order("x", 1000).tolist()) == list(range(1000))
    assert not np.array_equal(random_order("x", 1000), random_order("y", 1000))
    assert len(random_order("x", 0)) == 0


GOLDEN = [5, 2, 0, 4, 7, 8, 9, 3, 1, 6]
