"""Cleaning: which documents are dropped, and why."""

import pytest
from datatrove.data import Document
from tokenizers import Tokenizer, models, pre_tokenizers

from meshtrain.config.corpus import CleanConfig
from meshtrain.corpus.steps.clean import build_filter, check_cleaning
from meshtrain.errors import DataError

ENGLISH = "It was a bright cold day in April, and the clocks were striking thirteen when he came home. " * 3
GERMAN = "Als er eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett verwandelt. " * 3


def judged(text: str, **words: object) -> tuple[str | None, Document]:
    document = Document(text=text, id="a")
    return build_filter(CleanConfig(**{"minimum_tokens": 0, **words}))(document), document


def test_text_is_mended_if_wanted():
    assert judged("schÃ¶n &amp; gut")[1].text == "schön & gut"
    assert judged("schÃ¶n", fix_text=False)[1].text == "schÃ¶n"


def test_languages():
    assert judged(ENGLISH) == (None, Document(text=ENGLISH, id="a"))
    assert judged(ENGLISH, languages=["en"]) == (None, Document(text=ENGLISH, id="a", metadata={"language": "en"}))
    assert judged(GERMAN, languages=["en"])[0] == "other language"
    assert judged(GERMAN, languages=["en", "de"])[0] is None
    assert judged(GERMAN, languages=["de"], minimum_confidence=0.999999)[0] == "unsure language"


def test_only_the_beginning_tells_the_language():
    assert judged(ENGLISH * 10 + GERMAN * 100, languages=["en"])[0] is None


def test_words_are_counted():
    assert judged("one two three\n", minimum_tokens=3)[0] is None
    assert judged("one two\n", minimum_tokens=3)[0] == "too short"
    assert judged("", minimum_tokens=0)[0] is None


def test_tokens_of_a_tokenizer_are_counted(tmp_path):
    vocabulary = {"a": 0, "b": 1, "?": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    for path in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        assert judged("ab", minimum_tokens=3, tokenizer=path)[0] == "too short"
        assert judged("abc", minimum_tokens=3, tokenizer=path)[0] is None
        assert judged("ab" * 1000, minimum_tokens=3, tokenizer=path)[0] is None


def test_a_text_whose_tokens_are_long_is_counted_to_its_end(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    assert judged(f"{'x' * 1000} b c", minimum_tokens=3, tokenizer=str(tmp_path))[0] is None
    assert judged(f"{'x' * 1000} b", minimum_tokens=3, tokenizer=str(tmp_path))[0] == "too short"


def test_boilerplate():
    assert judged("Please enable JavaScript.", remove_boilerplate=True)[0] == "boilerplate"
    assert judged("a  b", remove_boilerplate=True)[1].text == "a b"


def test_unknown_words_are_told_before_any_work(tmp_path):
    with pytest.raises(DataError, match=r"^clean.languages: klingon cannot be identified; known are ace, af, am, an, "):
        check_cleaning(CleanConfig(languages=["en", "klingon"]))
    with pytest.raises(DataError, match=f"^clean.tokenizer: there is no {tmp_path}/tokenizer.json; name a local "):
        check_cleaning(CleanConfig(tokenizer=str(tmp_path)))


def test_a_script_without_spaces_has_characters_for_words():
    assert judged("網格是一組進程", minimum_tokens=7)[0] is None
    assert judged("網格是一組進程", minimum_tokens=9)[0] == "too short"
    assert judged("กริดของโปรเซส", minimum_tokens=10)[0] is None
