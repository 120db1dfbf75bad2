"""Episodes over vLLM's HTTP: the laws of `Scheduler`, and servers that misbehave."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator

import httpx
import ml_collections
import numpy as np
import pytest
import scripted_vllm
import toy
from scripted_vllm import ScriptedVllm

from coa_jax import evaluate
from coa_jax.learner import batch as batching
from coa_jax.model.weights import save_model
from coa_jax.protocol.trajectory import Author, Status, read_trajectories
from coa_jax.rollout.episodes import Player
from coa_jax.rollout.scheduler import RolloutConfig
from coa_jax.rollout.vllm_server import VllmConfig, VllmError

CONFIG = RolloutConfig(style="brief", slots=3, max_len=256)


@pytest.fixture
def server(tokenizer) -> Iterator[ScriptedVllm]:
  """A scripted server over the toy tokenizer."""
  with scripted_vllm.serve(tokenizer) as state:
    yield state


def player(server: ScriptedVllm, folder, vllm: dict | None = None, **changes) -> Player:
  config = dataclasses.replace(CONFIG, **changes)
  vllm = server.config(str(folder / "served"), **(vllm or {}))
  return Player(toy.MODEL, server.tokenizer, config, toy.TOOLS, vllm=vllm)


def play(on: Player, toolbox=None, samples: int = 2, seed: int = 3, **changes):
  """Every trajectory by (task, sample)."""
  args = dict(temperature=1.0, version=5, params=toy.params()) | changes
  params, toolbox = args.pop("params"), toolbox or toy.TableToolbox()
  groups = on.groups(params, toy.TASKS, toolbox, samples, seed=seed, **args)
  return {(t.task_id, t.sample): t for group in groups for t in group}


def policy_turns(t) -> list[list[int]]:
  turns = itertools.groupby(t.segments[1:], key=lambda s: s.author)
  return [[i for s in g for i in s.ids] for a, g in turns if a == Author.POLICY]


@pytest.mark.parametrize("kind", ["tags are tokens", "tags are text"])
def test_sampled_ids_are_kept_up_to_the_tag_and_none_is_made_anew(tmp_path, kind: str):
  tok = toy.tokenizer() if kind == "tags are tokens" else toy.stock_tokenizer()
  with scripted_vllm.serve(tok) as server:
    on = player(server, tmp_path)
    played = play(on)
    bodies = server.completions()
  expected = scripted_vllm.turns_of(tok)
  assert len(played) == 8
  for (question, _), t in played.items():
    assert t.status == Status.ENDED and t.reward == 1.0
    # The server always went on past the end of a turn; nothing of that is left.
    assert policy_turns(t) == expected[question]
    ids = [i for s in t.segments for i in s.ids]
    assert ids == row_of(tok, question)
    batch = batching.empty(1, 256)
    batching.fill(batch, 0, [t], [1.0])
    drawn = list(itertools.chain(*expected[question]))
    assert batch.tokens_BT[batch.weight_BT > 0].tolist() == drawn
    # A log-prob tells the place of its id.
    places = np.flatnonzero(batch.weight_BT[0])
    np.testing.assert_allclose(toy.sampled_logps(t), -0.001 * places, atol=1e-9)
    policy = [s for s in t.segments if s.author == Author.POLICY]
    assert all(s.versions == [5] * len(s.ids) for s in policy)
  given = sum(t.usage.prompt + t.usage.observation for t in played.values())
  generated = sum(t.usage.generated for t in played.values())
  counters = on.scheduler.counters
  assert counters.prefilled_tokens == given
  assert counters.sampled_tokens == generated
  assert counters.windows == len(bodies) == sum(map(len, expected.values())) * 2


def row_of(tok, question: str) -> list[int]:
  rows = zip(toy.SCRIPTS, scripted_vllm.rows_of(tok), strict=True)
  return dict(rows)[question]


def test_a_token_that_straddles_a_tag_stays_whole(stock, tmp_path):
  """`></` ends `</code>` and begins what the policy would have written next."""
  question = "2 + 3"
  prompt = toy.written(question, (), stock)
  stock.encode_prompt(prompt.segments)
  text = toy.code("print(2+3)") + "</answer>"
  turn = stock.encode(text)
  # The first token at whose end the bytes so far hold the whole tag.
  ends = [stock.decode(turn[: n + 1]) for n in range(len(turn))]
  (stop, *_) = [n for n, so_far in enumerate(ends) if "</code>" in so_far]
  assert ends[stop].endswith("></") and stop < len(turn) - 1
  ids = [i for s in prompt.segments for i in s.ids]
  with scripted_vllm.serve(stock, [ids + turn]) as server:
    server.faults = lambda body: 500 if len(body["prompt"]) > len(ids) else None
    on = player(server, tmp_path)
    task = [t for t in toy.TASKS if t.id == question]
    toolbox = toy.TableToolbox()
    ((t,),) = on.groups(toy.params(), task, toolbox, 1, 1.0, 0)
  assert policy_turns(t) == [turn[: stop + 1]]
  assert t.text.endswith("</code></<observation> 5</observation>")
  assert toolbox.calls == [("code", "```py\nprint(2+3)\n```")]
  # The turn after the observation failed for good.
  assert t.status == Status.INFRASTRUCTURE and t.reward is None


def test_requests_say_all_that_decides_what_is_sampled(server, tmp_path):
  on = player(server, tmp_path, top_k=9, min_p=0.02)
  play(on, temperature=0.7)
  bodies = server.completions()
  for body in bodies:
    assert (body["temperature"], body["top_k"], body["min_p"]) == (0.7, 9, 0.02)
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
  played = play(player(server, tmp_path), samples=1)
  expected = scripted_vllm.turns_of(server.tokenizer)
  assert {q: policy_turns(t) for (q, _), t in played.items()} == expected
  assert len(server.completions()) > 2 * sum(map(len, expected.values()))
  for t in played.values():
    batch = batching.empty(1, 256)
    batching.fill(batch, 0, [t], [1.0])
    places = np.flatnonzero(batch.weight_BT[0])
    np.testing.assert_allclose(toy.sampled_logps(t), -0.001 * places, atol=1e-9)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_the_budget_is_the_schedulers(server, tmp_path, spare: int):
  """As the same episodes over our own sampler end, so do they here."""
  tok, question = server.tokenizer, "2 + 3"
  segments = toy.written(question, toy.SCRIPTS[question], tok).segments
  called = sum(len(s.ids) for s in segments if s.author == Author.PROMPT)
  called += len(scripted_vllm.turns_of(tok)[question][0])
  observation = len(tok.encode_observation("5").ids)
  # With one to spare a single token can be sampled after the observation.
  on = player(server, tmp_path, max_len=called + observation + spare)
  task = [t for t in toy.TASKS if t.id == question]
  ((t,),) = on.groups(toy.params(), task, toy.TableToolbox(), 1, 1.0, 0)
  assert t.status == Status.TRUNCATED and t.reward == 0.0
  assert t.usage.observation == (observation if spare == 1 else 0)
  assert t.num_tokens == (called + observation + 1 if spare == 1 else called)


def test_a_prompt_without_room_names_the_field(server, tmp_path):
  with pytest.raises(ValueError, match=r"leaves no room in rollout\.max_len=8; raise"):
    play(player(server, tmp_path, max_len=8))


def test_a_slow_tool_or_a_hung_request_stalls_no_other(server, tmp_path):
  """All other trajectories end while one waits for a tool and one for the server."""
  over = threading.Event()

  def reply(name: str, body: str) -> str:
    if body == "Ur":
      assert over.wait(20)
    return toy.TableToolbox().reply(name, body)

  hung = row_of(server.tokenizer, "mixed")
  server.faults = lambda b: "hang" if hung[: len(b["prompt"])] == b["prompt"] else None
  on = player(server, tmp_path, slots=3)
  order = []
  stream = on.play(toy.params(), toy.TASKS, toy.TableToolbox(reply), 1, 1.0, 0)
  for _, t in stream:
    order.append(t.task_id)
    assert t.status == Status.ENDED
    if len(order) == 2:
      over.set()
      server.release.set()
  assert set(order[:2]) == {"2 + 3", "4 * 4 + 1"} and len(order) == 4


def test_an_abandoned_run_hangs_up(server, tmp_path):
  server.faults = lambda body: "hang" if len(server.completions()) > 3 else None
  on = player(server, tmp_path, slots=2)
  stream = on.play(toy.params(), toy.TASKS, toy.TableToolbox(), 1, 1.0, 0)
  next(stream)
  stream.close()  # returns though a request hangs
  server.faults = lambda body: None
  assert len(play(on)) == 8


def test_a_queue_may_have_nothing_for_now(server, tmp_path):
  on = player(server, tmp_path, slots=2)
  toolbox = toy.TableToolbox(latency=lambda: 0.1)
  first, second = (toy.episode(toy.TASKS[n], toolbox, n) for n in range(2))
  queue = iter([first, None, None, second])
  done = list(on.scheduler.run(toy.params(), queue, 0))
  assert [e.trajectory.task_id for e in done] == [toy.TASKS[0].id, toy.TASKS[1].id]


@pytest.mark.parametrize("fault", [500, 503, 429, "ids", "prompt", "logps", "garbage"])
def test_a_request_that_fails_is_tried_again(server, tmp_path, fault):
  expected = play(player(server, tmp_path), samples=1)
  failures = iter([spoil(fault)] * 3)
  server.faults = lambda body: next(failures, None)
  played = play(player(server, tmp_path), samples=1)
  assert next(failures, "all used") == "all used"
  for key, t in played.items():
    assert t.status == Status.ENDED
    assert policy_turns(t) == policy_turns(expected[key])


def spoil(fault):
  """A status, or a change of an answer that makes it useless."""
  if isinstance(fault, int):
    return fault

  def change(answer: dict) -> dict:
    (choice,) = answer["choices"]
    if fault == "ids":
      choice["token_ids"][0] = toy.MODEL.vocab_size
    elif fault == "prompt":  # as if it had encoded the text anew
      choice["prompt_token_ids"] = choice["prompt_token_ids"][1:]
    elif fault == "logps":
      choice["logprobs"]["token_logprobs"].pop()
    else:
      return {"object": "error"}
    return answer

  return change


@pytest.mark.parametrize("fault", [500, "ids", "prompt"])
def test_what_fails_for_good_leaves_its_group_and_the_rest_goes_on(
  server, tmp_path, fault
):
  bad = row_of(server.tokenizer, "mixed")
  server.faults = lambda body: (
    spoil(fault) if bad[: len(body["prompt"])] == body["prompt"] else None
  )
  played = play(player(server, tmp_path))
  for (question, _), t in played.items():
    lost = question == "mixed"
    assert t.status == (Status.INFRASTRUCTURE if lost else Status.ENDED)
    assert t.reward == (None if lost else 1.0)
  # The first attempt and three retries, for each of two samples.
  asked = [b for b in server.completions() if bad[: len(b["prompt"])] == b["prompt"]]
  assert len(asked) == 2 * 4


def test_a_refusal_ends_the_run_without_a_second_attempt(server, tmp_path):
  server.faults = lambda body: 400
  with pytest.raises(VllmError, match="completions refuses the request, status 400"):
    play(player(server, tmp_path, slots=1))
  assert len(server.completions()) == 1


def test_a_server_that_dies_ends_the_run(server, tmp_path):
  server.faults = lambda body: "gone" if len(server.completions()) > 4 else None
  with pytest.raises(VllmError, match=r"the server is gone: .*no usable answer in 4"):
    play(player(server, tmp_path))


def test_weights_are_loaded_once_and_whenever_they_change(server, tmp_path):
  def loads() -> list[str]:
    paths = [path for path, _ in server.requests]
    names = ("/collective_rpc", "/reset_prefix_cache", "/weight_checker")
    return [p for p in paths if p in names]

  on, one = player(server, tmp_path), toy.params()
  play(on, params=one)
  once = ["/collective_rpc", "/reset_prefix_cache", "/weight_checker"]
  assert loads() == once and server.folder == str(tmp_path / "served")
  play(on, params=one)
  assert loads() == once
  # One array of many is another.
  other = {**one, "final_norm": one["final_norm"] * 1.5}
  play(on, params=other)
  assert loads() == once * 2


@pytest.mark.parametrize("dishonest", [False, True])
def test_other_weights_than_ours_are_found_out(server, tmp_path, dishonest: bool):
  """By their digests; and where those are of what is not used, by what they compute."""
  other = str(tmp_path / "other")
  save_model(other, toy.MODEL, toy.params(1))
  on = player(server, tmp_path)
  play(on)
  server.stale, server.dishonest = other, dishonest
  changed = {**toy.params(), "final_norm": toy.params()["final_norm"] * 1.01}
  message = "does not compute what" if dishonest else "does not serve the weights in"
  for _ in range(2):  # a refused refresh is not taken for a proven one
    with pytest.raises(VllmError, match=message):
      play(on, params=changed)
  server.stale = ""
  assert len(play(on, params=changed)) == 8


def test_a_single_bit_is_found_out(server, tmp_path):
  one = toy.params()
  almost = {**one, "final_norm": one["final_norm"].at[3].add(2.0**-23)}
  server.stale = str(tmp_path / "almost")
  save_model(server.stale, toy.MODEL, almost)
  with pytest.raises(VllmError, match=r"1 of \d+ tensors differ: model\.norm\.weight"):
    play(player(server, tmp_path), params=one)


@pytest.mark.parametrize(
  ("says", "message"),
  [
    ({"max_model_len": 255}, "rows of 255 tokens, rollout.max_len=256: .*--max-model"),
    ({"model": None}, "server_info.* status 404.*VLLM_SERVER_DEV_MODE=1"),
    ({"model": {"logprobs_mode": "raw_logprobs"}}, "--logprobs-mode=processed_logprob"),
  ],
)
def test_a_server_without_a_flag_is_refused_by_name(server, tmp_path, says, message):
  for name, value in says.items():
    setattr(server, name, value)
  with pytest.raises(VllmError, match=message):
    player(server, tmp_path)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"constrain": True}, r"rollout\.constrain=True does not go with section vllm"),
    ({"min_p": 0.1, "top_p": 0.9}, r"min_p and rollout\.top_p do not go together"),
  ],
)
def test_what_vllm_can_not_do_is_refused_unasked(server, tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    player(server, tmp_path, **changes)
  assert server.requests == []


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"url": "localhost:8000"}, "must start with http://"),
    ({"folder": ""}, "name a folder"),
    ({"retries": -1}, "retries at least 0"),
  ],
)
def test_impossible_sections_are_refused(changes, message: str):
  with pytest.raises(ValueError, match=message):
    VllmConfig(**{"folder": "x", **changes})


def journey(server: ScriptedVllm, folder) -> ml_collections.ConfigDict:
  toy.save_policy(str(folder / "model"), toy.params())
  tasks = folder / "tasks.jsonl"
  tasks.write_text('{"id": "2 + 3", "question": "2 + 3", "answers": ["5"]}\n')
  vllm = dict(url=server.url, folder=str(folder / "served"), retries=0)
  return ml_collections.ConfigDict(
    dict(
      init=str(folder / "model"),
      rollout=dict(style="brief", slots=2, max_len=128),
      tools=dict(tools=("code",)),
      tasks=dict(uri=str(tasks)),
      eval=dict(samples=2),
      vllm=vllm,
    )
  )


def test_evaluate_plays_on_the_server(server, tmp_path):
  """Greedy and sampled, with the real tool."""
  results = evaluate.run(journey(server, tmp_path), str(tmp_path / "w"))
  assert results["counters"]["windows"] == 2 * 3
  temperatures = sorted(body["temperature"] for body in server.completions())
  assert temperatures == [0.0] * 2 + [1.0] * 4
  for name, number in (("greedy", 1), ("sampled", 2)):
    played = read_trajectories(str(tmp_path / "w" / f"{name}.jsonl"))
    assert [(t.status, t.reward) for t in played] == [(Status.ENDED, 1.0)] * number


def test_no_server_is_one_clear_error_before_any_work(server, tmp_path):
  config = journey(server, tmp_path)
  config.vllm.url = "http://127.0.0.1:9"
  with pytest.raises(
    VllmError, match=r"127\.0\.0\.1:9/v1/models gave no usable answer"
  ):
    evaluate.run(config, str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()


def test_the_scripted_server_is_a_server(server):
  assert httpx.get(server.url + "/nothing").status_code == 404
