"""What `flame-preprocess convert` can be asked: the options that it shares with a build mean the same."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from flame.config import option, parse_count
from flame.errors import UsageError
from flame.preprocess.config import DEFAULT_BLOCK_TOKENS, DEFAULT_SHARD_TOKENS, BuildOptions

TO_OPTIONS = ("corpus", "split", "dtype")  # those that --from does not take; --to takes no others but --output


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of one conversion."""

    from_: str | None = option(
        None,
        choices=("flame-v0", "megatron", "datatrove"),
        metavar="FORMAT",
        help="what wrote the token files: flame-v0 is the predecessor's preprocessing, a folder of `datasets`' "
        "save_to_disk with a document's input_ids a row; megatron is Megatron-LM's and megatron-core's, NAME.bin and "
        "NAME.idx; datatrove is that of its DocumentTokenizer and merger, NAME.ds and NAME.ds.index",
    )
    to: str | None = option(
        None,
        choices=("megatron", "datatrove"),
        metavar="FORMAT",
        help="write the token files of another system: NAME.bin and NAME.idx, or NAME.ds, NAME.ds.index and "
        "NAME.ds.metadata",
    )
    output: Path = option(
        help="corpus folder to write; with --to, the files' name without its ending", aliases=("path",)
    )

    corpus: Path | None = option(None, help="with --to: corpus folder to read")
    split: str = option("train", help="with --to: split to write")
    dtype: str = option(
        "auto",
        choices=("auto", "uint16", "int32", "uint32"),
        help="with --to: how ids are kept; auto is uint16 where the vocabulary fits, else int32 (megatron) or uint32 "
        "(datatrove)",
    )

    input: Path | None = option(
        None, help="folder to convert; of megatron and datatrove also one file, or its name without the ending"
    )
    tokenizer: Path | None = option(
        None,
        help="the tokenizer that made the ids: folder with a tokenizer.json (and tokenizer_config.json), or such a "
        "file",
    )
    dataset_split: str | None = option(None, help="split to convert, where the folder holds several")
    keep_columns: tuple[str, ...] = option(
        (), help="columns to keep beside each document in docs.parquet, comma separated", metavar="NAMES"
    )
    provenance: bool = option(True, help="keep docs.parquet: source file, row and size of each document")

    eos_token: str | None = option(None, help="token that ends each document; default the tokenizer config's eos_token")
    bos: str = option(
        "auto",
        choices=("auto", "always", "never"),
        help="begin each document with BOS, where it does not yet; auto does as the tokenizer's own settings say",
    )
    parse_special: bool = option(
        False,
        help="the text was tokenized with its special tokens parsed: EOS may stand inside a document",
    )

    shuffle: bool = option(True, help="deal the input to tasks in a seeded order, and shuffle documents within blocks")
    no_shuffle: bool = option(False, help="keep the input's order: the same as --shuffle false")
    shuffle_block_tokens: int = option(
        DEFAULT_BLOCK_TOKENS, help="documents are shuffled within blocks of this size", unit="tokens", parse=parse_count
    )
    seed: int = option(42, help="seed of the shuffle")
    val_fraction: float = option(
        0.0, help="share of documents held out as the split `val`, chosen by the decoded text (0 = no split)"
    )
    shard_tokens: int = option(
        DEFAULT_SHARD_TOKENS, help="a shard ends at the first document end past this", unit="tokens", parse=parse_count
    )
    num_workers: int | None = option(None, help="processes; default one for each CPU. Changes no byte of the result")

    def __post_init__(self) -> None:
        if (self.from_ is None) == (self.to is None):
            raise UsageError(
                "convert takes --from or --to"
                + (", not both" if self.to else ": from another system's files, or to them"),
                got=f"--from {self.from_} --to {self.to}" if self.to else None,
                expected=None
                if self.to
                else "--from FORMAT --input PATH --tokenizer PATH, or --to FORMAT --corpus PATH",
            )
        needed = ("input", "tokenizer") if self.from_ else ("corpus",)
        lacking = [f"--{name}" for name in needed if getattr(self, name) is None]
        direction = f"--from {self.from_}" if self.from_ else f"--to {self.to}"
        if lacking:
            raise UsageError(f"convert {direction} needs {' and '.join(lacking)}")
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        theirs = set(TO_OPTIONS) if self.from_ else fields.keys() - {*TO_OPTIONS, "from_", "to", "output"}
        stray = sorted(name for name in theirs if getattr(self, name) != fields[name])
        if stray:
            raise UsageError(
                f"convert {direction} does not take --{stray[0]}",
                fix=f"It belongs to {'--to' if self.from_ else '--from'}: leave it away",
            )
        if self.from_:
            assert self.build_options  # which checks what the two share

    @property
    def build_options(self) -> BuildOptions:
        """With --from, the options of a build that writes such a corpus."""
        assert self.tokenizer is not None
        return BuildOptions(
            dataset=(str(self.input),),
            tokenizer=self.tokenizer,
            output=self.output,
            keep_columns=self.keep_columns,
            provenance=self.provenance,
            eos_token=self.eos_token,
            bos=self.bos,
            parse_special=self.parse_special,
            shuffle=self.shuffle,
            no_shuffle=self.no_shuffle,
            shuffle_block_tokens=self.shuffle_block_tokens,
            seed=self.seed,
            val_fraction=self.val_fraction,
            shard_tokens=self.shard_tokens,
            num_workers=self.num_workers,
        )
