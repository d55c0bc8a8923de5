"""What all tests share: what is slow, in which order they run, and a fork server of `run_world` that starts while they are collected."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

SLOW_MODULES = (
    "checkpoint/test_engine_resume.py",
    "checkpoint/storage/test_verify.py",
    "checkpoint/storage/test_writer.py",
    "checkpoint/test_convert.py",
    "checkpoint/test_load.py",
    "checkpoint/test_manager.py",
    "context/test_parallel_context.py",
    "gradients/test_ledger.py",
    "gradients/test_parity.py",
    "gradients/test_probe.py",
    "engine/schedule/executor/test_executor.py",
    "engine/schedule/test_pipeline.py",
    "engine/test_changes.py",
    "engine/test_clip.py",
    "engine/test_mistakes.py",
    "engine/test_pipeline.py",
    "engine/precision/test_policy.py",
    "engine/test_slots.py",
    "engine/test_split_model.py",
    "examples/test_own_parallelism.py",
    "models/test_ancestor_bugs.py",
    "models/test_grid.py",
    "nn/sequence/test_layer.py",
    "optim/test_field_bugs.py",
    "optim/test_random_placements.py",
    "optim/zero/test_checkpoint.py",
    "optim/zero/test_formula.py",
    "optim/zero/test_fsdp.py",
    "optim/zero/test_fsdp_models.py",
    "optim/zero/test_fsdp_order.py",
    "gradients/test_sharded.py",
    "gradients/test_shared_memory.py",
    "gradients/test_synchroniser.py",
    "gradients/test_transports.py",
    "gradients/test_uneven.py",
    "optim/zero/test_optimizer.py",
    "testing/test_world.py",
    "trainer/test_ahead.py",
    "trainer/test_loaders.py",
    "trainer/test_metrics.py",
    "trainer/test_resume.py",
    "trainer/test_torchmetrics.py",
)
"""Many worlds each: together most of the time of the tests. `make test` runs them."""


LONG = (
    "gradients/test_parity.py::test_so_they_do_over_gloo_in_tiny_buckets_and_with_or_without_overlap[data 2 x pipeline 4, tied",
    "gradients/test_parity.py::test_so_they_do_over_gloo_in_tiny_buckets_and_with_or_without_overlap[accumulation 3, uneven",
    "engine/precision/test_models.py::test_models_in_mixed_precision_at_stage_3_stay_near_one_process_in_fp64",
    "hf/test_experts.py::test_over_tensor_and_expert_ranks_at_once",
    "hf/test_weights.py::test_weights_survive_every_layout_to_the_bit",
    "models/test_grid.py::test_models_equal_one_process[2 ranks: sequence 2]",
    "models/test_grid.py::test_models_equal_one_process[4 ranks: expert 2 x sequence 2]",
    "models/test_grid.py::test_models_equal_one_process[4 ranks: expert 2 x tensor 2 1d sequence_split=True]",
    "models/test_grid.py::test_models_equal_one_process[4 ranks: expert 2]",
    "models/test_grid.py::test_models_equal_one_process[4 ranks: sequence 2 x data 2, ulysses]",
    "models/test_grid.py::test_models_equal_one_process[4 ranks: sequence 4, ring]",
    "models/test_grid.py::test_models_equal_one_process[4 ranks: tensor 4 1d]",
    "models/test_grid.py::test_models_equal_one_process[8 ranks: data 2 x expert 2 x tensor 2 1d x pipeline 2]",
    "engine/test_activations.py::test_the_same_steps_under_every_kind_of_parallelism[slow]",
    "optim/zero/test_scenarios.py::test_chunks_of_a_pipeline[ZBV]",
    "test_ancestor_loop.py::test_the_ancestors_trainer_flow_runs_through_the_alias",
    "proof/scripts/test_run.py::test_a_handler_that_does_not_divide_is_named_and_fails_a_test",
    "cli/test_new.py::test_the_written_test_fails_when_the_parallelism_is_broken",
    "launching/test_launcher.py::test_restarts_in_a_row_all_come_up[2]",
    "launching/test_launcher.py::test_two_machines_make_one_world[True]",
    "engine/test_compiling.py::test_models_that_are_split_compile_without_a_break_too",
    "models/test_grid.py::test_models_equal_one_process[8 ranks: data 2 x expert 2 x tensor 4 2d]",
    "models/test_grid.py::test_models_equal_one_process[8 ranks: data 2 x pipeline 2 x tensor 2 1d]",
    "models/test_grid.py::test_models_equal_one_process[8 ranks: pipeline 2 x tensor 4 2d]",
    "models/test_grid.py::test_models_equal_one_process[8 ranks: sequence 2 x expert 2 x pipeline 2]",
    "models/test_grid.py::test_models_equal_one_process[8 ranks: sequence 2 x tensor 4 2d]",
    "models/test_grid.py::test_models_equal_one_process[8 ranks: tensor 8 2.5d depth=2]",
    "mutants/test_mutants.py::test_noticed_means_that_a_test_fails_which_passes_without_the_change",
    "nn/layer/test_parity.py::test_every_layer_equals_one_process[3d 8]",
    "optim/test_field_bugs.py::test_every_layout_by_engine_for_every_order[data 2 x tensor 2-3.0]",
    "optim/test_field_bugs.py::test_every_layout_by_engine_for_every_order[data 8-inf]",
    "optim/test_field_bugs.py::test_every_layout_by_engine_for_every_order[tensor 8-inf]",
    "optim/zero/test_parity.py::test_every_optimizer_clipped_and_accumulated[data 2 x tensor 2-2]",
    "optim/zero/test_parity.py::test_every_optimizer_clipped_and_accumulated[data 4-3]",
    "checkpoint/test_engine_resume.py::test_a_resumed_engine_goes_on_to_the_bit[data 2 x pipeline 4, tied]",
    "optim/test_random_placements.py::test_fifty_layouts_on_8_ranks",
    "optim/zero/test_formula.py::test_memory_is_what_the_formula_says[torch.bfloat16-4]",
    "optim/zero/test_formula.py::test_memory_is_what_the_formula_says[torch.float32-4]",
    "optim/zero/test_scenarios.py::test_every_scenario[data 2 x pipeline 4, tied]",
    "gradients/test_uneven.py::test_a_parameter_without_gradient_on_some_ranks_and_on_all[4]",
    "trainer/test_killed_runs.py::test_a_run_that_is_started_again_by_the_launcher_ends_as_the_undisturbed_one",
    "trainer/test_killed_runs.py::test_ten_kills_at_random_steps_change_no_bit[4 ranks]",
)
"""Single cases of which others stay in `make test`: each takes longer than most."""


ONE_WORKER = (
    "cli/test_ckpt.py",
    "corpus/test_corpus.py",
    "corpus/test_field.py",
    "gradients/test_ledger.py",
    "gradients/test_probe.py",
    "hf/test_weights.py",
    "optim/test_field_bugs.py",
    "parallel/meta/test_meta_init.py",
    "seeds/test_gradient_clipping.py",
    "test_source_files.py",
)
"""Their tests look at what one run has left: two workers would make it twice."""


TRANSFORMERS = ("transformers", "transformers.models.llama.modeling_llama")
"""Imported once by the fork server: about 40 ranks of `make test` would need 1.3 s each."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Among fast tests, files that have none are not imported."""
    return True if config.option.markexpr == "not slow" and str(collection_path).endswith(SLOW_MODULES) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(LONG):
            item.add_marker(pytest.mark.long)
        if str(item.path).endswith(SLOW_MODULES) or item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
        if str(item.path).endswith(ONE_WORKER):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    if hasattr(config, "workerinput"):  # the small ones last: no worker waits long for the other
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    tenth = os.environ.get("TENTH")
    if tenth:  # one tenth of the tests, of every file some: `make long TENTH=3`
        left = [item for item in items if crc32(item.nodeid.encode()) % 10 != int(tenth) % 10]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give every test random numbers of its own, the same in each run, and say how torch watches the collectives.

    With DETAIL every collective is compared with the other ranks', which is half of the time of large tests. So the fast
    and the long ones have it, and in `make test` the slow ones do not: `make long` runs them again with it.
    """
    import torch

    torch.manual_seed(crc32(item.nodeid.encode()))
    only_slow = item.get_closest_marker("slow") and not item.get_closest_marker("long")
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF" if only_slow and not os.environ.get("ALL_DETAIL") else "DETAIL"


def pytest_configure(config: pytest.Config) -> None:
    distributes = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not config.option.collectonly and not distributes:  # who only hands out tests needs no torch
        from colonnade.testing.world import start_server

        whole_suite = not config.option.file_or_dir and config.option.markexpr != "not slow"
        start_server(TRANSFORMERS if whole_suite else ())


# The machines of tests are busy: a slow example says nothing about the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless Chromium. One at a time: Playwright keeps a loop of asyncio running, beside which no second one starts."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright here: make browser installs it")
    binary = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if binary is None:
        pytest.skip("no Chromium here: apt-get install chromium, or CHROMIUM=path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()
