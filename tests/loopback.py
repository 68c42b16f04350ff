"""A server of files on 127.0.0.1, with parts of files, and faults where a test asks for them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class FileServer:
    """Serves the files of a folder while it is entered; `url` is its address.

    `failures` are GET requests of a path still to be answered by 503, `cuts` those still to be cut in the middle of
    the body; `denied` is a status that answers everything. `requests` are (method, path, Range) of all that was asked.
    """

    scheme = "http"  # of the addresses that it serves

    def __init__(self, folder: Path, *, ranges: bool = True) -> None:
        self.folder = folder
        self.ranges = ranges
        self.failures: Counter[str] = Counter()
        self.cuts: Counter[str] = Counter()
        self.denied: int | None = None
        self.requests: list[tuple[str, str, str | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FileServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, body: bool) -> None:
        """Answer a GET (`body`) or a HEAD."""
        path = unquote(urlsplit(handler.path).path).lstrip("/")
        file = self.folder / path
        self.send_file(handler, path, file.read_bytes() if file.is_file() else None, body)

    def send_file(
        self, handler: BaseHTTPRequestHandler, path: str, data: bytes | None, body: bool, **headers: str
    ) -> None:
        """Send a file, or the part of it that is asked for; None is not found."""
        part = handler.headers.get("Range") if self.ranges else None
        self.requests.append((handler.command, path, part))
        if self.denied is not None:
            data, status = b"denied", self.denied
        elif body and self.failures[path] > 0:
            self.failures[path] -= 1
            data, status = b"try later", 503
        elif data is None:
            data, status = b"not found", 404
        else:
            status = 200
            headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"', **headers}
            if part is not None:
                first, _, last = part.removeprefix("bytes=").partition("-")
                stop = min(int(last) + 1, len(data)) if last else len(data)
                headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
                data, status = data[int(first) : stop], 206
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if body:
            cut = self.cuts[path] > 0
            self.cuts[path] -= cut
            with contextlib.suppress(ConnectionError):  # who has read enough hangs up
                handler.wfile.write(data[: len(data) // 2] if cut else data)
            handler.close_connection = cut

    def _handler(server) -> type[BaseHTTPRequestHandler]:  # noqa: N805 (`self` is the handler's)
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.answer(self, body=True)

            def do_HEAD(self) -> None:
                server.answer(self, body=False)

            def do_POST(self) -> None:
                server.answer(self, body=True)

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler


class S3Server(FileServer):
    """The little of S3's API that reading needs: folders are buckets."""

    scheme = "s3"

    def answer(self, handler: BaseHTTPRequestHandler, body: bool) -> None:
        url = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(url.path).strip("/").partition("/")
        if key or "list-type" not in query:
            super().answer(handler, body)
            return
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        files = (file for file in sorted((self.folder / bucket).rglob("*")) if file.is_file())
        keys = {file.relative_to(self.folder / bucket).as_posix(): file for file in files}
        folders, contents = set(), []
        for name, file in keys.items():
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            elif name.startswith(prefix):
                data = file.read_bytes()
                contents.append(
                    f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f'<ETag>"{hashlib.md5(data).hexdigest()}"</ETag><Size>{len(data)}</Size></Contents>'
                )
        common = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(folders))
        answer = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{prefix}</Prefix><KeyCount>{len(contents) + len(folders)}</KeyCount>"
            f"<IsTruncated>false</IsTruncated>{''.join(contents)}{common}</ListBucketResult>"
        )
        self.send_file(handler, url.path, answer.encode(), body, **{"Content-Type": "application/xml"})


class HubServer(FileServer):
    """The little of the hub's API that a dataset needs, `dataset` of the files in a folder, at one commit."""

    def __init__(self, folder: Path, dataset: str) -> None:
        super().__init__(folder)
        self.dataset = dataset
        self.commit = "0123456789abcdef0123456789abcdef01234567"

    def answer(self, handler: BaseHTTPRequestHandler, body: bool) -> None:
        sent = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(handler.path).path)
        path = path.replace("/resolve/main/", f"/resolve/{self.commit}/")
        api, files = f"/api/datasets/{self.dataset}", f"/datasets/{self.dataset}/resolve/{self.commit}/"
        if path.startswith(files):
            file = self.folder / path.removeprefix(files)
            data = file.read_bytes() if file.is_file() else None
            code = {} if data is not None else {"X-Error-Code": "EntryNotFound"}
            self.send_file(handler, path, data, body, **{"X-Repo-Commit": self.commit} | code)
            return
        value: Any = None
        if path == api or path.startswith(f"{api}/revision/"):
            value = {"id": self.dataset, "sha": self.commit, "private": False, "siblings": [], "tags": []}
        elif path.startswith(f"{api}/tree/{self.commit}"):
            root = self.folder / path.removeprefix(f"{api}/tree/{self.commit}").strip("/")
            found = root.rglob("*") if "recursive=true" in handler.path.lower() else root.glob("*")
            value = [self._entry(file) for file in sorted(found)] if root.is_dir() else None
        elif path == f"{api}/paths-info/{self.commit}":
            names = json.loads(sent)["paths"] if sent.startswith(b"{") else parse_qs(sent.decode())["paths"]
            value = [self._entry(self.folder / name) for name in names if (self.folder / name).exists()]
        data = None if value is None else json.dumps(value).encode()
        code = {"X-Error-Code": "EntryNotFound" if path.startswith(api) else "RepoNotFound"} if data is None else {}
        self.send_file(handler, path, data, body, **{"Content-Type": "application/json"} | code)

    def _entry(self, file: Path) -> dict[str, Any]:
        name = file.relative_to(self.folder).as_posix()
        if file.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
        data = file.read_bytes()
        return {"type": "file", "path": name, "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}


class GcsServer(FileServer):
    """The little of Google Cloud Storage's JSON API that reading needs: folders are buckets."""

    scheme = "gs"

    def answer(self, handler: BaseHTTPRequestHandler, body: bool) -> None:
        url = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        place, _, key = url.path.partition("/o/")
        bucket = unquote(place).removesuffix("/o").rpartition("/")[2]
        root = self.folder / bucket
        if key:
            file = root / unquote(key)
            data = file.read_bytes() if file.is_file() else None
            if data is not None and query.get("alt") != "media":
                data = json.dumps(self._object(root, file)).encode()
            self.send_file(handler, f"{bucket}/{unquote(key)}", data, body)
            return
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        folders, items = set(), []
        for file in sorted(file for file in root.rglob("*") if file.is_file()):
            name = file.relative_to(root).as_posix()
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            elif name.startswith(prefix):
                items.append(self._object(root, file))
        value = {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}
        self.send_file(handler, bucket, json.dumps(value).encode() if root.is_dir() else None, body)

    def _object(self, root: Path, file: Path) -> dict[str, Any]:
        data = file.read_bytes()
        return {
            "kind": "storage#object",
            "bucket": root.name,
            "name": file.relative_to(root).as_posix(),
            "size": str(len(data)),
            "etag": hashlib.md5(data).hexdigest(),
            "updated": "2026-01-01T00:00:00.000Z",
        }
