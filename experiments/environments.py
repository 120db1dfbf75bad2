"""Example environments; docs/environments.md explains them.

This file imports nothing but the standard library, so it also runs in the sandbox.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import sqlite3
import sys
import traceback
from typing import Any


class Rooms:
  """A text game: walk from room to room to the goal.

  A task's `meta` has `start`, `goal`, and `exits`: room -> {direction: room}.
  """

  def reset(self, task: dict[str, Any]) -> str:
    """Enters the first room."""
    self._map = task["meta"]
    self._room = self._map["start"]
    return self._view()

  def go(self, direction: str) -> str:
    """Walks to the next room."""
    exits = self._map["exits"][self._room]
    if direction not in exits:
      raise ValueError(f"no exit {direction!r}; exits: {', '.join(exits)}")
    self._room = exits[direction]
    return self._view()

  def reward(self) -> float:
    """Returns 1 in the goal."""
    return float(self._room == self._map["goal"])

  def _view(self) -> str:
    exits = self._map["exits"][self._room]
    return f"You are in the {self._room}. Exits: {', '.join(exits)}."


class Table:
  """SQL over a task's own table, called `t`.

  A task's `meta` has `columns` and `rows`. The task's grader judges the answer.
  """

  def reset(self, task: dict[str, Any]) -> str:
    """Fills the table."""
    columns, rows = task["meta"]["columns"], task["meta"]["rows"]
    self._base = sqlite3.connect(":memory:", check_same_thread=False)
    names = ", ".join('"' + c.replace('"', '""') + '"' for c in columns)
    self._base.execute(f"create table t ({names})")
    places = ", ".join("?" * len(columns))
    self._base.executemany(f"insert into t values ({places})", rows)
    # The policy's queries only read this table: no other file, no change.
    reads = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
    self._base.set_authorizer(
      lambda action, *_: sqlite3.SQLITE_OK if action in reads else sqlite3.SQLITE_DENY
    )
    # No query takes much memory, or more than a million steps.
    self._base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)
    self._base.set_progress_handler(lambda: 1, 1_000_000)
    return f"The table t has {len(rows)} rows with columns {names}."

  def sql(self, query: str) -> str:
    """Returns at most 20 rows."""
    try:
      found = self._base.execute(query).fetchmany(20)
    except sqlite3.Error as e:
      raise ValueError(str(e)) from None
    return "\n".join(" | ".join(map(str, row)) for row in found) or "no rows"

  def close(self) -> None:
    """Frees the table."""
    self._base.close()


class Python:
  """A Python session: a program sees the variables of the programs before it.

  As the tool `code` with `tools.session`. It executes what the policy writes, so it
  runs in the sandbox only (`jail=True`).
  """

  def reset(self, task: dict[str, Any]) -> None:
    """Begins a session without variables."""
    if __name__ != "__main__":  # imported by the training process
      raise RuntimeError("take jail=True")
    self._names = {"__name__": "__main__"}
    self._count = 0

  def run(self, program: str, stdin: str = "") -> str:
    """Returns what the program prints, and its error."""
    self._count += 1
    name = f"<cell {self._count}>"
    linecache.cache[name] = (len(program), None, program.splitlines(True), name)
    sys.stdin = io.StringIO(stdin)
    out = io.StringIO()
    error = ""
    try:
      with contextlib.redirect_stdout(out):
        exec(compile(program, name, "exec", dont_inherit=True), self._names)
    except SystemExit:
      pass
    except Exception as e:
      frames = e.__traceback__ and e.__traceback__.tb_next  # without this method's
      head = "Traceback (most recent call last):\n" if frames else ""
      lines = [head, *traceback.format_tb(frames), *traceback.format_exception_only(e)]
      error = f"error: {''.join(lines).strip()}"
    text = f"{out.getvalue().strip()}\n{error}".strip()
    return text or "no output; print what you want to see"
