"""What a trainer saw is what `flame-mix trace --run` prints and `flame-mix find` computes, over every kind of start."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from flame.cli.mix import main as flame_mix
from flame.train.__main__ import main as flame_train
from flame.train.run import read_status
from tests.faults import ids_trained, in_ranks, note_samples, poison_loss
from tests.runs import TORCHRUN, arguments, make_training_folder, read_metrics, read_segments, run_training


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A run of two ranks; from step 6 on of one, with another batch; from step 12 on of other data.

    Its first start took steps 6 and 7 too: the second took them back. What ranks saw is noted beside it.
    """
    folder = make_training_folder(tmp_path_factory.mktemp("trace"), tiny_tokenizer)
    run = folder / "run"
    shape = {"training__seq_len": 256, "training__window_len": 64, "training__gradient_accumulation_steps": 2}
    two = shape | {"training__batch_size": 2, "training__steps": 7, "checkpoint__interval": 5}
    run_training(arguments(folder, run, **two), command=TORCHRUN, variables=in_ranks(folder / "first"))
    one = shape | {"training__batch_size": 3}
    change = {"training__data_probs": "0.5,0.5", "checkpoint__allow_data_change": "true"}
    starts = {
        "second": {"training__steps": 11, "checkpoint__load_step": 5},
        "third": {"training__steps": 14, **change},
    }
    for name, options in starts.items():
        log = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(log):
            note_samples(patch, folder / f"{name}.samples")
            assert flame_train(arguments(folder, run, **one, **options)) == 0
        (folder / f"{name}.log").write_text(log.getvalue())
    return run


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert flame_mix([*map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def by_place(found: list[dict[str, Any]], *, without: set[str]) -> list[str]:
    return sorted(json.dumps({k: v for k, v in one.items() if k not in without}, sort_keys=True) for one in found)


def test_a_traced_step_is_what_its_ranks_saw(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run.parent
    notes = [(step, rank, folder / f"first/rank-{rank}.samples") for step, rank in ((1, 0), (1, 1))]
    notes += [(6, 0, folder / "second.samples"), (12, 0, folder / "third.samples")]
    seen: dict[tuple[int, int, int], list[int]] = {}
    for first_step, rank, path in notes:
        for step, micro_steps in enumerate(ids_trained(path), first_step):
            if rank == 0 or step < 6:  # its second start took steps 6 and 7 anew, with one rank
                seen |= {(step, rank, micro_step): ids for micro_step, ids in enumerate(micro_steps)}
    assert len(seen) == 5 * 2 * 2 + 9 * 2

    monkeypatch.chdir(folder / "web")  # the run says where its corpora lie, whoever asks from where
    found: dict[tuple[int, int, int], list[int]] = {}
    for document in printed(capsys, "trace", "--run", run, "--step", ":", "--ids"):
        assert document["num_tokens"] == len(document["ids"])
        place = (document["step"], document["rank"], document["micro_step"])
        found.setdefault(place, []).extend(document["ids"])
    assert found == seen


def test_one_step_and_one_rank_of_it_are_traced(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = printed(capsys, "trace", "--run", run, "--step", 2, "--rank", 1)
    assert one and {document["rank"] for document in one} == {1} and "ids" not in one[0]
    whole = printed(capsys, "trace", "--run", run, "--step", 2, "--ids")
    assert {document["step"] for document in whole} == {2}
    assert one == [{k: v for k, v in d.items() if k != "ids"} for d in whole if d["rank"] == 1]
    for words, told in (
        (("--run", run, "--step", 6, "--rank", 1), "no such rank"),
        (("--run", run, "--step", 0), "numbered from 1"),
        (("--run", run.parent / "web", "--step", 1), "no run"),
        (("--run", run), "takes a step"),
        (("--run", run, "--step", 1, "--window_len", 128), "knows the mixture"),
        (("--step", 1), "go with --run"),
    ):
        assert flame_mix(["trace", *map(str, words)]) == 2
        assert told in capsys.readouterr().err


def test_what_is_logged_of_a_step_s_losses_is_what_its_ranks_saw(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 15))
    scanned = printed(capsys, "trace", "--run", run, "--step", ":")
    for line in lines:
        of_step = [one for one in scanned if one["step"] == line["step"]]
        rows = line["highest_losses"]
        assert len(rows) == 3 and [row["loss"] for row in rows] == sorted((row["loss"] for row in rows), reverse=True)
        assert rows[0]["loss"] >= line["loss_metrics/global_avg_loss"]
        for row in rows:
            place = {name: row[name] for name in ("rank", "micro_step", "batch_row")}
            assert {one["k"] for one in of_step if place.items() <= one.items()} == set(range(*row["samples"]))
        tokens = {name: sum(one["num_tokens"] for one in of_step if one["source"] == name) for name in ("web", "code")}
        assert {name: line[f"tokens/{name}"] for name in tokens} == tokens
        losses = [line[f"loss/{name}"] for name in tokens if line[f"loss/{name}"] is not None]
        assert min(losses) - 1e-5 <= line["loss_metrics/global_avg_loss"] <= max(losses) + 1e-5


def test_a_spike_between_logged_steps_is_told_with_the_command_that_shows_its_texts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "a run"
    options = {"training__skip_nan_inf": "true", "metrics__log_freq": 10, "checkpoint__enable_checkpoint": "false"}
    with pytest.MonkeyPatch.context() as patch:
        poison_loss(patch, [18])
        assert flame_train(arguments(folder, run, **options)) == 0
    told = capsys.readouterr().err
    assert told.count("is a spike") == 1 and "the loss of step 18 is a spike: inf, the limit was " in told
    lines = read_metrics(run)
    assert [(line["step"], [spike["step"] for spike in line["loss_spikes"]]) for line in lines] == [
        *((1, []), (10, []), (20, [18])),
    ]
    (spike,) = lines[-1]["loss_spikes"]
    assert spike["loss"] is None and len(spike["rows"]) == 2  # as many as the step has
    program, *words = shlex.split(told.split("): ")[-1].splitlines()[0])
    assert program == "flame-mix"
    shown = printed(capsys, *words)
    for row in spike["rows"]:
        place = {"step": 18, "rank": 0, "micro_step": 0, "batch_row": row["batch_row"]}
        assert {one["k"] for one in shown if place.items() <= one.items()} == set(range(*row["samples"]))


def test_find_of_every_document_is_what_tracing_every_step_finds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scanned = printed(capsys, "trace", "--run", run, "--step", "1:")
    assert {one["step"] for one in scanned} == set(range(1, 15))
    found = [
        one
        for source in ("web", "code")
        for one in printed(capsys, "find", "--run", run, "--source", source, "--document", "0:")
    ]
    assert by_place(found, without={"epoch", "window"}) == by_place(scanned, without={"text"})
    assert {(one["source"], one["epoch"]) for one in found} >= {("web", 0), ("web", 1), ("code", 0)}
    assert found[0].keys() - {"epoch", "window"} == scanned[0].keys() - {"text"}

    places = {one["k"]: (one["epoch"], one["window"]) for one in found if one["step"] <= 11}  # of the first data
    first = read_segments(run)[0]["mixture_fingerprint"]
    mixture = run / f"mixture-{first}.json"
    for sample in printed(capsys, "samples", mixture, "--window_len", 64, "--count", len(places)):
        assert places[sample["k"]] == (sample["epoch"], sample["window"])

    for one in scanned[:: len(scanned) // 5]:
        alone = printed(capsys, "find", "--run", run, "--source", one["source"], "--document", one["document"])
        assert alone == [o for o in found if (o["source"], o["document"]) == (one["source"], one["document"])]
    rows = printed(capsys, "find", "--run", run, "--source_file", "train.jsonl", "--row", "7:9", "--row", "30")
    assert by_place(rows, without=set()) == by_place([o for o in found if o["row"] in (7, 8, 30)], without=set())


def test_trace_takes_stretches_of_steps_and_ranks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scanned = printed(capsys, "trace", "--run", run, "--step", ":")
    assert [one["step"] for one in scanned] == sorted(one["step"] for one in scanned)
    some = printed(capsys, "trace", "--run", run, "--step", "4:8", "--step", "12", "--rank", "1:")
    assert some == [one for one in scanned if one["step"] in (4, 5) and one["rank"] == 1]
    some = printed(capsys, "trace", "--run", run, "--step", "12:", "--step", ":3", "--rank", "0", "--rank", "1")
    assert some == [one for one in scanned if one["step"] >= 12] + [one for one in scanned if one["step"] < 3]
    for words, code, told in (
        (("--step", "6:9", "--rank", "0:2"), 2, "no such rank"),
        (("--step", "9:16"), 1, "has not taken this step"),
        (("--step", "20:"), 1, "has not taken this step"),
    ):
        assert flame_mix(["trace", "--run", str(run), *words, "--json"]) == code
        shown = capsys.readouterr()
        assert told in shown.err and shown.out == ""


def test_the_position_in_the_data_is_logged_and_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = read_status(run)["data"]
    scanned = printed(capsys, "trace", "--run", run, "--step", "12:")
    taken = {name: {one["k"] for one in scanned if one["source"] == name} for name in ("web", "code")}
    assert {name: source["consumed_samples"] for name, source in data["sources"].items()} == {
        name: len(ks) for name, ks in taken.items()
    }
    assert (data["data_segment"], data["consumed_samples"]) == (1, 3 * 24)
    assert (data["consumed_tokens"], data["remaining_tokens"]) == (3 * 24 * 64, 0)
    told = [line for line in (run.parent / "third.log").read_text().splitlines() if "data position: " in line]
    assert len(told) == 1 and "data segment 1, 0 samples (0 tokens) consumed, 4,608 tokens to come; web" in told[0]


def test_people_get_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "find", "--run", run, "--source", "web", "--document", 11)
    assert flame_mix(["find", "--run", str(run), "--source", "web", "--document", "11"]) == 0
    shown = capsys.readouterr()
    header, *rows = (line.split() for line in shown.out.splitlines())
    assert header == list(found[0])[: len(header)] and header[:4] == ["step", "rank", "micro_step", "batch_row"]
    assert rows == [[str(one[name]) for name in header] for one in found]
    times = {0: "nowhere", 1: "once"}.get(len(found), f"{len(found)} times")
    assert shown.err == f"flame-mix find: found {times} by step 14\n"
