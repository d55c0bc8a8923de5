"""LoRA adapters of peft on models that are cut: steps beside one process, and files that peft reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colonnade
from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import PlacementError
from colonnade.parallel.placement import placement_of
from colonnade.testing import compare, gather_gradients, gather_weights, in_double, run_world
from tests.hf.zoo import BY_NAME, EPS, ROWS, batch_of, num_rows
from tests.ranks import on_ranks

RTOL = 1e-9
TENSOR = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
PLAIN: dict[str, Any] = {"parallel": {}}
SCHEDULE = {"type": "OneFOneB", "num_microbatches": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": TENSOR,
    "data": PLAIN,
    "zero 1": {"zero": {"stage": 1}},
    "zero 3": {"zero": {"stage": 3}},
    "pipeline": {"parallel": {"pipeline": 2}, "schedule": SCHEDULE},
}
ON_FOUR = {"tensor x pipeline": {"parallel": {"pipeline": 2, **TENSOR["parallel"]}, "schedule": SCHEDULE}}
TARGETS = {"llama": ["q_proj", "o_proj", "up_proj", "down_proj", "embed_tokens"], "gpt2": ["c_attn", "c_proj"]}


def adapted(name: str, **options: Any) -> Any:
    """The model with adapters that are not zero, wrapped by peft; the same in every process."""
    import peft

    torch.manual_seed(1)
    with in_double():
        config = peft.LoraConfig(target_modules=TARGETS[name], r=4, lora_alpha=8, **options)
        model = peft.get_peft_model(BY_NAME[name].build(), config)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


Steps = list[tuple[float, dict[str, Tensor]]]


def one_process(name: str, steps: int = 2) -> tuple[Steps, dict[str, Tensor]]:
    """The loss and the gradients of each step, and the adapters at the end."""
    model, found = adapted(name), []
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=EPS)
    for step in range(steps):
        adamw.zero_grad()
        with in_double():
            loss = model(**batch_of("causal", step)).loss
            loss.backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        found.append((loss.item(), gradients))
    return found, {key: p.detach() for key, p in model.named_parameters() if p.requires_grad}


def compared(name: str, gpc: ParallelContext, truth: tuple[Steps, dict[str, Tensor]]) -> Any:
    """The engine after the same steps, each of which was compared."""
    model = colonnade.parallelize(adapted(name), context=gpc)
    engine, *_ = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.01, eps=EPS), context=gpc)
    assert all(parameter.requires_grad == ("lora_" in key) for key, parameter in engine.model.named_parameters())
    ranks = gpc.layout.distinct_data
    first = gpc.get_local_rank(ParallelMode.DATA) if ranks > 1 else 0
    rows = [slice(0, ROWS)] if ranks == 1 else [slice(0, 2), slice(2, ROWS)]
    steps, weights = truth
    for step, (loss, gradients) in enumerate(steps):
        engine.zero_grad()
        with in_double():
            found = engine.execute_schedule(iter([num_rows(batch_of("causal", step), rows[first])]))[2]
        assert ranks > 1 or found.item() == pytest.approx(loss, rel=RTOL)
        outcome = engine._sum_gradients()
        if gpc.config.get("zero") is None:  # a sharded optimizer keeps what it was given to itself
            compare(gradients, adapters(gather_gradients(engine.model, gpc)), RTOL)
        engine._finish_step(outcome)
    compare(weights, adapters(gather_weights(engine.model, gpc)), RTOL)
    return engine


def adapters(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in found.items() if "lora_" in key}


def trained(layout: str) -> list[str]:
    """Packed weights, which lie transposed, are another case only where they are cut."""
    return list(TARGETS) if layout == "tensor" else ["llama"]


def _layouts(folder: str, layouts: list[str]) -> None:
    truths = {name: one_process(name) for name in TARGETS}
    for layout in layouts:
        with launch(
            {**(LAYOUTS | ON_FOUR)[layout], "clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False
        ) as gpc:
            for name in trained(layout):
                engine = compared(name, gpc, truths[name])
                cut = [key for key, value in engine.model.named_parameters() if placement_of(value).shards]
                assert (
                    any("lora_B" in key for key in cut) == any("lora_A" in key for key in cut) == ("tensor" in layout)
                )
                engine.save_pretrained(Path(folder, layout, name))
                engine.close()
            if layout == "tensor":
                _mistakes(gpc)
                _merged(gpc)
                _dropped(gpc)
                _loaded_on_meta(gpc, folder)
    torch.save({name: weights for name, (_, weights) in truths.items()}, Path(folder, "truth.pt"))


def _mistakes(gpc: ParallelContext) -> None:
    """What cannot be right is refused by name, and the model stays as it was."""
    import peft

    for told, model in (
        (r"DoraLinear.*q_proj|q_proj.*DoraLinear", adapted("llama", use_dora=True)),
        (r"'lm_head' .*modules_to_save.*target_modules", adapted("llama", modules_to_save=["lm_head"])),
        ("of type ia3", peft.get_peft_model(BY_NAME["llama"].build(), ia3())),
        (
            "target_parameters",
            peft.get_peft_model(
                BY_NAME["mixtral"].build(), peft.LoraConfig(target_parameters=["mlp.experts.gate_up_proj"], r=2)
            ),
        ),
    ):
        before = [f"{type(module).__module__}.{type(module).__name__}" for module in model.modules()]
        with pytest.raises(PlacementError, match=told):
            colonnade.parallelize(model, context=gpc)
        assert [f"{type(module).__module__}.{type(module).__name__}" for module in model.modules()] == before
    advised = peft.get_peft_model(BY_NAME["llama"].build(), peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2))
    assert colonnade.parallelize(advised, context=gpc) is advised
    cut = colonnade.parallelize(BY_NAME["llama"].build(), context=gpc)
    late: Any = peft.get_peft_model(cut, peft.LoraConfig(target_modules=["o_proj"], r=2))  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match=r"o_proj.*get_peft_model.*first, and colonnade\.parallelize"):
        initialize(late, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)


def ia3() -> Any:
    import peft

    return peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])


def _merged(gpc: ParallelContext) -> None:
    """A rank's parts of A and B make its part of what is added to the weight."""
    expected, model = adapted("gpt2"), colonnade.parallelize(adapted("gpt2"), context=gpc)
    for each in (expected, model):
        each.merge_adapter()  # type: ignore[union-attr, operator]
    whole = {key: parameter.detach() for key, parameter in expected.named_parameters() if "base_layer" in key}
    compare(whole, gather_weights(model, gpc), 1e-12)  # type: ignore[arg-type]


def _dropped(gpc: ParallelContext) -> None:
    """What is whole is dropped alike on all ranks; of what is cut each rank drops its own."""
    model: Any = colonnade.parallelize(adapted("llama", lora_dropout=0.5), context=gpc)
    block, ones = model.get_base_model().model.layers[0], torch.ones(4, 32)
    for layer, alike in ((block.self_attn.q_proj, True), (block.self_attn.o_proj, False)):
        found = [torch.empty_like(ones) for _ in range(2)]
        torch.distributed.all_gather(found, layer.lora_dropout["default"](ones))
        assert torch.equal(*found) == alike


def _loaded_on_meta(gpc: ParallelContext, folder: str) -> None:
    """from_pretrained gives a model its adapters; A is drawn alike on all ranks, B is zero."""
    import peft

    base = Path(folder, "base")
    if gpc.get_global_rank() == 0:
        BY_NAME["llama"].build().save_pretrained(base)  # type: ignore[operator]
    torch.distributed.barrier()
    config = peft.LoraConfig(target_modules=TARGETS["llama"], r=4)
    with in_double():
        model = colonnade.from_pretrained(base, adapters=config, dtype=torch.float64, context=gpc)
        engine, *_ = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)
        found = engine(**batch_of("causal", 0)).loss
        expected = BY_NAME["llama"].build()(**batch_of("causal", 0)).loss
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=0)
    drawn = adapters(gather_weights(engine.model, gpc))
    assert all(bool(value.any()) == ("lora_A" in key or "embedding_B" in key) for key, value in drawn.items())
    engine.close()


def _first_stage_alone(folder: str) -> None:
    """Only the first layer has adapters, so the second stage has none."""
    for number, config in enumerate((LAYOUTS["pipeline"], PLAIN)):
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = colonnade.parallelize(
                adapted("llama", layers_to_transform=[0], layers_pattern="layers"), context=gpc
            )
            engine, *_ = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)
            engine.save_pretrained(Path(folder, str(number)))
            engine.close()


@pytest.mark.slow
@on_ranks(2)
def test_whole_weights_and_checkpoints_have_the_names_of_the_wrapped_model(tmp_path):
    folder = str(tmp_path)
    """Whole weights have the names of the wrapped model on every layout, and a checkpoint goes from each to the next."""
    whole = adapted("llama").state_dict()
    two_each = {"type": "Interleaved1F1B", "num_microbatches": 2, "num_chunks": 2}
    layouts: list[dict[str, Any]] = [
        {"parallel": {"pipeline": 2}, "schedule": SCHEDULE},
        PLAIN,
        {"parallel": {"pipeline": 2}, "schedule": two_each},
    ]
    for at, config in enumerate(layouts):
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = colonnade.parallelize(adapted("llama"), context=gpc)
            engine, *_ = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)
            with CheckpointManager(folder, gpc) as manager:
                if at:
                    with torch.no_grad():
                        for parameter in engine.model.parameters():
                            parameter.zero_()
                    manager.load(engine.model, engine.optimizer)
                found = engine.full_state_dict()
                assert sorted(found) == sorted(whole)
                assert all(torch.equal(found[key], value) for key, value in whole.items())
                manager.save(at + 1, engine.model, engine.optimizer)
            engine.close()


@pytest.mark.slow
def test_adapters_of_one_stage_alone_are_saved(tmp_path):
    from safetensors.torch import load_file

    run_world(2, _first_stage_alone, str(tmp_path))
    found, plain = (load_file(tmp_path / str(number) / "adapter_model.safetensors") for number in range(2))
    assert {key.split(".")[4] for key in found} == {"0"}
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[key], plain[key]) for key in found)


@pytest.mark.slow
def test_adapters_train_as_in_one_process_and_peft_loads_them(tmp_path):
    import peft
    from safetensors.torch import load_file

    run_world(2, _layouts, str(tmp_path), list(LAYOUTS), timeout=180)
    truth = torch.load(tmp_path / "truth.pt")
    for layout in LAYOUTS:
        for name in trained(layout):
            model = adapted(name)
            model.save_pretrained(tmp_path / "peft" / name, save_embedding_layers=False)
            saved = [load_file(tmp_path / at / name / "adapter_model.safetensors") for at in (layout, "peft")]
            assert saved[0].keys() == saved[1].keys()
            loaded = peft.PeftModel.from_pretrained(BY_NAME[name].build(), tmp_path / layout / name)
            found = {key: value for key, value in loaded.named_parameters() if "lora_" in key}
            compare(truth[name], found, RTOL)


@pytest.mark.long
def test_adapters_train_on_stages_that_are_cut(tmp_path):
    run_world(4, _layouts, str(tmp_path), list(ON_FOUR), timeout=240)


def test_other_adapters_and_modules_to_save_have_names_of_their_own():
    from colonnade.hf.lora import _file_name

    assert _file_name("m.q.lora_A.other.weight", "other") == "base_model.model.m.q.lora_A.weight"
    assert _file_name("base_model.model.e.lora_embedding_A.default", "default") == "base_model.model.e.lora_embedding_A"
    assert _file_name("score.modules_to_save.default.bias", "default") == "base_model.model.score.bias"
