"""The demo's two sources, out of the running interpreter's standard library: code, and docstrings; and their tokenizer.

A docstring is cut out of the code that it documents, so that the two sources share no text and neither's validation
loss profits from the other.
"""

from __future__ import annotations

import ast
import inspect
import json
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

EOS = "<|endoftext|>"
SHORTEST_DOCSTRING = 40
# Tests and installed packages are not the library; the other folders hold tables rather than code.
SKIPPED_FOLDERS = frozenset(
    ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)
SKIPPED_NAMES = "_sysconfigdata"


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module's code without its docstrings."""

    path: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Docstring:
    """One docstring, dedented, and where it stands."""

    path: str
    name: str
    line: int
    text: str


def library_folder() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def module_paths(library: Path) -> list[Path]:
    """Return the library's modules, relative to it, in an order that does not depend on the file system."""
    paths = (path.relative_to(library) for path in library.rglob("*.py"))
    kept = (
        path
        for path in paths
        if SKIPPED_FOLDERS.isdisjoint(path.parts[:-1]) and not path.name.startswith(SKIPPED_NAMES)
    )
    return sorted(kept, key=lambda path: path.as_posix())


def read_library(library: Path, paths: Iterable[Path]) -> tuple[list[Module], list[Docstring]]:
    """Split every module that parses into its code and its docstrings; code that is empty without them is left out."""
    modules: list[Module] = []
    docstrings: list[Docstring] = []
    for path in paths:
        try:
            with tokenize.open(library / path) as file:
                source = file.read()
            code, found = split_module(source, path=path.as_posix())
        except (SyntaxError, UnicodeDecodeError):
            continue
        if code.strip():
            modules.append(Module(path=path.as_posix(), text=code))
        docstrings.extend(found)
    return modules, docstrings


def split_module(source: str, *, path: str) -> tuple[str, list[Docstring]]:
    """Return the code without its docstrings, and the docstrings worth a document.

    A docstring that is a body's only statement becomes `...`; one that shares a line with code stays where it is and is
    no document. Raises `SyntaxError` where the source does not parse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    lines = source.split("\n")
    docstrings: list[Docstring] = []
    replaced: dict[int, str] = {}
    for name, body in _bodies(tree, ""):
        statement = body[0]
        if not _is_docstring(statement) or not _stands_alone(statement, lines):
            continue
        first, last = statement.lineno - 1, statement.end_lineno
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        replaced[first] = f"{indent}...\n" if len(body) == 1 else ""
        replaced.update(dict.fromkeys(range(first + 1, last), ""))
        text = inspect.cleandoc(statement.value.value).strip()
        if len(text) >= SHORTEST_DOCSTRING:
            docstrings.append(Docstring(path=path, name=name or "module", line=statement.lineno, text=text))
    code = "".join(replaced.get(number, f"{line}\n") for number, line in enumerate(lines))
    return code.strip("\n") + "\n", docstrings


def _bodies(node: ast.AST, name: str) -> Iterator[tuple[str, Sequence[ast.stmt]]]:
    """Yield (dotted name, statements) of the module and of every class and function in it, in order of appearance."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if not isinstance(node, ast.Module):
            name = f"{name}.{node.name}" if name else node.name
        if node.body:
            yield name, node.body
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from _bodies(child, name)


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _stands_alone(statement: ast.stmt, lines: Sequence[str]) -> bool:
    # ast counts columns in UTF-8 bytes.
    before = lines[statement.lineno - 1].encode()[: statement.col_offset]
    after = lines[statement.end_lineno - 1].encode()[statement.end_col_offset :]
    return not before.strip() and not after.strip()


def write_code(path: Path, modules: Sequence[Module]) -> None:
    """Write one JSON object a module, in order."""
    with open(path, "w", encoding="utf-8") as file:
        for module in modules:
            file.write(json.dumps({"text": module.text, "path": module.path}, ensure_ascii=False) + "\n")


def write_docstrings(path: Path, docstrings: Sequence[Docstring]) -> None:
    """Write a parquet file with a row a docstring, in order."""
    columns = {name: [getattr(doc, name) for doc in docstrings] for name in ("text", "path", "name", "line")}
    pq.write_table(pa.table(columns), path, row_group_size=1000, compression="zstd")


def train_tokenizer(folder: Path, texts: Iterable[str], *, vocab_size: int) -> int:
    """Train a byte-level BPE tokenizer, write its Hugging Face folder, and return its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer.get_vocab_size()
