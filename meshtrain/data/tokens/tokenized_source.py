"""Sources that are tokenized already: a token file of meshtrain, or a pair of Megatron-LM."""

from pathlib import Path

from meshtrain.data.cache import Cache
from meshtrain.data.tokens.megatron import is_megatron, open_megatron
from meshtrain.data.tokens.token_file import TRAIN, TokenFile, is_token_file, open_checked
from meshtrain.data.tokens.tokenizer import TokenizerFiles
from meshtrain.errors import DataError


def is_tokenized(source: str) -> bool:
    """Return whether a source names tokens and not text.

    They may be damaged, or not match the tokenizer.

    Args:
        source: an absolute path: the directory of a token file; either file of a Megatron-LM pair,
            or their common name without endings; or the directory that `meshtrain tokenize` wrote,
            which holds one of these as `train`.
    """
    path = Path(source)
    return is_token_file(path) or is_megatron(path) or holds_several(path)


def open_token_file(source: str, tokenizer: TokenizerFiles, cache: Cache) -> TokenFile:
    """Open a source that `is_tokenized`, as memory maps.

    What must be computed for it is kept in the cache.

    Raises:
        DataError: if it is damaged, or was written with another tokenizer.
    """
    path = Path(source)
    if is_token_file(path):
        return open_checked(path, tokenizer, cache)
    if is_megatron(path):
        return open_megatron(path, tokenizer, cache)
    raise DataError(f"{path} holds several token files", f'name one of them, such as "{path / TRAIN}"')


def holds_several(path: Path) -> bool:
    """Return whether a directory holds a token file or pair `train`."""
    return is_token_file(path / TRAIN) or is_megatron(path / TRAIN)
