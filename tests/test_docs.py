"""What the pages say exists: links, anchors, files, programs, flags, config fields."""

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
# Of a journal only links: what it tells of had the names of its day.
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
  """(module, arguments) of every `python -m MODULE ...` and `coa COMMAND ...`.

  In blocks and in sentences; a command is the launcher experiments.NAME.
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


# Prints the flags of programs by their --helpfull (or --help, of argparse), one line
# of JSON each. Forks of one process share the imports that take long.
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
  """Program of ours that a page, a config or a program names -> its flags."""
  texts = [page.read_text() for page in pages() if page not in JOURNALS]
  asked: dict[str, str] = {}
  for text in [*texts, *docstrings()]:
    for module, arguments in commands(text):
      # One without flags is not asked: it may have none, and would run.
      if "--" in arguments and module.partition(".")[0] in OURS and exists(module):
        asked.setdefault(module, module)
        # Some have the flag where it is given alone.
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
  """Docstrings of configs and programs, each as a block of commands."""
  out = []
  for folder in ("configs", "experiments", "coa_jax/cli"):
    for path in sorted((ROOT / folder).rglob("*.py")):
      text = ast.get_docstring(ast.parse(path.read_text())) or ""
      out.append(f"```\n{text}\n```\n")
  return out


@functools.cache
def fields() -> frozenset[str]:
  """The paths of every config's fields; NAME in one is a name of the user's."""
  listed = [field for name in CONFIGS for field in list_fields(read_class(name))]
  return frozenset(field.path for field in listed if not field.section)


def unknown_flags(text: str) -> list[str]:
  """Flags of our programs, and fields of configs among them, that there are not."""
  out = []
  for module, arguments in commands(text):
    if module.partition(".")[0] not in OURS or not exists(module):
      continue
    # After -- a sweep has another program's words, which have a command of their own.
    for flag in re.findall(r"(?<=[\s\[])--([\w.]+)", arguments.split(" -- ")[0]):
      name, _, field = flag.partition(".")
      flags = flags_of_programs().get(module, frozenset())
      known = name in flags or name.removeprefix("no") in flags
      if name == "config" and field:
        known = known_field(field) or "FIELD" in field  # of a program's usage
      if not known:
        out.append(f"{module} --{flag}")
  return out


def known_field(path: str) -> bool:
  """Whether a config has this field, or section; an entry of a field counts, too."""
  # `model.variant` begins from a published architecture (plan.sft.read_model), and
  # --config.help explains the others.
  if path in ("help", "model.variant"):
    return True
  names = path.split(".")
  for field in fields():
    pairs = zip(field.split("."), names, strict=False)  # the shorter one's
    if all(known in (name, "NAME") for known, name in pairs):
      return True
  return False


def fields_told(text: str) -> list[str]:
  """`section.field` and `config.section.field` where a page names a section's field."""
  out = re.findall(r"`config\.([a-z_]+(?:\.[a-z_]+)*)", text)
  out += re.findall(r"^config\.([a-z_]+(?:\.[a-z_]+)*)", text, re.MULTILINE)
  out += re.findall(r"--config\.([a-z_]+(?:\.[a-z_]+)*)", text)
  sections = {field.partition(".")[0] for field in fields()}
  for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text):
    if name.partition(".")[0] in sections:
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


NO_JOURNAL = pytest.mark.parametrize(
  "page",
  [p for p in pages() if p not in JOURNALS],
  ids=lambda p: str(p.relative_to(ROOT)),
)


@NO_JOURNAL
def test_programs_exist(page: pathlib.Path):
  gone = [module for module, _ in commands(page.read_text()) if not exists(module)]
  assert gone == []


@NO_JOURNAL
def test_flags_are_known(page: pathlib.Path):
  assert unknown_flags(page.read_text()) == []


def test_flags_in_docstrings_are_known():
  assert [flag for text in docstrings() for flag in unknown_flags(text)] == []


def test_flags_are_those_of_the_program_itself():
  """Not those of any file: `experiments.browse` once had no --workdir."""
  flags = flags_of_programs()
  assert "workdir" in flags["experiments.browse"]
  assert "question" in flags["experiments.chat"]
  assert "question" not in flags["experiments.browse"]


def test_flags_in_the_table_of_programs_are_known():
  """A row of experiments/README.md names a program, then its flags."""
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
