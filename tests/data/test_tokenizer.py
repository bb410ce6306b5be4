"""Tokenizers: they are found or trained, and their special tokens are read."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer

from meshtrain.config.data import TokenizerConfig
from meshtrain.data.cache import Cache
from meshtrain.data.tokens.tokenizer import find_tokenizer, open_tokenizer, use_all_cores
from meshtrain.data.tokens.tokenizer_training import END_TOKEN, PAD_TOKEN, train_tokenizer
from meshtrain.errors import DataError
from tests.data.corpora import open_corpus, random_texts, write_lines

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "grüß 日本語 🦜"] * 20


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


def write_tokenizer(directory: Path, end_token: str = "</s>", **settings) -> Path:
    """Write a tokenizer of four words and, if any settings are given, a tokenizer_config.json."""
    directory.mkdir(exist_ok=True)
    tokenizer = Tokenizer(WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(end_token, special=True), AddedToken("<pad>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    if settings:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def problem_of(path: Path | str, cache: Cache) -> str:
    with pytest.raises(DataError) as caught:
        find_tokenizer(str(path), cache)
    return str(caught.value)


def test_hugging_face_loads_a_trained_tokenizer(tmp_path, cache):
    files = train_tokenizer([open_corpus(write_lines(tmp_path / "a.jsonl", TEXTS), cache=cache)], 280, cache)

    loaded = AutoTokenizer.from_pretrained(files.directory)

    assert (loaded.eos_token, loaded.bos_token, loaded.unk_token) == (END_TOKEN,) * 3
    assert (loaded.eos_token_id, loaded.pad_token_id) == (files.end_id, files.pad_id) == (0, 1)
    assert loaded.pad_token == PAD_TOKEN
    assert len(loaded) == files.vocab_size == 280
    for text in [*TEXTS, " two  spaces \n", "never seen: żółw"]:
        ids = files.load().encode(text, add_special_tokens=False).ids
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == text


def test_tokenizer_is_trained_once(tmp_path, cache, capsys):
    corpus = open_corpus(write_lines(tmp_path / "a.jsonl", TEXTS), cache=cache)

    first, second = train_tokenizer([corpus], 280, cache), train_tokenizer([corpus], 280, cache)

    assert first == second
    assert capsys.readouterr().out == "Training a byte-level BPE of 280 tokens\n"
    assert train_tokenizer([corpus], 281, cache).identity != first.identity


def test_small_text_gives_fewer_tokens_than_requested(tmp_path, cache):
    (tmp_path / "a.txt").write_text("ab")

    assert train_tokenizer([open_corpus(tmp_path / "a.txt", cache=cache)], 5000, cache).vocab_size == 259


def test_held_out_documents_are_not_trained_on(tmp_path, cache):
    first, others = "zebra " * 50, ["the cat sat on the mat"] * 20
    corpus = open_corpus(write_lines(tmp_path / "a.jsonl", [first, *others]), cache=cache, held_out=1e-9)

    files = train_tokenizer([corpus], 400, cache)

    assert "Ġcat" in files.load().get_vocab()
    assert not any("ze" in token for token in files.load().get_vocab())


TRAIN_ELSEWHERE = """
import sys
from pathlib import Path
from meshtrain.config.data import TokenizerConfig
from meshtrain.data.cache import Cache
from meshtrain.data.tokens.tokenizer_training import train_tokenizer
from tests.data.corpora import open_corpus
cache = Cache(Path(sys.argv[1]))
print(train_tokenizer([open_corpus(sys.argv[2], cache=cache)], 1000, cache).identity)
"""


def test_every_machine_trains_the_same_tokenizer(tmp_path, cache):
    source = write_lines(tmp_path / "a.jsonl", random_texts(random.Random(0), 3000))
    here = train_tokenizer([open_corpus(source, cache=cache)], 1000, cache).identity

    environment = os.environ | {"PYTHONHASHSEED": "5", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    there = subprocess.run(
        [sys.executable, "-c", TRAIN_ELSEWHERE, tmp_path / "elsewhere", source],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )

    assert there.stdout.splitlines()[-1] == here


def test_end_token_is_the_pad_if_none_is_declared(tmp_path, cache):
    files = find_tokenizer(str(write_tokenizer(tmp_path / "hf", eos_token="</s>")), cache)

    assert files.directory == tmp_path / "hf"
    assert (files.vocab_size, files.end_id, files.pad_id) == (6, 4, 4)


def test_pad_token_is_read_in_its_long_form(tmp_path, cache):
    directory = write_tokenizer(tmp_path / "hf", eos_token={"content": "</s>"}, pad_token={"content": "<pad>"})

    files = find_tokenizer(str(directory / "tokenizer.json"), cache)

    assert (files.end_id, files.pad_id) == (4, 5)


def test_end_token_is_read_from_the_special_tokens_map(tmp_path, cache):
    directory = write_tokenizer(tmp_path / "hf", end_token="<fin>", eos_token=None, model_max_length=512)
    (directory / "special_tokens_map.json").write_text('{"eos_token": "<fin>", "pad_token": "<pad>"}')

    files = find_tokenizer(str(directory), cache)

    assert (files.end_id, files.pad_id) == (4, 5)


def test_a_bare_tokenizer_gets_a_directory_that_hugging_face_loads(tmp_path, cache):
    directory = write_tokenizer(tmp_path / "bare")

    files = find_tokenizer(str(directory / "tokenizer.json"), cache)
    loaded = AutoTokenizer.from_pretrained(files.directory)

    assert files.directory.is_relative_to(cache.directory)
    assert find_tokenizer(str(directory), cache) == files
    assert loaded.eos_token_id == files.end_id == 4
    assert loaded("the cat")["input_ids"] == [0, 1]


def test_unknown_end_token_is_reported(tmp_path, cache):
    directory = write_tokenizer(tmp_path / "hf", end_token="<fin>", pad_token="<pad>")

    assert problem_of(directory, cache) == (
        f'the tokenizer {directory} has no end token, which separates documents: looked for "eos_token" in '
        "tokenizer_config.json and special_tokens_map.json, and for <|endoftext|>, <|end_of_text|>, </s>, <eos>, "
        '<|im_end|> in its vocabulary; name it as "eos_token" in tokenizer_config.json'
    )


@pytest.mark.parametrize("role", ["eos_token", "pad_token"])
def test_declared_token_outside_the_vocabulary_is_reported(tmp_path, cache, role):
    directory = write_tokenizer(tmp_path / "hf", **{"eos_token": "</s>", role: "<other>"})

    assert problem_of(directory, cache) == (
        f'the {role} "<other>" of the tokenizer {directory} is not in its vocabulary; '
        "correct tokenizer_config.json or take the tokenizer.json that belongs to it"
    )


def test_saved_truncation_and_padding_are_ignored(tmp_path, cache):
    directory = write_tokenizer(tmp_path / "hf", eos_token="</s>")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))

    loaded = find_tokenizer(str(directory), cache).load()

    assert [encoding.ids for encoding in loaded.encode_batch_fast(["the cat sat", "cat"])] == [[0, 1, 2], [1]]


def test_only_the_tokenizer_is_copied(tmp_path, cache):
    directory = write_tokenizer(tmp_path / "model", eos_token="</s>")
    (directory / "model.safetensors").touch()
    (directory / "config.json").touch()
    (tmp_path / "export").mkdir()

    find_tokenizer(str(directory), cache).copy(tmp_path / "export")

    assert {path.name for path in (tmp_path / "export").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_missing_tokenizer_is_reported(tmp_path, cache):
    assert problem_of(tmp_path / "none", cache) == (
        f"data.tokenizer.path: {tmp_path}/none does not exist; "
        "name a Hugging Face directory, a tokenizer.json or a hub id, or set data.tokenizer.vocab_size to train one"
    )


def test_directory_without_a_tokenizer_is_reported(tmp_path, cache):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/vocab.json").touch()

    assert problem_of(tmp_path / "hf", cache) == (
        f"data.tokenizer.path: {tmp_path}/hf holds vocab.json, but no tokenizer.json; "
        "write one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


def test_file_that_is_not_a_tokenizer_is_reported(tmp_path, cache):
    (tmp_path / "tokenizer.json").write_text('{"words": []}')

    problem = problem_of(tmp_path / "tokenizer.json", cache)

    assert problem.startswith(f"{tmp_path}/tokenizer.json is not a tokenizer (")
    assert problem.endswith("; fetch or save it again")


def test_bad_tokenizer_settings_are_reported(tmp_path, cache):
    directory = write_tokenizer(tmp_path / "hf")
    (directory / "tokenizer_config.json").write_text("{")

    problem = problem_of(directory, cache)

    assert problem.startswith(f"{directory}/tokenizer_config.json is not JSON (")
    assert problem.endswith("; fetch or save the tokenizer again")


FIND_IN_HUB_CACHE = """
import sys
from pathlib import Path
from meshtrain.config.data import TokenizerConfig
from meshtrain.data.cache import Cache
from meshtrain.data.tokens.tokenizer import find_tokenizer
from meshtrain.errors import DataError
assert "huggingface_hub" not in sys.modules
for name in ("some/tokenizer", "other"):
    try:
        print(find_tokenizer(name, Cache(Path(sys.argv[1]))).directory)
    except DataError as error:
        print(error)
"""


def test_a_hub_id_is_looked_up_in_the_local_hub_cache(tmp_path):
    home = tmp_path / "hub"
    repository = home / "hub/models--some--tokenizer"
    for directory in (repository / "refs", repository / "snapshots"):
        directory.mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    snapshot = write_tokenizer(repository / "snapshots/abc", eos_token="</s>")

    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", FIND_IN_HUB_CACHE, tmp_path / "cache"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    assert found[0] == str(snapshot)
    assert found[1].startswith(
        'data.tokenizer.path: "other" does not exist as a path, is not in the local hub cache, '
        "and the hub does not provide it: "
    )
    assert len(found) == 2


@pytest.mark.parametrize("before", [None, "false"])
def test_environment_is_restored(monkeypatch, before):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)

    with use_all_cores():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"

    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


def test_special_tokens_are_added_after_the_existing_ones(tmp_path, cache):
    source = write_tokenizer(tmp_path / "t", eos_token="</s>", additional_special_tokens=["<pad>"])
    (source / "chat_template.jinja").write_text("{{ messages }}")
    config = TokenizerConfig(path=str(source), special_tokens=["<a>", "</s>", "<b>", "<a>", "cat"])
    files = open_tokenizer(config, cache)
    assert (files.vocab_size, files.end_id) == (8, 4)
    loaded = AutoTokenizer.from_pretrained(files.directory)
    assert loaded.encode("the<a>cat<b>", add_special_tokens=False) == [0, 6, 1, 7]
    assert loaded.decode([0, 6, 1, 7], skip_special_tokens=True) == "the cat"
    assert loaded.extra_special_tokens == ["<pad>", "<a>", "<b>"]
    assert loaded.chat_template == "{{ messages }}"
    assert open_tokenizer(config, cache) == files
    assert find_tokenizer(str(source), cache).vocab_size == 6, "the tokenizer itself is unchanged"


def test_tokenizer_with_all_special_tokens_is_unchanged(tmp_path, cache):
    source = write_tokenizer(tmp_path / "t", eos_token="</s>")
    config = TokenizerConfig(path=str(source), special_tokens=["<pad>"])
    assert open_tokenizer(config, cache) == find_tokenizer(str(source), cache)
