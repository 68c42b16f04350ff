"""Every shipped model configuration loads, builds, and is as large as its name says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flame.train.config_names import OLD_NAMES, find_config
from flame.train.families import FAMILIES, family_of
from flame.train.model_config import load_model_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.json"))
PREDECESSORS = {
    "transformer": ["340M", "1B", "7B"],
    "sba": ["340m"],
    "gla": ["340M", "7B"],
    "gsa": ["340M", "1B"],
    "hgrn2": ["340M"],
    "delta_net": ["340M", "1B"],
    "gated_deltanet": ["340M", "1B"],
    "mamba": ["340M", "1B"],
    "mamba2": ["340M", "1B"],
    "samba": ["1B"],
}
ADDED = {"kda": ["340M"], "rwkv7": ["340M"], "llama": ["340M", "1B", "8B"], "qwen3": ["600M", "1.7B", "8B"]}


@pytest.mark.parametrize("model_type", [*PREDECESSORS, *ADDED])
def test_it_ships_by_the_name_that_it_had(model_type: str) -> None:
    for size in {**PREDECESSORS, **ADDED}[model_type]:
        assert Path(find_config(str(CONFIGS / f"{model_type}_{size}.json"))) in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_builds_and_its_name_tells_its_parameters(file: Path) -> None:
    """Embeddings included, a tied head counted once, of the vocabulary that the file says."""
    pytest.importorskip("fla")
    config = load_model_config(str(file), vocab_size=1, eos_id=2)
    assert config.model_type in FAMILIES and config.vocab_size % 128 == 0
    assert config.vocab_size == json.loads(file.read_text())["vocab_size"]
    with torch.device("meta"):
        model = family_of(config).construct(config, "sdpa")
    millions = model.num_parameters() / 1e6
    size = f"{millions:.0f}M" if millions < 1000 else f"{millions / 1000:.1f}B"
    assert file.stem == f"{config.model_type}_{size}"


def test_an_old_name_is_loaded_and_the_log_tells_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="flame"):
        config = load_model_config(str(CONFIGS / "llama_340M.json"), vocab_size=1, eos_id=2)
    assert "llama_374M.json today: it has 374M parameters, embeddings included" in caplog.text
    assert config.to_dict() == load_model_config(str(CONFIGS / "llama_374M.json"), vocab_size=1, eos_id=2).to_dict()


def test_every_old_name_stands_for_a_file_and_hides_none(tmp_path: Path) -> None:
    for old, new in OLD_NAMES.items():
        assert (CONFIGS / new).is_file() and not (CONFIGS / old).exists()
        own = tmp_path / old.removesuffix(".json") / old
        own.parent.mkdir()
        assert find_config(str(own)) == str(own), "in another folder, where nothing has the new name"
        own.write_text("{}")
        (own.parent / new).write_text("{}")
        assert find_config(str(own)) == str(own), "a file of that name is what was asked for"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_says_nothing_that_its_model_does_not_read(file: Path) -> None:
    """A misspelt key would be kept and ignored."""
    pytest.importorskip("fla")
    values = json.loads(file.read_text())
    config = load_model_config(str(file), vocab_size=1, eos_id=2)
    known = type(config)().to_dict().keys() | {"rope_theta"}
    assert values.keys() <= known
    for name, value in values.items():
        if name != "rope_theta" and name != "vocab_size":
            assert config.to_dict()[name] == value
