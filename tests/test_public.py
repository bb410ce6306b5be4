"""The public names and their docstrings."""

import inspect
import re

import pytest

import meshtrain

PUBLIC = [
    "Hook",
    "TrainState",
    "build_mesh",
    "build_model",
    "clip_grad_norm",
    "generate",
    "initialize",
    "load_checkpoint",
    "load_plan",
    "load_run",
    "load_weights",
    "parallelize",
    "rebind",
    "save_checkpoint",
    "save_parallelized",
    "save_pretrained",
    "train",
]
FUNCTIONS = [name for name in PUBLIC if name[0].islower()]
# Names without tensors need no shapes.
WITH_TENSORS = {"generate", "clip_grad_norm"}


def test_public_names_are_exactly_these() -> None:
    assert meshtrain.__all__ == PUBLIC


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_documents_arguments_result_and_errors(name: str) -> None:
    function = getattr(meshtrain, name)
    text = inspect.getdoc(function) or ""
    parameters = [*inspect.signature(function).parameters]
    described = re.findall(r"^    (\w+): ", text.partition("Args:")[2].partition("\n\n")[0], flags=re.MULTILINE)
    assert described == parameters
    assert "Raises:" in text
    returns = inspect.signature(function).return_annotation
    assert ("Returns:" in text) == (returns not in (None, "None"))
    if name in WITH_TENSORS:
        assert re.search(r"\((batch|rows|)[^)]*\)", text)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_documents_its_source(name: str) -> None:
    assert re.search(r"^Source: \S", inspect.getdoc(getattr(meshtrain, name)) or "", flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["Hook", "TrainState"])
def test_class_documents_itself_and_its_methods(name: str) -> None:
    public = getattr(meshtrain, name)
    assert len((inspect.getdoc(public) or "").splitlines()) > 3
    own = [value for key, value in vars(public).items() if inspect.isfunction(value) and not key.startswith("_")]
    assert all(inspect.getdoc(value) for value in own)
