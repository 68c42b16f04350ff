"""What `flame-preprocess build` can be asked: its options, checked as far as the command line alone can tell."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flame.config import option, parse_count
from flame.errors import UsageError
from flame.preprocess.ranges import TaskRange, parse_range
from flame.preprocess.where import Where
from flame.preprocess.where_parse import parse_where

DEFAULT_SHARD_TOKENS = 2**28
DEFAULT_BLOCK_TOKENS = 2**22
RESERVED_COLUMNS = ("source_file", "row", "num_bytes")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of one build."""

    dataset: tuple[str, ...] = option(
        (),
        help="files, patterns, folders, s3:// gs:// hf:// https:// addresses or hub datasets (org/name) to read, in "
        "this order (several: repeat the option, separate by commas, or name a file that lists them as @FILE). "
        "Parquet, arrow, feather; jsonl, txt (one document a line), csv and tsv plain or as .gz or .zst; folders that "
        "`datasets` saved. A folder is read with its subfolders in natural order (part-2 before part-10): hidden "
        "files and notes are passed over and told, any other file that is no text is refused (docs/inputs.md)",
        metavar="PATH",
        repeat=True,
    )
    tokenizer: Path | None = option(
        None, help="folder with a tokenizer.json (and tokenizer_config.json), or such a file (needed)"
    )
    output: Path = option(help="corpus folder to write", aliases=("path",))

    data_dir: str | None = option(None, help="folder inside the dataset to read", metavar="DIR")
    data_files: tuple[str, ...] = option((), help="patterns inside the dataset to read, comma separated")
    dataset_name: str | None = option(None, help="configuration of a hub dataset, such as sample-10BT")
    dataset_split: str | None = option(
        None, help="split of a hub dataset (default train) or of a folder that `datasets` saved with several"
    )
    dataset_revision: str | None = option(
        None, help="branch, tag or commit of a hub dataset; default its main branch", aliases=("revision",)
    )
    text_column: str | None = option(
        None, help="column or key of the text, a.b for a nested one; default text, then content", metavar="NAME"
    )
    keep_columns: tuple[str, ...] = option(
        (),
        help="columns to keep beside each document in docs.parquet, comma separated (from jsonl: as strings, what is "
        "no string as its JSON)",
        metavar="NAMES",
    )
    provenance: bool = option(True, help="keep docs.parquet: source file, row and size of each document")
    limit_documents: int | None = option(
        None,
        help="read only the first documents of the input, in order, for trials",
        unit="documents",
        parse=parse_count,
    )
    limit_bytes: int | None = option(
        None, help="read only about the first bytes of text, in order, for trials", unit="bytes", parse=parse_count
    )

    where: str | None = option(
        None,
        help="take only the rows for which this holds, such as 'language_score > 0.9 and lang in [\"en\"]': "
        "comparisons, in, is null, and, or, not, + - * /; as in SQL a comparison with null keeps no row "
        "(docs/choosing.md)",
        metavar="EXPRESSION",
    )
    min_chars: int | None = option(
        None, help="leave out texts with fewer Unicode characters", unit="characters", parse=parse_count
    )
    max_chars: int | None = option(
        None, help="leave out texts with more Unicode characters", unit="characters", parse=parse_count
    )
    dedup: str | None = option(
        None,
        choices=("exact",),
        help="exact: of texts that are the same byte for byte take the first in the order of the input, of "
        "those that the --limit options leave. Reads the input twice",
    )
    max_tokens_per_document: int | None = option(
        None, help="most tokens of a document, BOS and EOS counted", unit="tokens", parse=parse_count
    )
    long_documents: str = option(
        "skip",
        choices=("skip", "truncate", "split"),
        help="what becomes of documents with more tokens than --max_tokens_per_document: left out and counted, cut "
        "after so many, or cut into several documents",
    )

    eos_token: str | None = option(None, help="token that ends each document; default the tokenizer config's eos_token")
    bos: str = option(
        "auto",
        choices=("auto", "always", "never"),
        help="begin each document with BOS; auto does as the tokenizer's own settings say",
    )
    parse_special: bool = option(False, help="let text that looks like a special token be that token, not plain text")

    shuffle: bool = option(True, help="deal the input to tasks in a seeded order, and shuffle documents within blocks")
    no_shuffle: bool = option(False, help="keep the input's order: the same as --shuffle false")
    shuffle_block_tokens: int = option(
        DEFAULT_BLOCK_TOKENS, help="documents are shuffled within blocks of this size", unit="tokens", parse=parse_count
    )
    seed: int = option(42, help="seed of the shuffle")
    val_fraction: float = option(
        0.0, help="share of documents held out as the split `val`, chosen by the text itself (0 = no split)"
    )
    shard_tokens: int = option(
        DEFAULT_SHARD_TOKENS, help="a shard ends at the first document end past this", unit="tokens", parse=parse_count
    )
    on_error: str = option(
        "fail",
        choices=("fail", "skip"),
        help="malformed lines, invalid UTF-8 and damaged files: fail, or skip, count and keep samples in rejects/ "
        "(what is no text, as null, blank, a missing key or a number, is always counted and left out; docs/inputs.md)",
    )
    max_error_fraction: float | None = option(
        None,
        help="with --on_error skip: fail where more than this share of the documents is malformed, once that is sure",
    )

    num_workers: int | None = option(
        None,
        help="processes; default one for each CPU, of the cluster with --executor ray. Changes no byte of the result",
    )
    batch_size: int = option(
        1024, help="most documents given to the tokenizer at once (1,024 are read at a time)", unit="documents"
    )
    engine: str = option(
        "auto",
        choices=("auto", "hf", "gigatoken", "fastokens"),
        help="what tokenizes; changes no byte of the result. auto takes gigatoken, fastokens or hf, the first that is "
        "installed, serves the tokenizer and passes its checks (hf for a few MB that no check was made for yet). hf is "
        "Hugging Face's tokenizers, the reference (a worker needs 120 bytes of memory for each byte of the largest "
        "document)",
    )
    executor: str = option(
        "local",
        choices=("local", "ray"),
        help="where tasks run: processes of this machine, or a Ray cluster (RAY_ADDRESS)",
    )
    task_range: TaskRange | None = option(
        None,
        help="run only the i-th of n shares of the tasks, counted from 0: for array jobs, each with all "
        "options alike and one --output that they share; --seal makes the corpus (docs/multi-node.md)",
        metavar="I/N",
        parse=parse_range,
    )
    hash_only: bool = option(
        False,
        help="with --task_range and --dedup exact: do only the first reading of the share, which every share needs "
        "before any may do its second (docs/multi-node.md)",
    )
    seal: bool = option(False, help="make the corpus of what --task_range built; needs only --output")
    dry_run: bool = option(False, help="tokenize a sample, say what the build would give and take, and write no corpus")
    data_probs: str | None = option(None, help="moved: a corpus is one source, `flame-mix create` weighs several")

    def __post_init__(self) -> None:
        self._refuse_what_is_absent()
        needed = [f"--{name}" for name in ("dataset", "tokenizer") if not getattr(self, name)]
        if needed and not self.seal:
            raise UsageError(
                f"build needs {', '.join(needed)}",
                fix="flame-preprocess build -h explains every option",
            )
        for name in ("limit_documents", "limit_bytes", "num_workers", "batch_size", "shard_tokens"):
            self._require_positive(name)
        self._check_choice()
        self._require_positive("shuffle_block_tokens")
        if not 0 <= self.val_fraction < 1:
            raise UsageError(f"--val_fraction cannot be {self.val_fraction}", expected="0 ≤ val_fraction < 1")
        if self.max_error_fraction is not None and not 0 <= self.max_error_fraction <= 1:
            raise UsageError(
                f"--max_error_fraction cannot be {self.max_error_fraction}",
                expected="a share of the documents, 0 to 1: 0.001 allows one in a thousand",
            )
        if self.max_error_fraction is not None and self.on_error == "fail" and not self.seal:
            raise UsageError(
                "--max_error_fraction allows some malformed documents, and --on_error fail none",
                fix="Add --on_error skip, or leave --max_error_fraction out",
            )
        if self.batch_size > 1024:
            raise UsageError(f"--batch_size cannot be {self.batch_size}", expected="1 to 1024 documents")
        reserved = sorted(set(self.keep_columns) & set(RESERVED_COLUMNS))
        if reserved:
            raise UsageError(
                f"--keep_columns cannot keep {reserved[0]!r}", expected="names that docs.parquet does not use itself"
            )
        if len(set(self.keep_columns)) != len(self.keep_columns):
            raise UsageError("--keep_columns names a column twice", got=",".join(self.keep_columns))
        if self.keep_columns and not self.provenance:
            raise UsageError("--keep_columns needs the docs.parquet that --provenance false leaves out")

    def _require_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} cannot be {value}", expected="1 or more")

    def _refuse_what_is_absent(self) -> None:
        if self.data_probs is not None:
            raise UsageError(
                "--data_probs is not an option of build: a corpus is one source",
                fix="Build each dataset into its own corpus, then weigh them: "
                "flame-mix create --source a=corpora/a:0.7 --source b=corpora/b:0.3 --output mix.json",
            )

    def _check_choice(self) -> None:
        for name in ("min_chars", "max_chars"):
            self._require_positive(name)
        if self.min_chars is not None and self.max_chars is not None and self.min_chars > self.max_chars:
            raise UsageError(
                f"--min_chars {self.min_chars} is more than --max_chars {self.max_chars}: no text would be left"
            )
        if self.max_tokens_per_document is not None and self.max_tokens_per_document < 3:
            raise UsageError(
                f"--max_tokens_per_document cannot be {self.max_tokens_per_document}",
                expected="3 or more: BOS, a token of text, EOS",
            )
        if self.long_documents != "skip" and self.max_tokens_per_document is None:
            raise UsageError(
                f"--long_documents {self.long_documents} needs --max_tokens_per_document", fix="Say how long is long"
            )
        if self.hash_only and (self.dedup is None or self.task_range is None or self.seal):
            raise UsageError(
                "--hash_only is the first of the two readings of a share of an array job",
                expected="--dedup exact and --task_range i/n with it, and no --seal",
                fix="Leave --hash_only out: a build without --task_range does both readings",
            )
        if self.where is not None:
            parse_where(self.where)

    @property
    def condition(self) -> Where | None:
        """What --where says, read."""
        return None if self.where is None else parse_where(self.where)

    @property
    def shuffled(self) -> bool:
        return self.shuffle and not self.no_shuffle

    @property
    def shuffle_seed(self) -> int | None:
        """The seed that the corpus depends on, None where its order is the input's."""
        return self.seed if self.shuffled else None

    @property
    def worker_count(self) -> int:
        return self.num_workers if self.num_workers is not None else len(os.sched_getaffinity(0))

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The names to look for, in order."""
        return ("text", "content") if self.text_column is None else (self.text_column,)
