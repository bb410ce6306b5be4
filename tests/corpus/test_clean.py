"""Cleaning repairs text and drops documents with a reason."""

import pytest
from datatrove.data import Document
from tokenizers import Tokenizer, models, pre_tokenizers

from meshtrain.config.corpus import CleanConfig
from meshtrain.corpus.steps.clean import build_filter, check_cleaning
from meshtrain.errors import DataError

ENGLISH = "It was a bright cold day in April, and the clocks were striking thirteen when he came home. " * 3
GERMAN = "Als er eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett verwandelt. " * 3


def cleaned(text: str, **settings: object) -> tuple[str | None, Document]:
    document = Document(text=text, id="a")
    return build_filter(CleanConfig(**{"minimum_tokens": 0, **settings}))(document), document


def test_text_is_repaired_unless_switched_off():
    assert cleaned("schÃ¶n &amp; gut")[1].text == "schön & gut"
    assert cleaned("schÃ¶n", fix_text=False)[1].text == "schÃ¶n"


def test_documents_in_other_or_unsure_languages_are_dropped():
    assert cleaned(ENGLISH) == (None, Document(text=ENGLISH, id="a"))
    assert cleaned(ENGLISH, languages=["en"]) == (None, Document(text=ENGLISH, id="a", metadata={"language": "en"}))
    assert cleaned(GERMAN, languages=["en"])[0] == "other language"
    assert cleaned(GERMAN, languages=["en", "de"])[0] is None
    assert cleaned(GERMAN, languages=["de"], minimum_confidence=0.999999)[0] == "unsure language"


def test_the_language_is_identified_from_the_beginning():
    assert cleaned(ENGLISH * 10 + GERMAN * 100, languages=["en"])[0] is None


def test_documents_with_too_few_words_are_dropped():
    assert cleaned("one two three\n", minimum_tokens=3)[0] is None
    assert cleaned("one two\n", minimum_tokens=3)[0] == "too short"
    assert cleaned("", minimum_tokens=0)[0] is None


def test_documents_with_too_few_tokens_are_dropped(tmp_path):
    vocabulary = {"a": 0, "b": 1, "?": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    for path in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        assert cleaned("ab", minimum_tokens=3, tokenizer=path)[0] == "too short"
        assert cleaned("abc", minimum_tokens=3, tokenizer=path)[0] is None
        assert cleaned("ab" * 1000, minimum_tokens=3, tokenizer=path)[0] is None


def test_tokens_after_a_very_long_token_are_counted(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    assert cleaned(f"{'x' * 1000} b c", minimum_tokens=3, tokenizer=str(tmp_path))[0] is None
    assert cleaned(f"{'x' * 1000} b", minimum_tokens=3, tokenizer=str(tmp_path))[0] == "too short"


def test_boilerplate_is_dropped_or_removed():
    assert cleaned("Please enable JavaScript.", remove_boilerplate=True)[0] == "boilerplate"
    assert cleaned("a  b", remove_boilerplate=True)[1].text == "a b"


def test_unknown_languages_and_tokenizers_are_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"^clean.languages: klingon cannot be identified; use one of ace, af, am, an, "
    ):
        check_cleaning(CleanConfig(languages=["en", "klingon"]))
    with pytest.raises(DataError, match=f"^clean.tokenizer: there is no {tmp_path}/tokenizer.json; name a local "):
        check_cleaning(CleanConfig(tokenizer=str(tmp_path)))


def test_characters_count_as_words_in_scripts_without_spaces():
    assert cleaned("網格是一組進程", minimum_tokens=7)[0] is None
    assert cleaned("網格是一組進程", minimum_tokens=9)[0] == "too short"
    assert cleaned("กริดของโปรเซส", minimum_tokens=10)[0] is None
