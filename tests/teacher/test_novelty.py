"""Duplicates, evaluation sets and domains: estimates against exact counts."""

from __future__ import annotations

import random
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.data.tasks.schemas import read_task
from coa_jax.data.teacher import novelty
from coa_jax.protocol.trajectory import Author, Segment, ToolCall, Trajectory


def grams(text: str, n: int = 5) -> set[tuple[str, ...]]:
  words = text.split()
  return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def jaccard(a: str, b: str) -> float:
  return len(grams(a) & grams(b)) / len(grams(a) | grams(b))


@given(st.text())
def test_plain_text_is_hashed_as_any_other(text):
  """ASCII has its own code path; a non-ASCII letter at the end avoids it."""
  plain = text.encode("ascii", "ignore").decode()
  *words, last = novelty.word_hashes(f"{plain} \u00e9").tolist()
  assert words == novelty.word_hashes(plain).tolist()
  assert last == novelty.word_hashes("\u00c9")[0]


@pytest.mark.parametrize("changed", [0, 2, 6, 15, 40])
def test_signatures_estimate_the_jaccard_similarity(changed):
  rng = random.Random(changed)
  words = [f"w{rng.randrange(10**6)}" for _ in range(400)]
  other = list(words)
  for at in rng.sample(range(len(words)), changed):
    other[at] = f"v{at}"
  a, b = " ".join(words), " ".join(other)
  estimate = (novelty.signature(a) == novelty.signature(b)).mean()
  assert estimate == pytest.approx(jaccard(a, b), abs=0.2)  # over three standard errors


def test_duplicates_are_found_and_only_they():
  rng = random.Random(0)
  seen = novelty.Duplicates(0.8)
  texts = [" ".join(f"w{rng.randrange(10**6)}" for _ in range(200)) for _ in range(300)]
  assert all(seen.is_new(novelty.signature(t)) for t in texts)
  near = [t.rpartition(" ")[0] + " changed" for t in texts]
  assert not any(seen.is_new(novelty.signature(t)) for t in near)
  assert not seen.is_new(novelty.signature(texts[0].upper() + "!"))


def test_short_and_empty_texts_have_signatures():
  seen = novelty.Duplicates(0.5)
  assert seen.is_new(novelty.signature("one two"))
  assert not seen.is_new(novelty.signature("One, two."))
  assert seen.is_new(novelty.signature("two one"))
  assert seen.is_new(novelty.signature(""))


def trajectory(*texts: str, calls: tuple[str, ...] = ()) -> Trajectory:
  segments = [Segment(Author.PROMPT, "instructions", "the prompt of all of them")]
  segments += [Segment(Author.TOOL, "observation", t) for t in texts]
  return Trajectory("t", segments, [ToolCall("crawl_page", c) for c in calls])


WORDS = st.lists(st.sampled_from(["ann", "bob", "cat", "dog"]), max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS, max_size=3), WORDS, st.integers(2, 5))
def test_a_shared_n_gram_is_what_words_in_common_say(questions, words, n):
  benchmarks = novelty.Benchmarks([" ".join(q) for q in questions], n)
  found = benchmarks.hold("", trajectory(" ".join(words)))
  mine = grams(" ".join(words), n)
  assert found == any(grams(" ".join(q), n) & mine for q in questions)


def test_questions_without_spaces_are_found():
  asked = "".join(map(chr, range(0x5728, 0x5728 + 22)))  # Chinese characters
  benchmarks = novelty.Benchmarks([asked], 8)
  for text in (asked, f"page: {asked[1:]}.", asked[:17] + asked[0] * 9):
    assert benchmarks.hold("", trajectory(text)), text
    assert benchmarks.hold(text, trajectory())
  for part in (asked[:15], asked[5:20], asked[::-1]):  # fewer than 16 letters in a row
    assert not benchmarks.hold(part, trajectory(part)), part


def test_a_question_in_the_prompt_is_found():
  """An imported trajectory may have its question nowhere else."""
  asked = "one two three four five six seven eight"
  held = trajectory("x")
  held.segments[0] = Segment(Author.PROMPT, "question", asked)
  assert novelty.Benchmarks([asked], 8).hold("", held)


def test_what_readers_add_to_questions_makes_no_contamination():
  def choice(question: str, *options: str) -> str:
    row = {"question": question, "choices": list(options), "answer": 0}
    return read_task(row, "row", "0").question

  asked = choice("Which molecule carries energy in a cell?", "ATP", "DNA")
  other = choice("What is a fruit that grows on trees?", "apple", "brick")
  benchmarks = novelty.Benchmarks([asked], 8)
  assert benchmarks.hold(asked, trajectory())
  assert not benchmarks.hold(other, trajectory(other))


def test_other_spellings_in_unicode_are_the_same_words():
  asked = "o\u00f9 \u00e9tudia l'\u00e9crivain n\u00e9 \u00e0 Besan\u00e7on "
  asked += "en f\u00e9vrier 1802"
  benchmarks = novelty.Benchmarks([asked], 8)
  assert benchmarks.hold(unicodedata.normalize("NFD", asked), trajectory())
  assert benchmarks.hold(asked.replace("ri", "ri\u00ad"), trajectory())


def test_a_short_question_counts_only_as_the_whole_question():
  benchmarks = novelty.Benchmarks(["Who wrote Emma?"], 8)
  assert benchmarks.hold("who wrote  emma", trajectory("x"))
  assert not benchmarks.hold("Who?", trajectory("He asked: who wrote Emma? She did."))
  assert not benchmarks.hold("Who wrote Emma then?", trajectory("x"))


@pytest.mark.parametrize(
  ("url", "blocked"),
  [
    ("https://huggingface.co/datasets/gaia", True),
    ("http://www.huggingface.co:443/datasets", True),
    ("a.org | huggingface.co/datasets/x", True),
    ("HTTPS://HuggingFace.co/Datasets/x", True),
    ("https://huggingface.co/models", False),
    ("https://nothuggingface.co/datasets", False),
    ("https://huggingface.co.evil.org/datasets", False),
    ("https://answers.example.net/any", True),
    ("https://web.archive.org/2024/https://huggingface.co/datasets/x", True),
    ("example.com", False),
  ],
)
def test_domains(url, blocked):
  domains = ("huggingface.co/datasets", "example.net")
  assert novelty.visits(trajectory(calls=(url,)), domains) == blocked
  assert not novelty.visits(trajectory(calls=(url,)), ())


@pytest.mark.parametrize("unit", ["a", "a.", "a.aa/", "http://", "-"])
def test_hostile_arguments_take_linear_time(unit):
  # Quadratic time would be hours here.
  assert not novelty.visits(trajectory(calls=(unit * 100_000,)), ("example.net",))


def test_instructions_and_tool_results_make_no_duplicates():
  def text(question: str, plan: str) -> str:
    segments = [
      Segment(Author.PROMPT, "instructions", "Write one span at a time. " * 50),
      Segment(Author.PROMPT, "question", question),
      Segment(Author.POLICY, "plan", plan),
      Segment(Author.TOOL, "observation", "a long page " * 50),
    ]
    return novelty.policy_text(Trajectory("t", segments))

  assert text("Who?", " ask ") == "Who?\n ask "
  # An imported prompt has its instructions and the question in one segment.
  head = Segment(Author.PROMPT, "question", "Rules. " * 50 + "Who?")
  imported = Trajectory("t", [head], meta={"question": "Who?"})
  assert novelty.policy_text(imported) == "Who?"
