"""Distils a team with a real model behind an OpenAI-compatible endpoint.

  vllm serve Qwen/Qwen2.5-7B-Instruct    # in its own environment
  python -m experiments.distill --config=configs/distill_chat.py \
    --workdir=runs/world/distill_chat

Needs runs/world (experiments.make_world). An interrupted run resumes and pays for no
call twice (calls.jsonl). Expect: no number is on record yet, only runs against test
servers; results.json has the team's accuracy, cost and funnel.
":tiny" (4 tasks): a minute on a served 7B model.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" takes 4 tasks."""
  if arg not in ("", "tiny"):
    raise ValueError(f"distill_chat answers '' and 'tiny', not {arg!r}")
  config = ml_collections.ConfigDict()
  config.tasks = dict(
    uri="runs/world/train_tasks.jsonl",
    limit=4 if arg == "tiny" else 500,
  )
  config.tools = dict(
    tools=("wiki_search", "code"),
    corpus="runs/world/train_pages.jsonl",
    top_k=3,
    workers=2,
    max_chars=1536,  # limit per tool result in a chat
  )
  config.teacher = dict(
    backend="chat",
    workers=16,
    variant="unified",
    prompt="full",
    facts=True,
    samples=1,  # with 3 and select=True: best of 3
    select=False,
  )
  config.chat = dict(
    base_url="http://localhost:8000/v1", model="Qwen/Qwen2.5-7B-Instruct"
  )
  config.filters = dict(min_activations=5, keep_unreflected=0.5, corrected_copies=2)
  return config
