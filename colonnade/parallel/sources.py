"""Which whole parameter a rank's part was taken from, so that a weight that two layers shared does not become two."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from colonnade.errors import PlacementError
from colonnade.parallel.dtensor import local_part

_ATTRIBUTE = "_colonnade_source"


def note_source(part: Tensor, whole: Tensor) -> None:
    """Remember that `part` was copied out of `whole`. Neither keeps the other alive; copies of them forget it."""
    source = getattr(whole, _ATTRIBUTE, None) or object()
    setattr(whole, _ATTRIBUTE, source)
    setattr(part, _ATTRIBUTE, source)


def check_ties(modules: Iterable[nn.Module]) -> None:
    """Refuse two trained parameters that came from one: they were tied, and would now be trained apart.

    Also two in the same memory, which would get memory of its own each. (Stages of a model share memory where it is tied.)
    """
    seen: dict[object, tuple[str, nn.Parameter]] = {}
    for module in modules:
        in_memory: dict[int, str] = {}
        for name, parameter in module.named_parameters():
            address = local_part(parameter).data_ptr() if parameter.requires_grad and not parameter.is_meta else 0
            if address and in_memory.setdefault(address, name) != name:
                raise PlacementError(
                    f"{in_memory[address]!r} and {name!r} lie in the same memory, but are two parameters, with a gradient and "
                    f"optimizer state each. To tie them make them one, as in head.weight = embedding.weight (not .data); if "
                    f"they are to be two, give one a copy: parameter.data = parameter.data.clone()"
                )
            source = getattr(parameter, _ATTRIBUTE, parameter)
            first, other = seen.setdefault(source, (name, parameter))
            if other is not parameter and other.requires_grad and parameter.requires_grad:
                raise PlacementError(
                    f"{first!r} and {name!r} come from one whole parameter: they were tied before from_module(), and would "
                    f"now be trained apart. Give the second layer the weight of the first, as in Classifier.from_module("
                    f"head, weight=embedding.weight); if they are to be two, take one from copy.deepcopy(module)"
                )
