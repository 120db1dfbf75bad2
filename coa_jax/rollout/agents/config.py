"""Config section `agent`."""

from __future__ import annotations

import dataclasses

from coa_jax.runtime.fields import PYTHON_PATH, bounded, check_fields, choice

FORMATS = ("chat", "team")


@dataclasses.dataclass(frozen=True)
class EndpointConfig:
  """Config section `agent.endpoint`: a model to evaluate behind OpenAI's API.

  Attributes:
    base_url: the URL without /chat/completions, e.g. "http://localhost:8000/v1".
    model: the model's name at the endpoint.
    key_file: a file with the API key, sent as a bearer token; None for none.
  """

  base_url: str
  model: str
  key_file: str | None = None

  def __post_init__(self):
    if not self.model:
      raise ValueError("model: name the model that the endpoint serves")


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
    endpoint: the model, in evaluation, instead of `init`; None for `init`.
  """

  path: str
  format: str = choice("chat", of=FORMATS)
  seconds: float = bounded(600.0, above=0)
  workers: int = bounded(64, least=1)
  endpoint: EndpointConfig | None = None

  def __post_init__(self):
    check_fields(self)
    if self.endpoint and self.format != "chat":
      raise ValueError("agent.endpoint takes chat messages: take agent.format='chat'")
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
