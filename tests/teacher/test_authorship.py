"""The loss mask covers exactly the policy's tokens, with every tokenizer.

The reference finds observations by token sub-sequences, and loses or leaks rows if the
text around them tokenises differently (afm.md, 3.1). Each such case is here.
"""

from __future__ import annotations

import copy

import foreign
import numpy as np
import pytest
import tokenizers
import toy
import transformers
from hypothesis import given, settings
from imported import read

from coa_jax.learner import batch as batching
from coa_jax.protocol import tokens
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author, Trajectory


def bytes_tokenizer() -> Tokenizer:
  """A tokenizer with one id per byte, and no merges."""
  split = tokenizers.pre_tokenizers
  vocab = {c: i for i, c in enumerate(sorted(split.ByteLevel.alphabet()))}
  model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
  model.pre_tokenizer = split.ByteLevel(add_prefix_space=False, use_regex=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  model.add_special_tokens([tokens.PAD, tokens.IM_START, tokens.IM_END])
  template = toy.tokenizer().hf.chat_template
  return Tokenizer(
    transformers.PreTrainedTokenizerFast(
      tokenizer_object=model, pad_token=tokens.PAD, chat_template=template
    )
  )


TOKENIZERS = {
  "bytes": bytes_tokenizer(),
  "tags": toy.tokenizer(),  # every tag is one token
  "merges": toy.stock_tokenizer(),  # `><`, `></` and `e><` straddle tags
}
EACH = pytest.mark.parametrize("tok", TOKENIZERS.values(), ids=TOKENIZERS)


def utf8(text: str) -> bytes:
  return text.encode("utf-8", "replace")


def check(trajectory: Trajectory, tok: Tokenizer) -> None:
  """Asserts that exactly the policy's bytes have weight 1, in a packed row."""
  t = copy.deepcopy(trajectory)
  tok.encode_trajectories([t])
  whole = b"".join(utf8(s.text) for s in t.segments if s.author != Author.PROMPT)
  policy = b"".join(utf8(s.text) for s in t.segments if s.author == Author.POLICY)
  foreign_ = [utf8(s.text) for s in t.segments if s.author == Author.TOOL]
  batch = batching.empty(1, 2 * t.num_tokens)
  batching.fill(batch, 0, [t, t])  # packing must keep the mask
  for number in (1, 2):
    mine_T = batch.segment_BT[0] == number
    ids, weight = batch.tokens_BT[0][mine_T], batch.loss_mask_BT[0][mine_T]
    assert tok.raw(ids[weight == 1]) == policy
    assert b"".join(foreign_) in tok.raw(ids[weight == 0])
    assert tok.raw(ids).endswith(whole)
    # In order, each run of untrained ids is one observation with its tags.
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(weight)) + 1)
    untrained = [tok.raw(ids[r]) for r in runs if not weight[r[0]]]
    assert untrained[1:] == foreign_


@EACH
@settings(max_examples=60, deadline=None)
@given(foreign.ALL)
def test_the_mask_is_exact_whoever_wrote_the_row(tok, drawn):
  check(read(drawn.format, drawn.row)[1], tok)


def record(before: str, after: str) -> dict[str, str]:
  """An Alpaca record with these texts around its observation."""
  output = f"<think>t</think><code>```py\nx\n```</code>{before}<observation>a b"
  output += f"</observation>{after}<suggested_answer>4</suggested_answer>"
  output += "<double_check>4</double_check><answer>4</answer>"
  return {"instruction": "Question: Who?", "output": output}


CASES = {
  "two newlines": ("\n", "\n\n"),
  "one newline": ("\n", "\n"),
  "three newlines": ("\n", "\n\n\n"),
  "another tag at once": ("\n", ""),
  "a space": ("\n", " "),
  "no newline before": ("", "\n\n"),
  "neither": ("", ""),
}


@EACH
@pytest.mark.parametrize("case", CASES)
def test_the_cases_that_the_reference_drops_or_leaks(case, tok):
  _, trajectory = read("alpaca", record(*CASES[case]))
  assert trajectory.text == record(*CASES[case])["output"]
  check(trajectory, tok)


def by_markers(ids: list[int], tok: Tokenizer) -> list[bool] | None:
  """Marks the ids that stay trained after a marker search; None drops the example.

  The reference masks from the ids of `<observation` to those of `observation>` and two
  newlines, both included.
  """
  start, end = tok.encode("<observation"), tok.encode("observation>\n\n")

  def find(marker: list[int], at: int) -> int:
    starts = range(at, len(ids) - len(marker) + 1)
    return next((i for i in starts if ids[i : i + len(marker)] == marker), -1)

  trained, at = [True] * len(ids), 0
  while (first := find(start, at)) >= 0:
    last = find(end, first + len(start))
    if last < 0:
      return None
    at = last + len(end)
    trained[first:at] = [False] * (at - first)
  return trained


def test_markers_do_drop_and_leak_those_cases():
  """The cases above are real: the reference's search fails on most of them."""
  tok = TOKENIZERS["merges"]
  outcome = {}
  for case, around in CASES.items():
    ids = tok.encode(record(*around)["output"])
    trained = by_markers(ids, tok)
    if trained is None:
      outcome[case] = "dropped"
      continue
    seen = tok.raw([i for i, t in zip(ids, trained, strict=True) if t])
    outcome[case] = "leaks" if b"a b" in seen else "right"
  assert outcome == {
    "two newlines": "right",
    "one newline": "dropped",
    "three newlines": "right",
    "another tag at once": "dropped",
    "a space": "dropped",
    "no newline before": "leaks",
    "neither": "leaks",
  }


@EACH
def test_a_region_longer_than_a_row_is_left_out_whole(tok):
  """The reference drops a region at its cut-off; here only the length decides."""
  _, trajectory = read("alpaca", record("\n", "\n\n"))
  tok.encode_trajectories([trajectory])
  n = trajectory.num_tokens
  assert not list(batching.batches([trajectory], 1, n - 1))
  (batch,) = batching.batches([trajectory], 1, n)
  assert int((batch.segment_BT > 0).sum()) == n
