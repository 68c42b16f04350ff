"""Tuned configurations of Triton kernels: found once, kept, shipped; none is sought where one is known.

A kernel under `triton.autotune` times all its configurations when it first meets a shape. Here the outcome of such a
sweep is a small JSON file in a folder named by device, Triton and flash-linear-attention, under a name made of the
kernel, its source, its candidates and the key that Triton tunes by. What the folder lacks may have been shipped
(`flame/kernels/tuned/`), or be in Triton's own cache; else the sweep is run, and said to be.

Every rank that lacks an outcome tunes by itself, and waits for no other: a lock held across kernels that wait for
collectives could stop all ranks for good. Ranks of a host share what they compile through Triton's cache, and the first
outcome to be written is the one that all take which share the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flame.kernels.tuning_sweep import Sweeps

log = logging.getLogger("flame")

SHIPPED = Path(__file__).with_name("tuned")
Outcome = dict[str, Any]


def setting_name(device: str) -> str:
    """Return what outcomes hold for: the device's name and the versions of Triton and flash-linear-attention."""
    parts = [device]
    for short, package in (("triton", "triton"), ("fla", "flash-linear-attention")):
        try:
            parts.append(f"{short}{importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"no-{short}")
    return "_".join(re.sub(r"[^0-9A-Za-z.+-]+", "-", part) for part in parts)


def tuned_folder() -> Path | None:
    """Return where outcomes are kept; None where FLAME_TUNED_DIR is `off`.

    It is FLAME_TUNED_DIR, else `flame_tuned` in TRITON_CACHE_DIR, else `flame/tuned` in the user's cache.
    """
    asked = os.environ.get("FLAME_TUNED_DIR")
    if asked:
        return None if asked == "off" else Path(asked).expanduser()
    if triton := os.environ.get("TRITON_CACHE_DIR"):
        return Path(triton).expanduser() / "flame_tuned"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flame" / "tuned"


def shipped_outcomes(setting: str, folder: Path = SHIPPED) -> dict[str, Outcome]:
    """Return the outcomes that came with flame for this setting, by name; none with FLAME_TUNED_SHIPPED=off."""
    if os.environ.get("FLAME_TUNED_SHIPPED") == "off":
        return {}
    try:
        outcomes = json.loads((folder / f"{setting}.json").read_bytes())["outcomes"]
    except FileNotFoundError:
        return {}
    assert isinstance(outcomes, dict), "a file of tuned configurations holds an object"
    return outcomes


def read_outcome(folder: Path, name: str) -> Outcome | None:
    """Return a kept outcome; a file that is absent or damaged is as good as none."""
    with contextlib.suppress(OSError, ValueError):
        outcome = json.loads((folder / f"{name}.json").read_bytes())
        if isinstance(outcome, dict):
            return outcome
    return None


def keep_outcome(folder: Path, name: str, outcome: Outcome, *, replace: bool = False) -> Outcome:
    """Keep an outcome unless another process kept one first, and return the one that is kept.

    `replace` is for one that cannot be used. Where the folder cannot be written, nothing is kept: all can be found
    again.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{name[:100]}-") as file:
            json.dump(outcome, file)
            file.flush()
            if replace:
                (folder / f"{name}.json").unlink(missing_ok=True)
            try:
                os.link(file.name, folder / f"{name}.json")
            except FileExistsError:
                return read_outcome(folder, name) or outcome
    return outcome


def tuning_key(autotuner: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what Triton's autotuner looks up a call by: the values of its key's arguments, and all dtypes."""
    arguments = {name: value for name, value in (autotuner.nargs | kwargs).items() if name in autotuner.arg_names}
    values = [arguments[name] for name in autotuner.keys if name in arguments]
    return (*values, *(str(value.dtype) for value in arguments.values() if hasattr(value, "dtype")))


def outcome_name(autotuner: Any, candidates: Sequence[Any], key: tuple[Any, ...]) -> str:
    """Return the name of an outcome: the kernel's, and a hash of its source, its candidates and the key."""
    source = _jit_function(autotuner).cache_key
    text = "\n".join([source, repr(key), *(str(candidate) for candidate in candidates)])
    return f"{autotuner.base_fn.__name__[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def keep_tuned_configurations(device: str) -> Sweeps | None:
    """Let every `triton.autotune` kernel of this process take what is kept or shipped, and keep what it finds.

    What fla is told by FLA_CONFIG_DIR and FLA_CACHE_MODE comes before. Returns the count of the sweeps that had to be
    run; None where FLAME_TUNED_DIR is `off`, and nothing is changed.
    """
    folder = tuned_folder()
    if folder is None:
        return None
    setting = setting_name(device)
    shipped = shipped_outcomes(setting)
    log.info(f"tuned configurations of Triton kernels: {len(shipped)} shipped, others kept in {folder / setting}")
    return replace_pruning(folder / setting, shipped)


def replace_pruning(kept: Path, shipped: dict[str, Outcome]) -> Sweeps:
    """Replace how Triton's `Autotuner` prunes its candidates, which it does once for each new key: one is left."""
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, Autotuner._bench
    sweeps = Sweeps(bench)

    def prune_configs(autotuner: Any, kwargs: dict[str, Any]) -> list[Any]:
        candidates = prune(autotuner, kwargs)
        if len(candidates) < 2 or kwargs.get("warmup") is not False:  # a warm-up compiles all, and may have no tensors
            return candidates
        key = tuning_key(autotuner, kwargs)
        name = outcome_name(autotuner, candidates, key)
        by_text = {str(candidate): candidate for candidate in candidates}
        unusable = (kept / f"{name}.json").exists()  # once nothing is found in it
        found = (outcome.get("config") for outcome in (read_outcome(kept, name), shipped.get(name)) if outcome)
        chosen = next((by_text[config] for config in found if config in by_text), None)
        if chosen is None:
            chosen = _triton_kept(autotuner, candidates, key) or sweeps.run(autotuner, candidates, key, kwargs)
            outcome = {"kernel": autotuner.base_fn.__name__, "key": repr(key), "config": str(chosen)}
            settled = keep_outcome(kept, name, outcome, replace=unusable)
            chosen = by_text.get(settled.get("config", ""), chosen)
        autotuner.cache_results = False  # Triton would keep a sweep of one beside its own
        autotuner.settled = chosen
        return [chosen]

    def _bench(autotuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
        # before Triton 3.7 a sweep of one is timed all the same
        if config is getattr(autotuner, "settled", None):
            return [0.0, 0.0, 0.0]
        return bench(autotuner, *args, config=config, **meta)

    Autotuner.prune_configs, Autotuner._bench = prune_configs, _bench
    return sweeps


def _jit_function(autotuner: Any) -> Any:
    function = autotuner.fn
    while not hasattr(function, "cache_key"):
        function = function.fn
    return function


def _triton_kept(autotuner: Any, candidates: Sequence[Any], key: tuple[Any, ...]) -> Any | None:
    """Return the candidate that Triton itself has kept (TRITON_CACHE_DIR) as the best for this key, or None."""
    if not autotuner.cache_results or any(candidate.pre_hook for candidate in candidates):
        return None

    def absent() -> None:
        raise LookupError

    try:
        autotuner.check_disk_cache(key, candidates, absent)
    except LookupError:
        return None
    best = autotuner.cache.pop(key)
    return next((candidate for candidate in candidates if str(candidate) == str(best)), None)
