"""The service: real server processes, real programs.

budget: all of one service, whose servers take long to start and are shared.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import time

import httpx
import pytest
from sandbox_server import LONG, Server, children, holds, marks, serving, soon

from tools_sandbox.jail.wire import Result, Verdict
from tools_sandbox.service import server as service

TOKEN = "word-of-27-random-letters"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  """A server with two slots, a token and small bodies."""
  path = tmp_path_factory.mktemp("token") / "token"
  path.write_text(TOKEN + "\n")
  arguments = ("--slots=2", "--max_body_mb=1", f"--token_file={path}")
  with serving(*arguments, token=TOKEN) as running:
    yield running


@pytest.fixture(scope="module")
def narrow():
  """A server with one slot and a queue of two; programs see the host's files."""
  with serving("--slots=1", "--max_waiting=2", backend="subprocess") as running:
    yield running


@pytest.fixture
def threads():
  """Threads for concurrent callers."""
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    yield pool


def result(reply: httpx.Response) -> Result:
  assert reply.status_code == 200, reply.text
  return Result.from_json(reply.json())


@pytest.mark.parametrize(
  ("body", "words"),
  [
    (b"", "not JSON"),
    (b"{}", "program is missing"),
    (b'{"program": 5}', "program must be a string, got 5"),
    (
      b'{"program": "", "timeout": 5}',
      "unknown field 'timeout'; there are .*timeout_s",
    ),
    (b'{"program": "", "timeout_s": 0}', "timeout_s must be positive .*, got 0"),
    (b'{"program": "", "timeout_s": NaN}', "timeout_s must be positive"),
    (b'{"program": "", "deadline_s": NaN}', "deadline_s must be a number"),
    (b'{"program": "", "timeout_s": true}', "must be a number, got True"),
    (b'{"program": "", "timeout_s": 61}', "timeout_s must be at most 60, got 61"),
    (b'{"program": "", "memory_mb": 9999}', "memory_mb must be at most 4096, got 9999"),
    (b'{"program": "", "memory_mb": 1.5}', "memory_mb must be an integer"),
    (
      b'{"program": "", "deadline_s": 10}',
      "deadline_s must be .* above timeout_s .10.",
    ),
    (b'{"program": "", "deadline_s": "x"}', "deadline_s must be a number"),
  ],
)
def test_a_malformed_request_is_told_its_field(server: Server, body, words: str):
  headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
  reply = httpx.post(server.url + "/run", content=body, headers=headers, timeout=LONG)
  assert reply.status_code == 400
  with pytest.raises(ValueError, match=words):
    raise ValueError(reply.json()["error"])


def test_giant_bodies_and_other_routes_are_refused(server: Server):
  assert server.run("#" * (1 << 20)).status_code == 413

  def endless():  # a body without a length
    while True:
      yield b" " * 65536

  headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
  with contextlib.suppress(httpx.TransportError):  # it may hang up early
    reply = httpx.post(
      server.url + "/run", content=endless(), headers=headers, timeout=LONG
    )
    assert reply.status_code == 413
  for path, status in (("/run", 405), ("/", 404)):
    reply = httpx.get(server.url + path, headers=headers, timeout=LONG)
    assert reply.status_code == status
  assert result(server.run("print(1)")).stdout == "1\n"


@pytest.mark.parametrize(
  "header", [None, "", "Bearer", f"Bearer {TOKEN}x", TOKEN, "Bearer \xe9"]
)
def test_nothing_is_done_without_the_token(server: Server, header: str | None):
  headers = {} if header is None else {"authorization": header.encode("latin-1")}
  runs = server.metric("sandbox_runs_total", verdict="ok")
  for path in ("/run", "/session"):
    reply = httpx.post(
      server.url + path, json={"program": ""}, headers=headers, timeout=LONG
    )
    assert reply.status_code == 401 and TOKEN not in reply.text
  reply = httpx.get(server.url + "/metrics", headers=headers, timeout=LONG)
  assert reply.status_code == 401
  assert server.health()["status"] == "ok"
  assert server.metric("sandbox_runs_total", verdict="ok") == runs


def test_back_end_subprocess_says_that_it_has_no_sessions(narrow: Server):
  reply = narrow.post("/session", json={})
  assert reply.status_code == 400 and "sessions" in reply.json()["error"]


def test_a_web_page_cannot_name_a_service_without_token(narrow: Server):
  for host, status in (("rebound.example", 400), ("localhost:1", 200)):
    reply = httpx.get(narrow.url + "/health", headers={"host": host}, timeout=LONG)
    assert reply.status_code == status


def test_full_means_ask_again(narrow: Server, threads, tmp_path):
  gate = tmp_path / "gate"
  admitted = [threads.submit(narrow.run, holds(gate), timeout_s=50) for _ in range(3)]
  soon(lambda: narrow.health()["waiting"] == 2)
  reply = narrow.run("print(1)")
  assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
  assert narrow.metric("sandbox_queue_length") == 2
  assert narrow.metric("sandbox_busy_slots") == 1
  gate.touch()
  assert [result(f.result(LONG)).stdout for f in admitted] == ["open\n"] * 3
  assert result(narrow.run("print(1)")).stdout == "1\n"
  assert narrow.metric("sandbox_refused_total", reason="full") >= 1


def test_a_call_that_leaves_the_queue_never_runs(narrow: Server, threads, tmp_path):
  gate, late, gone = (tmp_path / name for name in ("gate", "late", "gone"))
  first = threads.submit(narrow.run, holds(gate), timeout_s=50)
  soon(lambda: narrow.health()["busy"] == 1)
  reply = narrow.run(marks(late), timeout_s=1, deadline_s=1.2)
  assert reply.status_code == 504
  with narrow.send("/run", {"program": marks(gone)}):
    soon(lambda: narrow.health()["waiting"] == 1)
  soon(lambda: narrow.health()["waiting"] == 0)
  patient = threads.submit(narrow.run, "print(1)", timeout_s=20, deadline_s=LONG)
  soon(lambda: narrow.health()["waiting"] == 1)
  gate.touch()
  for run in (first, patient):
    assert result(run.result(LONG)).verdict == Verdict.OK
  assert not late.exists() and not gone.exists()
  for reason in ("late", "gone"):
    assert narrow.metric("sandbox_refused_total", reason=reason) == 1


def test_the_death_of_a_zygote_costs_one_run(narrow: Server):
  before = narrow.metric("sandbox_zygotes_replaced_total")
  failed = result(narrow.run("import os\nos.kill(os.getppid(), 9)\nwhile True: pass"))
  assert (failed.verdict, failed.exit_code) == (Verdict.INFRASTRUCTURE, None)
  assert result(narrow.run("print(1)")).stdout == "1\n"
  assert narrow.metric("sandbox_zygotes_replaced_total") == before + 1
  assert narrow.metric("sandbox_runs_total", verdict="infrastructure") == 1


def is_closed(server: Server) -> bool:
  try:
    server.health()
  except httpx.ConnectError:
    return True
  except httpx.TransportError:
    return False  # accepted, then closed
  return False


def test_sigterm_lets_what_runs_end_and_refuses_the_rest(threads, tmp_path):
  gate, mark = tmp_path / "gate", tmp_path / "mark"
  with serving("--slots=1", backend="subprocess") as server:
    running = threads.submit(server.run, holds(gate), timeout_s=50)
    soon(lambda: server.health()["busy"] == 1)
    waiting = threads.submit(server.run, marks(mark))
    soon(lambda: server.health()["waiting"] == 1)
    zygotes = children(server.process.pid)
    server.process.terminate()
    assert waiting.result(LONG).status_code == 503
    soon(lambda: is_closed(server))
    assert server.process.poll() is None and not running.done()
    gate.touch()
    assert result(running.result(LONG)).stdout == "open\n"
    assert server.process.wait(LONG) == 0
  assert not mark.exists()
  soon(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in zygotes))


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--host=0.0.0.0"], "--host=0.0.0.0 needs --token_file"),
    (["--host=::", "--token_file=/none/at/all"], "--token_file"),
    (["--slots=0"], "slots must be at least 1"),
    (["--max_memory_mb=9"], "memory_mb must be at most 9"),
    (["--max_timeout_s=nan"], "must be positive"),
    (["--max_timeout_s=inf"], "must be positive"),
    (["--max_wait_s=nan"], "wait_s must be positive and finite, got nan"),
    (["--max_wait_s=-1"], "wait_s must be positive and finite, got -1"),
    (["--max_lease_s=nan"], "lease_s must be at least 1 and finite, got nan"),
    (["--max_lease_s=inf"], "lease_s must be at least 1 and finite, got inf"),
    (["--max_body_mb=-1"], "max_body must be above 0"),
    (["--max_waiting=-1"], "max_waiting must be 0 or more"),
    (["--host=192.0.2.1", f"--token_file={__file__}"], "must hold one word"),
    (["--port=99999"], "--port=99999"),
    (["--backend=remote"], "invalid choice"),
  ],
)
def test_an_unservable_config_is_refused_at_once(monkeypatch, capsys, arguments, words):
  monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep pytest's handlers
  with pytest.raises(SystemExit) as end:
    service.main(arguments)
  assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
  ("arguments", "missing", "backend"),
  [
    ([], ["no namespaces"], "jail"),  # the jail then refuses to start
    (["--allow-weaker"], ["no namespaces"], "subprocess"),
    (["--allow-weaker"], [], "jail"),
    (["--backend=subprocess"], [], "subprocess"),
  ],
)
def test_a_missing_wall_is_reported(monkeypatch, capsys, arguments, missing, backend):
  class Stop(Exception):
    pass

  def start(slots, backend):
    raise Stop(backend)

  monkeypatch.setattr(service.jail, "check", lambda: missing)
  monkeypatch.setattr(service.pool, "SandboxPool", start)
  args = service.make_parser().parse_args([*arguments, "--port=0"])
  with pytest.raises(Stop, match=backend):
    service.serve(args)
  errors = capsys.readouterr().err
  assert ("the network is open" in errors) == (backend == "subprocess")
  assert ("no jail: no namespaces" in errors) == bool(
    missing and backend == "subprocess"
  )


def test_no_mix_of_clients_loses_a_place(narrow: Server, threads):
  """Clients hang up, miss deadlines or send bad JSON; nothing stays occupied."""
  address = ("127.0.0.1", httpx.URL(narrow.url).port)
  head = "POST /run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
  files = pathlib.Path("/proc", str(narrow.process.pid), "fd")
  kinds = ("print(1)", "import time\ntime.sleep(0.05)", "1/0")

  def client(seed: int) -> None:
    rng = random.Random(seed)
    fields = {"program": rng.choice(kinds), "timeout_s": 2}
    if rng.random() < 0.3:
      fields["deadline_s"] = 2 + rng.random() / 20
    body = json.dumps(fields).encode()[rng.choice((0, 0, 0, 1)) :]
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with contextlib.suppress(OSError), socket.create_connection(address) as sock:
      sock.settimeout(LONG)
      if rng.random() < 0.3:  # leaves in the middle of the request
        return sock.sendall(whole[: rng.randrange(len(whole))])
      sock.sendall(whole)
      if rng.random() < 0.5:
        time.sleep(rng.random() / 20)
        return None
      status = sock.recv(65536)[:12]
      assert status[9:] in (b"200", b"400", b"503", b"504"), status
    return None

  narrow.run("")
  before = len(list(files.iterdir()))
  assert len(list(threads.map(client, range(240)))) == 240
  soon(lambda: narrow.health() == {"status": "ok", "slots": 1, "busy": 0, "waiting": 0})
  runs = [threads.submit(narrow.run, "print(1)", timeout_s=20) for _ in range(3)]
  assert [result(f.result(LONG)).stdout for f in runs] == ["1\n"] * 3
  soon(lambda: len(list(files.iterdir())) <= before)
