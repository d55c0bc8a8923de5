"""CheckpointManager: saves and loads the checkpoints of a run, on every rank of its world."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from colonnade.checkpoint.checked import Damaged
from colonnade.checkpoint.collect import contents_of, part_of
from colonnade.checkpoint.folder import (
    Found,
    check_space,
    clean,
    discard,
    make_folder,
    megabytes,
    published,
    staging_name,
)
from colonnade.checkpoint.locate import locate, survey, uneven_sizes
from colonnade.checkpoint.lock import RunLock
from colonnade.checkpoint.manifest import LayoutRecord, Manifest
from colonnade.checkpoint.match import check_matches, match
from colonnade.checkpoint.restore import OptimizerRestorer, restore_weights
from colonnade.checkpoint.restore_values import RandomSource, Values
from colonnade.checkpoint.tensors_file import TensorReader
from colonnade.checkpoint.together import agreed, gather
from colonnade.checkpoint.verify import check_files, read_manifest, verify
from colonnade.checkpoint.write import Background, Save
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, listed
from colonnade.logging import get_dist_logger
