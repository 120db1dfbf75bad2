"""Splits trajectories into contexts for SFT, as rollouts do."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from coa_jax.protocol.contexts import (
  REMOVED,
  ContextConfig,
  leave_context,
  repeat_summary,
)
from coa_jax.protocol.roles import (
  CONTEXT_SUMMARY,
  OBSERVATION,
  PLAN,
  REFLECTION,
  SUGGESTED_ANSWER,
  THINK,
  close_tag,
  open_tag,
)
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author, Segment, Trajectory

_STATED = "|".join((THINK, PLAN, REFLECTION, CONTEXT_SUMMARY))
_SPAN = re.compile(rf"<({_STATED})>(.*?)</\1>", re.DOTALL)
# What a policy says about an observation comes directly after it.
_ABOUT = re.compile(
  rf"\s*<({THINK}|{REFLECTION}|{SUGGESTED_ANSWER})>(.*?)</\1>", re.DOTALL
)


def compacted(
  trajectory: Trajectory, config: ContextConfig, tokenizer: Tokenizer
) -> Trajectory:
  """Splits a finished trajectory into contexts, as a rollout would.

  A summary begins with the span about the observation that filled the context; the
  context's thoughts, plans and reflections follow. A trajectory that has several
  contexts already is returned as it is.
  """
  if len(trajectory.split()) > 1:
    return trajectory
  out = dataclasses.replace(trajectory, segments=[])
  marker = tokenizer.encode_observation(REMOVED)
  segments = list(trajectory.segments)
  while segments:
    segment = segments.pop(0)
    out.segments.append(segment)
    if segment.role != OBSERVATION:
      continue
    if not config.summarises:
      leave_context(out, config, marker)
    elif segments and config.is_full(out):
      read = "".join(s.text for s in out.split()[-1].segments[1:])
      lines = [text.strip() for _, text in _SPAN.findall(read)]
      if about := _ABOUT.match(segments[0].text):
        # First: the observation that it copies from is nearest there.
        lines.insert(0, about[2].strip())
      if segments[0].role == REFLECTION:
        del segments[0]  # the summary has it
      out.segments += _summary(lines, tokenizer)
      repeat_summary(out)
  return out


def _summary(lines: Iterable[str], tokenizer: Tokenizer) -> list[Segment]:
  """Returns a summary's opening tag, and the policy's part of it."""
  tag = open_tag(CONTEXT_SUMMARY)
  text = " " + "\n".join(lines) + close_tag(CONTEXT_SUMMARY)
  return [
    Segment(Author.ENVIRONMENT, CONTEXT_SUMMARY, tag, tokenizer.encode(tag)),
    Segment(Author.POLICY, CONTEXT_SUMMARY, text, tokenizer.encode(text)),
  ]
