"""The tokenizer as its files describe it: BOS, EOS, the vocabulary, and the folder that goes with the corpus.

Only JSON is read here; what turns texts to ids is an engine (`engines.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame.errors import TokenizerError, UsageError
from flame.files import (
    fsync_file,
    fsync_folder,
    publish,
    read_json_object,
    remove_tree,
    sha256_of_json,
    temporary_path,
)
from flame.near import near_path
from flame.preprocess.user_cache import keep, read_kept, user_cache
from flame.shards.fingerprint import tokenizer_fingerprint
from flame.shards.manifest import TokenizerInfo

RENEW = "Fetch or save the tokenizer again; if it is a new one, upgrade: pip install -U tokenizers"
KEPT_VERSION = 1  # of what the user's cache keeps of a tokenizer; raised when another answer would be found
TOKENIZER_JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
# What may lie beside tokenizer.json and belongs to it.
OWN_FILES = (
    CONFIG,
    SPECIAL_TOKENS,
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer and its policies; `json` is the content of tokenizer.json, `folder` holds its own files."""

    json: bytes
    folder: Path | None
    config: dict[str, Any]
    eos_token: str
    bos_token: str | None
    info: TokenizerInfo
    largest_id: int

    @property
    def parse_special(self) -> bool:
        return self.info.special_text == "parsed"

    @property
    def plan_options(self) -> dict[str, Any]:
        """What of a tokenizer decides a corpus's bytes, by the names that plan.json gives it."""
        return {
            "tokenizer": self.info.fingerprint,
            "eos_token": self.eos_token,
            "bos": self.info.bos,
            "special_text": self.info.special_text,
        }


def read_tokenizer(path: Path, *, eos_token: str | None, bos: str, parse_special: bool) -> TokenizerSpec:
    """Read a tokenizer folder, or a tokenizer.json, and settle its EOS and BOS.

    Raises `UsageError` where the path is absent and `TokenizerError` where it has no usable tokenizer.json, no EOS, or
    no BOS although one is asked for. `len(tokenizer)` is the vocabulary's size, as in transformers.
    """
    json_path, folder = _locate(path)
    content = json_path.read_bytes()
    config = _read_config(folder)
    asked: dict[str, Any] = {
        "eos_token": eos_token,
        "bos": bos,
        "special_text": "parsed" if parse_special else "plain",
    }
    key = sha256_of_json(
        {"version": KEPT_VERSION, "tokenizer": hashlib.sha256(content).hexdigest(), "config": config, "asked": asked}
    )
    cache = user_cache("tokenizer", key)
    settled = read_kept([cache], key)
    if settled is None:
        settled = _settle(path, json_path, content, config, **asked)
        keep(cache, key, settled)
    info = TokenizerInfo(**settled.pop("info"))
    return TokenizerSpec(json=content, folder=folder, config=config, info=info, **settled)


def _settle(
    path: Path,
    json_path: Path,
    content: bytes,
    config: dict[str, Any],
    *,
    eos_token: str | None,
    bos: str,
    special_text: str,
) -> dict[str, Any]:
    """Return what a large vocabulary takes half a second to tell, as JSON: EOS, BOS, `TokenizerInfo`, largest id."""
    try:
        tokenizer = json.loads(content)
        vocabulary = _vocabulary(tokenizer)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(
            "the tokenizer cannot be read",
            where=json_path,
            got=repr(error),
            expected="a tokenizer.json of `tokenizers`",
            fix=RENEW,
        ) from error
    if tokenizer["model"].get("dropout"):
        raise TokenizerError(
            "the tokenizer splits at random (BPE dropout), so no two builds would be alike",
            where=json_path,
            fix="Set model.dropout to null in its tokenizer.json",
        )
    eos = _eos_token(eos_token, config, vocabulary, tokenizer, path)
    bos_token = _bos_token(bos, config, vocabulary, tokenizer, path)
    policies: dict[str, Any] = {
        "bos_id": None if bos_token is None else vocabulary[bos_token],
        "eos_id": vocabulary[eos],
        "bos": "never" if bos_token is None else "always",
        "special_text": special_text,
    }
    info = TokenizerInfo(
        fingerprint=tokenizer_fingerprint(tokenizer, **policies), vocab_size=len(vocabulary), **policies
    )
    return {
        "eos_token": eos,
        "bos_token": bos_token,
        "info": dataclasses.asdict(info),
        "largest_id": max(vocabulary.values()),
    }


def _locate(path: Path) -> tuple[Path, Path | None]:
    """Return tokenizer.json and the folder of its own files, None where a file of another name stands alone."""
    if path.is_file():
        return path, path.parent if path.name == TOKENIZER_JSON else None
    if not path.is_dir():
        raise UsageError(
            "there is no such tokenizer folder or file",
            got=path,
            fix=near_path(path, TOKENIZER_JSON)
            or "Name a folder with a tokenizer.json; one on the hub is fetched by: hf download NAME --local-dir tok",
        )
    if not (path / TOKENIZER_JSON).is_file():
        raise TokenizerError(
            f"the tokenizer folder has no {TOKENIZER_JSON}",
            where=path,
            got=", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "an empty folder",
            fix="Make one: transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it",
        )
    return path / TOKENIZER_JSON, path


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return every token's id, added tokens included."""
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, dict):
        tokens = {str(token): int(index) for token, index in vocab.items()}
    else:  # Unigram: a list of [token, score]
        tokens = {str(entry[0]): index for index, entry in enumerate(vocab)}
    for added in tokenizer.get("added_tokens") or []:
        tokens[added["content"]] = int(added["id"])
    return tokens


def _read_config(folder: Path | None) -> dict[str, Any]:
    """Return tokenizer_config.json over special_tokens_map.json; empty where there is neither."""
    config: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS, CONFIG):
        path = None if folder is None else folder / name
        if path is not None and path.is_file():
            try:
                config |= {key: value for key, value in json.loads(path.read_bytes()).items() if value is not None}
            except (ValueError, AttributeError) as error:
                raise TokenizerError(
                    f"a file of the tokenizer is no JSON object: {error}",
                    where=path,
                    fix=RENEW,
                ) from error
    return config


def _token_text(value: Any) -> str | None:
    """Return the text of a token written as a string or as an AddedToken object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _eos_token(
    asked: str | None, config: dict[str, Any], vocabulary: dict[str, int], tokenizer: dict[str, Any], path: Path
) -> str:
    token = asked if asked is not None else _token_text(config.get("eos_token"))
    special = [added["content"] for added in tokenizer.get("added_tokens") or [] if added.get("special")]
    choice = f"Choose one with --eos_token; its special tokens are {', '.join(special[:8]) or 'none'}"
    if token is None:
        raise TokenizerError(
            "the tokenizer names no EOS token, and every document ends with one", where=path, fix=choice
        )
    if token not in vocabulary:
        raise TokenizerError("the EOS token is not in the vocabulary", where=path, got=repr(token), fix=choice)
    return token


def _bos_token(
    policy: str, config: dict[str, Any], vocabulary: dict[str, int], tokenizer: dict[str, Any], path: Path
) -> str | None:
    """Return the token that begins each document, None for none."""
    template = _template_start(tokenizer.get("post_processor"))
    if policy == "never":
        return None
    if policy == "auto":
        wanted = config.get("add_bos_token")
        if not (template is not None if wanted is None else wanted):
            return None
        token = _token_text(config.get("bos_token")) or template if wanted else template
    else:
        token = _token_text(config.get("bos_token")) or template
    if token is None:
        raise TokenizerError(
            "each document is to begin with BOS, but the tokenizer names no BOS token",
            where=path,
            fix=f"Name bos_token in its {CONFIG}, or build with --bos never",
        )
    if token not in vocabulary:
        raise TokenizerError(
            "the BOS token is not in the vocabulary", where=path, got=repr(token), fix="Build with --bos never"
        )
    return token


def _template_start(processor: dict[str, Any] | None) -> str | None:
    """Return the special token that tokenizer.json's post-processor puts before a text, None for none."""
    if processor is None:
        return None
    kind = processor.get("type")
    if kind == "Sequence":
        starts = [_template_start(part) for part in processor.get("processors", [])]
        return next((start for start in starts if start is not None), None)
    if kind in ("BertProcessing", "RobertaProcessing"):
        return str(processor["cls"][0])
    if kind == "TemplateProcessing":
        first = processor["single"][0] if processor.get("single") else {}
        special = first.get("SpecialToken")
        if special is not None:
            return str(processor["special_tokens"][special["id"]]["tokens"][0])
    return None


def copy_tokenizer(spec: TokenizerSpec, folder: Path) -> None:
    """Publish the tokenizer's own files as `folder`, so that transformers loads it offline with this EOS and BOS.

    A folder that holds them is left as it is; one that damage has changed is replaced.
    """
    files = _own_files(spec)
    if all((folder / name).is_file() and (folder / name).read_bytes() == data for name, data in files.items()):
        return
    temporary = temporary_path(folder)
    remove_tree(temporary)
    temporary.mkdir(parents=True)
    for name, data in files.items():
        (temporary / name).write_bytes(data)
        fsync_file(temporary / name)
    fsync_folder(temporary)
    remove_tree(folder)
    publish(temporary, folder)


def _own_files(spec: TokenizerSpec) -> dict[str, bytes]:
    """Return the files of a copy, whose settings name the EOS (and BOS) that documents are written with."""
    files = {TOKENIZER_JSON: spec.json}
    for name in OWN_FILES:
        source = None if spec.folder is None else spec.folder / name
        if source is not None and source.is_file():
            files[name] = source.read_bytes()
    tokens = {"eos_token": spec.eos_token}
    if spec.bos_token is not None:
        tokens["bos_token"] = spec.bos_token
    for name in (CONFIG, SPECIAL_TOKENS):
        if name in files:
            assert spec.folder is not None
            value = read_json_object(spec.folder / name, name, TokenizerError)
            wrong = {
                key: token
                for key, token in tokens.items()
                if _token_text(value.get(key)) != token and (name == CONFIG or key in value)
            }
            if wrong:
                files[name] = _json_text(value | wrong)
        elif name == CONFIG:
            files[name] = _json_text({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**9} | tokens)
    return files


def _json_text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
