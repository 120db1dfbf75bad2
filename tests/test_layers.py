"""Architecture rules, checked on syntax trees: imports, lengths, docstrings."""

from __future__ import annotations

import ast
import collections
import functools
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
WINGS = ("data", "runtime")
JOURNEYS = ("distill", "sft", "rl", "evaluate", "serve")
# Room (subpackage or module) -> other rooms it may import. Rooms inside WINGS have
# entries under their own names.
BELOW = {
  "json_io": set(),
  "capacity": set(),
  "disk": set(),
  "fields": set(),
  "lock": {"names"},
  "names": {"json_io"},
  "shard": set(),
  "interruption": set(),
  "manifest": {"names"},
  "heartbeat": set(),
  "compiling": {"heartbeat"},
  "processes": set(),
  "bucket": {"lock", "manifest"},
  "config": set(),
  "record": {"bucket", "config", "lock"},
  "protocol": set(),
  "model": {"bucket", "protocol"},
  "tools": {"protocol"},
  "tasks": {"protocol"},
  "suites": set(),
  "rewards": {"protocol", "tasks"},
  "rollout": {"model", "rewards", "tasks", "tools", "protocol"},
  "learner": {"bucket", "manifest", "model", "tasks", "protocol"},
  "teacher": {"model", "rewards", "tasks", "protocol"},
  "importers": {"model", "rewards", "tasks", "teacher", "protocol"},
  "report": {"model", "rewards", "tasks", "protocol"},
}
LOWEST = {
  "json_io",
  "capacity",
  "disk",
  "fields",
  "shard",
  "interruption",
  "heartbeat",
  "compiling",
  "names",
  "processes",
}
for room in set(BELOW) - LOWEST:
  BELOW[room] |= LOWEST
BELOW["plan"] = set(BELOW)
for journey in JOURNEYS:
  BELOW[journey] = set(BELOW) - set(JOURNEYS)
BELOW["cli"] = set(BELOW)  # the only room with flags; no other room imports it
# Doors: package -> the only files that may import it.
DOORS = {
  "tools_sandbox": {
    "coa_jax/tools/code_session.py",
    "coa_jax/tools/environments.py",
    "coa_jax/tools/functions.py",
    "coa_jax/tools/toolbox.py",
    "coa_jax/tools/tools.py",
    "coa_jax/rewards/code/grader.py",
    "coa_jax/rewards/best_of.py",
    "coa_jax/rollout/agents/endpoint.py",
    "coa_jax/rewards/judge.py",
    "coa_jax/rollout/agents/requests.py",
    "coa_jax/rollout/agents/server.py",
    "coa_jax/rollout/vllm/client.py",
    "coa_jax/data/teacher/llm.py",
    "coa_jax/cli/completions.py",
    "coa_jax/cli/serve.py",
    "coa_jax/cli/serve_agents.py",
    "coa_jax/cli/synthesize.py",
  },
  # vLLM runs in its own environment and serves HTTP. Our plugin in that environment
  # imports none of our other modules.
  "vllm": {"coa_jax/rollout/vllm/plugin.py"},
  "torch": {"coa_jax/rollout/vllm/plugin.py"},
  "absl": {f"coa_jax/cli/{path.name}" for path in (ROOT / "coa_jax/cli").glob("*.py")},
  "experiments": set(),
  "configs": set(),
}
# Modules of tools_sandbox that the library may import, listed in its `__init__`. Of
# the jail the library may import only run records.
PUBLIC = {
  "client",
  "jail.wire",
  "faults",
  "service.remote",
  "search.index",
  "search.retrieve",
  "web.web_search",
  "web.crawl",
  "web.vision",
  "mcp_client",
  "chat",
  "http_client",
  "http_server",
}
# Allowed uses. A child hides its environment and arguments from the program that it
# runs; the other files are programs.
PROCESS = {
  "coa_jax/rollout/vllm/child.py": {"os.environ", "sys.argv"},
  "tools_sandbox/jail/child.py": {"os.environ", "sys.argv"},
  "tools_sandbox/jail/inside.py": {"sys.argv"},
  "tools_sandbox/jail/keeper.py": {"os.environ", "sys.argv"},
  "tools_sandbox/mcp_relay.py": {"sys.argv"},
  "tools_sandbox/jail/zygote.py": {"sys.argv"},
}


def files(*folders: str) -> list[pathlib.Path]:
  return sorted(p for f in folders for p in (ROOT / f).rglob("*.py"))


def name_of(path: pathlib.Path) -> str:
  return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: pathlib.Path) -> set[str]:
  """Returns the full names of a file's imports, lazy ones included."""
  out = set()
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Import):
      out |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{name_of(path)}: relative import"
      for alias in node.names:
        whole = f"{node.module}.{alias.name}"
        out.add(whole if module_file(whole) else node.module)
  return out


def module_file(module: str) -> pathlib.Path | None:
  """Returns the file of one of the project's modules, or None."""
  base = ROOT.joinpath(*module.split("."))
  for path in (base.with_suffix(".py"), base / "__init__.py"):
    if path.exists():
      return path
  return None


LIBRARY = files("coa_jax")
SANDBOX = files("tools_sandbox")
PROGRAMS = files("experiments", "configs")
TESTS = files("tests")


def each(paths: list[pathlib.Path]):
  """Turns a check of one file into a test of all, which lists every failing file."""

  def one_test(check):
    def test():
      faults = []
      for path in paths:
        try:
          check(path)
        except AssertionError as e:
          faults.append(f"{name_of(path)}: {e}")
      assert not faults, "\n".join(faults)

    test.__name__ = check.__name__
    return test

  return one_test


def module_room(module: str) -> str:
  """Returns a library module's room: `coa_jax.data.tasks.world` is in tasks."""
  parts = module.split(".")[1:]
  return parts[1] if parts[0] in WINGS and parts[1:] else parts[0]


def room_of(path: pathlib.Path) -> str:
  return module_room(name_of(path).removesuffix(".py").replace("/", "."))


@each(LIBRARY)
def test_imports_go_down(path: pathlib.Path):
  room = room_of(path)
  if room == "__init__":
    assert not imports(path)
    return
  used = {module_room(m) for m in imports(path) if m.startswith("coa_jax.")}
  assert used <= BELOW[room] | {room}


@each(LIBRARY)
def test_some_packages_have_one_door(path: pathlib.Path):
  for package, doors in DOORS.items():
    used = {m for m in imports(path) if m.split(".")[0] == package}
    assert not used or name_of(path) in doors, used
    if package == "tools_sandbox":
      assert used <= {f"tools_sandbox.{module}" for module in PUBLIC}


def test_the_public_modules_are_told():
  text = ast.get_docstring(tree(ROOT / "tools_sandbox" / "__init__.py"))
  assert set(re.findall(r"[\w.]+\w", text)) >= PUBLIC
  assert all(module_file(f"tools_sandbox.{module}") for module in PUBLIC)


@pytest.mark.slow
@pytest.mark.parametrize("journey", JOURNEYS)
def test_no_journey_imports_torch_by_way_of_others(journey: str, tmp_path):
  # Some packages import torch if it is installed: a second and 180 MB per process.
  # The fake torch has metadata for packages that only read its version.
  (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
  (tmp_path / "torch-2.13.0.dist-info").mkdir()
  told = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
  (tmp_path / "torch-2.13.0.dist-info" / "METADATA").write_text(told)
  path = os.pathsep.join([str(tmp_path), str(ROOT)])
  done = subprocess.run(
    [sys.executable, "-c", f"import coa_jax.{journey}"],
    env=os.environ | {"PYTHONPATH": path},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


@each(SANDBOX)
def test_the_sandbox_stands_alone(path: pathlib.Path):
  roots = {m.split(".")[0] for m in imports(path)}
  assert not roots & {"coa_jax", "jax", "flax", "configs", "experiments", "torch"}


def test_no_cycle_of_imports_and_no_long_chain():
  """Imports inside functions count, too."""
  graph = {
    path: {f for f in map(module_file, imports(path)) if f} - {path}
    for path in (*LIBRARY, *SANDBOX, *PROGRAMS)
  }
  longest: dict[pathlib.Path, list[pathlib.Path]] = {}

  def chain(path: pathlib.Path, above: tuple[pathlib.Path, ...] = ()) -> list:
    """Returns the longest chain of imports from a file down."""
    assert path not in above, " -> ".join(map(name_of, (*above, path)))
    if path not in longest:
      below = [chain(other, (*above, path)) for other in graph[path]]
      longest[path] = [path, *max(below, key=len, default=[])]
    return longest[path]

  for path in graph:
    chain(path)
  below = (longest[path] for path in LIBRARY if room_of(path) != "cli")
  deepest = max(below, key=len)
  assert len(deepest) <= 9, " -> ".join(map(name_of, deepest))


@each([p for p in (*LIBRARY, *SANDBOX) if not name_of(p).startswith("coa_jax/cli/")])
def test_libraries_read_no_flags_and_no_environment(path: pathlib.Path):
  reads = {
    ast.unparse(node)
    for node in ast.walk(tree(path))
    if isinstance(node, ast.Attribute)
    and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv", "sys.argv")
  }
  assert reads == PROCESS.get(name_of(path), set())
  assert "absl" not in {m.split(".")[0] for m in imports(path)}


@each([*LIBRARY, *SANDBOX, *PROGRAMS, *TESTS])
def test_a_file_can_be_held_in_the_head(path: pathlib.Path):
  assert path.stem not in ("utils", "util", "common", "helpers", "misc")
  text = path.read_text(encoding="utf-8")
  assert text.isascii()
  about = ast.get_docstring(tree(path))
  assert about, "a file says what it is for"
  # Budgets, not limits: longer code says why.
  most_lines, most_of_function = 400, 80
  lines = len(text.splitlines())
  assert lines <= most_lines or "budget:" in about, (
    f"{lines} lines, and no `budget: why`"
  )
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      lines = node.end_lineno - node.lineno + 1
      why = "budget:" in (ast.get_docstring(node) or "")
      assert lines <= most_of_function or why, (
        f"{node.name}: {lines} lines, and no `budget: why`"
      )


@functools.cache
def library_classes() -> dict[str, ast.ClassDef]:
  nodes = (node for path in LIBRARY for node in ast.walk(tree(path)))
  return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def is_override(node: ast.AST, method: str) -> bool:
  """Whether a base class in the library documents the method."""
  for base in getattr(node, "bases", ()):
    cls = library_classes().get(ast.unparse(base))
    if cls is None:
      continue
    own = (child for child in cls.body if getattr(child, "name", "") == method)
    if any(map(ast.get_docstring, own)) or is_override(cls, method):
      return True
  return False


@each([*LIBRARY, *SANDBOX])
def test_what_is_public_is_documented_and_typed(path: pathlib.Path):
  def check(node: ast.AST, inside: str) -> None:
    for child in getattr(node, "body", ()):
      if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        continue
      name = f"{inside}{child.name}"
      if child.name.startswith("_"):
        continue
      documented = ast.get_docstring(child) or is_override(node, child.name)
      assert documented, f"{name} has no docstring"
      if isinstance(child, ast.ClassDef):
        check(child, f"{name}.")
      else:
        assert child.returns is not None, f"{name} does not say what it returns"

  check(tree(path), "")


def test_test_files_have_names_of_their_own():
  names = collections.Counter(p.name for p in TESTS if p.name != "conftest.py")
  assert [name for name, n in names.items() if n > 1] == []


def test_no_test_hides_behind_an_init_file():
  assert not [p for p in TESTS if p.name == "__init__.py"]
