"""A script on the Trainer of transformers without any line for `verify`; an argument names what is unusual or wrong."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

kind = sys.argv[1]
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
)


class Tokens(Dataset):
    """Random tokens; every second pair of batches has fewer labels."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, 32, (8,), generator=torch.Generator().manual_seed(at))
        labels = ids.clone()
        labels[at % 7 :] = -100 if at % 2 else ids[at % 7 :]
        return {"input_ids": ids, "labels": labels}


class WrongTrainer(Trainer):
    """A Trainer whose loss is wrong."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        factor = {"doubled": self.args.world_size, "half_rank": 0.5 if self.args.process_index else 1.0}[kind]
        return loss * factor


arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2 if kind == "accumulated" else 1,
    average_tokens_across_devices=kind != "own_tokens",
    bf16=kind == "bf16",
    max_steps=4,
    report_to=[],
    disable_tqdm=True,
)
trainer = WrongTrainer if kind in ("doubled", "half_rank") else Trainer
trainer(model=model, args=arguments, train_dataset=Tokens()).train()
