"""The model of a run: configured for its data, built, checked against the weights that it begins with, spread out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from flame.errors import CorpusError
from flame.train.checkpoint_files import Choice
from flame.train.config import TrainConfig
from flame.train.data import TrainingData
from flame.train.distributed import World
from flame.train.hf_files import build_hf_files
from flame.train.identity import compare_model_config
from flame.train.initial import (
    InitialWeights,
    check_vocabulary,
    embedding_rows_of,
    read_config,
    read_hugging_face,
    take_generation_config,
)
from flame.train.model import CausalLMLoss, build_model
from flame.train.model_config import check_token_ids, embedding_rows, load_model_config
from flame.train.parallelize import parallelize
from flame.train.validation import ValidationSet


def param_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return what the model computes in: training.mixed_precision_param, or the device's default."""
    name = config.training.mixed_precision_param
    if name is None:
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def build_for_run(
    config: TrainConfig,
    world: World,
    data: TrainingData,
    validation_sets: Sequence[ValidationSet],
    choice: Choice | None,
    initial: InitialWeights | None,
) -> tuple[CausalLMLoss, dict[str, bytes]]:
    """Return the model, spread over the ranks, and the small files that go with its weights.

    `choice` and `initial` are what its weights will come from, if from anything.
    """
    model_config = configure_model(config, data, validation_sets, choice, initial)
    dtype = param_dtype(config, world.device)
    module = build_model(
        model_config,
        seed=config.training.seed,
        rank=world.rank,
        device=world.device,
        dtype=dtype,
        varlen=config.training.varlen,
        attention=config.model.attention,
        deterministic=config.training.deterministic,
        longest_sequence=config.training.longest_sequence,
    )
    tokenizer = data.tokenizer
    take_generation_config(module.model, _hf_folder(choice, initial))
    hf_files = build_hf_files(module.model, data.tokenizer_folder, eos_id=tokenizer.eos_id, bos_id=tokenizer.bos_id)
    if "tokenizer.json" not in hf_files:
        raise CorpusError(
            "the corpus has lost its tokenizer, without which its model cannot be exported",
            where=data.tokenizer_folder,
            expected="tokenizer.json",
            fix="Copy the files of the tokenizer that it was built with into that folder",
        )
    if initial is not None and initial.from_hugging_face:
        read_hugging_face(initial, module.model, world)
    parallelize(
        module,
        world.mesh,
        device=world.device,
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        reshard_after_forward=config.training.fsdp_reshard_after_forward,
        compile_blocks=config.training.compile,
        checkpoint_mode=config.activation_checkpoint.mode,
        checkpoint_option=config.activation_checkpoint.selective_ac_option,
        cpu_offload=config.training.enable_cpu_offload,
    )
    return module, hf_files


def configure_model(
    config: TrainConfig,
    data: TrainingData,
    validation_sets: Sequence[ValidationSet],
    choice: Choice | None,
    initial: InitialWeights | None,
) -> PretrainedConfig:
    """Return the model's configuration, fitted to its data and to the weights that it will be filled with.

    Refuses weights of another architecture or tokenizer, and corpora with ids that the model has no embedding for.
    """
    tokenizer, hf_folder = data.tokenizer, _hf_folder(choice, initial)
    from_scratch = choice is None and initial is None
    model_config = load_model_config(
        config.model_config,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        norm_type=config.model.norm_type,
        trust_remote_code=config.model.trust_remote_code,
        custom_model_path=config.experimental.custom_model_path,
        keep_rows=not from_scratch,
    )
    if not from_scratch:
        _fit_to_weights(model_config, read_config(hf_folder), tokenizer.vocab_size, hf_folder)
    if initial is not None and (rows := embedding_rows_of(initial, model_config)) is not None:
        model_config.vocab_size = rows
    if initial is not None or (choice is not None and choice.complete.identity is None):
        check_vocabulary(hf_folder, model_config.vocab_size, data)
    for split in (*data.splits, *(chosen.split for chosen in validation_sets)):
        check_token_ids(split.max_token_id, model_config.vocab_size, f"{split.corpus.path}, split {split.name}")
    return model_config


def _hf_folder(choice: Choice | None, initial: InitialWeights | None) -> Path | None:
    """Return where the weights' config.json and tokenizer lie, if they come from anywhere."""
    return choice.path / "hf" if choice is not None else None if initial is None else initial.hf_folder


def _fit_to_weights(
    config: PretrainedConfig, saved: Mapping[str, Any] | None, vocab_size: int, where: Path | None
) -> None:
    """Give a configuration the embedding rows that saved weights have; refuse another architecture than theirs."""
    if saved is None:
        return
    padded = embedding_rows(vocab_size, config.vocab_size)
    if saved.get("vocab_size") == padded:
        config.vocab_size = padded  # they were trained from scratch here
    if saved.get("model_type") == config.model_type:
        saved = json.loads(type(config).from_dict(dict(saved)).to_json_string())  # older spellings as today's
    compare_model_config(saved, json.loads(config.to_json_string()), where=where)
