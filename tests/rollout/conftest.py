"""Fixtures shared by the rollout tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import toy
from playing import CFG
from scripted_vllm import ScriptedVllm


@pytest.fixture(scope="session")
def novice() -> dict:
  """A half-trained policy: it calls tools and makes many kinds of mistakes."""
  return toy.train(toy.trajectories(), 60, CFG).params


@pytest.fixture
def server(tokenizer) -> Iterator[ScriptedVllm]:
  """A scripted vLLM server with the toy tokenizer."""
  with ScriptedVllm(tokenizer) as state:
    yield state
