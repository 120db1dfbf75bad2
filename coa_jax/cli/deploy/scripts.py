"""Scripts to start a run without Kubernetes: an sbatch file, gcloud commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.cli.deploy.manifests import LIBTPU_INIT_ARGS, PodJob
from coa_jax.cli.deploy.slices import GENERATIONS

# The checkout's folders excluded by --vm.
NOT_SENT = (".venv", "runs")


def make_sbatch(flags: Any, command: Sequence[str], env: Mapping[str, str]) -> str:
  """Makes an sbatch file: a process per GPU, requeued after the time limit.

  Under Slurm, JAX gives each process the GPU of its local rank. Slurm sends SIGTERM
  five minutes before the time limit; the run saves, and resumes when requeued.

  Args:
    flags: the flags of `coa pod`.
    command: the program's words, from `python` on.
    env: environment variables.
  """
  options = {
    "job-name": flags.name,
    "account": flags.account,
    "partition": flags.partition,
    "nodes": flags.nodes,
    "ntasks-per-node": flags.gpus,
    "gpus-per-node": flags.gpus,
    "time": flags.time,
    "signal": "TERM@300",
  }
  lines = ["#!/usr/bin/env bash"]
  lines += [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
  lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
  for name, value in env.items():
    lines.append(f"export {name}={shlex.quote(value)}")
  if flags.venv:
    lines.append(f"source {shlex.quote(flags.venv + '/bin/activate')}")
  container = ""
  if flags.image:
    container = f"--container-image={shlex.quote(flags.image)} "
    container += '--container-mounts="$PWD:$PWD" --container-workdir="$PWD" '
  run = f"srun --kill-on-bad-exit=1 {container}{shlex.join(command)}"
  lines += [
    "# From the root of the repository, on a disk that all hosts share.",
    "# A process that dies ends the others: they would wait for it.",
    f"{run} && exit",
    "status=$?",
    "# 143: saved on SIGTERM. Anything else is a fault, and stays one.",
    '[[ $status == 143 ]] && scontrol requeue "$SLURM_JOB_ID"',
    "exit $status",
  ]
  return "\n".join(lines) + "\n"


def make_vm_commands(job: PodJob, zone: str) -> str:
  """Makes gcloud commands that get TPU VMs by a queued resource and run on all.

  Raises:
    ValueError: the Cloud TPU API has no such slices.
  """
  if not job.slice.gcloud_type:
    raise ValueError(
      f"--slice={job.slice.name} is not in the Cloud TPU API: leave out --vm, for GKE"
    )
  node = shlex.quote(job.flags.name)
  spot = " --spot" if job.flags.spot else ""
  where = f"--zone={shlex.quote(zone)}"
  ssh = f"gcloud compute tpus tpu-vm ssh {node} {where} --worker=all --command"
  exclude = " ".join(f"--exclude={folder}" for folder in NOT_SENT)
  unpack = "mkdir -p coa-jax && tar xzf coa-jax.tgz -C coa-jax --strip-components=1"
  install = "cd coa-jax && python3 -m venv .venv && .venv/bin/pip install -e '.[tpu]'"
  variables = {"LIBTPU_INIT_ARGS": LIBTPU_INIT_ARGS, **job.env}
  env = [f"{name}={value}" for name, value in variables.items()]
  words = ["env", *env, ".venv/bin/python", *job.command[1:]]
  # Under tmux the run outlives the connection; its output outlives the run.
  logged = f"{shlex.join(words)} 2>&1 | tee -a run.log"
  run = f"cd coa-jax && tmux new-session -d -s run {shlex.quote(logged)}"
  return f"""\
# 1. The machines: wait until the state is ACTIVE.
gcloud compute tpus queued-resources create {node} --node-id={node} {where} \\
  --accelerator-type={job.slice.gcloud_type} \\
  --runtime-version={GENERATIONS[job.slice.generation].runtime}{spot}
gcloud compute tpus queued-resources describe {node} {where}

# 2. This repository on all of them, and what it needs.
tar {exclude} -czf /tmp/coa-jax.tgz -C .. "$(basename "$PWD")"
gcloud compute tpus tpu-vm scp /tmp/coa-jax.tgz {node}: {where} --worker=all
{ssh}={shlex.quote(unpack)}
{ssh}={shlex.quote(install)}

# 3. The run, on every host; its workdir is on a disk that all share.
{ssh}={shlex.quote(run)}
{ssh}='tail -n 20 coa-jax/run.log'

# 4. When it is done.
gcloud compute tpus queued-resources delete {node} {where} --force
"""
