"""Plays the same episodes on a `vllm serve` instead of our own sampler.

A turn is one or several requests: all ids so far go in, sampled ids and their log-probs
come out, and our own automaton finds the turn's end; later ids are dropped. So a
trajectory equals our own sampler's result for the same samples. Given the same weights,
greedy trajectories are the same; sampled ones differ (vLLM uses its own random
numbers), and log-probs may differ by rounding or, in bfloat16, by hundredths:
`algo.loss.is_clip` corrects for that.

Each process plays its own episodes: all on one server, with weights from the first
process, or each on its own server (`vllm.serve`).

A newer policy during rollouts is loaded between requests, which are then short
(`vllm.request_tokens`): no request starts while a policy waits, so each request samples
from one policy.

budget: one state machine, from an episode to requests and back.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from coa_jax.model import decode_params
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import GREEDY_BELOW
from coa_jax.model.hf.io import save_model
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.protocol.grammar.tables import Automaton, Constraint
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.rollout.pool import ReplicaThreads
from coa_jax.rollout.types import (
  Counters,
  Episode,
  RolloutConfig,
  Timings,
  prompt_ids,
)
from coa_jax.rollout.vllm import weights
from coa_jax.rollout.vllm.client import (
  PROCESSOR,
  UnansweredError,
  VllmConfig,
  VllmError,
  VllmServer,
)
from coa_jax.rollout.vllm.process import VllmProcess

_COLDEST = 0.01  # vLLM raises lower temperatures to this one, except 0
_POLL_S = 0.05  # between two polls for episodes and a newer policy


class VllmEngine(ReplicaThreads):
  """A vLLM server as an engine; see `types.Engine`."""

  takes_tokens = False

  def __init__(self, server: VllmReplica):
    """Wraps the server's replica."""
    super().__init__(server.config, [server], name="vllm engine")
    self.server = server

  def set_policy(self, params: Any, version: int) -> None:
    """Makes the server load these parameters before further sampling.

    If there are several processes, all must call this; each waits until its server has
    the parameters.
    """
    if params is not None and jax.process_count() > 1:
      self.server.refresh(params)
    self.publish(None if params is None else [params], version)


class VllmReplica:
  """Plays episodes on one server, `rollout.slots` at a time; see `pool.Replica`."""

  def __init__(
    self,
    vllm: VllmConfig,
    model: ModelConfig,
    automaton: Automaton,
    config: RolloutConfig,
    probe: Sequence[int],
    tokenizer: Tokenizer,
    partitioner: Partitioner = ONE_DEVICE,
    constraint: Constraint | None = None,
    policy_changes: bool = False,
  ):
    """Connects to a running server; our own server starts with the first refresh.

    Args:
      probe: ids for comparing log-probs at every refresh; two or more.
      partitioner: a decoding mesh.
      policy_changes: whether newer policies arrive during episodes; requests are short
        then (`vllm.request_tokens`).

    Raises:
      ValueError: vLLM does not support `config`.
      VllmError: there is no usable server.
    """
    # --- The model and its limits.
    self.model = dataclasses.replace(model, scan=False, remat="none")
    self._whole = partitioner
    self.partitioner = partitioner.replicas()[0]
    self.config = config
    self.slots = config.slots
    self.counters = Counters()
    self.timings = Timings()
    self._vllm = dataclasses.replace(vllm, folder=os.path.abspath(vllm.folder))
    self._automaton = automaton
    self._probe = list(probe)[: weights.PROBE]
    # --- The server, and its weights.
    self._served: list[weakref.ref] = []  # arrays known to be on the server
    self._tokenizer = tokenizer
    self._constraint = constraint
    self._grammar = ""  # the constraint's file
    self._process: VllmProcess | None = None
    self._server: VllmServer | None = None
    # --- The running episodes.
    self._live: list[_Live] = []
    self._policy_changes = policy_changes
    self.clear()
    if not vllm.serve:
      self._server = self._meet()

  def _meet(self) -> VllmServer:
    masks = self._constraint is not None
    server = VllmServer(self._vllm, self.config.max_len, self.model.vocab_size, masks)
    # Requests name the tables' file, and vLLM's own process reads the file.
    if masks:
      self._grammar = _write_tables(self._vllm.folder, self._constraint)
    return server

  def clear(self) -> None:
    """Forgets all episodes; the server keeps its weights."""
    for x in self._live:
      x.cancel()
    self._live = []
    self._version: int | None = None

  def drop(self, episode: Episode) -> None:
    """Frees an episode's slot, if it has one; its request is cancelled."""
    for x in self._live:
      if x.episode is episode:
        x.cancel()
        self._live.remove(x)
        return

  def round(
    self, policy: Any, version: int, new: Sequence[Episode]
  ) -> Sequence[Episode]:
    """Starts new episodes, sends requests, and takes finished results.

    While a newer policy waits for running requests, no request is sent; tools continue.
    If all attempts at a request fail, its episode gets `lost`; the others continue.

    Raises:
      ValueError: a prompt has no room in rollout.max_len, or vLLM does not sample at an
        episode's temperature.
      VllmError: the server is gone, refuses, or does not serve the policy.
    """
    # --- Start new episodes; send requests.
    for episode in new:
      self._live.append(self._begin(episode))
    # A newer policy waits for the running requests of the older one.
    if version == self._version or not any(x.samples for x in self._live):
      began = time.monotonic()
      self.refresh(policy)
      self.timings.sync += time.monotonic() - began
      self._version = version
      for x in self._live:
        if x.future is None:
          self._ask(x)
    # --- Wait for a request or a tool.
    began = time.monotonic()
    decodes = any(x.samples for x in self._live)
    pending = [x.future for x in self._live if x.future]
    concurrent.futures.wait(
      pending,
      timeout=_POLL_S,
      return_when=concurrent.futures.FIRST_COMPLETED,
    )
    waited = time.monotonic() - began
    if decodes:
      self.timings.decode += waited
    else:
      self.timings.tools += waited
    # --- Take finished results.
    ended: list[Episode] = []
    done = [x for x in self._live if x.future and x.future.done()]
    for x in done:
      goes_on = self._sampled(x) if x.samples else self._observed(x)
      if not goes_on:
        self._live.remove(x)
        ended.append(x.episode)
    return ended

  def refresh(self, params: Any) -> None:
    """Makes the server serve `params`, and compares its log-probs with ours.

    Exports the policy, has the server load it, and clears cached prefixes. Then the
    server's log-probs of a fixed row must equal our own forward pass's, up to
    `vllm.max_logp_diff`.

    Raises:
      VllmError: the server does not load `params`, or computes different log-probs.
    """
    # --- Nothing to do if the server has exactly these arrays.
    leaves = jax.tree.leaves(params)
    known = [ref() for ref in self._served]
    if [id(x) for x in known] == [id(x) for x in leaves]:
      return
    # --- Export and load. Before the comparison nothing counts as served.
    self._served = []
    folder = self._vllm.folder
    save_model(folder, self.model, params, self._tokenizer)
    if self._server is None:
      self._start(folder)
    self._load(folder)
    # --- Compare log-probs.
    theirs = np.array(self._server.score(self._probe))
    logp_diff = float(np.mean(np.abs(theirs - self._score(params))))
    # Not `logp_diff > most`: a NaN is refused too.
    if not logp_diff <= self._vllm.max_logp_diff:
      raise VllmError(
        f"{self._vllm.url} does not compute what {folder} holds: its log-probs are off "
        f"by {logp_diff:.3g} nats on average, vllm.max_logp_diff="
        f"{self._vllm.max_logp_diff:g}. Start it anew from that folder, or raise "
        "vllm.max_logp_diff if its dtype explains this much"
      )
    # Weak: training's old policies must not stay in memory.
    self._served = [weakref.ref(x) for x in leaves]

  def _start(self, folder: str) -> None:
    """Starts our own server on the folder, and connects to it."""
    c = self._vllm
    flags = list(c.flags)
    if self._constraint:
      flags.insert(0, f"--logits-processors={PROCESSOR}")
    self._process = VllmProcess(
      c.serve,
      folder,
      self.config.max_len,
      self.model.weight_dtype or self.model.dtype,
      flags,
      c.start_s,
    )
    self._vllm = dataclasses.replace(c, url=self._process.url, serve="", flags=())
    self._server = self._meet()

  def _load(self, folder: str) -> None:
    """Makes the server load the folder; a shared server gets one request."""
    fault: VllmError | None = None
    if self._process or jax.process_index() == 0:
      try:
        self._server.load(folder)
      except VllmError as e:
        fault = e
    # All processes wait for the load, and see a failure.
    if jax.process_count() > 1:
      failed = multihost_utils.process_allgather(np.array(fault is not None))
      if fault is None and failed.any():
        fault = VllmError(f"another process's server did not load {folder}")
    if fault:
      raise fault

  def _score(self, params: Any) -> np.ndarray:
    """Returns our own log-probs of the probe's ids but the first."""
    view = decode_params.decoding_views(self.model, params, self._whole)[0]
    return weights.score(self.model, self.partitioner, view, self._probe)

  def _begin(self, episode: Episode) -> _Live:
    ids = prompt_ids(episode, self.config.max_len)
    if GREEDY_BELOW <= episode.temperature < _COLDEST:
      raise ValueError(
        f"temperature {episode.temperature:g}: vLLM would sample at {_COLDEST} in its "
        f"place, and the learner would not; make it 0 or at least {_COLDEST}"
      )
    x = _Live(episode)
    if self._constraint:
      x.grammar = self._constraint.after(episode.opening)
    self._append(x, ids)
    return x

  def _append(self, x: _Live, ids: list[int]) -> None:
    """Appends a prompt's or a tool's ids; the next turn follows them."""
    # A turn begins: the automaton restarts, the grammar continues.
    x.ids += ids
    self.counters.prefilled_tokens += len(ids)
    x.turn = []
    x.logps = []
    x.state = 0
    x.future = None

  def _room(self, x: _Live) -> int:
    return min(self.config.max_len, x.episode.limit) - len(x.ids)

  def _ask(self, x: _Live) -> None:
    """Requests the turn, or its continuation."""
    x.episode.version = self._version
    most = self._room(x)
    if self._policy_changes:
      most = min(most, self._vllm.request_tokens)
    x.samples = True
    if most < 1:
      # The episode's own limit: no request, so an empty answer at once.
      x.future = concurrent.futures.Future()
      x.future.set_result(([], []))
      return
    grammar = None
    if self._constraint:
      grammar = (self._grammar, x.grammar)
    self.counters.windows += 1
    x.future = self._server.submit(
      self._server.complete(
        list(x.ids),
        most,
        self._automaton.tags,
        x.episode.temperature,
        self.config.truncation,
        _seed(x.episode.seed, x.episode.sequence, len(x.ids)),
        grammar,
      )
    )

  def _sampled(self, x: _Live) -> bool:
    """Takes a request's samples; False if the episode is over."""
    x.samples = False
    try:
      tag = self._take(x, *x.future.result())
    except UnansweredError:
      x.episode.lost()
      return False
    x.future = None
    if tag is None:
      x.episode.progress(x.turn)
      # The request ended before the turn: the next round continues the turn.
      if self._room(x) > 0:
        return True
    self.counters.sampled_tokens += len(x.turn)
    x.future = x.episode.sampled(x.turn, x.logps, tag)
    return x.future is not None

  def _take(self, x: _Live, ids: list[int], logps: list[float]) -> str | None:
    """Appends sampled ids up to the turn's end; returns the closing tag, or None."""
    table = self._automaton
    for i, logp in zip(ids, logps, strict=True):
      stop = int(table.stop_SC[x.state, table.class_V[i]])
      x.state = int(table.next_SC[x.state, table.class_V[i]])
      # Checked although the server masks: a disallowed token would enter training.
      if self._constraint:
        x.grammar = self._constraint.states([i], x.grammar)[-1]
        if x.grammar < 0:
          raise VllmError(
            f"{self._vllm.url} sampled token {i}, which rollout.constrain does not "
            "allow there: its coa_jax.rollout.vllm.plugin is not that of this tree"
          )
      x.ids.append(i)
      x.turn.append(i)
      x.logps.append(logp)
      if stop:
        return table.tags[stop - 1]
    return None

  def _observed(self, x: _Live) -> bool:
    """Takes a tool's result; False if the episode is over."""
    ids = x.episode.observed(x.future.result())
    # As in the scheduler: at least one token can follow, so that episodes have the same
    # limits on either engine.
    if ids is not None and len(ids) > self.config.max_len - len(x.ids) - 1:
      x.episode.out_of_room()
      ids = None
    if ids is None:
      return False
    if self._constraint:
      x.grammar = int(self._constraint.resume_S[x.grammar])
    self._append(x, ids)
    return True


@dataclasses.dataclass(eq=False)
class _Live:
  """A running episode.

  Attributes:
    episode: the episode.
    ids: all ids so far.
    turn: this turn's sampled ids, with their `logps`.
    state: our automaton's state after them.
    grammar: the constraint's state, if there is one.
    future: a request's or a tool's; None before the next request.
    samples: whether `future` is a request's.
  """

  episode: Episode
  ids: list[int] = dataclasses.field(default_factory=list)
  turn: list[int] = dataclasses.field(default_factory=list)
  logps: list[float] = dataclasses.field(default_factory=list)
  state: int = 0
  grammar: int = 0
  future: concurrent.futures.Future | None = None
  samples: bool = False

  def cancel(self) -> None:
    """Cancels the running request, if any."""
    if self.samples:
      self.future.cancel()


def _seed(seed: int, sequence: int, position: int) -> int:
  """Returns a 63-bit seed for the request at a trajectory's position."""
  # Like our sampler's keys: from the position, never from the request order.
  mixed = np.random.SeedSequence((seed, sequence, position))
  return int(mixed.generate_state(1, np.uint64)[0] >> 1)


def _write_tables(folder: str, c: Constraint) -> str:
  """Writes the tables next to the folder, named by hash: servers cache by name."""
  # Written elsewhere and moved: the server may read it, other processes may write it.
  name = hashlib.sha256(c.class_V.tobytes() + c.next_SC.tobytes()).hexdigest()[:16]
  path = f"{folder}.{name}.npz"
  os.makedirs(os.path.dirname(path), exist_ok=True)
  unfinished = f"{path}.{jax.process_index()}"
  with open(unfinished, "wb") as f:
    np.savez(f, class_V=c.class_V, next_SC=c.next_SC)
  os.replace(unfinished, path)
  return path
