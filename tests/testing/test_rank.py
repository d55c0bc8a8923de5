"""What a rank sees and what it hands back."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colonnade.testing import WorldError, run_world


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def settings() -> tuple[int, str, str, int]:
    return torch.get_num_threads(), dist.get_debug_level().name, dist.get_backend(), dist.get_world_size()


def is_initialized() -> bool:
    return dist.is_initialized()


def noisy() -> None:
    print("from print")
    os.write(1, b"from the descriptor\n")
    logging.getLogger("noisy").warning("from logging")
    warnings.warn("from warnings", stacklevel=1)
    os.write(2, b"from stderr's descriptor\n")
    sys.stdout.write("no newline at the end")


def changed_in_place(tensor: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    tensor += dist.get_rank() + 1
    dist.barrier()
    return tensor


def temporary_file() -> str:
    handle, name = tempfile.mkstemp()
    os.close(handle)
    return name


def hard_to_pickle() -> Any:
    return threading.Lock()


def bare_assert() -> None:
    seen, wanted = 3, [4] * 1000
    assert seen == wanted


def own_group() -> int:
    dist.init_process_group("gloo")
    total = torch.tensor([int(os.environ["RANK"])])
    dist.all_reduce(total)
    return int(total.item())


def listening_addresses() -> set[str]:
    """Return the local addresses, in hexadecimal, of the sockets on which this process listens."""
    own = set()
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            own.add(str(os.fstat(number).st_ino))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in own}


def graph_output() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 3


def test_every_rank_knows_its_place() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert run_world(2, variables, *names).values == [
        ["0", "0", "2", "2", "127.0.0.1"],
        ["1", "1", "2", "2", "127.0.0.1"],
    ]


def test_defaults_are_one_thread_and_detail_unless_the_environment_says_otherwise(monkeypatch) -> None:
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    assert run_world(2, settings).values == [(1, "DETAIL", "gloo", 2)] * 2
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    assert run_world(2, settings).values == [(1, "INFO", "gloo", 2)] * 2


def test_env_changes_what_torch_reads() -> None:
    env = {"OMP_NUM_THREADS": "2", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    assert run_world(2, settings, env=env).values == [(2, "OFF", "gloo", 2)] * 2


def test_env_of_one_world_is_not_seen_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_world(1, variables, "HARNESS_A", env={"HARNESS_A": "x"}).values == [["x"]]
    monkeypatch.setenv("HARNESS_B", "set after the fork server was started")
    monkeypatch.delenv("HOME")
    assert run_world(1, variables, "HARNESS_A", "HARNESS_B", "HOME").values == [
        [None, "set after the fork server was started", None]
    ]


def test_without_a_backend_there_is_no_group_but_all_to_make_one() -> None:
    assert run_world(2, is_initialized, backend=None).values == [False, False]
    assert run_world(3, own_group, backend=None).values == [3, 3, 3]


def test_output_is_captured_from_the_descriptors_and_kept_from_the_parent(capfd: pytest.CaptureFixture[str]) -> None:
    result = run_world(2, noisy)
    for rank in range(2):
        assert result.stdout[rank] == "from print\nfrom the descriptor\nno newline at the end"
        for text in ("from logging", "from warnings", "from stderr's descriptor"):
            assert text in result.stderr[rank]
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_listens_beyond_this_machine() -> None:
    values = run_world(2, listening_addresses).values
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert values[0] | values[1] <= loopback
    assert values[0]


def test_tensor_arguments_are_not_shared_between_ranks() -> None:
    mine = torch.zeros(4)
    values = run_world(2, changed_in_place, mine).values
    assert torch.equal(values[0], torch.full((4,), 1.0))
    assert torch.equal(values[1], torch.full((4,), 2.0))
    assert torch.equal(mine, torch.zeros(4))


def test_a_tensor_with_a_graph_comes_back_by_value() -> None:
    (value,) = run_world(1, graph_output).values
    assert value.tolist() == [3.0, 3.0]


def test_temporary_files_of_ranks_go_with_the_world() -> None:
    names = run_world(2, temporary_file).values
    assert len(set(names)) == 2
    assert all("colonnade-world-" in name and not Path(name).exists() for name in names)


def test_a_return_value_that_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(WorldError, match="hard_to_pickle returned a lock that cannot be pickled"):
        run_world(1, hard_to_pickle)


def test_a_bare_assert_shows_its_variables() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(1, bare_assert)
    text = str(caught.value)
    assert "assert seen == wanted" in text
    assert "where seen = 3" in text
    assert "where wanted = [4, 4" in text
    assert len(text) < 2000
    assert "rank.py" not in text.replace("test_rank.py", "")
