"""The old names of the files in configs/, which people still type."""

from __future__ import annotations

from pathlib import Path

from flame.train.log import log

OLD_NAMES = {
    "delta_net_1B.json": "delta_net_1.4B.json",
    "delta_net_340M.json": "delta_net_374M.json",
    "gated_deltanet_1B.json": "gated_deltanet_1.4B.json",
    "gated_deltanet_340M.json": "gated_deltanet_512M.json",
    "gated_deltanet_510M.json": "gated_deltanet_512M.json",
    "gla_340M.json": "gla_374M.json",
    "gla_7B.json": "gla_6.7B.json",
    "gsa_1B.json": "gsa_1.4B.json",
    "gsa_340M.json": "gsa_380M.json",
    "hgrn2_340M.json": "hgrn2_374M.json",
    "kda_340M.json": "kda_387M.json",
    "llama_1B.json": "llama_1.2B.json",
    "llama_340M.json": "llama_374M.json",
    "llama_8B.json": "llama_8.0B.json",
    "mamba2_1B.json": "mamba2_1.4B.json",
    "mamba2_340M.json": "mamba2_382M.json",
    "mamba_1B.json": "mamba_1.4B.json",
    "mamba_340M.json": "mamba_386M.json",
    "qwen3_600M.json": "qwen3_596M.json",
    "qwen3_8B.json": "qwen3_8.2B.json",
    "rwkv7_340M.json": "rwkv7_382M.json",
    "samba_1B.json": "samba_1.4B.json",
    "sba_340m.json": "sba_374M.json",
    "transformer_1B.json": "transformer_1.4B.json",
    "transformer_340M.json": "transformer_374M.json",
    "transformer_7B.json": "transformer_7.2B.json",
}
"""What the files of configs/ were called before their names told how many parameters they have."""


def find_config(source: str) -> str:
    """Return `source`, or the file beside it that an old name of configs/ stands for today, which the log names."""
    path = Path(source)
    if path.exists() or path.name not in OLD_NAMES:
        return source
    today = path.with_name(OLD_NAMES[path.name])
    if not today.is_file():
        return source
    size = today.stem.rpartition("_")[2]
    log.info(f"model.config: {source} is {today.name} today: it has {size} parameters, embeddings included")
    return str(today)
