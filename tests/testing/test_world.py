"""A world as a whole: values, every way to fail, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from colonnade.testing import WorldError, run_world

ROOT = Path(__file__).parents[2]
DETAIL_OFF = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}


def exists(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone_within(seconds: float, pids: list[int]) -> list[int]:
    """Return the pids that still exist after the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(exists(pid) for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if exists(pid)]


def summed(scale: float, *, offset: float = 0.0) -> torch.Tensor:
    total = torch.full((3,), scale * (dist.get_rank() + 1) + offset, dtype=torch.float64)
    dist.all_reduce(total)
    return total


def nothing() -> None: ...


def pid() -> int:
    return os.getpid()


def raise_on(bad: int) -> None:
    if dist.get_rank() == bad:
        print("about to raise")
        raise ValueError(f"rank {bad} is broken")
    dist.all_reduce(torch.ones(1))


def raise_everywhere() -> None:
    raise KeyError("everywhere")


class SlowToImport:
    """An argument that takes longer to arrive on rank 1 than the grace after a failure."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return late_on_rank_1, ()


def late_on_rank_1() -> None:
    if os.environ.get("RANK") == "1":
        time.sleep(6)


class SlowToJoin:
    """An argument that makes rank 1 need the store of rank 0 a moment after rank 0 has joined."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return join_late_on_rank_1, ()


def join_late_on_rank_1() -> None:
    join = dist.init_process_group

    def late(*args: object, store: dist.Store, **options: object) -> None:
        join(*args, store=store, **options)  # type: ignore[arg-type]
        time.sleep(0.5)
        store.add("late", 1)

    if os.environ.get("RANK") == "1":
        dist.init_process_group = late  # type: ignore[assignment]


def raise_with(_: object) -> None:
    raise KeyError("everywhere")


def kill_on(bad: int, number: int) -> None:
    if dist.get_rank() == bad:
        print("about to die", flush=True)
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(1))


def mismatched_sizes() -> None:
    dist.all_reduce(torch.ones(100_000 if dist.get_rank() == 0 else 10))


def exit_on(bad: int, how: str) -> None:
    if dist.get_rank() == bad:
        os._exit(3) if how == "os" else sys.exit(0)
    dist.all_reduce(torch.ones(1))


def wait_for_a_ghost() -> None:
    time.sleep(600)


def hang_in_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        wait_for_a_ghost()


def stop_on(bad: int) -> None:
    if dist.get_rank() == bad:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def deaf_after_failure() -> None:
    if dist.get_rank() == 0:
        raise ValueError("first")
    wait_for_a_ghost()


def slow_last_rank() -> bytes:
    """The last rank still needs the store that rank 0 serves and the values its peers sent."""
    last = dist.get_world_size() - 1
    if dist.get_rank() < last:
        dist.send(torch.ones(1), last)
        return b""
    time.sleep(0.7)
    for peer in range(last):
        dist.recv(torch.ones(1), peer)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set("still", "there")
    return store.get("still")


def with_child() -> list[int]:
    child = subprocess.Popen(["sleep", "600"])
    return [os.getpid(), child.pid]


def with_thread() -> int:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return os.getpid()


def with_shared_memory(strategy: str, folder: str) -> None:
    torch.multiprocessing.set_sharing_strategy(strategy)
    tensors = [torch.ones(1000).share_memory_() for _ in range(3)]
    Path(folder, "pid").write_text(str(os.getpid()))
    if strategy == "file_system":
        assert any(name.startswith(f"torch_{os.getpid()}_") for name in os.listdir("/dev/shm"))
    os.kill(os.getpid(), signal.SIGKILL)
    assert tensors


def close_everything() -> None:
    os.closerange(3, 100)
    time.sleep(600)


def leave_pids_and_sleep(folder: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    text = f"{os.getpid()} {child.pid} {Path(os.environ['TMPDIR']).parent}"
    scratch = Path(folder) / f".{os.getpid()}"
    scratch.write_text(text)
    scratch.rename(Path(folder) / f"{os.getpid()}.pids")
    time.sleep(600)


def test_values_arguments_and_keywords() -> None:
    result = run_world(4, summed, 2.0, offset=1.0)
    assert [value.tolist() for value in result.values] == [[24.0] * 3] * 4
    assert result.ok
    assert [outcome.kind for outcome in result.outcomes] == ["value"] * 4
    assert 0 < result.seconds < 60


def test_the_second_world_of_four_starts_fast() -> None:
    run_world(1, nothing)
    # On a busy machine one of many; on another the first.
    assert any(run_world(4, nothing).seconds < 1.5 for _ in range(20))


@pytest.mark.parametrize("bad", [0, 2])
def test_the_rank_that_raised_is_named_with_traceback_and_log(bad: int) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(3, raise_on, bad)
    text = str(caught.value)
    assert text.startswith(f"rank {bad}: ValueError: rank {bad} is broken (world of 3")
    assert 'raise ValueError(f"rank {bad} is broken")' in text
    assert f"--- stdout of rank {bad}\nabout to raise" in text
    assert caught.value.rank == bad
    for other in {0, 1, 2} - {bad}:
        assert sum(line.startswith(f"rank {other}: ") for line in text.splitlines()) == 1


def test_without_check_all_outcomes_come_back() -> None:
    result = run_world(2, raise_everywhere, check=False)
    assert [(o.kind, o.type, o.message) for o in result.outcomes] == [("exception", "KeyError", "'everywhere'")] * 2
    assert not result.ok
    assert result.values == [None, None]


def test_a_rank_that_is_still_joining_reaches_the_function() -> None:
    result = run_world(2, raise_with, SlowToJoin(), check=False)
    assert [outcome.type for outcome in result.outcomes] == ["KeyError", "KeyError"]


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_is_still_loading_may_fail_by_itself() -> None:
    result = run_world(2, raise_with, SlowToImport(), check=False, backend=None)
    assert [outcome.kind for outcome in result.outcomes] == ["exception", "exception"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_rank_killed_by_a_signal_is_named_with_it(number: signal.Signals) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(3, kill_on, 1, int(number), timeout=30)
    assert str(caught.value).startswith(f"rank 1: killed by {number.name}")
    assert "about to die" in str(caught.value)
    assert caught.value.result.seconds < 15


def test_a_rank_aborted_by_gloo_is_named_with_its_stack() -> None:
    result = run_world(2, mismatched_sizes, env=DETAIL_OFF, check=False, timeout=20)
    assert result.root_cause is not None
    assert (result.root_cause.rank, result.root_cause.signal) == (1, "SIGABRT")
    assert "mismatched_sizes" in result.stderr[1]
    assert "mismatched_sizes" in result.report()


def test_detail_is_on_by_default_and_turns_an_abort_into_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
    with pytest.raises(WorldError, match="Detected mismatch between collectives on ranks"):
        run_world(2, mismatched_sizes)


def test_leaving_by_os_exit_is_a_failure() -> None:
    with pytest.raises(WorldError, match="rank 1: exited with code 3: the function did not return"):
        run_world(2, exit_on, 1, "os")


def test_sys_exit_zero_is_a_failure() -> None:
    with pytest.raises(WorldError, match="rank 0: SystemExit: 0"):
        run_world(2, exit_on, 0, "sys")


@pytest.mark.slow
def test_a_collective_gives_up_before_the_deadline_and_the_absent_rank_is_shown() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(2, hang_in_collective, timeout=4)
    outcomes = caught.value.result.outcomes
    assert [outcome.kind for outcome in outcomes] == ["exception", "timeout"]
    assert "in wait_for_a_ghost" in outcomes[1].headline
    assert outcomes[1].headline in str(caught.value)


def test_at_the_deadline_every_stack_is_reported_and_nothing_survives() -> None:
    started = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run_world(3, wait_for_a_ghost, timeout=1)
    assert time.monotonic() - started < 15
    text = str(caught.value)
    for rank in range(3):
        assert f"--- stacks of rank {rank}" in text
        assert f"rank {rank}: still running at the deadline, in File" in text
    assert text.count("in wait_for_a_ghost") >= 3
    assert "_watch_parent" not in text


def test_a_stopped_rank_is_told_from_a_busy_one() -> None:
    result = run_world(2, stop_on, 1, timeout=1, check=False)
    assert result.outcomes[1].kind == "timeout"
    assert "the process is stopped" in result.outcomes[1].headline


@pytest.mark.slow
def test_ranks_that_do_not_notice_a_failure_are_ended_after_a_grace() -> None:
    result = run_world(2, deaf_after_failure, timeout=60, check=False)
    assert [outcome.kind for outcome in result.outcomes] == ["exception", "ended"]
    assert "in wait_for_a_ghost" in result.outcomes[1].headline
    assert result.seconds < 20


def test_a_rank_that_is_done_waits_for_the_slower_ones() -> None:
    assert run_world(4, slow_last_rank, timeout=20).values == [b"", b"", b"", b"there"]


def test_a_rank_that_closes_its_link_is_still_watched() -> None:
    result = run_world(1, close_everything, timeout=1, check=False, backend=None)
    assert result.outcomes[0].kind in ("timeout", "signal")


def test_children_of_ranks_do_not_survive() -> None:
    pids = [p for pids in run_world(2, with_child).values for p in pids]
    assert gone_within(3, pids) == []


def test_a_thread_that_never_ends_does_not_keep_a_rank() -> None:
    assert gone_within(3, run_world(2, with_thread).values) == []
    # Less than the grace of ranks that do not leave by themselves; on a busy machine once in many.
    assert any(run_world(2, with_thread).seconds < 3 for _ in range(10))


@pytest.mark.parametrize("strategy", ["file_system", "file_descriptor"])
def test_shared_memory_of_killed_ranks_does_not_survive(strategy: str, tmp_path: Path) -> None:
    result = run_world(1, with_shared_memory, strategy, str(tmp_path), check=False)
    assert result.outcomes[0].signal == "SIGKILL"
    pattern = f"torch_{(tmp_path / 'pid').read_text()}_*"
    end = time.monotonic() + 3
    while time.monotonic() < end and list(Path("/dev/shm").glob(pattern)):
        time.sleep(0.05)
    assert not list(Path("/dev/shm").glob(pattern))


def test_twenty_worlds_leave_nothing_in_the_parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_world(2, pid)
    files, threads = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    pids: list[int] = []
    for turn in range(20):
        pids += [p for p in run_world(2, pid if turn % 5 else raise_everywhere, check=False).values if p]
    assert len(pids) == 32
    assert gone_within(3, pids) == []
    assert len(os.listdir("/proc/self/fd")) == len(files)
    assert threading.active_count() == threads
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_killed_parent_leaves_no_rank_no_child_and_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "from colonnade.testing import run_world\n"
        "from tests.testing.test_world import leave_pids_and_sleep\n"
        f"run_world(2, leave_pids_and_sleep, {str(tmp_path)!r})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    end = time.monotonic() + 60
    while len(found := list(tmp_path.glob("*.pids"))) < 2:
        assert time.monotonic() < end
        assert parent.poll() is None
        time.sleep(0.1)
    lines = [file.read_text().split() for file in found]
    pids = [int(p) for line in lines for p in line[:2]]
    assert all(exists(p) for p in pids)
    parent.send_signal(number)
    parent.wait(10)
    assert gone_within(3, pids) == []
    assert not Path(lines[0][2]).exists()


def _speaks(rank_0: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(f"{rank_0}\n")
        sys.stderr.write("and beside\n")
    else:
        sys.stdout.write("another\n")


def test_what_rank_0_prints_can_be_shown_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_world(2, _speaks, "hello", show=True)
    assert capsys.readouterr().out == "hello\nand beside\n"
    assert result.stdout == ("hello\n", "another\n")
