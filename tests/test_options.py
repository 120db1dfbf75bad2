"""The code reads every config field."""

from __future__ import annotations

import ast
import pathlib
import textwrap

import pytest
from option_reads import Reads

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("coa_jax", "tools_sandbox", "experiments")
# Fields never read through their own class, and the reason.
ELSEWHERE = {
  "ServeConfig.vllm": "an evaluation with it is refused",
  "ServeConfig.tasks": "of an evaluation, whose config a server takes",
  "ServeConfig.reward": "likewise",
  "ServeConfig.eval": "likewise",
  "ServeConfig.agent": "likewise",
  "RolloutConfig.window": "read by Scheduler, from its device loop",
  "RolloutConfig.memory": "read through the protocol memory.CacheConfig",
  "SynthesisConfig.backend": "says whether section chat has to be there",
}


def test_every_option_is_read():
  files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
  reads = Reads(ast.parse(path.read_text(encoding="utf-8")) for path in files)
  assert len(reads.fields) > 40
  assert set(reads.unread()) == set(ELSEWHERE)


PROGRAM = """
  @dataclasses.dataclass(frozen=True)
  class PartConfig:
    size: int = 1
    name: str = ""
    def __post_init__(self):
      if self.name: raise ValueError

  @dataclasses.dataclass(frozen=True)
  class WholeConfig:
    part: PartConfig
    parts: dict[str, PartConfig] = field(default_factory=dict)

  class Work:
    def __init__(self, config: WholeConfig, other: Name):
      self._config = config
      other.name
    def run(self):
      HERE
"""


@pytest.mark.parametrize(
  ("read", "unread"),
  [
    (
      "pass",
      ["PartConfig.name", "PartConfig.size", "WholeConfig.part", "WholeConfig.parts"],
    ),
    ("self._config.part.size", ["PartConfig.name", "WholeConfig.parts"]),
    (
      "[p.name for p in self._config.parts.values() if p.size]",
      ["WholeConfig.part"],
    ),
    (
      "x = read_config(raw, WholeConfig); (x.part or x.parts['a']).size",
      ["PartConfig.name"],
    ),
  ],
)  # fmt: skip
def test_a_field_that_nothing_reads_is_found(read: str, unread: list[str]):
  """A check in `__post_init__` or another class's field of that name is not a read."""
  tree = ast.parse(textwrap.dedent(PROGRAM).replace("HERE", read))
  assert Reads([tree]).unread() == unread
