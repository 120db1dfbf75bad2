"""Links, anchors, files, programs, flags and config fields in the docs exist."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from coa_jax.cli.config_help import CONFIGS, list_fields, read_class
from coa_jax.cli.main import MODULES

ROOT = pathlib.Path(__file__).parent.parent
OURS = ("coa_jax", "configs", "experiments", "tests", "tools_sandbox", "docs")
# Only links are checked in journals: their other names may be historical.
JOURNALS = (ROOT / "experiments" / "LOG.md", ROOT / "CHANGELOG.md")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|\bsrc=\"([^\"]+)\"")
# Fence languages without a test.
_OTHER = {"text", "json", "diff"}


def pages() -> list[pathlib.Path]:
  """Returns all Markdown files outside environments, caches and runs."""
  found = list(ROOT.glob("*.md"))
  for room in OURS:
    found += (ROOT / room).rglob("*.md")
  return sorted(found)


EACH = pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))


def anchors(text: str) -> set[str]:
  """Returns GitHub's anchors for a page's headings."""
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
  """Returns a page's broken relative links."""
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
  """Yields fenced commands; from a `console` block only lines after a prompt."""
  for language, body in _FENCE.findall(text):
    if language in ("", "bash", "sh"):
      yield body
    elif language == "console":
      for command in re.findall(r"^\$ ((?:.*\\\n)*.*(?:\n +.*)*)", body, re.MULTILINE):
        yield command + "\n"
    elif language != "python":
      assert language in _OTHER, f"no test knows what a block of {language!r} is"


def commands(text: str) -> Iterator[tuple[str, str]]:
  """Yields (module, arguments) of each `python -m MODULE ...` and `coa COMMAND ...`.

  Reads blocks and inline code. `coa COMMAND` counts as the launcher experiments.NAME.
  """
  joined = "\n".join(re.sub(r"\\\n\s*", " ", body) for _, body in _FENCE.findall(text))
  spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", _FENCE.sub("", text))
  lines = joined.splitlines() + [" ".join(span.split()) for span in spans]
  for line in lines:
    for part in re.split(r"&&|[|;]\s|\s&\s", line):
      found = re.search(r"\bpython3? -m ([\w.]+)(.*)", part)
      if found:
        yield found[1], found[2].split(" #")[0]
      command = re.search(r"^\s*(?:\$ )?coa ([a-z]\w*)(.*)", part)
      if command:
        name = MODULES.get(command[1], command[1])
        yield f"experiments.{name}", command[2].split(" #")[0]


@functools.cache
def source_of(module: str) -> pathlib.Path | None:
  """Returns the file of one of our modules, or None."""
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


# Prints each program's flags as one line of JSON, from --helpfull (argparse: --help).
# Forks of one process share the slow imports.
_ASK = """
import json, os, re, runpy, sys, tempfile
import coa_jax.rl, coa_jax.evaluate, coa_jax.distill, coa_jax.cli.launch

def ask(module, *words):
  with tempfile.TemporaryFile() as out:
    child = os.fork()
    if not child:
      os.dup2(out.fileno(), 1)
      os.dup2(out.fileno(), 2)
      sys.argv = [module, *words]
      try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
      except SystemExit:
        pass
      finally:
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    out.seek(0)
    return out.read().decode()

for command in sys.argv[1:]:
  module, *words = command.split()
  text = ask(module, *words, "--helpfull")
  if "usage:" in text:
    text = ask(module, "--help")
  flags = re.findall(r"^ +(?:-\\w, ?)?--(?:\\[no\\])?([\\w-]+)", text, re.MULTILINE)
  print(json.dumps([module, flags]))
"""


@functools.cache
def flags_of_programs() -> dict[str, frozenset[str]]:
  """Maps each of our programs named in pages, configs or programs to its flags."""
  texts = [page.read_text() for page in pages() if page not in JOURNALS]
  asked: dict[str, str] = {}
  for text in [*texts, *docstrings()]:
    for module, arguments in commands(text):
      # Only programs named with flags: others may ignore --helpfull and run.
      if "--" in arguments and module.partition(".")[0] in OURS and exists(module):
        asked.setdefault(module, module)
        # Some programs define --config only if it is given.
        if "--config" in arguments:
          asked[module] = f"{module} --config="
  done = subprocess.run(
    [sys.executable, "-c", _ASK, *asked.values()],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=True,
  )
  found = dict(json.loads(line) for line in done.stdout.splitlines() if line[:1] == "[")
  assert [module for module in asked if not found[module]] == []
  return {module: frozenset(flags) | {"help"} for module, flags in found.items()}


def docstrings() -> list[str]:
  """Returns the docstrings of configs and programs, each as a fenced block."""
  out = []
  for folder in ("configs", "experiments", "coa_jax/cli"):
    for path in sorted((ROOT / folder).rglob("*.py")):
      text = ast.get_docstring(ast.parse(path.read_text())) or ""
      out.append(f"```\n{text}\n```\n")
  return out


@functools.cache
def fields() -> frozenset[str]:
  """Returns the paths of all config fields; NAME stands for a user's name."""
  listed = [field for name in CONFIGS for field in list_fields(read_class(name))]
  return frozenset(field.path for field in listed if not field.section)


def unknown_flags(text: str) -> list[str]:
  """Returns unknown flags, and unknown --config fields, of our programs."""
  out = []
  for module, arguments in commands(text):
    if module.partition(".")[0] not in OURS or not exists(module):
      continue
    # After -- a sweep's arguments belong to another program.
    for flag in re.findall(r"(?<=[\s\[])--([\w.]+)", arguments.split(" -- ")[0]):
      name, _, field = flag.partition(".")
      flags = flags_of_programs().get(module, frozenset())
      known = name in flags or name.removeprefix("no") in flags
      if name == "config" and field:
        known = known_field(field) or "FIELD" in field  # a program's usage text
      if not known:
        out.append(f"{module} --{flag}")
  return out


def known_field(path: str) -> bool:
  """Whether a config has this field or section; an entry inside a field counts."""
  # `model.variant` selects a published architecture (plan.sft.read_model);
  # --config.help explains the fields.
  if path in ("help", "model.variant"):
    return True
  names = path.split(".")
  for field in fields():
    pairs = zip(field.split("."), names, strict=False)  # up to the shorter path
    if all(known in (name, "NAME") for known, name in pairs):
      return True
  return False


def fields_told(text: str) -> list[str]:
  """Returns config fields on a page: `section.field` and `config.section.field`."""
  out = re.findall(r"`config\.([a-z_]+(?:\.[a-z_]+)*)", text)
  out += re.findall(r"^config\.([a-z_]+(?:\.[a-z_]+)*)", text, re.MULTILINE)
  out += re.findall(r"--config\.([a-z_]+(?:\.[a-z_]+)*)", text)
  sections = {field.partition(".")[0] for field in fields()}
  for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text):
    if name.partition(".")[0] in sections:
      out.append(name)
  return [name for name in out if name.rpartition(".")[2] not in _ENDINGS]


# File extensions: `config.json` and `violations.jsonl` are not fields.
_ENDINGS = {"json", "jsonl", "py"}


def missing_paths(text: str) -> list[str]:
  """Returns the missing repository files among the paths on a page."""
  rooms = "|".join(OURS)
  named = re.findall(rf"(?<![\w./-])((?:{rooms})/[\w./*-]*[\w*]/?)", text)
  new = re.findall(r"^In `([^`]+)`:\n\n```python$", text, re.MULTILINE)  # examples
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
      # A block that ends with a `with` line lacks a body; a table's part is not a
      # module.
      forms = (body, f"{body}  ...\n", f"{{{body}}}")
      assert any(map(parses, forms)), body


NO_JOURNAL = pytest.mark.parametrize(
  "page",
  [p for p in pages() if p not in JOURNALS],
  ids=lambda p: str(p.relative_to(ROOT)),
)


@NO_JOURNAL
def test_programs_exist(page: pathlib.Path):
  gone = [module for module, _ in commands(page.read_text()) if not exists(module)]
  assert gone == []


@pytest.mark.slow
@NO_JOURNAL
def test_flags_are_known(page: pathlib.Path):
  assert unknown_flags(page.read_text()) == []


def test_flags_in_docstrings_are_known():
  assert [flag for text in docstrings() for flag in unknown_flags(text)] == []


def test_flags_are_those_of_the_program_itself():
  """Other programs' flags do not count: `experiments.browse` once had no --workdir."""
  flags = flags_of_programs()
  assert "workdir" in flags["experiments.browse"]
  assert "question" in flags["experiments.chat"]
  assert "question" not in flags["experiments.browse"]


def test_flags_in_the_table_of_programs_are_known():
  """Each table row in experiments/README.md names programs, then their flags."""
  text = (ROOT / "experiments" / "README.md").read_text()
  unknown = []
  for names, about in re.findall(
    r"^\| ((?:`[\w.]+`(?:, )?)+) \| (.*) \|$", text, re.MULTILINE
  ):
    flags = re.findall(r"`(--\w+)[^`]*`", about)
    for name in re.findall(r"`([\w.]+)`", names):
      spelt = [f"`python -m experiments.{name} {flag}`" for flag in flags]
      unknown += unknown_flags("\n".join(spelt))
  assert unknown == []


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
  """Each check above finds its error on a page with all errors."""
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
