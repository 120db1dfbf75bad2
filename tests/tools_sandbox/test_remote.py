"""Back-end `remote` against our service, and mock services: ours and SandboxFusion's.

Its runs and sessions are tested with those of the other back-ends, in test_sandbox_run
and test_session.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import socket
import threading

import pytest
from http_server import NEVER, Server, within
from sandbox_server import LONG, serving, soon

from tools_sandbox.client import Sandbox
from tools_sandbox.jail.wire import Result, Verdict
from tools_sandbox.service import remote
from tools_sandbox.service.remote import RemoteConfig

TOKEN = "a-word"
OK = Result("42\n", "", 0, Verdict.OK, 0.01).to_json()
FUSION = {
  "status": "Success",
  "message": "",
  "compile_result": None,
  "run_result": {
    "status": "Finished",
    "execution_time": 0.03,
    "return_code": 0,
    "stdout": "42\n",
    "stderr": "",
  },
  "executor_pod_name": None,
  "files": {},
}


def sandbox(*urls: str, wait_s: float = LONG, token_file=None, api="tools_sandbox"):
  config = RemoteConfig(urls, token_file=token_file, api=api, wait_s=wait_s)
  return Sandbox(backend="remote", remote=config, timeout_s=5.0)


def answer(value, status=200, **headers):
  return lambda reply: reply.send_json(value, status, **headers)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
  """Our own service and the path of its token file."""
  path = tmp_path_factory.mktemp("token") / "token"
  path.write_text(TOKEN)
  arguments = ("--slots=2", f"--token_file={path}")
  with serving(*arguments, token=TOKEN) as running:
    yield running, str(path)


def test_a_refusal_of_the_service_is_an_error_with_its_reason(service):
  server, token_file = service
  with sandbox(server.url, token_file=token_file) as remote:
    with pytest.raises(ValueError, match="timeout_s must be at most 60, got 600"):
      remote.run("", timeout_s=600.0)
    with pytest.raises(ValueError, match="at most 8388608 bytes"):
      remote.run("#" * (9 << 20))


def test_a_wrong_token_or_url_is_known_at_once(service, tmp_path):
  server, token_file = service
  in_time = within()
  (tmp_path / "other").write_text("another-word")
  with pytest.raises(RuntimeError, match="status 401"):
    sandbox(server.url, token_file=str(tmp_path / "other"), wait_s=LONG)
  with pytest.raises(RuntimeError, match="status 404"):
    sandbox(server.url + "/v1", token_file=token_file, wait_s=LONG)
  with pytest.raises(ValueError, match=r"token_file .*none: FileNotFoundError"):
    sandbox(server.url, token_file=str(tmp_path / "none"))
  with pytest.raises(RuntimeError, match=r"no sandbox service answers.*ConnectError"):
    sandbox("http://127.0.0.1:1", wait_s=0.5)
  in_time()


def test_a_service_that_comes_up_late_is_waited_for():
  with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      opening = thread.submit(sandbox, url, wait_s=LONG)
      assert not concurrent.futures.wait([opening], timeout=0.5).done
      sock.close()
      with serving(f"--port={port}", "--slots=1"), opening.result(LONG) as remote:
        assert remote.run("print(6 * 7)").stdout == "42\n"


def test_full_and_broken_replies_are_asked_again(server):
  replies = itertools.chain(
    [
      answer(OK),  # to the empty program at the start
      answer({"error": "full"}, 503, Retry_After="0.05"),
      answer({"error": "late"}, 504),
      lambda r: r.send(b"<html>", "text/html"),
      answer({"stdout": 5}),
      lambda r: (r.raw(Content_Length="999"), r.drip(b" ", count=1)),
      lambda r: None,  # hangs up
    ],
    itertools.repeat(answer(OK)),
  )
  server.actions["/run"] = lambda r: next(replies)(r)
  with sandbox(server.url, wait_s=LONG) as remote:
    assert remote.run("print(6 * 7)").to_json() == OK
  assert len(server.requests) == 8
  bodies = [r.json for r in server.requests[1:]]
  left = [b.pop("deadline_s") for b in bodies]
  assert all(b == bodies[0] for b in bodies) and bodies[0]["timeout_s"] == 5.0
  assert left == sorted(left, reverse=True) and 5 < left[-1] < left[0] < 65


def test_a_programs_own_failure_is_not_retried(server):
  lost = Result("", "its zygote died", None, Verdict.INFRASTRUCTURE, 0.0)
  raised = Result("", "ZeroDivisionError", 1, Verdict.ERROR, 0.0)
  server.actions["/run"] = answer(OK)
  with sandbox(server.url) as remote:
    for result in (lost, raised):
      server.actions["/run"] = answer(result.to_json())
      server.requests.clear()
      assert remote.run("1/0") == result
      assert len(server.requests) == 1


def test_a_service_that_is_silent_or_down_is_infrastructure_in_time(server):
  in_time = within()
  server.actions["/run"] = answer(OK)
  with sandbox(server.url, wait_s=1.0) as remote:
    server.actions["/run"] = lambda r: server.stopped.wait(NEVER)
    silent = remote.run("print(1)", timeout_s=0.3)
    assert (silent.verdict, silent.exit_code) == (Verdict.INFRASTRUCTURE, None)
    assert "ReadTimeout" in silent.stderr
    server.actions["/run"] = answer({}, 503, Retry_After="3600")
    assert "status 503" in remote.run("print(1)", timeout_s=0.3).stderr
  in_time()


def test_replicas_take_turns_and_stand_in_for_each_other(monkeypatch):
  monkeypatch.setattr(remote, "_ASIDE_S", 3600.0)
  with contextlib.ExitStack() as stack:
    servers = [stack.enter_context(Server()) for _ in range(3)]
    for server in servers:
      server.actions["/run"] = answer(OK)
    with sandbox(*(s.url for s in servers), wait_s=LONG) as all_three:
      for server in servers:
        server.requests.clear()
      for _ in range(12):
        assert all_three.run("").verdict == Verdict.OK
      assert [len(s.requests) for s in servers] == [4, 4, 4]
      servers[1].actions["/run"] = lambda r: None  # hangs up
      servers[2].actions["/run"] = answer({"error": "full"}, 503)
      for _ in range(12):
        assert all_three.run("").verdict == Verdict.OK
      # A replica that hangs up is put aside; a full one is still asked.
      assert [len(s.requests) for s in servers] == [4 + 12, 4 + 1, 4 + 8]
      servers[0].actions["/run"] = servers[1].actions["/run"] = answer({}, 401)
      servers[2].actions["/run"] = answer(OK)
      assert all_three.run("").verdict == Verdict.OK


def fusion(run: dict | None = None, **changes) -> dict:
  """SandboxFusion's reply with changes."""
  return FUSION | {"run_result": FUSION["run_result"] | (run or {})} | changes


@pytest.mark.parametrize(
  ("reply", "expected"),
  [
    (fusion(), Result("42\n", "", 0, Verdict.OK, 0.03)),
    (
      fusion({"return_code": 1, "stderr": "E"}, status="Failed"),
      Result("42\n", "E", 1, Verdict.ERROR, 0.03),
    ),
    (
      fusion({"return_code": -9, "stdout": None}, status="Failed"),
      Result("", "", -9, Verdict.ERROR, 0.03),
    ),
    (
      fusion({"status": "TimeLimitExceeded", "return_code": None}, status="Failed"),
      Result("42\n", "", -9, Verdict.TIMEOUT, 0.03),
    ),
    (
      fusion(status="SandboxError", message="no pod", run_result=None),
      Result("", "SandboxFusion: no pod", None, Verdict.INFRASTRUCTURE, 0.0),
    ),
  ],
)
def test_sandbox_fusions_answers_are_understood(reply, expected: Result, server):
  server.actions["/run_code"] = answer(fusion())
  with sandbox(server.url + "/run_code", api="sandbox_fusion") as remote:
    server.actions["/run_code"] = answer(reply)
    assert remote.run("print(6 * 7)", "in", timeout_s=2.0, memory_mb=99) == expected
  assert server.requests[-1].json == {
    "code": "print(6 * 7)",
    "language": "python",
    "stdin": "in",
    "compile_timeout": 2.0,
    "run_timeout": 2.0,
    "memory_limit_MB": 99,
    "files": {},
    "fetch_files": [],
  }


@pytest.mark.parametrize(
  ("api", "path", "good", "wrong"),
  [
    ("tools_sandbox", "/run", OK, {**OK, "stdout": 5}),
    *(
      ("sandbox_fusion", "/run_code", FUSION, wrong)
      for wrong in (
        [],
        {},
        fusion({"return_code": None}),
        fusion({"stdout": 5}),
        fusion({"status": "Error"}, status="Failed"),
        fusion(run_result=None),
      )
    ),
  ],
)
def test_a_malformed_answer_is_a_failure_of_infrastructure(
  api, path, good, wrong, server
):
  server.actions[path] = answer(good)
  with sandbox(server.url, api=api, wait_s=0.3) as remote:
    server.actions[path] = answer(wrong)
    result = remote.run("print(1)", timeout_s=0.2)
  assert result.verdict == Verdict.INFRASTRUCTURE
  assert f"not a reply of {api}" in result.stderr


def test_its_floods_are_cut_here(server):
  flood = fusion({"stdout": "x" * 300_000, "stderr": "\ud800"})
  server.actions["/run_code"] = answer(flood)
  with sandbox(server.url, api="sandbox_fusion") as remote:
    result = remote.run("")
  assert result.truncated and len(result.stdout) < 66_000 and result.stderr == "?"


def test_the_back_end_and_its_services_belong_together():
  with pytest.raises(ValueError, match="one needs the other"):
    Sandbox(backend="remote")
  with pytest.raises(ValueError, match="one needs the other"):
    Sandbox(backend="jail", remote=RemoteConfig(("http://127.0.0.1:1",)))


def test_closing_ends_the_wait_of_others(server):
  server.actions["/run"] = answer(OK)
  remote = sandbox(server.url, wait_s=LONG)
  server.actions["/run"] = answer({}, 503)
  server.requests.clear()
  ended = threading.Event()

  def run():
    with contextlib.suppress(RuntimeError):
      remote.run("")
    ended.set()

  thread = threading.Thread(target=run)
  thread.start()
  soon(lambda: server.requests)
  remote.close()
  assert ended.wait(LONG)
  thread.join()


@pytest.mark.parametrize("broken", ["status", "reply"])
def test_a_session_whose_service_fails_is_given_back(broken):
  with Server() as service:
    service.actions["/run"] = answer(OK)
    service.actions["/session"] = answer({"session": "name", "lease_s": 60})
    with sandbox(service.url) as remote, remote.session() as session:
      wrong = answer({}, 500) if broken == "status" else answer({"alive": True})
      service.actions["/session/name"] = wrong
      result = session.run("1")
      assert result.verdict == Verdict.INFRASTRUCTURE and not session.alive
      assert service.requests[-1].command == "DELETE"
