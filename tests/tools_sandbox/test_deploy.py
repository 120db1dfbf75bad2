"""The container file and the Kubernetes manifest agree with the server."""

from __future__ import annotations

import ast
import importlib.util
import json
import pathlib
import re
import sys

import pytest
import yaml

from tools_sandbox.service import server

ROOT = pathlib.Path(__file__).parent.parent.parent
DEPLOY = ROOT / "tools_sandbox" / "deploy"
# PyPI name -> module, if they differ.
MODULES = {"prometheus-client": "prometheus_client"}


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict]:
  """Kind -> document of the Kubernetes manifest."""
  text = (DEPLOY / "kubernetes.yaml").read_text()
  return {d["kind"]: d for d in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def image() -> dict[str, str]:
  """Instruction -> its arguments in the container file; repeated ones are joined."""
  text = re.sub(r"\\\n", " ", (DEPLOY / "Containerfile").read_text())
  lines = [x.split(None, 1) for x in text.splitlines() if x and x[0] != "#"]
  return {k: "\n".join(v for kk, v in lines if kk == k) for k, _ in lines}


def command(image, manifest) -> list[str]:
  """A pod's command, from the module's name on."""
  start, default = (json.loads(image[k]) for k in ("ENTRYPOINT", "CMD"))
  (container,) = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
  at = start.index("python")
  assert start[:at] == ["tini", "--"] and "tini" in image["RUN"]
  assert start[at + 1] == "-m" and default
  return start[at + 2 :] + container["args"]


def test_the_command_exists_and_the_server_takes_it(image, manifest):
  module, *arguments = command(image, manifest)
  spec = importlib.util.find_spec(module)
  assert spec.origin == server.__file__
  args = server.make_parser().parse_args(arguments)
  assert args.token_file and args.host == "0.0.0.0" and args.backend == "jail"
  pod = manifest["Deployment"]["spec"]["template"]["spec"]
  grace, (container,) = pod["terminationGracePeriodSeconds"], pod["containers"]
  pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
  assert grace >= args.max_timeout_s + server.DRAIN_S + pause


def test_ports_and_labels_agree(image, manifest):
  pod = manifest["Deployment"]["spec"]["template"]
  (container,) = pod["spec"]["containers"]
  (port,) = container["ports"]
  (service,) = manifest["Service"]["spec"]["ports"]
  (rule,) = manifest["NetworkPolicy"]["spec"]["ingress"]
  ports = [port["containerPort"], service["port"], rule["ports"][0]["port"]]
  assert {*ports, int(image["EXPOSE"])} == {server.PORT}
  assert service["targetPort"] == port["name"]
  for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
    assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
  labels = pod["metadata"]["labels"]
  assert labels == manifest["Service"]["spec"]["selector"]
  for kind, name in (("Deployment", "selector"), ("NetworkPolicy", "podSelector")):
    assert manifest[kind]["spec"][name]["matchLabels"] == labels


def test_the_pod_may_do_what_the_jail_needs_and_no_more(image, manifest):
  pod = manifest["Deployment"]["spec"]["template"]["spec"]
  (container,) = pod["containers"]
  context = container["securityContext"]
  assert pod["hostUsers"] is False and context["procMount"] == "Unmasked"
  assert context["runAsNonRoot"] and not context["allowPrivilegeEscalation"]
  assert context["capabilities"] == {"drop": ["ALL"]} and "privileged" not in context
  assert image["USER"] == f"{context['runAsUser']}:{context['runAsGroup']}"
  assert pod["automountServiceAccountToken"] is False
  mounts = {m["name"]: m for m in container["volumeMounts"]}
  args = server.make_parser().parse_args(container["args"])
  assert args.token_file.startswith(mounts["token"]["mountPath"] + "/")
  assert {v["name"] for v in pod["volumes"]} == set(mounts)
  assert "Egress" in manifest["NetworkPolicy"]["spec"]["policyTypes"]


def test_the_image_holds_what_the_server_imports(image):
  imported, queue = set(), ["tools_sandbox.service.server"]
  seen = set()
  while queue:
    module = queue.pop()
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    if module in seen or not path.exists():
      continue
    seen.add(module)
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{a.name}" for a in node.names] + [node.module]
      else:
        continue
      queue += [n for n in names if n.startswith("tools_sandbox")]
      imported |= {n.partition(".")[0] for n in names}
  beside = {p.stem for p in (ROOT / "tools_sandbox").rglob("*.py")} | {"tools_sandbox"}
  needed = imported - set(sys.stdlib_module_names) - beside
  assert {"uvicorn", "starlette"} <= needed
  packages = set(re.findall(r'"([\w-]+)>=', image["RUN"]))
  assert needed <= {MODULES.get(p, p) for p in packages}
  ours = re.findall(r'"([\w-]+)>=', (ROOT / "pyproject.toml").read_text())
  assert packages - {"scipy"} <= set(ours)
