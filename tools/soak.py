"""Kills by the dozen: `make soak`. A run and a build that are stopped at random moments end as if nobody had.

(a) A corpus build of two workers, killed by SIGKILL (all of it, or the builder alone) at 30 random moments, ends equal
to an undisturbed one, file by file and byte by byte. (b) A training run of 1,000 steps, stopped by 10
SIGKILLs and 5 SIGTERMs, gives the losses, gradient norms and final tensors of an undisturbed one to the last bit, and
logs each step once; the memory of the undisturbed run's processes does not grow. Moments are drawn by progress and by
time. The texts are the standard library's. Exit code 1, with names, on any difference.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path

from demo_commands import DemoError
from soak_build import BuildSoak, build_undisturbed, build_with_kills, different_files, make_inputs
from soak_report import SoakError, say, summary
from soak_training import TrainingSoak, differences, train_straight, train_with_stops

MARKER = ".flame-soak"
_NAMED_DIFFERENCES = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("soak"), help="work folder, emptied first (soak)")
    parser.add_argument("--seed", type=int, default=1, help="decides the moments (1)")
    parser.add_argument("--ranks", type=int, default=1, help="training processes (1)")
    parser.add_argument("--steps", type=int, default=1000, help="training steps (1000)")
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs to the training run (10)")
    parser.add_argument("--terms", type=int, default=5, help="SIGTERMs to the training run (5)")
    parser.add_argument("--build-kills", type=int, default=30, help="SIGKILLs to the build (30)")
    options = parser.parse_args()
    try:
        return soak(options)
    except (SoakError, DemoError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1


def soak(options: argparse.Namespace) -> int:
    began = time.monotonic()
    folder = empty_folder(options.folder.resolve())
    moments = random.Random(options.seed)
    say(f"soak: seed {options.seed}, work folder {folder}")
    make_inputs(folder)

    build = BuildSoak(folder=folder, kills=options.build_kills)
    seconds = build_undisturbed(build)
    say(f"(a) build: {seconds:.1f} s undisturbed; the same, killed {build.kills} times:")
    kills = build_with_kills(build, moments, seconds)
    found = different_files(build.undisturbed, build.killed)

    training = TrainingSoak(
        folder=folder,
        corpus=build.undisturbed,
        steps=options.steps,
        ranks=options.ranks,
        kills=options.kills,
        terms=options.terms,
    )
    say(f"(b) training: {training.steps} steps on {training.ranks} rank(s), undisturbed, and then stopped:")
    start_seconds, grown = train_straight(training)
    stops = train_with_stops(training, moments, start_seconds)
    found += grown + differences(training)

    say("\n" + summary("build", "task", kills) + "\n" + summary("training", "step", stops))
    say(f"seed {options.seed}, {time.monotonic() - began:.0f} s: " + ("DIFFERENT" if found else "no difference"))
    for name in found[:_NAMED_DIFFERENCES]:
        say(f"    {name}")
    if len(found) > _NAMED_DIFFERENCES:
        say(f"    and {len(found) - _NAMED_DIFFERENCES} more")
    return 1 if found else 0


def empty_folder(folder: Path) -> Path:
    """Return the work folder, emptied if an earlier soak made it. Raises `SoakError` if it is anything else."""
    if folder.exists() and not (folder / MARKER).exists() and any(folder.iterdir()):
        raise SoakError(f"{folder} is not empty and no earlier soak made it; choose another --folder")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    return folder


if __name__ == "__main__":
    sys.exit(main())
