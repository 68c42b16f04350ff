"""Every shipped model configuration loads, builds, and is as large as its name says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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
UNITS = {"M": 1e6, "m": 1e6, "B": 1e9}


@pytest.mark.parametrize("model_type", [*PREDECESSORS, *ADDED])
def test_it_ships(model_type: str) -> None:
    sizes = {**PREDECESSORS, **ADDED}[model_type]
    assert {CONFIGS / f"{model_type}_{size}.json" for size in sizes} <= set(FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_builds_and_is_as_large_as_its_name_says(file: Path) -> None:
    pytest.importorskip("fla")
    config = load_model_config(str(file), vocab_size=32000, eos_id=2)
    family = family_of(config)
    assert config.model_type in FAMILIES and config.vocab_size % 128 == 0
    with torch.device("meta"):
        model = family.construct(config, "sdpa")
    if file.stem == "gated_deltanet_340M":  # the predecessor's name for it
        assert file.read_text() == (CONFIGS / "gated_deltanet_510M.json").read_text()
        return
    label = file.stem.rpartition("_")[2]
    said = float(label[:-1]) * UNITS[label[-1]]
    assert 0.9 * said < sum(parameter.numel() for parameter in model.parameters()) < 1.45 * said


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
