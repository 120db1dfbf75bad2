"""Episodes over vLLM's HTTP: the rules of `Scheduler`, and faulty servers."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import scripted_vllm
import toy
from playing import keep_all, threads, versions
from scripted_vllm import play, vllm_worker
from toy import eventually

from coa_jax.data.tasks.sampling import TaskSampler
from coa_jax.learner import batch as batching
from coa_jax.protocol.trajectory import Author, Status
from coa_jax.rollout.collect import RolloutCollector
from coa_jax.rollout.types import SamplingConfig
from coa_jax.rollout.vllm.client import VllmError


def policy_turns(t) -> list[list[int]]:
  turns = itertools.groupby(t.segments[1:], key=lambda s: s.author)
  return [[i for s in g for i in s.ids] for a, g in turns if a == Author.POLICY]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tags are tokens", "tags are text"])
def test_sampled_ids_are_kept_up_to_the_tag_and_none_is_made_anew(tmp_path, kind: str):
  tok = toy.tokenizer() if kind == "tags are tokens" else toy.stock_tokenizer()
  with scripted_vllm.ScriptedVllm(tok) as server:
    on = vllm_worker(server, tmp_path)
    played = play(on)
    bodies = server.completions()
  expected = scripted_vllm.turns_of(tok)
  assert len(played) == 8
  for (question, _), t in played.items():
    assert t.status == Status.ENDED and t.reward == 1.0
    # The server always continued past a turn's end; the extra ids are dropped.
    assert policy_turns(t) == expected[question]
    ids = [i for s in t.segments for i in s.ids]
    assert ids == row_of(tok, question)
    check_batch(t, list(itertools.chain(*expected[question])))
    policy = [s for s in t.segments if s.author == Author.POLICY]
    assert all(s.versions == [5] * len(s.ids) for s in policy)
  num_given = sum(t.usage.prompt + t.usage.observation for t in played.values())
  generated = sum(t.usage.generated for t in played.values())
  counters = on.engine.counters
  assert counters.prefilled_tokens == num_given
  assert counters.sampled_tokens == generated
  assert counters.windows == len(bodies) == sum(map(len, expected.values())) * 2


def check_batch(t, drawn: list[int]) -> None:
  """Checks that exactly these ids are trained, at the positions in their log-probs."""
  batch = batching.empty(1, 256)
  batching.fill(batch, 0, [t], [1.0])
  assert batch.tokens_BT[batch.loss_mask_BT > 0].tolist() == drawn
  positions = np.flatnonzero(batch.loss_mask_BT[0])
  np.testing.assert_allclose(toy.sampled_logps(t), -0.001 * positions, atol=1e-9)


def row_of(tok, question: str) -> list[int]:
  rows = zip(toy.SCRIPTS, scripted_vllm.rows_of(tok), strict=True)
  return dict(rows)[question]


def test_a_token_that_straddles_a_tag_stays_whole(stock, tmp_path):
  """`></` ends `</code>` and begins the policy's next tag."""
  question = "2 + 3"
  prompt = toy.written(question, (), stock)
  stock.encode_prompt(prompt.segments)
  text = toy.code("print(2+3)") + "</answer>"
  turn = stock.encode(text)
  # The first token that completes the tag.
  ends = [stock.decode(turn[: n + 1]) for n in range(len(turn))]
  (stop, *_) = [n for n, so_far in enumerate(ends) if "</code>" in so_far]
  assert ends[stop].endswith("></") and stop < len(turn) - 1
  ids = [i for s in prompt.segments for i in s.ids]
  with scripted_vllm.ScriptedVllm(stock, [ids + turn]) as server:
    server.faults = lambda body: 500 if len(body["prompt"]) > len(ids) else None
    on = vllm_worker(server, tmp_path)
    task = [t for t in toy.TASKS if t.id == question]
    toolbox = toy.TableToolbox()
    ((t,),) = on.generate_groups(toy.params(), task, toolbox, 1, 1.0, 0)
  assert policy_turns(t) == [turn[: stop + 1]]
  assert t.text.endswith("</code></<observation> 5</observation>")
  assert toolbox.calls == [("code", "```py\nprint(2+3)\n```")]
  # The request after the observation failed in every attempt.
  assert t.status == Status.INFRASTRUCTURE and t.reward is None


def test_requests_say_all_that_decides_what_is_sampled(server, tmp_path):
  on = vllm_worker(server, tmp_path, top_k=9)
  play(on, temperature=0.7)
  bodies = server.completions()
  for body in bodies:
    assert (body["temperature"], body["top_k"], body["min_p"]) == (0.7, 9, 0.0)
    assert body["top_p"] == body["repetition_penalty"] == 1.0
    assert body["ignore_eos"] and not body["skip_special_tokens"]
    assert body["max_tokens"] == 256 - len(body["prompt"])
    assert set(body["stop"]) == {"</wiki_search>", "</code>", "</answer>"}
  seeds = {body["seed"] for body in bodies}
  assert len(seeds) == len(bodies) and all(0 <= s < 2**63 for s in seeds)
  server.requests.clear()
  play(on, temperature=0.7)
  assert {body["seed"] for body in server.completions()} == seeds
  server.requests.clear()
  play(on, temperature=0.7, seed=4)
  assert not {body["seed"] for body in server.completions()} & seeds


def test_a_server_that_stops_early_is_asked_for_the_rest(server, tmp_path):
  def short(answer):
    (choice,) = answer["choices"]
    choice["token_ids"] = choice["token_ids"][:4]
    choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:4]
    return answer

  server.faults = lambda body: short
  played = play(vllm_worker(server, tmp_path), samples=1)
  expected = scripted_vllm.turns_of(server.tokenizer)
  assert len(server.completions()) > 2 * sum(map(len, expected.values()))
  for (question, _), t in played.items():
    assert policy_turns(t) == expected[question]
    check_batch(t, list(itertools.chain(*expected[question])))


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_the_budget_is_the_schedulers(server, tmp_path, spare: int):
  """Episodes end at the same tokens as on our own sampler."""
  tok, question = server.tokenizer, "2 + 3"
  segments = toy.written(question, toy.SCRIPTS[question], tok).segments
  called = sum(len(s.ids) for s in segments if s.author == Author.PROMPT)
  called += len(scripted_vllm.turns_of(tok)[question][0])
  observation = len(tok.encode_observation("5").ids)
  # With one place to spare, a single token can be sampled after the observation.
  on = vllm_worker(server, tmp_path, max_len=called + observation + spare)
  task = [t for t in toy.TASKS if t.id == question]
  ((t,),) = on.generate_groups(toy.params(), task, toy.TableToolbox(), 1, 1.0, 0)
  assert t.status == Status.TRUNCATED and t.reward == 0.0
  assert t.usage.observation == (observation if spare == 1 else 0)
  assert t.num_tokens == (called + observation + 1 if spare == 1 else called)


def test_a_prompt_without_room_names_the_field(server, tmp_path):
  with pytest.raises(ValueError, match=r"leaves no room in rollout\.max_len=8; raise"):
    play(vllm_worker(server, tmp_path, max_len=8))


@pytest.mark.slow
def test_weights_change_between_requests_and_each_token_tells_its_policy(
  server, tmp_path
):
  """A request's log-probs are lowered by the number of weight loads before it."""
  gate, requested, piece, steps = threading.Event(), threading.Event(), 6, 5

  def tell(body: dict):
    requested.set()
    assert gate.wait(60)
    loads = len(server.disturbed)

    def change(answer: dict) -> dict:
      logprobs = answer["choices"][0]["logprobs"]
      logprobs["token_logprobs"] = [p - loads for p in logprobs["token_logprobs"]]
      return answer

    return change

  def policy(version: int) -> dict:
    params = toy.params()
    return {**params, "final_norm": params["final_norm"] * (1 + version / 10)}

  server.faults = tell
  on = vllm_worker(server, tmp_path, piece, slots=4)
  sampling = SamplingConfig(prompts=2, samples=2, rounds=1, staleness=1)
  tools = toy.TableToolbox(latency=toy.shuffled_latency(1))
  collector = RolloutCollector(
    on, TaskSampler(toy.TASKS, 0), tools, sampling, keep_all, steps=steps, seed=3
  )
  with collector:
    collector.set_policy(policy(0), 0)
    assert requested.wait(60)
    collector.set_policy(policy(1), 1)
    gate.set()
    played = [collector.next(policy(n), n).played for n in range(1, steps)]
    evaluated = collector.evaluate(policy(steps), steps, toy.TASKS, tools)
  for t in [*itertools.chain(*played), *evaluated]:
    assert (t.status, t.reward) == (Status.ENDED, 1.0)
    logps = toy.sampled_logps(t)
    assert [int(-p) - 1 for p in logps] == versions(t) == sorted(versions(t))
  for t in played[0]:
    first, rest = versions(t)[:piece], versions(t)[piece:]
    assert first == [0] * piece and set(rest) == {1}
  assert {v for t in evaluated for v in versions(t)} == {steps}
  # Weights were loaded once per version, with no request running.
  assert server.disturbed == [0] * (steps + 1)
  assert max(body["max_tokens"] for body in server.completions()) == piece


def only(question: str, server, fault):
  """Returns a `faults` function that fails one question's requests only."""
  row = row_of(server.tokenizer, question)
  return lambda b: fault if row[: len(b["prompt"])] == b["prompt"] else None


def test_a_slow_tool_or_a_hung_request_stalls_no_other(server, tmp_path):
  """All others end while one trajectory waits for a tool, and one for the server."""
  over = threading.Event()

  def reply(name: str, body: str) -> str:
    if body == "Ur":
      assert over.wait(600)
    return toy.TableToolbox().reply(name, body)

  server.faults = only("mixed", server, "hang")
  on = vllm_worker(server, tmp_path, slots=3)
  order = []
  stream = on.generate(toy.params(), toy.TASKS, toy.TableToolbox(reply), 1, 1.0, 0)
  for _, t in stream:
    order.append(t.task_id)
    assert t.status == Status.ENDED
    if len(order) == 2:
      over.set()
      server.release.set()
  assert set(order[:2]) == {"2 + 3", "4 * 4 + 1"} and len(order) == 4


def test_an_abandoned_run_hangs_up(server, tmp_path):
  """One of the first two hangs at its first request; the other one ends."""
  server.faults = only("4 * 4 + 1", server, "hang")
  on = vllm_worker(server, tmp_path, slots=2)
  stream = on.generate(toy.params(), toy.TASKS, toy.TableToolbox(), 1, 1.0, 0)
  _, first = next(stream)
  assert first.task_id == "2 + 3"
  assert server.hangups == 0
  stream.close()
  eventually(lambda: server.hangups == 1 and not threads("vllm engine"))
  assert not server.release.is_set()
  server.faults = lambda body: None
  assert len(play(on)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("fault", [503, "ids", "prompt", "logps", "garbage"])
def test_a_request_that_fails_is_tried_again(server, tmp_path, fault):
  expected = play(vllm_worker(server, tmp_path), samples=1)
  failures = iter([spoil(fault)] * 3)
  server.faults = lambda body: next(failures, None)
  played = play(vllm_worker(server, tmp_path), samples=1)
  assert next(failures, "all used") == "all used"
  for key, t in played.items():
    assert t.status == Status.ENDED
    assert policy_turns(t) == policy_turns(expected[key])


def spoil(fault):
  """Returns an error status, or a function that makes an answer unusable."""
  if isinstance(fault, int):
    return fault

  def change(answer: dict) -> dict:
    (choice,) = answer["choices"]
    if fault == "ids":
      choice["token_ids"][0] = toy.MODEL.vocab_size
    elif fault == "prompt":  # as if the server had encoded the text again
      choice["prompt_token_ids"] = choice["prompt_token_ids"][1:]
    elif fault == "logps":
      choice["logprobs"]["token_logprobs"].pop()
    else:
      return {"object": "error"}
    return answer

  return change


@pytest.mark.parametrize("fault", [500, "ids", "prompt"])
def test_a_lasting_failure_leaves_its_group_and_the_rest_goes_on(
  server, tmp_path, fault
):
  server.faults = only("mixed", server, spoil(fault))
  played = play(vllm_worker(server, tmp_path))
  for (question, _), t in played.items():
    lost = question == "mixed"
    assert t.status == (Status.INFRASTRUCTURE if lost else Status.ENDED)
    assert t.reward == (None if lost else 1.0)
  # The first attempt and three retries, for each of two samples.
  assert sum(map(bool, map(server.faults, server.completions()))) == 2 * 4


def test_a_refusal_ends_the_run_without_a_second_attempt(server, tmp_path):
  server.faults = lambda body: 400
  with pytest.raises(VllmError, match="completions refuses the request, status 400"):
    play(vllm_worker(server, tmp_path, slots=1))
  assert len(server.completions()) == 1


def test_a_server_that_dies_ends_the_run(server, tmp_path):
  server.faults = lambda body: "gone" if len(server.completions()) > 4 else None
  with pytest.raises(VllmError, match=r"the server is gone: .*no usable answer in 4"):
    play(vllm_worker(server, tmp_path))
