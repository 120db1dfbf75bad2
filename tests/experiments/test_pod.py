"""Pod manifests checked by Kubernetes' schemas, scripts checked by bash, and refusals.

budget: one program and all its refusals.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shlex
import subprocess
import sys
import types

import forked
import jsonschema
import kubernetes_validate
import pytest
import yaml
from forked import ROOT

from coa_jax.cli.deploy import manifests, scripts
from coa_jax.cli.deploy.slices import GENERATIONS, Slice, read_slice

# The Kubernetes release of the schemas; the manifests need no newer one.
KUBERNETES = "1.33"


# A JobSet's fields besides its Job templates; source: the CRD jobset.x-k8s.io_jobsets
# in github.com/kubernetes-sigs/jobset, v1alpha2.
def record(required: tuple[str, ...] = (), **fields: dict) -> dict:
  """The schema of an object with these fields and no others."""
  shape = {"type": "object", "additionalProperties": False, "properties": fields}
  return {**shape, "required": list(required)}


_OBJECT = {"type": "object"}
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_BOOL = {"type": "boolean"}
_JOB = record(("name", "template"), name=_STRING, replicas=_INTEGER, template=_OBJECT)
JOBSET = record(
  ("apiVersion", "kind", "metadata", "spec"),
  apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
  kind={"const": "JobSet"},
  metadata=_OBJECT,
  spec=record(
    failurePolicy=record(
      maxRestarts=_INTEGER,
      restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
    ),
    network=record(
      enableDNSHostnames=_BOOL, publishNotReadyAddresses=_BOOL, subdomain=_STRING
    ),
    replicatedJobs={"type": "array", "items": _JOB},
  ),
)
# Its number of rows is a multiple of the devices in each slice below.
COMMAND = [
  "experiments.rl",
  "--config=configs/rl_gsm8k.py",
  "--workdir=gs://bucket/run",
  "--config.init=gs://bucket/model",
  "--config.tasks.uri=gs://bucket/a b'$c",
  "--config.dev.uri=gs://bucket/dev.jsonl",
  "--config.algo.batch.rows=384",
  "--config.tools.sandbox=subprocess",
]
EVALUATE = ["experiments.evaluate", "--config=configs/evaluate_gsm8k.py", *COMMAND[2:5]]
EVALUATE.append(COMMAND[-1])


KUBERNETES_FLAGS = [
  *("--queue=team", "--namespace=research", "--service_account=trainer"),
  *("--cpu=8", "--memory=64Gi", "--env=A=b=c d", "--secret=WANDB_API_KEY=wandb:key"),
  "--secret=/keys/serper=serper:key",
]


def run(*words: str) -> subprocess.CompletedProcess[str]:
  """Runs the program."""
  return forked.run("experiments.pod", *words)


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
    *KUBERNETES_FLAGS,
    "--",
    *COMMAND,
    f"--config.mesh.data={slices}",
  )
  assert done.returncode == 0, done.stderr
  manifest = yaml.safe_load(done.stdout)
  assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
  assert manifest["metadata"]["namespace"] == "research"
  jsonschema.validate(manifest, JOBSET)
  (job,) = manifest["spec"]["replicatedJobs"]
  assert job["replicas"] == slices
  as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "slice"}}
  as_job |= job["template"]
  kubernetes_validate.validate(as_job, KUBERNETES, strict=True)
  # A pod per host, all chips of the slice, and the program's unchanged words.
  spec = as_job["spec"]
  pod = spec["template"]["spec"]
  (container,) = pod["containers"]
  chips = container["resources"]["limits"]["google.com/tpu"]
  assert ("hostNetwork" in pod) == (slices > 1)
  assert spec["parallelism"] == spec["completions"]
  assert spec["parallelism"] * chips == read_slice(name).chips
  words = ["tini", "--", "python", "-m", *COMMAND]
  assert container["command"][: len(words)] == words
  assert "--distributed=auto" in container["command"]
  secret = {"secretKeyRef": {"name": "wandb", "key": "key"}}
  assert container["env"] == [
    {"name": "LIBTPU_INIT_ARGS", "value": manifests.LIBTPU_INIT_ARGS},
    {"name": "A", "value": "b=c d"},
    {"name": "WANDB_API_KEY", "valueFrom": secret},
  ]
  assert container["resources"]["requests"] == {"cpu": "8", "memory": "64Gi"}
  assert pod["serviceAccountName"] == "trainer"
  (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/keys/serper"]
  (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
  assert (volume["secret"]["secretName"], mount["subPath"]) == ("serper", "key")


@pytest.mark.parametrize("flags", [[], ["--slice=v6e-8", "--spot"]])
def test_a_job_of_shards_fits_the_published_schemas(flags):
  done = run("--shards=5", "--image=registry/coa-jax:1", *flags, "--", *EVALUATE)
  assert done.returncode == 0, done.stderr
  job = yaml.safe_load(done.stdout)
  kubernetes_validate.validate(job, KUBERNETES, strict=True)
  assert job["spec"]["completionMode"] == "Indexed"
  assert job["spec"]["completions"] == job["spec"]["parallelism"] == 5
  (container,) = job["spec"]["template"]["spec"]["containers"]
  assert "--shard=auto/5" in container["command"]
  assert "hostNetwork" not in job["spec"]["template"]["spec"]
  assert "ports" not in container
  assert not any("--distributed" in word for word in container["command"])
  assert container.get("resources", {}) == (
    {"limits": {"google.com/tpu": 8}} if flags else {}
  )


def test_the_sandboxs_manifest_fits_the_published_schemas():
  path = ROOT / "tools_sandbox/deploy/kubernetes.yaml"
  documents = list(yaml.safe_load_all(path.read_text()))
  assert len(documents) == 3
  for document in documents:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_a_saved_run_is_requeued_and_a_failed_one_is_not(tmp_path):
  flags = types.SimpleNamespace(name="run", nodes=1, gpus=8, time="24:00:00")
  flags.account = flags.partition = flags.image = flags.venv = ""
  script = scripts.make_sbatch(flags, ["sh", "-c", 'exit "$STATUS"'], {"A": "b 'c"})
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
  flags = types.SimpleNamespace(name="run", spot=False)
  job = manifests.PodJob(flags, ["python", "-m", *COMMAND], Slice("v5p", "4x4x4"))
  script = scripts.make_vm_commands(job, "us-east5-a")
  subprocess.run(["bash", "-n"], input=script, text=True, check=True)
  assert "--accelerator-type=v5p-128 " in script
  (line,) = [line for line in script.splitlines() if "new-session" in line]
  # The local shell, the host's shell, and the shell started by tmux.
  on_host = shlex.split(line)[-1].removeprefix("--command=")
  in_tmux = shlex.split(on_host)[-1]
  env, flags, *command = shlex.split(in_tmux)
  assert (env, flags) == ("env", f"LIBTPU_INIT_ARGS={manifests.LIBTPU_INIT_ARGS}")
  logged = ["2>&1", "|", "tee", "-a", "run.log"]
  assert command == [".venv/bin/python", "-m", *COMMAND, *logged]


def test_an_sbatch_file_is_bash_and_keeps_every_word():
  words = ["--slurm", "--account=ml", "--partition=gpu,long", "--time=1-12:00:00"]
  words += ["--venv=/home/me/my venv", "--image=docker://r/coa-jax:1", "--env=A=b 'c"]
  command = ["experiments.import_traces", "--file=$c", "--out=a b'"]
  done = run(*words, "--", *command)
  assert done.returncode == 0, done.stderr
  subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
  lines = done.stdout.splitlines()
  for line in ("account=ml", "partition=gpu,long", "time=1-12:00:00"):
    assert f"#SBATCH --{line}" in lines
  assert lines.index("source '/home/me/my venv/bin/activate'") < lines.index(
    next(line for line in lines if line.startswith("srun"))
  )
  assert f"export A={shlex.quote(chr(98) + ' ' + chr(39) + 'c')}" in lines
  (srun,) = [line for line in lines if line.startswith("srun")]
  assert "--container-image=docker://r/coa-jax:1" in srun
  words = shlex.split(srun)
  expected = ["python", "-m", *command, "--distributed=auto"]
  assert words[words.index("python") : -2] == expected


def documented() -> list[list[str]]:
  """The words of each `experiments.pod` command in docs/pods.md, without --apply."""
  text = (ROOT / "docs/pods.md").read_text().replace("$IMAGE", "image")
  text = text.replace("$BUCKET", "B")
  start = "python -m experiments.pod --"
  commands = [shlex.split(x) for x in text.splitlines() if x.startswith(start)]
  assert len(commands) == 4
  return [[w for w in command if w != "--apply"] for command in commands]


@pytest.mark.parametrize("command", documented(), ids=lambda c: c[3])
def test_a_documented_command_prints_a_run_whose_mesh_fits(command, tmp_path):
  done = run(*command[3:])
  assert done.returncode == 0, done.stderr
  # The launched program accepts its mesh, and only lacks its inputs.
  program, *words = command[command.index("--") + 1 :]
  count = {"--slice=v6e-16": 16, "--slice=v6e-64": 64, "--vm": 64, "--slurm": 32}
  words = [word for word in words if not word.startswith("--workdir")]
  words.append(f"--cpu_devices={count[command[3]]}")
  tasks = ROOT / "tests/fixtures/gsm8k.jsonl"
  for field in ("config.init", "config.tasks.uri", "config.dev.uri"):
    if f"--{field}" in [word.partition("=")[0] for word in words]:
      path = tmp_path if field == "config.init" else tasks
      words.append(f"--{field}={path}")
  for fault, more in (("not a model folder", []), ("needs 3 devices", _OTHER_MESH)):
    if more and command[3] != "--slurm":  # once is enough
      continue
    launched = forked.run(program, *words, f"--workdir={tmp_path}/run", *more)
    assert launched.returncode == 2, launched.stderr
    assert fault in launched.stderr.splitlines()[-1], launched.stderr


_OTHER_MESH = ["--config.mesh.fsdp=3", "--config.mesh.tensor=1"]
_OTHER_MESH += ["--config.mesh.context=1"]


def test_every_recipe_is_for_any_number_of_devices():
  for path in sorted((ROOT / "configs").glob("*.py")):
    get_config = runpy.run_path(str(path)).get("get_config")
    config = get_config() if get_config else {}
    if "mesh" in config:
      assert config.mesh.fsdp == -1, path.name


RL = " ".join(COMMAND[:4]) + " --config.dev.uri=gs://b/dev.jsonl"
RL += " --config.tasks.uri=gs://b/train.jsonl"
SAFE = "--config.tools.sandbox=subprocess"
GKE = "--slice=v6e-8 --image=x --"
SFT = "experiments.sft --config=configs/sft_afm.py --config.init=gs://b/m"


@pytest.mark.parametrize(
  ("words", "message"),
  [
    # --- The mesh, and its split of the rows.
    (
      f"--slice=v6e-64 --image=x -- {RL} {SAFE} --config.mesh.fsdp=4",
      "--slice=v6e-64: mesh data=1 x fsdp=4 x context=1 x tensor=1 needs 4 devices; "
      "there are 64: mesh.fsdp=64 would fit, and -1 always takes it",
    ),
    (
      f"--slice=v6e-16 --image=x -- {RL} {SAFE} --config.mesh.tensor=3",
      "data x context x tensor must divide 16",
    ),
    (
      f"--slice=tpu7x-16 --image=x -- {RL} {SAFE} --config.algo.batch.rows=8",
      "--config.algo.batch.rows=8: 16 devices split a batch (data x fsdp); accepted: a "
      "multiple of 16",
    ),
    (
      f"--slice=v6e-16 --image=x -- {RL} {SAFE} --config.algo.batch.rows=16 "
      "--config.rollout.tensor=8",
      "rollout.tensor (or mesh.tensor, where that is 0) can be 1, 2, 4",
    ),
    (
      f"--slice=v6e-16 --slices=2 --image=x -- {RL} {SAFE} --config.algo.batch.rows=32",
      "mesh.data=1 must be a multiple of the 2 slices",
    ),
    (
      f"--slice=v6e-16 --image=x -- {RL} {SAFE} --config.mesh.devices=4",
      "mesh.devices=4 leaves a process without any",
    ),
    (
      f"--slurm --gpus=4 -- {RL} --config.algo.batch.rows=4 --config.mesh.tensor=4",
      "can be 1",
    ),
    (
      f"--slurm --nodes=3 --gpus=4 -- {SFT} --workdir=runs/x --config.data.rows=8",
      "--nodes=3 --gpus=4: --config.data.rows=8: 12 devices",
    ),
    # --- Inputs and abilities missing on the hosts.
    (
      f"{GKE} experiments.rl --config=configs/rl_gsm8k.py --workdir=gs://b/run",
      "--config.tasks.uri=data/gsm8k/train.jsonl: not on the hosts; accepted: an "
      "address in a bucket",
    ),
    (f"{GKE} {RL} {SAFE} --config.init=/models/x", "/models/x"),
    (
      f"{GKE} {SFT} --workdir=gs://b/run "
      "--config.data.trajectories=gs://b/a.jsonl,b.jsonl=2",
      "--config.data.trajectories=b.jsonl: not on the hosts",
    ),
    (
      f"{GKE} {RL} {SAFE} --config.tools.corpus=c.jsonl",
      "--config.tools.corpus=c.jsonl",
    ),
    (f"{GKE} {RL} {SAFE} --workdir=runs/x", "lost with it"),
    (f"--slice=v6e-16 --image=x -- {RL} {SAFE} --workdir=s3://b/x", "need gs://"),
    (f"{GKE} {RL} {SAFE} --workdir=", "--workdir must be given"),
    (
      f"--vm --zone=z --slice=v6e-8 -- {SFT} --workdir=/mnt/x --config.init=runs/sft/m",
      "--config.init=runs/sft/m",
    ),
    (f"--vm --zone=z --slice=v6e-8 -- {RL} --workdir=x", "would have its own"),
    (f"{GKE} {RL}", "--config.tools.sandbox=jail: a pod cannot"),
    (
      f"{GKE} {RL} {SAFE} --config.tasks.kind=code",
      "--config.reward.code.sandbox=jail",
    ),
    (
      f"{GKE} {RL} {SAFE} --config.tools.retriever=http://localhost:80/retrieve",
      "in a pod this is the pod itself",
    ),
    # --- The config and the flags.
    (f"{GKE} {RL} {SAFE} --config.mesh.fdsp=4", "fdsp"),
    (f"{GKE} {RL} --config=configs/none.py", "configs/none.py"),
    (f"{GKE} experiments.rl --workdir=gs://b/x", "--config must"),
    (f"{GKE} experiments.rll", "no such program"),
    ("--shards=2 --image=x -- experiments.rl", "experiments.rl has none"),
    ("--slice=v6e-8 --image=x --env=9=1 -- experiments.rl", "give NAME=VALUE"),
    ("--slice=v6e-8 --image=x --secret=A=b -- experiments.rl", "SECRET:KEY"),
    ("--slice=v6e-8 --image=x --memory=lots -- experiments.rl", "as 64Gi"),
    ("--slice=v6e-8 --image=x --queue=A_b -- experiments.rl", "--queue=A_b"),
    ("--slice=v6e-8 --image=x --account=a -- experiments.rl", "is for --slurm"),
    ("--slurm --queue=q -- experiments.rl", "--queue is for Kubernetes"),
    ("--slurm --time=soon -- experiments.rl", "--time=soon"),
    ("--slurm --zone=z -- experiments.rl", "--zone is for --vm"),
    # --- The program's own flags.
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
def test_a_command_that_could_not_start_is_refused_in_one_line(words, message):
  assert message in forked.refused(run(*words.split()))


def test_a_command_the_pods_can_start_is_accepted():
  words = "--image=x --disk=claim:/mnt --in_image=/models --secret=/keys/s=s:k"
  words += f" --slice=v6e-8 -- {RL} {SAFE} --workdir=/mnt/run --config.init=/models/m"
  words += " --config.tasks.uri=/mnt/t.jsonl --config.tools.web.key_file=/keys/s"
  words += " --config.tools.web.endpoint=https://search.example/x"
  words += " --config.algo.batch.rows=8"
  done = run(*words.split())
  assert done.returncode == 0, done.stderr


def test_names_and_topologies_of_a_slice_are_one():
  for name, generation in GENERATIONS.items():
    for topology in (*generation.single_host, *generation.topologies):
      found = Slice(name, topology)
      assert read_slice(found.name) == read_slice(f"{name}:{topology}") == found
      assert found.hosts * found.chips_per_host == found.chips
  assert read_slice("v5p-128").topology == "4x4x4"
  assert read_slice("v6e-64").hosts == 16


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="libtpu has the TPU's compiler"
)
@pytest.mark.parametrize(
  ("flags", "status"),
  [(manifests.LIBTPU_INIT_ARGS, 0), ("--xla_tpu_no_such_flag=true", 1)],
)
def test_the_compiler_for_tpus_has_the_flags(flags: str, status: int):
  """The compiler ends a process with an unknown flag."""
  code = (
    "from jax.experimental import topologies\n"
    "topologies.get_topology_desc('v6e:4x4', platform='tpu')"
  )
  env = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  env = {**os.environ, **env, "LIBTPU_INIT_ARGS": flags}
  done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
  assert done.returncode == status
