"""What a run is bound to: its data and its model. A resume that changes either is refused by name.

Everything else (ranks, batch, learning rate, length of the run …) may change between two starts of one run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flame.errors import CheckpointError
from flame.train.log import log

# Keys of a model's config.json that say how it is run, written or spoken to, not what it computes.
_NOT_ARCHITECTURE = frozenset(
    {
        *("transformers_version", "dtype", "torch_dtype", "architectures", "auto_map", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "attn_implementation", "attn_mode", "chunk_size_feed_forward"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "id2label", "label2id"),
    }
)
_GIVE_BACK = "Give the run its own data back"
_OR_ALLOW = "; to go on with other data on purpose, add --checkpoint.allow_data_change: it begins a new data segment"
_TOKENIZER, _NO_SOURCE = "the tokenizer", "no such source"
_NOT_ARCHITECTURE_PREFIXES = ("_", "fuse_", "use_l2warp")


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """What decides which tokens sample k is: a run's own, kept in every checkpoint's complete.json.

    `corpora` maps a source's name to its corpus fingerprint. Names may change, fingerprints may not. `data_seed` is the
    mixture's own; `data_segment` counts how often the data were changed on purpose, and gives the order a seed of its
    own (`segment_seed`).
    """

    mixture_fingerprint: str
    corpora: Mapping[str, str]
    tokenizer_fingerprint: str
    data_seed: int
    window_len: int
    data_segment: int = 0

    @property
    def segment_seed(self) -> int:
        """The seed that decides the order of samples in this data segment."""
        return segment_seed(self.data_seed, self.data_segment)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as complete.json keeps them."""
        return {
            "fingerprints": {
                "mixture": self.mixture_fingerprint,
                "corpora": dict(self.corpora),
                "tokenizer": self.tokenizer_fingerprint,
            },
            "window_len": self.window_len,
            "data_seed": self.data_seed,
            "data_segment": self.data_segment,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DataIdentity | None:
        """Read the fields of complete.json; None where it names no data (a seed checkpoint)."""
        fingerprints = value["fingerprints"]
        if fingerprints is None:
            return None
        return cls(
            mixture_fingerprint=fingerprints["mixture"],
            corpora=dict(fingerprints["corpora"]),
            tokenizer_fingerprint=fingerprints["tokenizer"],
            data_seed=value["data_seed"],
            window_len=value["window_len"],
            data_segment=value.get("data_segment", 0),
        )


def segment_seed(data_seed: int, data_segment: int) -> int:
    """Return the seed of a data segment: the mixture's own for the first, a hash of both numbers after that.

    So a mixture that comes back later in a run is not drawn in the order that was seen already.
    """
    if data_segment == 0:
        return data_seed
    digest = hashlib.blake2b(f"{data_seed}|segment|{data_segment}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def settle_data_identity(
    saved: DataIdentity | None,
    current: DataIdentity,
    *,
    extends: bool = False,
    allow_change: bool = False,
    where: Path | None = None,
) -> DataIdentity:
    """Return `current` with the number of its data segment: the saved one, or the next where the data changed.

    A checkpoint that names no data (a seed) fits any. Raises `CheckpointError` for changed data unless `allow_change`,
    and for another tokenizer always: the ids that the model has learnt would mean other texts.
    """
    changed = None if saved is None else data_change(saved, current, extends=extends)
    if saved is None or changed is None:
        return replace(current, data_segment=0 if saved is None else saved.data_segment)
    if not allow_change or changed.what == _TOKENIZER:
        raise changed.refusal(where)
    log.warning("%s changed: a new data segment begins (was %s, is %s)", changed.what, changed.saved, changed.current)
    return replace(current, data_segment=saved.data_segment + 1)


@dataclass(frozen=True, kw_only=True)
class DataChange:
    """What of the data differs between a run and a start that would resume it."""

    what: str
    saved: object
    current: object

    def refusal(self, where: Path | None) -> CheckpointError:
        """Return the error that refuses the resume; `where` is the checkpoint."""
        return CheckpointError(
            f"the run cannot be resumed: {self.what} is not the run's",
            where=where,
            got=self.current,
            expected=self.saved,
            fix=_GIVE_BACK if self.what == _TOKENIZER else _GIVE_BACK + _OR_ALLOW,
        )


def data_change(saved: DataIdentity, current: DataIdentity, *, extends: bool = False) -> DataChange | None:
    """Return the first thing that changed, None where sample k is the same token for token.

    `extends`: the current mixture's parent chain contains the saved one and differs only in stages that have not
    begun (decided by `flame.sampling.mixture`).
    """
    for what, one, other in (
        (_TOKENIZER, saved.tokenizer_fingerprint, current.tokenizer_fingerprint),
        ("window_len", saved.window_len, current.window_len),
        ("the mixture's data_seed", saved.data_seed, current.data_seed),
    ):
        if one != other:
            return DataChange(what=what, saved=one, current=other)
    if saved.mixture_fingerprint == current.mixture_fingerprint or extends:
        return None
    for name, fingerprint in saved.corpora.items():
        if fingerprint not in current.corpora.values():
            now = current.corpora.get(name, _NO_SOURCE)
            return DataChange(what=f"the corpus of source {name!r}", saved=fingerprint, current=now)
    for name, fingerprint in current.corpora.items():
        if fingerprint not in saved.corpora.values():
            return DataChange(what=f"the corpus of source {name!r}", saved=_NO_SOURCE, current=fingerprint)
    return DataChange(
        what="the mixture (its weights, splits, packing, stages or the order of its sources)",
        saved=saved.mixture_fingerprint,
        current=current.mixture_fingerprint,
    )


def compare_model_config(
    saved: Mapping[str, Any] | None, current: Mapping[str, Any], *, where: Path | None = None
) -> None:
    """Raise `CheckpointError`, naming each key, if the model is not the one that was saved.

    Compares what both sides state: a key that only one side has comes with another version of transformers.
    """
    if saved is None:
        return
    changed = sorted(
        name for name in saved.keys() & current.keys() if _is_architecture(name) and saved[name] != current[name]
    )
    if changed:
        raise CheckpointError(
            "the run cannot be resumed: model.config is not the run's model",
            where=where,
            got=", ".join(f"{name} {current[name]!r}" for name in changed),
            expected=", ".join(f"{name} {saved[name]!r}" for name in changed),
            fix="Resume with the run's own model.config, or start a new run in another job.dump_folder",
        )


def _is_architecture(name: str) -> bool:
    return name not in _NOT_ARCHITECTURE and not name.startswith(_NOT_ARCHITECTURE_PREFIXES)
