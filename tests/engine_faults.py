"""Tokenizers that kill the process that uses them: installed in a build's processes by a sitecustomize.py."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

_SITE = """
import os
if "FLAME_ENGINE_FAULT" in os.environ:
    from tests import engine_faults
    engine_faults.install(os.environ["FLAME_ENGINE_FAULT"])
"""


def dying_on(
    folder: Path, mark: str, *, engine: str = "hf", signal_name: str = "SIGABRT", deaths: int = 10**9
) -> dict[str, str]:
    """The environment of a build whose `engine` dies on every text that holds `mark`, so many times."""
    from tests.builds import PROJECT, environment

    site = folder / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(_SITE)
    fault = {"folder": str(folder), "mark": mark, "engine": engine, "signal": signal_name, "deaths": deaths}
    return environment(
        PYTHONPATH=f"{site}:{PROJECT}", FLAME_ENGINE_FAULT=json.dumps(fault), XDG_CACHE_HOME=str(folder / "cache")
    )


def install(fault_json: str) -> None:
    """Run inside a process, before anything else."""
    from flame.preprocess import engine_check, engines

    fault = json.loads(fault_json)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if fault["engine"] != "hf":  # a fast engine that is as good as the reference, but for the mark
        engine_check.make_screen = lambda *_: engine_check.Screen(ranges=(), num_differing=0)
    load = engines.load_hf

    def loaded(tokenizer_json: bytes, parse_special: bool) -> Any:
        encode = load(tokenizer_json, parse_special)

        def dying(texts: Any) -> Any:
            if any(fault["mark"] in text for text in texts.to_pylist()):
                die(fault)
            return encode(texts)

        return dying

    entry = engines.ENGINES[fault["engine"]]
    engines.ENGINES[fault["engine"]] = engines.Engine(package="tokenizers", load=loaded, batch_bytes=entry.batch_bytes)


def die(fault: dict[str, Any]) -> None:
    """Kill this process as the fault says, unless that was done often enough."""
    folder = Path(fault["folder"])
    before = len(list(folder.glob("death-*")))
    if before < fault["deaths"]:
        (folder / f"death-{before}").touch()
        os.kill(os.getpid(), signal.Signals[fault["signal"]])
