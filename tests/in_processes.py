"""RL or evaluation in one of several processes; see test_processes.py.

python tests/in_processes.py JOURNEY CONFIG.json WORKDIR DEVICES [COORDINATOR N I]

With KILL=FILE in the environment an evaluation's processes are killed at this file:
the first has written it, the others have not.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import virtual_devices

journey, config, workdir, devices, *others = sys.argv[1:]
os.environ.update(virtual_devices.environment(int(devices)))

import jax  # noqa: E402
import ml_collections  # noqa: E402
from absl import flags  # noqa: E402

from coa_jax import evaluate, rl  # noqa: E402

if last := os.environ.get("KILL"):
  write = evaluate.write_jsonl

  def write_until(path: str, rows: list) -> None:
    is_last = os.path.basename(path) == last
    if not is_last or jax.process_index() == 0:
      write(path, rows)
    if is_last:
      os.kill(os.getpid(), signal.SIGKILL)

  evaluate.write_jsonl = write_until

# As in `coa_jax.cli.distributed.leave_devices_alone`.
flags.FLAGS.set_default("experimental_orbax_use_distributed_barrier", True)
flags.FLAGS.mark_as_parsed()
if others:
  jax.distributed.initialize(others[0], int(others[1]), int(others[2]))
with open(config, encoding="utf-8") as f:
  sections = ml_collections.ConfigDict(json.load(f))
{"rl": rl, "evaluate": evaluate}[journey].run(sections, workdir)
