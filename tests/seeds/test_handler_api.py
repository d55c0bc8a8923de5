"""The API page of the handlers: every class it names exists, with that signature and method."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from colonnade import compat
from tests.seeds.snippets import HANDLER_API, TEXT

DECLARED = re.findall(r"class colossalai\.engine\.gradient_handler\.(\w+)\(([^)]*)\)", (TEXT / HANDLER_API).read_text())
# The page lost one heading; its text ("all sub pipeline parallel groups") is that of this class.
NAMES = [*DECLARED, ("PipelineSharedModuleGradientHandler", "model, optimizer")]


@pytest.mark.parametrize("root", ["colossalai", "colonnade"])
@pytest.mark.parametrize(("name", "arguments"), NAMES)
def test_the_class_has_the_signature_of_the_page(name, arguments, root):
    compat.install()
    try:
        handler = getattr(importlib.import_module(f"{root}.engine.gradient_handler"), name)
    finally:
        compat.uninstall()
    assert list(inspect.signature(handler).parameters)[:2] == arguments.split(", ")
    assert callable(handler.handle_gradient)


def test_the_page_names_five_classes_and_the_base_is_abstract():
    assert len(DECLARED) == 5
    base = importlib.import_module("colonnade.engine.gradient_handler").BaseGradientHandler
    assert inspect.isabstract(base)
