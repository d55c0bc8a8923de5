"""The names that scripts of the ancestor import most: each is there, goes away with the alias, and does its work."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import colonnade
from colonnade import compat
from colonnade.compat.names import MISSING, NAMES
from colonnade.errors import ColonnadeError, ConfigError

# As its scripts write them.
IMPORTS = {
    "initialize": "launch launch_from_torch launch_from_slurm launch_from_openmpi get_default_parser initialize",
    "amp": "AMP_TYPE",
    "amp.amp_type": "AMP_TYPE",
    "communication": "send_forward recv_forward send_backward recv_backward send_forward_recv_backward "
    "send_backward_recv_forward send_forward_recv_forward send_backward_recv_backward all_reduce all_gather broadcast",
    "communication.p2p": "send_forward recv_forward send_backward recv_backward",
    "context": "Config ParallelMode seed set_mode add_seed reset_seeds MOE_CONTEXT",
    "context.config": "Config ConfigException",
    "context.moe_context": "MOE_CONTEXT",
    "context.random": "seed set_mode add_seed reset_seeds",
    "core": "global_context",
    "engine": "PipelineSchedule NonPipelineSchedule InterleavedPipelineSchedule",
    "engine.schedule": "PipelineSchedule NonPipelineSchedule InterleavedPipelineSchedule BaseSchedule",
    "nn": "Linear1D_Col Linear1D_Row CheckpointModule",
    "nn.layer.moe": "Experts FFNExperts MoeLayer MoeModule Top1Router Top2Router NormalNoiseGenerator",
    "nn.layer.wrapper": "PipelineSharedModuleWrapper",
    "nn.lr_scheduler": "MultiStepLR OneCycleLR PolynomialLR StepLR ExponentialLR CosineAnnealingLR LinearWarmupLR",
    "nn.optimizer": "Lamb Lars FusedAdam HybridAdam",
    "trainer": "Trainer hooks",
    "trainer.hooks": "SaveCheckpointHook LoadCheckpointHook TensorboardHook LogTimingByEpochHook LossHook",
    "testing": "parameterize rerun_if_address_is_in_use assert_equal assert_close skip_if_not_enough_gpus",
    "utils": "save_checkpoint load_checkpoint is_using_pp is_dp_rank_0 is_tp_rank_0 is_no_pp_or_last_stage is_using_ddp "
    "sync_model_param clip_grad_norm_fp32 Timer MultiTimer DataParallelSampler report_memory_usage get_dataloader",
    "utils.checkpointing": "save_checkpoint load_checkpoint",
    "utils.common": "is_using_pp is_dp_rank_0 print_rank_0 clip_grad_norm_fp32 sync_model_param",
    "utils.cuda": "get_current_device synchronize empty_cache set_to_cuda",
}


@pytest.mark.usefixtures("alias")
@pytest.mark.parametrize("module", IMPORTS)
def test_names_can_be_imported(module: str) -> None:
    found: dict[str, object] = {}
    exec(f"from colossalai.{module} import {', '.join(IMPORTS[module].split())}", found)
    exec(f"import colossalai.{module}\nimport colossalai.{module} as again", found)
    assert all(name in found for name in IMPORTS[module].split())


@pytest.mark.usefixtures("alias")
def test_initialize_is_a_module_and_a_function() -> None:
    import colossalai
    import colossalai.communication.p2p
    from colossalai.initialize import initialize, launch

    assert colossalai.initialize is initialize is colonnade.initialize
    assert launch is colonnade.launch
    assert colossalai.communication.p2p.send_forward is colossalai.communication.send_forward


def test_names_go_away_with_the_alias() -> None:
    from colonnade.engine import schedule
    from colonnade.nn import lr_scheduler

    before = {module: dict(vars(module)) for module in (schedule, lr_scheduler, colonnade.utils, colonnade.nn)}
    compat.install()
    assert colonnade.utils.save_checkpoint
    assert lr_scheduler.CosineAnnealingLR is not before[lr_scheduler]["CosineAnnealingLR"]
    compat.uninstall()
    for module, names in before.items():
        assert {name for name in vars(module) if name not in names} == set()
        assert all(vars(module)[name] is value for name, value in names.items())
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("colossalai.communication")


def test_no_name_is_in_both_tables() -> None:
    for path, missing in MISSING.items():
        assert not set(missing) & {name for names in NAMES.get(path, {}).values() for name in names.split()}


@pytest.mark.usefixtures("alias")
def test_names_without_a_counterpart_say_what_to_write() -> None:
    from colossalai.context.moe_context import MOE_CONTEXT
    from colossalai.nn.layer.moe import MoeModule, Top2Router

    with pytest.raises(
        ColonnadeError, match=r"MOE_CONTEXT of Colossal-AI has no counterpart.*parallel = dict\(expert="
    ):
        MOE_CONTEXT.setup(seed=42)
    with pytest.raises(ColonnadeError, match=r"nn\.layer\.moe\.MoeModule .*colonnade\.nn\.moe\.MoE"):
        MoeModule(dim_model=8, num_experts=4)
    with pytest.raises(ColonnadeError, match=r"TopKRouter\(hidden, experts, k=2\)"):
        Top2Router(capacity_factor_train=1.5)
    with pytest.raises(ColonnadeError, match="no counterpart"):

        class Mine(MoeModule):
            pass


@pytest.mark.usefixtures("alias")
def test_timers_keep_what_they_are_told_to() -> None:
    from colossalai.utils import MultiTimer, Timer

    timer = Timer()
    for keep in (False, True, True):
        timer.start()
        assert timer.stop(keep_in_history=keep) > 0
    assert len(timer.history) == 2
    assert timer.get_history_sum() == pytest.approx(2 * timer.get_history_mean())
    timers, off = MultiTimer(on=True), MultiTimer(on=False)
    for several in (timers, off):
        several.start("train")
        several.stop("train", keep_in_history=True)
    assert [(name, len(held.history)) for name, held in timers] == [("train", 1)]
    assert list(off) == []
    timers.start("train")
    timers.reset("train")
    assert timers.stop("train") == 0.0  # never begun, or forgotten
    assert (timers.get_timer("train").history, timers.get_timer("train").get_elapsed_time()) == ([], 0.0)


@pytest.mark.usefixtures("alias")
def test_a_trainer_measures_epochs_and_steps_with_the_timer_it_is_given() -> None:
    import colossalai
    from colossalai.trainer import Trainer, hooks
    from colossalai.utils import MultiTimer

    gpc, model = colossalai.launch({}, verbose=False), nn.Linear(2, 1)
    engine = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)[0]
    batches, timer = [(torch.ones(2, 2), torch.ones(2, 1))] * 2, MultiTimer()
    seen: list[dict[str, int]] = []
    shown: list[str] = []

    class Log:
        info = shown.append

    class Laps(hooks.BaseHook):
        def after_test_epoch(self, trainer: object) -> None:
            seen.append({name: len(held.history) for name, held in timer})

    trainer = Trainer(engine=engine, timer=timer)
    trainer.fit(
        batches, epochs=1, test_dataloader=batches, hooks=[Laps(), hooks.LogTimingByEpochHook(None, Log(), priority=20)]
    )
    with pytest.raises(colonnade.errors.HookError, match="LogTimingByEpochHook needs a timer"):
        Trainer(engine).fit(batches, epochs=1, hooks=[{"type": "LogTimingByEpochHook"}])
    gpc.destroy()
    assert seen == [{"Train-epoch": 1, "Train-step": 0, "Test-epoch": 1, "Test-step": 2}]  # logged steps are forgotten
    assert [line.partition(":")[0] for line in shown] == ["epoch 1 train", "epoch 1 test"]
    assert all(", a step " in line for line in shown)


@pytest.mark.usefixtures("alias")
def test_a_checkpoint_module_has_the_gradients_of_its_forward() -> None:
    from colossalai.nn import CheckpointModule

    class Block(CheckpointModule):
        def __init__(self, checkpoint: bool) -> None:
            super().__init__(checkpoint=checkpoint)
            self.linear, self.runs = nn.Linear(3, 3), 0

        def _forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            self.runs += 1
            return scale * self.linear(x).tanh()

    plain, again = Block(False), Block(True)
    again.load_state_dict(plain.state_dict())
    for block in (plain, again):
        block(torch.ones(2, 3, requires_grad=True), scale=2.0).sum().backward()
    assert (plain.runs, again.runs) == (1, 2)
    assert torch.equal(plain.linear.weight.grad, again.linear.weight.grad)
    again.eval()
    again(torch.ones(2, 3))
    assert again.runs == 3


@pytest.mark.usefixtures("alias")
def test_schedules_take_the_ancestors_arguments() -> None:
    from colossalai.engine import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule

    def process(stage_output, micro_batch):
        return micro_batch

    plain = PipelineSchedule(4, process, (2, 3), scatter_gather_tensors=True)
    assert (plain.num_microbatches, plain.order, plain.tensor_shape) == (4, "1f1b", (2, 3))
    chunked = InterleavedPipelineSchedule(4, 2, tensor_shape=(2, 3))
    assert (chunked.num_chunks, chunked.order) == (2, "interleaved_1f1b")
    assert isinstance(plain, colonnade.engine.schedule.schedules.BaseSchedule)
    assert NonPipelineSchedule().data_process_func is None


@pytest.mark.usefixtures("alias")
def test_what_a_layer_of_the_ancestor_took_and_ours_does_not_is_refused() -> None:
    from colossalai.nn import Linear1D_Col, Linear1D_Row

    assert Linear1D_Col(4, 6, bias=False, gather_output=True).weight.shape == (6, 4)
    assert Linear1D_Row(4, 6, parallel_input=False, dtype=torch.float64).weight.dtype == torch.float64
    with pytest.raises(ConfigError, match="skip_bias_add=True"):
        Linear1D_Col(4, 6, skip_bias_add=True)
    with pytest.raises(ConfigError, match=r"weight_initializer.*from_module"):
        Linear1D_Row(4, 6, weight_initializer=nn.init.zeros_)


@pytest.mark.usefixtures("alias")
def test_decorators_and_assertions_of_tests() -> None:
    from colossalai.testing import (
        assert_close,
        assert_equal,
        assert_not_equal,
        parameterize,
        rerun_if_address_is_in_use,
        rerun_on_exception,
        skip_if_not_enough_gpus,
    )

    seen = []

    @parameterize("a", [1, 2])
    @parameterize("b", ["x", "y"])
    def both(a, b, c):
        seen.append((a, b, c))

    both(c=0)
    assert seen == [(1, "x", 0), (1, "y", 0), (2, "x", 0), (2, "y", 0)]
    tries = []

    @rerun_if_address_is_in_use()
    def once_in_use():
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("\nThe server socket has failed: Address already in use")
        return "ran"

    assert (once_in_use(), len(tries)) == ("ran", 3)

    @rerun_on_exception(ValueError, max_try=2)
    def never():
        tries.append(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        never()
    assert len(tries) == 5
    assert skip_if_not_enough_gpus(10_000)(never)() is None
    one = torch.ones(2)
    assert_equal(one, one.clone())
    assert_not_equal(one, 2 * one)
    assert_close(one, one + 1e-9)
    with pytest.raises(AssertionError):
        assert_close(one, one + 1e-3)
