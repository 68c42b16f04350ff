"""How much of the input may be in error: `--max_error_fraction`, looked at as tasks end and before sealing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame.errors import InputError
from flame.preprocess.folder import shards_of
from flame.shards.format import REJECTS_FOLDER
from flame.words import counted


@dataclass(kw_only=True)
class ErrorCount:
    """Documents read, refused ones included, and those of them that were malformed."""

    documents: int = 0
    errors: int = 0

    @staticmethod
    def of(receipts: Iterable[Mapping[str, Any]]) -> ErrorCount:
        count = ErrorCount()
        for receipt in receipts:
            count.documents += sum(shard["num_documents"] for _, shard in shards_of(receipt))
            count.documents += sum(receipt["rejects"].values())
            count.errors += receipt.get("errors", 0)
        return count

    def exceeds(self, fraction: float | None, *, share_read: float = 1.0) -> bool:
        """Whether the errors are more than `fraction` of all documents, were the part that is not read without any."""
        if fraction is None or self.errors == 0:
            return False
        return self.errors > fraction * self.documents / max(share_read, 1e-9)


def too_many_errors(
    corpus: Path, count: ErrorCount, fraction: float, receipts: Iterable[Mapping[str, Any]]
) -> InputError:
    """Return the error that ends a build with more malformed documents than it may have."""
    reasons: Counter[str] = Counter()
    for receipt in receipts:
        if receipt.get("errors", 0):
            reasons.update(receipt["rejects"])
    told = ", ".join(f"{number:,} {reason}" for reason, number in reasons.most_common())
    return InputError(
        "more of the input is malformed than --max_error_fraction allows",
        where=corpus,
        got=f"{count.errors:,} of {counted(count.documents, 'document')}, {100 * count.errors / count.documents:.3g}%"
        + (f"; refused until now: {told}" if told else ""),
        expected=f"at most {100 * fraction:.3g}%",
        fix=f"{corpus / REJECTS_FOLDER} names each place and shows it. Mend the inputs and build into a new folder; or "
        "allow more and run the same command again: finished tasks are kept",
    )
