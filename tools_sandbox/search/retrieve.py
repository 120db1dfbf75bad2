"""The client of Search-R1's `/retrieve` API, for wiki_search.

A request is {"queries": [...], "topk": k, "return_scores": true}; the reply is
{"result": [[{"document": {"id", "contents"}, "score"}, ...] for each query]}, with
contents = the title in quotes, a line end and the text. Without scores, the list holds
bare documents. `retrieve_server` serves this protocol.
"""

from __future__ import annotations

from typing import Any

from tools_sandbox.http_client import Service
from tools_sandbox.search.index import Document, Hit
from tools_sandbox.text import clean


class Retriever:
  """Asks one `/retrieve` server. Thread-safe; close it after use."""

  def __init__(self, url: str):
    """Sends nothing yet.

    Args:
      url: the server's URL, with or without "/retrieve" at the end.

    Raises:
      ValueError: the URL is not http or https.
    """
    url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
    self._service = Service("the retrieval server", url)

  def close(self) -> None:
    """Closes the connections."""
    self._service.close()

  def search(self, query: str, k: int, seconds: float) -> list[Hit]:
    """Finds at most k documents, in the server's order.

    Raises:
      ToolFault: the server refuses the query.
      Unavailable: the server is down, or its reply does not fit this API.
    """
    # The API takes many queries at once; the reply has a list of hits for each.
    body = {"queries": [query], "topk": k, "return_scores": True}
    reply = self._service.ask(body, seconds)
    try:
      (rows,) = reply["result"]
      return [_hit(row) for row in rows][:k]  # servers may send more than was asked
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
      raise self._service.broken("not a /retrieve result") from None


def _hit(row: dict[str, Any]) -> Hit:
  # With scores, the document is a field of the row; without scores, the row itself.
  document = row.get("document", row)
  title, _, text = document["contents"].partition("\n")
  title = title.removeprefix('"').removesuffix('"')
  score = float(row.get("score", 0.0))
  return Hit(Document(str(document.get("id", "")), clean(title), clean(text)), score)
