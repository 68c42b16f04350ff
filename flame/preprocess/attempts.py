"""How often a task is tried when the processes that run it die: as usual, once more, then carefully, then it fails.

A death by itself says little: the system may have run out of memory because of a neighbour. So the task is run again
as it was. When that dies too, each batch is encoded in a process of its own (`careful.py`), which finds the document.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flame.errors import FlameError
from flame.preprocess.plan import Task
from flame.preprocess.reports import InHand, Progress

AS_USUAL, AGAIN, CAREFULLY = 1, 2, 3


@dataclass(kw_only=True)
class Attempt:
    """One run of a task: what it has reported, and which documents the tokenizer has in hand."""

    task: Task
    number: int = AS_USUAL
    wait: bool = False
    done: Progress = field(default_factory=Progress)
    in_hand: InHand | None = None

    @property
    def careful(self) -> bool:
        return self.number == CAREFULLY

    def heard(self, progress: Progress) -> Progress:
        """Take a report of the attempt, and return it."""
        self.done += progress
        self.in_hand = progress.in_hand
        return progress

    def after_death(self, how: str) -> tuple[Attempt, Progress]:
        """Return the next attempt, and the report that takes back this one's; `FlameError` where none is left."""
        if self.number == CAREFULLY or (self.number == AGAIN and self.in_hand is None):
            raise self._given_up(how)
        then = (
            "the task is run once more"
            if self.number == AS_USUAL
            else "it is the second time: the documents are now tried one by one"
        )
        note = f"a worker died in task {self.task.index} ({how}) {self._doing()}; {then}"
        return Attempt(task=self.task, number=self.number + 1, wait=self.wait), self.done.taken_back(note)

    def _doing(self) -> str:
        return "while it read or wrote" if self.in_hand is None else f"while it tokenized {self.in_hand}"

    def _given_up(self, how: str) -> FlameError:
        paths = list(dict.fromkeys(piece.path for piece in self.task.pieces))
        more = f" and {len(paths) - 3} more files" if len(paths) > 3 else ""
        times = "three times" if self.number == CAREFULLY else "twice"
        return FlameError(
            f"a worker died {times} in task {self.task.index}, {self._doing()}",
            where=", ".join(paths[:3]) + more,
            got=how,
            fix="If memory ran out, use fewer --num_workers, and run the same command again: finished tasks are kept. "
            "Otherwise read these files by themselves, each in a build into another folder, to find the one",
        )
