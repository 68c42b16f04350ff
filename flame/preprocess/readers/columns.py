"""What every reader is told: which column is the text, which ones are kept, which rows are wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from flame.preprocess.where import Where, columns_of


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The text's column (`a.b` is nested, unless a column has that very name) and the schema of the kept ones.

    `where` chooses rows before anything else does; None takes all.
    """

    text: str
    kept: pa.Schema
    where: Where | None = None

    @property
    def kept_names(self) -> tuple[str, ...]:
        return tuple(self.kept.names)

    def read_from(self, schema: pa.Schema, has: Callable[[pa.Schema, str], object]) -> list[str]:
        """Return the names of all columns that a file with this schema is read for; `has` finds a name's field."""
        kept = (name for name in self.kept_names if has(schema, name) is not None)
        return list(dict.fromkeys([self.text, *kept, *columns_of(self.where)]))
