"""Copies among documents, against a plain set: any tasks, runs and slices, and no record of an unfinished task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flame.preprocess import dedup
from flame.preprocess.dedup import RECORD, Copies, RunWriter, first_and_copies, merge, read_done, records_of
from flame.preprocess.texts import Documents

# A task is batches of (file, row, text number); of a file's rows each is there once.
TEXTS = st.lists(st.integers(0, 12), max_size=60)


def batches(texts: list[int], seed: int, num_tasks: int) -> list[list[tuple[int, list[tuple[int, int]]]]]:
    """Deal rows of three files to tasks at random: (file, [(row, text)]) a batch."""
    rng = np.random.default_rng(seed)
    tasks: list[list[tuple[int, list[tuple[int, int]]]]] = [[] for _ in range(num_tasks)]
    rows = [(int(rng.integers(3)), row, text) for row, text in enumerate(texts)]
    while rows:
        size = int(rng.integers(1, 5))
        same = [row for row in rows[:size] if row[0] == rows[0][0]]
        rows = [row for row in rows if row not in same]
        tasks[int(rng.integers(num_tasks))].append((same[0][0], [row[1:] for row in same]))
    return tasks


def documents(rows: list[tuple[int, int]]) -> Documents:
    texts = pa.array([f"text {text}" for _, text in rows], pa.large_string())
    numbers = np.array([row for row, _ in rows], np.uint64)
    sizes = numbers.astype(np.int64)
    return Documents(path="a", texts=texts, rows=numbers, num_bytes=sizes, kept=None, progress_bytes=0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=TEXTS,
    seed=st.integers(0, 1000),
    num_tasks=st.integers(1, 4),
    run=st.integers(1, 9),
    slice_=st.sampled_from([1, 5, 1000]),
    waiting=st.sampled_from([1, 1000]),
)
def test_the_first_copy_stays_as_a_plain_set_says(
    texts: list[int],
    seed: int,
    num_tasks: int,
    run: int,
    slice_: int,
    waiting: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("dedup")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "RUN_RECORDS", run)
        patch.setattr(dedup, "SLICE_RECORDS", slice_)
        patch.setattr(dedup, "WAITING_PLACES", waiting)
        tasks = batches(texts, seed, num_tasks)
        for task, parts in enumerate(tasks):
            writer = RunWriter(folder / "hashes", task, "plan")
            place = 0
            for file, rows in parts:
                writer.add(records_of(documents(rows), file=file, first_place=place))
                place += len(rows)
            writer.finish()
        assert read_done(folder / "hashes", "plan") == set(range(num_tasks))
        number = merge(folder / "hashes", range(num_tasks), folder / "copies")
    seen: set[int] = set()
    first = set()
    for file, row, text in sorted((file, row, text) for parts in tasks for file, rows in parts for row, text in rows):
        if text not in seen:
            seen.add(text)
            first.add((file, row))
    assert number == len(texts) - len(first)
    for task, parts in enumerate(tasks):
        copies = Copies.of_task(folder / "copies", task)
        for file, rows in parts:
            assert copies.keep(len(rows)).tolist() == [(file, row) in first for row, _ in rows]


def test_hashes_that_share_a_half_are_other_texts() -> None:
    records = np.zeros(5, RECORD)
    records["high"], records["low"] = [7, 7, 7, 8, 7], [1, 2, 1, 1, 2]
    records["row"] = [4, 3, 2, 1, 0]
    first, copies = first_and_copies(records)
    assert (sorted(first.tolist()), sorted(copies.tolist())) == ([2, 3, 4], [0, 1])


def test_what_a_killed_task_or_merge_left_counts_for_nothing(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "hashes", 0, "plan")
    writer.add(records_of(documents([(0, 1), (1, 1)]), file=0, first_place=0))
    writer.abort()
    assert read_done(tmp_path / "hashes", "plan") == set()
    writer = RunWriter(tmp_path / "hashes", 0, "plan")
    writer.add(records_of(documents([(0, 1), (1, 1)]), file=0, first_place=0))
    writer.finish()
    assert read_done(tmp_path / "hashes", "another plan") == set()
    (tmp_path / "copies.tmp").mkdir()
    (tmp_path / "copies.tmp/task-00000").write_bytes(b"half of a file")
    assert merge(tmp_path / "hashes", [0], tmp_path / "copies") == 1
    assert Copies.of_task(tmp_path / "copies", 0).keep(2).tolist() == [True, False]
