"""The checks that run on a machine with a GPU: every function that they name exists, and a check runs over gloo."""

from __future__ import annotations

from tests.device.nccl_check import checks, main


def test_all_checks_are_found_and_have_distinct_names():
    found = [str(check) for check in checks()]
    assert len(found) > 180
    assert len(set(found)) == len(found)


def test_a_check_whose_function_is_the_body_of_a_test_runs(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["nccl_check", "--backend", "gloo", "--name", "wrong ones"])
    assert main() == 0
    assert '"passed": 1, "failed": []' in capsys.readouterr().out
