"""Reads programming data sets' rows; hidden tests go into `meta["tests"]`.

A reader takes a row, its name in error messages, and a default id, and returns the
task's fields.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from typing import Any

from coa_jax.data.tasks.task import Kind, Row, first_of
from coa_jax.runtime.json_io import parse_json

# The maximum unpacked size of one task's tests, in bytes.
_MOST_TESTS = 1 << 30
# What we add to a question. A check for evaluation questions passes over these.
_ASK_FUNCTION = "Complete this function; write it whole, with what it needs."
_ASK_TEST = "Your program must pass this test, among others:"
_ASK_START = "Start from this code:"
ADDED = (_ASK_FUNCTION, _ASK_TEST, _ASK_START)
# The opcodes in a single pickled text, besides the text's own.
_TEXT_OPCODES = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "STOP")


def humaneval(row: Row, where: str, default_id: str) -> Row:
  """Reads a HumanEval or HumanEval+ row: complete a function, judged by `check`."""
  prompt = _text(row, where, "prompt")
  entry = _text(row, where, "entry_point")
  test = _text(row, where, "test")
  # Tests may use the prompt's code before the function: imports, helpers.
  before, definition, _ = prompt.partition(f"def {entry}(")
  if not definition:
    raise ValueError(f"{where}: field 'prompt' defines no function {entry!r}")
  tests = {"test_code": test, "entry_point": entry, "import_prefix": before}
  name = first_of(row, "task_id", default=default_id)
  question = f"{_ASK_FUNCTION}\n\n```py\n{prompt.strip()}\n```"
  return _task(name, question, "humaneval", tests)


def mbpp(row: Row, where: str, default_id: str) -> Row:
  """Reads a row from MBPP, sanitized MBPP or MBPP+: a program judged by asserts.

  `challenge_test_list` is ignored, as elsewhere.
  """
  asserts = row["test_list"]
  if not are_strings(asserts):
    raise ValueError(f"{where}: field 'test_list' must be a list of asserts")
  # --- The task's text: in `prompt` for sanitized MBPP and MBPP+, else in `text`.
  field = "text"
  if "prompt" in row:
    field = "prompt"
  text = _text(row, where, field)
  # --- The tests: MBPP+'s test program, or the asserts after their setup code.
  if "test" in row:
    source = "mbppplus"
    program = row["test"]
  else:
    source = "mbpp"
    setup = [*(row.get("test_imports") or ()), row.get("test_setup_code") or ""]
    program = "\n".join([*setup, *asserts])
  if not asserts or not isinstance(program, str) or not program.strip():
    raise ValueError(f"{where}: there is no test in 'test_list' or 'test'")
  # As elsewhere, the question shows the first assert, which alone gives the function's
  # name.
  name = f"Mbpp/{first_of(row, 'task_id', default=default_id)}"
  question = f"{text}\n\n{_ASK_TEST}\n{asserts[0]}"
  return _task(name, question, source, {"functional": program})


def livecodebench(row: Row, where: str, default_id: str) -> Row:
  """Reads a LiveCodeBench row in the hub's format, with public and private tests."""
  # --- Tests: lists of {input, output, testtype}; private tests are packed.
  tests = _test_list(row["public_test_cases"], where, "public_test_cases")
  private = row.get("private_test_cases")
  if private:
    tests = tests + _test_list(private, where, "private_test_cases")
  metadata = row.get("metadata") or {}
  if isinstance(metadata, str):
    metadata = parse_json(metadata, f"{where}: field 'metadata'")
  found: dict[str, Any] = {
    "inputs": [test["input"] for test in tests],
    "outputs": [test["output"] for test in tests],
  }
  if metadata.get("func_name"):
    found["fn_name"] = metadata["func_name"]
  name = first_of(row, "question_id", default=default_id)
  question = _with_starter(row["question_content"], row.get("starter_code"))
  task = _task(name, question, "livecodebench", found, first_of(row, "difficulty"))
  task["meta"]["platform"] = first_of(row, "platform")
  task["meta"]["contest_date"] = str(first_of(row, "contest_date"))
  return task


def apps(row: Row, where: str, default_id: str) -> Row:
  """Reads an APPS row in the hub's format: programs, or functions with `fn_name`."""
  tests = row["input_output"]
  if isinstance(tests, str):
    tests = parse_json(tests, f"{where}: field 'input_output'")
  if not isinstance(tests, dict) or not {"inputs", "outputs"} <= set(tests):
    raise ValueError(
      f"{where}: field 'input_output' must be an object with inputs and outputs; a "
      "task without tests cannot be graded"
    )
  name = first_of(row, "problem_id", "id", default=default_id)
  # APPS wraps a call's expected value in a list; `problem_id` distinguishes its rows
  # from other data sets in this form (TACO).
  if tests.get("fn_name") and "problem_id" in row:
    tests = {**tests, "wrapped_outputs": True}
  question = _with_starter(row["question"], row.get("starter_code"))
  return _task(f"apps-{name}", question, "apps", tests, first_of(row, "difficulty"))


def codecontests(row: Row, where: str, default_id: str) -> Row:
  """Reads a CodeContests row in the hub's format: all of its tests count."""
  inputs: list[str] = []
  outputs: list[str] = []
  for name in ("public_tests", "private_tests", "generated_tests"):
    tests = row.get(name) or {}
    if isinstance(tests, str):
      tests = parse_json(tests, f"{where}: field {name!r}")
    given = list(tests.get("input", ())), list(tests.get("output", ()))
    if len(given[0]) != len(given[1]) or not all(map(are_strings, given)):
      raise ValueError(
        f"{where}: field {name!r} must have equally many texts in input and output"
      )
    inputs += given[0]
    outputs += given[1]
  if not inputs:
    raise ValueError(f"{where}: no test in public_tests, private_tests, ...")
  for name in ("input_file", "output_file"):
    if row.get(name):
      raise ValueError(
        f"{where}: field {name!r} is {row[name]!r:.80}; programs read standard input "
        "and write standard output"
      )
  name = first_of(row, "name", default=default_id)
  question = _text(row, where, "description")
  tests = {"inputs": inputs, "outputs": outputs}
  return _task(name, question, "codecontests", tests, first_of(row, "difficulty"))


def _task(name: Any, question: str, source: str, tests: Row, family: Any = "") -> Row:
  return {
    "id": name,
    "question": question,
    "answers": tests_as_answer(tests),
    "kind": Kind.CODE,
    "source": source,
    "family": str(family),
    "meta": {"tests": tests},
  }


def _with_starter(question: str, starter: str | None) -> str:
  if not starter or not starter.strip():
    return question
  return f"{question}\n\n{_ASK_START}\n```py\n{starter.rstrip()}\n```"


def _test_list(value: Any, where: str, name: str) -> list[Row]:
  """Reads tests from a list, its JSON, or LiveCodeBench's packed JSON."""
  if isinstance(value, str):
    text = value.strip()
    if not text.startswith("["):
      text = _unpacked(text, f"{where}: field {name!r}")
    value = parse_json(text, f"{where}: field {name!r}")
  keys = {"input", "output"}
  if not isinstance(value, list) or not all(
    isinstance(test, dict) and keys <= set(test) for test in value
  ):
    raise ValueError(f"{where}: field {name!r} must list tests of input and output")
  return value


def _unpacked(packed: str, where: str) -> str:
  """Unpacks text from base64, zlib and a pickle, without running the pickle.

  The pickle's opcodes are listed, not executed; a pickle with anything besides one
  text is refused.
  """
  texts = []
  try:
    unzip = zlib.decompressobj()
    data = unzip.decompress(base64.b64decode(packed, validate=True), _MOST_TESTS)
    if not unzip.eof:
      raise ValueError(f"more than {_MOST_TESTS} bytes, or cut off")
    for opcode, argument, _ in pickletools.genops(data):
      if opcode.name.endswith("UNICODE") or opcode.name.endswith("UNICODE8"):
        texts.append(argument)
      elif opcode.name not in _TEXT_OPCODES:
        raise ValueError(f"a pickle with {opcode.name}, which is never run")
  except (binascii.Error, zlib.error, ValueError) as e:
    raise ValueError(f"{where} is not a list of tests: {e}") from e
  if len(texts) != 1:
    raise ValueError(f"{where} is not a list of tests: it has {len(texts)} texts")
  return texts[0]


def _text(row: Row, where: str, name: str) -> str:
  """Returns a field's text; refuses other and empty values."""
  value = row.get(name)
  if not isinstance(value, str) or not value.strip():
    raise ValueError(
      f"{where}: field {name!r} must be a non-empty string, got {value!r:.80}"
    )
  return value


def are_strings(value: Any) -> bool:
  """Whether a value is a list of strings."""
  return isinstance(value, list) and all(isinstance(item, str) for item in value)


def tests_as_answer(tests: Row) -> str:
  """Describes a code task's answer by its number of tests (or asserts)."""
  for field in ("stdin", "inputs"):
    if isinstance(tests.get(field), list):
      return f"a program that passes {len(tests[field])} tests"
  program = str(tests.get("functional") or tests.get("test_code"))
  return f"a program that passes {max(program.count('assert'), 1)} tests"
