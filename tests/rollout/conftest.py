"""What several files of this folder start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import toy
from playing import CFG
from scripted_vllm import ScriptedVllm


@pytest.fixture(scope="session")
def novice() -> dict:
  """A policy between untrained and trained: it calls tools, and errs in many ways."""
  return toy.train(toy.trajectories(), 60, CFG).params


@pytest.fixture
def server(tokenizer) -> Iterator[ScriptedVllm]:
  """A scripted vLLM over the toy tokenizer."""
  with ScriptedVllm(tokenizer) as state:
    yield state
