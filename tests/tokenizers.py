"""Small tokenizers, trained in milliseconds, for tests."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|endoftext|>"
_TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a corpus is a folder of shards, and a shard is a file of tokens",
    "résumé naïve façade coöperate — “quotes” … 日本語のテキスト 한국어 עברית",
    "def main(argv: list[str] | None = None) -> int:\n    return 0\n",
] * 4


def write_tiny_tokenizer(folder: Path, *, vocab_size: int = 512, eos: str | None = EOS, bos: str | None = None) -> Path:
    """Write a byte-level BPE tokenizer folder (tokenizer.json, tokenizer_config.json) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[token for token in (bos, eos) if token is not None],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1_000_000}
    if eos is not None:
        config["eos_token"] = eos
    if bos is not None:
        config["bos_token"] = bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def eos_of(tokenizer: Path) -> int:
    """The id of `EOS` in a tokenizer folder."""
    return int(Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id(EOS))
