"""The host's clock: seconds in which the host issues operators, by their kind, from the samples of a calibration sweep.

A GPU works behind the host: the host issues kernels ahead, and a step takes as long as the slower of the two. Costs of the host
differ by a factor of thirty between a view and the backward pass of attention, but little between operators of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_OWN = {
    "mm": "linear",
    "addmm": "linear",
    "bmm": "linear",
    "_grouped_mm": "linear",
    "native_layer_norm": "layer norm",
    "native_layer_norm_backward": "layer norm",
    "rms_norm": "layer norm",
    "rms_norm_backward": "layer norm",
    "view": "view",
    "new memory": "new memory",
}
"""Kinds of operators with samples of their own; all others cost what a pointwise operator costs."""


class HostTimes:
    """Seconds of the host for each operator that it issues."""

    def __init__(self, samples: Mapping[str, Sequence[Sequence[float]]]) -> None:
        self._seconds = {name.removeprefix("host "): rows[0][-1] for name, rows in samples.items() if name.startswith("host ")}

    def seconds(self, kind: str, forward: bool) -> float:
        """Return the seconds of one operator; `forward`: issued by Python, not by autograd's backward pass."""
        if kind.startswith("attention"):
            return self._seconds[kind.split(",")[0]]
        return self._seconds[_OWN.get(kind, "pointwise")]
