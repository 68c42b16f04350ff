"""The small files beside a model's weights, kept in every checkpoint so that exporting one needs nothing else.

config.json, generation_config.json and the tokenizer's own files, which agree on the vocabulary and on BOS and EOS; and
the model's code, where it is of one's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flame.errors import TokenizerError
from flame.train.hf_code import code_files

_TOKENIZER_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab"})
_NOT_TOKENIZER = frozenset({"config.json", "generation_config.json"})
_SPECIAL_TOKENS = ("tokenizer_config.json", "special_tokens_map.json")


def build_hf_files(
    model: Any, tokenizer_folder: Path | None, *, eos_id: int | None, bos_id: int | None = None
) -> dict[str, bytes]:
    """Return the files of `hf/` by name.

    `model` is the inner Hugging Face model, sharded or not; its embedding rows are the vocabulary size. `eos_id` and
    `bos_id` are the data's own: the configurations and the tokenizer are made to say the same. Without a `bos_id`
    the tokenizer's stands. Raises `TokenizerError` for files that cannot be understood, `TrainingError` for code that
    cannot be taken along.
    """
    files = _tokenizer_files(tokenizer_folder)
    ids = {"eos_token": eos_id, "bos_token": bos_id}
    if "tokenizer.json" in files:
        try:
            files |= _agreeing_tokenizer_files(files, ids)
            ids = {name: _configured_id(files, name) if number is None else number for name, number in ids.items()}
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise TokenizerError(
                f"the tokenizer's files cannot be understood: {error}", where=tokenizer_folder
            ) from error
    generation = _generation_config(model)
    eos = _stop_ids(generation, ids["eos_token"])
    config = json.loads(model.config.to_json_string())
    config |= {
        "architectures": [type(model).__name__.removeprefix("FSDP")],
        "vocab_size": int(model.get_input_embeddings().weight.shape[0]),
        "dtype": "float32",
        "eos_token_id": eos,
        "bos_token_id": ids["bos_token"],
    }
    config.pop("torch_dtype", None)
    code, auto_map = code_files(model)
    if auto_map:
        config["auto_map"] = {**config.get("auto_map", {}), **auto_map}
    generation |= {"eos_token_id": eos, "bos_token_id": ids["bos_token"]}
    return {**files, **code, "config.json": _json(config), "generation_config.json": _json(generation)}


def _tokenizer_files(folder: Path | None) -> dict[str, bytes]:
    if folder is None or not folder.is_dir():
        return {}
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in _TOKENIZER_SUFFIXES
        and path.name not in _NOT_TOKENIZER
        and not path.name.endswith(".index.json")
    }


def _agreeing_tokenizer_files(files: Mapping[str, bytes], ids: Mapping[str, int | None]) -> dict[str, bytes]:
    """Return the files that name special tokens, naming those of `ids`."""
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    result = {}
    for file in _SPECIAL_TOKENS:
        if file not in files and file != "tokenizer_config.json":
            continue
        # A bare tokenizer.json gets a tokenizer_config.json, or transformers would guess a class from the model's.
        settings = json.loads(files.get(file, b'{"tokenizer_class": "PreTrainedTokenizerFast"}'))
        for name, number in ids.items():
            if number is not None and tokenizer.token_to_id(_text(settings.get(name)) or "") != number:
                settings[name] = tokenizer.id_to_token(number)
        result[file] = _json(settings)
    return result


def _configured_id(files: Mapping[str, bytes], name: str) -> int | None:
    text = _text(json.loads(files["tokenizer_config.json"]).get(name))
    number: int | None = None if text is None else Tokenizer.from_buffer(files["tokenizer.json"]).token_to_id(text)
    return number


def _text(token: Any) -> str | None:
    """Return a special token's text; tokenizer_config.json has it as a string or as an object with its flags."""
    return token.get("content") if isinstance(token, Mapping) else token


def _generation_config(model: Any) -> dict[str, Any]:
    generation = getattr(model, "generation_config", None)
    values: dict[str, Any] = {} if generation is None else json.loads(generation.to_json_string())
    values.pop("_from_model_config", None)
    return values


def _stop_ids(generation: Mapping[str, Any], eos_id: int | None) -> int | list[int] | None:
    """Return what ends a generation: the data's EOS, with the model's other stop tokens where it is among them."""
    known: int | list[int] | None = generation.get("eos_token_id")
    if eos_id is None or (isinstance(known, list) and eos_id in known):
        return known
    return eos_id


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
