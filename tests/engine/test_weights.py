"""The whole weights of an engine of one process: to whom, in which type, in which file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from colonnade.errors import CheckpointError
from tests.engine.test_engine import start, world_of_one


def test_whole_weights_in_memory_and_in_a_file(tmp_path):
    with world_of_one() as gpc:
        engine = start(gpc)
        engine.model.register_buffer("seen", torch.tensor([3]))
        own = {name: value.detach() for name, value in engine.model.state_dict().items()}
        for to in ("all", "first"):
            found = engine.full_state_dict(to)
            assert found.keys() == own.keys()
            assert all(torch.equal(found[name], own[name]) and found[name].dtype == own[name].dtype for name in own)
        half = engine.full_state_dict(dtype=torch.bfloat16)
        assert {value.dtype for name, value in half.items() if name != "seen"} == {torch.bfloat16}
        assert half["seen"].dtype == torch.int64
        assert engine.full_state_dict(tmp_path / "x.safetensors") == {}
        written = load_file(tmp_path / "x.safetensors")
        assert all(torch.equal(written[name], own[name]) for name in own)
        with pytest.raises(CheckpointError) as error:
            engine.full_state_dict("every")
        assert str(error.value).startswith(
            "to is 'all', 'first' or the name of a .safetensors file to write, not 'every'"
        )
        engine.close()


def test_weights_that_are_on_their_way_are_waited_for(tmp_path):
    with world_of_one() as gpc:
        engine, waited = start(gpc), list[str]()
        engine.wait_for_weights()  # there is nothing to wait for
        engine.engine_optimizer.wait = lambda: waited.append("waited")
        engine.full_state_dict()
        assert len(waited) == 1
        with pytest.raises(CheckpointError):  # a model without a config of transformers
            engine.save_pretrained(tmp_path / "folder")
        assert len(waited) == 2
        engine.close()
