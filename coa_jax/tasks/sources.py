"""Reads tasks from files: this project's own schema, the released one, and data sets'.

The schema of a row is decided by the fields it has, never by the file's name, and a
row that fits none is an error that names the file, the row and what would be accepted.
Code tasks keep their tests in `meta["tests"]`, GSM8K's their worked solution in
`meta["solution"]`; nothing of either is in the question, but one assert in MBPP's.

budget: a schema is a reader and a row of `_SCHEMAS`, side by side.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
from collections.abc import Callable
from typing import Any

from coa_jax.fields import bounded, check_fields
from coa_jax.tasks.rows import Row, read_rows
from coa_jax.tasks.task import Kind, Task

# Where the question starts in a released prompt: below the last rule of its head.
_QUESTION = re.compile(r"\n\s*\n(?:Task|Question):\s*")
# The shapes of hidden tests (released schema, `reward_model.ground_truth`).
_TESTS = (
  {"stdin", "expected_output"},
  {"functional"},
  {"test_code", "entry_point"},
  {"inputs", "outputs"},
)
_GSM8K_FINAL = re.compile(r"\n#### *(\S.*?)\s*$")


@dataclasses.dataclass(frozen=True)
class TasksConfig:
  """Config section `tasks`.

  Attributes:
    uri: a file, or a source by its URI: see `rows`.
    limit: take this many tasks; 0 takes all.
    families: take only these families; () takes all.
    seed: of the order; None keeps the file's. With a limit: which tasks are taken.
  """

  uri: str
  limit: int = bounded(0, least=0)
  families: tuple[str, ...] = ()
  seed: int | None = None

  def __post_init__(self):
    check_fields(self)


def select_tasks(config: TasksConfig) -> list[Task]:
  """The tasks that a config asks for.

  Raises:
    FileNotFoundError, ValueError: as `load_tasks`; or no task is left.
  """
  tasks = load_tasks(config.uri)
  if config.families:
    known = sorted({t.family for t in tasks})
    tasks = [t for t in tasks if t.family in config.families]
    if not tasks:
      raise ValueError(
        f"{config.uri}: no task of families {', '.join(config.families)}; "
        f"there are {', '.join(known)}"
      )
  if config.seed is not None:
    random.Random(config.seed).shuffle(tasks)
  return tasks[: config.limit or None]


def load_tasks(uri: str | os.PathLike[str]) -> list[Task]:
  """Every task of a file or of a source that `rows.read_rows` knows, in order.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file's kind is unknown, it holds no task, a row fits no schema, or
      two rows have the same id; the message names the file, the row and the field.
  """
  path = os.fspath(uri)
  stem = os.path.splitext(os.path.basename(path).removesuffix(".gz"))[0]
  tasks: list[Task] = []
  seen: dict[str, str] = {}
  for number, (where, row) in enumerate(read_rows(path)):
    task = read_task(row, where, default_id=f"{stem}-{number}")
    if task.id in seen:
      raise ValueError(f"{where}: id {task.id!r} is already the id of {seen[task.id]}")
    seen[task.id] = where
    tasks.append(task)
  if not tasks:
    raise ValueError(f"{path}: holds no task")
  return tasks


def read_task(row: Row, where: str, default_id: str) -> Task:
  """One row of any accepted schema as a task.

  Args:
    row: the row.
    where: what an error message calls the row.
    default_id: the task's id where the row has none of its own.

  Raises:
    ValueError: the row fits no schema; see `load_tasks`.
  """
  for needed, reader in _SCHEMAS:
    if needed <= set(row):
      try:
        return reader(row, where, default_id)
      except (TypeError, KeyError, AttributeError) as e:
        fields = ", ".join(sorted(needed))
        raise ValueError(
          f"{where}: has the fields {fields}, but not as that schema has them: {e!r}"
        ) from e
  if "question" not in row:
    fields = ", ".join(map(repr, list(row)[:12])) or "none"
    raise ValueError(
      f"{where}: no field 'question'; the row has {fields}. Accepted: this "
      "project's tasks (question, answers, and optionally id, kind, source, family, "
      "meta), released RL rows (prompt, reward_model), and GSM8K, HotpotQA, MuSiQue, "
      "WebWalkerQA, HumanEval and MBPP rows"
    )
  return _plain_row(row, where, default_id)


def _plain_row(row: Row, where: str, default_id: str) -> Task:
  """Our own schema, GSM8K's, or the released raw one (with data_source)."""
  if set(row) == {"question", "answer"} and isinstance(row["answer"], str):
    final = _GSM8K_FINAL.search(row["answer"])
    if final is not None:
      return Task(
        id=f"gsm8k-{default_id}",
        question=row["question"],
        answers=(final[1].replace(",", ""),),
        kind=Kind.MATH,
        source="gsm8k",
        meta={"solution": row["answer"]},
      )
  row = dict(row)
  if "data_source" in row:
    row.setdefault("source", row.pop("data_source"))
    if "file_name" in row:
      row["meta"] = {**(row.get("meta") or {}), "file_name": row.pop("file_name")}
  row.setdefault("id", default_id)
  return Task.from_json(row, where)


def _hotpotqa(row: Row, where: str, default_id: str) -> Task:
  facts = row["supporting_facts"]  # pairs; of the hub and TFDS two lists
  titles = facts["title"] if isinstance(facts, dict) else [title for title, _ in facts]
  titles = list(dict.fromkeys(titles))
  plain = {
    "id": row.get("_id") or row.get("id") or default_id,
    "question": row["question"],
    "answers": row["answer"],
    "source": "hotpotqa",
    "family": row.get("type", ""),
    "meta": {"level": row.get("level", ""), "supporting_titles": titles},
  }
  return Task.from_json(plain, where)


def _musique(row: Row, where: str, default_id: str) -> Task:
  hops = row.get("question_decomposition") or []
  supporting = [p["title"] for p in row["paragraphs"] if p.get("is_supporting")]
  plain = {
    "id": row.get("id", default_id),
    "question": row["question"],
    "answers": [row["answer"], *row["answer_aliases"]],
    "source": "musique",
    "family": f"{len(hops)}_hop" if hops else "",
    "meta": {"supporting_titles": supporting},
  }
  return Task.from_json(plain, where)


def _webwalker(row: Row, where: str, default_id: str) -> Task:
  info = row["info"]
  plain = {
    "id": default_id,
    "question": row["question"],
    "answers": row["answer"],
    "source": "webwalker",
    "family": info.get("type", ""),
    "meta": {"root_url": row["root_url"], **info},
  }
  return Task.from_json(plain, where)


def _humaneval(row: Row, where: str, default_id: str) -> Task:
  """A row of HumanEval or HumanEval+: complete a function, judged by `check`.

  Tests may use what stands before the function in its prompt: imports, helpers.
  """
  prompt, entry = _texts(row, where, "prompt", "entry_point")
  (test,) = _texts(row, where, "test")
  before, definition, _ = prompt.partition(f"def {entry}(")
  if not definition:
    raise ValueError(f"{where}: field 'prompt' defines no function {entry!r}")
  tests = {"test_code": test, "entry_point": entry, "import_prefix": before}
  plain = {
    "id": str(row.get("task_id", default_id)),
    "question": "Complete this function; write it whole, with what it needs.\n\n"
    f"```py\n{prompt.strip()}\n```",
    "answers": f"a program that passes {_count(tests)} tests",
    "kind": Kind.CODE,
    "source": "humaneval",
    "meta": {"tests": tests},
  }
  return Task.from_json(plain, where)


def _mbpp(row: Row, where: str, default_id: str) -> Task:
  """A row of MBPP, its sanitized version or MBPP+: a program judged by asserts.

  The first assert is in the question, as elsewhere: nothing else tells the function's
  name. `challenge_test_list` is not used, as it is not elsewhere.
  """
  asserts = row["test_list"]
  if not isinstance(asserts, list) or not all(isinstance(a, str) for a in asserts):
    raise ValueError(f"{where}: field 'test_list' must be a list of asserts")
  (text,) = _texts(row, where, "prompt" if "prompt" in row else "text")
  plus = "test" in row
  setup = [*(row.get("test_imports") or ()), row.get("test_setup_code") or ""]
  source = row["test"] if plus else "\n".join([*setup, *asserts])
  if not asserts or not isinstance(source, str) or not source.strip():
    raise ValueError(f"{where}: there is no test in 'test_list' or 'test'")
  tests = {"functional": source}
  plain = {
    "id": f"Mbpp/{row.get('task_id', default_id)}",
    "question": f"{text}\n\nYour program must pass this test, among others:\n"
    f"{asserts[0]}",
    "answers": f"a program that passes {_count(tests)} tests",
    "kind": Kind.CODE,
    "source": "mbppplus" if plus else "mbpp",
    "meta": {"tests": tests},
  }
  return Task.from_json(plain, where)


def _texts(row: Row, where: str, *names: str) -> list[str]:
  """The fields of these names, each a text that says something."""
  for name in names:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
      raise ValueError(
        f"{where}: field {name!r} must be a non-empty string, got {value!r:.80}"
      )
  return [row[name] for name in names]


def _released(row: Row, where: str, default_id: str) -> Task:
  """A row of the released RL schema, as written for verl."""
  reward_model = row["reward_model"]
  truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
  if truth is None:
    raise ValueError(
      f"{where}: field 'reward_model.ground_truth' is missing; accepted: a string, a "
      "JSON string or an object"
    )
  extra = row.get("extra_info") or {}
  source = str(row.get("data_source") or "")
  index = str(extra.get("index") or default_id)
  task = {
    "id": index if index.startswith(source) else f"{source}-{index}",
    "question": _question(row, extra, where),
    "source": source,
    "family": extra.get("difficulty") or "",
  }
  truth = _structured(truth)
  if isinstance(truth, dict):
    truth = {k: v for k, v in truth.items() if v is not None}
  meta: Row = {}
  if isinstance(truth, dict) and "target" in truth:
    task.update(kind=Kind.QA, answers=truth["target"])
  elif isinstance(truth, dict) and any(shape <= set(truth) for shape in _TESTS):
    meta = {k: v for k, v in extra.items() if k in _CODE_META and v}
    meta["tests"] = truth
    task.update(kind=Kind.CODE, answers=f"a program that passes {_count(truth)} tests")
  elif isinstance(truth, str | list):
    task.update(kind=Kind.MATH, answers=truth)
  else:
    fields = ", ".join(map(repr, truth)) if isinstance(truth, dict) else repr(truth)
    accepted = " or ".join("+".join(sorted(shape)) for shape in _TESTS)
    raise ValueError(
      f"{where}: field 'reward_model.ground_truth' has {fields}; accepted: a string or "
      f"a list of strings (math), 'target' (qa), or tests: {accepted} (code)"
    )
  return Task.from_json({**task, "meta": meta}, where)


_CODE_META = ("starter_code", "platform", "contest_id", "contest_date", "metadata")


def _count(tests: Row) -> int:
  for field in ("stdin", "inputs"):
    if isinstance(tests.get(field), list):
      return len(tests[field])
  program = str(tests.get("functional") or tests.get("test_code"))
  return max(program.count("assert"), 1)


def _structured(truth: Any) -> Any:
  """A JSON string of an object or of a list of strings as such; all else unchanged.

  `[0,1]` is a mathematical answer, so a list of anything but strings stays text.
  """
  if not isinstance(truth, str):
    return truth
  try:
    value = json.loads(truth)
  except (ValueError, RecursionError):
    return truth
  strings = isinstance(value, list) and all(isinstance(v, str) for v in value)
  return value if isinstance(value, dict) or (strings and value) else truth


def _question(row: Row, extra: Row, where: str) -> str:
  question = extra.get("question")
  if isinstance(question, str) and question.strip():
    return question
  users = [m["content"] for m in row["prompt"] if m.get("role") == "user"]
  question = question_below(users[-1]) if users else None
  if question is None:
    raise ValueError(
      f"{where}: no question; accepted: 'extra_info.question', or a user message in "
      "'prompt' with a paragraph that starts with 'Task:' or 'Question:'"
    )
  return question


def question_below(prompt: str) -> str | None:
  """The question of a released prompt, below its head; None where it has no mark."""
  match = _QUESTION.search(prompt)
  return prompt[match.end() :].strip() if match else None


# Fields that tell a schema -> its reader; the first that fits is taken.
_SCHEMAS: tuple[tuple[set[str], Callable[[Row, str, str], Task]], ...] = (
  ({"prompt", "reward_model"}, _released),
  ({"question", "answer", "supporting_facts", "context"}, _hotpotqa),
  ({"question", "answer", "answer_aliases", "paragraphs"}, _musique),
  ({"question", "answer", "root_url", "info"}, _webwalker),
  ({"prompt", "entry_point", "test"}, _humaneval),
  ({"code", "test_list"}, _mbpp),
)
