"""Validation: the same windows in the same rows at any world size, batch and step, weighted by tokens.

A set's windows are its first ones, in order. A row holds `seq_len / window_len` of them and is one forward pass on one
rank; rows are dealt to ranks in turn. Row sums are added in row order, so that the number of ranks changes no bit.

Bits per byte is the loss of all labels over the bytes of text that they stand for: EOS has a loss, and no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from flame.errors import TokenizerError, TrainingError
from flame.sampling.geometry import BatchGeometry
from flame.sampling.packing import PackedBatch, pack_windows
from flame.sampling.sampler import num_windows
from flame.shards.reader import Split
from flame.shards.token_bytes import token_bytes
from flame.shards.tokenizer import load_tokenizer
from flame.train.distributed import World
from flame.train.loader import to_device
from flame.train.log import log
from flame.train.model import IGNORE_INDEX, CausalLMLoss


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """A split to validate on, and how many of its windows count.

    `token_bytes` are the bytes of text that each id stands for (`[vocab_size]`), None where that cannot be told.
    """

    name: str
    split: Split
    num_windows: int
    token_bytes: NDArray[np.int64] | None = None


def validation_sets(splits: Mapping[str, Split], *, window_len: int, num_tokens: int | None) -> list[ValidationSet]:
    """Return a set for each named split; all of them have one tokenizer, and the log tells if it counts no bytes."""
    sets = [validation_set(name, split, window_len=window_len, num_tokens=num_tokens) for name, split in splits.items()]
    if not sets:
        return []
    corpus = sets[0].split.corpus
    try:
        num_bytes = token_bytes(load_tokenizer(corpus.path), corpus.manifest.tokenizer)
    except TokenizerError as error:
        log.info("validation has no bits per byte (bpb is null): %s", error)
        return sets
    return [
        replace(chosen, token_bytes=num_bytes) if chosen.split.max_token_id < len(num_bytes) else chosen
        for chosen in sets
    ]


def validation_set(name: str, split: Split, *, window_len: int, num_tokens: int | None) -> ValidationSet:
    """Return the first windows of a split that hold `num_tokens` (all of them if None, or if there are no more)."""
    available = num_windows(split.num_tokens, window_len)
    if available == 0:
        raise TrainingError(
            f"validation set {name!r} is too small for one window",
            where=f"{split.corpus.path}, split {split.name}",
            got=f"{split.num_tokens} tokens",
            expected=f"at least {window_len + 1}",
            fix="Hold out more (flame-preprocess build --val_fraction), or lower training.window_len",
        )
    wanted = available if num_tokens is None else -(-num_tokens // window_len)
    return ValidationSet(name=name, split=split, num_windows=min(wanted, available))


@torch.no_grad()
def validate(
    module: CausalLMLoss, chosen: ValidationSet, geometry: BatchGeometry, world: World
) -> dict[str, float | None]:
    """Return {"loss", "ppl", "bpb"} of a set: nats a label, e to that, bits a byte of the labels' text.

    None where there are no labels, or no bytes that they stand for. Every rank must call it. Leaves the module in
    training mode.
    """
    num_rows = -(-chosen.num_windows // geometry.windows_per_row)
    sums = torch.zeros(num_rows, dtype=torch.float64)
    counts = torch.zeros(2, dtype=torch.int64)  # labels, and their bytes
    module.eval()
    # Every rank makes as many passes as the others: sharded weights are gathered together.
    for first_row in range(0, num_rows, world.dp_size):
        row = first_row + world.dp_rank
        batch = _row(chosen, min(row, num_rows - 1), geometry)
        micro = to_device(batch, world.device)
        loss_sum, *_ = module(micro.input_ids, micro.labels, micro.positions, micro.cu_seqlens, micro.max_seqlen)
        if row < num_rows:
            sums[row] = loss_sum.double().cpu()
            labels = batch.labels[batch.labels != IGNORE_INDEX]
            num_bytes = 0 if chosen.token_bytes is None else int(chosen.token_bytes[labels].sum())
            counts += torch.tensor([len(labels), num_bytes])
    module.train()
    dist.all_reduce(sums)  # each entry is not zero on one rank only: exact
    dist.all_reduce(counts)
    num_labels, num_bytes = counts.tolist()
    total = math.fsum(sums.tolist())
    loss = total / num_labels if num_labels else None
    return {
        "loss": loss,
        "ppl": None if loss is None else math.exp(min(loss, 700.0)),
        "bpb": total / math.log(2) / num_bytes if num_bytes else None,
    }


def _row(chosen: ValidationSet, row: int, geometry: BatchGeometry) -> PackedBatch:
    """Return one row; a last row that is not full repeats the set's first windows, without labels."""
    wanted = np.arange(row * geometry.windows_per_row, (row + 1) * geometry.windows_per_row)
    real = wanted < chosen.num_windows
    offsets = (np.where(real, wanted, 0) * geometry.window_len).tolist()
    batch = pack_windows(
        [(chosen.split, offset) for offset in offsets],
        geometry,
        sources=np.zeros(len(wanted), dtype=np.int32),
        samples=wanted,
    )
    batch.labels.reshape(-1, geometry.window_len)[~real] = IGNORE_INDEX
    return batch
