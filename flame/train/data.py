"""The data of a run: its mixture, opened and checked before step 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame.config import by_name
from flame.errors import TokenizerError, TrainingError, UsageError
from flame.files import read_json_object
from flame.near import near_path
from flame.sampling.mixture import Mixture
from flame.sampling.mixture_file import read_mixture
from flame.sampling.show import parse_override
from flame.sampling.sources import mixture_of_corpora, open_mixture
from flame.shards.manifest import TokenizerInfo
from flame.shards.reader import Corpus, Split
from flame.train.identity import DataIdentity


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """A mixture with its opened splits, one a source, and the tokenizer that all of them share."""

    mixture: Mixture
    splits: tuple[Split, ...]

    @property
    def tokenizer(self) -> TokenizerInfo:
        return self.splits[0].corpus.manifest.tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        return self.splits[0].corpus.tokenizer_folder

    def identity(self, window_len: int) -> DataIdentity:
        """Return what a resume must find unchanged."""
        return DataIdentity(
            mixture_fingerprint=self.mixture.fingerprint,
            corpora={source.name: source.fingerprint for source in self.mixture.sources},
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            data_seed=self.mixture.data_seed,
            window_len=window_len,
        )


def open_training_data(
    dataset: str,
    data_probs: Sequence[float] | None,
    seed: int,
    *,
    moved: Sequence[str] = (),
    packed_len: int | None = None,
) -> TrainingData:
    """Open `training.dataset`: one mixture manifest, or corpus folders separated by commas.

    `seed` is the data seed where the mixture is given as folders. `moved` are NAME=PATH of a manifest's sources that
    lie elsewhere now; they must be the very corpora. With `packed_len` folders are sampled by their packs of so many
    tokens; a manifest says itself which are. Every shard's size and header is checked.
    """
    paths = [Path(part.strip()) for part in dataset.split(",") if part.strip()]
    manifests = [path for path in paths if path.is_file() or path.suffix == ".json"]
    if manifests and len(paths) > 1:
        raise UsageError(
            "training.dataset takes one mixture manifest, or corpus folders",
            got=dataset,
            fix="Put all sources into one manifest with flame-mix create",
        )
    if manifests and data_probs is not None:
        raise UsageError(
            "training.data_probs goes with corpus folders; a mixture manifest has its own weights",
            got=dataset,
            fix="Leave training.data_probs away, or make another manifest with flame-mix create",
        )
    if manifests and packed_len is not None:
        raise UsageError(
            "training.packing goes with corpus folders; a mixture manifest says how its sources are packed",
            got=dataset,
            fix="Leave training.packing away; flame-mix create --packing best_fit makes such a manifest",
        )
    if moved and not manifests:
        raise UsageError(
            "training.source goes with a mixture manifest",
            got=", ".join(moved),
            fix="Name the folder in training.dataset",
        )
    overrides = by_name(map(parse_override, moved), "training.source")
    mixture = (
        read_mixture(paths[0], overrides=overrides)
        if manifests
        else mixture_of_corpora([str(path) for path in paths], data_probs, seed, packed_len=packed_len)
    )
    splits = tuple(open_mixture(mixture))
    for split in splits:
        split.check()
    return TrainingData(mixture=mixture, splits=splits)


def open_validation_splits(dataset: str | None, data: TrainingData) -> dict[str, Split]:
    """Open `validation.dataset`: `[NAME=]PATH[@SPLIT]`, separated by commas; the split is `val` where there is one.

    Names default to the folder's. Refuses a split that the run trains on, and a corpus of another tokenizer.
    """
    splits: dict[str, Split] = {}
    for part in (dataset or "").split(","):
        if not part.strip():
            continue
        name, _, rest = part.strip().rpartition("=")
        folder, _, split_name = rest.partition("@")
        corpus = Corpus.open(Path(folder))
        name = name or Path(folder).resolve().name
        split = corpus.split(split_name or ("val" if "val" in corpus.manifest.splits else "train"))
        _check_validation_split(name, split, data, taken=name in splits)
        split.check()
        splits[name] = split
    return splits


def _check_validation_split(name: str, split: Split, data: TrainingData, *, taken: bool) -> None:
    where = f"validation.dataset {split.corpus.path}@{split.name}"
    if taken:
        raise UsageError(
            f"two validation sets are called {name!r}", where=where, fix="Give each a name: NAME=PATH[@SPLIT]"
        )
    if split.corpus.manifest.tokenizer.fingerprint != data.tokenizer.fingerprint:
        raise TrainingError(
            "a validation corpus has another tokenizer than the training data",
            where=where,
            got=split.corpus.manifest.tokenizer.fingerprint,
            expected=data.tokenizer.fingerprint,
            fix="Build it again with the training data's tokenizer",
        )
    if any(split.corpus.fingerprint == s.corpus.fingerprint and split.name == s.name for s in data.splits):
        raise TrainingError(
            "a validation set is also trained on",
            where=where,
            fix="Build the corpus with --val_fraction and validate on its val split",
        )


def check_tokenizer(tokenizer_path: str | None, data: TrainingData) -> None:
    """Raise `TrainingError` if `model.tokenizer_path` is another tokenizer than the corpora were made with."""
    if tokenizer_path is None:
        return
    path = Path(tokenizer_path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            "model.tokenizer_path names no tokenizer on this machine",
            got=tokenizer_path,
            expected="a folder with a tokenizer.json",
            fix=near_path(path, "tokenizer.json") or "Leave it away: the corpus's own tokenizer is used",
        )
    own = data.tokenizer_folder / "tokenizer.json"
    if not same_tokenizer(file, own):
        raise TrainingError(
            "model.tokenizer_path is another tokenizer than the corpora were made with",
            got=file,
            expected=own,
            fix="Leave model.tokenizer_path away, or build the corpora again with this tokenizer",
        )


_PARTS_THAT_MAKE_IDS = ("added_tokens", "normalizer", "pre_tokenizer", "model")


def same_tokenizer(one: Path, other: Path) -> bool:
    """Return whether two tokenizer.json give the same ids: padding, truncation and templates are not compared."""
    parts = [read_json_object(path, "the tokenizer", TokenizerError) for path in (one, other)]
    return all(_comparable(parts[0].get(name)) == _comparable(parts[1].get(name)) for name in _PARTS_THAT_MAKE_IDS)


def _comparable(part: Any) -> Any:
    """Return a part with its merges as pairs: older files have each as one text with a space in it."""
    if not isinstance(part, dict) or "merges" not in part:
        return part
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in part["merges"]]
    return part | {"merges": merges}
