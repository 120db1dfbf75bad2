"""The console script `coa`: its commands, their help, unknown names."""

from __future__ import annotations

import subprocess
import sys

import forked
import pytest
from forked import ROOT

from coa_jax.cli.main import COMMANDS, MODULES, split_program


def coa(*words: str) -> subprocess.CompletedProcess[str]:
  return forked.run("coa_jax.cli.main", *words)


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_commands_are_listed(words):
  done = coa(*words)
  assert done.returncode == 0, done.stderr
  for name, about in COMMANDS.items():
    assert f"{name} " in done.stdout and about in done.stdout


def test_every_command_has_a_module_and_a_launcher():
  for command in COMMANDS:
    name = MODULES.get(command, command)
    code = (ROOT / "coa_jax" / "cli" / f"{name}.py").read_text()
    assert "\ndef command() -> None:\n" in code
    assert (ROOT / "experiments" / f"{name}.py").exists()


def test_an_unknown_command_is_refused_with_the_nearest():
  done = coa("evalate", "--config=x")
  assert done.returncode == 2 and not done.stdout
  assert done.stderr == (
    "error: coa evalate: there is no such command; did you mean 'evaluate'?\n"
  )
  with pytest.raises(SystemExit):
    split_program(["coa", "evalate"])


def test_the_help_of_a_command_is_its_own():
  done = coa("chat", "--help")
  assert "coa chat --config=" in done.stdout and "--question:" in done.stdout
  assert "--port" not in done.stdout
  same = forked.run("experiments.chat", "--help")
  assert same.stdout == done.stdout


INTERRUPTED = """
import gc, os, signal, sys, time, types
from coa_jax.cli import main

def _xla_gc_callback(*unused):  # as JAX's
  gc.callbacks.remove(_xla_gc_callback)
  os.kill(os.getpid(), signal.SIGINT)
  time.sleep(0.001)

def command():
  gc.callbacks.append(_xla_gc_callback)
  gc.collect()
  time.sleep(60)

sys.modules["coa_jax.cli.toy"] = types.SimpleNamespace(
  command=command, __doc__="", __name__="toy"
)
main.run("toy")
"""


def test_an_interrupt_counts_also_in_the_garbage_collection():
  done = subprocess.run(
    [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=50
  )
  assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


def test_a_program_after_two_dashes():
  assert split_program(["coa", "import", "--a=1"]) == (
    "experiments.import_traces",
    ["coa_jax.cli.main", "import"],
    ["--a=1"],
  )
  module = "experiments.sft"
  assert split_program([module, "--a=1"]) == (module, [module], ["--a=1"])
