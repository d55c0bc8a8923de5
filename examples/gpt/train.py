"""Train a small GPT on text that is part of Python: data 2 x pipeline 2 on four ranks, tied embeddings, clipping to
norm 1.0.

colonnade run --nproc 4 train.py                        # 2 replicas of a pipeline of 2 stages
colonnade run --nproc 4 --max-restarts 3 train.py       # restarts from its last checkpoint if a rank dies
colonnade run --nproc 2 train.py --fresh                # one pipeline; starts from step 0

Checkpoints, log and HTML report are written to output/ next to this file. The next start resumes the run.
"""

import shutil
from pathlib import Path

import torch
from model import continued, gpt
from text import Characters, reference
from torch.nn import functional as F

import colonnade
from colonnade.checkpoint import export_full
from colonnade.core import global_context as gpc
from colonnade.logging import get_dist_logger
from colonnade.nn.lr_scheduler import CosineAnnealingLR
from colonnade.trainer import Trainer, hooks
from colonnade.utils import get_dataloader

HERE = Path(__file__).parent


def next_character_loss(logits, following):
    """Mean cross-entropy over all characters."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def main():
    parser = colonnade.get_default_parser()
    parser.add_argument("--output", type=Path, default=HERE / "output", help="where checkpoints, log and page go")
    parser.add_argument("--steps", type=int, help="how long to train, instead of the config's STEPS")
    parser.add_argument("--fresh", action="store_true", help="forget the checkpoints in the output folder")
    options = parser.parse_args()
    colonnade.launch(HERE / "config.py")
    config, logger = gpc.config, get_dist_logger()
    steps = options.steps or config.STEPS
    if options.fresh and gpc.get_global_rank() == 0:
        shutil.rmtree(options.output / "checkpoints", ignore_errors=True)

    text = reference()
    alphabet = sorted(set(text))
    loader = get_dataloader(
        Characters(text, alphabet, config.LENGTH), True, drop_last=True, batch_size=config.BATCH_SIZE
    )
    sizes = (len(alphabet), config.WIDTH, config.HEADS, config.LAYERS, config.LENGTH)
    engine, *_ = colonnade.initialize(
        colonnade.split(gpt(*sizes), num_stages=2),
        lambda parameters: torch.optim.AdamW(parameters, lr=config.LEARNING_RATE, weight_decay=0.01),
        next_character_loss,
    )
    warm_up = min(config.WARM_UP, steps // 2)  # of a very short run, a part
    scheduler = CosineAnnealingLR(engine.optimizer, total_steps=steps, warmup_steps=warm_up)

    checkpoints, log = options.output / "checkpoints", options.output / "log.jsonl"
    Trainer(engine).fit(
        loader,
        max_steps=steps,
        hooks=[
            hooks.LoadCheckpointHook(checkpoints),
            hooks.LossHook(),
            hooks.LRSchedulerHook(scheduler, by_epoch=False),
            hooks.GradientNormHook(),
            hooks.ThroughputHook(),
            hooks.JsonlHook(log),
            hooks.SaveCheckpointHook(config.SAVE_EVERY, checkpoints, by_epoch=False),
            hooks.StopOnSignal(),
        ],
        display_progress=True,
        return_output_label=False,
    )
    if gpc.get_global_rank() == 0:
        finish(options.output, alphabet, sizes, logger)
    gpc.destroy()


def finish(output, alphabet, sizes, logger):
    """Generate text with plain torch in one process, and print the paths of all outputs."""
    from safetensors.torch import load_file

    weights = output / "model.safetensors"
    export_full(output / "checkpoints", weights)
    model = gpt(*sizes)
    model.load_state_dict(load_file(weights), strict=False)
    prompt = [alphabet.index(character) for character in "The "]
    written = "".join(alphabet[number] for number in continued(model, prompt, 160, sizes[-1]))
    logger.info("what it writes after so short a time:\n    " + written.replace("\n", "\n    "))
    logger.info(f"checkpoints {output / 'checkpoints'} (colonnade ckpt ls), one file for plain torch {weights}")
    logger.info(f"log {output / 'log.jsonl'}, page of the run {output / 'log.html'}")


if __name__ == "__main__":
    main()
