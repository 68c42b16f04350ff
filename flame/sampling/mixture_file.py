"""The mixture manifest: the file that a mixture is kept in, with its corpora's paths relative to the file's folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from flame.errors import MixtureError, UsageError
from flame.files import write_json
from flame.sampling.mixture import FORMAT_VERSION, PACKED_VERSION, WINDOWS, Mixture, Packs, Source, Stage
from flame.shards.packs import BEST_FIT


def write_mixture(path: Path, mixture: Mixture) -> None:
    """Write a manifest, with corpus paths relative to its folder."""
    write_json(path, mixture_to_json(mixture, path.parent))


def read_mixture(path: Path, *, overrides: Mapping[str, Path] | None = None) -> Mixture:
    """Read a manifest; corpus paths in it are relative to its folder, `overrides` replaces some by source name.

    Raises `UsageError` for an absent file or a name that no source has, `MixtureError` for what the file says.
    """
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise UsageError("there is no such mixture manifest", got=path, fix="Make one: flame-mix create") from error
    except ValueError as error:
        raise MixtureError(f"the mixture manifest is no JSON: {error}", where=path) from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if version not in (FORMAT_VERSION, PACKED_VERSION):
        raise MixtureError(
            "the file is no mixture manifest that this version of Flame reads",
            where=path,
            got=f"format_version {version}",
            expected=f"format_version {FORMAT_VERSION} or {PACKED_VERSION}",
        )
    try:
        mixture = _mixture_from_json(value, paths_base(path.parent))
    except MixtureError as error:
        if error.where is not None:
            raise
        raise MixtureError(error.what, where=path, got=error.got, expected=error.expected, fix=error.fix) from None
    return _overridden(mixture, overrides or {})


def mixture_to_json(mixture: Mixture, folder: Path | None = None) -> dict[str, Any]:
    """Return the manifest's object; corpus paths are told relative to `folder` where one is given."""
    parent: dict[str, Any] | None = None
    for fingerprint in reversed(mixture.parents):
        parent = {"fingerprint": fingerprint, "parent": parent}
    return {
        "format_version": mixture.format_version,
        "data_seed": mixture.data_seed,
        "parent": parent,
        "sources": [
            {
                "name": source.name,
                "corpus": str(source.corpus if folder is None else _relative(source.corpus, folder)),
                "split": source.split,
                "fingerprint": source.fingerprint,
                "num_tokens": source.num_tokens,
                "max_epochs": source.max_epochs,
                **_packs_to_json(source.packs),
            }
            for source in mixture.sources
        ],
        "stages": [{"start_tokens": s.start_tokens, "weights": list(s.weights)} for s in mixture.stages],
    }


def _mixture_from_json(value: Mapping[str, Any], folder: Path) -> Mixture:
    sources = _list(value, "sources")
    stages = _list(value, "stages")
    return Mixture(
        data_seed=_count(value, "data_seed", ""),
        parents=_parents(value.get("parent")),
        sources=tuple(_source_from_json(source, f"sources[{i}]", folder) for i, source in enumerate(sources)),
        stages=tuple(_stage_from_json(stage, f"stages[{i}]") for i, stage in enumerate(stages)),
    )


def _source_from_json(value: Any, where: str, folder: Path) -> Source:
    texts = {name: _text(value, name, where) for name in ("name", "corpus", "split", "fingerprint")}
    max_epochs = value.get("max_epochs")
    if max_epochs is not None and not (_is_number(max_epochs) and 0 < max_epochs < math.inf):
        _wrong(f"{where}.max_epochs", max_epochs, "a number above 0, or null")
    return Source(
        name=texts["name"],
        corpus=Path(os.path.normpath(folder / texts["corpus"])),
        split=texts["split"],
        fingerprint=texts["fingerprint"],
        num_tokens=_count(value, "num_tokens", f"{where}."),
        max_epochs=max_epochs,
        packs=_packs_from_json(value, where),
    )


def _packs_to_json(packs: Packs | None) -> dict[str, Any]:
    if packs is None:
        return {}
    return {"packing": BEST_FIT, "context_len": packs.context_len, "packs": packs.fingerprint}


def _packs_from_json(value: Mapping[str, Any], where: str) -> Packs | None:
    packing = value.get("packing", WINDOWS)
    if packing == WINDOWS:
        return None
    if packing != BEST_FIT:
        _wrong(f"{where}.packing", packing, f"{WINDOWS!r} or {BEST_FIT!r}")
    return Packs(context_len=_count(value, "context_len", f"{where}."), fingerprint=_text(value, "packs", where))


def _stage_from_json(value: Any, where: str) -> Stage:
    weights = value.get("weights") if isinstance(value, dict) else None
    if not isinstance(weights, list) or not all(type(weight) is int for weight in weights):
        _wrong(f"{where}.weights", weights, "a list of whole numbers, one a source")
    return Stage(start_tokens=_count(value, "start_tokens", f"{where}."), weights=tuple(weights))


def _parents(value: Any) -> tuple[str, ...]:
    """Return the chain of `{"fingerprint": …, "parent": …}`; a fingerprint alone is a chain of one."""
    parents: list[str] = []
    while value is not None:
        fingerprint, value = (value, None) if isinstance(value, str) else _parent(value)
        if not isinstance(fingerprint, str) or not fingerprint.startswith("sha256:"):
            _wrong("parent", fingerprint, "null, or the fingerprint of the mixture that this one was made from")
        parents.append(fingerprint)
    return tuple(parents)


def _parent(value: Any) -> tuple[Any, Any]:
    return (value.get("fingerprint"), value.get("parent")) if isinstance(value, dict) else (value, None)


def _list(value: Mapping[str, Any], name: str) -> list[Any]:
    found = value.get(name)
    return found if isinstance(found, list) else _wrong(name, found, "a list")


def _text(value: Any, name: str, where: str) -> str:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, str) and found else _wrong(f"{where}.{name}", found, "a text")


def _count(value: Any, name: str, where: str) -> int:
    found = value.get(name) if isinstance(value, dict) else None
    return found if type(found) is int and found >= 0 else _wrong(f"{where}{name}", found, "a whole number, 0 or more")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(where: str, got: Any, expected: str) -> NoReturn:
    raise MixtureError(f"the mixture manifest is wrong at {where}", got=repr(got)[:100], expected=expected)


def _overridden(mixture: Mixture, overrides: Mapping[str, Path]) -> Mixture:
    names = [source.name for source in mixture.sources]
    for name in overrides:
        if name not in names:
            raise UsageError("the mixture has no such source", got=name, expected="one of " + ", ".join(names))
    sources = tuple(replace(source, corpus=overrides.get(source.name, source.corpus)) for source in mixture.sources)
    return replace(mixture, sources=sources)


def _relative(corpus: Path, folder: Path) -> Path:
    return Path(os.path.relpath(corpus.absolute(), folder.resolve()))


def paths_base(folder: Path) -> Path:
    """Return where relative paths in a file of this folder start.

    `..` leads out of where a link to the folder points, not of where it lies.
    """
    resolved = folder.resolve()
    return folder if str(resolved) == os.path.normpath(folder.absolute()) else resolved
