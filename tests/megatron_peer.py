"""megatron-core's own reader and writer of token files, in a process of their own: importing it takes seconds.

Run as a program, it answers a request a line on stdin by a line on stdout, both JSON.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS_TO_WAIT = 120


class Megatron:
    """The process; `close` or the end of a `with` ends it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Megatron:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=SECONDS_TO_WAIT)

    def write(self, prefix: Path, documents: list[list[list[int]]], dtype: str) -> None:
        """Write documents, lists of sequences, by `IndexedDatasetBuilder`."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._ask({"do": "write", "prefix": str(prefix), "documents": documents, "dtype": dtype})

    def read(self, prefix: Path, *, mmap: bool = True) -> tuple[list[list[list[int]]], str]:
        """Return the documents that `IndexedDataset` reads, lists of sequences, and its dtype."""
        found = self._ask({"do": "read", "prefix": str(prefix), "mmap": mmap})
        return found["documents"], found["dtype"]

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("megatron-core's process ended")


def serve() -> None:
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if request["do"] == "write":
            builder = IndexedDatasetBuilder(request["prefix"] + ".bin", dtype=getattr(np, request["dtype"]))
            for document in request["documents"]:
                for sequence in document:
                    builder.add_item(torch.tensor(sequence, dtype=torch.int64))
                builder.end_document()
            builder.finalize(request["prefix"] + ".idx")
        else:
            data = IndexedDataset(request["prefix"], mmap=request["mmap"])
            places = data.document_indices.tolist()
            answer["documents"] = [
                [data[sequence].tolist() for sequence in range(start, stop)]
                for start, stop in itertools.pairwise(places)
            ]
            answer["dtype"] = np.dtype(data.index.dtype).name
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
