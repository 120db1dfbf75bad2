"""Config section `agent`."""

from __future__ import annotations

import dataclasses

from coa_jax.runtime.fields import PYTHON_PATH, bounded, check_fields, choice

FORMATS = ("chat", "team")


@dataclasses.dataclass(frozen=True)
class AgentConfig:
  """Config section `agent`: plays tasks by a function of the user's.

  Attributes:
    path: `module:function`, called with (task, client) and returning the answer, or a
      reward from 0 to 1; may be async. `task` is the row as a dict; `client` has
      `base_url`, `api_key` and `model` for an OpenAI client.
    format: chat writes conversations by the folder's chat template; team writes the
      protocol's spans, for models trained on them.
    seconds: maximum time of one attempt; a longer one ends as `tool_failed`.
    workers: attempts at once.
  """

  path: str
  format: str = choice("chat", of=FORMATS)
  seconds: float = bounded(600.0, above=0)
  workers: int = bounded(64, least=1)

  def __post_init__(self):
    check_fields(self)
    if not PYTHON_PATH.fullmatch(self.path):
      raise ValueError(f"agent.path {self.path!r} must be module:function")

  def check_format(self, shaping: str) -> None:
    """Refuses a reward for the protocol's form in other conversations.

    Args:
      shaping: config field `reward.shaping.format`.
    """
    if self.format == "chat" and shaping != "none":
      raise ValueError(
        f"reward.shaping.format={shaping!r} rewards the protocol's spans, which "
        "agent.format='chat' does not write: take 'none'"
      )
