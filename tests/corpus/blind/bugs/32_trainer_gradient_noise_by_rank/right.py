"""Fine-tunes a tiny Llama with annealed gradient noise."""

import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

LENGTH, VOCAB, GLOBAL_BATCH = 10, 32, 8
world = int(os.environ.get("WORLD_SIZE", 1))
set_seed(36)


class Texts(Dataset):
    """Random texts of different lengths; padding has the label -100."""

    def __init__(self, size):
        self.tokens = torch.randint(1, VOCAB, (size, LENGTH))
        self.lengths = torch.randint(3, LENGTH + 1, (size,))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        mask = (torch.arange(LENGTH) < self.lengths[i]).long()
        labels = self.tokens[i].masked_fill(mask == 0, -100)
        return dict(input_ids=self.tokens[i] * mask, attention_mask=mask, labels=labels)


class GradientNoise(TrainerCallback):
    """Adds Gaussian noise that shrinks with the step (Neelakantan et al., 2015)."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        draw = torch.Generator().manual_seed(args.seed + 1000 * state.global_step)
        sigma = 0.05 / (1 + state.global_step) ** 0.55
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=draw, dtype=p.dtype), alpha=sigma)


config = LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    per_device_train_batch_size=GLOBAL_BATCH // world,
    max_steps=3,
    learning_rate=5e-3,
    lr_scheduler_type="constant",
    use_cpu=True,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(64), callbacks=[GradientNoise()])
trainer.train()
