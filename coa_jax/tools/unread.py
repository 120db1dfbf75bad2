"""Finds fields of section `tools` that none of a run's tools reads."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from coa_jax.tools.tools import TOOLS, ToolsConfig

_log = logging.getLogger(__name__)
# Field -> tags of its readers; for `corpus`, `Tool.reads_corpus` decides.
_READERS = {
  "retriever": ("wiki_search",),
  "session": ("code",),
  "blocked": ("web_search", "crawl_page", "visual_inspector"),
  "web": ("web_search",),
  "crawl": ("crawl_page",),
  "vision": ("visual_inspector",),
}
_BY_TAG = ("descriptions", "timeouts", "mcp")


def warn_unread(config: ToolsConfig) -> None:
  """Warns of each field that is set but not read by any tool: it may be a mistake."""
  for line in unread(config):
    _log.warning("%s", line)


def unread(config: ToolsConfig) -> Iterator[str]:
  """Yields a line for each field that is set but not read by any tool."""
  # --- Entries for tools outside this run.
  tags = ", ".join(config.tags) or "none"
  for field in _BY_TAG:
    for tag in getattr(config, field):
      if tag not in config.tags:
        yield (
          f"tools.{field}.{tag} is read by no tool of this run (tools.tools: {tags})"
        )

  # --- Fields of single tools; MCP servers read none of them.
  own_tags = set(config.tags) - set(config.mcp)
  wanted = {tag for tag in own_tags if TOOLS[tag].reads_corpus(config)}
  if config.corpus is not None and not wanted:
    yield f"tools.corpus is read by no tool of this run (tools.tools: {tags})"
  defaults = ToolsConfig(tools=())
  for name, readers in _READERS.items():
    changed = getattr(config, name) != getattr(defaults, name)
    if changed and not own_tags.intersection(readers):
      yield (
        f"tools.{name} is read by {' and '.join(readers)} alone, which this run does "
        f"not have (tools.tools: {tags})"
      )
