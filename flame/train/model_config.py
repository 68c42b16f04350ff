"""From `--model.config` to a configuration that fits the corpus: found, read, and given its embedding rows."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from flame.errors import CorpusError, FlameError, TrainingError, UsageError
from flame.near import near_path
from flame.train.config_names import find_config
from flame.train.families import FAMILIES, family_of
from flame.train.log import log

ROWS_MULTIPLE = 128
CUSTOM_MODELS = "custom_models"
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_heads"),
)
_OLD_SIZES = ("n_embd", "n_layer", "n_head")


def load_model_config(
    source: str,
    *,
    vocab_size: int,
    eos_id: int,
    bos_id: int | None = None,
    norm_type: str | None = None,
    trust_remote_code: bool = False,
    custom_model_path: str | None = None,
    keep_rows: bool = False,
) -> PretrainedConfig:
    """Return the configuration that `source` names, fitted to a corpus's tokenizer.

    `source` is a JSON file (by its name or its old one), a folder with a config.json, or the name of a model on the
    Hugging Face hub, which is not asked for what can only be a path. `vocab_size` is `len(tokenizer)`: the embedding
    gets `embedding_rows` of it, or with `keep_rows` (weights will be loaded) as many as the configuration says. EOS and
    BOS become the corpus's. There is no padding token: no batch is padded, and torch would freeze its embedding, which
    is EOS's where the two are one.

    Raises `UsageError` for a path or name that is not there, `TrainingError` for what the configuration says.
    """
    source = find_config(source)
    values = _read(source)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise TrainingError(
            "the model's configuration does not say what kind of model it is",
            where=source,
            expected='"model_type", for example "llama"',
        )
    _refuse_sizes(values, source)
    import_definitions(model_type, custom_model_path)
    config = _construct(source, model_type, trust_remote_code)
    if norm_type is not None:
        _set_norm(config, norm_type)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = bos_id, eos_id, None
    if not keep_rows:
        rows = embedding_rows(vocab_size, config.vocab_size)
        log.info(
            f"embedding rows: {rows} (the tokenizer has {vocab_size} tokens, the configuration {config.vocab_size}, "
            f"rounded up to a multiple of {ROWS_MULTIPLE})"
        )
        config.vocab_size = rows
    return config


def embedding_rows(vocab_size: int, config_vocab_size: int) -> int:
    """Return the embedding rows of a model trained from scratch: the larger size, rounded up to 128."""
    return -(-max(vocab_size, config_vocab_size) // ROWS_MULTIPLE) * ROWS_MULTIPLE


def check_token_ids(max_token_id: int, rows: int, corpus: object) -> None:
    """Raise `CorpusError` if a corpus holds an id beyond the model's embedding rows."""
    if max_token_id >= rows:
        raise CorpusError(
            "the corpus holds a token id that the model has no embedding for",
            where=corpus,
            got=f"id {max_token_id}",
            expected=f"ids below {rows}, the model's embedding rows",
            fix="Train with the tokenizer that made the corpus, or give the model's vocab_size as many rows",
        )


def _read(source: str) -> dict[str, Any]:
    """Return the values of a configuration without building anything, and without running any code."""
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            values = json.loads(file.read_bytes())
        except ValueError as error:
            raise TrainingError("the model's configuration is not JSON", where=file, got=error) from error
        if not isinstance(values, dict):
            raise TrainingError("the model's configuration is not a JSON object", where=file, got=type(values).__name__)
        return values
    if path.is_dir() or not _may_be_on_the_hub(source):
        raise UsageError(
            "model.config names a file that does not exist",
            got=file if path.is_dir() else source,
            expected="a JSON file, a folder with a config.json, or the name of a model on the Hugging Face hub",
            fix=near_path(path, "config.json"),
        )
    try:
        values, _ = PretrainedConfig.get_config_dict(source)
    except (OSError, ValueError) as error:
        raise UsageError(
            "model.config is neither a local path nor a model that the Hugging Face hub could give",
            got=source,
            expected="a JSON file, a folder with a config.json, or a name such as Qwen/Qwen3-0.6B",
            fix=" ".join(filter(None, (_hub_said(error), near_path(path, "config.json")))),
        ) from error
    return values


def _hub_said(error: Exception) -> str:
    return f"The hub said: {str(error).splitlines()[0].rstrip('.')}."


def _may_be_on_the_hub(source: str) -> bool:
    """Whether an absent path has the form `org/name`, and names no file of a folder of configurations."""
    path = Path(source)
    return bool(_HUB_NAME.fullmatch(source)) and path.suffix != ".json" and not any(path.parent.glob("*.json"))


def _refuse_sizes(values: Mapping[str, Any], source: str) -> None:
    """Raise `TrainingError` for a size below 1: some models would be built without their layers, and be trained."""
    wrong = [f"{name} {values[name]}" for name in (*_SIZES, *_OLD_SIZES) if _is_below_one(values.get(name))]
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if not wrong and isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise TrainingError(
            "the model's configuration is refused: its heads cannot share their keys and values evenly",
            where=source,
            got=f"num_attention_heads {heads}, num_key_value_heads {kv_heads}",
            expected="num_key_value_heads that divide num_attention_heads",
        )
    if wrong:
        raise TrainingError(
            "the model's configuration is refused", where=source, got=", ".join(wrong), expected="1 or more of each"
        )


def _is_below_one(value: Any) -> bool:
    return isinstance(value, int | float) and value < 1


def import_definitions(model_type: str, custom_model_path: str | None = None) -> None:
    """Import what defines a model type, as far as nothing does yet: a named module always, custom_models/, then fla."""
    if custom_model_path is not None:
        _import_custom_path(custom_model_path)
    if not _is_known(model_type):
        _import_custom_folders(model_type)
    if not _is_known(model_type) or (model_type in FAMILIES and FAMILIES[model_type].from_fla):
        importlib.import_module("fla")


def _is_known(model_type: str) -> bool:
    return model_type in FAMILIES or model_type in CONFIG_MAPPING


def _import_custom_path(custom_model_path: str) -> None:
    path = Path(custom_model_path)
    if path.exists():
        _let_import_from(path.resolve().parent)
        name = path.stem
    else:
        name = custom_model_path
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != name.split(".")[0]:
            raise
        raise UsageError(
            "experimental.custom_model_path names nothing that Python can import",
            got=custom_model_path,
            expected="a folder, a .py file, or a module's dotted name",
        ) from error


def _import_custom_folders(model_type: str) -> None:
    """Import the packages in custom_models/, of the current folder and of the project, until one defines the type.

    One of the type's own name comes first, so that a model does not pay for what another imports.
    """
    roots = dict.fromkeys((Path.cwd(), Path(__file__).resolve().parents[2]))
    packages = [file.parent for root in roots for file in sorted((root / CUSTOM_MODELS).glob("*/__init__.py"))]
    for package in sorted(packages, key=lambda package: package.name != model_type):
        _let_import_from(package.parents[1])
        importlib.import_module(f"{CUSTOM_MODELS}.{package.name}")
        if _is_known(model_type):
            log.info(f"custom model: {package}")
            return


def _let_import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def _construct(source: str, model_type: str, trust_remote_code: bool) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise TrainingError(
                "the model is defined by code of its own, which is not run unasked",
                where=source,
                fix="Read that code, and if you trust it add --model.trust_remote_code",
            ) from error
        if model_type in CONFIG_MAPPING:
            raise TrainingError("the model's configuration is refused", where=source, got=_one_line(error)) from error
        known = sorted({*FAMILIES, *CONFIG_MAPPING})
        near = difflib.get_close_matches(model_type, known, n=1)
        raise TrainingError(
            "no library here knows this kind of model",
            where=source,
            got=f"model_type {model_type}",
            expected=f"{near[0]}, perhaps" if near else "one of " + ", ".join(FAMILIES),
            fix=f"A model of your own goes into {CUSTOM_MODELS}/, or is named by --experimental.custom_model_path",
        ) from error
    except (OSError, ImportError):
        raise
    except Exception as error:  # of any kind: configurations are checked by the code of many models
        raise TrainingError("the model's configuration is refused", where=source, got=_one_line(error)) from error


def construct_model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Return a new model, in fp32 on the current default device; `attention` is what its family takes.

    Raises `TrainingError`, which names the configuration and as far as it can be told the value, where none can be
    built from it.
    """
    try:
        return family_of(config).construct(config, attention)
    except (FlameError, ImportError):
        raise
    except Exception as error:  # of any kind: each value is looked at for the first time where the model needs it
        raise TrainingError(
            f"no model of the type {config.model_type} can be built from its configuration",
            where=config.name_or_path or None,
            got=_told_value(config.to_dict(), error),
        ) from error


def _told_value(values: Mapping[str, Any], error: Exception) -> str:
    """Return the text of an error, after the values of the configuration that it speaks of."""
    told = _one_line(error)
    spoken_of = [
        f"{name} {value!r}"
        for name, value in _leaves(values)
        if isinstance(value, str) and value and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", told)
    ]
    names = [f"{name} {value!r}" for name, value in values.items() if re.search(rf"\b{re.escape(name)}\b", told)]
    return "; ".join(dict.fromkeys([*spoken_of, *names, told]))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _one_line(error: Exception) -> str:
    """Return what an error says, with its kind where it says only a value."""
    told = " ".join(str(error).split())
    return told if isinstance(error, StrictDataclassError | ValueError) else f"{type(error).__name__}: {told}"


def _set_norm(config: PretrainedConfig, norm_type: str) -> None:
    norms: Mapping[str, Mapping[str, Any]] = family_of(config).norm_types
    if norm_type not in norms:
        choices = " or ".join(norms)
        raise TrainingError(
            f"model.norm_type cannot be {norm_type} for a model of the type {config.model_type}",
            expected=choices or "no model.norm_type: its norm is a part of what it is",
        )
    for name, value in norms[norm_type].items():
        setattr(config, name, value)
