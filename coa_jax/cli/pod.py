r"""Prints how to start a run on a pod: a GKE JobSet, an sbatch file or gcloud commands.

  coa pod --slice=v6e-64 --image=REGISTRY/coa-jax \
    -- coa rl --config=configs/rl_afm.py --workdir=gs://BUCKET/runs/rl ...
  coa pod --shards=8 --image=REGISTRY/coa-jax \
    -- coa distill --config=... --workdir=gs://BUCKET/runs/distill
  coa pod --slurm --nodes=4 --gpus=8 -- coa sft ...
  coa pod --vm --slice=v6e-64 --zone=us-east5-b -- coa sft ...
  coa pod --times=runs/rl

The words after `--` are the program and its flags, as on one machine; every host runs
the program with --distributed=auto. The config is read first: a mesh unsuited to the
devices, or a file, an address or a sandbox missing on the hosts, is refused. With
`--shards` the hosts are independent: an Indexed Job's pods run the program with
--shard=auto/N, on hosts without TPUs or, with --slice, on one TPU host each. `--apply`
passes the manifest to kubectl. The manifests are checked against Kubernetes' schemas;
none has been run on a cluster yet.

If a host dies, the processes on all others end: JAX's coordination service notices
within 100 seconds. The JobSet then recreates all pods, and the run resumes from its
last checkpoint. On SIGTERM a run stops rollouts at once, finishes an update, and saves:
the grace period should cover an update and a checkpoint.

--times estimates from a run's own times whether rollouts should have separate devices
(`mesh.rollout`): see `coa_jax/cli/deploy/arrangements.py`.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess

import yaml
from absl import flags

from coa_jax.cli.deploy.arrangements import describe_run
from coa_jax.cli.deploy.checks import Machines, check_command
from coa_jax.cli.deploy.manifests import PodJob, make_jobset, make_shards
from coa_jax.cli.deploy.scripts import NOT_SENT, make_sbatch, make_vm_commands
from coa_jax.cli.deploy.slices import describe_gpus, describe_slices, read_slice
from coa_jax.cli.launch import run_program, stop
from coa_jax.cli.main import split_program

FLAGS = flags.FLAGS


def define_flags() -> None:
  """Defines the flags; not on import: other programs have flags of the same names."""
  flags.DEFINE_bool("slurm", False, "Print an sbatch file for hosts with GPUs.")
  flags.DEFINE_bool("vm", False, "Print the gcloud commands of a queued resource.")
  flags.DEFINE_string("times", "", "A run of RL: print estimates of its step.")
  flags.DEFINE_bool("apply", False, "Pass the manifest to kubectl, too.")
  flags.DEFINE_string("name", "coa-jax", "The job's name.")
  flags.DEFINE_multi_string("env", [], "NAME=VALUE, an environment variable.")

  flags.DEFINE_string("slice", "", "TPUs: v6e-64 or v6e:8x8, v5p-128, tpu7x-64.")
  flags.DEFINE_integer("slices", 1, "Number of slices.", lower_bound=1)
  flags.DEFINE_integer(
    "shards", 0, "Number of independent pods, each with its --shard.", lower_bound=0
  )
  flags.DEFINE_string(
    "image", "", "Image made by the Dockerfile; Pyxis runs it for --slurm."
  )
  flags.DEFINE_list("in_image", [], "Absolute paths in the image, for the config.")
  flags.DEFINE_string("disk", "", "CLAIM:PATH of a volume shared by all hosts.")
  flags.DEFINE_bool("spot", False, "Use preemptible machines.")
  flags.DEFINE_integer("restarts", 20, "Maximum number of restarts.", lower_bound=0)
  flags.DEFINE_integer(
    "grace_s",
    600,
    "Seconds from SIGTERM to the end; spot machines give 30.",
    lower_bound=1,
  )
  flags.DEFINE_multi_string(
    "secret",
    [],
    "NAME=SECRET:KEY, an environment variable from a Secret of Kubernetes; "
    "/PATH=SECRET:KEY, a file.",
  )
  flags.DEFINE_string("queue", "", "The job's Kueue queue.")
  flags.DEFINE_string("namespace", "", "Kubernetes namespace; empty for kubectl's.")
  flags.DEFINE_string("service_account", "", "The pods' service account.")
  flags.DEFINE_string("cpu", "", "Cores requested by a pod, as 8.")
  flags.DEFINE_string("memory", "", "Memory requested by a pod, as 64Gi.")

  flags.DEFINE_integer("nodes", 1, "Number of hosts, for --slurm.", lower_bound=1)
  flags.DEFINE_integer("gpus", 8, "GPUs per host, for --slurm.", lower_bound=1)
  flags.DEFINE_string("time", "24:00:00", "Time limit, for --slurm.")
  flags.DEFINE_string("account", "", "Billed account, for --slurm.")
  flags.DEFINE_string("partition", "", "Partition, for --slurm.")
  flags.DEFINE_string("venv", "", "Folder of a virtual environment, for --slurm.")
  flags.DEFINE_string("zone", "", "Zone, for --vm, as us-east5-b.")


_IN_SHARDS = (
  "experiments.distill",
  "experiments.evaluate",
  "experiments.tasks",
  "experiments.synthesize",
  "experiments.import_traces",
)
# Flags read by only one form.
_ONLY = {
  "--slurm": ("nodes", "gpus", "time", "account", "partition", "venv"),
  "--vm": ("zone",),
  "Kubernetes": (
    *("apply", "shards", "in_image", "disk", "restarts", "grace_s", "secret"),
    *("queue", "namespace", "service_account", "cpu", "memory"),
  ),
}
_QUANTITY = r"[1-9]\d*(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?"
_TIME = r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}"  # from man sbatch, --time


def _check_flags() -> None:
  """Refuses another form's flags, and values that no cluster accepts."""
  if FLAGS.slurm and FLAGS.vm:
    stop("--slurm and --vm: give one of them, or none for a JobSet")
  form = "Kubernetes"
  if FLAGS.slurm:
    form = "--slurm"
  elif FLAGS.vm:
    form = "--vm"
  for owner, names in _ONLY.items():
    for name in names:
      if owner != form and FLAGS[name].value != FLAGS[name].default:
        stop(f"--{name} is for {owner}; it does not go with {form}")
  label = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
  dotted = r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?"
  for name, pattern, accepted in (
    ("name", label, "at most 40 of a-z, 0-9 and -, a letter first"),
    ("namespace", r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a name of a-z, 0-9 and -"),
    ("service_account", dotted, "a name of a-z, 0-9, - and ."),
    ("queue", dotted, "a name of a-z, 0-9, - and ."),
    ("cpu", _QUANTITY, "a quantity, as 8 or 500m"),
    ("memory", _QUANTITY, "a quantity, as 64Gi"),
    ("time", _TIME, "minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS"),
    ("account", r"[\w.@-]+", "a name of letters, digits, and _ . @ -"),
    ("partition", r"[\w.,-]+", "names of letters, digits, and _ . -, by commas"),
  ):
    value = FLAGS[name].value
    if not re.fullmatch(pattern, value) and (value or name in ("name", "time")):
      stop(f"--{name}={value}: {accepted}")


def _read_env() -> dict[str, str]:
  out = {}
  for text in FLAGS.env:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
      stop(f"--env={text}: give NAME=VALUE, a name of letters, digits and _")
    out[name] = value
  return out


def _read_secrets() -> dict[str, tuple[str, str]]:
  """Reads the Secrets in --secret, by variable or path."""
  out = {}
  for text in FLAGS.secret:
    match = re.fullmatch(
      r"([A-Za-z_]\w*|/[^:=\s]+[^:=\s/])=([a-z0-9][-.a-z0-9]*):([-.\w]+)",
      text,
      re.ASCII,
    )
    if not match:
      stop(f"--secret={text}: give NAME=SECRET:KEY or /PATH=SECRET:KEY")
    out[match[1]] = (match[2], match[3])
  return out


def main(words: list[str]) -> None:
  """Prints the requested form. budget: three forms, one after the other."""
  if FLAGS.times:
    print(describe_run(FLAGS.times))
    return
  command, words = _read_command(words, FLAGS.shards)
  _check_flags()
  env = _read_env()

  # --- Hosts with GPUs.
  if FLAGS.slurm:
    if FLAGS.slice or FLAGS.slices > 1 or FLAGS.spot:
      stop("--slurm is for GPUs; it does not go with --slice, --slices and --spot")
    hosts = f"--nodes={FLAGS.nodes} --gpus={FLAGS.gpus}"
    check_command(words, Machines(describe_gpus(FLAGS.nodes, FLAGS.gpus), hosts))
    print(make_sbatch(FLAGS, command, env), end="")
    return

  # --- TPUs, or shards on hosts of any kind.
  if not FLAGS.slice and not FLAGS.shards:
    stop("--slice must be given, as --slice=v6e-64; or --slurm for GPUs, or --shards")
  tpus = read_slice(FLAGS.slice) if FLAGS.slice else None
  if tpus and FLAGS.shards and tpus.hosts > 1:
    stop(f"--slice={FLAGS.slice} --shards: a shard is one process, so one host's chips")
  claim, colon, path = FLAGS.disk.partition(":")
  if FLAGS.disk and not (claim and colon and path.startswith("/")):
    stop(f"--disk={FLAGS.disk}: give CLAIM:/PATH")
  slices = FLAGS.shards or FLAGS.slices
  job = PodJob(FLAGS, command, tpus, slices, claim, path, env, _read_secrets())
  if FLAGS.vm:
    if not FLAGS.zone:
      stop("--vm needs --zone, as --zone=us-east5-b")
    if job.slices > 1:
      stop(f"--slices={job.slices} does not go with --vm: leave out --vm, for GKE")
    if FLAGS.image:
      stop("--image does not go with --vm, which installs this checkout")
    commands = make_vm_commands(job, FLAGS.zone)
    check_command(words, _machines(job))
    print(commands, end="")
    return
  if FLAGS.slices > 1 and job.slice.hosts == 1:
    stop(
      f"--slices={job.slices}: GKE joins slices of several hosts, and {job.slice.name} "
      f"({job.slice.topology}) is one host"
    )
  if not FLAGS.image:
    stop("--image must be given: build the Dockerfile, and push it")
  check_command(words, _machines(job))
  made = make_shards(job) if FLAGS.shards else make_jobset(job)
  manifest = yaml.safe_dump(made, sort_keys=False)
  print(manifest, end="")
  if FLAGS.apply:
    _apply(manifest)


def _machines(job: PodJob) -> Machines:
  name = f"--slice={FLAGS.slice}" if FLAGS.slice else f"--shards={FLAGS.shards}"
  if FLAGS.slices > 1:
    name += f" --slices={FLAGS.slices}"
  devices = describe_slices(job.slice, FLAGS.slices) if job.slice else []
  if FLAGS.vm:
    return Machines(devices, name, without=NOT_SENT)
  secrets = [path for path in job.secrets if path.startswith("/")]
  mounts = (*filter(None, (job.path, *FLAGS.in_image)), *secrets)
  return Machines(devices, name, True, mounts, shards=FLAGS.shards > 0)


def _read_command(words: list[str], shards: int) -> tuple[list[str], list[str]]:
  """Reads the words after `--`.

  Returns:
    The command for every host; and the program, as experiments.NAME, with its flags.
  """
  if not words:
    stop("name the program after --, as: -- coa rl --config=... --workdir=...")
  if words[0] != "coa" and not re.fullmatch(r"experiments(\.\w+)+", words[0]):
    stop(f"{words[0]}: after -- comes a program, as coa rl")
  program, start, rest = split_program(words)
  if start == [program] and importlib.util.find_spec(program) is None:
    stop(f"{program}: there is no such program")
  if shards and program not in _IN_SHARDS:
    stop(f"--shards={shards}: {program} has none; {', '.join(_IN_SHARDS)} have")
  own = f"--shard=auto/{shards}" if shards else "--distributed=auto"
  for word in rest:
    if word.startswith(("--distributed", "--shard")):
      stop(f"{word}: every host gets {own}; leave it out")
  return ["python", "-m", *start, *rest, own], [program, *rest]


def _apply(manifest: str) -> None:
  kubectl = shutil.which("kubectl")
  if not kubectl:
    stop("--apply needs kubectl, which is not on the PATH")
  done = subprocess.run([kubectl, "apply", "-f", "-"], input=manifest, text=True)
  if done.returncode:
    stop(f"kubectl apply ended with status {done.returncode}")


def command() -> None:
  """Runs the command line."""
  define_flags()
  run_program(main, takes_words=True)
