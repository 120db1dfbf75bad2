"""A run's server process: it answers, has its flags, and ends with the run.

A mock program with vLLM's command line; `test_vllm_serving` uses the real one.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import urllib.request

import pytest

from coa_jax.rollout.vllm.process import VllmProcess

# Answers /health with its arguments, VLLM_SERVER_DEV_MODE and process id.
SERVER = """#!{python}
import http.server, json, os, signal, sys
if "--slow" in sys.argv:
  signal.pause()
if "--broken" in sys.argv:
  sys.exit("no such model")
port = next(int(a[7:]) for a in sys.argv if a.startswith("--port="))
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    about = [sys.argv[1:], os.environ.get("VLLM_SERVER_DEV_MODE"), os.getpid()]
    self.send_response(200)
    self.end_headers()
    self.wfile.write(json.dumps(about).encode())
  def log_message(self, *unused): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path) -> str:
  path = tmp_path / "vllm"
  path.write_text(SERVER.format(python=sys.executable))
  path.chmod(0o755)
  return str(path)


def about(url: str) -> list:
  with urllib.request.urlopen(f"{url}/health") as answer:
    return json.load(answer)


def gone(pid: int) -> bool:
  try:
    return "\nState:\tZ" in pathlib.Path(f"/proc/{pid}/status").read_text()
  except (FileNotFoundError, ProcessLookupError):
    return True


def start(program: str, folder: pathlib.Path, *flags: str) -> VllmProcess:
  return VllmProcess(program, str(folder / "m"), 77, "bfloat16", flags, 60.0)


def test_it_answers_has_its_flags_and_ends_with_its_owner(program, tmp_path):
  process = start(program, tmp_path, "--more=1")
  args, mode, pid = about(process.url)
  port = process.url.rpartition(":")[2]
  assert args[:2] == ["serve", str(tmp_path / "m")]
  assert mode == "1" and {
    "--host=127.0.0.1",
    f"--port={port}",
    "--dtype=bfloat16",
    "--max-model-len=77",
    "--logprobs-mode=processed_logprobs",
    "--more=1",
  } == set(args[2:])
  del process
  gc.collect()  # in Python 3.13 an exception while the server started holds its frame
  assert gone(pid)


def test_it_ends_with_a_run_that_is_killed(program, tmp_path):
  code = (
    "import sys, time; from coa_jax.rollout.vllm.process import VllmProcess as P;"
    "p = P(*sys.argv[1:3], 77, 'float32', (), 60.0); print(p.url, flush=True);"
    "time.sleep(600)"
  )
  run = subprocess.Popen(
    [sys.executable, "-c", code, program, str(tmp_path / "m")],
    cwd=pathlib.Path(__file__).parents[2],
    stdout=subprocess.PIPE,
    text=True,
  )
  with run:
    _, _, pid = about(run.stdout.readline().strip())
    watched = os.pidfd_open(pid)
    run.send_signal(signal.SIGKILL)
    ready, _, _ = select.select([watched], [], [], 60)
  os.close(watched)
  assert ready and gone(pid)


def test_one_that_ends_or_never_answers_shows_the_end_of_its_log(program, tmp_path):
  with pytest.raises(ValueError, match=r"ended with status 1; .*\nno such model"):
    start(program, tmp_path, "--broken")
  with pytest.raises(ValueError, match=r"no answer within vllm\.start_s=0\.1"):
    VllmProcess(program, str(tmp_path / "m"), 77, "float32", ("--slow",), 0.1)
