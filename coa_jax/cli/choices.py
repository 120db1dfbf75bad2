"""Responses in OpenAI's form: an attempt's answer, its reasoning and its log-probs.

`message.content` is the graded answer: the last of several;
`message.reasoning_content` is the trajectory up to the answer's opening tag, tags and
observations included. A stream cannot retract text: there every answer span is content,
and all other text reasoning. `text` of /v1/completions is only the answer.

`logprobs` has the policy's sampled tokens: the answer's under `content`, earlier ones
under `reasoning_content` (like DeepSeek's API); observations and the answer's tags are
left out. They are log-probs under the sampling distribution (at temperature 0 under
temperature 1). A stream sends them in a choice's last chunk.

Additional fields: `usage.observation_tokens` (returned by tools, so neither prompt nor
completion), `coa.seed` (a request with this seed and temperature gets this answer
again) and, for each choice, `coa` with the trajectory's status, tool calls and seconds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from coa_jax.cli.completions import RequestRefused
from coa_jax.protocol.roles import ANSWER, open_tag
from coa_jax.protocol.trajectory import Author, Status, Trajectory
from coa_jax.rewards import written_answer
from coa_jax.rollout.streaming import TextDelta


class Choice:
  """One running attempt: converts its pieces for an OpenAI client.

  Attributes:
    index: its position among the choices.
    reasoning: all text put under `reasoning_content` by `delta`.
    content: likewise `content`.
    is_cut: whether the answer reached a stop string.
    trajectory: its trajectory; None until it ends.
  """

  def __init__(
    self,
    index: int,
    stop: tuple[str, ...] = (),
    top: int | None = None,
    raw: Callable[[list[int]], bytes] = bytes,
  ):
    """`stop` and `top` are from `ChatRequest`; `raw` decodes tokens to bytes."""
    self.index = index
    self.reasoning = ""
    self.content = ""
    self.is_cut = False
    self._stop = stop
    self._top = top
    self._raw = raw
    self._held = ""  # answer text not sent yet; see `delta`
    self.trajectory: Trajectory | None = None

  def delta(self, piece: TextDelta) -> dict[str, str]:
    """Returns the piece as a stream's delta; {} if there is nothing to send.

    Leaves out stop strings and white space around the answer; holds back text that may
    begin either.
    """
    # Tags and white space around the answer belong to the protocol.
    if self.is_cut:
      return {}
    if piece.role != ANSWER:
      self.reasoning += piece.text
      return {"reasoning_content": piece.text}
    if piece.is_tag:
      return {}
    text = self._held + piece.text
    if not self.content:
      text = text.lstrip()
    whole, self.is_cut = _cut(text, self._stop)
    keep = 0 if self.is_cut else _held(whole, self._stop)
    new = whole[: len(whole) - keep].rstrip()
    self._held = whole[len(new) :]
    self.content += new
    if not new:
      return {}
    return {"content": new}

  def end(self, trajectory: Trajectory | None) -> dict[str, str]:
    """Takes the finished trajectory; returns the last delta.

    Raises:
      RequestRefused: the attempt was cancelled, or its sandbox is down.
    """
    if trajectory is None:
      raise RequestRefused("the server stops", None, "stopped", 503, "server_error")
    if trajectory.status == Status.INFRASTRUCTURE:
      text = "the sandbox is unavailable"
      raise RequestRefused(text, None, "infrastructure", 503, "server_error")
    self.trajectory = trajectory
    rest = self._held.rstrip()
    if self.is_cut or not rest:
      return {}
    self.content += rest
    return {"content": rest}

  @property
  def ending(self) -> dict[str, Any]:
    """Returns a finished choice's fields."""
    t = self.trajectory
    calls = []
    for call in t.calls:
      seconds = round(call.seconds, 3)
      calls.append({"name": call.name, "status": call.status, "seconds": seconds})
    seconds = round(t.usage.seconds, 3)
    is_whole = self.is_cut or t.status == Status.ENDED
    return {
      "index": self.index,
      "finish_reason": "stop" if is_whole else "length",
      "coa": {"status": t.status, "tool_calls": calls, "seconds": seconds},
    }

  @property
  def whole(self) -> dict[str, Any]:
    """Returns the choice for a response without streaming."""
    reasoning, content = self._parts
    message = {"role": "assistant", "content": content}
    message["reasoning_content"] = reasoning
    return {**self.ending, "message": message, **self.log_probs}

  @property
  def whole_text(self) -> dict[str, Any]:
    """Returns the choice for /v1/completions."""
    return {**self.ending, "text": self._parts[1], **self.text_log_probs}

  @property
  def _parts(self) -> tuple[str, str]:
    t = self.trajectory
    # Unlike a stream, a response can retract: only the last answer counts.
    if t.status != Status.ENDED:
      return self.reasoning, self.content
    before, opening, _ = t.text.rpartition(open_tag(ANSWER))
    answer, is_cut = _cut(written_answer(t.text) or "", self._stop)
    return before if opening else self.reasoning, answer.rstrip() if is_cut else answer

  @property
  def log_probs(self) -> dict[str, Any]:
    """Returns a chat choice's field `logprobs`, if requested."""
    if self._top is None:
      return {}
    out: dict[str, Any] = {}
    parts = self._tokens()
    for name, tokens in zip(("reasoning_content", "content"), parts, strict=True):
      out[name] = []
      for text, logp in tokens:
        entry = {**_named(text), "logprob": logp, "bytes": list(text)}
        out[name].append({**entry, "top_logprobs": [entry] if self._top else []})
    return {"logprobs": {**out, "refusal": None}}

  @property
  def text_log_probs(self) -> dict[str, Any]:
    """Returns the field `logprobs` for /v1/completions, or null."""
    if self._top is None:
      return {"logprobs": None}
    tokens = self._tokens()[1]
    names = [_named(text)["token"] for text, _ in tokens]
    logps = [logp for _, logp in tokens]
    offsets = []
    at = 0
    for i, name in enumerate(names):
      offsets.append(at)
      # The white space before the answer is not in the text.
      at += len(name if i else name.lstrip())
    tops = [{n: p} for n, p in zip(names, logps, strict=True)] if self._top else None
    out = {"tokens": names, "token_logprobs": logps, "text_offset": offsets}
    return {"logprobs": {**out, "top_logprobs": tops}}

  def _tokens(self) -> tuple[list[tuple[bytes, float]], list[tuple[bytes, float]]]:
    """Returns the policy's tokens (bytes, log-prob) before and in the answer."""
    # --- The last of several answers counts, as in `written_answer`.
    segments = [s for s in self.trajectory.segments if s.author == Author.POLICY]
    opening = open_tag(ANSWER).encode()
    answers = [i for i, s in enumerate(segments) if opening in self._raw(s.ids)]
    before: list[tuple[bytes, float]] = []
    answer: list[tuple[bytes, float]] = []
    content = self._parts[1].encode("utf-8", "replace")
    for i, segment in enumerate(segments[: answers[-1] + 1] if answers else segments):
      # --- The answer's position in the segment, in bytes.
      raw = self._raw(segment.ids)
      tag = begin = end = len(raw)
      if answers and i == answers[-1]:
        tag = raw.rindex(opening)
        inner = raw[tag + len(opening) :]
        begin = len(raw) - len(inner.lstrip())
        end = begin + len(content)
      at = 0
      for token, logp in zip(segment.ids, segment.logps, strict=True):
        text = self._raw([token])
        if at < tag:
          before.append((text, logp))
        elif at + len(text) > begin and at < end and begin < end:
          answer.append((text, logp))
        at += len(text)
    return before, answer


def _named(text: bytes) -> dict[str, str]:
  """Returns a token's text; an incomplete character is in OpenAI's notation."""
  try:
    return {"token": text.decode()}
  except UnicodeDecodeError:
    return {"token": "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)}


def _cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
  """Returns the text before the first stop string, and whether there is one."""
  places = [at for at in map(text.find, stop) if at >= 0]
  return (text[: min(places)], True) if places else (text, False)


def _held(text: str, stop: tuple[str, ...]) -> int:
  """Counts the text's final characters that may begin a stop string."""
  longest = max(map(len, stop), default=0) - 1
  for length in range(min(longest, len(text)), 0, -1):
    if any(each.startswith(text[-length:]) for each in stop):
      return length
  return 0


def usage(choices: Iterable[Choice], n: int = 1) -> dict[str, Any]:
  """Returns a request's token counts; a prompt of `n` attempts counts once."""
  costs = [c.trajectory.usage for c in choices]
  prompt = sum(u.prompt for u in costs[::n])
  completion = sum(u.generated for u in costs)
  return {
    "prompt_tokens": prompt,
    "completion_tokens": completion,
    "total_tokens": prompt + completion,
    "observation_tokens": sum(u.observation for u in costs),
    "prompt_tokens_details": {"cached_tokens": 0},  # no cache between requests
  }


def envelope(kind: str, model: str) -> dict[str, Any]:
  """Returns the fields common to a response's chunks; `kind` is field `object`."""
  prefix = "cmpl-" if kind == "text_completion" else "chatcmpl-"
  name = prefix + secrets.token_hex(12)
  return {"id": name, "object": kind, "created": int(time.time()), "model": model}
