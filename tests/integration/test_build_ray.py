"""A build on a Ray cluster of two nodes. Ray is no package of the development extra: `pip install ray` runs these."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builds import PROJECT, build_here, environment, run_build, same_corpus, some_texts, write_jsonl
from tests.engine_faults import dying_on
from tests.tokenizers import write_tiny_tokenizer

MARK = "drop dead"
OPTIONS = {"val_fraction": 0.05, "shard_tokens": 20_000, "executor": "ray"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    write_tiny_tokenizer(folder / "tok")
    for part in range(3):
        write_jsonl(folder / f"raw/{part}.jsonl", [*some_texts(400, seed=part, longest=100), f"{part} {MARK}"])
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
    nodes = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=nodes)
    try:
        made.add_node(num_cpus=1, object_store_memory=100 * 2**20)
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
@pytest.mark.parametrize("engine", ["hf", "fastokens"])
def test_two_nodes_give_the_same_bytes_whatever_dies(work: Path, tmp_path: Path, cluster: Any, engine: str) -> None:
    env = os.environ | {"RAY_ADDRESS": cluster.address}
    output = tmp_path / "out"
    result = run_build(work / "raw", output, work / "tok", env=env, engine=engine, num_workers=2, **OPTIONS)
    assert result.returncode == 0, result.stderr
    assert same_corpus(output, work / "expected")
    assert ("the task is run again by itself" in result.stderr) == (engine == "fastokens")
    assert ("fastokens dies on " in result.stderr) == (engine == "fastokens")


@pytest.mark.slow
def test_an_error_on_a_node_is_one_paragraph(work: Path, tmp_path: Path, cluster: Any) -> None:
    env = os.environ | {"RAY_ADDRESS": cluster.address}
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    result = run_build(tmp_path / "bad.jsonl", tmp_path / "out", work / "tok", env=env, num_workers=2, executor="ray")
    assert result.returncode == 1
    assert "bad.jsonl, line 2" in result.stderr and "Traceback" not in result.stderr


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


def test_ray_is_imported_only_where_it_is_asked_for() -> None:
    code = "import sys, flame.preprocess.build; print('ray' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
