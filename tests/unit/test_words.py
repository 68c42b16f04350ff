"""Numbers as people read them."""

from __future__ import annotations

import pytest

from flame.words import counted


@pytest.mark.parametrize(("number", "told"), [(0, "0 tasks"), (1, "1 task"), (2, "2 tasks"), (1000, "1,000 tasks")])
def test_a_noun_agrees_with_its_number(number: int, told: str) -> None:
    assert counted(number, "task") == told
    assert counted(number, "batch", "es") == told.replace("tasks", "batches").replace("task", "batch")
