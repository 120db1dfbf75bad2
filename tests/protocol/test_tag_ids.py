"""Token ids of tags: a new tool does not change existing ids."""

from __future__ import annotations

import pathlib

import pytest
import toy

from coa_jax.protocol import roles, tokenizer_training, tokens
from coa_jax.protocol.tools import SPECS, TagIds, ToolSpec

# Tags with ids before the bytes, in this order.
FIRST = (
  *("think", "plan", "reflection", "suggested_answer", "double_check", "answer"),
  *("wiki_search", "web_search", "crawl_page", "code", "visual_inspector"),
  "observation",
)
README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def test_the_ids_of_tags_are_what_they_always_were():
  """Existing models were trained with these ids."""
  tok = toy.tokenizer()
  tags = [f(n) for n in FIRST for f in (roles.open_tag, roles.close_tag)]
  assert [tok.bytes_of[i].decode() for i in range(3, 3 + len(tags))] == tags
  assert len(tok.encode("<tool>")) > 1
  assert tok.bytes_of[:3] == [
    c.encode() for c in (tokens.PAD, tokens.IM_START, tokens.IM_END)
  ]
  first_bytes = b"".join(tok.bytes_of[3 + len(tags) : 3 + len(tags) + 256])
  assert sorted(first_bytes) == list(range(256)) and first_bytes[:3] == b'!"#'


@pytest.mark.parametrize("texts", [["a few words"], [README] * 2])
def test_a_tool_that_is_added_moves_no_other_id(monkeypatch, texts):
  """Texts with too few merges for the vocabulary, and with more than enough."""
  size, before = 700, tokenizer_training.train_tokenizer(texts, 700)
  one_more = None
  at_the_end = sum(spec.tag_ids is TagIds.LAST for spec in SPECS.values())
  for number, tag in enumerate(("weigh", "measure"), at_the_end + 1):
    monkeypatch.setitem(SPECS, tag, ToolSpec(tag, "tell a weight", "a thing"))
    tok = tokenizer_training.train_tokenizer(texts, size)
    assert tok.vocab_size == size
    kept = min(before.vocab_size, size - 2 * number)
    assert tok.bytes_of[:kept] == before.bytes_of[:kept]
    assert tok.encode(f"<{tag}></{tag}>") == [size - 2 * number, size - 2 * number + 1]
    if one_more is not None:
      assert tok.encode("<weigh></weigh>") == one_more.encode("<weigh></weigh>")
    one_more = tok
  text = "<think> what is it</think><weigh> a crate</weigh>"
  assert one_more.decode(one_more.encode(text)) == text
  assert not set(one_more.encode_untrusted(text)) & set(one_more.added)
