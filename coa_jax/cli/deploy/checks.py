"""Refuses a run if its config cannot work on the requested machines.

All checks run before any machine costs money: mesh and rows against the device
count; files, addresses and sandboxes missing in a pod.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_collections

from coa_jax.cli.config_help import CONFIGS, read_class
from coa_jax.cli.deploy.slices import Device
from coa_jax.cli.launch import config_of_words
from coa_jax.model.sharding import MeshConfig, make_partitioner, make_partitioners
from coa_jax.runtime.config import ConfigError, read_config

# Fields, at any depth, naming a run's input files or folders.
_INPUTS = (
  *("init", "uri", "trajectories", "corpus", "key_file", "token_file", "tokenizer"),
  *("benchmarks", "without", "played", "folder"),
)
# The checkout's folders copied by the Dockerfile.
_IMAGE = ("configs", "experiments", "coa_jax", "tools_sandbox")
# gs:// and s3://, and sources of tasks: hf:, tfds:.
_ADDRESS = re.compile(r"[a-z0-9]+:")
_LOOPBACK = re.compile(r"https?://(127\.|localhost\b|\[::1\])")


@dataclasses.dataclass(frozen=True)
class Machines:
  """The hosts and devices for a run.

  Attributes:
    devices: all devices, each with its process.
    name: the flags requesting them, for messages.
    is_pod: whether the hosts are Kubernetes pods, which contain only the image.
    mounts: folders and files in every pod in addition to the image's.
    without: the checkout's folders missing on the hosts.
    shards: whether the processes are independent.
  """

  devices: Sequence[Device]
  name: str
  is_pod: bool = False
  mounts: tuple[str, ...] = ()
  without: tuple[str, ...] = ()
  shards: bool = False


def check_command(words: Sequence[str], machines: Machines) -> None:
  """Refuses a program and its flags if the config does not fit the machines.

  Raises:
    ValueError: naming the field, its value and accepted values.
  """
  program, *flags = words
  stage = program.removeprefix("experiments.")
  if stage not in CONFIGS:
    return
  config_class = read_class(stage)
  config = config_of_words(flags, config_class)
  file = _value(flags, "config").partition(":")[0]
  _check_files(file, _value(flags, "workdir"), config, machines)
  if machines.is_pod:
    _check_services(config)
  try:
    settings = read_config(config, config_class)
  except ConfigError as e:
    raise ValueError(f"{file}: {e}") from e
  if hasattr(settings, "mesh") and machines.devices:
    try:
      _check_mesh(settings, machines)
    except ValueError as e:
      raise ValueError(f"{machines.name}: {e}") from e


def _check_mesh(settings: Any, machines: Machines) -> None:
  """Refuses a mesh or batch rows that do not fit the devices, like the program."""
  jax.config.update("jax_platforms", "cpu")  # nothing runs: leave accelerators alone
  mesh: MeshConfig = settings.mesh
  rollout = getattr(settings, "rollout", None)
  devices = list(machines.devices)
  if machines.shards:  # each process has its own mesh
    devices = [d for d in devices if d.process_index == 0]
  tensor = rollout.tensor if rollout else 0
  if hasattr(settings, "algo"):
    learner, decoder = make_partitioners(mesh, devices, tensor)
    section = "algo.batch"
    batch = settings.algo.batch
  else:
    learner = make_partitioner(mesh, devices, tensor)
    decoder = learner.decoding(tensor)
    section = "data"
    batch = getattr(settings, "data", None)
  if batch:
    ways = learner.ways("B")
    if batch.rows % ways:
      raise ValueError(
        f"--config.{section}.rows={batch.rows}: {ways} devices split a batch (data x "
        f"fsdp); accepted: a multiple of {ways}"
      )
    learner.check({"B": batch.rows, "T": batch.length}, section)
  if rollout and not settings.vllm:
    decoder.replicas()


def _check_files(
  file: str, workdir: str, config: ml_collections.ConfigDict, machines: Machines
) -> None:
  """Refuses files present on this machine but not on the hosts."""
  processes = len({d.process_index for d in machines.devices})
  if workdir.startswith("s3://") and processes > 1 and not machines.shards:
    raise ValueError(
      f"--workdir={workdir}: several processes need gs:// or a shared disk"
    )
  named = [("--config", file)]
  for field, value in _strings(config, "config"):
    if field.rpartition(".")[2] in _INPUTS:
      for part in value.split(","):
        # Trajectories' weights follow the last "=".
        named.append((f"--{field}", re.sub(r"=[\d.]+$", "", part.strip())))
  missing = []
  for field, path in named:
    if path and not _ADDRESS.match(path) and not _has(path, machines):
      missing.append(f"{field}={path}")
  if missing:
    accepted = "an address in a bucket, or an absolute path on a shared disk"
    if machines.is_pod:
      accepted = (
        "an address in a bucket (gs://, s3://), a path on --disk=CLAIM:/PATH, or one "
        "in the image (named by --in_image=/PATH)"
      )
    raise ValueError(f"{', '.join(missing)}: not on the hosts; accepted: {accepted}")
  if not workdir:
    raise ValueError("--workdir must be given: every host writes there")
  if _ADDRESS.match(workdir):
    return
  on_mount = _is_below(workdir, machines.mounts)
  if machines.is_pod and not on_mount:
    raise ValueError(
      f"--workdir={workdir}: the pod's own disk is lost with it; accepted: gs:// or a "
      "path on --disk=CLAIM:/PATH"
    )
  if machines.without and not os.path.isabs(workdir):
    raise ValueError(
      f"--workdir={workdir}: every host would have its own; accepted: gs:// or an "
      "absolute path on a shared disk"
    )


def _has(path: str, machines: Machines) -> bool:
  """Whether the hosts have a file or folder at this path."""
  if machines.is_pod:
    is_ours = not os.path.isabs(path) and bool(glob.glob(path))
    return _is_below(path, machines.mounts) or (is_ours and _is_below(path, _IMAGE))
  if machines.without:  # a copy of the checkout without these folders
    is_sent = bool(glob.glob(path)) and not _is_below(path, machines.without)
    return os.path.isabs(path) or is_sent
  return True


def _is_below(path: str, folders: Sequence[str]) -> bool:
  path = os.path.normpath(path)
  return any(path == f or path.startswith(f.rstrip("/") + "/") for f in folders)


def _check_services(config: ml_collections.ConfigDict) -> None:
  """Refuses addresses and sandboxes unavailable in a pod."""
  for field, value in _strings(config, "config"):
    if _LOOPBACK.match(value):
      raise ValueError(
        f"--{field}={value}: in a pod this is the pod itself, where no server runs; "
        "give the address of a Service"
      )
  tools = config.get("tools") or {}
  own = {*tools.get("tools", ())} - {*(tools.get("mcp") or {})}
  kinds = {(config.get(name) or {}).get("kind") for name in ("tasks", "dev")}
  code = (config.get("reward") or {}).get("code") or {}
  for section, values, is_used in (
    ("tools", tools, "code" in own and tools.get("enabled", True)),
    ("reward.code", code, "code" in kinds),
  ):
    if is_used and values.get("sandbox") == "jail":
      raise ValueError(
        f"--config.{section}.sandbox=jail: a pod cannot build jails; accepted: remote, "
        "with the sandbox service beside it (tools_sandbox/deploy/kubernetes.yaml) in "
        f"{section}.remote, or subprocess if no program is hostile"
      )


def _strings(value: Any, field: str) -> Iterator[tuple[str, str]]:
  """Yields (field, string) for each string in a config, in lists and sections too."""
  if isinstance(value, str):
    yield field, value
  elif isinstance(value, ml_collections.ConfigDict | dict):
    for name, inner in value.items():
      yield from _strings(inner, f"{field}.{name}")
  elif isinstance(value, list | tuple):
    for inner in value:
      yield from _strings(inner, field)


def _value(words: Sequence[str], flag: str) -> str:
  """Returns a flag's value in a command line; "" if missing."""
  found = ""
  for i, word in enumerate(words):
    name, equals, value = word.partition("=")
    if name.lstrip("-") == flag and word.startswith("-"):
      found = value if equals else "".join(words[i + 1 : i + 2])
  return found
