"""Fine-tunes a tiny Llama; steps with a large gradient use a smaller learning rate."""

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
set_seed(39)


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


class CutLearningRate(TrainerCallback):
    """A quarter of the learning rate for steps with a large gradient."""

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        factor = 0.25 if norm > 0.3 else 1.0
        for group in optimizer.param_groups:
            group["lr"] = factor * args.learning_rate
        if state.is_world_process_zero:
            print(f"step {state.global_step}: norm {norm:.3f}, learning rate x {factor}")


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
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(64), callbacks=[CutLearningRate()])
trainer.train()
