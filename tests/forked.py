"""Runs programs in forks of one interpreter with the slow modules already imported.

This interpreter uses no device, so forking JAX is safe. For signals, for exit handlers
and for several programs at once, start processes instead.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
# Each program itself imports the modules that define flags.
_SERVER = """
import gc, json, os, runpy, sys, traceback
import coa_jax.cli.launch, coa_jax.data.importers.pipeline, coa_jax.evaluate
import coa_jax.report.plots, coa_jax.report.viewer, coa_jax.rl, coa_jax.sft
gc.freeze()  # else a fork's first collection copies all memory
for line in sys.stdin:
  program, words, folder, env, files = json.loads(line)
  child = os.fork()
  if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    continue
  for number, file in enumerate([os.devnull, *files]):
    os.dup2(os.open(file, os.O_RDWR), number)
  os.chdir(folder)
  os.environ.clear()
  os.environ.update(env)
  sys.argv = [program, *words]
  status = 0
  try:
    if program.endswith(".py"):
      runpy.run_path(program, run_name="__main__")
    else:
      runpy.run_module(program, run_name="__main__", alter_sys=True)
  except SystemExit as e:
    status = e.code or 0
  except BaseException:
    traceback.print_exc()
    status = 1
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)  # the interpreter's own end takes longer than most programs
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
  server = subprocess.Popen(
    [sys.executable, "-c", _SERVER],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  atexit.register(server.communicate)
  return server


def run(
  program: str, *words: str, folder: os.PathLike | str = ROOT
) -> subprocess.CompletedProcess[str]:
  """Runs a module or a .py file in a folder, as `python` would; returns the result."""
  with tempfile.TemporaryDirectory() as outputs:
    files = [pathlib.Path(outputs, name) for name in ("stdout", "stderr")]
    for file in files:
      file.touch()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = [program, words, str(folder), env, list(map(str, files))]
    print(json.dumps(job), file=_server().stdin, flush=True)
    status = int(_server().stdout.readline())
    texts = [file.read_text() for file in files]
  return subprocess.CompletedProcess([program, *words], status, *texts)


def finish(
  name: str, *flags: str, reason: str = ""
) -> subprocess.CompletedProcess[str]:
  """Runs `experiments.NAME`; it must succeed, or print one error line with `reason`."""
  done = run(f"experiments.{name}", *flags)
  assert done.returncode == (2 if reason else 0), done.stderr
  if reason:
    assert done.stderr.startswith("error: ") and reason in done.stderr
    assert done.stderr.count("\n") == 1
  return done


def refused(done: subprocess.CompletedProcess[str]) -> str:
  """Returns the error line of a program that refused its command or inputs."""
  assert done.returncode == 2 and not done.stdout, done
  lines = done.stderr.splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
  return lines[0]
