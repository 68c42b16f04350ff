"""What a task refuses: counted by reason, never dropped in silence."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flame.errors import InputError
from flame.files import write_text
from flame.preprocess.terminal import one_line

MAX_SAMPLES = 1000
SAMPLE_CHARACTERS = 200
SAMPLE_BYTES = 4 * SAMPLE_CHARACTERS
MEND_FILE = "Fetch or write it again, or leave such files out and count them with --on_error skip"


@dataclass(kw_only=True)
class Rejects:
    """Counts of what was left out, and samples of what was malformed.

    `on_error` is the user's policy for malformed input: `fail` raises `InputError` at the first, `skip` counts it and
    keeps up to `MAX_SAMPLES` samples; `errors` is how many those are. What is no text (null, empty, blank, a missing
    key, a number) is counted under either.
    """

    on_error: str
    counts: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    repaired: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def count(self, reason: str, number: int = 1) -> None:
        if number:
            self.counts[reason] += number

    def malformed(
        self,
        reason: str,
        what: str,
        *,
        path: str,
        row: int,
        place: Callable[[], str],
        byte: int | None = None,
        sample: bytes = b"",
        number: int = 1,
    ) -> None:
        """Raise `InputError` or count, as the policy says; `place` words where it is, and is called only to raise.

        `byte` is where it begins in the file, decompressed; of a damaged .gz or .zst, in the file itself; None where
        that is not known, as in parquet and arrow.
        """
        if self.on_error == "fail":
            raise InputError(
                what,
                where=f"{path}, {place()}",
                got=one_line(_shown(sample)) if sample else None,
                fix="Mend or remove it, or leave such places out and count them with --on_error skip",
            )
        self.count(reason, number)
        self.errors += number
        if len(self.samples) < MAX_SAMPLES:
            found = {"source_file": path, "row": row, "byte": byte, "reason": reason, "what": what}
            self.samples.append({**found, "sample": _shown(sample)})

    def write_samples(self, path: Path) -> None:
        """Write the samples as jsonl; no file where there are none."""
        if self.samples:
            write_text(path, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in self.samples))


def _shown(sample: bytes) -> str:
    text = sample[:SAMPLE_BYTES].decode("utf-8", "backslashreplace")
    return text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + "…"
