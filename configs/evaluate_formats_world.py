"""Accuracy by tool format: as trained, augmented, never seen; and with other tools.

  python -m experiments.studies.tool_formats \
    --config=configs/evaluate_formats_world.py --workdir=runs/world/formats

Needs a model that reads its prompt, so one trained on full prompts:

  python -m experiments.make_world --directory=runs/world
  python -m experiments.distill --config=configs/distill_world.py \
    --workdir=runs/world/distill_formats --config.teacher.prompt=full \
    --config.formats.copies=1
  python -m experiments.sft --config=configs/sft_world.py \
    --workdir=runs/world/sft_formats --config.data.length=640 \
    --config.data.trajectories=runs/world/distill_formats/trajectories.jsonl

Expect: 0.64 native, 0.20 and 0.64 in seen formats, 0.00 in unseen ones and with another
search tool: a model of a million parameters learns names, not to read them. 19 minutes
of training and 4 of evaluation on two cores of a Xeon. ":tiny": half a minute.
"""

import ml_collections

from experiments import calculator


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config; `arg` "tiny" plays 8 tasks in one format of each kind."""
  if arg not in ("", "tiny"):
    raise ValueError(f"evaluate_formats_world answers '' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  config = ml_collections.ConfigDict()
  world = "world_tiny" if tiny else "world"
  config.init = f"runs/{world}/sft_formats/model"
  config.model = dict(remat="none")
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.rollout = dict(
    variant="unified",
    style="full",
    slots=16 if tiny else 64,
    window=8,
    max_len=768,
    max_calls=8,
    inject_rows=4,
    constrain=False,
    seed=1,
  )
  tools = dict(
    tools=("wiki_search", "code"),
    corpus="runs/world/test_pages.jsonl",
    top_k=1,
    workers=2,
  )
  config.tools = tools
  config.tasks = dict(
    uri="runs/world/test_tasks.jsonl", limit=8 if tiny else 300, families=()
  )
  config.eval = dict(greedy=True, samples=0)
  config.formats = dict(
    seen=1 if tiny else 2,
    unseen=1 if tiny else 4,
    tools=dict(
      web_search={**tools, "tools": ("web_search", "code")},
      calculator={
        **tools,
        "tools": ("wiki_search", "tool"),
        "functions": dict(calculate=calculator.TOOL),
      },
    ),
  )
  return config
