"""examples/huggingface: a model of transformers out of a config, its weights out and in again, and adapters on them."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from colonnade.testing import run_world
from tests.cli import ROOT

EXAMPLE = ROOT / "examples" / "huggingface"


def _finetune(folder: str) -> None:
    """The script three times over: from a config, on from its checkpoint, and adapters on the weights that it wrote."""
    out, adapters = f"{folder}/out", f"{folder}/adapters"
    sys.path.insert(0, str(EXAMPLE))  # as for a script that is started there
    for arguments in (
        f"--model llama --output {out} --steps 2",
        f"--model llama --output {out} --steps 3",
        f"--from {out}/model --lora 4 --output {adapters} --steps 2",
    ):
        sys.argv = ["finetune.py", *arguments.split()]
        runpy.run_path(str(EXAMPLE / "finetune.py"), run_name="__main__")


@pytest.mark.slow
def test_train_save_resume_and_adapt_on_two_ranks(tmp_path):
    import peft
    import transformers

    told = run_world(2, _finetune, str(tmp_path), backend=None, timeout=180)
    assert "The " in told.stdout[0] + told.stderr[0]
    records = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert steps == [1, 2, 3]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapters/model")
    tokens = torch.arange(32)[None]
    with torch.no_grad(), adapted.disable_adapter():
        plain = adapted(input_ids=tokens).logits
    with torch.no_grad():
        assert not torch.equal(adapted(input_ids=tokens).logits, plain)


def test_any_architecture_has_a_small_config(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    small = runpy.run_path(str(Path(EXAMPLE, "small.py")))
    import transformers

    for name in ("llama", "qwen3_moe", "deepseek_v3", "falcon", "gpt2", "t5"):
        config = small["small_config"](name)
        auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            assert sum(parameter.numel() for parameter in auto.from_config(config).parameters()) < 1_000_000
    with pytest.raises(SystemExit, match="no such architecture; near are llama"):
        small["small_config"]("llma")
