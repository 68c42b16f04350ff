"""The library as docs/python.md shows it: every block runs, the order is the trainer's, the names stay."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers import LlamaConfig, LlamaForCausalLM

from flame.errors import CorpusError
from flame.preprocess.pack import PackOptions, pack
from flame.sampling.dataset import MixtureDataset, rank_samples
from flame.sampling.mixture_file import write_mixture
from flame.sampling.sources import mixture_of_corpora
from flame.shards.reader import Corpus
from flame.train.dataset import TorchDataset, collate
from tests.builds import build_here, some_texts, texts_of, write_jsonl
from tests.runs import LLAMA, PROJECT

PAGE = (PROJECT / "docs/python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
# What others build on: a change here is a change of the interface, and goes into the changelog.
INTERFACE = {
    "flame.shards.reader": {
        "Corpus": "path manifest | fingerprint open split tokenizer tokenizer_folder",
        "Split": "corpus name info | advise_window check document document_bounds document_containing ends_between"
        " locate provenance read read_into view_window",
        "Document": "number ids text provenance |",
    },
    "flame.shards.token_bytes": {"token_bytes": "tokenizer info"},
    "flame.sampling.mixture": {
        "Mixture": "data_seed sources stages parents | changes_from fingerprint format_version"
        " is_continuation_of packed_len",
        "Source": "name corpus split fingerprint num_tokens max_epochs packs | content",
        "Stage": "start_tokens weights |",
    },
    "flame.sampling.mixture_file": {
        "read_mixture": "path overrides",
        "write_mixture": "path mixture",
        "mixture_to_json": "mixture folder",
    },
    "flame.sampling.sources": {
        "mixture_of_corpora": "corpora weights data_seed packed_len",
        "open_mixture": "mixture",
    },
    "flame.sampling.dataset": {
        "MixtureDataset": "mixture window_len context_len varlen num_samples | open read window_len",
        "Sample": "input_ids labels positions cu_seqlens |",
        "rank_samples": "rank world_size batch_size gradient_accumulation_steps consumed_samples num_samples",
        "samples_per_step": "world_size batch_size gradient_accumulation_steps",
    },
    "flame.train.dataset": {
        "TorchDataset": "samples |",
        "RankSampler": "dataset rank world_size batch_size gradient_accumulation_steps consumed_samples |",
        "collate": "samples",
        "collate_packed": "samples",
    },
}
ALL_OF = ("flame.shards.token_bytes", "flame.sampling.dataset", "flame.train.dataset")  # nothing else is public there


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("library")
    for seed, name in enumerate(("web", "code")):
        texts = write_jsonl(folder / f"{name}.jsonl", some_texts(200, seed=seed))
        build_here(texts, folder / "corpora" / name, tiny_tokenizer)
    mixture = mixture_of_corpora([folder / "corpora/web", folder / "corpora/code"], [0.7, 0.3], 42)
    write_mixture(folder / "mix.json", mixture)
    assert pack(PackOptions(corpus=folder / "corpora/web", context_len=512)) == 0
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def samples_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The samples that were read, in order."""
    read, seen = MixtureDataset.read, []

    def noted(dataset: MixtureDataset, ks: Any) -> Any:
        seen.extend(ks)
        return read(dataset, ks)

    monkeypatch.setattr(MixtureDataset, "read", noted)
    yield seen


def test_every_block_of_the_page_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, samples_read: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    space: dict[str, Any] = {"__name__": "page"}
    read_by_block = []
    for block in BLOCKS:
        samples_read.clear()
        if "import lightning" in block and importlib.util.find_spec("lightning") is None:
            compile(block, "docs/python.md", "exec")
            continue
        exec(compile(block, "docs/python.md", "exec"), space)
        read_by_block.append(list(samples_read))
    assert read_by_block[:4] == [[], [1_000_000], [7], []]
    assert read_by_block[4] == [*range(12), *range(4), *range(4, 12)]  # straight; stopped after one step, and resumed
    # the loader of the Trainer reads one batch ahead
    whole, resumed = [0, 1, 2, 3], [2, 3]
    first, again = split_at_second_start(read_by_block[5])
    assert first[:4] == whole and again[:2] == resumed and max(first + again) < 8
    assert read_by_block[6][:2] == resumed
    assert len(read_by_block) == 7 or read_by_block[7][:4] == whole  # Lightning's, where there is one


def split_at_second_start(ks: list[int]) -> tuple[list[int], list[int]]:
    turn = next(i for i in range(1, len(ks)) if ks[i] < ks[i - 1])
    return ks[:turn], ks[turn:]


def test_a_document_by_its_number(folder: Path) -> None:
    split = Corpus.open(folder / "corpora/web").split("train")
    texts = texts_of(folder / "corpora/web")
    lines = (folder / "web.jsonl").read_bytes()
    for number in (0, 7, split.num_documents - 1):
        document = split.document(number)
        assert (document.number, document.text) == (number, texts[number])
        assert document.ids[-1] == split.corpus.manifest.tokenizer.eos_id
        line = lines[document.provenance["row"] :].split(b"\n", 1)[0]  # of jsonl, row is where the line begins
        assert json.loads(line)["text"] == document.text
    with pytest.raises(CorpusError, match="no such document"):
        split.document(split.num_documents)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_accelerate_deals_the_ranks_what_the_trainer_does(accumulation: int) -> None:
    """As the Hugging Face Trainer's ranks are dealt batches of a sequential order."""
    whole = BatchSampler(range(6 * 4 * accumulation), batch_size=3, drop_last=False)
    for rank in range(2):
        batches = BatchSamplerShard(whole, num_processes=2, process_index=rank)
        order = rank_samples(
            rank=rank,
            world_size=2,
            batch_size=3,
            gradient_accumulation_steps=accumulation,
            num_samples=24 * accumulation,
        )
        assert [k for batch in batches for k in batch] == list(order)


def test_transformers_keeps_documents_apart_as_the_page_says(folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}, use_cache=False))
    samples = MixtureDataset.open(folder / "mix.json", window_len=128)
    chosen = next(k for k in range(100) if len(samples[k]["cu_seqlens"]) > 3)
    dataset = TorchDataset(samples)
    batch = collate([dataset[chosen], dataset[0]])
    output = model(**batch)
    cuts = samples[chosen]["cu_seqlens"].tolist()
    for start, stop in itertools.pairwise(cuts):
        alone = model(batch["input_ids"][:1, start:stop]).logits
        torch.testing.assert_close(output.logits[:1, start:stop], alone, atol=1e-5, rtol=1e-5)
    logits, labels = output.logits.flatten(0, 1), batch["labels"].flatten()
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(logits, labels))


@pytest.mark.parametrize("module", INTERFACE)
def test_the_names_and_parameters_stay(module: str) -> None:
    loaded = importlib.import_module(module)
    found = {name: surface(getattr(loaded, name)) for name in INTERFACE[module]}
    assert found == INTERFACE[module]
    if module in ALL_OF:
        own = {n for n, v in vars(loaded).items() if getattr(v, "__module__", "") == module and not n.startswith("_")}
        assert own == set(INTERFACE[module])
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{module}`"))
    assert re.findall(r"`(\w+)`", row.split("|")[2]) == list(INTERFACE[module])
    assert all(inspect.getdoc(getattr(loaded, name)) for name in INTERFACE[module])


def surface(thing: Any) -> str:
    """Parameters of a function, or of a class's constructor, then its public methods and properties."""
    fields = getattr(thing, "__annotations__", {}) if getattr(thing, "__total__", False) else None
    parameters = " ".join(fields if fields is not None else inspect.signature(thing).parameters)
    if not inspect.isclass(thing):
        return parameters
    methods = [] if fields is not None else sorted(name for name in vars(thing) if is_method(thing, name))
    return f"{parameters} | {' '.join(methods)}".rstrip()


def is_method(kind: type, name: str) -> bool:
    return not name.startswith("_") and name not in getattr(kind, "__dataclass_fields__", {})
