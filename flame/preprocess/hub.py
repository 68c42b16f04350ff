"""Datasets of the Hugging Face hub by name: which files one configuration and split of them are.

`datasets` resolves them, as its users know it (the card's configurations, or the names of folders and files), to files
at one commit. They are then read where they lie, by ranges; nothing is downloaded but the card.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from flame.errors import FlameError, InputError, UsageError
from flame.preprocess.remote import retried
from flame.preprocess.storage import FileState

FILES_A_REQUEST = 500


def hub_files(
    dataset: str,
    *,
    name: str | None,
    split: str | None,
    revision: str | None,
    data_dir: str | None,
    data_files: Sequence[str],
) -> list[tuple[str, FileState]]:
    """Return the files of a split (default `train`) of a hub dataset, with their state.

    `name` is the configuration, None for the only or the default one. Cost: some requests, and one for each
    `FILES_A_REQUEST` files. Raises `UsageError` where there is no such dataset, `InputError` where it has no such
    configuration or split, or the hub cannot be reached.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise InputError(
            f"there is no file or folder {dataset}, and HF_HUB_OFFLINE forbids to ask the hub for such a dataset",
            fix="Unset HF_HUB_OFFLINE, or name a local copy",
        )
    urls = _split_files(dataset, name, split or "train", revision, data_dir, data_files)
    return _described(dataset, urls)


def _split_files(
    dataset: str, name: str | None, split: str, revision: str | None, data_dir: str | None, data_files: Sequence[str]
) -> list[str]:
    """Return the URLs of a split's files, each with its commit."""
    from datasets import DownloadConfig, load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError

    with tempfile.TemporaryDirectory(prefix="flame-hub-") as cache:

        def resolve() -> Mapping[str, Sequence[Any]]:
            builder = load_dataset_builder(
                dataset,
                name,
                data_dir=data_dir,
                data_files={split: list(data_files)} if data_files else None,
                revision=revision,
                cache_dir=cache,
                download_config=DownloadConfig(cache_dir=cache),
            )
            found: Mapping[str, Sequence[Any]] = builder.config.data_files or {}
            return found

        try:
            found = resolve()
        except DatasetNotFoundError as error:
            raise UsageError(
                f"there is no file or folder {dataset}, and no hub dataset of that name that you may read",
                got=_one_line(error),
                fix="Check the name; for a private or gated dataset accept its terms and log in (hf auth login)",
            ) from error
        except FlameError:
            raise
        except ValueError as error:
            raise InputError(
                "the hub dataset has no such configuration, or its files are of no known kind",
                where=dataset,
                got=_one_line(error),
                fix="Choose a configuration with --dataset_name, or files with --data_files",
            ) from error
        except Exception as error:  # what comes of the network has no common kind
            by_script = "cripts are no longer supported" in str(error)
            raise InputError(
                f"there is no file or folder {dataset}, and no hub dataset of that name could be looked up",
                got=_one_line(error),
                fix="Read the hub's own copy of it, which may be a part: --dataset_revision refs/convert/parquet"
                if by_script
                else "Check the network and HF_ENDPOINT, or name a local copy",
            ) from error
    if split not in found:
        raise InputError(
            "the hub dataset has no such split",
            where=dataset + (f", configuration {name}" if name else ""),
            got=split,
            expected=" or ".join(map(str, found)) or "none",
            fix="Choose one with --dataset_split",
        )
    return [str(url) for url in found[split]]


def _described(dataset: str, urls: Sequence[str]) -> list[tuple[str, FileState]]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    states: dict[str, FileState] = {}
    prefix = urls[0].partition("@")[0] + "@" if urls else ""
    commit = urls[0].removeprefix(prefix).partition("/")[0] if urls else ""
    paths = [url.removeprefix(f"{prefix}{commit}/") for url in urls]
    for start in range(0, len(paths), FILES_A_REQUEST):
        some = paths[start : start + FILES_A_REQUEST]
        found = retried(
            f"hub dataset {dataset}",
            lambda some=some: HfApi().get_paths_info(dataset, some, repo_type="dataset", revision=commit),  # type: ignore[misc]
        )
        for file in (entry for entry in found if isinstance(entry, RepoFile)):
            etag = file.lfs.sha256 if file.lfs else file.blob_id
            states[file.path] = FileState(size_bytes=file.size, mtime_ns=0, etag=etag)
    absent = [path for path in paths if path not in states]
    if absent:
        raise InputError(
            "the hub lists a file of the dataset, and says nothing of its size",
            where=dataset,
            got=absent[0],
            fix="Try again later, or name a local copy: hf download --repo-type dataset",
        )
    return [(url, states[path]) for url, path in zip(urls, paths, strict=True)]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
