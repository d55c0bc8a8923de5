"""Models, ZeRO, pipeline and trainer on one GPU: two or four ranks over gloo, and a world of one over NCCL.

`python3 -m tests.device.parts_check [WORD ...]` (parts whose name has one of the words), from the root of the checkout; prints one line per part and fails if one does.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.nn.lr_scheduler import CosineAnnealingLR
from colonnade.testing import compare, gather_weights, run_world
from colonnade.trainer import Trainer, hooks
from tests.models.grid import MODELS, batch
from tests.nn.sequence.training import give_weights, take_weights

RTOL = 1e-9


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-6)


def beside_one_process(model: str, config: dict[str, Any]) -> str:
    """Three clipped steps of a model on the ranks' GPU, and of the plain one."""
    piped = config.get("parallel", {}).get("pipeline", 1)
    with launch(
        {"clip_grad_norm": 1.0, "num_microbatches": 2, **config},
        backend="gloo",
        context=ParallelContext(),
        verbose=False,
    ) as gpc:
        assert gpc.device.type == "cuda", gpc.device
        whole = MODELS[model](context=gpc).double()
        plain = MODELS[model](context=ParallelContext()).double()
        give_weights(plain)
        take_weights(whole, dict(plain.named_parameters(remove_duplicate=False)), gpc)
        plain.to(gpc.device)
        given = colonnade.split(whole, num_stages=piped) if piped > 1 else whole
        engine = colonnade.initialize(given, adamw, whole.criterion(), context=gpc)[0]
        optimizer = adamw(plain.parameters())
        for step in range(3):
            engine.zero_grad()
            engine.execute_schedule(iter([batch(model, gpc.get_local_rank(ParallelMode.DATA), step)]))
            engine.step()
            optimizer.zero_grad()
            one_process_loss(plain, model, step, gpc.data_parallel_size, piped).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
        found = {name: value.cpu() for name, value in gather_weights(engine.model, gpc).items()}
        compare({name: value.detach().cpu() for name, value in plain.named_parameters()}, found, RTOL)
        engine.close()
        return str(gpc.device)


def one_process_loss(plain: Any, model: str, step: int, parts: int, piped: int) -> Tensor:
    columns = zip(*(batch(model, part, step) for part in range(parts)), strict=True)
    x, y = (torch.cat(column).cuda() for column in columns)
    halves = [(x, y)] if piped == 1 else list(zip(x.chunk(2), y.chunk(2), strict=True))
    losses = []
    for data, label in halves:
        output = plain(data)
        losses.append(plain.criterion()(*(output if isinstance(output, tuple) else (output,)), label))
    return sum(losses) / len(losses)


def trained(folder: str, stop: int, bf16: bool) -> list[Tensor]:
    """A trainer on a world of one over NCCL, up to a step; resumes what is there."""
    config = {"clip_grad_norm": 1.0, **({"bf16": True} if bf16 else {})}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model = MODELS["GPT, tied"](dropout=0.1, context=gpc)
        engine = colonnade.initialize(model, adamw, model.criterion(), context=gpc)[0]
        trainer = Trainer(engine)
        trainer.fit(
            [batch("GPT", 0, step) for step in range(12)],
            max_steps=stop,
            hooks=[
                hooks.LoadCheckpointHook(folder),
                hooks.LossHook(),
                hooks.LRSchedulerHook(CosineAnnealingLR(engine.optimizer, 12), by_epoch=False),
                hooks.GradientNormHook(),
                hooks.JsonlHook(Path(folder) / "log.jsonl"),
                hooks.SaveCheckpointHook(3, folder, save_by_iter=True, background=True),
            ],
        )
        weights = [parameter.detach().cpu().clone() for parameter in model.parameters()]
        engine.close()
        return weights


def trainer_resumes(bf16: bool) -> str:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        through = run_world(1, trained, one, 12, bf16, backend=None).values[0]
        run_world(1, trained, other, 7, bf16, backend=None)
        again = run_world(1, trained, other, 12, bf16, backend=None).values[0]
    assert all(torch.equal(a, b) for a, b in zip(through, again, strict=True))
    return "resumed to the bit"


def ranks(count: int, model: str, **config: Any) -> Callable[[], str]:
    return lambda: run_world(count, beside_one_process, model, config, timeout=120, backend=None).values[0]


PARTS: dict[str, Callable[[], str]] = {
    "GPT, tensor 1d 2": ranks(2, "GPT, tied", parallel={"tensor": {"size": 2, "mode": "1d"}}),
    "GPT, tensor 2d 4": ranks(4, "GPT, tied", parallel={"tensor": {"size": 4, "mode": "2d"}}),
    "GPT, sequence 2 (ring)": ranks(2, "GPT", parallel={"sequence": 2}),
    "MoE-GPT, expert 2": ranks(2, "MoE-GPT", parallel={"expert": 2}),
    "GPT, pipeline 2": ranks(2, "GPT, tied", parallel={"pipeline": 2}),
    **{f"GPT, data 2, ZeRO {stage}": ranks(2, "GPT", zero=stage) for stage in (1, 2, 3)},
    "GPT, data 2 x tensor 1d 2, ZeRO 2": ranks(4, "GPT", parallel={"tensor": {"size": 2, "mode": "1d"}}, zero=2),
    "trainer, NCCL, fp32": lambda: trainer_resumes(False),
    "trainer, NCCL, bf16": lambda: trainer_resumes(True),
}


def main() -> int:
    failed = 0
    for name, part in PARTS.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        try:
            print(f"{name}: ok ({part()})", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: FAILED\n{traceback.format_exc()[-2500:]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
