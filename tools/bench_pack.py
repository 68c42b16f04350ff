"""Windows beside packs: padding, and cuts of documents, on real text at several lengths.

Builds a corpus of parquet files with one tokenizer, and packs it for each length. `--json` prints an object a row:
name, value, unit, peer, peer_value, ratio; values are those of best_fit, the peer is windows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flame.preprocess.pack import PackOptions, pack
from flame.shards.reader import Corpus

LENGTHS = [2048, 4096, 65536]
ROWS = {
    "padding": "padding",
    "documents_cut": "documents cut",
    "fitting_documents_cut": "… that would fit",
    "tokens_behind_cuts": "tokens that do not see the beginning of their document",
}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        corpus = arguments.corpus or build(arguments.data, arguments.tokenizer, Path(scratch) / "corpus")
        rows = list(rows_of(corpus, arguments.context_lens))
        if arguments.json:
            print("\n".join(map(json.dumps, rows)))
            return
        info = Corpus.open(corpus).split("train")
        print(f"{info.num_documents:,} documents, {info.num_tokens:,} tokens\n")
        print("\n".join(table(rows)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real = Path(os.environ.get("FLAME_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    parser.add_argument("--corpus", type=Path, help="a corpus folder that is there; nothing is built then")
    parser.add_argument("--data", type=Path, default=real / "web_sample", help="folder of parquet files, column text")
    parser.add_argument("--tokenizer", type=Path, default=real / "tokenizers" / "gpt2", help="tokenizer folder")
    parser.add_argument("--context_lens", type=int, nargs="+", default=LENGTHS, help="tokens of a sample")
    parser.add_argument("--scratch", type=Path, help="where the corpus is written, and deleted again")
    parser.add_argument("--json", action="store_true", help="one object a row instead of a table")
    return parser.parse_args(argv)


def build(data: Path, tokenizer: Path, output: Path) -> Path:
    """Build a corpus of all parquet files of a folder, with the reference: few megabytes need no engine's check."""
    options = [f"--dataset={data}/*.parquet", f"--tokenizer={tokenizer}", f"--output={output}"]
    subprocess.run([sys.executable, "-m", "flame.cli.preprocess", "build", *options], check=True, stdout=sys.stderr)
    return output


def rows_of(corpus: Path, context_lens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield rows of each length, in percent: of the samples' tokens, of documents, of the corpus's tokens."""
    num_tokens = Corpus.open(corpus).split("train").num_tokens
    for length in context_lens:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            pack(PackOptions(corpus=corpus, context_len=length, json=True))
        report = json.loads(printed.getvalue())
        packs, windows = (
            shares(report[way], length, report["num_documents"], num_tokens) for way in ("best_fit", "windows")
        )
        for name, value in packs.items():
            peer = windows[name]
            yield {
                "name": f"pack/{length}/{name}",
                "value": round(value, 4),
                "unit": "%",
                "peer": "windows",
                "peer_value": round(peer, 4),
                "ratio": round(value / peer, 4) if peer else None,
            }


def shares(way: Mapping[str, int], context_len: int, num_documents: int, num_tokens: int) -> dict[str, float]:
    """Return one way's figures as percentages, in the order of `ROWS`."""
    return {
        "padding": 100 * way["num_padding"] / max(1, way["num_samples"] * context_len),
        "documents_cut": 100 * way["cut_documents"] / num_documents,
        "fitting_documents_cut": 100 * way["cut_documents_that_fit"] / num_documents,
        "tokens_behind_cuts": 100 * way["tokens_behind_cuts"] / num_tokens,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line a row."""
    yield f"{'N':>8}  {'':<54}{'windows':>10}{'best_fit':>10}"
    for row in rows:
        _, length, name = row["name"].split("/")
        yield f"{int(length):>8,}  {ROWS[name]:<54}{row['peer_value']:>9.3f}%{row['value']:>9.3f}%"


if __name__ == "__main__":
    main()
