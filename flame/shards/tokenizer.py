"""The tokenizer that a corpus carries: its ids back to text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from flame.errors import TokenizerError
from flame.shards.format import TOKENIZER_FOLDER
from flame.shards.manifest import TokenizerInfo


def tokenizer_path(corpus: Path) -> Path:
    """Return where a corpus keeps its tokenizer.json."""
    return corpus / TOKENIZER_FOLDER / "tokenizer.json"


def load_tokenizer(corpus: Path) -> Tokenizer:
    """Load the tokenizer of a corpus, for text as plain text; `TokenizerError` where there is none."""
    path = tokenizer_path(corpus)
    if not path.is_file():
        raise TokenizerError(
            "the corpus has lost its tokenizer",
            where=path,
            fix="Restore the tokenizer folder from a copy, or build the corpus again",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise TokenizerError("the corpus's tokenizer cannot be loaded", where=path, got=error) from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def text_can_give(tokenizer: Tokenizer, token_id: int) -> bool:
    """Tell whether the text of a token, as plain text, can become that token.

    No for a special token of most tokenizers; yes for a token that is not special, such as a line feed used as EOS, and
    for models that find their own control tokens in a text.
    """
    text = tokenizer.id_to_token(token_id)
    if text is None:
        return False
    decoded = tokenizer.decode([token_id], skip_special_tokens=False)
    texts = [
        f"{before}{middle}{after}"
        for middle in (text, decoded)
        for before, after in (("", ""), ("a ", " b"), ("a", "b"))
    ]
    return any(token_id in tokenizer.encode(piece, add_special_tokens=False).ids for piece in texts)


def document_text(tokenizer: Tokenizer, tokens: Sequence[int], info: TokenizerInfo) -> str:
    """Return a document's text: its tokens without the EOS that ends it and the BOS that may begin it.

    `tokens` are whole, or a part of a document; nothing else is left out, whatever it looks like.
    """
    return str(tokenizer.decode(_text_tokens(tokens, info), skip_special_tokens=False))


def document_texts(tokenizer: Tokenizer, documents: Sequence[Sequence[int]], info: TokenizerInfo) -> list[str]:
    """Return `document_text` of each; the tokenizer's threads share the work."""
    return list(tokenizer.decode_batch([_text_tokens(tokens, info) for tokens in documents], skip_special_tokens=False))


def _text_tokens(tokens: Sequence[int], info: TokenizerInfo) -> list[int]:
    start = int(info.bos == "always" and len(tokens) > 0 and tokens[0] == info.bos_id)
    stop = len(tokens) - int(len(tokens) > start and tokens[-1] == info.eos_id)
    return list(tokens[start:stop])
