"""Processes that kill themselves before a chosen change to the disk.

`python -m tests.kills train NAME argv…`: one rank of training, killed when it opens a file whose path ends in NAME.
`python -m tests.kills saves FOLDER`: the save of a second checkpoint and the removal of the first, in a child for each
change that they make to the disk, killed just before it; prints what each would have gone on from.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


def before_each_change(act: Callable[[str], None]) -> None:
    """Call `act(path)` in this process before every file that is opened for writing, made, renamed or removed."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in _CHANGES:
            act(str(arguments[0]))

    sys.addaudithook(audit)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(name: str, argv: list[str]) -> int:
    from flame.train.__main__ import main

    before_each_change(lambda path: die() if path.endswith(name) else None)
    return main(argv)


def saves(folder: Path) -> None:
    """Print {"moments": how many kills there were, "chosen": {step: after how many of them it was the latest}}."""
    from flame.train.checkpoint_files import choose_checkpoint, find_damage, retain_latest
    from tests.tiny_states import adamw, one_rank, save, shard, tiny_llama, update

    def child(run: Path, moment: int | None) -> int:
        """Save steps 1 and 2 and remove step 1, killed before the moment-th change after step 1."""
        with one_rank() as world:
            model = shard(tiny_llama(), world)
            optimizer = adamw(model)
            update(model, optimizer, seed=1)
            save(run, model, optimizer, 1, world)
            update(model, optimizer, seed=2)
            changes = 0

            def count(path: str) -> None:
                nonlocal changes
                if path.startswith(str(run)) or not path.startswith("/"):
                    changes += 1
                    if changes == moment:
                        die()

            before_each_change(count)
            save(run, model, optimizer, 2, world)
            retain_latest(run, 1)
        return 0

    expected = folder / "undisturbed"
    assert in_child(lambda: child(expected, None)) == 0
    whole = {2: contents(expected / "step-2")}
    chosen: Counter[int] = Counter()
    moment = 1
    while True:
        run = folder / f"killed-{moment}"
        code = in_child(lambda run=run, moment=moment: child(run, moment))  # type: ignore[misc]
        choice = choose_checkpoint(run)
        assert choice is not None, f"after a kill before change {moment} there is no checkpoint"
        assert find_damage(choice.path, check_bytes=True) is None
        # Weights, moments and train state are those of one step: equal to what another process saved of it.
        found = contents(choice.path)
        assert whole.setdefault(choice.step, found) == found, f"change {moment}: step {choice.step} is another"
        if code == 0:
            break
        assert code == -signal.SIGKILL, code
        chosen[choice.step] += 1
        moment += 1
    assert whole[1] != whole[2]
    print(json.dumps({"moments": moment - 1, "chosen": chosen}))


def contents(checkpoint: Path) -> dict[str, bytes]:
    """All files but the index (it holds its own path) and the checksums; __0_0.distcp holds the train state too."""
    paths = (path for path in checkpoint.rglob("*") if path.is_file())
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in paths
        if path.name not in (".metadata", "complete.json")
    }


def in_child(work: Callable[[], int]) -> int:
    """Run `work` in a fork of this process, which has no other thread; returns its exit code, or minus its signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    if sys.argv[1] == "train":
        sys.exit(train(sys.argv[2], sys.argv[3:]))
    saves(Path(sys.argv[2]))
