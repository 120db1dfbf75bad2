r"""Prints what starts a run on a pod: a GKE JobSet, an sbatch file, or gcloud commands.

  python -m experiments.pod --slice=v6e-64 --image=REGISTRY/coa-jax \
    -- experiments.rl --config=configs/rl_afm.py --workdir=gs://BUCKET/runs/rl
  python -m experiments.pod --shards=8 --image=REGISTRY/coa-jax \
    -- experiments.distill --config=... --workdir=gs://BUCKET/runs/distill
  python -m experiments.pod --slurm --nodes=4 --gpus=8 -- experiments.sft ...
  python -m experiments.pod --vm --slice=v6e-64 --zone=us-east5-b -- experiments.sft ...

The words after `--` are the program and its flags, as on one machine; every host runs
them with --distributed=auto. With `--shards` no host needs another: it is an Indexed
Job, whose pods run them with --shard=auto/N, on hosts without TPUs or, with --slice, on
one host of TPUs each. `--apply` hands the manifest to kubectl. The manifests are
checked against Kubernetes' schemas; none of this has been run on a cluster yet.

A host that dies ends its process on all others: JAX's coordination service notices
within 100 seconds. The JobSet then starts all of them anew, and the run goes on from
its last checkpoint. SIGTERM ends rollouts at once and an update at its end, and saves:
the grace period should cover an update and a checkpoint.

budget: three ways to start a run, and the flags of all.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
from typing import Any

import yaml
from absl import flags

from experiments.deploy.slices import Slice, read_slice
from experiments.launch import run_program, stop

FLAGS = flags.FLAGS
# For the TPU's compiler. Libtpu 0.0.42 reorders rings of chips on v6e and v5e, and then
# compiles no all-reduce among the four of a slice's first host alone.
PLAIN_RINGS = (
  "--xla_tpu_enable_glp_ring_reordering=false "
  "--xla_tpu_enable_vlp_small_topology_ring_reordering=false"
)
# It gathers the next products' matrices while it multiplies (CF_FOR_ALL_GATHER of
# MaxText's benchmarks/xla_flags_library.py).
LIBTPU_INIT_ARGS = " ".join(
  (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
    PLAIN_RINGS,
  )
)
# The ports by which the processes of a run, and slices among them, find each other.
_PORTS = (8471, 8080)


@dataclasses.dataclass(frozen=True)
class PodJob:
  """What is to run, and on what.

  Attributes:
    name: of the job.
    command: the program's words, from `python` on.
    slice: the TPUs of one slice; None for none.
    slices: how many slices, or shards.
    image: the container image.
    claim: the volume claim of the disk that all hosts share; "" for none.
    path: where it is mounted.
    spot: whether on preemptible machines.
    restarts: most restarts.
    grace_s: seconds from SIGTERM to the end.
  """

  name: str
  command: list[str]
  slice: Slice | None
  slices: int = 1
  image: str = ""
  claim: str = ""
  path: str = ""
  spot: bool = False
  restarts: int = 20
  grace_s: int = 600


def make_jobset(job: PodJob) -> dict[str, Any]:
  """Makes a JobSet (jobset.x-k8s.io/v1alpha2) of one pod a host.

  Every failure makes all pods anew: a process that lives on among new ones would wait
  for those that it had.
  """
  hosts = job.slice.hosts
  job_spec = {
    "completionMode": "Indexed",
    "parallelism": hosts,
    "completions": hosts,
    "backoffLimit": 0,  # the set restarts, never one pod of it
    "template": {
      # Who may call the sandbox service: see tools_sandbox/deploy/kubernetes.yaml.
      "metadata": {"labels": {"tools-sandbox-client": "true"}},
      "spec": _pod_spec(job),
    },
  }
  annotations = {
    # A slice is a node pool: no two jobs of the set on one.
    "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
  }
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": job.name, "annotations": annotations},
    "spec": {
      "failurePolicy": {"maxRestarts": job.restarts, "restartStrategy": "Recreate"},
      "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
      "replicatedJobs": [
        {"name": "slice", "replicas": job.slices, "template": {"spec": job_spec}}
      ],
    },
  }


def make_shards(job: PodJob) -> dict[str, Any]:
  """Makes an Indexed Job of one pod a shard; a lost one is started again alone."""
  return {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": job.name},
    "spec": {
      "completionMode": "Indexed",
      "parallelism": job.slices,
      "completions": job.slices,
      "backoffLimitPerIndex": job.restarts,
      "template": {
        "metadata": {"labels": {"tools-sandbox-client": "true"}},
        "spec": _pod_spec(job),
      },
    },
  }


def _pod_spec(job: PodJob) -> dict[str, Any]:
  """The pod of a host, which has all of its chips."""
  # --- Its disks: the node's own, memory, and the one that all hosts share.
  volumes: list[dict[str, Any]] = [
    {"name": "scratch", "emptyDir": {}},
    {"name": "shm", "emptyDir": {"medium": "Memory"}},
  ]
  mounts = [
    {"name": "scratch", "mountPath": "/scratch"},
    {"name": "shm", "mountPath": "/dev/shm"},
  ]
  if job.claim:
    claim = {"claimName": job.claim}
    volumes.append({"name": "disk", "persistentVolumeClaim": claim})
    mounts.append({"name": "disk", "mountPath": job.path})

  # --- The program.
  container = {
    "name": "run",
    "image": job.image,
    "command": [
      "tini",
      "--",
      *job.command,
      "--compile_cache=/scratch/xla",
      "--scratch=/scratch/runs",
    ],
    "env": [{"name": "LIBTPU_INIT_ARGS", "value": LIBTPU_INIT_ARGS}],
    "ports": [{"containerPort": port} for port in _PORTS],
    "volumeMounts": mounts,
  }

  # --- The machine.
  selector = {}
  if job.slice:
    container["resources"] = {"limits": {"google.com/tpu": job.slice.chips_per_host}}
    selector["cloud.google.com/gke-tpu-accelerator"] = job.slice.gke_accelerator
    selector["cloud.google.com/gke-tpu-topology"] = job.slice.topology
  pod = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": job.grace_s,
    "nodeSelector": selector,
    "containers": [container],
    "volumes": volumes,
  }
  if job.slices > 1:  # what goes between them takes no detour through a pod's network
    pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
  if job.spot:
    selector["cloud.google.com/gke-spot"] = "true"
    taint = {"key": "cloud.google.com/gke-spot", "value": "true"}
    pod["tolerations"] = [{**taint, "operator": "Equal", "effect": "NoSchedule"}]
  return pod


def make_sbatch(
  name: str, command: list[str], nodes: int, gpus: int, hours: int
) -> str:
  """Makes an sbatch file: a process for each GPU, a queue that starts it again.

  JAX gives a process under Slurm the one GPU of its local rank. Slurm sends SIGTERM
  five minutes before the time is up; the run saves, and goes on when requeued.
  """
  lines = [
    "#!/usr/bin/env bash",
    f"#SBATCH --job-name={name}",
    f"#SBATCH --nodes={nodes}",
    f"#SBATCH --ntasks-per-node={gpus}",
    f"#SBATCH --gpus-per-node={gpus}",
    f"#SBATCH --time={hours}:00:00",
    "#SBATCH --signal=TERM@300",
    "#SBATCH --requeue",
    "#SBATCH --open-mode=append",
    "# From the root of the repository, on a disk that all hosts share.",
    "# A process that dies ends the others: they would wait for it.",
    f"srun --kill-on-bad-exit=1 {shlex.join(command)} && exit",
    "status=$?",
    "# 143: saved on SIGTERM. Anything else is a fault, and stays one.",
    '[[ $status == 143 ]] && scontrol requeue "$SLURM_JOB_ID"',
    "exit $status",
  ]
  return "\n".join(lines) + "\n"


def make_vm_commands(job: PodJob, zone: str) -> str:
  """Makes the gcloud commands that get TPU VMs by a queued resource and run on all.

  Raises:
    ValueError: the Cloud TPU API has no such slices.
  """
  if not job.slice.gcloud_type:
    raise ValueError(
      f"--slice={job.slice.name} is not in the Cloud TPU API: leave out --vm, for GKE"
    )
  node = shlex.quote(job.name)
  spot = " --spot" if job.spot else ""
  where = f"--zone={shlex.quote(zone)}"
  ssh = f"gcloud compute tpus tpu-vm ssh {node} {where} --worker=all --command"
  unpack = "mkdir -p coa-jax && tar xzf coa-jax.tgz -C coa-jax --strip-components=1"
  install = "cd coa-jax && python3 -m venv .venv && .venv/bin/pip install -e '.[tpu]'"
  flags_for_tpu = f"LIBTPU_INIT_ARGS={LIBTPU_INIT_ARGS}"
  words = ["env", flags_for_tpu, ".venv/bin/python", *job.command[1:]]
  # Under tmux the run outlives the connection.
  run = f"cd coa-jax && tmux new-session -d -s run {shlex.quote(shlex.join(words))}"
  return f"""\
# 1. The machines: wait until the state is ACTIVE.
gcloud compute tpus queued-resources create {node} --node-id={node} {where} \\
  --accelerator-type={job.slice.gcloud_type} \\
  --runtime-version={job.slice.runtime}{spot}
gcloud compute tpus queued-resources describe {node} {where}

# 2. This repository on all of them, and what it needs.
tar --exclude=.venv --exclude=runs -czf /tmp/coa-jax.tgz -C .. "$(basename "$PWD")"
gcloud compute tpus tpu-vm scp /tmp/coa-jax.tgz {node}: {where} --worker=all
{ssh}={shlex.quote(unpack)}
{ssh}={shlex.quote(install)}

# 3. The run, on every host; its workdir is on a disk that all share.
{ssh}={shlex.quote(run)}
{ssh}='tmux capture-pane -p -t run | tail -n 5'

# 4. When it is done.
gcloud compute tpus queued-resources delete {node} {where} --force
"""


def define_flags() -> None:
  """Defines this program's flags: not on import, for other programs have like ones."""
  flags.DEFINE_bool("slurm", False, "Print an sbatch file for hosts with GPUs.")
  flags.DEFINE_bool("vm", False, "Print the gcloud commands of a queued resource.")
  flags.DEFINE_bool("apply", False, "Hand the manifest to kubectl, too.")
  flags.DEFINE_string("name", "coa-jax", "What the job is called.")

  flags.DEFINE_string("slice", "", "TPUs: v6e-64 or v6e:8x8, v5p-128, tpu7x-64.")
  flags.DEFINE_integer("slices", 1, "How many of them.", lower_bound=1)
  flags.DEFINE_integer(
    "shards", 0, "So many pods that never meet, each with its --shard.", lower_bound=0
  )
  flags.DEFINE_string("image", "", "Made by experiments/deploy/Containerfile.")
  flags.DEFINE_string("disk", "", "CLAIM:PATH of a volume that all hosts share.")
  flags.DEFINE_bool("spot", False, "On preemptible machines.")
  flags.DEFINE_integer("restarts", 20, "Most restarts.", lower_bound=0)
  flags.DEFINE_integer(
    "grace_s",
    600,
    "Seconds from SIGTERM to the end; spot machines give 30.",
    lower_bound=1,
  )

  flags.DEFINE_integer("nodes", 1, "Hosts of --slurm.", lower_bound=1)
  flags.DEFINE_integer("gpus", 8, "GPUs of a host of --slurm.", lower_bound=1)
  flags.DEFINE_integer("hours", 24, "Time limit of --slurm.", lower_bound=1)
  flags.DEFINE_string("zone", "", "Of --vm, as us-east5-b.")


def main(words: list[str]) -> None:
  """Prints what the flags ask for."""
  command = _read_command(words, FLAGS.shards)
  if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", FLAGS.name):
    stop(f"--name={FLAGS.name}: at most 40 of a-z, 0-9 and -, a letter first")
  if FLAGS.slurm and FLAGS.vm:
    stop("--slurm and --vm: give one of them, or none for a JobSet")
  for flag in ("apply", "shards"):
    if FLAGS[flag].value and (FLAGS.slurm or FLAGS.vm):
      stop(f"--{flag} is for Kubernetes; it does not go with --slurm or --vm")

  # --- Hosts with GPUs.
  if FLAGS.slurm:
    if FLAGS.slice or FLAGS.slices > 1:
      stop("--slurm is for GPUs; it does not go with --slice and --slices")
    script = make_sbatch(FLAGS.name, command, FLAGS.nodes, FLAGS.gpus, FLAGS.hours)
    print(script, end="")
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
  job = PodJob(
    name=FLAGS.name,
    command=command,
    slice=tpus,
    slices=FLAGS.shards or FLAGS.slices,
    image=FLAGS.image,
    claim=claim,
    path=path,
    spot=FLAGS.spot,
    restarts=FLAGS.restarts,
    grace_s=FLAGS.grace_s,
  )
  if FLAGS.vm:
    if not FLAGS.zone:
      stop("--vm needs --zone, as --zone=us-east5-b")
    if job.slices > 1:
      stop(f"--slices={job.slices} does not go with --vm: leave out --vm, for GKE")
    print(make_vm_commands(job, FLAGS.zone), end="")
    return
  if FLAGS.slices > 1 and job.slice.hosts == 1:
    stop(
      f"--slices={job.slices}: GKE joins slices of several hosts, and {job.slice.name} "
      f"({job.slice.topology}) is one host"
    )
  if not job.image:
    stop("--image must be given: build experiments/deploy/Containerfile, and push it")
  made = make_shards(job) if FLAGS.shards else make_jobset(job)
  manifest = yaml.safe_dump(made, sort_keys=False)
  print(manifest, end="")
  if FLAGS.apply:
    _apply(manifest)


def _read_command(words: list[str], shards: int) -> list[str]:
  """The command that every host runs, of the words after `--`."""
  if not words:
    stop("name the program after --, as: -- experiments.rl --config=... --workdir=...")
  if not re.fullmatch(r"experiments(\.\w+)+", words[0]):
    stop(f"{words[0]}: after -- comes a program, as experiments.rl")
  own = f"--shard=auto/{shards}" if shards else "--distributed=auto"
  for word in words[1:]:
    if word.startswith(("--distributed", "--shard")):
      stop(f"{word}: every host gets {own}; leave it out")
  return ["python", "-m", *words, own]


def _apply(manifest: str) -> None:
  """Hands a manifest to kubectl."""
  kubectl = shutil.which("kubectl")
  if not kubectl:
    stop("--apply needs kubectl, which is not on the PATH")
  done = subprocess.run([kubectl, "apply", "-f", "-"], input=manifest, text=True)
  if done.returncode:
    stop(f"kubectl apply ended with status {done.returncode}")


if __name__ == "__main__":
  define_flags()
  run_program(main, takes_words=True)
