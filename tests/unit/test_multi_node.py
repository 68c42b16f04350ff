"""docs/multi-node.md: its scripts are bash, its manifests YAML, and its commands are what the programs take."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flame.config import options_of, parse_flat, read_arguments
from flame.preprocess.config import BuildOptions
from flame.preprocess.ranges import TaskRange
from flame.train.config import TrainConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs/multi-node.md").read_text(encoding="utf-8")
INDICES = r"\$\{?(SLURM_ARRAY_TASK_ID|JOB_COMPLETION_INDEX)\}?"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [document for block in blocks("yaml") for document in yaml.safe_load_all(block)]


def containers() -> Iterator[dict[str, Any]]:
    for manifest in manifests():
        yield from manifest["spec"].get("template", {"spec": {"containers": []}})["spec"]["containers"]


def commands(program: str) -> list[list[str]]:
    """The arguments of every call of a program, in scripts and manifests."""
    scripts = [line for block in blocks("bash") for line in block.splitlines() if not line.startswith("#")]
    for container in containers():
        scripts += container.get("args", [shlex.join(container["command"])])
    calls = (found for script in scripts for found in re.findall(rf"{program} ([^|;']*(?:'[^']*'[^|;']*)*)", script))
    return [shlex.split(re.sub(INDICES, "3", call.split("' ||")[0].rstrip("'"))) for call in calls]


@pytest.mark.parametrize("script", blocks("bash"))
def test_scripts_are_bash(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_manifests_share_volumes_that_they_have_and_parse() -> None:
    found = manifests()
    assert [manifest["kind"] for manifest in found] == ["Job", "Job", "Service", "Job"]
    for manifest in found:
        pod = manifest["spec"].get("template", {}).get("spec")
        if pod is not None:
            assert pod["restartPolicy"] == "Never"
            volumes = {volume["name"] for volume in pod["volumes"]}
            mounts = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
            assert mounts == volumes
    assert found[0]["spec"]["completions"] == 64
    assert found[2]["metadata"]["name"] == found[3]["spec"]["template"]["spec"]["subdomain"]


def test_builds_are_what_the_program_takes() -> None:
    parsed = [
        parse_flat(BuildOptions, words[1:], program="build")
        for words in commands("flame-preprocess")
        if words and words[0] == "build" and "--output" in words
    ]
    assert sum(options.seal for options in parsed) == 3
    assert [options.task_range for options in parsed if options.task_range] == [TaskRange(index=3, count=64)] * 2
    assert sum(options.executor == "ray" for options in parsed) == 1


def test_trainings_are_what_the_program_takes() -> None:
    calls = [*commands("flame-train"), *commands("-m flame.train")]
    calls = [words for words in calls if words and words[0].startswith("--")]
    assert len(calls) == 3
    for words in calls:
        texts, alone = read_arguments(options_of(TrainConfig), words, program="flame-train")
        assert texts["job.dump_folder"] == ["/shared/exp/a"] and not alone
