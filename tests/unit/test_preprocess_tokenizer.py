"""BOS, EOS and vocabulary as a tokenizer's files tell them; the folder that goes with a corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from flame.errors import TokenizerError, UsageError
from flame.preprocess.tokenizer import TokenizerSpec, copy_tokenizer, read_tokenizer
from tests.tokenizers import EOS, write_tiny_tokenizer

BOS = "<s>"


def read(path: Path, *, eos_token: str | None = None, bos: str = "auto", parse_special: bool = False) -> TokenizerSpec:
    return read_tokenizer(path, eos_token=eos_token, bos=bos, parse_special=parse_special)


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: item for key, item in (value | values).items() if item is not ...}))


def template(tokens: str) -> dict[str, Any]:
    return json.loads(processors.TemplateProcessing(single=tokens, special_tokens=[(BOS, 0), (EOS, 1)]).__getstate__())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_tokenizer(tmp_path / "tok", bos=BOS)


def test_eos_of_the_config_as_text_or_object_or_of_the_map(folder: Path) -> None:
    spec = read(folder)
    assert (spec.eos_token, spec.info.eos_id) == (EOS, 1)
    change(folder, "tokenizer_config.json", eos_token={"content": EOS, "special": True})
    assert read(folder).info == spec.info
    change(folder, "tokenizer_config.json", eos_token=...)
    change(folder, "special_tokens_map.json", eos_token=EOS)
    assert read(folder).info == spec.info
    assert read(folder / "tokenizer.json").info == spec.info


def test_no_eos_and_unknown_eos_are_refused_with_what_to_do(folder: Path) -> None:
    with pytest.raises(TokenizerError, match=r"'</s>'.*--eos_token"):
        read(folder, eos_token="</s>")
    change(folder, "tokenizer_config.json", eos_token=None)
    with pytest.raises(TokenizerError, match=r"no EOS.*--eos_token.*<s>"):
        read(folder)
    assert read(folder, eos_token=EOS).info.eos_id == 1


@pytest.mark.parametrize(
    ("single", "add_bos_token", "policy", "expected"),
    [
        (None, None, "auto", None),
        ("$A <|endoftext|>", None, "auto", None),
        ("<s> $A <|endoftext|>", None, "auto", 0),
        ("<s> $A", False, "auto", None),
        (None, True, "auto", 0),
        ("<s> $A", None, "never", None),
        (None, False, "always", 0),
    ],
)
def test_bos_follows_the_setting_then_the_template(
    folder: Path, single: str | None, add_bos_token: bool | None, policy: str, expected: int | None
) -> None:
    processor = None if single is None else template(single)
    change(folder, "tokenizer.json", post_processor=processor)
    change(folder, "tokenizer_config.json", add_bos_token=add_bos_token)
    info = read(folder, bos=policy).info
    assert (info.bos_id, info.bos) == (expected, "never" if expected is None else "always")
    if processor is not None:
        byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
        sequence = {"type": "Sequence", "processors": [byte_level, processor]}
        change(folder, "tokenizer.json", post_processor=sequence)
        assert read(folder, bos=policy).info.bos_id == expected


def test_bos_that_does_not_exist_is_refused(folder: Path) -> None:
    change(folder, "tokenizer_config.json", bos_token=None)
    with pytest.raises(TokenizerError, match="--bos never"):
        read(folder, bos="always")
    change(folder, "tokenizer_config.json", bos_token="<nowhere>")
    with pytest.raises(TokenizerError, match="<nowhere>"):
        read(folder, bos="always")


def test_policies_are_part_of_the_fingerprint_and_the_path_is_not(folder: Path, tmp_path: Path) -> None:
    specs = [read(folder), read(folder, bos="always"), read(folder, parse_special=True), read(folder, eos_token=BOS)]
    assert len({spec.info.fingerprint for spec in specs}) == 4
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "tokenizer.json").write_text(json.dumps(json.loads((folder / "tokenizer.json").read_text()), indent=3))
    assert read(other, eos_token=EOS).info == specs[0].info


def test_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    vocab = {f"w{i}": i for i in range(65_530)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([f"<extra_{i}>" for i in range(19)] + [EOS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spec = read(tmp_path, eos_token=EOS)
    assert spec.info.vocab_size == tokenizer.get_vocab_size(with_added_tokens=True) == 65_550
    assert (spec.info.eos_id, spec.largest_id) == (65_549, 65_549)


def test_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)], unk_id=0))
    tokenizer.add_tokens([AddedToken("new", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    info = read(tmp_path, eos_token="</s>").info
    assert (info.eos_id, info.vocab_size) == (1, 4)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no such tokenizer.*hf download NAME"):
        read(tmp_path / "absent")
    with pytest.raises(UsageError, match=rf"no such tokenizer.*Did you mean {folder}\?"):
        read(tmp_path / "tokk")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerError, match="save_pretrained"):
        read(tmp_path / "empty")
    (tmp_path / "bad.json").write_text('{"model": 1}')
    with pytest.raises(TokenizerError, match="cannot be read"):
        read(tmp_path / "bad.json")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    change(folder, "tokenizer.json", model=model | {"dropout": 0.1})
    with pytest.raises(TokenizerError, match="dropout"):
        read(folder)


def test_the_copy_holds_the_tokenizers_own_files_and_this_eos(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_text("weights")
    change(folder, "special_tokens_map.json", eos_token={"content": EOS})
    copy_tokenizer(read(folder), tmp_path / "same")
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
    assert {path.name for path in (tmp_path / "same").iterdir()} == names
    assert all((tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes() for name in names)

    copy_tokenizer(read(folder, eos_token=BOS), tmp_path / "other")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        assert json.loads((tmp_path / "other" / name).read_text())["eos_token"] == BOS
    assert not list(tmp_path.glob("*.tmp"))


def test_a_lone_tokenizer_json_gets_settings_that_transformers_loads(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    lone = tmp_path / "my.json"
    lone.write_bytes((folder / "tokenizer.json").read_bytes())
    spec = read(lone, eos_token=EOS)
    copy_tokenizer(spec, tmp_path / "copy")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert (loaded.eos_token, loaded.eos_token_id, len(loaded)) == (EOS, 1, spec.info.vocab_size)
    assert read(tmp_path / "copy").info == spec.info
