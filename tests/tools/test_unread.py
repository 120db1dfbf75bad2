"""Unread fields of section `tools` are reported; their files need not exist."""

from __future__ import annotations

import pytest

from coa_jax.runtime.config import read_config
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from coa_jax.tools.unread import unread
from tests.backend import BACKEND

WEB = dict(web=dict(endpoint="http://localhost:9/search"), corpus="nowhere.jsonl")


@pytest.mark.parametrize(
  ("values", "fields"),
  [
    (dict(tools=("code",)), []),
    (dict(corpus="pages.jsonl"), []),
    (dict(tools=("web_search",), corpus="pages.jsonl"), []),
    (dict(tools=("code",), corpus="pages.jsonl"), ["corpus"]),
    (dict(tools=("web_search", "crawl_page"), **WEB), ["corpus"]),
    (dict(tools=("code",), retriever="http://x/retrieve"), ["retriever"]),
    (dict(tools=("code",), blocked=("a.org",)), ["blocked"]),
    (dict(tools=("web_search",), blocked=("a.org",), corpus="p"), []),
    (dict(tools=("code",), crawl=dict(page_chars=100)), ["crawl"]),
    (dict(tools=("crawl_page",), session=True), ["session"]),
    (
      dict(
        tools=("code",),
        timeouts=dict(crawl_page=3.0, code=2.0),
        descriptions=dict(wiki_search="finds"),
        mcp=dict(web_search=dict(url="http://x/mcp", tool="find")),
      ),
      ["descriptions.wiki_search", "timeouts.crawl_page", "mcp.web_search"],
    ),
    # An MCP server reads none of our fields.
    (
      dict(corpus="p", mcp=dict(wiki_search=dict(url="http://x/mcp", tool="find"))),
      ["corpus"],
    ),
    (
      dict(tools=("code",), functions=dict(f=dict(function="m:f", description="d"))),
      [],
    ),
  ],
)
def test_each_field_that_no_tool_reads_is_one_line(values, fields):
  config = read_config(values, ToolsConfig, "tools")
  lines = list(unread(config))
  assert [line.split()[0] for line in lines] == [f"tools.{name}" for name in fields]
  assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
  "values",
  [
    dict(tools=("code",), corpus="nowhere.jsonl"),
    dict(tools=("web_search",), **WEB),
    dict(tools=("wiki_search",), corpus="nowhere.jsonl", enabled=False),
  ],
)
def test_no_corpus_is_demanded_that_no_tool_reads(values):
  Toolbox(read_config(values | {"sandbox": BACKEND}, ToolsConfig, "tools")).close()


def test_a_corpus_that_a_tool_reads_has_to_be_there():
  config = ToolsConfig(tools=("wiki_search",), corpus="nowhere.jsonl")
  with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
    Toolbox(config)
