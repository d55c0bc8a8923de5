"""Registries: names to classes, with errors that help."""

from __future__ import annotations

import sys

import pytest
import torch

from colonnade import registry
from colonnade.errors import RegistryError
from colonnade.registry import DIST_GROUP_INITIALIZER, GRADIENT_HANDLER, LR_SCHEDULERS, OPTIMIZERS, Registry

NAMES = ["GRADIENT_HANDLER", "DIST_GROUP_INITIALIZER", "SCHEDULE", "HOOKS", "LAYERS", "MODELS", "OPTIMIZERS"]
NAMES += ["LR_SCHEDULERS", "DATASETS", "LOSSES", "ORDERS"]


@pytest.fixture
def things():
    return Registry("thing")


@pytest.mark.parametrize("name", NAMES)
def test_the_registries_exist(name):
    assert isinstance(getattr(registry, name), Registry)


def test_bare_decorator_and_decorator_with_a_name(things):
    @things.register_module
    class Plain: ...

    @things.register_module("other")
    class Named: ...

    @things.register_module(name="third")
    def function(): ...

    assert things.get_module("Plain") is Plain
    assert things.get_module("other") is Named
    assert things.get_module("third") is function
    assert list(things) == ["Plain", "other", "third"]
    assert len(things) == 3
    assert things.has("other")
    assert "Plain" in things
    assert "Named" not in things


def test_an_unknown_name_lists_all_and_the_nearest():
    with pytest.raises(RegistryError) as error:
        DIST_GROUP_INITIALIZER.get_module("Initializer_2P5D")
    assert "Did you mean 'Initializer_2p5D'?" in str(error.value)
    assert "Initializer_Data" in str(error.value)
    assert "@DIST_GROUP_INITIALIZER.register_module" in str(error.value)


def test_a_duplicate_names_both_definitions(things):
    @things.register_module
    class Twice: ...

    first = Twice
    with pytest.raises(RegistryError) as error:

        @things.register_module
        class Twice: ...

    assert str(error.value).count("test_registry.py:") == 2
    assert things.get_module("Twice") is first
    things.register_module(first)  # the very same class again is no clash
    things.remove("Twice")
    assert not things.has("Twice")


@pytest.mark.parametrize("entry", [3, ["x"]])
def test_only_classes_and_functions_can_be_registered(things, entry):
    with pytest.raises(RegistryError, match="only a class or a function"):
        things.register_module(entry)


def test_built_ins_are_there_without_an_import():
    assert GRADIENT_HANDLER.has("DataParallelGradientHandler")
    assert len(DIST_GROUP_INITIALIZER) >= 10


@pytest.mark.parametrize(
    ("look", "seen"),
    [
        (lambda things: things.get_module("Thing").__name__, "Thing"),
        (lambda things: things.has("Thing"), True),
        (list, ["Thing"]),
        (len, 1),
    ],
    ids=["get_module", "has", "iter", "len"],
)
def test_a_home_is_imported_at_the_first_look_and_again_where_that_failed(tmp_path, monkeypatch, look, seen):
    things = Registry("thing", home="home_of_things")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "THINGS", things, raising=False)
    with pytest.raises(ModuleNotFoundError):
        look(things)
    (tmp_path / "home_of_things.py").write_text(
        "from colonnade.registry import THINGS\n"
        "@THINGS.register_module\n"
        "class Thing: ...\n"
        "assert THINGS.has('Thing')\n"  # a home may look things up while it loads
    )
    try:
        assert look(things) == seen
    finally:
        sys.modules.pop("home_of_things", None)
    assert look(things) == seen  # which asks for no import any more


def test_what_is_no_name_is_refused(things):
    for entry, name in ((type("", (), {}), None), (print, 3)):
        with pytest.raises(RegistryError, match="the name of a thing must be a non-empty string"):
            things.register_module(entry, name=name)
    with pytest.raises(RegistryError, match="no thing 'unknown'"):
        things.remove("unknown")
    assert 3 not in things


def test_libraries_are_searched_for_classes():
    assert OPTIMIZERS.get_module("AdamW") is torch.optim.AdamW
    assert LR_SCHEDULERS.has("CosineAnnealingLR")
    with pytest.raises(RegistryError, match=r"or a class of torch\.optim"):
        OPTIMIZERS.get_module("AdamX")
