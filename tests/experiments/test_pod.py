"""What starts a run on a pod: manifests by Kubernetes' schemas, scripts by bash."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shlex
import subprocess
import sys

import jsonschema
import kubernetes_validate
import pytest
import yaml

from experiments import pod
from experiments.deploy.slices import GENERATIONS, Slice, read_slice

ROOT = pathlib.Path(__file__).parents[2]
# Kubernetes' own release whose schemas are used; the manifests need no newer one.
KUBERNETES = "1.33"
# What a JobSet has beside its Job templates; source: the CRD jobset.x-k8s.io_jobsets of
# github.com/kubernetes-sigs/jobset, v1alpha2.
JOBSET = {
  "type": "object",
  "required": ["apiVersion", "kind", "metadata", "spec"],
  "additionalProperties": False,
  "properties": {
    "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
    "kind": {"const": "JobSet"},
    "metadata": {"type": "object"},
    "spec": {
      "type": "object",
      "additionalProperties": False,
      "properties": {
        "failurePolicy": {
          "type": "object",
          "additionalProperties": False,
          "properties": {
            "maxRestarts": {"type": "integer"},
            "restartStrategy": {"enum": ["Recreate", "BlockingRecreate"]},
          },
        },
        "network": {
          "type": "object",
          "additionalProperties": False,
          "properties": {
            "enableDNSHostnames": {"type": "boolean"},
            "publishNotReadyAddresses": {"type": "boolean"},
            "subdomain": {"type": "string"},
          },
        },
        "replicatedJobs": {
          "type": "array",
          "items": {
            "type": "object",
            "required": ["name", "template"],
            "additionalProperties": False,
            "properties": {
              "name": {"type": "string"},
              "replicas": {"type": "integer"},
              "template": {"type": "object"},
            },
          },
        },
      },
    },
  },
}
COMMAND = ["experiments.rl", "--config=configs/rl_afm.py", "--config.tasks.uri=a b'$c"]


def run(*words: str) -> subprocess.CompletedProcess:
  """Runs the program."""
  return subprocess.run(
    [sys.executable, "-m", "experiments.pod", *words],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


@pytest.mark.parametrize(
  ("name", "slices"), [("v6e-64", 2), ("v5p:2x2x4", 1), ("tpu7x-16", 3), ("v5e-8", 1)]
)
def test_a_jobset_fits_the_published_schemas(name, slices):
  done = run(
    f"--slice={name}",
    "--image=registry/coa-jax:1",
    "--disk=claim:/mnt/disk",
    "--spot",
    f"--slices={slices}",
    "--",
    *COMMAND,
  )
  assert done.returncode == 0, done.stderr
  manifest = yaml.safe_load(done.stdout)
  jsonschema.validate(manifest, JOBSET)
  (job,) = manifest["spec"]["replicatedJobs"]
  assert job["replicas"] == slices
  as_job = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "slice"},
    **job["template"],
  }
  kubernetes_validate.validate(as_job, KUBERNETES, strict=True)
  # A pod a host, all chips of the slice, and the program's words as they were.
  spec = as_job["spec"]
  (container,) = spec["template"]["spec"]["containers"]
  chips = container["resources"]["limits"]["google.com/tpu"]
  assert ("hostNetwork" in spec["template"]["spec"]) == (slices > 1)
  assert spec["parallelism"] == spec["completions"]
  assert spec["parallelism"] * chips == read_slice(name).chips
  assert container["command"][:7] == ["tini", "--", "python", "-m", *COMMAND]
  assert "--distributed=auto" in container["command"]
  assert container["env"] == [
    {"name": "LIBTPU_INIT_ARGS", "value": pod.LIBTPU_INIT_ARGS}
  ]


@pytest.mark.parametrize("flags", [[], ["--slice=v6e-8", "--spot"]])
def test_a_job_of_shards_fits_the_published_schemas(flags):
  done = run("--shards=5", "--image=registry/coa-jax:1", *flags, "--", *COMMAND)
  assert done.returncode == 0, done.stderr
  job = yaml.safe_load(done.stdout)
  kubernetes_validate.validate(job, KUBERNETES, strict=True)
  assert job["spec"]["completionMode"] == "Indexed"
  assert job["spec"]["completions"] == job["spec"]["parallelism"] == 5
  (container,) = job["spec"]["template"]["spec"]["containers"]
  assert "--shard=auto/5" in container["command"]
  assert not any("--distributed" in word for word in container["command"])
  assert container.get("resources", {}) == (
    {"limits": {"google.com/tpu": 8}} if flags else {}
  )


def test_a_wrong_manifest_would_be_seen():
  job = pod.PodJob("job", ["python"], Slice("v6e", "4x4"))
  (replicated,) = pod.make_jobset(job)["spec"]["replicatedJobs"]
  replicated["template"]["spec"]["paralelism"] = 2
  as_job = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "slice"},
    **replicated["template"],
  }
  with pytest.raises(kubernetes_validate.ValidationError, match="paralelism"):
    kubernetes_validate.validate(as_job, KUBERNETES, strict=True)


def test_the_sandboxs_manifest_fits_the_published_schemas():
  path = ROOT / "tools_sandbox/deploy/kubernetes.yaml"
  documents = list(yaml.safe_load_all(path.read_text()))
  assert len(documents) == 3
  for document in documents:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_an_sbatch_file_is_bash_and_keeps_every_word():
  script = pod.make_sbatch("run", ["python", "-m", *COMMAND], 4, 8, 24)
  subprocess.run(["bash", "-n"], input=script, text=True, check=True)
  (line,) = [line for line in script.splitlines() if line.startswith("srun")]
  assert shlex.split(line)[2:-2] == ["python", "-m", *COMMAND]


def test_a_saved_run_is_requeued_and_a_failed_one_is_not(tmp_path):
  script = pod.make_sbatch("run", ["sh", "-c", 'exit "$STATUS"'], 1, 1, 1)
  (tmp_path / "srun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
  (tmp_path / "scontrol").write_text("#!/bin/sh\necho requeued\n")
  for name in ("srun", "scontrol"):
    (tmp_path / name).chmod(0o755)
  for status, said in (("143", "requeued\n"), ("2", ""), ("0", "")):
    done = subprocess.run(
      ["bash"],
      input=script,
      env={"PATH": f"{tmp_path}:/usr/bin:/bin", "STATUS": status, "SLURM_JOB_ID": "7"},
      capture_output=True,
      text=True,
    )
    assert (done.returncode, done.stdout) == (int(status), said), done.stderr


def test_the_commands_of_a_queued_resource_keep_every_word():
  job = pod.PodJob("run", ["python", "-m", *COMMAND], Slice("v5p", "4x4x4"))
  script = pod.make_vm_commands(job, "us-east5-a")
  subprocess.run(["bash", "-n"], input=script, text=True, check=True)
  assert "--accelerator-type=v5p-128 " in script
  (line,) = [line for line in script.splitlines() if "new-session" in line]
  # The shell here, the host's shell, and the one that tmux starts.
  on_host = shlex.split(line)[-1].removeprefix("--command=")
  in_tmux = shlex.split(on_host)[-1]
  env, flags, *command = shlex.split(in_tmux)
  assert (env, flags) == ("env", f"LIBTPU_INIT_ARGS={pod.LIBTPU_INIT_ARGS}")
  assert command == [".venv/bin/python", "-m", *COMMAND]


def test_names_and_topologies_of_a_slice_are_one():
  for name, generation in GENERATIONS.items():
    for topology in (*generation.single_host, *generation.topologies):
      found = Slice(name, topology)
      assert read_slice(found.name) == read_slice(f"{name}:{topology}") == found
      assert found.hosts * found.chips_per_host == found.chips
  assert read_slice("v5p-128").topology == "4x4x4"
  assert read_slice("v6e-64").hosts == 16


@pytest.mark.parametrize(
  ("words", "message"),
  [
    ("--slice=v6e-64 --image=x", "name the program after --"),
    ("--slice=v6e-65 --image=x -- experiments.rl", "there are v6e-1 (1x1), v6e-4"),
    ("--slice=v4-8 --image=x -- experiments.rl", "there are v5e, v5p, v6e, tpu7x"),
    ("--slice=v6e-64 -- experiments.rl", "--image must be given"),
    ("--image=x -- experiments.rl", "--slice must be given"),
    ("--slice=v6e-64 --image=x -- rm -rf", "after -- comes a program"),
    ("--slice=v6e-64 --image=x --disk=/mnt -- experiments.rl", "give CLAIM:/PATH"),
    ("--slice=v6e-64 --image=x --name=A_b -- experiments.rl", "a letter first"),
    ("--slice=tpu7x-8 --vm --zone=z -- experiments.rl", "leave out --vm"),
    ("--slice=v6e-8 --vm -- experiments.rl", "--vm needs --zone"),
    ("--slice=v6e-8 --slices=2 --image=x -- experiments.rl", "v6e-8 (2x4) is one host"),
    ("--slice=v6e-16 --slices=2 --vm --zone=z -- experiments.rl", "leave out --vm"),
    ("--slurm --slice=v6e-16 -- experiments.rl", "--slurm is for GPUs"),
    ("--slurm --vm -- experiments.rl", "give one of them"),
    ("--slurm --apply -- experiments.rl", "does not go with --slurm"),
    ("--slurm --shards=2 -- experiments.distill", "does not go with --slurm"),
    ("--slurm -- experiments.rl --distributed=auto", "leave it out"),
    ("--shards=2 --image=x -- experiments.distill --shard=0/2", "gets --shard=auto/2"),
    ("--shards=2 --slice=v6e-64 --image=x -- experiments.evaluate", "one process"),
  ],
)
def test_wrong_words_are_refused_in_one_line(words, message):
  done = run(*words.split())
  assert done.returncode == 2
  assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
  assert message in done.stderr, done.stderr


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="libtpu has the TPU's compiler"
)
@pytest.mark.parametrize(
  ("flags", "status"), [(pod.LIBTPU_INIT_ARGS, 0), ("--xla_tpu_no_such_flag=true", 1)]
)
def test_the_compiler_for_tpus_has_the_flags(flags: str, status: int):
  """It ends a process that gives it one that it does not know."""
  code = (
    "from jax.experimental import topologies\n"
    "topologies.get_topology_desc('v6e:4x4', platform='tpu')"
  )
  env = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  env = {**os.environ, **env, "LIBTPU_INIT_ARGS": flags}
  done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
  assert done.returncode == status
