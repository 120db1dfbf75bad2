"""A server's sessions: one per trajectory that its clients name."""

from __future__ import annotations

import collections
import json
import os
import threading

from starlette.requests import Request

from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rollout.agents.requests import Refused
from coa_jax.rollout.agents.sessions import Session
from coa_jax.rollout.worker import RolloutWorker

HEADER = "x-trajectory"
FILE = "trajectories.jsonl"
MOST = 1024  # open trajectories; the oldest ends first
_MAX_NAME = 200  # characters


class Recorder:
  """Opens, finds and ends a server's trajectories; thread-safe."""

  def __init__(self, worker: RolloutWorker, folder: str | None):
    """Takes the model, and the folder of ended trajectories; None records none."""
    self.worker = worker
    self._path = os.path.join(folder, FILE) if folder else None
    if folder:
      os.makedirs(folder, exist_ok=True)
    self._lock = threading.Lock()
    self._open: collections.OrderedDict[str, Session] = collections.OrderedDict()

  def __enter__(self) -> Recorder:
    return self

  def __exit__(self, *unused: object) -> None:
    """Ends all trajectories, without rewards."""
    for name in list(self._open):
      self.end(name, None)

  def find(self, request: Request) -> Session:
    """Returns the session named by the header `X-Trajectory`, or one for this request.

    Raises:
      Refused: the name is too long.
    """
    name = request.headers.get(HEADER, "")
    if len(name) > _MAX_NAME:
      raise Refused(f"{HEADER} has {len(name)} characters; at most {_MAX_NAME}")
    with self._lock:
      if name in self._open:
        self._open.move_to_end(name)
        return self._open[name]
      worker = self.worker
      assert worker.form is not None
      seed = worker.engine.config.seed
      session = Session(worker.engine, worker.tokenizer, worker.form, name, seed)
      if name:
        self._open[name] = session
      oldest = next(iter(self._open)) if len(self._open) > MOST else None
    if oldest is not None:
      self.end(oldest, None)
    return session

  def end(self, name: str, reward: float | None) -> Trajectory | None:
    """Writes a trajectory; None if no running one has this name."""
    with self._lock:
      session = self._open.pop(name, None)
    if session is None:
      return None
    trajectory = session.close()
    trajectory.reward = reward
    if self._path and trajectory.segments:
      line = json.dumps(trajectory.to_json()) + "\n"
      with self._lock, open(self._path, "a", encoding="ascii") as f:
        f.write(line)
    return trajectory
