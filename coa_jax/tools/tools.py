"""The tools a policy may call: their config, and one class per tool.

There are two ways to add a tool. An entry of `tools.functions` needs no code here; the
policy calls it by name in the tag `tool`. A new tag needs a row of
`protocol.tools.SPECS`, a class here, and a line in `TOOLS`. See docs/extending.md.

budget: config and classes refer to each other.
"""

from __future__ import annotations

import dataclasses
import logging

from coa_jax.protocol import roles
from coa_jax.protocol.tool_bodies import FUNCTION_NAME, parse_code
from coa_jax.protocol.tools import FUNCTION_TAG
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.runtime.fields import bounded, check_fields, choice
from coa_jax.tools.code_session import CodeSession, SandboxSession
from coa_jax.tools.environments import EnvironmentConfig, EnvironmentSession
from coa_jax.tools.functions import Functions, FunctionTool
from tools_sandbox.client import BACKENDS, Sandbox
from tools_sandbox.faults import BadCall, ToolFault, Unavailable
from tools_sandbox.jail.wire import Result, Verdict
from tools_sandbox.mcp_client import McpConfig, McpTool
from tools_sandbox.search.index import Hit
from tools_sandbox.search.retrieve import Retriever
from tools_sandbox.service.remote import RemoteConfig
from tools_sandbox.web.crawl import CrawlConfig, Crawler
from tools_sandbox.web.vision import Inspector, VisionConfig
from tools_sandbox.web.web_search import BLOCKED, WebConfig, WebSearch

_LOST = "\n[variables are lost; the next program starts afresh]"
_LOST_BEFORE = "[variables of earlier programs were lost]\n"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ToolsConfig:
  """Config section `tools`.

  Attributes:
    tools: tags of the policy's tools.
    corpus: JSON-lines pages for `wiki_search` (rows of id, title, text), and for
      `web_search` if `web` has no endpoint.
    retriever: the URL of a Search-R1 `/retrieve` server for `wiki_search`, instead of
      the corpus.
    top_k: pages returned per search.
    descriptions: tag -> the tool's description in the prompt, instead of the
      protocol's; without tags and newlines.
    timeout_s: wall seconds one call may take.
    timeouts: tag -> another `timeout_s` for this tool.
    grace_s: additional seconds before a call without an answer is abandoned; long
      enough for a sandbox process to start on a busy machine.
    sandbox: jail (for hostile programs), subprocess (contains accidents only) or remote
      (services run them); tools_sandbox/README.md lists the limits of each.
    remote: the services, if `sandbox` is remote; set `workers` to their number of
      slots. Its `wait_s` must be below `grace_s`.
    session: True gives each trajectory's `code` calls one session: variables live from
      call to call, until it ends. Not with sandbox='subprocess'.
    max_sessions: trajectories with a session at once; another trajectory's first
      program waits, outside its time limit. Each session is a sandbox process (or a
      service slot).
    memory_mb: memory one program may use, in MiB.
    workers: programs running at once; other tools run without a limit. A sleeping
      program keeps its place, so use more than the number of cores.
    max_chars: the maximum length of a result, in characters (head and tail are kept);
      `rollout.observation_tokens` limits the part read by the policy.
    enabled: False answers every call with "tools are off", to measure the model alone.
    blocked: domains never shown or read, against leaked benchmarks.
    web: the settings of `web_search`.
    crawl: the settings of `crawl_page`.
    vision: the settings of `visual_inspector`, which needs an endpoint.
    mcp: tag -> an MCP server's tool, instead of ours.
    functions: name -> a tool without its own tag, called in the tag `tool`.
    parallel: maximum calls in one `tool` span; above 1 the span may have a JSON list of
      calls, which run at the same time. Programs in a session and an environment's
      functions, which change a state, are called alone.
    environment: a tool with a state; its functions are called in the tag `tool` too.
  """

  tools: tuple[str, ...] = ("wiki_search", "code")
  corpus: str | None = None
  retriever: str | None = None
  top_k: int = bounded(3, least=1)
  descriptions: dict[str, str] = dataclasses.field(default_factory=dict)
  timeout_s: float = bounded(7.0, above=0)
  timeouts: dict[str, float] = dataclasses.field(default_factory=dict)
  grace_s: float = bounded(10.0, above=0)
  sandbox: str = choice("jail", of=BACKENDS)
  remote: RemoteConfig | None = None
  session: bool = False
  max_sessions: int = bounded(32, least=1)
  memory_mb: int = 1024
  workers: int = bounded(2, least=1)
  max_chars: int = bounded(16384, least=64)
  enabled: bool = True
  blocked: tuple[str, ...] = BLOCKED
  web: WebConfig = dataclasses.field(default_factory=WebConfig)
  crawl: CrawlConfig = dataclasses.field(default_factory=CrawlConfig)
  vision: VisionConfig | None = None
  mcp: dict[str, McpConfig] = dataclasses.field(default_factory=dict)
  functions: dict[str, FunctionTool] = dataclasses.field(default_factory=dict)
  parallel: int = bounded(1, least=1, most=8)
  environment: EnvironmentConfig | None = None

  def __post_init__(self):
    check_fields(self)
    # --- Known tags.
    for field in ("tools", "descriptions", "timeouts", "mcp"):
      for tool in getattr(self, field):
        if tool not in TOOLS:
          raise ValueError(f"{field}: no tool {tool!r}; there are {', '.join(TOOLS)}")

    # --- A tool's description is one line of the prompt, and opens no tag.
    descriptions = [*self.descriptions.values()]
    descriptions += self.named.values()
    for text in descriptions:
      if not text.strip() or "\n" in text or roles.find_tag(text):
        raise ValueError(f"descriptions: one line without a tag, not {text[:60]!r}")

    # --- Each tool's requirements, unless an MCP server replaces the tool.
    for tag in self.tags:
      if tag not in self.mcp:
        TOOLS[tag].check(self)

    # --- The sandbox.
    if self.session and self.sandbox == "subprocess":
      raise ValueError(
        "session: sandbox='jail' and 'remote' have sessions, not this one"
      )
    if (self.sandbox == "remote") != (self.remote is not None):
      raise ValueError("remote: the services of sandbox='remote', and of no other")
    if self.remote is not None and self.remote.wait_s >= self.grace_s:
      # Otherwise an unavailable service would look like a hanging program.
      raise ValueError(
        f"remote.wait_s={self.remote.wait_s:g} must be below grace_s={self.grace_s:g}"
      )

    # --- The environment.
    if self.environment is not None:
      for name in self.environment.functions:
        if name in self.functions:
          raise ValueError(f"environment.functions: {name!r} is in functions too")
      if self.environment.jail and self.sandbox == "subprocess":
        raise ValueError(
          "environment.jail: sandbox='jail' and 'remote' have sessions, not this one"
        )

    # --- Values of `timeouts`, which no field bound covers.
    for tag, seconds in self.timeouts.items():
      if seconds <= 0:
        raise ValueError(f"timeouts.{tag} is {seconds}; it must be above 0")

  @property
  def tool_descriptions(self) -> dict[str, str]:
    """Tag -> description, in order, for `Variant.with_tools`; "" means the protocol's.

    Each function has the key `tool:NAME`.
    """
    out = {}
    for tag in self.tags:
      out[tag] = self.descriptions.get(tag, "")
    for name, description in self.named.items():
      out[f"{FUNCTION_TAG}:{name}"] = description
    return out

  @property
  def named(self) -> dict[str, str]:
    """Functions called by name -> description: the environment's, and the others."""
    out = {name: function.description for name, function in self.functions.items()}
    if self.environment is not None:
      out |= self.environment.functions
    return out

  @property
  def tags(self) -> tuple[str, ...]:
    """Tags a policy may call, with `tool` for functions."""
    # All functions are called in one tag.
    if (self.named or self.parallel > 1) and FUNCTION_TAG not in self.tools:
      return (*self.tools, FUNCTION_TAG)
    return self.tools


class Tool:
  """Answers one tag's calls, from several threads at once."""

  @classmethod
  def reads_corpus(cls, config: ToolsConfig) -> bool:
    """Whether the tool searches the corpus; if so, the sandbox opens the index."""
    del config
    return False

  @classmethod
  def check(cls, config: ToolsConfig) -> None:
    """Refuses a config without the tool's requirements.

    Raises:
      ValueError: a requirement is missing; the message names the field.
    """

  def __init__(self, config: ToolsConfig, sandbox: Sandbox):
    """Opens the tool's resources.

    Raises:
      ValueError, Unavailable: a key, folder, package or server is missing.
    """

  def __call__(self, content: str, seconds: float) -> str | tuple[CallStatus, str]:
    """Answers a call.

    Args:
      content: the span's content, already checked by `ToolSpec.find_fault`.
      seconds: the time limit.

    Raises:
      BadCall, ToolFault, Unavailable: a failure of model, tool or infrastructure.
    """
    raise NotImplementedError

  def close(self) -> None:
    """Frees the tool's resources."""


class WikiSearchTool(Tool):
  """Searches the corpus, or asks the retriever."""

  @classmethod
  def reads_corpus(cls, config: ToolsConfig) -> bool:
    """True without a retriever."""
    return config.retriever is None

  @classmethod
  def check(cls, config: ToolsConfig) -> None:
    """Requires a corpus or a retriever, not both."""
    if config.corpus is not None and config.retriever is not None:
      raise ValueError("wiki_search asks either a corpus or a retriever, not both")
    if config.corpus is None and config.retriever is None:
      raise ValueError("corpus: wiki_search needs the path of a JSON-lines corpus")

  def __init__(self, config: ToolsConfig, sandbox: Sandbox):
    self._k = config.top_k
    self._sandbox = sandbox
    self._remote = None if config.retriever is None else Retriever(config.retriever)

  def __call__(self, content: str, seconds: float) -> str:
    query = content.strip()
    if self._remote is None:  # takes less than milliseconds
      return self._text(self._sandbox.search(query, self._k))
    return self._text(self._remote.search(query, self._k, seconds))

  def _text(self, hits: list[Hit]) -> str:
    if not hits:
      return "no result"
    lines = []
    for number, hit in enumerate(hits, 1):
      page = hit.document.text
      if not page.startswith(hit.document.title):
        page = f"{hit.document.title}: {page}"
      if self._k == 1:  # a list of one needs no number
        return page
      lines.append(f"{number}. {page}")
    return "\n".join(lines)

  def close(self) -> None:
    """Ends the connection to the retriever."""
    if self._remote is not None:
      self._remote.close()


class CodeTool(Tool):
  """Runs programs."""

  def __init__(self, config: ToolsConfig, sandbox: Sandbox):
    self._memory_mb = config.memory_mb
    self._sandbox = sandbox

  def __call__(self, content: str, seconds: float) -> tuple[CallStatus, str]:
    call = parse_code(content)
    assert call is not None  # ToolSpec.find_fault has refused every other body
    result = self._sandbox.run(
      call.program,
      call.stdin,
      timeout_s=seconds,
      memory_mb=self._memory_mb,
    )
    return self._read(result, seconds)

  def in_session(
    self, session: CodeSession, content: str, seconds: float
  ) -> tuple[CallStatus, str]:
    """Runs a call in its trajectory's session; opens a session if needed.

    If an earlier session was lost, the observation says so in one line.
    """
    call = parse_code(content)
    assert call is not None
    note = ""
    # --- Run the program in the open session, or in a new one.
    try:
      result = session.run(call.program, call.stdin)
      if result is None:  # the first call, or the last session has ended
        if session.lost:
          note = _LOST_BEFORE
        session.open(self._open, seconds)
        result = session.run(call.program, call.stdin)
    except (TimeoutError, RuntimeError) as e:
      _log.warning("no session: %s", e)
      return CallStatus.INFRASTRUCTURE, "error: the sandbox is unavailable"
    if result is None:
      return CallStatus.INFRASTRUCTURE, "error: the session has gone"
    # --- The observation, which must tell the model about lost variables.
    status, text = self._read(result, session.seconds)
    if session.lost and status != CallStatus.INFRASTRUCTURE:
      text += _LOST
    return status, note + text

  def _open(self, seconds: float) -> SandboxSession:
    return self._sandbox.session(seconds, self._memory_mb, wait_s=seconds)

  def _read(self, result: Result, seconds: float) -> tuple[CallStatus, str]:
    out = result.stdout.strip()
    if result.verdict == Verdict.OK:
      return CallStatus.OK, out or "no output; print what you want to see"
    if result.verdict == Verdict.INFRASTRUCTURE:
      return CallStatus.INFRASTRUCTURE, "error: the sandbox is unavailable"
    if result.verdict == Verdict.TIMEOUT:
      return CallStatus.TOOL, f"{out}\nerror: stopped after {seconds:.3g} s".strip()
    if result.verdict == Verdict.MEMORY:
      return CallStatus.TOOL, f"{out}\nerror: more than {self._memory_mb} MB".strip()
    # The program itself failed: the model reads the traceback and can fix the program.
    return CallStatus.MODEL, f"{out}\nerror: {result.stderr.strip()}".strip()


class _Delegating(Tool):
  """A tool delegating to `_inner`, which `__init__` opens."""

  _inner: WebSearch | Crawler | Inspector | Functions

  def __call__(self, content: str, seconds: float) -> str:
    return self._inner(content, seconds)

  def close(self) -> None:
    self._inner.close()


class WebSearchTool(_Delegating):
  """Searches the web, or the corpus if `web` has no endpoint."""

  @classmethod
  def reads_corpus(cls, config: ToolsConfig) -> bool:
    """True without an endpoint."""
    return config.web.endpoint is None

  @classmethod
  def check(cls, config: ToolsConfig) -> None:
    """Requires an endpoint or a corpus."""
    if config.corpus is None and config.web.endpoint is None:
      raise ValueError("web: web_search needs web.endpoint, or a corpus to be offline")

  def __init__(self, config: ToolsConfig, sandbox: Sandbox):
    self._inner = WebSearch(config.web, config.blocked, sandbox.search)


class CrawlPageTool(_Delegating):
  """Reads web pages."""

  def __init__(self, config: ToolsConfig, sandbox: Sandbox):
    del sandbox
    self._inner = Crawler(config.crawl, config.blocked)


class VisualInspectorTool(_Delegating):
  """Asks a model about an image."""

  @classmethod
  def check(cls, config: ToolsConfig) -> None:
    """Requires a model's endpoint."""
    if config.vision is None:
      raise ValueError("vision: visual_inspector needs vision.chat, an endpoint")

  def __init__(self, config: ToolsConfig, sandbox: Sandbox):
    del sandbox
    assert config.vision is not None  # refused by `check`
    self._inner = Inspector(config.vision, config.blocked)


class FunctionsTool(_Delegating):
  """Calls a config's functions by name."""

  @classmethod
  def check(cls, config: ToolsConfig) -> None:
    """Requires functions, with names allowed in a call."""
    if not config.named and config.parallel == 1:
      raise ValueError("tools: 'tool' needs an entry in `functions`, or `environment`")
    for name in config.functions:
      if not FUNCTION_NAME.fullmatch(name):
        raise ValueError(f"functions: {name!r} must match {FUNCTION_NAME.pattern}")

  def __init__(self, config: ToolsConfig, sandbox: Sandbox):
    del sandbox
    self._inner = Functions(config.functions, config.named)


# Tag in `protocol.tools.SPECS` -> class.
TOOLS: dict[str, type[Tool]] = {
  "wiki_search": WikiSearchTool,
  "web_search": WebSearchTool,
  "crawl_page": CrawlPageTool,
  "code": CodeTool,
  "visual_inspector": VisualInspectorTool,
  FUNCTION_TAG: FunctionsTool,
}


def open_tool(name: str, config: ToolsConfig, sandbox: Sandbox) -> Tool | McpTool:
  """Opens the tool behind a tag; close it after use.

  Raises:
    ValueError: a key, folder, package or server is missing.
  """
  try:
    if name in config.mcp:
      return McpTool(config.mcp[name])
    return TOOLS[name](config, sandbox)
  # The messages name the missing requirement, but not the tool.
  except (ValueError, Unavailable) as e:
    raise ValueError(f"tool {name}: {e}") from e


def run_tool(
  tool: Tool | McpTool | EnvironmentSession, content: str, seconds: float
) -> tuple[CallStatus, str]:
  """Makes a call and classifies failures.

  Args:
    tool: an open tool, or a trajectory's environment.
    content: the call's content, well-formed by the protocol.
    seconds: the time limit.
  """
  # A tool's three exceptions give the cause; any other is left to the toolbox.
  try:
    result = tool(content, seconds)
  except BadCall as e:
    return CallStatus.MODEL, f"error: {e}"
  except ToolFault as e:
    return CallStatus.TOOL, f"error: {e}"
  except Unavailable as e:
    _log.warning("a tool is down: %s", e)
    return CallStatus.INFRASTRUCTURE, "error: the tool is unavailable"
  if isinstance(result, tuple):  # the tool classifies failures itself
    return result
  return CallStatus.OK, result
