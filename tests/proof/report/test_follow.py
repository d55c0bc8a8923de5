"""The page of a run that goes on, served."""

from __future__ import annotations

import re
import threading
from base64 import b64encode
from hashlib import sha256
from http.client import HTTPConnection

import pytest

from colonnade.errors import ConfigError
from colonnade.proof.report.follow import make_server
from tests.proof.report.logs import write_log


@pytest.fixture
def ask(tmp_path):
    """Ask the server of a run in tmp_path/run."""
    server = make_server([tmp_path / "run"], 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def get(path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        get.headers = dict(answer.getheaders())
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
    with pytest.raises(ConfigError, match="Give another port with --port"):
        make_server(["x"], ask.port)
    assert ask("/", "POST")[0] == 501
    assert ask("/", Host="localhost")[0] == 200


def test_a_browser_runs_the_pages_own_script_alone_and_shows_it_in_no_other_page(ask, tmp_path):
    write_log(tmp_path / "run", 5)
    _, text = ask()
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    policy = ask.headers["Content-Security-Policy"]
    assert f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"<[^>]* on\w+=", text)  # which the policy would not run
    for path, headers in (("/", {}), ("/no", {}), ("/", {"Host": "attacker.example"})):
        status, body = ask(path, **headers)
        assert ask.headers["Content-Security-Policy"] == policy
        assert status != 200 or f'"Content-Security-Policy" content="{policy.rpartition("; ")[0]}"' in body
        assert ask.headers["X-Frame-Options"] == "DENY"
        assert ask.headers["X-Content-Type-Options"] == "nosniff"


def test_a_head_is_answered_without_the_page(ask, tmp_path):
    write_log(tmp_path / "run", 5)
    length = len(ask()[1].encode())
    assert ask("/", "HEAD") == (200, "")
    assert abs(int(ask.headers["Content-Length"]) - length) < 100
    assert ask("/no", "HEAD")[0] == 404
    assert ask("/", "HEAD", Host="attacker.example")[0] == 403
