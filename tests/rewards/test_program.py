"""Extracts the program from an answer."""

from __future__ import annotations

import time

import pytest

from coa_jax.rewards.code.program import program_of

P = "a = 1\nif a:\n  print(a)"
OTHER = "print('other')"


def block(label: str = "python", program: str = P, fence: str = "```") -> str:
  return f"{fence}{label}\n{program}\n{fence}"


def indented(text: str, by: str) -> str:
  return "\n".join(by + line for line in text.split("\n"))


ANSWERS = {
  "label": block(),
  "label and words": "Here.\n" + block("python title=x.py") + "\nDone.",
  "label in braces": block("{.python}"),
  "tildes": block(fence="~~~"),
  "longer fence": block(fence="````"),
  "version": block("PY3.11"),
  "no label": block(""),
  "last of several": block(program=OTHER) + "\nBetter:\n" + block("Python3"),
  "unlabelled sample run after": block() + "\nSample run:\n```\n2 3\n5\n```",
  "labelled sample run after": block() + "\n```text\n5\n```",
  "unlabelled sample run before": "```\n2 3\n```\n" + block("py"),
  "tilde sample run after": block() + "\n~~~\n5\n~~~",
  "list item": "1. code\n" + indented(block(), "   "),
  "list item's own line": "- " + indented(block(), "  ")[2:],
  "list with a tab": "1. code\n" + indented(block(), "\t"),
  "indented block of a flat fence": block(program=indented(P, "   ")),
  "closing fence indented": f"```python\n{P}\n  ```\n" + "text",
  "prose before the fence": "The code: " + block(),
  "fence after code": f"```python\n{P}```\nIt prints\n```\n1\n```",
  "unclosed": f"```python\n{P}",
  "unclosed without label": f"Code:\n```\n{P}",
  "unclosed before another": f"```python\n{OTHER}\n" + block(),
  "stray fence at the end": block("") + "\n```",
  "empty block at the end": block() + "\n```python\n```",
  "spaces around": block(" Python ").replace("\n```", "\n```  "),
  "code span": f"<code>\n{P}\n</code>",
  "code span in pre": f'<pre><code class="language-python">{P}\n</code></pre>',
  "code span in prose": f"So: <code>{P}</code> it is.",
  "fence in a code span": f"<code>\n{block()}\n</code>",
  "all of it": P,
}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ANSWERS)
def test_the_program_is_found(name, end):
  assert program_of(ANSWERS[name].replace("\n", end)).strip() == P


@pytest.mark.parametrize(
  "program",
  [
    "n = input()\nprint('```'+n+'```')",
    'print(" ```" + n)',
    "print('```')",
    "x = '```python'",
    'f = f"~~~{n}"\n\nprint("""```""")',
    'def f():\n    """\n    Example:\n    ```\n    f()\n    ```\n    """\n    return 1',
    'print("<code>x</code>")',
    "a = b - c\n* d",
  ],
)
def test_fences_in_a_program_are_its_own(program):
  answer = f"Code\n```python\n{program}\n```\nIt runs:\n```\n5\n```"
  assert program_of(answer).strip() == program
  if "\n    ```\n" not in program:
    assert program_of(program) == program
  longer = block(program=program + '\nx = """\n```\n"""', fence="````")
  assert program_of(longer).strip().startswith(program)


def test_what_is_no_python_is_no_program():
  for answer in ("```text\n5\n```", "```pytest\nx\n```", "```python-repl\n>>> 1\n```"):
    assert program_of(answer) == answer
  assert program_of("```py\n```").strip() == ""


@pytest.mark.parametrize(
  "text",
  [
    "a: ```\n  ```\n",
    "<code>\n",
    "`" * 7 + " ",
    "~" * 7 + "\n",
    " ```py",
    " ~~~`",
    "x: ",
    "```\n ~~~\n",
    "- ```\n",
  ],
)
def test_a_hostile_answer_takes_no_time(text):
  began = time.process_time()
  program_of(text * (1_000_000 // len(text)))
  assert time.process_time() - began < 10
