"""Opening what is tokens already: a token file of meshtrain, or a pair of Megatron-LM."""

from pathlib import Path

from meshtrain.data.cache import Cache
from meshtrain.data.tokens.megatron import is_megatron, open_megatron
from meshtrain.data.tokens.token_file import TRAIN, TokenFile, is_token_file, open_checked
from meshtrain.data.tokens.tokenizer import TokenizerFiles
from meshtrain.errors import DataError


def is_tokenized(source: str) -> bool:
    """Tell whether a source names tokens and not text: they may be damaged, or not fit the tokenizer.

    Args:
        source: an absolute path: the directory of a token file; either file of a Megatron-LM pair, or its name without
            .bin and .idx; or what `meshtrain tokenize` wrote, a directory that holds either as `train`.
    """
    path = Path(source)
    return is_token_file(path) or is_megatron(path) or holds_several(path)


def open_token_file(source: str, tokenizer: TokenizerFiles, cache: Cache) -> TokenFile:
    """Open what `is_tokenized`, as memory maps; what has to be read for that is read once, and remembered in the cache.

    Raises:
        DataError: if it is damaged, or was written with another tokenizer.
    """
    path = Path(source)
    if is_token_file(path):
        return open_checked(path, tokenizer, cache)
    if is_megatron(path):
        return open_megatron(path, tokenizer, cache)
    raise DataError(f'{path} holds several token files; name one of them, such as "{path / TRAIN}"')


def holds_several(path: Path) -> bool:
    """Tell whether a directory is what `meshtrain tokenize` wrote, with a token file or pair `train` in it."""
    return is_token_file(path / TRAIN) or is_megatron(path / TRAIN)
