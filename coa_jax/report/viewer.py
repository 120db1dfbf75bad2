"""One self-contained HTML report: figures, tables, and a browser of trajectories.

Everything that comes from a trajectory is escaped: tool output is hostile. The page
works from a file, with no network (see `page.page`).
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import os
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from coa_jax.protocol import roles
from coa_jax.protocol.parser import Parse, parse
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import Author, Segment, Trajectory
from coa_jax.report.page import page
from coa_jax.report.plots import to_svg
from coa_jax.report.tables import Table, cell, html_table
from coa_jax.rewards import qa, written_answer

_STRIP_BARS = 80  # bars of a log-prob strip; longer spans show their least likely token


def write_report(
  path: str | os.PathLike[str],
  title: str,
  intro: str,
  tables: Sequence[Table],
  figures: Mapping[str, Figure],
  trajectories: Sequence[Trajectory],
  variant: Variant,
  headline: Mapping[str, str] | None = None,
) -> None:
  """Writes the report.

  Args:
    path: the HTML file; it appears under its name only when complete.
    title: of the page.
    intro: plain text, paragraphs separated by empty lines.
    tables: shown in order.
    figures: caption -> figure, shown in order.
    trajectories: to browse. Of `meta`, `question`, `answers`, `family` and `model` are
      shown, and the last two can be filtered by.
    variant: the dialect the trajectories are read in.
    headline: label -> figure, shown large at the top.
  """
  e = html.escape
  parts = [f"<h1>{e(title)}</h1>", '<div class="intro">']
  parts += [f"<p>{e(p.strip())}</p>" for p in intro.split("\n\n") if p.strip()]
  parts.append("</div>")
  if headline:
    cards = (f"<div><dt>{e(k)}</dt><dd>{e(v)}</dd></div>" for k, v in headline.items())
    parts.append(f'<dl class="headline">{"".join(cards)}</dl>')
  if tables:
    parts += ["<h2>Numbers</h2>", *map(html_table, tables)]
  if figures:
    parts.append("<h2>Figures</h2>")
  for caption, figure in figures.items():
    head = f"<figcaption>{e(caption)}</figcaption>"
    parts.append(f'<figure>{head}<div class="scroll">{to_svg(figure)}</div></figure>')
  if trajectories:
    parts += ["<h2>Trajectories</h2>", _bar(trajectories), _legend(variant)]
    parts += [_trajectory(t, variant) for t in trajectories]
  text = page(title, "\n".join(parts))
  path = os.fspath(path)
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  with open(path + ".tmp", "w", encoding="utf-8") as f:
    f.write(text)
  os.replace(path + ".tmp", path)


def _facets(t: Trajectory) -> dict[str, str]:
  """What a trajectory can be filtered by."""
  reward = "ungraded" if t.reward is None else f"{t.reward:g}"
  facets = {"reward": reward, "status": t.status.value}
  return facets | {k: str(t.meta.get(k, "")) for k in ("family", "model")}


def _bar(trajectories: Sequence[Trajectory]) -> str:
  facets = [_facets(t) for t in trajectories]
  out = []
  for field in ("reward", "status", "family", "model"):
    values = sorted({f[field] for f in facets})
    if len(values) < 2:
      continue
    options = [f'<option value="">any {field}</option>']
    for v in values:
      # An empty value would mean "any", so what has none cannot be chosen.
      if v:
        options.append(f'<option value="{_attr(v)}">{html.escape(v)}</option>')
    out.append(f'<select data-field="{field}">{"".join(options)}</select>')
  out.append('<input id="find" type="search" placeholder="find text">')
  out.append('<button id="toggle" type="button">open / close all</button>')
  out.append('<span id="shown"></span>')
  return f'<div class="bar">{"".join(out)}</div>'


def _legend(variant: Variant) -> str:
  chips = [_chip(r) for r in (*variant.roles, *variant.tools, roles.OBSERVATION)]
  marks = "".join(
    f'<b class="span by-{a.value} r-other" style="margin-bottom:0">{a.value}</b>'
    for a in (Author.POLICY, Author.TOOL, Author.ENVIRONMENT)
  )
  return f'<div class="legend">{"".join(chips)}<span>written by</span>{marks}</div>'


def _kind(role: str) -> str:
  if role in roles.TOOLS:
    return "tool"
  return role if role in (*roles.ROLES, roles.OBSERVATION) else "other"


def _chip(role: str) -> str:
  return f'<span class="chip r-{_kind(role)}">{html.escape(role or "text")}</span>'


def _attr(text: str) -> str:
  return html.escape(text, quote=True)


@dataclasses.dataclass
class Block:
  """A span as it is shown: its role, its text, and the segments that make it up."""

  role: str
  content: str
  segments: list[Segment]

  @property
  def author(self) -> Author:
    """Who wrote it; where several did, whoever is least to be trusted."""
    authors = {s.author for s in self.segments}
    for author in (Author.TOOL, Author.ENVIRONMENT):
      if author in authors:
        return author
    return Author.POLICY


def blocks(trajectory: Trajectory, parsed: Parse) -> list[Block]:
  """The trajectory's spans: the parser's where it reads the text, else its segments."""
  segments = [s for s in trajectory.segments if s.author != Author.PROMPT]
  if not parsed.ok:
    return [Block(s.role, _inside(s), [s]) for s in segments if s.text.strip()]
  # Each segment goes to the span that holds the first of its text that is not space.
  ends = list(itertools.accumulate(len(s.text) for s in segments))
  out = [Block(span.role, span.content.strip("\n"), []) for span in parsed.spans]
  bounds = [span.end for span in parsed.spans]
  i = 0
  for segment, end in zip(segments, ends, strict=True):
    at = end - len(segment.text.lstrip())
    while i < len(out) - 1 and at >= bounds[i]:
      i += 1
    out[i].segments.append(segment)
  return out


def _inside(segment: Segment) -> str:
  """What stands between a segment's own tags; all of it where it has none."""
  text = segment.text.strip()
  opening, closing = roles.open_tag(segment.role), roles.close_tag(segment.role)
  if text.startswith(opening) and text.endswith(closing):
    text = text[len(opening) : len(text) - len(closing)]
    if segment.role == roles.OBSERVATION:
      text = roles.unescape(text)
  return text.strip("\n")


def _trajectory(t: Trajectory, variant: Variant) -> str:
  e = html.escape
  parsed = parse(t.text, variant)
  shown = blocks(t, parsed)
  golds = [str(a) for a in t.meta.get("answers", [])]
  evidence = _evidence(shown, golds)
  right = t.reward_parts.get("answer", 0.0) >= 1
  tone = "" if t.reward is None else ("right" if right else "wrong")
  mark = {"right": "&#10003;", "wrong": "&#10007;"}.get(tone, "&middot;")
  facets = _facets(t)
  data = " ".join(f'data-{k}="{_attr(v)}"' for k, v in facets.items())
  answer = written_answer(t.text)
  question = str(t.meta.get("question") or _prompt_end(t))
  sub = [t.task_id, f"sample {t.sample}", facets["model"], facets["family"]]
  sub += [facets["status"], f"answer: {answer}" if answer else "no answer"]
  numbers = f"reward {facets['reward']}<br>{cell(t.usage.total)} tokens"
  facts = _facts(t, question, golds, answer, tone, evidence, shown)
  fault = ""
  if not parsed.ok:
    where = f"{parsed.verdict.value} at character {parsed.offset}: {parsed.detail}"
    fault = f'<p class="fault">Breaks the protocol: {e(where)}</p>'
  spans = "".join(_span(b, i == evidence) for i, b in enumerate(shown))
  return (
    f'<details class="tr {tone}" {data}><summary><span class="mark">{mark}</span>'
    f'<span class="q">{e(question)}</span><span class="num">{numbers}</span>'
    f'<span class="sub">{"".join(f"<span>{e(s)}</span>" for s in sub if s)}</span>'
    f'</summary><div class="body">{facts}{fault}{spans}</div></details>'
  )


def _prompt_end(t: Trajectory) -> str:
  prompt = [s.text for s in t.segments if s.author == Author.PROMPT]
  return prompt[-1].strip() if prompt else t.task_id


def _facts(
  t: Trajectory,
  question: str,
  golds: Sequence[str],
  answer: str | None,
  tone: str,
  evidence: int | None,
  shown: Sequence[Block],
) -> str:
  u = t.usage
  tokens = (
    f"{cell(u.total)}: {cell(u.prompt)} prompt ({cell(u.cached)} cached), "
    f"{cell(u.generated)} generated, {cell(u.observation)} observed"
  )
  work = f"{u.tool_calls} tool calls, {u.model_calls} model calls, {u.seconds:.1f} s"
  rows = {
    "Question": question,
    "Gold": " | ".join(golds) or "-",
    "Answer": answer or "-",
    "Reward": _earned(t, golds, answer),
    "Evidence": _where(evidence, shown, golds),
    "Status": t.status.value,
    "Tokens": tokens,
    "Work": work,
  }
  out = []
  for name, value in rows.items():
    style = f' class="{tone}"' if name == "Answer" and tone else ""
    out.append(f"<dt>{name}</dt><dd{style}>{html.escape(value)}</dd>")
  return f'<dl class="facts">{"".join(out)}</dl>'


def _earned(t: Trajectory, golds: Sequence[str], answer: str | None) -> str:
  """What earned the reward, or lost it."""
  if t.reward is None:
    return f"none: {t.status.value}"
  parts = ", ".join(f"{name} {value:g}" for name, value in t.reward_parts.items())
  text = f"{t.reward:g} ({parts})" if parts else f"{t.reward:g}"
  if answer is None:
    return f"{text}; it wrote no answer"
  matched = [g for g in golds if qa.every_part(answer, [g])]
  if matched:
    return f"{text}; the answer matches gold {matched[0]!r} after normalisation"
  return text


def _evidence(shown: Sequence[Block], golds: Sequence[str]) -> int | None:
  """The first observation that a gold answer stands in, as an index into `shown`."""
  wanted = [w for w in map(qa.normalize, golds) if w]
  for i, block in enumerate(shown):
    if block.role == roles.OBSERVATION:
      text = f" {qa.normalize(block.content)} "
      if any(f" {w} " in text for w in wanted):
        return i
  return None


def _where(evidence: int | None, shown: Sequence[Block], golds: Sequence[str]) -> str:
  if not golds:
    return "-"
  if evidence is None:
    return "a gold answer stands in no observation"
  count = sum(b.role == roles.OBSERVATION for b in shown[: evidence + 1])
  tool = shown[evidence - 1].role if evidence else ""
  after = f", after {tool}" if tool in roles.TOOLS else ""
  return f"a gold answer first stands in observation {count}{after}"


def _span(block: Block, evidence: bool) -> str:
  tokens = sum(len(s.ids) for s in block.segments)
  authors = dict.fromkeys(s.author.value for s in block.segments)
  who = " + ".join(authors) + (f" &middot; {tokens} tokens" if tokens else "")
  gold = '<span class="gold">a gold answer stands here</span>' if evidence else ""
  return (
    f'<div class="span r-{_kind(block.role)} by-{block.author.value}">'
    f'<div class="head">{_chip(block.role)}{gold}{_strip(block)}'
    f'<span class="who">{who}</span></div>'
    f"<pre>{html.escape(block.content)}</pre></div>"
  )


def _strip(block: Block) -> str:
  """A strip of bars, one per sampled token: the higher, the less likely it was."""
  logps = [x for s in block.segments for x in s.logps]
  if not logps:
    return ""
  size = -(-len(logps) // _STRIP_BARS)
  lows = [min(logps[i : i + size]) for i in range(0, len(logps), size)]
  bars = "".join(
    f'<rect x="{i}" y="{12 - h:.1f}" width=".8" height="{h:.1f}"/>'
    for i, x in enumerate(lows)
    # A token of probability 1/e^5 or less fills the strip.
    for h in (max(min(-x / 5, 1.0) * 12, 0.4),)
  )
  mean, low = statistics.fmean(logps), min(logps)
  note = f"log-prob per token: mean {mean:.2f}, lowest {low:.2f} nats"
  return (
    f'<svg class="logp" viewBox="0 0 {_STRIP_BARS} 12" preserveAspectRatio="none">'
    f"<title>{note}</title>{bars}</svg>"
  )
