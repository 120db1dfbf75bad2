"""A browser of any run's trajectories: one HTML file, which needs no server.

All data stand in one script element of type application/json, which no browser runs,
with every character that could end it escaped; the page's script (`browser_page.py`)
makes text nodes of it, never markup. Only what is looked at is rendered.
"""

from __future__ import annotations

import codecs
import collections
import glob
import html
import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from coa_jax.json_io import parse_object
from coa_jax.protocol import roles
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import (
  Author,
  Segment,
  Trajectory,
  read_trajectories,
)
from coa_jax.report.browser_page import BODY, SCRIPT, STYLE
from coa_jax.report.page import page
from coa_jax.rewards import written_answer


def find_files(where: Iterable[str]) -> list[str]:
  """The trajectory files that patterns mean, each once, in order.

  Args:
    where: files, globs (`**` for any depth) or folders. A folder means what `rl` writes
      into it, `trajectories/*.jsonl`; without such a folder, those of its own `*.jsonl`
      that begin with a trajectory (evaluation and distillation write others, too).

  Raises:
    FileNotFoundError: one of them means no file.
  """
  out: dict[str, None] = {}
  for pattern in where:
    wanted = pattern
    if os.path.isdir(pattern):
      kept = os.path.join(pattern, "trajectories")
      inside = kept if os.path.isdir(kept) else pattern
      wanted = os.path.join(glob.escape(inside), "*.jsonl")
    found = sorted(filter(os.path.isfile, glob.glob(wanted, recursive=True)))
    if wanted != pattern:
      found = list(filter(_begins_with_a_trajectory, found))
    if not found:
      raise FileNotFoundError(
        f"--trajectories={pattern}: no file; give a file, a glob such as "
        "'runs/X/trajectories/step_*.jsonl', or a folder that holds *.jsonl"
      )
    out |= dict.fromkeys(found)
  return list(out)


def _begins_with_a_trajectory(path: str) -> bool:
  with open(path, "rb") as f:
    line = f.readline()
  try:
    return "segments" in parse_object(line, path)
  except ValueError:
    return False


def write_browser(
  path: str | os.PathLike[str],
  files: Sequence[str],
  tokenizer: Tokenizer | None = None,
  title: str = "Trajectories",
) -> int:
  """Writes the page; returns how many trajectories it holds.

  Args:
    path: the HTML file; it appears under its name only when complete.
    files: JSON lines or parquet of trajectories. Those of one file and task are a
      group, or several where the task was drawn more than once.
    tokenizer: the run's, to show which characters a token is; without it, or where it
      does not decode a segment to its text, tokens are shown by their ids.
    title: of the page, plain text.

  Raises:
    FileNotFoundError, ValueError: a file can not be read; file and line are named.
  """
  prompts: dict[str, int] = {}
  names = _short(files)
  rows = [
    _row(t, name, tokenizer, prompts)
    for name, file in zip(names, files, strict=True)
    for t in read_trajectories(file)
  ]
  _number_groups(rows)
  kinds = {r: r for r in (*roles.ROLES, roles.OBSERVATION)}
  kinds |= dict.fromkeys(roles.TOOLS, "tool")
  data = {"rows": rows, "prompts": list(prompts), "kinds": kinds}
  body = BODY.format(title=html.escape(title), data=inert_json(data))
  path = os.fspath(path)
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  with open(path + ".tmp", "w", encoding="utf-8") as f:
    f.write(page(title, body, SCRIPT, STYLE))
  os.replace(path + ".tmp", path)
  return len(rows)


def inert_json(value: Any) -> str:
  """JSON that can stand in a script element: no text in it ends or opens anything.

  HTML looks for `</script` and `<!--` in a script before anybody parses JSON, so `<`,
  `>` and `&` are written as escapes; they occur in JSON's strings only.
  """
  text = json.dumps(value, allow_nan=False, separators=(",", ":"))
  for character in "<>&":
    text = text.replace(character, f"\\u{ord(character):04x}")
  return text


def _short(files: Sequence[str]) -> list[str]:
  """The files' names without the folders that all of them share."""
  if len(files) == 1:
    return [os.path.basename(files[0])]
  full = [os.path.abspath(f) for f in files]
  return [os.path.relpath(f, os.path.commonpath(full)) for f in full]


def _number_groups(rows: Iterable[dict[str, Any]]) -> None:
  """Tells every row its group: a sample that a task has twice is of two of them."""
  seen: collections.Counter[tuple[str, str, int]] = collections.Counter()
  numbers: dict[tuple[str, str, int], int] = {}
  for row in rows:
    attempt = row["file"], row["task"], row["sample"]
    group = row["file"], row["task"], seen[attempt]
    seen[attempt] += 1
    row["group"] = numbers.setdefault(group, len(numbers))


def _row(
  t: Trajectory, file: str, tokenizer: Tokenizer | None, prompts: dict[str, int]
) -> dict[str, Any]:
  """What the page knows of a trajectory; its prompt is an index into `prompts`."""
  prompt = "".join(s.text for s in t.segments if s.author == Author.PROMPT)
  logps = [x for s in t.segments for x in s.logps if math.isfinite(x)]
  u = t.usage
  golds = t.meta.get("answers", [])
  return {
    "file": file,
    "task": str(t.task_id),
    "sample": t.sample,
    "status": t.status.value,
    "reward": _number(t.reward),
    "parts": {str(k): _number(v) for k, v in t.reward_parts.items()},
    "tokens": u.total or t.num_tokens,
    "cost": (
      f"{u.prompt} prompt, {u.generated} generated, {u.observation} observed; "
      f"{u.model_calls} model calls, {u.seconds:.1f} s"
    ),
    "calls": [f"{c.name} {c.status.value} {c.seconds:.3f} s" for c in t.calls],
    "mean": _number(statistics.fmean(logps)) if logps else None,
    "low": _number(min(logps, default=None)),
    "question": str(t.meta.get("question") or prompt[-400:] or t.task_id),
    "golds": [str(g) for g in golds] if isinstance(golds, list) else [str(golds)],
    "answer": written_answer(t.text),
    "family": str(t.meta.get("family", "")),
    "model": str(t.meta.get("model", "")),
    "prompt": prompts.setdefault(prompt, len(prompts)),
    "segments": [
      _segment(s, tokenizer) for s in t.segments if s.author != Author.PROMPT
    ],
  }


def _segment(s: Segment, tokenizer: Tokenizer | None) -> dict[str, Any]:
  """A segment; where it was sampled, with id, log-prob and version of every token."""
  out = {
    "author": s.author.value,
    "role": str(s.role),
    "text": s.text,
    "tokens": len(s.ids),
  }
  if not s.logps:
    return out
  out |= {"ids": s.ids, "logps": [_number(x) for x in s.logps]}
  versions = collections.Counter(s.versions)
  # Nearly always one policy wrote all of a segment; then its version stands once.
  out["versions"] = s.versions[:1] if len(versions) == 1 else s.versions
  lengths = _lengths(s, tokenizer) if tokenizer else None
  return out | ({"lengths": lengths} if lengths else {})


def _lengths(s: Segment, tokenizer: Tokenizer) -> list[int] | None:
  """Characters of each token; None where the ids are not those of the text.

  A character whose bytes are spread over tokens belongs to the one that completes it.
  """
  decoder = codecs.getincrementaldecoder("utf-8")("replace")
  if not all(0 <= i < tokenizer.vocab_size for i in s.ids):
    return None
  pieces = [decoder.decode(tokenizer.raw([i])) for i in s.ids]
  pieces[-1:] = [pieces[-1] + decoder.decode(b"", final=True)] if pieces else []
  return [len(p) for p in pieces] if "".join(pieces) == s.text else None


def _number(value: float | None) -> float | None:
  """Rounded for a reader; None where there is nothing finite."""
  return None if value is None or not math.isfinite(value) else round(value, 4)
