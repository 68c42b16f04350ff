"""A build on a Ray cluster of two nodes on this machine, of which one is lost in the last of the tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flame.errors import FlameError
from flame.preprocess.ray_cluster import RayExecutor
from flame.preprocess.workers import LoadRequest
from flame.shards.manifest import read_manifest
from tests.builds import PROJECT, build_here, command, environment, run_build, same_corpus, some_texts, write_jsonl
from tests.engine_faults import dying_on
from tests.processes import SECONDS_TO_WAIT, receipts, until
from tests.tokenizers import write_tiny_tokenizer

MARK = "drop dead"
OPTIONS = {"val_fraction": 0.05, "shard_tokens": 20_000, "dedup": "exact", "executor": "ray"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    write_tiny_tokenizer(folder / "tok")
    for part in range(3):
        texts = some_texts(400, seed=part // 2, longest=100)
        write_jsonl(folder / f"raw/{part}.jsonl", [*texts, *texts[:100], f"{part} {MARK}"])
    build_here(folder / "raw", folder / "expected", folder / "tok", **OPTIONS | {"executor": "local"})
    return folder


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the cluster's processes are started with: `fastokens` dies on marked documents."""
    return dying_on(tmp_path_factory.mktemp("fault"), MARK, engine="fastokens", signal_name="SIGKILL")


@pytest.fixture(scope="module")
def cluster(fault: dict[str, str]) -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ |= fault | {"PYTHONPATH": with_path(fault["PYTHONPATH"]), "RAY_USAGE_STATS_ENABLED": "0"}
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 20}
    made = Cluster(initialize_head=True, head_node_args=node | {"_system_config": soon})
    try:
        made.add_node(**node)
        made.wait_for_nodes()
        yield made
    finally:
        made.shutdown()
        os.environ.clear()
        os.environ.update(before)


def with_path(path: str) -> str:
    """The path of processes that find Ray where this one does."""
    return os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.slow
def test_two_nodes_give_the_same_bytes_though_a_process_dies(work: Path, tmp_path: Path, cluster: Any) -> None:
    env = os.environ | {"RAY_ADDRESS": cluster.address}
    output = tmp_path / "out"
    result = run_build(work / "raw", output, work / "tok", env=env, engine="fastokens", num_workers=2, **OPTIONS)
    assert result.returncode == 0, result.stderr
    assert same_corpus(output, work / "expected")
    assert read_manifest(output).rejects == {"duplicate": 700}
    assert "the task is run again by itself" in result.stderr
    assert "fastokens dies on " in result.stderr


@pytest.mark.slow
def test_an_error_on_a_node_is_one_paragraph(work: Path, tmp_path: Path, cluster: Any) -> None:
    env = os.environ | {"RAY_ADDRESS": cluster.address}
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    result = run_build(tmp_path / "bad.jsonl", tmp_path / "out", work / "tok", env=env, num_workers=2, executor="ray")
    assert result.returncode == 1
    assert "bad.jsonl, line 2" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_node_that_is_lost_costs_nothing_but_time(work: Path, tmp_path: Path, cluster: Any) -> None:
    output = tmp_path / "out"
    words = command(work / "raw", output, work / "tok", engine="hf", num_workers=2, **OPTIONS)
    env = os.environ | {"RAY_ADDRESS": cluster.address}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert until(lambda: receipts(output), process), "the build ended before a task did"
        (other,) = cluster.worker_nodes
        cluster.remove_node(other, allow_graceful=False)
        _, errors = process.communicate(timeout=SECONDS_TO_WAIT)
    assert process.returncode == 0, errors
    assert same_corpus(output, work / "expected")


def test_without_the_package_the_line_that_installs_it_is_told(work: Path, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no module named ray')")
    env = environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{PROJECT}")
    result = run_build(work / "raw", tmp_path / "out", work / "tok", env=env, **OPTIONS)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        "flame-preprocess: --executor ray needs a package that is not installed (got no module named ray). "
        "pip install 'flame[ray]', here and on the nodes of the cluster."
    )
    assert not (tmp_path / "out").exists()


def test_an_address_at_which_nothing_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    request = LoadRequest(engine="hf", tokenizer_json=b"", parse_special=False, screens=(), small_input=True)
    with pytest.raises(FlameError) as told, RayExecutor(request, 1):
        pass
    assert str(told.value) == (
        f"there is no Ray cluster to run on (in RAY_ADDRESS 127.0.0.1:{port}; got [Errno 111] Connection refused). Set "
        "RAY_ADDRESS to the cluster's address (HOST:6379), or start one: ray start --head."
    )


def test_ray_is_imported_only_where_it_is_asked_for() -> None:
    code = "import sys, flame.preprocess.build; print('ray' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
