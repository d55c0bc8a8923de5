"""Scripts with a planted mistake, and what `colonnade verify` is to say: `python -m tests.corpus.scripted KIND ...`.

The causes and the words that name the place were written down before a script was first run.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colonnade.proof.scripts import Script, verify_script

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Planted:
    """One script: the causes that are right, words that a finding has to contain, and words that would blame something innocent."""

    file: str
    causes: tuple[str, ...]
    place: tuple[str, ...] = ()
    innocent: tuple[str, ...] = ()
    nproc: int = 2
    steps: int = 2


PLANTED = {
    "gate_backward": Planted(
        "on_engine.py", ("scaled-by-mode",), ("moe.router.weight", "EXPERT", "hook"), ("MoeGradientHandler",)
    ),
    "gate_after": Planted(
        "on_engine.py",
        ("scaled-by-mode", "reduced-twice", "summed-not-averaged"),
        ("moe.router.weight", "EXPERT"),
        ("the handler that sums",),
    ),
    "gate_forward": Planted(
        "on_engine.py", ("forward-differs",), ("between .*moe.* and .*head",), ("look at that module",)
    ),
    "positions": Planted("on_engine.py", ("forward-differs",), ("places",), ("look at that module",)),
    "group_norm": Planted("on_engine.py", ("forward-differs",), ("norm",), ("look at that module",)),
    "schedule_rest": Planted("on_engine.py", ("rows-differ",), ("rows",), ("same data", "given other batches")),
    "left_in_eval": Planted("on_engine.py", ("forward-differs",), ("evaluation mode", "rank 0"), (), steps=3),
    "nn_all_reduce": Planted(
        "on_torch.py", ("scaled-by-mode",), ("MODEL", "backward"), ("has all of it", "full gradient")
    ),
    "stochastic": Planted(
        "on_torch.py",
        ("replicas-differ", "optimizer-differs"),
        ("rank 1|ranks \\[1\\]|ranks \\[0, 1\\]",),
        ("float16",),
    ),
    "own_skip": Planted("on_torch.py", ("own-decision",), ("its own batch",), ("token counts",)),
    "class_weights": Planted("on_torch.py", ("own-decision",), ("its own batch",), ("token counts",)),
    "teacher": Planted("on_torch.py", ("changed-between-steps",), ("teacher", "\\[1\\]|rank 1"), ("averaged over",)),
    "ema_not_back": Planted("on_torch.py", ("changed-between-steps",), ("\\[0\\]|rank 0",), ("averaged over",)),
    "zigzag": Planted("on_torch.py", ("forward-differs", "loss-differs"), ("places",), ("summed over MODEL",)),
    "not_waited": Planted("on_torch.py", ("missing-gradient", "not-reduced", "replicas-differ"), ("wait",)),
    "plateau": Planted("on_torch.py", ("optimizer-differs",), ("learning rate|lr", "rank 0", "rank 1|\\[1\\]")),
    "fsdp_never_last": Planted(
        "on_torch.py", ("missing-gradient", "not-reduced"), ("set_requires_gradient_sync",), ("detach, no_grad",)
    ),
    "fsdp_clip_local": Planted(
        "on_torch.py", ("norm-misses-shards", "wrong-divisor", "clipped-before-reduced"), ("its own shard", "rank 1")
    ),
    "order_by_rank": Planted("on_torch.py", ("gradients-exchanged",), ("order", "2.weight", "4.weight")),
    "packed_heads": Planted(
        "on_torch.py", ("gradients-exchanged",), ("first.weight", "second.weight", "packed"), ("process group",)
    ),
    "plain_experts": Planted("on_torch.py", ("wrong-divisor",), ("experts", "not divided"), ("gradient of enter",)),
    "nan_step_skipped": Planted("on_torch.py", ()),
    "complex_weight": Planted("on_torch.py", ()),
    "forward_mode": Planted("on_torch.py", ()),
    "for_each_row": Planted("on_torch.py", ()),
    "averaging_optimizer": Planted("on_torch.py", ()),
    "gathered_loss": Planted("on_torch.py", ()),
    "sam": Planted("doubled.py", ("scaled-by-mode", "backward-differs"), ("0.weight",), ("averaged over",)),
    "lbfgs": Planted("doubled.py", ("scaled-by-mode", "backward-differs"), ("0.weight",), ("averaged over",)),
    "noise": Planted("doubled.py", ("scaled-by-mode", "backward-differs"), ("0.weight", "before any reduction")),
    "two_losses": Planted(
        "doubled.py", ("scaled-by-mode", "backward-differs"), ("0.weight",), ("number of micro-batches",)
    ),
    "gan": Planted("doubled.py", ("scaled-by-mode", "backward-differs"), ("make.weight",), ("micro-batches only",)),
    "sparse": Planted(
        "doubled.py", ("scaled-by-mode", "backward-differs"), ("0.weight", "before any reduction"), ("not divided",)
    ),
}
"""By kind. Without causes: no mistake is planted, and the run is equal."""


def verified(kind: str, *arguments: str) -> Any:
    """The report on a script."""
    planted = PLANTED[kind]
    return verify_script(
        Script(str(SCRIPTS / planted.file), (kind, *arguments), planted.nproc, planted.steps, called=kind)
    )


def judged(kind: str, report: Any, planted: Planted | None = None) -> list[str]:
    """The faults of a report: nothing where cause and place are right and nothing innocent is blamed."""
    planted = planted or PLANTED[kind]
    if not planted.causes:
        return [] if report.ok else ["a healthy run is called wrong"]
    if not report.findings:
        return ["not found"]
    first = report.findings[0]
    faults = [] if first.cause in planted.causes else [f"the cause is {first.cause}, not {' or '.join(planted.causes)}"]
    said = " ".join(finding.sentence for finding in report.findings)
    faults += [f"{word!r} is not in it" for word in planted.place if not re.search(word, said)]
    return faults + [f"{word!r} is in it" for word in planted.innocent if re.search(word, said)]


def main(chosen: list[str]) -> int:
    bad = 0
    for kind in chosen or PLANTED:
        report = verified(kind)
        faults = judged(kind, report)
        bad += bool(faults)
        print(f"{'wrong: ' + '; '.join(faults) if faults else 'right'} {kind}", flush=True)
        for finding in report.findings:
            print(f"    {finding.cause} (step {finding.step}): {finding.sentence}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
