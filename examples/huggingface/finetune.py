"""Train any transformers architecture on several ranks, on text that is part of Python, without a download.

colonnade run --nproc 2 finetune.py --model qwen3                           # a small config with new weights
colonnade run --nproc 4 finetune.py --model llama --config pipeline.py      # tensor 2 x pipeline 2
colonnade run --nproc 2 finetune.py --from output/model --lora 8            # weights of a folder; trains only adapters

Only the config file determines the layout; no line below depends on it. Checkpoints, log and weights are written to
output/ next to this file, and the next start resumes the run. transformers or peft can load the folder `output/model`.
"""

import shutil
from pathlib import Path

import torch
from small import VOCABULARY, Bytes, small_config

import colonnade
from colonnade.core import global_context as gpc
from colonnade.logging import get_dist_logger
from colonnade.nn.lr_scheduler import CosineAnnealingLR
from colonnade.trainer import Trainer, hooks
from colonnade.utils import get_dataloader

HERE = Path(__file__).parent


def arguments():
    parser = colonnade.get_default_parser()
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--model", default="llama", help="an architecture of transformers: llama, gpt2, qwen3_moe, t5 ..."
    )
    source.add_argument("--from", dest="folder", type=Path, help="a folder of weights as save_pretrained writes it")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank alone (needs peft)")
    parser.add_argument("--output", type=Path, default=HERE / "output", help="where checkpoints, log and weights go")
    parser.add_argument("--steps", type=int, help="how long to train, instead of the config's STEPS")
    parser.add_argument("--fresh", action="store_true", help="forget the checkpoints and the log in the output folder")
    options = parser.parse_args()
    if options.folder is not None and not (options.folder / "config.json").is_file():
        parser.error(
            f"--from {options.folder}: there is no config.json; give a folder that save_pretrained has written"
        )
    if options.lora is not None and options.lora < 1:
        parser.error(f"--lora {options.lora}: a rank is a whole number from 1 on, such as 8")
    return options


def build(options):
    """Build the model of the config or of the folder on the ranks of the layout; returns the model, and whether it has an
    encoder.
    """
    import transformers

    config = (
        small_config(options.model)
        if options.folder is None
        else transformers.AutoConfig.from_pretrained(options.folder)
    )
    if config.get_text_config().vocab_size < VOCABULARY:
        raise SystemExit(
            f"a vocabulary of {config.get_text_config().vocab_size} is too small for the {VOCABULARY} bytes"
        )
    task = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    adapters = None
    if options.lora is not None:
        import peft

        adapters = peft.LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
    source = config if options.folder is None else options.folder
    model = colonnade.from_pretrained(source, model_class=task, dtype=torch.float32, adapters=adapters)
    return model, config.is_encoder_decoder


def main():
    options = arguments()
    colonnade.launch(options.config or HERE / "config.py")
    config, logger = gpc.config, get_dist_logger()
    steps = options.steps or config.STEPS
    checkpoints, log, weights = (options.output / name for name in ("checkpoints", "log.jsonl", "model"))
    if options.fresh and gpc.get_global_rank() == 0:
        shutil.rmtree(checkpoints, ignore_errors=True)
        log.unlink(missing_ok=True)

    model, has_encoder = build(options)
    loader = get_dataloader(Bytes(config.LENGTH, has_encoder), True, drop_last=True, batch_size=config.BATCH_SIZE)
    engine, *_ = colonnade.initialize(  # no criterion: the model makes its loss of the labels
        model, lambda parameters: torch.optim.AdamW(parameters, lr=config.LEARNING_RATE, weight_decay=0.01)
    )
    Trainer(engine).fit(
        loader,
        max_steps=steps,
        hooks=[
            hooks.LoadCheckpointHook(checkpoints),
            hooks.LossHook(),
            hooks.LRSchedulerHook(
                CosineAnnealingLR(engine.optimizer, total_steps=steps, warmup_steps=min(config.WARM_UP, steps - 1)),
                by_epoch=False,
            ),
            hooks.GradientNormHook(),
            hooks.ThroughputHook(),
            hooks.JsonlHook(log),
            hooks.SaveCheckpointHook(config.SAVE_EVERY, checkpoints, by_epoch=False),
            hooks.StopOnSignal(),
        ],
        display_progress=True,
        return_output_label=False,
    )
    engine.save_pretrained(weights)
    if gpc.get_global_rank() == 0:
        logger.info(f"weights {weights}, log {log}, checkpoints {checkpoints} (colonnade ckpt ls)")
        if options.lora is None and not has_encoder:
            logger.info("what it writes after so short a time, by transformers alone:\n    " + written(weights))
        elif options.lora is not None:
            logger.info(f"load the adapters with peft.PeftModel.from_pretrained(model, {str(weights)!r})")
    gpc.destroy()


def written(weights, prompt=b"The ", count=80):
    """Generate text after a prompt with plain transformers in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights)
    found = model.generate(torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return bytes(found[0].tolist()).decode("ascii", "replace").replace("\n", "\n    ")


if __name__ == "__main__":
    main()
