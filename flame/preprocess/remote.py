"""Files of remote stores (s3://, gs://, hf://, https://) by fsspec: found, told apart, and read by ranges.

Some of fsspec's stores run a thread of their own from their first request on. Workers are forked from a process with a
single thread, so that fsspec is imported and asked nothing before: in the builder, and in the workers once they run.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flame.errors import FlameError, InputError, UsageError

S = TypeVar("S")
T = TypeVar("T")

ATTEMPTS = 6
FIRST_WAIT_SECONDS = 0.5  # doubled each time: 15 seconds in all
READ_AHEAD_BYTES = 2**22
THREADS = 16  # of the builder, while it looks at many files
_EXTRAS = ("s3", "s3a", "gs", "gcs", "http", "https")
_S3 = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket FSSPEC_S3_ANON=true"
_GS = (
    "Run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS=FILE; for a public bucket "
    "FSSPEC_GS_TOKEN=anon"
)
# What lets a store know the user.
_ACCESS = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GS,
    "gcs": _GS,
    "hf": "Run hf auth login, or set HF_TOKEN; a gated dataset asks for its terms to be accepted on its page",
}
# What a store calls that by which a file's content is known, the surest first.
_VERSIONS = ("ETag", "etag", "xet_hash", "blob_id", "md5Hash", "Content-MD5", "Digest", "generation")
_TIMES = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "modified")
_PINNED = re.compile(r"hf://datasets/[^/]+/[^/@]+@[0-9a-f]{40}/.+")
_HUB_URL = re.compile(r"hf://datasets/(?P<repo>[^/]+/[^/@]+)(@(?P<revision>[^/]+))?(?P<path>/.*)?")


class RemoteError(InputError):
    """A store does not give what it has: never a question of what is wrong within a file."""


def is_remote(path: str) -> bool:
    return "://" in path and not path.startswith("file://")


def is_listed_alone(url: str) -> bool:
    """Whether a URL is of a store that does not list its files, so that it names one file."""
    return url.startswith(("http://", "https://"))


def is_pinned(url: str) -> bool:
    """Whether a URL names a commit, so that its content cannot change."""
    return _PINNED.fullmatch(url) is not None


def name_of(url: str) -> str:
    """Return the path within a URL, without a query."""
    return urlsplit(url).path if is_listed_alone(url) else url


def _store(url_root: str) -> Any:
    """Return the file system of a URL; `UsageError` where there is none, or its package is not installed."""
    import fsspec

    protocol = url_root.partition("://")[0]
    # Else gcsfs asks for a bucket's kind again with every request, where that needs credentials and there are none.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        options = {"client_kwargs": {"trust_env": True}} if protocol in ("http", "https") else {}
        return fsspec.filesystem(protocol, **options)
    except (ImportError, ModuleNotFoundError) as error:
        raise UsageError(
            f"reading {protocol}:// needs a package that is not installed",
            got=str(error),
            fix="pip install 'flame[remote]'" if protocol in _EXTRAS else "pip install the package that is named here",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"nothing is known that reads {protocol}://",
            got=str(error),
            expected="s3://, gs://, hf://, https:// or another protocol of fsspec",
        ) from error


def _of(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it."""
    store = _store(url.partition("://")[0] + "://")
    return store, store._strip_protocol(url)


def retried(what: str, function: Callable[[], T]) -> T:
    """Return what `function` returns, tried again where a store or the network errs, which is told on stderr.

    Raises `RemoteError` after `ATTEMPTS`, and at once where trying again is no use; `FileNotFoundError` goes through.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return function()
        except (FileNotFoundError, FlameError):
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if _is_denied(error):
                raise RemoteError(
                    "a store gives no access to a remote file",
                    where=what,
                    got=told,
                    fix=_ACCESS.get(what.partition("://")[0], "Check the credentials that the store asks for"),
                ) from error
            if attempt == ATTEMPTS or _is_final(error):
                raise RemoteError(
                    "a remote file cannot be read",
                    where=what,
                    got=told + (f", {attempt} times" if attempt > 1 else ""),
                    fix="Check the address, your rights and the network; the same command goes on where it stopped",
                ) from error
            wait = FIRST_WAIT_SECONDS * 2 ** (attempt - 1)
            print(f"note: {what}: {told}; trying again in {wait:g} s ({attempt} of {ATTEMPTS})", file=sys.stderr)
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _is_denied(error: Exception) -> bool:
    """Whether credentials are missing or do not suffice; told by names, as the stores' packages are not imported."""
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return True
    names = [kind.__name__ for kind in type(error).__mro__]
    return any("Credential" in name for name in names) or str(error).startswith("Forbidden: ")


def _is_final(error: Exception) -> bool:
    if isinstance(error, (NotImplementedError, ImportError, TypeError)):
        return True
    status = _status(error)
    return status is not None and 400 <= status < 500 and status not in (408, 425, 429)


def _status(error: Exception) -> int | None:
    """Return the HTTP status that an error is of."""
    for holder, name in ((error, "status"), (getattr(error, "response", None), "status_code"), (error, "code")):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    return None


def describe(url: str, *, fresh: bool = False) -> tuple[int, str | None]:
    """Return a remote file's size and etag (or time of change); `fresh` asks the store whatever was heard before."""
    store, path = _of(url)

    def ask() -> Mapping[str, Any]:
        if fresh:
            store.invalidate_cache()
        return store.info(path)

    return _size_and_etag(url, retried(url, ask))


def describe_all(urls: Sequence[str]) -> dict[str, tuple[int, str | None]]:
    """Return what `describe` says of each URL, asked for some at a time; `UsageError` where there is no such file."""

    def ask(url: str) -> tuple[int, str | None]:
        try:
            return describe(url)
        except FileNotFoundError as error:
            raise UsageError("there is no such remote file", got=url, fix="Check the address") from error

    return dict(zip(urls, at_once(ask, urls), strict=True))


def at_once(function: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """Yield what `function` returns for each item, in order, from some threads at once: waiting is all that it does."""
    if len(items) < 2:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(THREADS)
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(cancel_futures=True)


def _size_and_etag(url: str, info: Mapping[str, Any]) -> tuple[int, str | None]:
    size = info.get("size")
    if size is None or info.get("partial") is False:
        raise RemoteError(
            "the server gives no parts of files" if size is not None else "the server does not tell a file's size",
            where=url,
            expected="a server that answers HEAD with Content-Length, and GET with Range",
            fix="Download the file and name it",
        )
    etag = next((str(info[key]) for key in (*_VERSIONS, *_TIMES) if info.get(key)), None)
    return int(size), etag.strip('"') if etag is not None else None


def pinned(url: str) -> str:
    """Return a URL of a hub dataset with the commit that it means now; any other URL as it is."""
    match = _HUB_URL.fullmatch(url)
    if match is None or is_pinned(url):
        return url
    from huggingface_hub import HfApi

    revision = match["revision"]
    found = retried(url, lambda: HfApi().dataset_info(match["repo"], revision=revision).sha)
    return f"hf://datasets/{match['repo']}@{found}{match['path'] or ''}"


def find(pattern: str) -> list[tuple[str, tuple[int, str | None]]]:
    """Return the URLs of a file, of a pattern, or of all files in a folder, each with its size and etag.

    `UsageError` where there is none. Stores that list files tell of all of them at once; https does not list.
    """
    url = pinned(pattern)
    store, path = _of(url)
    if is_listed_alone(url):
        return list(describe_all([url]).items())
    try:
        if any(sign in path for sign in "*?["):
            found = retried(url, lambda: store.glob(path, detail=True))
        elif retried(url, lambda: store.isdir(path)):
            found = retried(url, lambda: store.find(path, detail=True))
        else:
            found = {path: retried(url, lambda: store.info(path))}
    except FileNotFoundError as error:
        raise UsageError("there is no such remote file or folder", got=pattern, fix="Check the address") from error
    files = {store.unstrip_protocol(name): info for name, info in found.items() if info.get("type") != "directory"}
    if not files:
        raise UsageError("no remote file matches", got=pattern, fix="Check the address, and quote the pattern")
    return [(name, _size_and_etag(name, info)) for name, info in files.items()]


def join(url: str, name: str) -> str:
    return posixpath.join(url, name) if name else url


def folder_of(url: str) -> str:
    """Return a URL up to the first part that is a pattern."""
    parts = url.split("/")
    plain = next((number for number, part in enumerate(parts) if any(sign in part for sign in "*?[")), len(parts))
    return "/".join(parts[:plain])


class RemoteFile(io.RawIOBase):
    """A remote file of known size, read by ranges."""

    def __init__(self, url: str, size_bytes: int) -> None:
        self._url = url
        self._size = size_bytes
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._place + size, self._size)
        data = read_range(self._url, self._place, stop, self._size) if stop > self._place else b""
        self._place += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def read_range(url: str, start: int, stop: int, size_bytes: int) -> bytes:
    """Return the bytes [start, stop) of a remote file; `RemoteError` where they cannot be had."""
    store, path = _of(url)
    # Such stores read a file that they open, and would read on for who does not ask.
    options = {"cache_type": "none"} if url.startswith("hf://") else {}

    def fetch() -> bytes:
        data: bytes = store.cat_file(path, start=start, end=stop, **options)
        if len(data) == stop - start:
            return data
        if len(data) >= size_bytes:
            raise RemoteError("the server gives no parts of files", where=url, fix="Download the file and name it")
        raise OSError(f"{len(data)} bytes came instead of {stop - start}")

    try:
        return retried(f"{url}, bytes {start} to {stop - 1}", fetch)
    except FileNotFoundError as error:
        raise RemoteError("an input file is gone", where=url, fix="Put it back, then run the build again") from error
