"""Builds of every kind of input: the same corpus whatever holds the texts, and however many workers read them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset, DatasetDict

from flame.errors import InputError
from flame.preprocess import hub
from flame.preprocess.inputs import find_inputs
from tests.builds import build_here, environment, files_of, rows_of, run_build, same_corpus, some_texts, texts_of
from tests.loopback import FileServer, HubServer

TEXTS = [text.replace("\n", " / ") for text in some_texts(300)]
TABLE = pa.table({"id": range(300), "text": TEXTS, "score": [i / 10 for i in range(300)]})


def csv_bytes(delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows([TABLE.column_names, *(row.values() for row in TABLE.to_pylist())])
    return out.getvalue().encode()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_ipc(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=70)


def two_frames(data: bytes) -> bytes:
    return zstandard.compress(data[: len(data) // 2]) + zstandard.compress(data[len(data) // 2 :])


WRITERS: dict[str, Any] = {
    "a.parquet": lambda path: pq.write_table(TABLE, path, row_group_size=90),
    "a.feather": lambda path: feather.write_feather(TABLE, path, chunksize=80),
    "a.arrow": lambda path: write_ipc(path, TABLE),
    "saved": lambda path: Dataset(TABLE).save_to_disk(path, num_shards=1),
    "several": lambda path: DatasetDict({"train": Dataset(TABLE), "test": Dataset(TABLE)}).save_to_disk(path),
    "a.csv": lambda path: path.write_bytes(csv_bytes(",")),
    "a.tsv.zst": lambda path: path.write_bytes(two_frames(csv_bytes("\t"))),
    "a.jsonl": lambda path: path.write_bytes(lines(TABLE.to_pylist())),
    "a.jsonl.gz": lambda path: path.write_bytes(two_members()),
    "a.txt": lambda path: path.write_bytes("".join(f"{text}\n" for text in TEXTS).encode()),
}


def two_members() -> bytes:
    rows = TABLE.to_pylist()
    return gzip.compress(lines(rows[:100])) + gzip.compress(lines(rows[100:]))


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_input_is_the_same_corpus(tmp_path: Path, tiny_tokenizer: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    split = {"dataset_split": "train"} if name == "several" else {}
    keep = {} if name == "a.txt" else {"keep_columns": ("score",)}
    build_here(tmp_path / name, tmp_path / "out", tiny_tokenizer, no_shuffle=True, **split, **keep)
    assert texts_of(tmp_path / "out") == TEXTS
    (rows,) = rows_of(tmp_path / "out").values()
    assert {Path(row["source_file"]).name for row in rows} == {
        {"saved": "data-00000-of-00001.arrow", "several": "data-00000-of-00001.arrow"}.get(name, name)
    }
    if "jsonl" not in name and not name.endswith("txt"):
        assert [row["row"] for row in rows] == list(range(300))
    if name != "a.txt":
        assert [float(row["score"]) for row in rows] == TABLE["score"].to_pylist()
    plan = json.loads((tmp_path / "out/build/plan.json").read_bytes())
    assert len(plan["inputs"]) == 1


def test_a_folder_of_many_kinds_with_one_worker_and_with_two(tmp_path: Path, tiny_tokenizer: Path) -> None:
    raw = tmp_path / "raw"
    for name, writer in WRITERS.items():
        if name != "several":
            (raw / name).parent.mkdir(exist_ok=True)
            writer(raw / name)
    (raw / "README.md").touch()
    runs = [
        run_build(raw, tmp_path / f"out{n}", tiny_tokenizer, num_workers=n, engine="hf", shuffle_block_tokens=500)
        for n in (1, 2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert all(run.stderr.count("passed over 1 notes and hidden files") == 1 for run in runs)
    assert same_corpus(tmp_path / "out1", tmp_path / "out2")
    assert sorted(texts_of(tmp_path / "out1")) == sorted(TEXTS * (len(WRITERS) - 1))


DAMAGE: dict[str, tuple[Any, str, int, str]] = {
    "a.parquet": (lambda data: data[:-100], "no readable parquet", 0, "corrupt"),
    "a.arrow": (lambda data: data[:-100], "no readable Arrow file", 0, "corrupt"),
    "a.csv": (lambda data: data + b'1,"open', r"row 300 \(line 302\)", 300, "malformed_csv"),
    "a.tsv.zst": (lambda data: data[:-40], "the zstd stream ends", 150, "truncated"),
    "a.jsonl.gz": (lambda data: data[:-40], "the gzip stream ends", 100, "truncated"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_or_counted_under_the_users_policy(tmp_path: Path, tiny_tokenizer: Path, name: str) -> None:
    damage, message, at_least, reason = DAMAGE[name]
    raw = tmp_path / "raw"
    raw.mkdir()
    WRITERS["a.txt"](raw / "b.txt")
    WRITERS[name](raw / name)
    (raw / name).write_bytes(damage((raw / name).read_bytes()))
    with pytest.raises(InputError, match=message) as caught:
        build_here(raw, tmp_path / "out", tiny_tokenizer)
    assert name in str(caught.value)
    manifest = build_here(raw, tmp_path / "skipped", tiny_tokenizer, on_error="skip")
    assert manifest.rejects == {reason: 1}
    assert 300 + at_least <= manifest.splits["train"].num_documents <= 600
    (samples,) = (path.read_text() for path in (tmp_path / "skipped/rejects").iterdir())
    assert name in samples


def test_a_server_and_a_disk_give_the_same_corpus(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """In real processes: the threads of a store's client and the forking of workers stay out of each other's way."""
    pytest.importorskip("aiohttp")
    names = ["a.parquet", "a.feather", "a.jsonl.gz", "a.csv"]
    for name in names:
        (tmp_path / "raw").mkdir(exist_ok=True)
        WRITERS[name](tmp_path / "raw" / name)
    with FileServer(tmp_path / "raw") as server:
        (tmp_path / "list").write_text("".join(f"{server.url}/{name}\n" for name in names))
        options = {"engine": "hf", "val_fraction": 0.1}
        run = run_build(f"@{tmp_path}/list", tmp_path / "far", tiny_tokenizer, env=environment(NO_PROXY="*"), **options)
        assert run.returncode == 0, run.stderr
        (tmp_path / "list").write_text("".join(f"{tmp_path}/raw/{name}\n" for name in names))
        build_here(f"@{tmp_path}/list", tmp_path / "near", tiny_tokenizer, **options)
        assert files_of(tmp_path / "far") == files_of(tmp_path / "near")
        plan = json.loads((tmp_path / "far/build/plan.json").read_bytes())
        assert all(entry["etag"] and entry["path"].startswith(server.url) for entry in plan["inputs"])
        again = run_build(f"@{tmp_path}/list", tmp_path / "far", tiny_tokenizer, **options)
        assert "other options or inputs" in again.stderr


CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: sample/*/*.parquet
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*.parquet
---
"""


def test_a_hub_dataset_is_read_where_it_lies(tmp_path: Path, tiny_tokenizer: Path) -> None:
    repo = tmp_path / "repo"
    for name in ("sample/10BT/part-2", "sample/10BT/part-10", "sample/100BT/part-1"):
        path = repo / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": [f"{name} {text}" for text in TEXTS]}), path, row_group_size=50)
    (repo / "README.md").write_text(CARD)
    with HubServer(repo, "Org/web-edu") as server:
        env = environment(HF_ENDPOINT=server.url, HF_HOME=str(tmp_path / "home"), NO_PROXY="*", HF_HUB_OFFLINE="0")
        options = {"dataset_name": "sample-10BT", "dataset_split": "train", "engine": "hf", "no_shuffle": True}
        run = run_build("Org/web-edu", tmp_path / "out", tiny_tokenizer, env=env, **options)
        assert run.returncode == 0, run.stderr
        asked = [(path, part) for method, path, part in server.requests if method == "GET" and "parquet" in path]
        assert asked
        assert all(part for _, part in asked)
        assert texts_of(tmp_path / "out") == [f"sample/10BT/part-{n} {text}" for n in (2, 10) for text in TEXTS]
        sources = {row["source_file"] for rows in rows_of(tmp_path / "out").values() for row in rows}
        assert sources == {f"hf://datasets/Org/web-edu@{server.commit}/sample/10BT/part-{n}.parquet" for n in (2, 10)}
        assert not list(tmp_path.rglob("*.arrow"))
        told = subprocess.run(
            [sys.executable, "-c", FIND], env=env, capture_output=True, text=True, timeout=120
        ).stdout.splitlines()
    assert [line.split()[0] for line in told] == ["InputError", "InputError", "UsageError", "3"]
    assert "'sample-1T' not found" in told[0]
    assert "no such split" in told[1]
    assert "got test; expected train" in told[1]
    assert "no hub dataset of that name" in told[2]


FIND = """
from flame.preprocess.inputs import find_inputs
for dataset, options in (
    ("Org/web-edu", {"name": "sample-1T"}),
    ("Org/web-edu", {"split": "test"}),
    ("Org/none", {}),
    ("hf://datasets/Org/web-edu/sample/**/*.parquet", {}),
):
    try:
        print(len(find_inputs([dataset], data_dir=None, data_files=(), **options)))
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_offline_no_hub_is_asked_and_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for options in ({}, {"name": "sample-10BT"}):
        with pytest.raises(InputError, match=r"no file or folder Org/web.*HF_HUB_OFFLINE"):
            find_inputs(["Org/web"], data_dir=None, data_files=(), **options)
    path = tmp_path / "Org/web/a.jsonl"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(hub, "hub_files", pytest.fail)
    assert [file.path for file in find_inputs(["Org/web"], data_dir=None, data_files=())] == ["Org/web/a.jsonl"]
