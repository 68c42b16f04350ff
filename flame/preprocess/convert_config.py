"""What `flame-preprocess convert` can be asked: the options that it shares with a build mean the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flame.config import option, parse_count
from flame.preprocess.config import DEFAULT_BLOCK_TOKENS, DEFAULT_SHARD_TOKENS, BuildOptions


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of one conversion."""

    from_: str = option(
        choices=("flame-v0", "megatron", "datatrove"),
        metavar="FORMAT",
        help="what wrote the token files: flame-v0 is the predecessor's preprocessing, a folder of `datasets`' "
        "save_to_disk with a document's input_ids a row; megatron is Megatron-LM's and megatron-core's, NAME.bin and "
        "NAME.idx; datatrove is that of its DocumentTokenizer and merger, NAME.ds and NAME.ds.index",
    )
    input: Path = option(
        help="folder to convert; of megatron and datatrove also one file, or its name without the ending"
    )
    tokenizer: Path = option(
        help="the tokenizer that made the ids: folder with a tokenizer.json (and tokenizer_config.json), or such a file"
    )
    output: Path = option(help="corpus folder to write", aliases=("path",))

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
        assert self.build_options  # which checks what the two share

    @property
    def build_options(self) -> BuildOptions:
        """The options of a build that writes such a corpus."""
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
