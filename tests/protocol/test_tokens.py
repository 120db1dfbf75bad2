"""Encoding by author, for both kinds of tokenizer."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import tokenizers
import toy
import transformers
from hypothesis import example, given
from hypothesis import strategies as st

from coa_jax.protocol import prompts, roles, tokenizer_training, tokens
from coa_jax.protocol.roles import wrap
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.tools import FUNCTION_TAG
from coa_jax.protocol.trajectory import Author, Segment, Trajectory

BOTH = pytest.mark.parametrize(
  "tok", [toy.tokenizer(), toy.stock_tokenizer()], ids=["own", "stock"]
)
CONTROL = (tokens.PAD, tokens.IM_START, tokens.IM_END)
NAMES = (*roles.ROLES, *roles.TOOLS, roles.OBSERVATION)
# Every tokenizer spells `tool` as text.
TAGS = tuple(f(n) for n in NAMES for f in (roles.open_tag, roles.close_tag))
OWN_TAGS = tuple(t for t in TAGS if t.strip("</>") != FUNCTION_TAG)
HOSTILE = st.lists(
  st.sampled_from((*CONTROL, *TAGS, "<tool_call>", "<", ">", "</", "|>"))
  | st.text(max_size=6),
  max_size=8,
).map("".join)


def control_ids(tok: Tokenizer) -> set[int]:
  """The ids of added tokens, besides bytes and merges."""
  added = tok.hf.backend_tokenizer.get_added_tokens_decoder()
  return set(added)


@BOTH
@given(text=HOSTILE)
def test_decoding_gives_the_text_back(tok: Tokenizer, text: str):
  assert tok.decode(tok.encode(text)) == text
  assert tok.decode(tok.encode_untrusted(text)) == text


@BOTH
@given(text=HOSTILE)
@example(text="".join((*CONTROL, *TAGS, "<tool_call>")))
def test_foreign_text_never_becomes_a_control_token(tok: Tokenizer, text: str):
  assert not set(tok.encode_untrusted(text)) & control_ids(tok)
  observation = tok.encode_observation(text)
  inside = observation.ids[len(tok.encode("<observation>")) :]
  inside = inside[: len(inside) - len(tok.encode("</observation>"))]
  assert not set(inside) & control_ids(tok)
  assert tok.decode(inside) == " " + roles.escape(text)
  question = Segment(Author.PROMPT, "question", text)
  tok.encode_prompt([question])
  before, after = tok.encode(tokens.IM_START), tok.encode(tokens.IM_END)
  assert question.ids == [*before, *tok.encode_untrusted(text), *after]


def test_own_tags_are_one_token_each_and_stock_ones_are_text():
  own, stock = toy.tokenizer(), toy.stock_tokenizer()
  for tok in (own, stock):
    assert {bytes([b]) for b in range(256)} <= set(tok.bytes_of)
  assert all(len(own.encode(tag)) == 1 for tag in OWN_TAGS)
  assert all(len(stock.encode(tag)) > 1 for tag in TAGS)
  # The reason for a stock tokenizer: tokens that straddle tags.
  assert {b"><", b"></", b"e><"} <= set(stock.bytes_of)


@BOTH
def test_control_tokens_in_trusted_text_count(tok: Tokenizer):
  for control in CONTROL:
    assert len(tok.encode(control)) == 1
    assert tok.bytes_of[tok.encode(control)[0]] == control.encode()


@BOTH
@given(data=st.data())
def test_any_ids_decode_to_their_bytes(tok: Tokenizer, data):
  # An embedding has more rows than the tokenizer has ids; the others have no text.
  ids = data.draw(st.lists(st.integers(0, tok.vocab_size + 9)))
  raw = b"".join(tok.bytes_of[i] for i in ids if i < tok.vocab_size)
  assert tok.decode(ids) == raw.decode("utf-8", "replace")


@BOTH
def test_saved_and_loaded_is_the_same(tok: Tokenizer, tmp_path):
  tok.save(tmp_path)
  again = Tokenizer.load(tmp_path)
  text = "<think>caf\u00e9 12</think>" + tokens.IM_END
  assert again.encode(text) == tok.encode(text)
  assert again.encode_untrusted(text) == tok.encode_untrusted(text)
  assert again.bytes_of == tok.bytes_of
  question = [Segment(Author.PROMPT, "question", "Who?")]
  other = [Segment(Author.PROMPT, "question", "Who?")]
  tok.encode_prompt(question)
  again.encode_prompt(other)
  assert question == other


@pytest.mark.parametrize(
  ("written_class", "kept"),
  [
    ("Qwen2Tokenizer", "Qwen2Tokenizer"),
    ("TokenizersBackend", "PreTrainedTokenizerFast"),
    (None, "PreTrainedTokenizerFast"),
  ],
)
def test_a_written_folder_is_read_by_transformers_4_too(
  tmp_path, written_class, kept: str
):
  """Version 4 lacks TokenizersBackend, and reads `extra_special_tokens` as a dict."""
  first, second = tmp_path / "first", tmp_path / "second"
  toy.tokenizer().save(first)
  file = first / "tokenizer_config.json"
  config = json.loads(file.read_text())
  assert config.pop("tokenizer_class") == "PreTrainedTokenizerFast"
  if written_class:
    config["tokenizer_class"] = written_class
  config["additional_special_tokens"] = [tokens.IM_START]
  file.write_text(json.dumps(config))
  Tokenizer.load(first).save(second)
  written = json.loads((second / "tokenizer_config.json").read_text())
  assert written["tokenizer_class"] == kept
  assert written["additional_special_tokens"] == [tokens.IM_START]
  assert not {"is_local", "local_files_only", "extra_special_tokens"} & set(written)
  assert Tokenizer.load(second).hf.extra_special_tokens == [tokens.IM_START]


def test_a_tokenizer_without_exact_bytes_is_refused():
  model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
  model.decoder = tokenizers.decoders.WordPiece()
  hf = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
  with pytest.raises(ValueError, match="WordPiece; only byte-level"):
    Tokenizer(hf)


def test_a_vocabulary_without_room_for_the_tags_is_refused():
  with pytest.raises(ValueError, match=f"at least {256 + 3 + len(OWN_TAGS)}"):
    tokenizer_training.train_tokenizer(["x"], 258)


def test_digits_stay_single():
  tok = tokenizer_training.train_tokenizer(["2024 2024 2024 year year"] * 50, 320)
  assert len(tok.encode("2024")) == 4
  assert len(tok.encode(" year")) < 5


def script() -> Trajectory:
  segments = prompts.prompt_segments(toy.VARIANT, "Who <|im_end|>?", "full")
  segments += [
    Segment(Author.POLICY, "code", wrap("think", "t") + wrap("code", "x") + "\n"),
    Segment(Author.TOOL, "observation", wrap("observation", roles.escape("<think>"))),
    Segment(Author.ENVIRONMENT, "", "<answer> of the environment"),
    Segment(Author.POLICY, "answer", wrap("answer", "caf\u00e9")),
  ]
  return Trajectory("t", segments)


@BOTH
def test_a_trajectory_is_encoded_segment_by_segment(tok: Tokenizer):
  t = script()
  tok.encode_trajectories([t])
  assert all(s.ids for s in t.segments)
  texts = [tok.decode(s.ids) for s in t.segments]
  assert texts[0] == tokens.IM_START + t.segments[0].text
  assert texts[1] == t.segments[1].text + tokens.IM_END
  assert texts[2:] == [s.text for s in t.segments[2:]]
  for s in t.segments[2:]:
    if s.author == Author.POLICY:
      assert s.ids == tok.encode(s.text)
  foreign = [*t.segments[1].ids[:-1], *t.segments[3].ids, *t.segments[4].ids]
  found = set(foreign) & control_ids(tok)
  assert found <= set(tok.encode("<observation></observation>"))


@BOTH
def test_ids_that_are_there_are_not_touched(tok: Tokenizer):
  t = script()
  tok.encode_trajectories([t])
  sampled = [list(reversed(s.ids)) for s in t.segments]
  for s, ids in zip(t.segments, sampled, strict=True):
    s.ids = list(ids)
  tok.encode_trajectories([t])
  assert [s.ids for s in t.segments] == sampled


TURN = wrap("think", "what") + " " + wrap("code", "x") + wrap("answer", "y")


@BOTH
@given(data=st.data())
def test_policy_segments_concatenate_exactly_to_the_ids(tok: Tokenizer, data):
  ids = data.draw(
    st.lists(st.integers(0, tok.vocab_size + 9), max_size=40)
    | st.just(tok.encode(TURN))
    | HOSTILE.map(tok.encode)
  )
  logps = [-float(n) for n in range(len(ids))]
  versions = [n // 3 for n in range(len(ids))]
  segments = tok.policy_segments(ids, logps, versions)
  assert list(itertools.chain(*(s.ids for s in segments))) == ids
  assert list(itertools.chain(*(s.logps for s in segments))) == logps
  assert list(itertools.chain(*(s.versions for s in segments))) == versions
  for s in segments:
    assert s.author == Author.POLICY and s.ids
    assert s.text == tok.decode(s.ids)


@BOTH
def test_policy_segments_are_cut_after_each_closing_tag(tok: Tokenizer):
  ids = tok.encode(TURN)
  segments = tok.policy_segments(ids, [0.0] * len(ids), [0] * len(ids))
  assert [s.role for s in segments] == ["think", "code", "answer"]
  assert "".join(s.text for s in segments) == TURN


def test_a_token_across_two_spans_stays_whole_with_the_first():
  stock = toy.stock_tokenizer()
  ids = stock.encode("<code>x</code><answer>y</answer>")
  assert any(stock.bytes_of[i] == b"e><" for i in ids)
  code, answer = stock.policy_segments(ids, [0.0] * len(ids), [0] * len(ids))
  assert (code.text, code.role) == ("<code>x</code><", "code")
  assert (answer.text, answer.role) == ("answer>y</answer>", "answer")


@BOTH
def test_a_lone_surrogate_does_not_end_a_run(tok: Tokenizer):
  assert tok.decode(tok.encode("a\ud800b")) == "a?b"
  assert tok.cut_observation("a\ud800b", 80) == "a\ud800b"
  observation = tok.encode_observation("a\ud800b")
  assert tok.decode(observation.ids) == "<observation> a?b</observation>"


@BOTH
@pytest.mark.parametrize(
  "text", ["", "x", "</observation>x<observation>", "<observation>x", "</observation>"]
)
def test_tool_text_of_any_shape_is_encoded_whole(tok: Tokenizer, text: str):
  t = Trajectory("t", [Segment(Author.TOOL, "observation", text)])
  tok.encode_trajectories([t])
  assert tok.decode(t.segments[0].ids) == text


MARKER = re.compile(r"\n\.\.\.\[(\d+) characters cut\]\.\.\.\n")
# Words, digits, characters of two to four bytes, runs of white space, tags and their
# parts; never the marker.
OUTPUT = st.lists(
  st.sampled_from(
    ("swer", "think ", " " * 9, "1234567", *CONTROL, *TAGS, "&lt;", "x</")
  )
  | st.text(
    st.characters(exclude_characters="[", exclude_categories=("Cs",)), max_size=40
  ),
  max_size=40,
).map("".join)


@BOTH
@given(text=OUTPUT, limit=st.integers(tokens.MIN_OBSERVATION, 400))
@example(text="\U0001f600" * 300, limit=tokens.MIN_OBSERVATION)
@example(text="<answer>" * 60, limit=tokens.MIN_OBSERVATION)
def test_a_long_observation_keeps_head_and_tail_within_its_tokens(
  tok: Tokenizer, text: str, limit: int
):
  whole = tok.encode_observation(text)
  short = tok.cut_observation(text, limit)
  observation = tok.encode_observation(short)
  assert len(observation.ids) <= limit
  if len(whole.ids) <= limit:
    assert short == text
    return
  head, gone, tail = MARKER.split(short)
  assert text.startswith(head) and text.endswith(tail)
  assert int(gone) == len(text) - len(head) - len(tail) > 0
  assert abs(len(head) - len(tail)) <= 1
  # The limit is used: one more character takes at most a tag's bytes.
  assert len(observation.ids) > limit - 32
  assert tok.decode(observation.ids) == observation.text


@BOTH
@pytest.mark.parametrize("unit", ["a", " ", "12,", "\u00e9\u4e2d", "<answer>", "\n"])
def test_megabytes_are_cut_without_being_encoded(tok: Tokenizer, unit, monkeypatch):
  text, encoded = unit * 3_000_000, []
  real = tok._observation_ids
  monkeypatch.setattr(
    tok, "_observation_ids", lambda s: encoded.append(len(s)) or real(s)
  )
  short = tok.cut_observation(text, 512)
  assert 400 < len(real(wrap(roles.OBSERVATION, roles.escape(short)))) <= 512
  assert sum(encoded) < 512 * 200


def test_a_limit_without_room_for_a_marker_is_refused():
  for tok in (toy.tokenizer(), toy.stock_tokenizer()):
    short = tok.cut_observation("\u4e2d" * 10**7, tokens.MIN_OBSERVATION)
    assert len(tok.encode_observation(short).ids) <= tokens.MIN_OBSERVATION
    with pytest.raises(ValueError, match="limit must be at least 80, got 79"):
      tok.cut_observation("x", tokens.MIN_OBSERVATION - 1)


def test_ids_of_another_tokenizer_are_refused():
  (one, *_), other = toy.trajectories(), toy.stock_tokenizer()
  toy.tokenizer().check_ids(one)
  with pytest.raises(ValueError, match="they are another tokenizer's"):
    other.check_ids(one)
  for s in one.segments:
    s.ids = []
  other.check_ids(one)


def test_a_folders_truncation_and_padding_are_ignored(tmp_path):
  """Hugging Face saves and loads both settings with the tokenizer."""
  plain = toy.stock_tokenizer()
  plain.save(tmp_path)
  model = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  model.enable_truncation(4)
  model.enable_padding(length=64, pad_token=tokens.PAD)
  model.save(str(tmp_path / "tokenizer.json"))
  loaded, texts = Tokenizer.load(tmp_path), ["a", "a long text of many tokens"]
  for text in texts:
    assert loaded.encode(text) == plain.encode(text)
    assert loaded.encode_untrusted(text) == plain.encode_untrusted(text)


def test_ids_of_a_tokenizer_that_normalizes_are_its_own(tmp_path):
  """Qwen's tokenizer composes characters (NFC): its ids decode to another text."""
  toy.stock_tokenizer().save(tmp_path)
  model = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  model.normalizer = tokenizers.normalizers.NFC()
  model.save(str(tmp_path / "tokenizer.json"))
  loaded = Tokenizer.load(tmp_path)
  text = wrap(roles.THINK, "cafe\u0301 \u212b")
  segment = Segment(Author.POLICY, roles.THINK, text, ids=loaded.encode(text))
  assert loaded.decode(segment.ids) != text
  loaded.check_ids(Trajectory("x", [segment]))
  segment.text += "x"
  with pytest.raises(ValueError, match="they are another tokenizer's"):
    loaded.check_ids(Trajectory("x", [segment]))


@pytest.mark.parametrize(
  ("file", "text"),
  [
    ("tokenizer.json", ""),
    ("tokenizer.json", '{"version": "1.0", "mod'),
    ("tokenizer.json", "[" * 100_000),
    ("tokenizer_config.json", "{"),
    ("tokenizer_config.json", '{"tokenizer_class": ["x"]}'),
    ("tokenizer_config.json", '{"pad_token": 3}'),
  ],
)
def test_a_damaged_tokenizer_is_named_in_one_line(tmp_path, file: str, text: str):
  toy.tokenizer().save(tmp_path)
  Tokenizer.load(tmp_path)
  (tmp_path / file).write_text(text)
  with pytest.raises(ValueError, match=rf"{tmp_path}.*{file}") as e:
    Tokenizer.load(tmp_path)
  assert "\n" not in str(e.value) and len(str(e.value)) < 500
