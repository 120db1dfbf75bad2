"""The tools a policy may call, by tag: their config, and what opens each.

To add a tool: an entry of `tools.named`, no code (the policy calls it by name, in the
tag `tool`); or a function under a tag of its own in `OPEN`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from coa_jax.protocol import roles, tool_bodies
from coa_jax.protocol.tools import FUNCTION_TAG
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.tools.code_session import Cells
from coa_jax.tools.functions import NamedTool, NamedTools
from tools_sandbox.client import (
  BACKENDS,
  BLOCKED,
  BadCall,
  CrawlConfig,
  Crawler,
  Hit,
  Inspector,
  McpConfig,
  McpTool,
  RemoteConfig,
  RemoteSession,
  Result,
  Retriever,
  Sandbox,
  Session,
  ToolFault,
  Unavailable,
  Verdict,
  VisionConfig,
  WebConfig,
  WebSearch,
)

_LOST = "\n[variables are lost; the next program starts afresh]"
_LOST_BEFORE = "[variables of earlier programs were lost]\n"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ToolsConfig:
  """Config section `tools`.

  Attributes:
    tools: tags of the tools a policy may call.
    corpus: JSON-lines pages that `wiki_search` searches (rows of id, title, text), and
      `web_search` where `web` names no endpoint.
    retriever: the URL of a Search-R1 `/retrieve` server that `wiki_search` asks, in
      place of the corpus.
    top_k: pages returned per search.
    descriptions: tag -> what the prompt says of the tool, in place of the protocol's
      own words; no tag and no newline in it.
    timeout_s: wall seconds one call may take.
    timeouts: the same for single tools, by tag, where it is another.
    grace_s: seconds beyond those after which a call without an answer is given up;
      long enough for a sandbox process to start on a busy machine.
    sandbox: jail, for programs that may be hostile, subprocess, which contains
      accidents only, or remote, services that run them; what each does not cover is
      in tools_sandbox/README.md.
    remote: the services, where `sandbox` is remote; give `workers` as many as they
      have slots. Its `wait_s` must be below `grace_s`.
    session: True gives each trajectory's `code` calls one session: variables live from
      call to call, until it ends. Not with sandbox='subprocess'.
    max_sessions: trajectories that may hold one at once; the first program of another
      waits, on nobody's clock. Each is a sandbox process (or a slot of the services).
    memory_mb: memory one program may use, in MiB.
    workers: programs that run at once; other tools run as they are called. A program
      that sleeps keeps its place, so give more places than there are cores.
    max_hung: calls given up and still running at which the tools count as down.
    max_chars: a result is cut to this many characters (head and tail are kept);
      `rollout.observation_tokens` says how much of it a policy reads.
    enabled: False answers every call with "tools are off": what a model can do alone.
    blocked: domains that no tool shows or reads, against leaked benchmarks.
    web: how `web_search` searches.
    crawl: how `crawl_page` reads.
    vision: how `visual_inspector` looks; it needs an endpoint.
    mcp: tag -> the tool of an MCP server that answers it, in place of ours.
    named: name -> a tool without a tag of its own, called in the tag `tool`.
  """

  tools: tuple[str, ...] = ("wiki_search", "code")
  corpus: str | None = None
  retriever: str | None = None
  top_k: int = 3
  descriptions: dict[str, str] = dataclasses.field(default_factory=dict)
  timeout_s: float = 7.0
  timeouts: dict[str, float] = dataclasses.field(default_factory=dict)
  grace_s: float = 10.0
  sandbox: str = "jail"
  remote: RemoteConfig | None = None
  session: bool = False
  max_sessions: int = 32
  memory_mb: int = 1024
  workers: int = 2
  max_hung: int = 64
  max_chars: int = 16384
  enabled: bool = True
  blocked: tuple[str, ...] = BLOCKED
  web: WebConfig = dataclasses.field(default_factory=WebConfig)
  crawl: CrawlConfig = dataclasses.field(default_factory=CrawlConfig)
  vision: VisionConfig | None = None
  mcp: dict[str, McpConfig] = dataclasses.field(default_factory=dict)
  named: dict[str, NamedTool] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for field in ("tools", "descriptions", "timeouts", "mcp"):
      for tool in getattr(self, field):
        if tool not in OPEN:
          raise ValueError(f"{field}: no tool {tool!r}; there are {', '.join(OPEN)}")
    for name in self.named:
      if not tool_bodies.FUNCTION_NAME.fullmatch(name):
        raise ValueError(
          f"named: {name!r} must match {tool_bodies.FUNCTION_NAME.pattern}"
        )
    if FUNCTION_TAG in self.tools and not self.named:
      raise ValueError("tools: 'tool' needs an entry in `named`")
    told = [*self.descriptions.values(), *(n.description for n in self.named.values())]
    for text in told:
      if not text.strip() or "\n" in text or roles.find_tag(text):
        raise ValueError(f"descriptions: one line without a tag, not {text[:60]!r}")
    ours = set(self.tools) - set(self.mcp)
    if self.corpus is not None and self.retriever is not None:
      raise ValueError("wiki_search asks either a corpus or a retriever, not both")
    if "wiki_search" in ours and self.corpus is None and self.retriever is None:
      raise ValueError("corpus: wiki_search needs the path of a JSON-lines corpus")
    if "web_search" in ours and self.corpus is None and self.web.endpoint is None:
      raise ValueError("web: web_search needs web.endpoint, or a corpus to be offline")
    if "visual_inspector" in ours and self.vision is None:
      raise ValueError("vision: visual_inspector needs vision.chat, an endpoint")
    if self.sandbox not in BACKENDS:
      raise ValueError(f"sandbox {self.sandbox!r}; accepted: {', '.join(BACKENDS)}")
    if self.session and self.sandbox == "subprocess":
      raise ValueError(
        "session: sandbox='jail' and 'remote' have sessions, not this one"
      )
    if self.max_sessions < 1:
      raise ValueError(f"max_sessions must be at least 1, got {self.max_sessions}")
    if (self.sandbox == "remote") != (self.remote is not None):
      raise ValueError("remote: the services of sandbox='remote', and of no other")
    if self.remote is not None and self.remote.wait_s >= self.grace_s:
      # Else a service that is down would look like a program that hangs.
      raise ValueError(
        f"remote.wait_s={self.remote.wait_s:g} must be below grace_s={self.grace_s:g}"
      )
    if min(self.top_k, self.workers, self.max_hung) < 1 or self.max_chars < 64:
      raise ValueError(
        "top_k, workers and max_hung must be at least 1, max_chars at least 64"
      )
    if min(self.timeout_s, self.grace_s, *self.timeouts.values()) <= 0:
      raise ValueError("timeout_s and grace_s must be above 0")

  @property
  def told(self) -> dict[str, str]:
    """Tag -> what the prompt says of it, "" for the protocol's words; in order."""
    told = {tool: self.descriptions.get(tool, "") for tool in self.tags}
    return told | {
      f"{FUNCTION_TAG}:{name}": tool.description for name, tool in self.named.items()
    }

  @property
  def tags(self) -> tuple[str, ...]:
    """Tags of the tools that a policy may call: `tool` too, where some are named."""
    added = bool(self.named) and FUNCTION_TAG not in self.tools
    return (*self.tools, *((FUNCTION_TAG,) if added else ()))


class Tool(Protocol):
  """A tool that is ready for calls, from several threads at once."""

  def __call__(self, content: str, seconds: float) -> str | tuple[CallStatus, str]:
    """The result of a call; BadCall, ToolFault or Unavailable says what went wrong."""
    ...

  def close(self) -> None:
    """Frees what it holds."""
    ...


class _WikiSearch:
  """Searches the corpus, or asks the retriever."""

  def __init__(self, config: ToolsConfig, sandbox: Sandbox):
    self._k, self._sandbox = config.top_k, sandbox
    self._remote = None if config.retriever is None else Retriever(config.retriever)

  def __call__(self, content: str, seconds: float) -> str:
    query = content.strip()
    if self._remote is None:  # it computes for less than milliseconds
      return self._text(self._sandbox.search(query, self._k))
    return self._text(self._remote.search(query, self._k, seconds))

  def _text(self, hits: list[Hit]) -> str:
    if not hits:
      return "no result"
    pages = []
    for hit in hits:
      title, text = hit.document.title, hit.document.text
      pages.append(text if text.startswith(title) else f"{title}: {text}")
    if self._k == 1:
      return pages[0]
    return "\n".join(f"{i}. {p}" for i, p in enumerate(pages, 1))

  def close(self) -> None:
    if self._remote is not None:
      self._remote.close()


class _Code:
  """Runs programs."""

  def __init__(self, config: ToolsConfig, sandbox: Sandbox):
    self._memory_mb, self._sandbox = config.memory_mb, sandbox
    self._local = config.remote is None

  def __call__(self, content: str, seconds: float) -> tuple[CallStatus, str]:
    call = tool_bodies.parse_code(content)
    assert call is not None  # content_fault has refused every other body
    result = self._sandbox.run(
      call.program,
      call.stdin,
      timeout_s=seconds,
      memory_mb=self._memory_mb,
    )
    return self._told(result, seconds)

  def in_session(
    self, holder: Cells, content: str, seconds: float
  ) -> tuple[CallStatus, str]:
    """As a call, in the session of a trajectory, which is opened where it has none.

    Where it was lost the observation says so, in one line.
    """
    call = tool_bodies.parse_code(content)
    assert call is not None
    note = ""
    try:
      result = holder.run(call.program, call.stdin)
      if result is None:  # the first, or the last one has gone
        note = _LOST_BEFORE if holder.lost else ""
        holder.open(self._open, seconds)
        result = holder.run(call.program, call.stdin)
    except (TimeoutError, RuntimeError) as e:
      _log.warning("no session: %s", e)
      return CallStatus.INFRASTRUCTURE, "error: the sandbox is unavailable"
    if result is None:
      return CallStatus.INFRASTRUCTURE, "error: the session has gone"
    status, said = self._told(result, holder.seconds)
    if holder.lost and status != CallStatus.INFRASTRUCTURE:
      said += _LOST
    return status, note + said

  def _open(self, seconds: float) -> Session | RemoteSession:
    options = {"timeout_s": seconds, "memory_mb": self._memory_mb}
    if self._local:  # services have a time of their own for it
      options["wait_s"] = seconds
    return self._sandbox.session(**options)

  def _told(self, result: Result, seconds: float) -> tuple[CallStatus, str]:
    out = result.stdout.strip()
    if result.verdict == Verdict.OK:
      return CallStatus.OK, out or "no output; print what you want to see"
    if result.verdict == Verdict.INFRASTRUCTURE:
      return CallStatus.INFRASTRUCTURE, "error: the sandbox is unavailable"
    if result.verdict == Verdict.TIMEOUT:
      return CallStatus.TOOL, f"{out}\nerror: stopped after {seconds:.3g} s".strip()
    if result.verdict == Verdict.MEMORY:
      return CallStatus.TOOL, f"{out}\nerror: more than {self._memory_mb} MB".strip()
    return CallStatus.MODEL, f"{out}\nerror: {result.stderr.strip()}".strip()

  def close(self) -> None:
    """Nothing: the sandbox is closed with the toolbox."""


def _web_search(config: ToolsConfig, sandbox: Sandbox) -> Tool:
  return WebSearch(config.web, config.blocked, sandbox.search)


def _crawl_page(config: ToolsConfig, sandbox: Sandbox) -> Tool:
  del sandbox
  return Crawler(config.crawl, config.blocked)


def _visual_inspector(config: ToolsConfig, sandbox: Sandbox) -> Tool:
  del sandbox
  assert config.vision is not None  # ToolsConfig has refused it
  return Inspector(config.vision, config.blocked)


def _named(config: ToolsConfig, sandbox: Sandbox) -> Tool:
  del sandbox
  return NamedTools(config.named)


OPEN: Mapping[str, Callable[[ToolsConfig, Sandbox], Tool]] = {
  "wiki_search": _WikiSearch,
  "code": _Code,
  "web_search": _web_search,
  "crawl_page": _crawl_page,
  "visual_inspector": _visual_inspector,
  FUNCTION_TAG: _named,
}


def open_tool(name: str, config: ToolsConfig, sandbox: Sandbox) -> Tool:
  """The tool behind a tag; close it after use.

  Raises:
    ValueError: what it needs is not there: a key, a folder, a package, a server.
  """
  try:
    if name in config.mcp:
      return McpTool(config.mcp[name])
    return OPEN[name](config, sandbox)
  except (ValueError, Unavailable) as e:
    raise ValueError(f"tool {name}: {e}") from e


def run_tool(tool: Tool, content: str, seconds: float) -> tuple[CallStatus, str]:
  """Makes a call, and says whose fault a failure is.

  Args:
    tool: an open tool.
    content: of the call's span, well-formed as far as the protocol goes.
    seconds: that it may take.
  """
  try:
    result = tool(content, seconds)
  except BadCall as e:
    return CallStatus.MODEL, f"error: {e}"
  except ToolFault as e:
    return CallStatus.TOOL, f"error: {e}"
  except Unavailable as e:
    _log.warning("a tool is down: %s", e)
    return CallStatus.INFRASTRUCTURE, "error: the tool is unavailable"
  return result if isinstance(result, tuple) else (CallStatus.OK, result)
