"""What the pages say exists: links, anchors, files, programs, flags, config fields."""

from __future__ import annotations

import ast
import functools
import importlib.util
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
OURS = ("coa_jax", "configs", "experiments", "tests", "tools_sandbox", "docs")
# Of a journal only links and programs: what it tells of had the names of its day.
JOURNALS = (ROOT / "experiments" / "LOG.md", ROOT / "CHANGELOG.md")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|\bsrc=\"([^\"]+)\"")
# Fences whose content no test reads.
_OTHER = {"text", "json", "diff"}


def pages() -> list[pathlib.Path]:
  """All Markdown files but those of environments, caches and runs."""
  found = list(ROOT.glob("*.md"))
  for room in OURS:
    found += (ROOT / room).rglob("*.md")
  return sorted(found)


EACH = pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))


def anchors(text: str) -> set[str]:
  """What GitHub calls the headings of a page."""
  out: set[str] = set()
  for heading in re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE):
    name = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    name = re.sub(r"[^\w\- ]", "", name).replace(" ", "-")
    again = name
    number = 0
    while again in out:
      number += 1
      again = f"{name}-{number}"
    out.add(again)
  return out


def broken_links(text: str, page: pathlib.Path) -> list[str]:
  """Relative links of a page that lead nowhere."""
  out = []
  for found in _LINK.findall(_FENCE.sub("", text)):
    link = found[0] or found[1]
    if "://" in link or link.startswith("mailto:"):
      continue
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    there = target.exists()
    if there and anchor:
      there = anchor in anchors(target.read_text())
    if not there:
      out.append(link)
  return out


def shell_blocks(text: str) -> Iterator[str]:
  """Fenced commands; of a `console` block the lines after a prompt, without output."""
  for language, body in _FENCE.findall(text):
    if language in ("", "bash", "sh"):
      yield body
    elif language == "console":
      for command in re.findall(r"^\$ ((?:.*\\\n)*.*(?:\n +.*)*)", body, re.MULTILINE):
        yield command + "\n"
    elif language != "python":
      assert language in _OTHER, f"no test knows what a block of {language!r} is"


def commands(text: str) -> Iterator[tuple[str, str]]:
  """(module, arguments) of every `python -m MODULE ...`, in blocks and in sentences."""
  joined = "\n".join(re.sub(r"\\\n\s*", " ", body) for _, body in _FENCE.findall(text))
  spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", _FENCE.sub("", text))
  lines = joined.splitlines() + [" ".join(span.split()) for span in spans]
  for line in lines:
    for part in re.split(r"&&|[|;]\s|\s&\s", line):
      found = re.search(r"\bpython3? -m ([\w.]+)(.*)", part)
      if found:
        yield found[1], found[2].split(" #")[0]


@functools.cache
def source_of(module: str) -> pathlib.Path | None:
  """The file of a module of ours."""
  path = ROOT.joinpath(*module.split("."))
  for candidate in (path.with_suffix(".py"), path / "__init__.py"):
    if candidate.exists():
      return candidate
  return None


def exists(module: str) -> bool:
  """Whether `python -m MODULE` finds something to run."""
  if module.partition(".")[0] in OURS:
    return source_of(module) is not None
  return importlib.util.find_spec(module) is not None


@functools.cache
def flags_of(module: str) -> frozenset[str]:
  """Patterns of the flags that a program of ours and what it imports of ours define.

  They are read from the source: a call of DEFINE_... or add_argument names its flag,
  and so does one of a function that hands its own first argument on to such a call.
  """
  seen: set[str] = set()
  waiting = [module]
  out = {"help", "helpfull", "helpshort"}
  while waiting:
    name = waiting.pop()
    path = source_of(name)
    if name in seen or path is None:
      continue
    seen.add(name)
    tree = ast.parse(path.read_text())
    out |= _defined(tree)
    for node in ast.walk(tree):
      if isinstance(node, ast.Import):
        waiting += [a.name for a in node.names]
      elif isinstance(node, ast.ImportFrom) and node.module:
        waiting += [node.module] + [f"{node.module}.{a.name}" for a in node.names]
    waiting = [w for w in waiting if w.partition(".")[0] in OURS]
  return frozenset(out)


def _defined(tree: ast.Module) -> set[str]:
  """Names that calls in a file give to flags; of an f-string its pattern."""
  makers = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef) and node.args.args:
      handed = [c.args[0] for c in ast.walk(node) if _defines(c, set())]
      first = node.args.args[0].arg
      if any(isinstance(arg, ast.Name) and arg.id == first for arg in handed):
        makers.add(node.name)
  out = set()
  for call in ast.walk(tree):
    if not _defines(call, makers):
      continue
    name = call.args[0]
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
      out.add(re.escape(name.value.lstrip("-")))
    elif isinstance(name, ast.JoinedStr):
      parts = [
        re.escape(str(v.value)) if isinstance(v, ast.Constant) else r"\w+"
        for v in name.values
      ]
      out.add("".join(parts))
  return out


def _defines(node: ast.AST, makers: set[str]) -> bool:
  """Whether a node is a call that defines a flag by its first argument."""
  if not isinstance(node, ast.Call) or not node.args:
    return False
  name = ast.unparse(node.func).rpartition(".")[2]
  return name.startswith("DEFINE_") or name in {"add_argument", "add", *makers}


@functools.cache
def sections() -> dict[str, frozenset[str]]:
  """Config section -> the fields of the dataclasses whose docstring names it."""
  classes: dict[str, ast.ClassDef] = {}
  for room in ("coa_jax", "tools_sandbox", "experiments"):
    for path in (ROOT / room).rglob("*.py"):
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
          classes[node.name] = node
  out: dict[str, frozenset[str]] = {}
  for node in classes.values():
    found = re.match(r"Config section `([\w.]+)`", ast.get_docstring(node) or "")
    if found:
      out[found[1]] = out.get(found[1], frozenset()) | _fields(node, classes)
  return out


def _fields(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> frozenset[str]:
  """Fields of a dataclass and of those of ours that it derives from."""
  own = {
    item.target.id
    for item in node.body
    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
  }
  for base in node.bases:
    if ast.unparse(base) in classes:
      own |= _fields(classes[ast.unparse(base)], classes)
  return frozenset(own)


def unknown_flags(text: str) -> list[str]:
  """Flags of our programs, and fields of configs among them, that there are not."""
  out = []
  for module, arguments in commands(text):
    if module.partition(".")[0] not in OURS or not exists(module):
      continue
    for flag in re.findall(r"(?<=\s)--([\w.]+)", arguments):
      name, _, field = flag.partition(".")
      known = any(re.fullmatch(k, name) for k in flags_of(module))
      if name == "config" and field:
        known = known_field(field)
      if not known:
        out.append(f"{module} --{flag}")
  return out


def known_field(path: str) -> bool:
  """Whether SECTION or SECTION.FIELD of a config is known, at any depth."""
  names = path.split(".")
  # `model.variant` begins from a published architecture (sft.read_model), and
  # --config.help explains the others.
  if path in ("init", "help", "model.variant"):
    return True
  for depth in range(len(names), 0, -1):
    fields = sections().get(".".join(names[:depth]))
    if fields is not None:
      return depth == len(names) or names[depth] in fields
  return False


def fields_told(text: str) -> list[str]:
  """`section.field` and `config.section.field` where a page names a section's field."""
  out = re.findall(r"`config\.([a-z_]+(?:\.[a-z_]+)*)", text)
  out += re.findall(r"^config\.([a-z_]+(?:\.[a-z_]+)*)", text, re.MULTILINE)
  out += re.findall(r"--config\.([a-z_]+(?:\.[a-z_]+)*)", text)
  for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text):
    if name.partition(".")[0] in sections():
      out.append(name)
  return [name for name in out if name.rpartition(".")[2] not in _ENDINGS]


# `config.json` and `violations.jsonl` are files.
_ENDINGS = {"json", "jsonl", "py"}


def missing_paths(text: str) -> list[str]:
  """Files of the repository that a page names and that are not there."""
  rooms = "|".join(OURS)
  named = re.findall(rf"(?<![\w./-])((?:{rooms})/[\w./*-]*[\w*]/?)", text)
  new = re.findall(r"^In `([^`]+)`:\n\n```python$", text, re.MULTILINE)  # an example's
  return [n for n in named if n not in new and not list(ROOT.glob(n.rstrip("/")))]


@EACH
def test_links_lead_somewhere(page: pathlib.Path):
  assert broken_links(page.read_text(), page) == []


@EACH
def test_shell_blocks_parse(page: pathlib.Path):
  for block in shell_blocks(page.read_text()):
    done = subprocess.run(
      ["bash", "-n"], input=block, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stderr}\n{block}"


def parses(source: str) -> bool:
  """Whether a text is Python."""
  try:
    ast.parse(source)
  except SyntaxError:
    return False
  return True


@EACH
def test_python_blocks_parse(page: pathlib.Path):
  for language, body in _FENCE.findall(page.read_text()):
    if language == "python":
      # What ends with `with` has no body, and a part of a table is no module.
      forms = (body, f"{body}  ...\n", f"{{{body}}}")
      assert any(map(parses, forms)), body


@EACH
def test_programs_exist(page: pathlib.Path):
  gone = [module for module, _ in commands(page.read_text()) if not exists(module)]
  assert gone == []


NO_JOURNAL = pytest.mark.parametrize(
  "page",
  [p for p in pages() if p not in JOURNALS],
  ids=lambda p: str(p.relative_to(ROOT)),
)


@NO_JOURNAL
def test_flags_are_known(page: pathlib.Path):
  assert unknown_flags(page.read_text()) == []


@NO_JOURNAL
def test_config_fields_are_known(page: pathlib.Path):
  unknown = [f for f in fields_told(page.read_text()) if not known_field(f)]
  assert unknown == []


@NO_JOURNAL
def test_files_exist(page: pathlib.Path):
  assert missing_paths(page.read_text()) == []


def test_every_page_of_docs_is_in_the_index_of_the_readme():
  readme = (ROOT / "README.md").read_text()
  listed = set(re.findall(r"\(docs/([\w-]+\.md)\)", readme))
  assert {p.name for p in (ROOT / "docs").glob("*.md")} == listed


def test_what_is_wrong_is_found(tmp_path: pathlib.Path):
  """Every check above, on a page where all is wrong."""
  page = tmp_path / "page.md"
  text = (
    "# A heading\n[a](nowhere.md) [b](#a-heading) [c](#no-heading) <img src='x' "
    'src="gone.png">\n`coa_jax/gone.py` and `rollout.scheduler`, `rollout.slots`\n'
    "```\npython -m experiments.gone\npython -m experiments.sft --config=x "
    "--worksdir=y --config.optim.lr=1 \\\n  --config.optim.lrr=1\nif then\n```\n"
  )
  page.write_text(text)
  assert broken_links(text, page) == ["nowhere.md", "#no-heading", "gone.png"]
  assert missing_paths(text) == ["coa_jax/gone.py"]
  assert [f for f in fields_told(text) if not known_field(f)] == [
    "optim.lrr",
    "rollout.scheduler",
  ]
  assert unknown_flags(text) == [
    "experiments.sft --worksdir",
    "experiments.sft --config.optim.lrr",
  ]
  assert [m for m, _ in commands(text) if not exists(m)] == ["experiments.gone"]
  with pytest.raises(AssertionError, match="syntax error"):
    test_shell_blocks_parse(page)
