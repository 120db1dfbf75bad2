"""An agent's requests as one trajectory of sampled ids.

A request whose conversation continues an earlier reply continues this reply's context;
any other request begins a context of its own, a training row. So no id passes through
text, and no sampled token is trained twice.

budget: sampling one reply, and joining replies, share one record.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.tool_bodies import FunctionCall
from coa_jax.protocol.trajectory import (
  Author,
  Segment,
  Status,
  ToolCall,
  Trajectory,
  Usage,
  grammar_parts,
)
from coa_jax.rollout.agents.formats import Format
from coa_jax.rollout.agents.types import Message, Sampled, Sampling
from coa_jax.rollout.types import Engine, Episode


class NoRoom(ValueError):
  """A prompt leaves no room for a reply."""


class Closed(RuntimeError):
  """The session is over."""


class _ReplyEpisode(Episode):
  """Samples one reply; see `Episode`."""

  def __init__(
    self,
    context: Sequence[Segment],
    sampling: Sampling,
    seed: int,
    sequence: int,
    tokenizer: Tokenizer,
  ):
    """Takes the segments before the reply, and the randomness key."""
    self._prompt = [i for s in context for i in s.ids]
    self.opening = grammar_parts(context)
    self.seed = seed
    self.sequence = sequence
    self.temperature = 1.0 if sampling.temperature is None else sampling.temperature
    self.top_p = sampling.top_p
    self._most = sampling.most
    self._tokenizer = tokenizer
    self._stops = [text.encode() for text in sampling.stop]
    self._is_cut = False  # by a stop text
    self.cancelled = False  # set by other threads
    self.ids: list[int] = []
    self.logps: list[float] = []
    self.versions: list[int] = []
    self.is_whole = False

  @property
  def limit(self) -> int:
    """Returns the current token limit; 0 once the reply is complete."""
    if self._is_cut or self.cancelled:
      return 0
    if self._most is None:
      return Episode.limit
    return len(self._prompt) + self._most

  def start(self) -> list[int]:
    """Returns the prompt's ids."""
    return self._prompt

  def progress(self, ids: list[int]) -> None:
    """Looks for stop texts after a window."""
    self._date(ids)
    self._is_cut = self._end_of_stop(ids) is not None

  def _date(self, ids: list[int]) -> None:
    # Only the ids since the last call: the policy may be newer now.
    self.versions += [self.version] * (len(ids) - len(self.versions))

  def _end_of_stop(self, ids: list[int]) -> int | None:
    """Returns the number of ids up to the first stop text's end."""
    data = self._tokenizer.raw(ids)
    ends = [at + len(s) for s in self._stops if (at := data.find(s)) >= 0]
    if not ends:
      return None
    lengths = itertools.accumulate(len(self._tokenizer.raw([i])) for i in ids)
    return bisect.bisect_left(list(lengths), min(ends)) + 1

  def sampled(self, ids: list[int], logps: list[float], tag: str | None) -> None:
    """Keeps the reply, without tokens after a stop text."""
    self._date(ids)
    end = self._end_of_stop(ids)
    self.is_whole = tag is not None or end is not None
    self.ids = ids[:end]
    self.logps = logps[:end]
    self.versions = self.versions[:end]

  def observed(self, result: Any) -> None:
    """Is never called: a reply waits for no tool."""

  def out_of_room(self) -> None:
    """Is never called either."""

  def lost(self) -> None:
    """Leaves the reply empty."""


@dataclasses.dataclass(eq=False)
class _Context:
  """A growing context; `is_busy` while a reply is sampled."""

  segments: list[Segment]
  seed: int
  is_busy: bool = True


@dataclasses.dataclass
class _Replied:
  """A conversation that ends with a reply.

  Attributes:
    context: the reply's context.
    length: number of its segments, the reply's included.
    reply: the reply's ids.
    calls: the reply's calls, whose results come with the next request.
    is_ambiguous: whether another reply has the same messages.
  """

  context: _Context
  length: int
  reply: list[int]
  calls: list[ToolCall]
  is_ambiguous: bool = False


class Session:
  """Answers one agent's requests, and records them; thread-safe."""

  def __init__(
    self,
    engine: Engine,
    tokenizer: Tokenizer,
    form: Format,
    task_id: str = "",
    seed: int = 0,
    sequence: int = 0,
    sample: int = 0,
  ):
    """Begins an empty trajectory.

    Args:
      engine: samples the replies.
      tokenizer: the model's.
      form: converts messages.
      task_id: the trajectory's task.
      seed: keys the sampling, with `sequence`.
      sequence: unique under a seed.
      sample: the trajectory's number within its task.
    """
    self._engine = engine
    self._tokenizer = tokenizer
    self._form = form
    self._seed = seed
    self._sequence = sequence
    self._lock = threading.Lock()
    self._contexts: list[_Context] = []
    self._replied: dict[str, _Replied] = {}
    self._begun: dict[str, int] = {}  # contexts begun by each prompt
    self._running: set[_ReplyEpisode] = set()
    self._closed = False
    self._began = time.monotonic()
    self.trajectory = Trajectory(task_id, sample=sample)
    self.trajectory.meta["ambiguous_joins"] = 0
    self._turns = 0  # replies with calls
    self.overflowed = False  # whether a request left too little room for a reply

  def complete(
    self, messages: Sequence[Message], tools: Sequence[Any], sampling: Sampling
  ) -> concurrent.futures.Future[Sampled]:
    """Samples a reply to a conversation.

    Args:
      messages: `{"role", "content", ...}`, content a text; an assistant's message may
        have `calls`, `FunctionCall`s.
      tools: OpenAI's tools.
      sampling: how to sample.

    Raises:
      ValueError: the conversation can not be written.
      NoRoom: it leaves no room for a reply.
      Closed: the session is over, or the engine is closed.
    """
    keys = _keys(messages, tools)
    # --- The context: an earlier reply's, or a new one.
    with self._lock:
      if self._closed:
        raise Closed("this trajectory is over")
      found = self._find(messages, keys)
    if found is None:
      before = None
      new = self._form.prompt(messages, tools)
    else:
      replied, before = found
      new = self._form.continuation(messages, tools, replied, before.reply)
      results = [m["content"] for m in messages[replied + 1 :] if m["role"] == "tool"]
      for call, text in zip(before.calls, results, strict=False):
        call.result = text
    with self._lock:
      if self._closed:
        raise Closed("this trajectory is over")
      context = self._context_for(before, new)
    return self._sample(context, keys[-1], tools, sampling)

  def complete_ids(
    self, ids: Sequence[int], sampling: Sampling
  ) -> concurrent.futures.Future[Sampled]:
    """Samples a continuation of a prompt's ids; otherwise as `complete`.

    A prompt that begins with all ids of a context continues the context.

    Raises:
      ValueError: there is no id, or the tokenizer has no such id.
    """
    most = self._tokenizer.vocab_size - 1
    if not ids or not all(0 <= i <= most for i in ids):
      raise ValueError(f"prompt must be ids from 0 to {most}, at least one")
    with self._lock:
      if self._closed:
        raise Closed("this trajectory is over")
      context = self._continued_by(list(ids))
    return self._sample(context, _hash(list(ids)), (), sampling)

  def _continued_by(self, ids: list[int]) -> _Context:
    """Returns the context that a prompt continues, or a new one."""
    for context in self._contexts:
      known = [i for s in context.segments for i in s.ids]
      if context.is_busy or ids[: len(known)] != known:
        continue
      rest = ids[len(known) :]
      if rest:
        text = self._tokenizer.decode(rest)
        context.segments.append(Segment(Author.TOOL, "", text, rest))
      context.is_busy = True
      return context
    text = self._tokenizer.decode(ids)
    return self._begin([Segment(Author.PROMPT, "question", text, ids)])

  def _sample(
    self,
    context: _Context,
    asked: str,
    tools: Sequence[Any],
    sampling: Sampling,
  ) -> concurrent.futures.Future[Sampled]:
    """Samples a context's next reply.

    Args:
      context: ends with the prompt, and is busy.
      asked: the conversation's hash.
      tools: OpenAI's tools.
      sampling: how to sample.
    """
    try:
      prompt = sum(len(s.ids) for s in context.segments)
      limit = self._engine.config.max_len
      if prompt >= limit:
        self.overflowed = True
        raise NoRoom(
          f"a prompt of {prompt} tokens leaves no room in the {limit} of a context "
          "(rollout.max_len)"
        )
      # --- The reply.
      sampling = self.adapted(sampling)
      seed = (context.seed + sampling.seed) % 2**32
      episode = _ReplyEpisode(
        context.segments, sampling, seed, self._sequence, self._tokenizer
      )
      # Submitted under the lock, so that `close` finds and cancels it.
      with self._lock:
        if self._closed:
          raise Closed("this trajectory is over")
        try:
          future = self._engine.submit(episode)
        except RuntimeError as e:
          raise Closed(str(e)) from e
        self._running.add(episode)
    except (NoRoom, Closed):
      context.is_busy = False
      raise
    out: concurrent.futures.Future[Sampled] = concurrent.futures.Future()
    ended = functools.partial(
      self._ended, episode, context, asked, tools, sampling, prompt, out
    )
    future.add_done_callback(ended)
    return out

  def adapted(self, sampling: Sampling) -> Sampling:
    """Returns how a request is sampled; a subclass may decide."""
    return sampling

  def _find(
    self, messages: Sequence[Message], keys: Sequence[str]
  ) -> tuple[int, _Replied] | None:
    """Finds the last of the conversation's messages that is a recorded reply."""
    for n in range(len(messages) - 2, -1, -1):  # a reply comes before the last message
      if messages[n]["role"] == "assistant" and keys[n] in self._replied:
        return n, self._replied[keys[n]]
    return None

  def _context_for(self, before: _Replied | None, new: list[Segment]) -> _Context:
    """Continues an earlier reply's context, or begins one."""
    if before is None:
      return self._begin(new)
    context = before.context
    is_last = len(context.segments) == before.length and not context.is_busy
    if is_last and not before.is_ambiguous:
      context.is_busy = True
      context.segments += new
      return context
    # The earlier tokens are trained in their own context.
    self.trajectory.meta["ambiguous_joins"] += before.is_ambiguous
    repeated = []
    for s in context.segments[: before.length]:
      author = s.author if s.author == Author.PROMPT else Author.CARRIED
      repeated.append(dataclasses.replace(s, author=author, logps=[], versions=[]))
    return self._begin([*repeated, *new])

  def _begin(self, segments: list[Segment]) -> _Context:
    # Keyed by its prompt, not by order, so that requests made together get the same
    # replies in any order.
    key = _hash([s.ids for s in segments])
    number = self._begun.get(key, 0)
    self._begun[key] = number + 1
    seed = int(_hash([self._seed, key, number])[:8], 16)
    context = _Context(segments, seed)
    self._contexts.append(context)
    return context

  def _ended(
    self,
    episode: _ReplyEpisode,
    context: _Context,
    asked: str,
    tools: Sequence[Any],
    sampling: Sampling,
    prompt: int,
    out: concurrent.futures.Future[Sampled],
    future: concurrent.futures.Future[Episode],
  ) -> None:
    """Records a reply. Runs in the engine's thread."""
    error = future.exception()
    with self._lock:
      self._running.discard(episode)
      if error is None and not self._closed:
        context.segments += self._tokenizer.policy_segments(
          episode.ids, episode.logps, episode.versions
        )
      context.is_busy = False
      filled = prompt + len(episode.ids) >= self._engine.config.max_len
      self.overflowed |= filled and not episode.is_whole
    dropped = error is None and not episode.ids
    if dropped or isinstance(error, concurrent.futures.CancelledError):
      error = Closed("the reply was dropped")
    if error is not None:
      out.set_exception(error)
      return
    # --- The reply's message, found again when the agent sends it back.
    text = self._tokenizer.decode(episode.ids)
    for stop in sampling.stop:
      text = text.partition(stop)[0]
    try:
      reply = self._form.parse(text, tools)
      calls = [ToolCall(c.name, self._form.written(c)) for c in reply.calls]
    except Exception as e:  # else the request would wait for ever
      out.set_exception(e)
      return
    message = {"role": "assistant", "content": reply.content, "calls": reply.calls}
    key = _hash([asked, _canonical(message)])
    with self._lock:
      if not self._closed:
        self.trajectory.calls += calls
        self._turns += bool(calls)
      if key in self._replied:
        self._replied[key].is_ambiguous = True
      else:
        length = len(context.segments)
        self._replied[key] = _Replied(context, length, episode.ids, calls)
    ids, logps = episode.ids, episode.logps
    out.set_result(Sampled(reply, text, ids, logps, episode.is_whole, prompt))

  def close(self) -> Trajectory:
    """Ends the session: drops running replies, and returns the trajectory.

    Its status is `truncated` if a request or a reply found no room, otherwise `ended`.
    """
    with self._lock:
      self._closed = True
      running = list(self._running)
    for episode in running:
      episode.cancelled = True
      self._engine.cancel(episode)
    # --- All contexts with a reply. No thread changes them now.
    t = self.trajectory
    t.segments = []
    for context in self._contexts:
      segments = context.segments
      while segments and segments[-1].author != Author.POLICY:
        segments = segments[:-1]  # not followed by a reply
      t.segments += segments
    t.status = Status.TRUNCATED if self.overflowed else Status.ENDED
    # --- Its cost.
    t.usage = usage = Usage()
    for context in t.split() if t.segments else ():
      usage.model_calls += 1
      for s in context.segments:
        if s.author == Author.POLICY:
          usage.generated += len(s.ids)
        elif s.author == Author.TOOL:
          usage.observation += len(s.ids)
        else:
          usage.prompt += len(s.ids)
    usage.tool_calls = len(t.calls)
    usage.tool_turns = self._turns
    usage.seconds = time.monotonic() - self._began
    return t


def _keys(messages: Sequence[Message], tools: Sequence[Any]) -> list[str]:
  """Returns a hash of the conversation up to each message."""
  out: list[str] = []
  key = _hash(list(tools))
  for message in messages:
    key = _hash([key, _canonical(message)])
    out.append(key)
  return out


def _canonical(message: Message) -> list[Any]:
  """Returns a message's parts that agents send back as they came."""
  calls: Sequence[FunctionCall] = message.get("calls") or ()
  named = [[call.name, dict(call.arguments)] for call in calls]
  return [message["role"], (message["content"] or "").strip(), named]


def _hash(value: Any) -> str:
  text = json.dumps(value, sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
