"""One self-contained HTML page: figures, tables, and a trajectory viewer.

The page opens from a file, without server or network: `static/style.css` and
`static/viewer.js` are included. Tool output is hostile, so three walls stand between a
trajectory and the browser. All data is in one script element of type application/json,
which no browser runs; characters that could end the element are escaped. The page's
script turns data into text nodes, never into markup. The content security policy
forbids every request, and every script but the page's own.
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import glob
import html
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from coa_jax.protocol import roles
from coa_jax.protocol.parser import Parse, parse
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author, Segment, Trajectory, iter_trajectories
from coa_jax.report import page
from coa_jax.report.page import inert_json, page_html, role_kinds, static_text
from coa_jax.report.plots import to_svg
from coa_jax.report.tables import Table, html_table
from coa_jax.rewards import answer_of, qa
from coa_jax.runtime.json_io import parse_object

_VIEWER = """<section id="viewer"><div class="bar" id="bar"></div>
<div class="legend" id="legend"></div>
<div class="panes"><div class="side"><div id="charts"></div>
<div id="list" role="listbox" aria-label="trajectories" tabindex="0"></div></div>
<div id="detail"></div></div></section>
<script type="application/json" id="data">{data}</script>
"""


def write_page(
  path: str | os.PathLike[str],
  title: str,
  sources: Mapping[str, Iterable[Trajectory]],
  variant: Variant | None = None,
  tokenizer: Tokenizer | None = None,
  intro: str = "",
  headline: Mapping[str, str] | None = None,
  tables: Sequence[Table] = (),
  figures: Mapping[str, Figure] | None = None,
  choice: str = "",
) -> int:
  """Writes the page; returns how many trajectories it holds.

  Args:
    path: the HTML file, written atomically.
    title: the page's title, plain text.
    sources: name (a file, or "") -> trajectories. A source's trajectories for one task
      form a group, or several if the task was drawn more than once. The shown fields
      of `meta` are `question`, `answers`, `family` and `model`.
    variant: the trajectories' dialect, to show protocol faults; without it,
      trajectories are shown by segment.
    tokenizer: the run's tokenizer, to colour tokens within the text. Without it, or
      where decoding does not give a segment's text, tokens are shown by their ids.
    intro: plain text, paragraphs separated by empty lines; `...` is code.
    headline: label -> figure, shown large at the top.
    tables: shown in order.
    figures: caption -> figure, shown in order.

  Raises:
    FileNotFoundError, ValueError: a source cannot be read; names file and line.
  """
  # --- Each trajectory's data. The page stores each prompt once, because thousands of
  # trajectories may share a prompt.
  prompts: dict[str, int] = {}
  rows = []
  for name, trajectories in sources.items():
    for trajectory in trajectories:
      rows.append(_row(trajectory, name, variant, tokenizer, prompts))
  _number_groups(rows)

  # --- The report, and below it the viewer, if there are trajectories.
  report = _report(intro, headline or {}, tables, figures or {}, bool(rows))
  heading = "<h2>Trajectories</h2>" if report and rows else ""
  if heading and choice:
    heading += f'<p class="note">{html.escape(choice)}</p>'
  body = f"<header><h1>{html.escape(title)}</h1>{report}{heading}</header>\n"
  script = ""
  if rows:
    data = {"rows": rows, "prompts": list(prompts), "kinds": role_kinds()}
    body += _VIEWER.format(data=inert_json(data))
    script = static_text("viewer.js")
  text = page_html(title, body, script, "report" if report else "browser")

  page.write(path, text)
  return len(rows)


def _report(
  intro: str,
  headline: Mapping[str, str],
  tables: Sequence[Table],
  figures: Mapping[str, Figure],
  has_viewer: bool,
) -> str:
  """Returns the markup above the viewer; "" if there is none."""
  escape = html.escape
  parts = []

  # --- The text, and the main figures.
  for paragraph in intro.split("\n\n"):
    if paragraph.strip():
      text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(paragraph.strip()))
      parts.append(f"<p>{text}</p>")
  if headline:
    cards = ""
    for label, figure in headline.items():
      cards += f"<div><dt>{escape(label)}</dt><dd>{escape(figure)}</dd></div>"
    parts.append(f'<dl class="headline">{cards}</dl>')
  # --- Contents, if there is more than one part.
  heads = {"numbers": tables, "figures": figures, "viewer": has_viewer}
  names = {"numbers": "Numbers", "figures": "Figures", "viewer": "Trajectories"}
  links = [f'<a href="#{k}">{names[k]}</a>' for k, part in heads.items() if part]
  if len(links) > 1:
    parts.append(f'<nav class="contents" aria-label="contents">{"".join(links)}</nav>')
  # --- Tables and figures.
  if tables:
    parts += ['<h2 id="numbers">Numbers</h2>', *map(html_table, tables)]
  if figures:
    parts.append('<h2 id="figures">Figures</h2>')
  for caption, figure in figures.items():
    head = f"<figcaption>{escape(caption)}</figcaption>"
    parts.append(f'<figure>{head}<div class="scroll">{to_svg(figure)}</div></figure>')
  return "".join(parts)


def find_files(where: Iterable[str]) -> list[str]:
  """Finds the trajectory files matching patterns, each once, in order.

  Args:
    where: files, globs (`**` for any depth) or folders. A folder means its
      `trajectories/*.jsonl` (`rl`'s output) or, if missing, its `*.jsonl` files that
      begin with a trajectory (evaluation and distillation write others, too). The
      `process_*` folders of several processes are included.

  Raises:
    FileNotFoundError: an entry of `where` matches no file.
  """
  out: dict[str, None] = {}
  for pattern in where:
    if os.path.isdir(pattern):
      inside: list[str] = []
      for name in (os.path.join("trajectories", "*.jsonl"), "*.jsonl"):
        if not inside:
          for process in ("", "process_*"):
            pattern_of_one = os.path.join(glob.escape(pattern), process, name)
            inside += sorted(glob.glob(pattern_of_one))
      candidates = filter(os.path.isfile, inside)
      files = list(filter(_begins_with_a_trajectory, candidates))
    else:
      files = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    if not files:
      raise FileNotFoundError(
        f"{pattern}: no trajectories are there; give a file, a glob such as "
        "'runs/X/trajectories/step_*.jsonl', or the workdir of a run that writes them "
        "(distill, rl, evaluate)"
      )
    out |= dict.fromkeys(files)  # a dict keeps the order and each file once
  return list(out)


def _begins_with_a_trajectory(path: str) -> bool:
  with open(path, "rb") as f:
    line = f.readline()
  try:
    return "segments" in parse_object(line, path)
  except ValueError:
    return False


def open_files(files: Sequence[str]) -> dict[str, Iterable[Trajectory]]:
  """Opens files lazily: path below their common folder -> trajectories."""
  folder = os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in files])
  return {os.path.relpath(f, folder): iter_trajectories(f) for f in files}


def _number_groups(rows: Iterable[dict[str, Any]]) -> None:
  """Numbers the rows' groups: a repeated sample of a task starts another group."""
  seen: collections.Counter[tuple[str, str, int]] = collections.Counter()
  numbers: dict[tuple[str, str, int], int] = {}
  for row in rows:
    attempt = (row["file"], row["task"], row["sample"])
    group = (row["file"], row["task"], seen[attempt])
    seen[attempt] += 1
    row["group"] = numbers.setdefault(group, len(numbers))


def _row(
  t: Trajectory,
  file: str,
  variant: Variant | None,
  tokenizer: Tokenizer | None,
  prompts: dict[str, int],
) -> dict[str, Any]:
  """Builds a trajectory's page data; its prompt is an index into `prompts`."""
  # --- The prompt, and the log-probs except impossible tokens' infinite ones.
  prompt = ""
  logps: list[float] = []
  for segment in t.segments:
    if segment.author == Author.PROMPT:
      prompt += segment.text
    logps += filter(math.isfinite, segment.logps)
  # --- The accepted answers, the written answer, and its matches.
  golds = t.meta.get("answers", [])
  if not isinstance(golds, list):
    golds = [golds]
  golds = [str(gold) for gold in golds]
  answer = answer_of(t)
  matched = []
  if answer is not None:
    matched = [gold for gold in golds if qa.every_part(answer, [gold])]
  # --- The spans, and the protocol fault.
  parsed = None
  fault = ""
  if variant:
    parsed = parse(t.text, variant)
    if not parsed.ok:
      fault = f"{parsed.verdict.value} at character {parsed.offset}: {parsed.detail}"
  spans = blocks(t, parsed)
  # --- The result, under the names in viewer.js.
  u = t.usage
  return {
    "file": file,
    "task": str(t.task_id),
    "sample": t.sample,
    "status": t.status.value,
    "reward": _number(t.reward),
    "parts": {str(k): _number(v) for k, v in t.reward_parts.items()},
    "matched": matched,
    "tokens": u.total or t.num_tokens,
    "cost": (
      f"{u.prompt:,} prompt ({u.cached:,} cached), {u.generated:,} generated, "
      f"{u.observation:,} observed; {u.model_calls} model calls, {u.seconds:.1f} s"
    ),
    "calls": [f"{c.name} {c.status.value} {c.seconds:.3f} s" for c in t.calls],
    "mean": _number(statistics.fmean(logps or [math.nan])),
    "low": _number(min(logps, default=None)),
    "question": str(t.meta.get("question") or prompt[-400:].strip() or t.task_id),
    "golds": golds,
    "answer": answer,
    "evidence": _evidence(spans, golds),
    "fault": fault,
    "family": str(t.meta.get("family", "")),
    "model": str(t.meta.get("model", "")),
    "prompt": prompts.setdefault(prompt, len(prompts)),
    "spans": [_span(block, tokenizer) for block in spans],
  }


@dataclasses.dataclass
class ShownSpan:
  """A displayed span: its role, its text, and its segments."""

  role: str
  content: str
  segments: list[Segment]

  @property
  def author(self) -> Author:
    """Returns the author; of several, the least trusted."""
    authors = {s.author for s in self.segments}
    # A tool's text may be hostile; the environment's text is the program's own.
    for author in (Author.TOOL, Author.CARRIED, Author.ENVIRONMENT):
      if author in authors:
        return author
    return Author.POLICY


def blocks(trajectory: Trajectory, parsed: Parse | None) -> list[ShownSpan]:
  """Lists the spans, with one span of carried text before each later context."""
  out = _written(trajectory, parsed)
  for context in trajectory.split()[1:]:
    carried = [s for s in context.segments if s.author == Author.CARRIED]
    place = len(out)
    for first in context.written[:1]:  # none if the engine failed at once
      place = next(i for i, span in enumerate(out) if first in span.segments)
    text = "".join(s.text for s in carried)
    out.insert(place, ShownSpan("next context repeats", text, carried))
  return out


def _written(trajectory: Trajectory, parsed: Parse | None) -> list[ShownSpan]:
  """Lists the parsed spans, or the segments if the text does not parse."""
  segments = trajectory.written
  if parsed is None or not parsed.ok:
    # A segment without text or tokens would be an empty box.
    shown = [s for s in segments if s.text.strip() or s.ids]
    return [ShownSpan(s.role, _inside(s), [s]) for s in shown]
  # --- Each segment belongs to the span of its first non-space character.
  out = [ShownSpan(span.role, span.content.strip("\n"), []) for span in parsed.spans]
  i = 0
  end = 0
  for segment in segments:
    end += len(segment.text)
    at = end - len(segment.text.lstrip())
    while i < len(out) - 1 and at >= parsed.spans[i].end:
      i += 1
    out[i].segments.append(segment)
  return out


def _inside(segment: Segment) -> str:
  """Returns the text between a segment's tags, or the whole text without tags."""
  text = segment.text.strip()
  opening = roles.open_tag(segment.role)
  closing = roles.close_tag(segment.role)
  tagged = text.startswith(opening) and text.endswith(closing)
  # A short text could begin and end with overlapping tags.
  if not tagged or len(text) < len(opening) + len(closing):
    return segment.text.strip("\n")
  text = text[len(opening) : -len(closing)].removeprefix(" ").strip("\n")
  if segment.role == roles.OBSERVATION:  # a tool's text was escaped
    return roles.unescape(text)
  return text


def _evidence(spans: Sequence[ShownSpan], golds: Sequence[str]) -> int | None:
  """Returns the index in `spans` of the first observation with a gold answer."""
  words = list(filter(None, map(qa.normalize, golds)))
  for i, block in enumerate(spans):
    if block.role == roles.OBSERVATION:
      text = f" {qa.normalize(block.content)} "  # spaces: only whole words count
      if any(f" {word} " in text for word in words):
        return i
  return None


def _span(block: ShownSpan, tokenizer: Tokenizer | None) -> dict[str, Any]:
  """Builds a block's page data, with all its tokens if any was sampled."""
  out: dict[str, Any] = {
    "role": str(block.role),
    "author": block.author.value,
    "content": block.content,
    "tokens": sum(len(s.ids) for s in block.segments),
  }
  authors = list(dict.fromkeys(s.author.value for s in block.segments))
  if len(authors) > 1:
    out["authors"] = authors
  # Tokens are shown if any was sampled: log-probs give their colours.
  if any(s.logps for s in block.segments):
    out["segments"] = [_segment(s, tokenizer) for s in block.segments]
  return out


def _segment(s: Segment, tokenizer: Tokenizer | None) -> dict[str, Any]:
  """Returns a segment's text or, if sampled, its tokens with all known values."""
  if not s.logps:
    return {"text": s.text}
  out = {"ids": s.ids, "logps": list(map(_number, s.logps)), "versions": s.versions}
  if len(set(s.versions)) == 1:
    # Nearly always one policy wrote a whole segment; then its version is stored once.
    out["versions"] = s.versions[:1]
  texts = None
  if tokenizer:
    texts = _token_texts(s, tokenizer)
  if texts:
    out["pieces"] = texts
  return out


def _token_texts(s: Segment, tokenizer: Tokenizer) -> list[str] | None:
  """Returns each token's text; None if the ids do not decode to the segment's text.

  A character with bytes in several tokens belongs to the last of them.
  """
  # This decoder holds back a character's first bytes until the last one.
  decoder = codecs.getincrementaldecoder("utf-8")("replace")
  # A run's folder may hold ids from another tokenizer.
  if not all(0 <= i < tokenizer.vocab_size for i in s.ids):
    return None
  texts = [decoder.decode(tokenizer.raw([i])) for i in s.ids]
  if texts:
    texts[-1] += decoder.decode(b"", final=True)
  return texts if "".join(texts) == s.text else None


def _number(value: float | None) -> float | None:
  """Rounds for display; None if not finite."""
  if value is None or not math.isfinite(value):
    return None
  return round(value, 4)
