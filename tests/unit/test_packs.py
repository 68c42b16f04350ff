"""Packs: no document that fits is cut, every token is in one pack, once, and all that is told of samples holds."""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.cli.mix import main as flame_mix
from flame.cli.preprocess import main
from flame.errors import CorpusError, MixtureError, UsageError
from flame.preprocess import pack_groups
from flame.preprocess.best_fit import best_fit_decreasing
from flame.preprocess.pack import pack_split
from flame.preprocess.pack_groups import cut_into_pieces
from flame.sampling.dataset import MixtureDataset
from flame.sampling.geometry import BatchGeometry
from flame.sampling.mixture_file import mixture_to_json, read_mixture, write_mixture
from flame.sampling.packing import IGNORE_INDEX, pack
from flame.sampling.recipe import read_recipe
from flame.sampling.sampler import Sampler
from flame.sampling.sources import mixture_of_corpora
from flame.shards.packed import open_packed
from flame.shards.packs import packs_folder
from flame.shards.reader import Corpus
from tests.corpora import make_corpus
from tests.damage import findings, poke

N = 16
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def documents_of_lengths(lengths: list[int]) -> list[list[int]]:
    """Documents of so many tokens with their EOS; each token is another one, so that it tells where it came from."""
    firsts = np.cumsum([0, *lengths]).tolist()
    return [[1 + first + i for i in range(length - 1)] for first, length in zip(firsts, lengths, strict=False)]


@pytest.fixture
def corpus(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    """Documents of 1 to 60 tokens over several shards, packed for 16 in several groups."""
    lengths = [1 + (7 * i) % 60 for i in range(90)]
    folder = make_corpus(
        tmp_path / "web", documents_of_lengths(lengths), vocab_size=5000, tokenizer=tiny_tokenizer, shard_tokens=300
    )
    with pytest.MonkeyPatch.context() as patch:
        small_groups(patch)
        assert main(["pack", str(folder), f"--context_len={N}", "--num_workers=1"]) == 0
    return folder


def small_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pack_groups, "GROUP_TOKENS", 400)
    patch.setattr(pack_groups, "GROUP_PACKS", 1)


def best_fit_one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """The room left in each bin, sorted, as the definition has it: the fullest bin that still takes a piece."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        room = rooms.pop(place) if place < len(rooms) else capacity
        insort(rooms, room - length)
    return rooms


# ---- the packing


@given(LENGTHS, st.sampled_from([60, 61, 100, 1023, 1024, 3000]))
def test_best_fit_decreasing_is_what_its_definition_says(lengths: list[int], capacity: int) -> None:
    bins, num_bins = best_fit_decreasing(np.array(lengths), capacity)
    fills = np.bincount(bins, weights=lengths, minlength=num_bins).astype(int)
    assert sorted((capacity - fills).tolist()) == best_fit_one_by_one(lengths, capacity)
    assert num_bins == 1 or sum(sorted(fills.tolist())[:2]) > capacity  # or one bin would have taken both


@given(LENGTHS, st.integers(1, 70))
def test_pieces_are_whole_documents_or_cut_from_their_start(lengths: list[int], context_len: int) -> None:
    stops = np.cumsum(lengths)
    starts, sizes = cut_into_pieces(stops - lengths, stops, context_len)
    assert np.array_equal(starts + sizes, [*starts[1:], stops[-1]]) and starts[0] == 0  # every token once
    cut = set(starts.tolist()) - {0, *stops.tolist()}
    assert all(any(first < c < stop for first, stop in zip(stops - lengths, stops, strict=True)) for c in cut)
    for first, length in zip((stops - lengths).tolist(), lengths, strict=True):
        inside = [c - first for c in sorted(cut) if first < c < first + length]
        assert inside == list(range(context_len, length, context_len))


# ---- the index


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, group_tokens=st.integers(1, 500))
def test_every_token_is_in_one_pack_and_no_document_that_fits_is_cut(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], group_tokens: int
) -> None:
    folder = make_corpus(
        tmp_path_factory.mktemp("p") / "web",
        documents_of_lengths(lengths),
        vocab_size=5000,
        shard_tokens=200,
        provenance=False,
    )
    corpus = Corpus.open(folder)
    split = corpus.split("train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_groups, "GROUP_TOKENS", group_tokens)
        patch.setattr(pack_groups, "GROUP_PACKS", 1)
        info = pack_split(split, N, packs_folder(folder, "train", N), num_workers=1)
    packed = open_packed(corpus, "train", N)
    stretches = [stretch for p in range(info.num_packs) for stretch in packed.stretches(p * N)]
    ends = {0, *split.ends_between(0, split.num_tokens).tolist()}
    stretches.sort()
    assert [stop for _, stop in stretches] == [*(start for start, _ in stretches[1:]), split.num_tokens]
    for document, length in enumerate(lengths):
        first, stop = split.document_bounds(document)
        if length <= N:
            assert (first, stop) in stretches
    assert {start for start, _ in stretches if start not in ends} == {
        first + cut
        for first, stop in (split.document_bounds(d) for d in range(len(lengths)))
        for cut in range(N, stop - first, N)
    }
    assert info.num_packs <= 2 * -(-split.num_tokens // N) + 2 * info.num_groups  # more than half full but one a group
    pieces = packed.find_pieces(np.arange(len(lengths)))
    for which, pack_number, start, num_tokens in zip(
        pieces.which, pieces.window, pieces.start, pieces.num_tokens, strict=True
    ):
        tokens, _, _ = packed.view_window(int(pack_number) * N, N)
        ids = split.read(*split.document_bounds(int(which)))
        assert tokens[start : start + num_tokens].tolist() in [
            ids[i : i + num_tokens].tolist() for i in range(0, 60, N)
        ]
    assert findings_of_packs(folder) == []


def findings_of_packs(folder: Path) -> list[str]:
    return [text for text in findings(folder) if ".packs" in text]


def test_any_number_of_processes_gives_the_same_bytes(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = packs_folder(corpus, "train", N)
    small_groups(monkeypatch)  # groups are made here, and packed there
    before = {path.name: path.read_bytes() for path in folder.glob("*.npy")}
    assert len(before) == 4 and json.loads((folder / "manifest.json").read_bytes())["num_groups"] > 3
    for workers in (2, 3):
        assert main(["pack", str(corpus), f"--context_len={N}", f"--num_workers={workers}", "--overwrite"]) == 0
        assert {path.name: path.read_bytes() for path in folder.glob("*.npy")} == before


def test_an_index_that_is_there_is_kept_and_one_of_another_corpus_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(corpus), f"--context_len={N}", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "is there already" in err and json.loads(out)["best_fit"]["cut_documents_that_fit"] == 0
    other = make_corpus(tmp_path / "other", [[1, 2, 3]] * 9)
    packs_folder(corpus, "train", N).parent.rename(tmp_path / "other.packs")
    assert main(["pack", str(other), f"--context_len={N}"]) == 1
    assert "of another corpus" in capsys.readouterr().err
    with pytest.raises(CorpusError, match="of another corpus"):
        open_packed(Corpus.open(other), "train", N)
    with pytest.raises(CorpusError, match=r"not packed for 16 tokens.*flame-preprocess pack"):
        open_packed(Corpus.open(corpus), "train", N)


def test_verify_and_check_name_what_is_damaged(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = mixture_of_corpora([corpus], None, 1, packed_len=N)
    write_mixture(tmp_path / "mix.json", mixture)
    assert findings_of_packs(corpus) == [] and flame_mix(["check", str(tmp_path / "mix.json"), "--full"]) == 0
    folder = packs_folder(corpus, "train", N)
    poke(folder / "starts.npy", 2, 0, "<u8")
    assert len(findings_of_packs(corpus)) == 1 and "../web.packs/train-16/starts.npy" in findings_of_packs(corpus)[0]
    capsys.readouterr()
    assert flame_mix(["check", str(tmp_path / "mix.json"), "--full"]) == 3
    assert "starts.npy" in capsys.readouterr().out
    (folder / "lengths.npy").unlink()
    assert flame_mix(["check", str(tmp_path / "mix.json")]) == 3
    with pytest.raises(CorpusError, match=r"lengths.npy.*pack CORPUS"):
        MixtureDataset(mixture, window_len=N)[0]


# ---- samples


def test_a_pack_is_documents_and_then_padding_without_labels(corpus: Path) -> None:
    mixture = mixture_of_corpora([corpus], None, 1, packed_len=N)
    split = open_packed(Corpus.open(corpus), "train", N)
    ks = np.arange(split.packs.num_packs)
    geometry = BatchGeometry(
        seq_len=N, window_len=N, context_len=N, micro_batch=len(ks), accumulation=1, dp_size=1, varlen=True
    )
    batch = pack(Sampler(mixture, [split], N), [split], ks.reshape(-1, 1), geometry)
    labels, ids = batch.labels.reshape(-1, N), batch.input_ids.reshape(-1, N)
    # an epoch: each token but the first of each document is a label once, those behind a cut too
    tokens = split.read(0, split.num_tokens)
    ends = split.ends_between(0, split.num_tokens)
    following = np.delete(tokens, [0, *ends[:-1].tolist()])
    assert sorted(labels[labels != IGNORE_INDEX].tolist()) == sorted(following.tolist())
    assert list(batch.labels_by_sample) == np.count_nonzero(labels != IGNORE_INDEX, axis=1).tolist()
    assert batch.num_labels == len(following)
    assert batch.cu_seqlens is not None and batch.cu_seqlens[-1] == batch.input_ids.size
    begins = set(batch.cu_seqlens[:-1].tolist())
    assert begins == set(np.flatnonzero(batch.positions == 0).tolist())
    packs = (Sampler(mixture, [split], N).locate(ks).offset // N).tolist()
    assert sorted(packs) == ks.tolist()  # each once an epoch
    num_padding = 0
    for row, number in enumerate(packs):
        lengths = [stop - start for start, stop in split.stretches(number * N)]
        padding = N - sum(lengths)
        num_padding += padding
        assert padding == split.num_padding(number * N)
        assert not ids[row, N - padding :].any() and (labels[row, N - padding :] == IGNORE_INDEX).all()
        assert {row * N + sum(lengths[:i]) for i in range(len(lengths) + (padding > 0))} <= begins
    assert num_padding == len(ks) * N - split.num_tokens > 0


def test_trace_names_the_documents_of_packs_and_find_their_samples(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "mix.json"
    words = ["--packing=best_fit", f"--context_len={N}", f"--output={manifest}"]
    assert flame_mix(["create", f"--source=web={corpus}:1", *words]) == 0
    assert "sampled by packs of 16 tokens: web" in capsys.readouterr().out
    mixture = read_mixture(manifest)
    split = Corpus.open(corpus).split("train")
    num_samples = 2 * mixture.sources[0].num_tokens // N  # two epochs
    common = [str(manifest), f"--window_len={N}", "--json"]

    def printed(*words: str) -> list[dict[str, Any]]:
        assert flame_mix(list(words)) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    traced = printed("trace", *common, f"--sample=0:{num_samples}", "--ids")
    samples = MixtureDataset(mixture, window_len=N).read(range(num_samples))
    for part in traced:
        ids = samples[part["k"]]["input_ids"][part["start"] : part["start"] + part["num_tokens"]].tolist()
        whole = split.read(*split.document_bounds(part["document"])).tolist()
        assert part["ids"] == ids and ids in [whole[i : i + len(ids)] for i in range(0, len(whole), N)]
        assert (part["source_file"], part["row"]) == ("train.jsonl", part["document"])
    found = printed("find", *common, f"--tokens={num_samples * N}", "--source=web", "--document=0:")
    place = ("k", "document", "start", "num_tokens")
    assert sorted(tuple(part[name] for name in place) for part in found) == sorted(
        tuple(part[name] for name in place) for part in traced
    )
    first = printed("samples", *common, "--count=3")
    assert [sample["first_token_id"] for sample in first] == [samples[k]["input_ids"][0] for k in range(3)]


def test_the_manifest_says_what_is_packed_and_an_old_reader_refuses_it(corpus: Path, tmp_path: Path) -> None:
    packed, windows = (mixture_of_corpora([corpus], None, 1, packed_len=length) for length in (N, None))
    assert packed.fingerprint != windows.fingerprint
    write_mixture(tmp_path / "mix.json", packed)
    value = json.loads((tmp_path / "mix.json").read_bytes())
    assert value["format_version"] == 2 and value["sources"][0]["packing"] == "best_fit"
    assert read_mixture(tmp_path / "mix.json") == packed and "packing" not in mixture_to_json(windows)["sources"][0]
    recipe = tmp_path / "mix.toml"
    recipe.write_text(
        '[sources.web]\ncorpus = "web"\npacking = "best_fit"\ncontext_len = 16\n[[stages]]\nweights = "natural"\n'
    )
    assert read_recipe(recipe, data_seed=1).mixture.fingerprint == packed.fingerprint
    with pytest.raises(MixtureError, match=r"window_len 32, packs of 16 tokens"):
        MixtureDataset(packed, window_len=32)
    with pytest.raises(UsageError, match=r"needs varlen"):
        MixtureDataset(packed, window_len=N, varlen=False)
