"""The systems that `convert --to` writes for: an entry here and its functions make a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from flame.preprocess.exports import datatrove, megatron
from flame.shards.reader import Split


@dataclass(frozen=True, kw_only=True)
class Export:
    """How a system keeps tokens: a file of plain ids, whose name ends by `tokens`, and others beside it.

    `dtypes` are the ids that it reads, the narrowest first; `others` write the other files, by the ending of their
    names, the index last: where it is, all of them are.
    """

    tokens: str
    dtypes: tuple[str, ...]
    others: Mapping[str, Callable[[BinaryIO, Split, str], None]]


EXPORTS: dict[str, Export] = {
    "megatron": Export(tokens=".bin", dtypes=megatron.DTYPES, others={".idx": megatron.write_index}),
    "datatrove": Export(
        tokens=".ds",
        dtypes=datatrove.DTYPES,
        others={".ds.metadata": datatrove.write_metadata, ".ds.index": datatrove.write_index},
    ),
}
