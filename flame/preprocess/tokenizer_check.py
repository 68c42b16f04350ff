"""The tokenizer that lies in a corpus: tokenizer.json by its fingerprint, the files beside it by their checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flame.errors import TokenizerError
from flame.preprocess.problem import Problem, told
from flame.preprocess.records import checksum_of
from flame.preprocess.tokenizer import OWN_FILES
from flame.shards.fingerprint import tokenizer_fingerprint
from flame.shards.format import TOKENIZER_FOLDER
from flame.shards.manifest import TokenizerInfo

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_files(corpus: Path) -> dict[str, str]:
    """Return the checksum of each file that lies beside a corpus's tokenizer.json and belongs to it, by name."""
    folder = corpus / TOKENIZER_FOLDER
    return {name: checksum_of((folder / name).read_bytes()) for name in sorted(OWN_FILES) if (folder / name).is_file()}


def check_tokenizer_files(corpus: Path, sealed: Mapping[str, str]) -> Iterator[Problem]:
    """Yield which of those files are not as they were sealed; none is looked at where nothing was noted of them.

    Another tokenizer_config.json changes no token of the corpus, but may give a model that is exported another EOS.
    """
    if not sealed:
        return
    for name in sorted({*sealed, *OWN_FILES}):
        path = corpus / TOKENIZER_FOLDER / name
        try:
            found = checksum_of(path.read_bytes())
        except FileNotFoundError:
            if name in sealed:
                yield Problem(path=path, text="a file of the corpus is absent")
            continue
        except OSError as error:
            yield Problem(path=path, text=f"it cannot be read: {error.strerror}")
            continue
        if name not in sealed:
            yield Problem(path=path, text="the manifest does not name it")
        elif found != sealed[name]:
            yield Problem(path=path, text=f"its checksum is {found}, and the manifest says {sealed[name]}")


def check_tokenizer(corpus: Path, info: TokenizerInfo) -> tuple[Tokenizer | None, str | None]:
    """Return the corpus's tokenizer, if it is the manifest's own, else what is wrong with it."""
    from flame.shards.tokenizer import load_tokenizer, tokenizer_path

    try:
        found = tokenizer_fingerprint(
            tokenizer_path(corpus).read_bytes(),
            bos_id=info.bos_id,
            eos_id=info.eos_id,
            bos=info.bos,
            special_text=info.special_text,
        )
        if found != info.fingerprint:
            return None, f"its fingerprint is {found}, and the manifest says {info.fingerprint}"
        return load_tokenizer(corpus), None
    except FileNotFoundError:
        return None, "a file of the corpus is absent"
    except OSError as error:
        return None, f"it cannot be read: {error.strerror}"
    except TokenizerError as error:
        return None, told(error)
