"""Long texts as their head and tail."""

from __future__ import annotations


def cut_middle(text: str, keep: int) -> str:
  """Returns `text`, or `keep` characters of its head and tail around a marker.

  The marker gives the number of removed characters; its own length is not counted.
  """
  gone = len(text) - keep
  if gone <= 0:
    return text
  # If `keep` is odd, the head gets one more; a tail of 0 must not be text[-0:].
  tail = keep // 2
  marker = f"\n...[{gone} characters cut]...\n"
  return text[: keep - tail] + marker + text[len(text) - tail :]
