"""From text to a trained model in minutes, on any machine: `make demo`.

Two sources out of the standard library (code, and docstrings) → a tokenizer → two corpora → a mixture → a Llama of
about 5M parameters, killed half-way by SIGKILL and resumed → a Hugging Face folder → a sample. What Flame does is done
by its commands, each printed before it runs. Exit code 1 when a stage fails, when the second start did not go on from a
checkpoint, or when validation did not fall.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from demo_commands import TOOLS, DemoError, call, say, script
from demo_plot import read_metrics
from demo_texts import library_folder, module_paths, read_library, train_tokenizer, write_code, write_docstrings
from demo_training import Killed, check_resumed, check_validation, train_until_killed

MARKER = ".flame-demo"
PROMPTS = ("def __init__(self, ", "Return a list of")
WEIGHTS = {"code": 0.7, "docstrings": 0.3}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is; lengths in tokens, intervals in steps."""

    max_modules: int | None = None
    vocab_size: int = 4096
    val_fraction: float = 0.05
    hidden_size: int = 256
    intermediate_size: int = 688
    num_layers: int = 4
    num_heads: int = 4
    batch_size: int = 2
    seq_len: int = 1024
    window_len: int = 512
    learning_rate: float = 2e-3
    steps: int = 300
    warmup_steps: int = 30
    interval: int = 50
    log_freq: int = 5
    validation_tokens: int = 16_384


TINY = Scale(
    max_modules=40,
    vocab_size=512,
    val_fraction=0.1,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    batch_size=1,
    seq_len=256,
    window_len=128,
    learning_rate=1e-2,
    steps=60,
    warmup_steps=2,
    interval=10,
    log_freq=1,
    validation_tokens=2_048,
)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The demo's folder, what runs in it, and how many seconds each stage took."""

    folder: Path
    scale: Scale
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def corpora(self) -> dict[str, Path]:
        return {name: self.folder / "corpora" / name for name in WEIGHTS}

    @property
    def mixture(self) -> Path:
        return self.folder / "mix.json"

    @property
    def model_config(self) -> Path:
        return self.folder / "llama.json"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def exported(self) -> Path:
        return self.folder / "hf"

    @property
    def picture(self) -> Path:
        return self.folder / "loss.png"

    @contextlib.contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """Say what a stage does, and afterwards how long it took."""
        say(f"\n[{len(self.seconds) + 1}] {name}: {what}")
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        say(f"    {name}: {self.seconds[name]:.1f} s")


def main() -> int:
    """Run every stage; 0 if all held."""
    parser = argparse.ArgumentParser(description="Text, corpora, mixture, training, a kill, export, a sample.")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="made, and emptied on a re-run")
    parser.add_argument("--tiny", action="store_true", help="a trial in seconds, of a model that learns little")
    options = parser.parse_args()
    # The training run is in a session of its own: leave through `finally`, which ends it, also on SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run_stages(Demo(folder=options.folder, scale=TINY if options.tiny else Scale()))
    except DemoError as error:
        print(f"demo: {error}.", file=sys.stderr)
        return 1
    return 0


def run_stages(demo: Demo) -> None:
    """The demo from top to bottom."""
    scale = demo.scale
    begin_folder(demo.folder)
    with demo.stage("texts", "the standard library's code and docstrings, a tokenizer, a model's configuration"):
        make_texts(demo)
    with demo.stage("corpora", f"text to sealed corpora of token shards, {scale.val_fraction:.0%} held out"):
        build_corpora(demo)
    with demo.stage("mixture", "0.7 code and 0.3 docstrings, in tokens"):
        sources = [f"{name}={corpus}:{WEIGHTS[name]}" for name, corpus in demo.corpora.items()]
        tokens = scale.steps * scale.batch_size * scale.seq_len
        named = [word for source in sources for word in ("--source", source)]
        call([script("flame-mix"), "create", *named, "--tokens", tokens, "--seed", 42, "--output", demo.mixture])
    with demo.stage("training", f"{scale.steps} steps, to be killed by SIGKILL after checkpoint {scale.steps // 2}"):
        killed = train_until_killed(
            train_command(demo), demo.run, after=scale.steps // 2, lost=max(1, scale.interval // 2)
        )
    with demo.stage("resume", f"the same command again, which is to go on from step {killed.checkpoint}"):
        call(train_command(demo))
        repeated = check_resumed(demo.run, killed, steps=scale.steps)
        falls = check_validation(demo.run)
    with demo.stage("export", "the last checkpoint as a Hugging Face folder"):
        checkpoint = demo.run / "checkpoint" / f"step-{scale.steps}"
        call([script("flame-export"), "hf", "--checkpoint", checkpoint, "--output", demo.exported])
    with demo.stage("sample", "transformers' generate on that folder, offline and without Flame"):
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        call([Path(sys.executable), TOOLS / "demo_sample.py", demo.exported, *prompts])
    with demo.stage("picture", "losses over steps"):
        marks = ["--killed_at", killed.step, "--resumed_from", killed.checkpoint]
        call([Path(sys.executable), TOOLS / "demo_plot.py", demo.run, *marks, "--output", demo.picture])
    summary = summarise(demo, killed, repeated, falls)
    (demo.folder / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    say("\n" + summary)


def begin_folder(folder: Path) -> None:
    """Make an empty folder: what an earlier demo left is deleted, anything else is refused."""
    if (folder / MARKER).is_file():
        shutil.rmtree(folder)
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DemoError(f"{folder} was not made by the demo (it holds no {MARKER}); name another folder with --folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text("Made by tools/demo.py, which deletes this folder when it starts over.\n")


def make_texts(demo: Demo) -> None:
    """Write the two sources, their tokenizer and the model's configuration."""
    from transformers import LlamaConfig

    scale, library, texts = demo.scale, library_folder(), demo.folder / "texts"
    texts.mkdir()
    modules, docstrings = read_library(library, module_paths(library)[: scale.max_modules])
    write_code(texts / "code.jsonl", modules)
    write_docstrings(texts / "docstrings.parquet", docstrings)
    documents = [document.text for document in (*modules, *docstrings)]
    num_tokens = train_tokenizer(demo.tokenizer, documents, vocab_size=scale.vocab_size)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=num_tokens,
        hidden_size=scale.hidden_size,
        intermediate_size=scale.intermediate_size,
        num_hidden_layers=scale.num_layers,
        num_attention_heads=scale.num_heads,
        num_key_value_heads=scale.num_heads,
        max_position_embeddings=scale.window_len,
        bos_token_id=None,
        eos_token_id=0,
    ).to_json_file(demo.model_config)
    say(f"    {texts / 'code.jsonl'}: {len(modules)} modules of {library}")
    say(f"    {texts / 'docstrings.parquet'}: {len(docstrings)} docstrings, cut out of that code")
    say(f"    {demo.tokenizer}: {num_tokens} tokens of byte-level BPE")


def build_corpora(demo: Demo) -> None:
    """Turn each source into a corpus."""
    sources = {"code": ("code.jsonl", "path"), "docstrings": ("docstrings.parquet", "path,name,line")}
    for name, corpus in demo.corpora.items():
        file, kept = sources[name]
        options = {
            "dataset": demo.folder / "texts" / file,
            "keep_columns": kept,
            "tokenizer": demo.tokenizer,
            "output": corpus,
            "val_fraction": demo.scale.val_fraction,
            "num_workers": 2,
        }
        call([script("flame-preprocess"), "build", *spelled(options)])


def train_command(demo: Demo) -> list[object]:
    """Return the one command that starts the run, and starts it again."""
    scale = demo.scale
    options = {
        "job.dump_folder": demo.run,
        "model.config": demo.model_config,
        "training.dataset": demo.mixture,
        "training.varlen": "true",
        "training.batch_size": scale.batch_size,
        "training.seq_len": scale.seq_len,
        "training.window_len": scale.window_len,
        "training.context_len": scale.window_len,
        "training.steps": scale.steps,
        "optimizer.lr": scale.learning_rate,
        "lr_scheduler.warmup_steps": scale.warmup_steps,
        "validation.dataset": ",".join(f"{corpus}@val" for corpus in demo.corpora.values()),
        "validation.freq": scale.interval,
        "validation.tokens": scale.validation_tokens,
        "checkpoint.interval": scale.interval,
        "checkpoint.export_hf": "false",
        "metrics.log_freq": scale.log_freq,
    }
    return [script("flame-train"), *spelled(options)]


def spelled(options: dict[str, object]) -> list[object]:
    """Return options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def summarise(demo: Demo, killed: Killed, repeated: str, falls: dict[str, tuple[float, float]]) -> str:
    """Return what was made, where it lies, and what it showed."""
    lines = [f"What is in {demo.folder} now:"]
    for corpus in demo.corpora.values():
        splits = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))["splits"]
        counts = (f"{name} {s['num_tokens']:,} tokens, {s['num_documents']:,} documents" for name, s in splits.items())
        lines.append(f"  {corpus}: {'; '.join(counts)}")
    metrics = read_metrics(demo.run / "metrics.jsonl")
    lines += [
        f"  {demo.mixture}: the mixture of both",
        f"  {demo.run}: {demo.scale.steps} steps, {metrics[-1]['consumed_tokens']:,} tokens; killed after step "
        f"{killed.step}, resumed from step {killed.checkpoint};",
        f"      {repeated}",
        *(f"      validation loss, {name}: {first:.3f} → {last:.3f}" for name, (first, last) in falls.items()),
        f"  {demo.exported}: the model for transformers",
        f"  {demo.picture}: its losses",
        "Seconds: "
        + ", ".join(f"{name} {seconds:.0f}" for name, seconds in demo.seconds.items())
        + f"; {sum(demo.seconds.values()):.0f} in all.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
