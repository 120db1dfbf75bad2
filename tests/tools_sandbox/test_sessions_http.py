"""Sessions over HTTP, and lost clients; with a real server process."""

from __future__ import annotations

import time

import pytest

from tests.backend import needs_jail
from tests.tools_sandbox.sandbox_server import LONG, serving, soon
from tools_sandbox.client import Sandbox
from tools_sandbox.faults import SessionEnded
from tools_sandbox.jail.wire import Verdict
from tools_sandbox.service.remote import RemoteConfig

pytestmark = needs_jail
_SLEEP = "import time\nprint('begun', flush=True)\ntime.sleep(50)"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  token = tmp_path_factory.mktemp("token") / "token"
  token.write_text("word")
  with serving(
    "--slots=1", f"--token_file={token}", "--max_waiting=2", token="word"
  ) as s:
    yield s
    # No test in this file broke the server's zygote.
    assert s.metric("sandbox_zygotes_replaced_total") == 0


@pytest.fixture
def remote(server, tmp_path):
  token = tmp_path / "token"
  token.write_text("word")
  config = RemoteConfig((server.url,), token_file=str(token), wait_s=LONG)
  with Sandbox(backend="remote", remote=config, timeout_s=20) as sandbox:
    yield sandbox


def idle(server):
  soon(lambda: server.health()["busy"] == 0)


def test_a_session_that_nobody_closes_ends_with_its_lease(server, remote):
  s = remote.session(lease_s=1.0)
  assert s.run("x = 1").verdict == Verdict.OK
  # The only slot becomes free, though nobody closed the session.
  assert remote.run("print(2)").stdout == "2\n"
  with pytest.raises(SessionEnded):
    s.run("print(x)")
  assert not s.alive


def test_a_session_is_nobodys_without_token_and_name(server):
  name = server.post("/session", json={}).json()["session"]
  token, server.token = server.token, "other"
  assert server.post(f"/session/{name}", json={"program": "1"}).status_code == 401
  server.token = token
  assert server.post("/session/abc", json={"program": "1"}).status_code == 410
  reply = server.post(f"/session/{name}", json={"program": "print(1)"})
  assert reply.json()["stdout"] == "1\n" and reply.json()["alive"]
  for body in ({"program": 1}, {"program": "1", "timeout_s": 1}, {}):
    assert server.post(f"/session/{name}", json=body).status_code == 400
  running = server.send(f"/session/{name}", {"program": _SLEEP})
  # Only one cell at a time: 409. Until the slow cell has begun, the status is 200.
  soon(lambda: _cell_status(server, name) == 409)
  running.close()
  idle(server)


def _cell_status(server, name):
  return server.post(f"/session/{name}", json={"program": ""}).status_code


@pytest.mark.parametrize("field", ["timeout_s", "memory_mb", "deadline_s", "clock_s"])
@pytest.mark.parametrize(
  ("path", "body"), [("/session", {}), ("/run", {"program": ""})]
)
def test_a_number_that_cannot_be_is_told_its_field(server, path, body, field):
  for value in ("1", True, 10**400):
    reply = server.post(path, json=body | {field: value})
    assert reply.status_code == 400, reply.text
    assert field in reply.json()["error"] and "got " in reply.json()["error"]


@pytest.mark.parametrize("value", [0, 0.5, 1e9, "1", True, 10**400])
def test_a_lease_has_bounds(server, value):
  reply = server.post("/session", json={"lease_s": value})
  assert reply.status_code == 400 and "lease_s" in reply.json()["error"]


def test_a_refused_cell_costs_no_session(server, remote):
  with remote.session() as s:
    assert s.run("x = 1").verdict == Verdict.OK
    with pytest.raises(ValueError, match="at most 8388608 bytes"):
      s.run("#" * (9 << 20))
    assert s.alive and s.run("print(x)").stdout == "1\n"
  idle(server)


def test_sessions_are_under_back_pressure(server, remote):
  with remote.session() as s:
    waiting = [server.send("/run", {"program": "1"}) for _ in range(2)]
    soon(lambda: server.health()["waiting"] == 2)
    assert server.post("/session", json={}).status_code == 503
    # A session with a slot is still served.
    assert s.run("print(3)").stdout == "3\n"
  for sock in waiting:
    assert b"200" in sock.recv(99)
    sock.close()


@pytest.mark.parametrize("how", ["run", "cell"])
def test_a_client_that_hangs_up_in_the_middle_frees_the_slot(server, how):
  idle(server)
  if how == "cell":
    name = server.post("/session", json={}).json()["session"]
    sock = server.send(f"/session/{name}", {"program": _SLEEP})
  else:
    sock = server.send("/run", {"program": _SLEEP, "timeout_s": 60})
  soon(lambda: server.health()["busy"] == 1)
  time.sleep(0.3)  # probably in the middle of it; earlier must work too
  began = time.monotonic()
  sock.close()
  idle(server)
  assert time.monotonic() - began < 40  # the program sleeps for 50
  assert server.run("print(1)").json()["stdout"] == "1\n"
  assert server.metric("sandbox_refused_total", reason="gone") >= 1


def test_a_service_that_stops_ends_its_sessions():
  with serving("--slots=1") as server:
    config = RemoteConfig((server.url,), wait_s=LONG)
    with Sandbox(backend="remote", remote=config, timeout_s=20) as sandbox:
      s = sandbox.session()
      assert s.run("x = 1").verdict == Verdict.OK
      server.process.terminate()
      assert server.process.wait(LONG) == 0
      result = s.run("print(x)")
      assert result.verdict == Verdict.INFRASTRUCTURE and not s.alive
