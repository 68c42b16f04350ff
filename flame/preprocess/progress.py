"""How far a build is, on stderr: a bar on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from flame.preprocess.reports import Progress
from flame.words import counted

SECONDS_BETWEEN_LINES = 60


def log(message: str) -> None:
    """Say something about the build on stderr."""
    tqdm.write(message, file=sys.stderr)


class BuildProgress:
    """Adds up what the workers report; shows input read, tokens a second and the time left."""

    def __init__(self, total_bytes: int, done_bytes: int) -> None:
        self.num_documents = 0
        self.num_tokens = 0
        self._total_bytes = max(total_bytes, 1)
        self._done_bytes = done_bytes
        self._started = self._told = time.monotonic()
        self._first_bytes = done_bytes
        self._bar = tqdm(
            total=total_bytes,
            initial=done_bytes,
            unit="B",
            unit_scale=True,
            smoothing=0.05,
            disable=not sys.stderr.isatty(),
            file=sys.stderr,
        )

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    @property
    def share_read(self) -> float:
        """How much of the input was read, 0 to 1."""
        return self._done_bytes / self._total_bytes

    def add(self, progress: Progress) -> None:
        """Take a worker's report."""
        if progress.note is not None:
            log(progress.note)
        self.num_documents += progress.num_documents
        self.num_tokens += progress.num_tokens
        step = min(progress.input_bytes, self._total_bytes - self._done_bytes)
        self._done_bytes += step
        self._bar.set_postfix_str(f"{self.num_tokens / self.seconds / 1e6:.2f}M tokens/s", refresh=False)
        self._bar.update(step)
        if self._bar.disable and time.monotonic() - self._told >= SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            log(self.line())

    def line(self) -> str:
        """Return the state in one line."""
        read = self._done_bytes - self._first_bytes
        left = (self._total_bytes - self._done_bytes) / max(read / self.seconds, 1e-9)
        return (
            f"{100 * self._done_bytes / self._total_bytes:.1f}% of the input, "
            f"{counted(self.num_documents, 'document')}, "
            f"{counted(self.num_tokens, 'token')}, {self.num_tokens / self.seconds:,.0f} tokens/s, "
            f"{left / 60:.0f} min left"
        )
