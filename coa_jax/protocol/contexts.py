"""Context management: a trajectory leaves a nearly full context for a shorter one.

The next context repeats the prompt and all spans, but a marker replaces older
observations (as in MiroThinker's `keep_tool_result`). Or the policy summarises the full
context, and the next one repeats the prompt and the summary (as in CompactionRL,
arXiv 2607.05378). Each context is a separate training row, and only its newly sampled
tokens are trained, a summary's too.
"""

from __future__ import annotations

import dataclasses

from coa_jax.protocol.roles import CONTEXT_SUMMARY, OBSERVATION, open_tag
from coa_jax.protocol.trajectory import Author, Segment, Trajectory
from coa_jax.runtime.fields import bounded, check_fields

REMOVED = "removed"


@dataclasses.dataclass(frozen=True)
class ContextConfig:
  """When a trajectory leaves its context, and what the next one repeats.

  Attributes:
    count: maximum contexts per trajectory.
    keep: observations that the next context repeats whole, the newest included; a
      marker replaces the others. 0: the policy writes a summary, and the next context
      repeats only the prompt and the summary.
    leave_at: tokens; a context with more tokens after an observation is left. With
      several contexts, the remaining length is for a call and its observation, or for a
      summary.
  """

  count: int = bounded(1, least=1)
  keep: int = bounded(3, least=0)
  leave_at: int = bounded(0, least=0)

  def __post_init__(self):
    check_fields(self)

  @property
  def summarises(self) -> bool:
    """Whether the policy summarises a full context."""
    return self.count > 1 and self.keep == 0

  def is_full(self, trajectory: Trajectory) -> bool:
    """Whether the trajectory's last context should be left."""
    contexts = trajectory.split()
    return len(contexts) < self.count and contexts[-1].num_tokens > self.leave_at

  def check(self, length: int, name: str) -> None:
    """Refuses contexts that would never be left.

    Args:
      length: maximum tokens per context.
      name: the config field of `length`.
    """
    if self.count > 1 and not 0 < self.leave_at < length:
      raise ValueError(
        f"context.leave_at={self.leave_at} must be above 0 and below {name}={length}, "
        f"for there are up to context.count={self.count} contexts"
      )


def leave_context(
  trajectory: Trajectory, config: ContextConfig, marker: Segment
) -> list[Segment] | None:
  """Begins the next context if the last one is too long.

  Args:
    trajectory: changed in place; its last segment is a new observation, unread so far.
    config: when to leave a context, and what the next one repeats.
    marker: the observation `REMOVED`, with ids; replaces each removed observation.

  Returns:
    The next context: the prompt, the other segments as `Author.CARRIED`, and the new
    observation, which moves out of the last context. None if the last context
    continues.
  """
  if not config.is_full(trajectory):
    return None
  *read, new = trajectory.split()[-1].segments
  # --- All but the last `keep` observations are removed.
  places = [i for i, s in enumerate(read) if s.role == OBSERVATION]
  removed = set(places[: max(0, len(places) + 1 - config.keep)])
  following = []
  for i, s in enumerate(read):
    if i in removed:
      s = marker
    author = s.author if s.author == Author.PROMPT else Author.CARRIED
    # Sampled once: log-probs and versions stay in the earlier context.
    following.append(dataclasses.replace(s, author=author, logps=[], versions=[]))
  following.append(new)
  # --- If this frees too little room, the context is used to its end.
  if sum(len(s.ids) for s in following) > config.leave_at:
    return None
  trajectory.segments[-1:] = following
  return following


def repeat_summary(trajectory: Trajectory) -> list[Segment]:
  """Begins the next context with the summary that ends the last one.

  Args:
    trajectory: changed in place; its last segment ends with a summary's closing tag.

  Returns:
    The next context: the prompt and the summary, as `Author.CARRIED`.
  """
  last = trajectory.split()[-1].segments
  prompt = [s for s in last if s.author == Author.PROMPT]
  # The opening tag is a segment of its own if the policy was made to begin a summary;
  # otherwise its first token may end the segment before.
  begin = len(last) - 1
  text = last[begin].text
  while open_tag(CONTEXT_SUMMARY) not in text:
    begin -= 1
    text = last[begin].text + text
  ids = [i for s in last[begin:] for i in s.ids]
  following = [*prompt, Segment(Author.CARRIED, CONTEXT_SUMMARY, text, ids)]
  trajectory.segments += following
  return following
