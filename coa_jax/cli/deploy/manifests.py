"""Kubernetes manifests for a run: a JobSet with a pod per host, or a Job of shards."""

from __future__ import annotations

import dataclasses
from typing import Any

from coa_jax.cli.deploy.slices import GENERATIONS, Slice

# TPU compiler flags. Libtpu 0.0.42 reorders rings of chips on v6e and v5e, and then
# cannot compile an all-reduce among only the four chips of a slice's first host.
PLAIN_RINGS = (
  "--xla_tpu_enable_glp_ring_reordering=false "
  "--xla_tpu_enable_vlp_small_topology_ring_reordering=false"
)
# All-gathers the next products' matrices during products (CF_FOR_ALL_GATHER in
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
# Ports for a run's processes and slices to find each other.
_PORTS = (8471, 8080)


@dataclasses.dataclass(frozen=True)
class PodJob:
  """A command and the pods to run it.

  Attributes:
    flags: the flags of `coa pod`.
    command: the program's words, from `python` on.
    slice: one slice's TPUs; None for none.
    slices: the number of slices, or of shards.
    claim: the shared disk's PersistentVolumeClaim; "" for none.
    path: the disk's place in every pod.
    env: environment variables.
    secrets: variable or file path -> a Secret and its key.
  """

  flags: Any
  command: list[str]
  slice: Slice | None = None
  slices: int = 1
  claim: str = ""
  path: str = ""
  env: dict[str, str] = dataclasses.field(default_factory=dict)
  secrets: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)


def make_jobset(job: PodJob) -> dict[str, Any]:
  """Makes a JobSet (jobset.x-k8s.io/v1alpha2) with one pod per host.

  Every failure recreates all pods: a surviving process would wait for its old peers.
  """
  hosts = job.slice.hosts
  job_spec = {
    "completionMode": "Indexed",
    "parallelism": hosts,
    "completions": hosts,
    "backoffLimit": 0,  # the whole set restarts, never one pod
    "template": {
      # Permits calls to the sandbox service: see tools_sandbox/deploy/kubernetes.yaml.
      "metadata": {"labels": {"tools-sandbox-client": "true"}},
      "spec": _pod_spec(job),
    },
  }
  annotations = {
    # A slice is a node pool, which never runs two of the set's jobs.
    "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
  }
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {**_metadata(job), "annotations": annotations},
    "spec": {
      "failurePolicy": {
        "maxRestarts": job.flags.restarts,
        "restartStrategy": "Recreate",
      },
      "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
      "replicatedJobs": [
        {"name": "slice", "replicas": job.slices, "template": {"spec": job_spec}}
      ],
    },
  }


def make_shards(job: PodJob) -> dict[str, Any]:
  """Makes an Indexed Job with one pod per shard; a lost pod restarts alone."""
  return {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": _metadata(job),
    "spec": {
      "completionMode": "Indexed",
      "parallelism": job.slices,
      "completions": job.slices,
      "backoffLimitPerIndex": job.flags.restarts,
      "template": {
        "metadata": {"labels": {"tools-sandbox-client": "true"}},
        "spec": _pod_spec(job),
      },
    },
  }


def _metadata(job: PodJob) -> dict[str, Any]:
  out: dict[str, Any] = {"name": job.flags.name}
  if job.flags.namespace:
    out["namespace"] = job.flags.namespace
  if job.flags.queue:
    out["labels"] = {"kueue.x-k8s.io/queue-name": job.flags.queue}
  return out


def _pod_spec(job: PodJob) -> dict[str, Any]:
  # --- The pod's disks: the node's own, memory, and the shared one.
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

  # --- The environment; a secret is a variable, or a file at an absolute path.
  variables = {"LIBTPU_INIT_ARGS": LIBTPU_INIT_ARGS, **job.env}
  env: list[dict[str, Any]] = []
  for name, value in variables.items():
    env.append({"name": name, "value": value})
  for name, (secret, key) in job.secrets.items():
    if not name.startswith("/"):
      source = {"secretKeyRef": {"name": secret, "key": key}}
      env.append({"name": name, "valueFrom": source})
      continue
    volume = f"secret-{len(volumes)}"
    volumes.append({"name": volume, "secret": {"secretName": secret}})
    mount = {"name": volume, "mountPath": name, "subPath": key, "readOnly": True}
    mounts.append(mount)

  # --- The program.
  local = []
  for flag in ("--compile_cache=/scratch/xla", "--scratch=/scratch/runs"):
    name = flag.partition("=")[0]
    if not any(word.partition("=")[0] == name for word in job.command):
      local.append(flag)
  container = {
    "name": "run",
    "image": job.flags.image,
    "command": ["tini", "--", *job.command, *local],
    "env": env,
    "volumeMounts": mounts,
  }
  if not job.flags.shards:
    container["ports"] = [{"containerPort": port} for port in _PORTS]

  # --- The machine.
  selector = {}
  resources: dict[str, Any] = {}
  requests = {name: job.flags[name].value for name in ("cpu", "memory")}
  if any(requests.values()):
    resources["requests"] = {name: text for name, text in requests.items() if text}
  if job.slice:
    resources["limits"] = {"google.com/tpu": job.slice.chips_per_host}
    accelerator = GENERATIONS[job.slice.generation].gke_accelerator
    selector["cloud.google.com/gke-tpu-accelerator"] = accelerator
    selector["cloud.google.com/gke-tpu-topology"] = job.slice.topology
  if resources:
    container["resources"] = resources
  pod: dict[str, Any] = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": job.flags.grace_s,
    "nodeSelector": selector,
    "containers": [container],
    "volumes": volumes,
  }
  if job.flags.service_account:
    pod["serviceAccountName"] = job.flags.service_account
  # Slices communicate outside the pod network; shards do not communicate.
  if job.slices > 1 and not job.flags.shards:
    pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
  if job.flags.spot:
    selector["cloud.google.com/gke-spot"] = "true"
    taint = {"key": "cloud.google.com/gke-spot", "value": "true"}
    pod["tolerations"] = [{**taint, "operator": "Equal", "effect": "NoSchedule"}]
  return pod
