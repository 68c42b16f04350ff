"""Memory of sampling: bounded for any corpus, and flat however long a run reads. Shards are holes on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flame.sampling.mixture import Mixture, Stage
from flame.sampling.mixture_file import write_mixture
from flame.sampling.sources import mixture_of_corpora
from flame.shards.format import END_DTYPE, HEADER_BYTES, TOKEN_DTYPE, ends_path, npy_header, tokens_path
from flame.shards.manifest import Manifest, ShardInfo, SplitInfo, write_manifest
from tests.corpora import tokenizer_info


def corpus_of_zeros(folder: Path, *, num_tokens: int, document_tokens: int) -> Path:
    """Seal a corpus of one shard, in documents of one length (the last may be shorter)."""
    (folder / "train").mkdir(parents=True)
    with open(tokens_path(folder, "train", "shard-00000-000"), "wb") as file:
        file.write(npy_header(TOKEN_DTYPE, num_tokens))
        file.truncate(HEADER_BYTES + num_tokens * TOKEN_DTYPE.itemsize)
    num_documents = -(-num_tokens // document_tokens)
    ends = np.minimum(np.arange(1, num_documents + 1, dtype=END_DTYPE) * document_tokens, num_tokens)
    with open(ends_path(folder, "train", "shard-00000-000"), "wb") as file:
        file.write(npy_header(END_DTYPE, num_documents))
        ends.tofile(file)
    info = ShardInfo(
        name="shard-00000-000",
        num_tokens=num_tokens,
        num_documents=num_documents,
        num_bytes=num_tokens,
        max_token_id=0,
        tokens_checksum="xxh3:" + "0" * 32,
        ends_checksum="xxh3:" + folder.name.encode().hex().zfill(32)[-32:],  # unlike the others' fingerprints
    )
    manifest = Manifest(tokenizer=tokenizer_info(b"{}", 0, 9), splits={"train": SplitInfo.of((info,))})
    write_manifest(folder, manifest)
    return folder


def printed_by(program: str, *arguments: object) -> list[int]:
    """The numbers that a process of its own prints: it has no memory but what the program takes."""
    words = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [int(word) for word in result.stdout.split()]


READ_FOR_LONG = """
import itertools, sys
from pathlib import Path
import torch
from flame.sampling.mixture_file import read_mixture
from flame.sampling.geometry import BatchGeometry
from flame.sampling.sampler import Sampler
from flame.sampling.sources import open_mixture
from flame.train.loader import StepLoader

def anonymous_kib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

window_len, num_windows = int(sys.argv[2]), int(sys.argv[3])
mixture = read_mixture(Path(sys.argv[1]))
splits = open_mixture(mixture)
geometry = BatchGeometry(
    seq_len=window_len, window_len=window_len, context_len=window_len,
    micro_batch=10, accumulation=2, dp_size=1, varlen=True,
)
loader = StepLoader(
    Sampler(mixture, splits, window_len), splits, geometry,
    dp_rank=0, consumed_samples=0, num_embeddings=9, device=torch.device("cpu"), num_threads=4,
)
for step, batch in enumerate(itertools.islice(loader, num_windows // 20), 1):
    assert batch.num_labels > 0
    if step % (num_windows // 200) == 0:
        print(anonymous_kib())
loader.close()
"""


def test_20_000_windows_of_4_gib_in_5_million_documents_leave_memory_flat(tmp_path: Path) -> None:
    corpus = corpus_of_zeros(tmp_path / "web", num_tokens=2**30, document_tokens=214)
    write_mixture(tmp_path / "mix.json", mixture_of_corpora([corpus], None, 42))
    told = printed_by(READ_FOR_LONG, tmp_path / "mix.json", 512, 20_000)
    assert len(told) == 10
    assert max(told[2:]) - told[1] < 2048, "KiB, over the last 16,000 windows"


FIRST_WINDOWS = """
import sys
from pathlib import Path
from flame.sampling.dataset import MixtureDataset

def peak_kib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

window_len, count = int(sys.argv[2]), int(sys.argv[3])
samples = MixtureDataset.open(Path(sys.argv[1]), window_len=window_len)
num_sequences = 0
for k in [*range(count), *range(2**32, 2**32 + count)]:
    num_sequences += len(samples[k]["cu_seqlens"]) - 1
print(peak_kib(), num_sequences)
"""


@pytest.fixture
def trillions(tmp_path: Path) -> Path:
    """A mixture of 300 sources and 10^13 tokens in all, of weights that differ."""
    each = 10**13 // 300
    corpora = [corpus_of_zeros(tmp_path / f"s{i}", num_tokens=each + i, document_tokens=2**40) for i in range(300)]
    plain = mixture_of_corpora(corpora, [1 + i % 7 for i in range(300)], 42)
    mixture = Mixture(
        data_seed=42,
        sources=plain.sources,
        stages=(plain.stages[0], Stage(start_tokens=10**12, weights=plain.stages[0].weights[::-1])),
    )
    write_mixture(tmp_path / "mix.json", mixture)
    return tmp_path / "mix.json"


def test_the_first_windows_of_10_trillion_tokens_in_300_sources_need_under_200_mb(trillions: Path) -> None:
    peak_kib, num_sequences = printed_by(FIRST_WINDOWS, trillions, 4096, 64)
    assert peak_kib * 1024 < 200_000_000 and num_sequences == 2 * 64


def test_windows_among_20_million_documents_of_one_token_are_read_in_bounded_memory(tmp_path: Path) -> None:
    corpus = corpus_of_zeros(tmp_path / "web", num_tokens=20_000_000, document_tokens=1)
    write_mixture(tmp_path / "mix.json", mixture_of_corpora([corpus], None, 42))
    peak_kib, num_sequences = printed_by(FIRST_WINDOWS, tmp_path / "mix.json", 65536, 8)
    assert peak_kib < 2 << 20 and num_sequences == 2 * 8 * 65536
