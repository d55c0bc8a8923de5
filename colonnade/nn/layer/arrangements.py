"""The built-in arrangements: importing this module registers them."""

from __future__ import annotations

from colonnade.nn.layer.one_d import OneD
from colonnade.nn.layer.three_d import ThreeD
from colonnade.nn.layer.two_d import TwoAndAHalfD, TwoD

__all__ = ["OneD", "ThreeD", "TwoAndAHalfD", "TwoD"]
