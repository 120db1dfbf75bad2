"""The tools of one run behind one call: the only door to `tools_sandbox`.

A `Toolbox` turns the content of a tool span into a `ToolCall`: it refuses malformed
calls in words that a model can act on, runs the others in the sandbox, and says whose
fault a failure is. Calls may run concurrently; results do not depend on the order.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time

from coa_jax.protocol import roles
from coa_jax.protocol.parser import content_fault
from coa_jax.protocol.trajectory import CallStatus, ToolCall
from tools_sandbox.client import Sandbox, Verdict


@dataclasses.dataclass(frozen=True)
class ToolsConfig:
  """Config section `tools`.

  Attributes:
    tools: tags of the tools a policy may call; of `wiki_search` and `code`.
    corpus: JSON-lines pages that `wiki_search` searches (rows of id, title, text).
    top_k: pages returned per search.
    timeout_s: wall seconds one call may take.
    memory_mb: memory one program may use, in MiB.
    workers: calls that run at once; also the number of warm sandbox processes.
    max_chars: an observation is cut to this many characters (head and tail are kept).
    enabled: False answers every call with "tools are off": what a model can do alone.
  """

  tools: tuple[str, ...] = ("wiki_search", "code")
  corpus: str | None = None
  top_k: int = 3
  timeout_s: float = 7.0
  memory_mb: int = 1024
  workers: int = 2
  max_chars: int = 1536
  enabled: bool = True

  def __post_init__(self):
    for tool in self.tools:
      if tool not in _RUNNERS:
        raise ValueError(f"tools: no tool {tool!r}; there are {', '.join(_RUNNERS)}")
    if "wiki_search" in self.tools and self.corpus is None:
      raise ValueError("corpus: wiki_search needs the path of a JSON-lines corpus")
    if self.top_k < 1 or self.workers < 1 or self.max_chars < 64:
      raise ValueError("top_k and workers must be at least 1, max_chars at least 64")


class Toolbox:
  """Runs tool calls; use as a context manager, or call `close`."""

  def __init__(self, config: ToolsConfig):
    """Opens the sandbox and, where `wiki_search` is asked for, its index.

    Raises:
      FileNotFoundError, ValueError: the corpus is missing or malformed; the message
        names file, line and field.
    """
    self.config = config
    corpus = config.corpus if "wiki_search" in config.tools else None
    self._sandbox = Sandbox(slots=config.workers, corpus=corpus)
    self._pool = concurrent.futures.ThreadPoolExecutor(
      config.workers, thread_name_prefix="tool"
    )

  def __enter__(self) -> Toolbox:
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def close(self) -> None:
    """Ends running programs and frees the sandbox's processes."""
    self._pool.shutdown(wait=True, cancel_futures=True)
    self._sandbox.close()

  def submit(self, name: str, arguments: str) -> concurrent.futures.Future[ToolCall]:
    """Starts a call in the background; the future never raises (see `call`)."""
    return self._pool.submit(self.call, name, arguments)

  def call(self, name: str, arguments: str) -> ToolCall:
    """Runs one call to its end.

    Args:
      name: the tool's tag.
      arguments: the content of its span, verbatim.

    Returns:
      The call with its result; failures are results with a status, never exceptions.
    """
    start = time.monotonic()
    status, result = self._run(name, arguments)
    result = _cut(result, self.config.max_chars)
    return ToolCall(name, arguments, result, status, time.monotonic() - start)

  def _run(self, name: str, arguments: str) -> tuple[CallStatus, str]:
    if not self.config.enabled:
      return CallStatus.TOOL, "tools are off"
    if name not in self.config.tools:
      return CallStatus.MODEL, f"error: no tool {name}"
    fault = content_fault(name, arguments)
    if fault is not None:
      return CallStatus.MODEL, f"error: {fault}"
    return _RUNNERS[name](self._sandbox, arguments, self.config)


def _search(
  sandbox: Sandbox, query: str, config: ToolsConfig
) -> tuple[CallStatus, str]:
  hits = sandbox.search(query.strip(), config.top_k)
  if not hits:
    return CallStatus.OK, "no result"
  pages = []
  for hit in hits:
    title, text = hit.document.title, hit.document.text
    pages.append(text if text.startswith(title) else f"{title}: {text}")
  if config.top_k == 1:
    return CallStatus.OK, pages[0]
  return CallStatus.OK, "\n".join(f"{i}. {p}" for i, p in enumerate(pages, 1))


def _code(sandbox: Sandbox, body: str, config: ToolsConfig) -> tuple[CallStatus, str]:
  call = roles.parse_code(body)
  assert call is not None  # content_fault has refused every other body
  result = sandbox.run(
    call.program,
    call.stdin,
    timeout_s=config.timeout_s,
    memory_mb=config.memory_mb,
  )
  out = result.stdout.strip()
  if result.verdict == Verdict.OK:
    return CallStatus.OK, out or "no output; print what you want to see"
  if result.verdict == Verdict.INFRASTRUCTURE:
    return CallStatus.INFRASTRUCTURE, "error: the sandbox is unavailable"
  if result.verdict == Verdict.TIMEOUT:
    return (
      CallStatus.TOOL,
      f"{out}\nerror: stopped after {config.timeout_s:g} s".strip(),
    )
  if result.verdict == Verdict.MEMORY:
    return CallStatus.TOOL, f"{out}\nerror: more than {config.memory_mb} MB".strip()
  return CallStatus.MODEL, f"{out}\nerror: {result.stderr.strip()}".strip()


_RUNNERS = {"wiki_search": _search, "code": _code}


def _cut(text: str, limit: int) -> str:
  """Keeps the head and the tail of a long text, with a marker between."""
  if len(text) <= limit:
    return text
  marker = f"\n...[{len(text) - limit} characters cut]...\n"
  head = (limit - len(marker)) // 2
  return text[:head] + marker + text[len(text) - (limit - len(marker) - head) :]
