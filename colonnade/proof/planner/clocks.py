"""The host's clock: seconds in which the host issues operators, by their kind, from the samples of a calibration sweep.

A GPU works behind the host: the host issues kernels ahead, and a step takes as long as the slower of the two. Costs of the host
differ by a factor of thirty between a view and the backward pass of attention, but little between operators of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "_grouped_mm", "_scaled_mm"))
_NORMS = frozenset(("native_layer_norm", "native_layer_norm_backward", "rms_norm", "rms_norm_backward"))


PYTHON = 2.0
"""The host's time for a step, in that of its operators alone.

Modules, hooks, autograd's nodes and the engine are the rest: 1.7 to 2.5 in eight configurations on one machine.
"""
COMPILED_CALL, COMPILED_KERNEL = 250e-6, 8e-6
"""Seconds of the host for one call of a compiled graph (guards, autograd), and for each of its kernels."""


class HostTimes:
    """Seconds of the host for each operator that it issues."""

    def __init__(self, samples: Mapping[str, Sequence[Sequence[float]]]) -> None:
        taken = {name.removeprefix("host "): rows[0][-1] for name, rows in samples.items() if name.startswith("host ")}
        # The backward pass of a linear layer has two products, a view of each, and the sum of the weight's gradients.
        product = (taken["linear backward"] - 2 * taken["view backward"] - taken["pointwise backward"]) / 2
        self._forward = {
            "product": taken["linear"] - taken["view"],
            "norm": taken["layer norm"],
            "attention": taken["attention"],
            "view": taken["view"],
            "new memory": taken["new memory"],
            "other": taken["pointwise"],
        }
        self._backward = {
            "product": product,
            "norm": taken["layer norm backward"],
            "attention": taken["attention backward"],
            "view": taken["view"],
            "new memory": taken["new memory"],
            "other": taken["pointwise backward"],
        }

    def seconds(self, kind: str, forward: bool) -> float:
        """Return the seconds of one operator; `forward`: issued by Python, not by autograd's backward pass."""
        if kind.startswith("compiled"):
            return PYTHON * (COMPILED_CALL if kind == "compiled call" else COMPILED_KERNEL)
        return PYTHON * self._operator(kind, forward)

    def _operator(self, kind: str, forward: bool) -> float:
        table = self._forward if forward else self._backward
        if kind in _PRODUCTS:
            return table["product"]
        if kind in _NORMS:
            return table["norm"]
        if kind.startswith("attention"):
            return table["attention"]
        return table.get(kind, table["other"])
