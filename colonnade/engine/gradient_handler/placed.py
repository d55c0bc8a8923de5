"""Everything else that placements demand: sums over tensor, and over modes that users register."""

from __future__ import annotations

from colonnade.engine.gradient_handler.base import DemandGradientHandler
from colonnade.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class PlacementGradientHandler(DemandGradientHandler):
    """Does whatever reduction the placements demand, over any mode."""

    reason = "placements that owe a sum over another mode"
