"""What every reader is told: which column is the text, which ones are kept."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The text's column (`a.b` is nested, unless a column has that very name) and the schema of the kept ones."""

    text: str
    kept: pa.Schema

    @property
    def kept_names(self) -> tuple[str, ...]:
        return tuple(self.kept.names)
