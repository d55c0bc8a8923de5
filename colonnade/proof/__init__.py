"""Comparison of a parallel run with a single process, with a diagnosis of the differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colonnade._imports import lazy_names

if TYPE_CHECKING:
    from colonnade.proof.compare import Finding as Finding
    from colonnade.proof.compare import Report as Report

__getattr__, __dir__, __all__ = lazy_names(__name__, {"colonnade.proof.compare": "Finding Report"})
