"""Make the tuned configurations that come with flame: train a few steps on this GPU, and keep what was found best.

    python tools/tune_kernels.py                                          # GLA and gated DeltaNet
    python tools/tune_kernels.py --config configs/kda_387M.json --seq_len 32768

Writes `flame/kernels/tuned/<device>_<triton>_<fla>.json`, adding to what is there; nothing that was kept or shipped
before is used, so that all of a configuration's kernels are timed anew. Then each configuration is started once more
with an empty cache of Triton's, which must run no sweep: printed are the seconds to the end of the first step, tuning
and not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_runs import PROJECT, first_step_seconds, make_corpus, packed_words, train

from flame.files import write_json
from flame.kernels.tuning import SHIPPED

CONFIGS = [str(PROJECT / "configs" / name) for name in ("gla_374M.json", "gated_deltanet_512M.json")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", default=CONFIGS)
    parser.add_argument("--seq_len", type=int, default=65_536)
    parser.add_argument("--context_len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path, default=SHIPPED, help="the folder to write the file into")
    parser.add_argument("--options", default="", help="more options of flame-train, as one text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        corpus = make_corpus(Path(scratch, "corpus"), num_tokens=options.seq_len * (options.steps + 2))
        for number, config in enumerate(options.config):
            run = Path(scratch, str(number))
            variables = {"FLAME_TUNED_DIR": str(run / "kept"), "FLAME_TUNED_SHIPPED": "off"}
            log = start(options, config, corpus, run / "tuning", variables)
            (setting,) = (run / "kept").iterdir()
            file = options.output / f"{setting.name}.json"
            added = gather(setting, file)
            tuning = first_step_seconds(log)
            variables = {"FLAME_TUNED_DIR": str(run / "again")}
            if options.output.resolve() != SHIPPED.resolve():  # a start finds by itself only what is shipped
                variables["FLAME_TUNED_SHIPPED"] = "off"
                scatter(file, run / "again" / setting.name)
            log = start(options, config, corpus, run / "tuned", variables)
            print(
                f"{Path(config).stem}: {added} kernels and shapes into {file}; "
                f"first step after {tuning} s tuning, {first_step_seconds(log)} s tuned"
            )
            if swept := re.findall(r"\btuning (\S+), the", log):
                sys.exit(f"these were swept again, which none should be: {', '.join(swept)}")


def start(options: argparse.Namespace, config: str, corpus: Path, run: Path, variables: dict[str, str]) -> str:
    """Train some steps in a fresh process with nothing compiled before; return its log."""
    words = packed_words(
        config=config,
        corpus=corpus,
        run=run,
        seq_len=options.seq_len,
        context_len=options.context_len,
        steps=options.steps,
        lr_scheduler__warmup_steps=1,
        comm__init_timeout_seconds=3600,
    )
    environment = {"TRITON_CACHE_DIR": str(run / "triton"), **variables}
    return train([*words, *options.options.split()], environment)


def gather(kept: Path, target: Path) -> int:
    """Add the outcomes in a folder to a file of shipped ones; return how many there were."""
    found: dict[str, Any] = {path.stem: json.loads(path.read_bytes()) for path in sorted(kept.glob("*.json"))}
    before = json.loads(target.read_bytes())["outcomes"] if target.exists() else {}
    write_json(target, {"outcomes": dict(sorted((before | found).items()))})
    return len(found)


def scatter(file: Path, kept: Path) -> None:
    """Write the outcomes of a file of shipped ones as a start of flame keeps them: one a file."""
    kept.mkdir(parents=True)
    for name, outcome in json.loads(file.read_bytes())["outcomes"].items():
        write_json(kept / f"{name}.json", outcome)


if __name__ == "__main__":
    main()
