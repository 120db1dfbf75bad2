"""The launcher: every error is one line and exit status 2, before any work."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import socket
import subprocess
import sys

import forked
import pytest
from forked import refused
from programs import free_address

from coa_jax.cli import process

CONFIG = """
import ml_collections

def get_config(arg=""):
  if arg not in ("", "tiny"):
    raise ValueError(f"my_config answers '' and 'tiny', not {arg!r}")
  return ml_collections.ConfigDict(
    {"optim": {"lr": 0.1, "name": "adamw"}, "data": {"steps": 1 if arg else 9}}
  )
"""
# A stage that needs no device.
PROGRAM = """
import dataclasses
from coa_jax.runtime.config import read_config
from coa_jax.runtime.fields import section
from coa_jax.cli.launch import launch

@dataclasses.dataclass(frozen=True)
class Optim:
  lr: float
  name: str
  betas: tuple[float, ...] = (0.9, 0.999)

@dataclasses.dataclass(frozen=True)
class Log:
  project: str = ""

@dataclasses.dataclass(frozen=True)
class Data:
  steps: int
  trouble: str = ""

@dataclasses.dataclass(frozen=True)
class Server:
  url: str
  retries: int = 3

@dataclasses.dataclass(frozen=True)
class Config:
  data: Data
  optim: Optim
  log: Log = section(Log)
  server: Server | None = None
  limits: dict[str, float] = dataclasses.field(default_factory=dict)

def run(config, workdir):
  settings = read_config(config, Config)
  data, optim, log = settings.data, settings.optim, settings.log
  if data.steps == 13:
    raise KeyboardInterrupt
  out = {"steps": data.steps, "lr": optim.lr, "workdir": workdir}
  if data.trouble or log.project:
    out |= {"trouble": data.trouble, "betas": optim.betas, "project": log.project}
  if settings.server or settings.limits:
    out |= {"server": dataclasses.asdict(settings.server), "limits": settings.limits}
  return out

launch(run, Config)
"""


@pytest.fixture
def launcher(tmp_path):
  """Runs the program on the config with these arguments."""
  config, program = tmp_path / "my_config.py", tmp_path / "program.py"
  config.write_text(CONFIG)
  program.write_text(PROGRAM)

  def run(*args: str, file: str = "", workdir: str = "--workdir=w", alone=False):
    words = (f"--config={file or config}", workdir, "--compile_cache=", *args)
    flags = list(filter(None, words))
    if not alone:
      return forked.run(str(program), *flags, folder=tmp_path)
    return subprocess.run(
      [sys.executable, str(program), *flags],
      capture_output=True,
      text=True,
      cwd=tmp_path,
      env={**os.environ, "PYTHONPATH": str(forked.ROOT)},
    )

  run.config = str(config)
  return run


def test_results_are_printed_and_overrides_count(launcher):
  done = launcher("--config.data.steps=4", "--config.optim.lr=1")
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == {"steps": 4, "lr": 1.0, "workdir": "w"}
  done = launcher(file=launcher.config + ":tiny")
  assert json.loads(done.stdout)["steps"] == 1


def test_fields_missing_in_the_file_can_be_given(launcher):
  done = launcher(
    "--config.data.trouble=http://x:80/y", "--config.optim.betas=(0.5, 1)",
    "--config.log.project=mine", "--config.data.steps=4",
    file=launcher.config + ":tiny",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == {
    "steps": 4, "lr": 0.1, "workdir": "w", "trouble": "http://x:80/y",
    "betas": [0.5, 1.0], "project": "mine",
  }  # fmt: skip


def test_a_flag_makes_a_section_that_may_be_missing_and_an_entry_of_a_dict(launcher):
  done = launcher("--config.server.url=http://x", "--config.limits.code=2")
  assert done.returncode == 0, done.stderr
  out = json.loads(done.stdout)
  assert out["server"] == {"url": "http://x", "retries": 3}
  assert out["limits"] == {"code": 2.0}
  assert "config section 'server' lacks field 'url'" in refused(
    launcher("--config.server.retries=2")
  )


def test_none_leaves_a_section_out_and_empties_a_field(launcher, tmp_path):
  text = CONFIG.replace('"optim":', '"server": {"url": "x"}, "optim":')
  (tmp_path / "other.py").write_text(text)
  done = launcher("--config.server=None", file=str(tmp_path / "other.py"))
  assert done.returncode == 0 and "server" not in json.loads(done.stdout), done
  assert "config.log.project is None" in refused(launcher("--config.log.project=None"))


def test_a_field_without_a_default_can_be_given_by_a_flag_alone(launcher, tmp_path):
  text = CONFIG.replace('{"steps": 1 if arg else 9}', "{}")
  (tmp_path / "other.py").write_text(text)
  done = launcher("--config.data.steps=4", file=str(tmp_path / "other.py"))
  assert json.loads(done.stdout)["steps"] == 4
  line = refused(launcher(file=str(tmp_path / "other.py")))
  assert "config section 'data' lacks field 'steps'" in line


@pytest.mark.parametrize(
  ("text", "named"),
  [
    ("def get_config(:\n  pass\n", "bad.py:1: "),
    ("x = 1\n1 / 0\n", "bad.py:2: ZeroDivisionError"),
    ("def get_config():\n  raise SystemExit(3)", "bad.py:2: SystemExit"),
    ("def get_config():\n  return {'data': {}}", "get_config returns a dict"),
    (CONFIG.replace('{"steps": 1 if arg else 9}', "3"), "config.data is 3"),
  ],
)
def test_a_config_file_that_fails_is_named(launcher, tmp_path, text: str, named: str):
  (tmp_path / "bad.py").write_text(text)
  line = refused(launcher(file=str(tmp_path / "bad.py")))
  assert "bad.py" in line and named in line, line


@pytest.mark.slow
def test_a_process_0_that_never_comes_is_named(launcher):
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"  # bound, but nothing listens
    flags = (f"--distributed={address},2,1", "--distributed_wait_s=1")
    done = launcher(*flags, alone=True)
  *waiting, last = done.stderr.strip().splitlines()
  assert done.returncode == 2 and "Traceback" not in done.stderr
  assert last.startswith("error: ") and address in last and "distributed_wait_s" in last
  assert waiting and all(f"waiting for process 0 at {address}" in x for x in waiting)
  line = refused(launcher("--distributed=127.0.0.1:99999,2,1"))
  assert "a port is from 1 to 65535" in line


def test_a_program_without_a_config_refuses_in_one_line(tmp_path):
  program = tmp_path / "program.py"
  program.write_text(
    "from absl import flags\n"
    "from coa_jax.cli.launch import run_program\n"
    "flags.DEFINE_integer('count', 1, 'How many.', 1)\n"
    "def main():\n"
    "  open('/nowhere/' + 'x' * 300)\n"
    "run_program(main)\n"
  )
  for flag in ("--zzz=1", "--count=x", "--count=0", "extra", "--count=1"):
    done = forked.run(str(program), flag, folder=tmp_path)
    assert flag.strip("-").partition("=")[0] in refused(done) or flag == "--count=1"


def test_a_workdir_must_be_given(launcher):
  assert "--workdir must be given" in refused(launcher(workdir=""))


def test_an_interrupted_run_says_how_to_go_on(launcher):
  done = launcher("--config.data.steps=13")
  assert done.returncode == 130
  assert "resumes from here" in done.stderr and "Traceback" not in done.stderr


def test_a_config_that_is_interrupted_says_so(launcher, tmp_path):
  config = tmp_path / "interrupted.py"
  config.write_text("raise KeyboardInterrupt")
  done = launcher(file=str(config))
  assert done.returncode == 130 and "Traceback" not in done.stderr
  assert "interrupted" in done.stderr


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("JAX_PLATFORMS", "tpu"),
    ("JAX_PLATFORMS", "cuda"),
    ("JAX_PLATFORMS", "gpu"),
    ("JAX_PLATFORMS", "tpu,cpu"),
    ("JAX_PLATFORMS", "no_such"),
    ("JAX_PLATFORM_NAME", "gpu"),
  ],
)
def test_an_accelerator_that_is_asked_for_and_not_there_is_named(
  launcher, monkeypatch, name, value
):
  for variable in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
    monkeypatch.delenv(variable, raising=False)
  monkeypatch.setenv(name, value)
  done = launcher(alone=True)  # JAX reads the variable on import
  if not done.returncode:
    pytest.skip(f"there is one: {name}={value}")
  line = done.stderr.splitlines()[-1]  # libtpu, if installed, adds its own lines
  assert (done.returncode, done.stdout) == (2, ""), done
  assert "Traceback" not in done.stderr
  assert line.startswith(f"error: {name}={value}: ") and "Found: cpu" in line


@pytest.mark.parametrize(
  "value", ["0", "-1", "1.5", "many", "", "1025", "99999999999999999999"]
)
def test_an_odd_number_of_devices_is_refused_in_one_line(launcher, value):
  line = refused(launcher(f"--cpu_devices={value}"))
  assert "--cpu_devices" in line and value in line


@pytest.mark.slow
def test_processes_that_share_no_workdir_stop_before_any_work(launcher, tmp_path):
  address = free_address()

  def run(i: int, workdir: str):
    where = f"--distributed={address},2,{i}"
    return launcher(where, workdir=f"--workdir={workdir}", alone=True)

  for other, code in (("a", 0), ("b", 2)):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
      ran = list(threads.map(run, range(2), ("a", other)))
    assert [done.returncode for done in ran] == [code, code], ran
    assert not list((tmp_path / "a").iterdir())
  assert all("process 1 does not see" in done.stderr for done in ran)


@pytest.mark.parametrize(
  ("path", "level", "shown"),
  [
    ("/x/coa_jax/sft.py", logging.WARNING, True),
    ("/x/site-packages/orbax/checkpoint/a.py", logging.WARNING, False),
    ("/x/site-packages/orbax/checkpoint/a.py", logging.ERROR, True),
  ],
)
def test_a_warning_is_one_plain_line(path, level, shown):
  record = logging.LogRecord("n", level, path, 7, "%d too long", (3,), None)
  assert process.is_for_the_user(record) == shown
  word = logging.getLevelName(level).lower()
  assert process.PlainFormatter().format(record) == f"{word}: 3 too long"


def test_a_warning_is_printed_once():
  """Orbax's import adds a handler, which absl does not know after `outlive_readers`."""
  program = """
import logging
import absl.app
from coa_jax.runtime import interruption
from coa_jax.cli import process, streams

def main(argv):
  process.log_plainly()
  logging.getLogger("coa_jax").warning("too long")

streams.outlive_readers()
absl.app.run(main)
"""
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert done.stderr == "warning: too long\n"
