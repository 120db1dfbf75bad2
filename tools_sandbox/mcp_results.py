"""Converts MCP tool results to text before the SDK reads them.

A result is a list of blocks: text, pictures, sounds, resources and links to them. The
SDK refuses the whole result for one unknown block, so every block becomes text first.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

_MAX_CHARS = 1_000_000  # per result; tools show the model far less
_WORD = 2000  # characters of a block's name, address or description


@contextlib.asynccontextmanager
async def as_text(transport: Any) -> AsyncIterator[Any]:
  """Wraps an SDK transport, to convert the blocks of arriving results to text."""
  async with transport as (read, write):
    yield _Results(read), write


class _Results:
  """The SDK's message stream, with results as text; see `as_text`."""

  def __init__(self, stream: Any):
    self._stream = stream

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  async def __aenter__(self) -> _Results:
    await self._stream.__aenter__()
    return self

  async def __aexit__(self, *error: Any) -> Any:
    return await self._stream.__aexit__(*error)

  def __aiter__(self) -> _Results:
    return self

  async def __anext__(self) -> Any:
    item = await self._stream.__anext__()
    # Only a call's result has these fields.
    result = getattr(getattr(item, "message", None), "result", None)
    if isinstance(result, dict):
      structure = result.pop("structuredContent", None)
      blocks = result.get("content", [] if structure is not None else None)
      if isinstance(blocks, list):
        result.pop("_meta", None)
        result["content"] = [{"type": "text", "text": _join(blocks, structure)}]
    return item


def _join(blocks: list[Any], structure: Any) -> str:
  """Joins a result's blocks as text; adds its structure if no block has text."""
  # Cut part by part: no longer text is ever built.
  parts = []
  room = _MAX_CHARS
  for block in blocks:
    parts.append(_of_block(block)[:room])
    room -= len(parts[-1]) + 1
    if room <= 0:
      break
  texts = any(isinstance(_inner(block).get("text"), str) for block in blocks)
  if structure is not None and not texts:
    with contextlib.suppress(ValueError, RecursionError):
      parts.append(json.dumps(structure)[: max(0, room)])
  return "\n".join(parts)


def _inner(block: Any) -> dict[str, Any]:
  """Returns the object with a block's text or data: the block or its resource."""
  inner = block.get("resource", block) if isinstance(block, dict) else {}
  return inner if isinstance(inner, dict) else {}


def _of_block(block: Any) -> str:
  """Returns a block's text, or a description: type, name, address, size."""
  inner = _inner(block)
  text = inner.get("text")
  embedded = inner is not block
  if isinstance(text, str) and not embedded:
    return text
  kind = block.get("type") if isinstance(block, dict) else None
  words = [kind if isinstance(kind, str) else "block of an unknown type"]
  for field in ("name", "title", "uri", "mimeType", "description"):
    value = inner.get(field)
    if isinstance(value, str) and value and value not in words:
      words.append(value)
  size = inner.get("size")
  for field in ("data", "blob"):  # base64
    if isinstance(data := inner.get(field), str):
      size = len(data.rstrip("=")) * 3 // 4
  if isinstance(size, int):
    words.append(f"{size} bytes")
  # Each word is bounded: a name may be a megabyte.
  head = f"[{' '.join(word[:_WORD] for word in words)}]"
  return f"{head}\n{text}" if isinstance(text, str) else head
