"""The page of a run that goes on, served."""

from __future__ import annotations

import threading
from http.client import HTTPConnection

import pytest

from colonnade.errors import ConfigError
from colonnade.report.follow import make_server
from tests.report.logs import write_log


@pytest.fixture
def ask(tmp_path):
    """Ask the server of a run in tmp_path/run."""
    server = make_server([tmp_path / "run"], 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def get(path: str = "/", **headers: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    get.port = server.server_address[1]
    yield get
    server.shutdown()
    server.server_close()


def test_the_page_is_made_when_it_is_asked_for(ask, tmp_path):
    status, text = ask()
    assert status == 200
    assert "No page yet" in text
    write_log(tmp_path / "run", 5)
    status, text = ask()
    assert "<h1>run</h1>" in text
    assert 'http-equiv="refresh"' in text
    write_log(tmp_path / "run", 8)
    assert "<b>8</b><span>steps" in ask()[1]


def test_only_this_machine_and_only_the_page(ask):
    assert ask("/etc/passwd")[0] == 404
    assert ask("/", Host="attacker.example:80")[0] == 403
    with pytest.raises(ConfigError, match="give another with --port"):
        make_server(["x"], ask.port)
