"""`flame-preprocess convert --to`: a split of a corpus to another system's token files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from flame.errors import CorpusError, FlameError, UsageError
from flame.files import exclusive_lock, named_disk_errors, publish, remove_tree, temporary_path
from flame.preprocess.convert_config import ConvertOptions
from flame.preprocess.exports.formats import EXPORTS, Export
from flame.preprocess.progress import BuildProgress
from flame.preprocess.reports import Progress
from flame.shards.format import HEADER_BYTES, RESTORE, TOKEN_DTYPE, read_npy_length, tokens_path
from flame.shards.manifest import ShardInfo
from flame.shards.reader import Corpus, Split
from flame.words import counted

CHUNK_TOKENS = 2**22


def export(options: ConvertOptions) -> int:
    """Write the files that `options` ask for; returns the exit code.

    They appear whole, the index last, or not at all. Each shard's checksum is recomputed on the way. Cost: one reading
    of the tokens, in order; memory for a few chunks of 16 MiB.
    """
    assert options.to is not None and options.corpus is not None
    started = time.monotonic()
    form = EXPORTS[options.to]
    corpus = Corpus.open(options.corpus)
    split = corpus.split(options.split)
    if not split.num_documents:
        raise CorpusError(
            "the split has no documents", where=options.corpus, got=f"--split {split.name}", fix="Name another split"
        )
    dtype = choose_dtype(form, options, split)
    if options.output.is_dir():
        raise UsageError(
            "--output is a folder, and the files need a name", got=options.output, expected=options.output / "NAME"
        )
    output = options.output.with_name(options.output.name.removesuffix(form.tokens))
    paths = [_beside(output, ending) for ending in (form.tokens, *form.others)]
    _refuse_existing(paths)
    lock = _beside(output, ".lock")
    with exclusive_lock(lock, what="this output"):
        _refuse_existing(paths)
        try:
            with named_disk_errors(paths[0], split.num_tokens * np.dtype(dtype).itemsize):
                _write_tokens(paths[0], split, dtype)
                for path, write in zip(paths[1:], form.others.values(), strict=True):
                    with _durable(path) as file:
                        write(file, split, dtype)
            for path in paths:
                publish(temporary_path(path), path)
        finally:
            for path in (*map(temporary_path, paths), lock):
                remove_tree(path)
    seconds = max(time.monotonic() - started, 1e-9)
    print(
        f"wrote {', '.join(map(str, paths))}\n"
        f"  {split.name:<10} {counted(split.num_documents, 'document')}, "
        f"{counted(split.num_tokens, 'token')} of {dtype}\n"
        f"  speed      {split.num_tokens / seconds:,.0f} tokens/s ({seconds:.1f} s)\n"
        f"  corpus     {corpus.fingerprint}"
    )
    return 0


def choose_dtype(form: Export, options: ConvertOptions, split: Split) -> str:
    """Return the narrowest dtype that holds every id of the vocabulary, or the one that is asked for."""
    largest = max(split.corpus.manifest.tokenizer.vocab_size - 1, split.max_token_id)
    if options.dtype == "auto":
        fitting = [dtype for dtype in form.dtypes if largest <= np.iinfo(dtype).max]
        return fitting[0] if fitting else form.dtypes[-1]
    if options.dtype not in form.dtypes:
        raise UsageError(
            f"{options.to} does not keep ids as {options.dtype}",
            got=f"--dtype {options.dtype}",
            expected=" or ".join(form.dtypes),
        )
    if split.max_token_id > np.iinfo(options.dtype).max:
        raise CorpusError(
            f"{options.dtype} cannot hold the ids of this split",
            where=f"{split.corpus.path}, split {split.name}",
            got=f"a largest id of {split.max_token_id}",
            expected=f"at most {np.iinfo(options.dtype).max}",
            fix=f"Leave --dtype away, or say --dtype {form.dtypes[-1]}",
        )
    return options.dtype


def _beside(output: Path, ending: str) -> Path:
    return output.with_name(output.name + ending)


def _refuse_existing(paths: list[Path]) -> None:
    there = [path for path in paths if path.exists()]
    if there:
        whole = len(there) == len(paths)
        raise FlameError(
            "the output is there already" if whole else "a part of the output is there already",
            where=there[0],
            expected="a name that is free",
            fix="Choose another --output, or delete "
            + ("them" if whole else "what an export that was stopped, or another program, left")
            + f": {', '.join(map(str, there))}",
        )


@contextlib.contextmanager
def _durable(path: Path) -> Iterator[BinaryIO]:
    """Open the file under its temporary name, and fsync it at the end."""
    with open(temporary_path(path), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write_tokens(path: Path, split: Split, dtype: str) -> None:
    with _durable(path) as file, BuildProgress(split.num_tokens * TOKEN_DTYPE.itemsize, 0) as progress:
        for shard in split.shards:
            _write_shard(file, split, shard, np.dtype(dtype).newbyteorder("<"), progress.add)


@contextlib.contextmanager
def _opened(path: Path, num_tokens: int) -> Iterator[BinaryIO]:
    """Open a shard's tokens behind their header; `CorpusError` unless there are so many."""
    found = read_npy_length(path, TOKEN_DTYPE)
    if found != num_tokens:
        raise CorpusError(
            "a shard is not the one in the manifest",
            where=path,
            got=f"{counted(found, 'token')}",
            expected=f"{counted(num_tokens, 'token')}",
            fix=RESTORE,
        )
    with open(path, "rb", buffering=0) as file:
        file.seek(HEADER_BYTES)
        yield file


def _write_shard(
    file: BinaryIO, split: Split, shard: ShardInfo, dtype: np.dtype[Any], report: Callable[[Progress], None]
) -> None:
    """Write the tokens of a shard; `CorpusError` unless they have its checksum.

    They are read, not mapped: pages of a map stay with this process, and a shard has a gigabyte of them.
    """
    path = tokens_path(split.corpus.path, split.name, shard.name)
    digest = xxhash.xxh3_128()
    left = shard.num_tokens
    with _opened(path, left) as source:
        while left:
            tokens = np.fromfile(source, TOKEN_DTYPE, min(CHUNK_TOKENS, left))
            if len(tokens) == 0:
                raise CorpusError("a shard was cut short while it was read", where=path, fix=RESTORE)
            left -= len(tokens)
            digest.update(tokens.data)
            file.write(tokens.astype(dtype).data)
            num_documents = 0 if left else shard.num_documents
            report(Progress(input_bytes=tokens.nbytes, num_documents=num_documents, num_tokens=len(tokens)))
    found = f"xxh3:{digest.hexdigest()}"
    if found != shard.tokens_checksum:
        raise CorpusError(
            "a shard's tokens are not those that were sealed",
            where=path,
            got=f"checksum {found}",
            expected=shard.tokens_checksum,
            fix=f"{RESTORE}; flame-preprocess verify says where",
        )
