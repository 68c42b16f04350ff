"""Encoding where the tokenizer has killed its process: in forks, halved down to the documents that do it.

A task during which a worker died twice is run like this. A document on which the fast engine dies is given to the
reference, as one on which it errs is; one on which both die is told, or refused, as the user chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flame.preprocess.engine_check import Encoder, EngineDifferenceError
from flame.preprocess.engines import Ids, join
from flame.preprocess.forks import ForkDiedError, in_a_fork

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Crash:
    """A text on which a process died: its place in the batch, of which engine, how, and whether the reference served.

    Without `served` it has no ids.
    """

    document: int
    engine: str
    how: str
    served: bool


def encode_apart(encoder: Encoder, texts: pa.LargeStringArray) -> tuple[Ids, list[Crash]]:
    """Return the ids of the texts, as `Encoder.encode` does, and those on which processes died.

    Cost: a fork for a batch on which none dies, and about 2·log2 of the batch for each text on which one does.
    """
    if not len(texts):
        return encoder.encode(texts), []
    return _encode(encoder, texts, 0)


def _encode(encoder: Encoder, texts: pa.LargeStringArray, place: int) -> tuple[Ids, list[Crash]]:
    try:
        return _unless_differing(lambda: encoder.encode(texts)), []
    except ForkDiedError as death:
        if len(texts) > 1:
            half = len(texts) // 2
            left, left_crashes = _encode(encoder, texts.slice(0, half), place)
            right, right_crashes = _encode(encoder, texts.slice(half), place + half)
            return join([left, right]), left_crashes + right_crashes
        served, ids = False, (np.zeros(0, np.uint32), np.zeros(1, np.int64))
        if encoder.fast is not None:
            ids, crashes = _encode(encoder.without_fast(), texts, place)
            served = not crashes
        return ids, [Crash(document=place, engine=encoder.name, how=death.how, served=served)]


def compare_apart(encoder: Encoder, texts: pa.LargeStringArray, found: Ids, chosen: NDArray[np.int64]) -> None:
    """Do as `Encoder.compare`; a text on which the reference dies is not compared."""

    def compare() -> Ids:
        encoder.compare(texts, found, chosen)
        return found[0][:0], found[1][:0]

    try:
        _unless_differing(compare)
    except ForkDiedError:
        return


def _unless_differing(function: Callable[[], Ids]) -> Ids:
    """Call it in a fork; an `EngineDifferenceError` is raised here as it was there."""

    def told() -> Ids | tuple[str, int | None]:
        try:
            return function()
        except EngineDifferenceError as error:
            return error.what, error.document

    answer = in_a_fork(told)
    if isinstance(answer[0], str):
        raise EngineDifferenceError(answer[0], answer[1])
    return answer
