"""Invalid tool configs are rejected; the error says why."""

from __future__ import annotations

import math

import pytest

from tools_sandbox.chat import ChatConfig
from tools_sandbox.mcp_client import McpConfig
from tools_sandbox.service.remote import RemoteConfig
from tools_sandbox.web.crawl import CrawlConfig
from tools_sandbox.web.fetch import FetchConfig
from tools_sandbox.web.web_search import WebConfig

URL = "http://a"
NO_URL = "must start with http:// or https://"
COMMAND = ("b",)
# Config class -> (its fields, words of the error).
WRONG = {
  ChatConfig: [
    ({"base_url": "x", "model": "m"}, NO_URL),
    ({"base_url": URL, "model": ""}, "name the model"),
    ({"base_url": URL, "model": "m", "max_tokens": 0}, "must be positive"),
  ],
  CrawlConfig: [
    ({"page_chars": 1}, "page_chars must be at least 64"),
  ],
  FetchConfig: [
    ({"max_bytes": 0}, "max_bytes must be at least 1"),
    ({"allow": ("localhost",)}, "'localhost'"),
  ],
  McpConfig: [
    ({"tool": "x"}, "either a command or a url"),
    ({"tool": "", "url": URL}, "has a name"),
    ({"tool": "x", "url": "a"}, NO_URL),
    ({"tool": "x", "url": URL, "command": COMMAND}, "either a command or a url"),
    ({"tool": "x", "url": URL, "start_s": 0.0}, "start_s must be positive"),
    ({"tool": "x", "url": URL, "env": {"A": "b"}}, "env is for a command"),
    ({"tool": "x", "command": COMMAND, "key_file": "k"}, "key_file is for a url"),
  ],
  RemoteConfig: [
    ({"urls": ()}, "urls must be a list of one or more"),
    ({"urls": URL}, "urls must be a list"),
    ({"urls": ("a:80",)}, NO_URL),
    ({"urls": (URL,), "api": "nsjail"}, "accepted: tools_sandbox, sandbox_fusion"),
    ({"urls": (URL,), "wait_s": 0.0}, "wait_s must be positive and finite"),
    ({"urls": (URL,), "wait_s": math.nan}, "wait_s must be positive and finite"),
    ({"urls": (URL,), "wait_s": math.inf}, "wait_s must be positive and finite"),
  ],
  WebConfig: [
    ({"endpoint": "x"}, NO_URL),
    ({"cache": "c"}, "need an endpoint"),
    ({"key_file": "k"}, "need an endpoint"),
    ({"results": 0}, "results must be at least 1"),
    ({"per_second": -1.0}, "per_second must be at least 0"),
  ],
}


@pytest.mark.parametrize(
  ("config", "fields", "words"),
  [(config, *row) for config, rows in WRONG.items() for row in rows],
)
def test_a_bad_field_is_refused(config, fields, words):
  with pytest.raises(ValueError) as error:
    config(**fields)
  assert words in str(error.value)
