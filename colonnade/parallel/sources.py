"""Which whole parameter a rank's part was taken from, so that a weight that two layers shared does not become two."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from colonnade.errors import PlacementError

_ATTRIBUTE = "_colonnade_source"


def note_source(part: Tensor, whole: Tensor) -> None:
    """Remember that `part` was copied out of `whole`. Neither keeps the other alive; copies of them forget it."""
    source = getattr(whole, _ATTRIBUTE, None) or object()
    setattr(whole, _ATTRIBUTE, source)
    setattr(part, _ATTRIBUTE, source)


def check_ties(modules: Iterable[nn.Module]) -> None:
    """Refuse two trained parameters that came from one: they were tied, and would now be trained apart."""
    seen: dict[object, tuple[str, nn.Parameter]] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            source = getattr(parameter, _ATTRIBUTE, parameter)
            first, other = seen.setdefault(source, (name, parameter))
            if other is not parameter and other.requires_grad and parameter.requires_grad:
                raise PlacementError(
                    f"{first!r} and {name!r} come from one whole parameter: they were tied before from_module(), and would "
                    f"now be trained apart. Give the second layer the weight of the first, as in Classifier.from_module("
                    f"head, weight=embedding.weight); if they are to be two, take one from copy.deepcopy(module)"
                )
