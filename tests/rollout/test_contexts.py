"""Trajectories with several contexts: reading, sampling, scoring and training."""

from __future__ import annotations

import dataclasses
import itertools
import queue

import numpy as np
import pytest
import toy
from playing import CONFIG, content, toy_worker

from coa_jax.learner import batch as batching
from coa_jax.learner.compaction import compacted
from coa_jax.protocol.contexts import REMOVED, ContextConfig, leave_context
from coa_jax.protocol.parser import parse
from coa_jax.protocol.roles import CONTEXT_SUMMARY, OBSERVATION
from coa_jax.protocol.trajectory import Author, Segment, Status, Trajectory
from coa_jax.report import viewer
from coa_jax.rollout.streaming import InferenceRequest, InferenceServer, TextDelta
from coa_jax.rollout.vllm.client import VllmConfig

pytestmark = pytest.mark.slow  # all but one test need a trained policy

# One long page of the toy tools fits into the context, two do not.
FILLER = " and so on" * 6
ROOM = 150
CONTEXT = ContextConfig(count=3, keep=1, leave_at=130)
CONFIG = dataclasses.replace(CONFIG, max_len=ROOM, context=CONTEXT)
# Or every page is summarised.
SUMMARIES = dataclasses.replace(
  CONFIG, max_len=170, context=ContextConfig(count=4, keep=0, leave_at=60)
)


class LongPages(toy.TableToolbox):
  """Answers from the table, with filler text appended."""

  def _call(self, name, arguments, seconds):
    call = super()._call(name, arguments, seconds)
    return dataclasses.replace(call, result=call.result + FILLER)


def long_trajectories() -> list[Trajectory]:
  out = []
  for question, script in toy.SCRIPTS.items():
    turns = [text + FILLER * (n % 2) for n, text in enumerate(script)]
    out.append(toy.written(question, turns, toy.tokenizer()))
  return out


def memorised(context: ContextConfig) -> dict:
  """A policy that has memorised the scripts, split into contexts as in SFT."""
  whole = [compacted(t, context, toy.tokenizer()) for t in long_trajectories()]
  rows = [row for t in whole for row in t.split()]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(toy, "MAX_LEN", 3 * ROOM)
    return toy.train(rows, 300, toy.MODEL).params


@pytest.fixture(scope="module")
def policy() -> dict:
  return memorised(CONTEXT)


@pytest.fixture(scope="module")
def summariser() -> dict:
  return memorised(SUMMARIES.context)


def play(
  policy, temperature: float = 1.0, tools=None, config=CONFIG, **changes
) -> list[Trajectory]:
  config = dataclasses.replace(config, **changes)
  with toy_worker(toy.MODEL, config) as worker:
    groups = worker.generate_groups(
      policy, toy.TASKS, tools or LongPages(), 3, temperature, seed=3
    )
  return [t for group in groups for t in group]


def assert_allowed(played, constraint, length: int) -> None:
  """Every trained token is allowed by the grammar of its own row."""
  rows = [context for t in played for context in t.split()]
  for batch in batching.batches(rows, 4, length, [0.0] * len(rows), constraint):
    states = batch.grammar_BT[batch.loss_mask_BT > 0]
    tokens = batch.tokens_BT[batch.loss_mask_BT > 0]
    assert (constraint.next_SC[states, constraint.class_V[tokens]] >= 0).all()


def ids(played) -> list[list[list[int]]]:
  return [[s.ids for s in t.segments] for t in played]


@pytest.fixture(scope="module")
def played(policy) -> list[Trajectory]:
  return play(policy)


def test_questions_whose_pages_do_not_fit_are_answered(policy):
  long = [t.task_id for t in long_trajectories() if t.num_tokens > ROOM]
  assert long == ["4 * 4 + 1", "mixed"]
  solved = {t.task_id for t in play(policy, 0.0) if t.reward == 1}
  assert solved == {task.id for task in toy.TASKS}
  for t in play(policy, 0.0, context=ContextConfig()):
    if t.task_id in long:
      assert t.status == Status.TRUNCATED


def test_the_next_context_repeats_all_but_old_observations(played):
  several = [t for t in played if len(t.split()) > 1]
  assert several
  for t in several:
    first, second = t.split()[:2]
    repeated = [s for s in second.segments if s.author == Author.CARRIED]
    before = [s for s in first.segments if s.author != Author.PROMPT]
    assert [s.role for s in repeated] == [s.role for s in before]
    for a, b in zip(repeated, before, strict=True):
      assert (REMOVED in a.text) if a.role == OBSERVATION else (a.ids == b.ids)
      assert not a.logps
    # The new observation is read once, in the second context.
    new = second.segments[len(repeated) + 1]
    assert (new.author, new.role) == (Author.TOOL, OBSERVATION)
    assert first.segments[-1].author == Author.POLICY
    assert t.text.count(OBSERVATION) == 2 * len(t.calls)
    # Usage counts each context's beginning, and each observation once.
    begun = [s for c in t.split() for s in c.segments]
    kinds = (Author.PROMPT, Author.CARRIED)
    assert t.usage.prompt == sum(len(s.ids) for s in begun if s.author in kinds)
    assert t.usage.total == t.num_tokens
    assert t.usage.model_calls == len(t.split())


def test_sampler_log_probs_are_learner_log_probs(policy, played, monkeypatch):
  monkeypatch.setattr(toy, "MAX_LEN", ROOM)
  rows = [context for t in played for context in t.split()]
  theirs = toy.logps_of(toy.MODEL, policy, rows)
  for row, expected in zip(rows, theirs, strict=True):
    np.testing.assert_allclose(toy.sampled_logps(row), expected, rtol=0, atol=2e-5)


def test_windows_and_latency_change_nothing(policy, played):
  tools = LongPages(latency=toy.shuffled_latency(1))
  again = play(policy, tools=tools, window=3)
  assert list(map(content, again)) == list(map(content, played))
  # Other shapes may round log-probs differently.
  assert ids(play(policy, slots=2)) == ids(played)


def test_the_page_shows_what_a_context_repeats(played):
  t = next(t for t in played if len(t.split()) == 2 and len(t.calls) == 2)
  shown = viewer.blocks(t, parse(t.text, toy.VARIANT))
  (place,) = (n for n, span in enumerate(shown) if span.author == Author.CARRIED)
  assert REMOVED in shown[place].content
  assert shown[place + 1].segments == [t.split()[1].written[0]]
  del shown[place]
  assert "".join(s.text for span in shown for s in span.segments) == t.text


@pytest.mark.parametrize("keep", [1, 2, 4, 5, 9])
def test_the_newest_observations_are_kept_whole(keep):
  marker = Segment(Author.TOOL, OBSERVATION, REMOVED, [0])
  segments = [Segment(Author.PROMPT, "question", "q", [1])]
  for n in range(5):
    segments.append(Segment(Author.POLICY, "code", f"c{n}", [2]))
    segments.append(Segment(Author.TOOL, OBSERVATION, f"o{n}", [3] * 10))
  context = ContextConfig(count=2, keep=keep, leave_at=50)
  following = leave_context(Trajectory("t", segments), context, marker)
  if keep >= 5:  # nothing to remove: the context is used to its end
    assert following is None
    return
  shown = [s.text for s in following if s.role == OBSERVATION]
  assert shown == [REMOVED] * (5 - keep) + [f"o{n}" for n in range(5 - keep, 5)]


def test_contexts_are_not_split_again():
  context = ContextConfig(count=3, keep=0, leave_at=100)
  for t in long_trajectories():
    split = compacted(t, context, toy.tokenizer())
    if len(split.split()) > 1:
      assert compacted(split, context, toy.tokenizer()) == split


def test_a_summary_may_begin_within_a_token():
  """Published tokenizers have a token for `><`."""
  context = ContextConfig(count=3, keep=0, leave_at=10_000)
  episode = toy.episode(toy.TASKS[1], toy.TableToolbox(), context=context)
  tok = episode.tokenizer = toy.stock_tokenizer()
  episode.start()
  closing = f"</{CONTEXT_SUMMARY}>"
  ids = tok.encode(f"<think> so far 5</think><{CONTEXT_SUMMARY}> s{closing}")
  assert any(tok.decode([i]) == "><" for i in ids)
  assert episode.sampled(ids, [0.0] * len(ids), closing) is None
  carried = episode.trajectory.split()[-1].segments[-1]
  assert carried.author == Author.CARRIED and carried.ids == ids


def test_an_episode_begins_its_next_context_with_another_seed():
  long = toy.TASKS[1]
  episode = toy.episode(long, LongPages(), context=CONTEXT)
  prompt = episode.start()
  tok, script = toy.tokenizer(), toy.SCRIPTS[long.id]
  for turn in (script[0], script[2]):
    assert not episode.continues
    ids = tok.encode(turn)
    call = episode.sampled(ids, [0.0] * len(ids), "</code>")
    ids = episode.observed(call.result())
  assert ids is None and episode.continues
  assert episode.seed != 3
  following = episode.start()
  assert following[: len(prompt)] == prompt
  assert len(following) <= CONTEXT.leave_at


@pytest.mark.parametrize("constrain", [False, True])
def test_rescoring_gives_the_samplers_log_probs_bit_for_bit(policy, constrain):
  config = dataclasses.replace(CONFIG, constrain=constrain)
  with toy_worker(toy.MODEL, config) as worker:
    groups = worker.generate_groups(policy, toy.TASKS, LongPages(), 3, 1.0, seed=3)
    played = [t for group in groups for t in group]
    again = worker.rescore(policy, played, 1.0)
    constraint = worker.constraint
  assert any(len(t.split()) > 1 for t in played)
  assert again == [toy.sampled_logps(t) for t in played]
  if constrain:
    assert_allowed(played, constraint, ROOM)


def test_only_newly_sampled_tokens_are_trained(played):
  for t in played:
    rows = t.split()
    (batch,) = batching.batches(rows, len(rows), ROOM, [1.0] * len(rows))
    assert batch.loss_mask_BT.sum() == t.num_policy == t.usage.generated


@pytest.fixture(scope="module")
def summarised(summariser) -> list[Trajectory]:
  return play(summariser, config=SUMMARIES, constrain=True)


def test_summaries_answer_questions_whose_pages_do_not_fit(summariser):
  played = play(summariser, 0.0, config=SUMMARIES)
  assert {t.task_id for t in played if t.reward == 1} == set(toy.SCRIPTS)
  assert {len(t.split()) for t in played if t.task_id == "4 * 4 + 1"} == {3}
  (long,) = [t for t in long_trajectories() if t.num_tokens > SUMMARIES.max_len]
  assert long.task_id == "4 * 4 + 1"


def test_the_next_context_repeats_the_prompt_and_the_summary(summarised):
  several = [t for t in summarised if len(t.split()) > 1]
  assert several
  for t in several:
    for before, after in itertools.pairwise(t.split()):
      *_, full, tag, summary = before.segments
      assert full.role == OBSERVATION and before.num_tokens > SUMMARIES.context.leave_at
      assert (tag.author, summary.author) == (Author.ENVIRONMENT, Author.POLICY)
      assert tag.role == summary.role == CONTEXT_SUMMARY
      assert len(summary.logps) == len(summary.versions) == len(summary.ids)
      repeated = [s for s in after.segments if s.author == Author.CARRIED]
      assert [s.ids for s in repeated] == [tag.ids + summary.ids]
      assert after.segments[0].ids == before.segments[0].ids
    assert t.usage.total == t.num_tokens
    assert t.usage.generated == t.num_policy
    # The text has each summary once, and parses.
    assert t.text.count(f"<{CONTEXT_SUMMARY}>") == len(t.split()) - 1
    if t.status == Status.ENDED:
      assert parse(t.text, toy.VARIANT).ok


def test_summaries_are_scored_alike_by_learner_rescoring_and_grammar(
  summariser, summarised, monkeypatch
):
  config = dataclasses.replace(SUMMARIES, constrain=True)
  with toy_worker(toy.MODEL, config) as worker:
    again = worker.rescore(summariser, summarised, 1.0)
    constraint = worker.constraint
  assert again == [toy.sampled_logps(t) for t in summarised]
  assert_allowed(summarised, constraint, 170)
  # Without the grammar the learner's log-probs are the sampler's too.
  monkeypatch.setattr(toy, "MAX_LEN", SUMMARIES.max_len)
  free = play(summariser, config=SUMMARIES)
  rows = [context for t in free for context in t.split()]
  theirs = toy.logps_of(toy.MODEL, summariser, rows)
  for row, expected in zip(rows, theirs, strict=True):
    np.testing.assert_allclose(toy.sampled_logps(row), expected, rtol=0, atol=2e-5)


def test_summaries_do_not_depend_on_windows_and_latency(summariser, summarised):
  tools = LongPages(latency=toy.shuffled_latency(1))
  again = play(summariser, tools=tools, window=3, config=SUMMARIES, constrain=True)
  assert list(map(content, again)) == list(map(content, summarised))
  fewer = play(summariser, slots=2, config=SUMMARIES, constrain=True)
  assert ids(fewer) == ids(summarised)


@pytest.mark.parametrize("kind", ["policy", "summariser"])
def test_a_server_streams_every_context(kind, request):
  params = request.getfixturevalue(kind)
  config = SUMMARIES if kind == "summariser" else CONFIG
  (expected,) = [
    t for t in play(params, 0.0, config=config)[::3] if t.task_id == toy.TASKS[1].id
  ]
  events: queue.SimpleQueue = queue.SimpleQueue()

  def ask(**fields) -> tuple[str, Trajectory | None]:
    asked = InferenceRequest(expected.meta["question"], 0.0, **fields)
    server.submit(asked, events.put)
    text = ""
    while isinstance(event := events.get(timeout=120), TextDelta):
      text += event.text
    return text, event

  with (
    toy_worker(toy.MODEL, config) as worker,
    InferenceServer(worker, params, LongPages()) as server,
  ):
    text, t = ask()
    assert len(t.split()) == len(expected.split()) > 1
    assert [s.ids for s in t.segments] == [s.ids for s in expected.segments]
    assert text == t.text and t.status == Status.ENDED
    # The limit counts the sampled tokens of all contexts.
    most = t.usage.generated - 5
    text, t = ask(max_tokens=most)
    assert (t.status, t.usage.generated) == (Status.TRUNCATED, most)
    assert len(t.split()) == len(expected.split()) and text == t.text


def test_the_sampled_tokens_of_all_contexts_are_limited(policy, played):
  most = max(t.usage.generated for t in played if len(t.split()) > 1) - 5
  for free, t in zip(played, play(policy, max_sampled=most), strict=True):
    assert t.usage.generated == min(free.usage.generated, most)
    if free.usage.generated > most:
      assert t.status == Status.TRUNCATED
      assert free.text.startswith(t.text)
    else:
      assert content(t) == content(free)


def test_the_last_context_can_not_be_summarised():
  long = toy.TASKS[1]
  context = ContextConfig(count=2, keep=0, leave_at=100)
  episode = toy.episode(long, LongPages(), context=context)
  tok, script = toy.tokenizer(), toy.SCRIPTS[long.id]
  episode.start()

  def write(text: str, tag: str):
    ids = tok.encode(text)
    return episode.sampled(
      episode.forced() + ids, [0.0] * (len(episode.forced()) + len(ids)), tag
    )

  episode.observed(write(script[0], "</code>").result())
  assert episode.forced() == []
  episode.observed(write(script[2], "</code>").result())
  assert tok.decode(episode.forced()) == f"<{CONTEXT_SUMMARY}>"
  closing = f"</{CONTEXT_SUMMARY}>"
  assert write(f" 16 and 17{closing}", closing) is None and episode.continues
  assert episode.seed != 3
  episode.continues = False
  # A summary that the policy begins itself.
  assert write(f"<{CONTEXT_SUMMARY}> again{closing}", closing) is None
  assert not episode.continues and episode.trajectory.status == Status.TRUNCATED


def test_vllm_can_not_begin_summaries():
  with pytest.raises(ValueError, match=r"rollout\.context\.keep=0 .* section vllm"):
    toy_worker(toy.MODEL, SUMMARIES, vllm=VllmConfig("model"))
