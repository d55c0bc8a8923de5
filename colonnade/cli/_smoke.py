"""The smallest distributed program: `colonnade doctor` runs it on two ranks and reads its line."""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import distributed


def main() -> None:
    """Sum ranks + 1 over the world and print what came out and how long it took, on rank 0."""
    started = time.monotonic()
    distributed.init_process_group("gloo")
    total = torch.tensor([float(distributed.get_rank() + 1)])
    distributed.all_reduce(total)
    seconds = time.monotonic() - started
    distributed.barrier()
    if distributed.get_rank() == 0:
        sys.stdout.write(json.dumps({"total": total.item(), "seconds": seconds}) + "\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
