"""Third-party chat templates: the same prompt every day, or a one-line error."""

from __future__ import annotations

import datetime
import json
import time

import pytest
import toy

from coa_jax.protocol import chat_template, prompts, roles, tokens
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author, Segment, Trajectory

SAYS = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
# Llama 3.2 takes the date from a variable or function if one is defined.
LLAMA = (
  "{% if not date_string is defined %}{% if strftime_now is defined %}"
  "{% set date_string = strftime_now('%d %b %Y') %}{% else %}"
  "{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}Today: {{ date_string }}"
)
DATES = [
  LLAMA,
  "{% set date_string = strftime_now('%d %b %Y') %}Today: {{ date_string }}",
]


def folder(path, template: str, **state) -> str:
  """Writes a tokenizer folder with this template and these tokenizer.json fields."""
  toy.stock_tokenizer().save(path)
  file = path / "tokenizer_config.json"
  if not (path / "chat_template.jinja").exists():
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": template}))
  else:
    (path / "chat_template.jinja").write_text(template)
  file = path / "tokenizer.json"
  file.write_text(json.dumps({**json.loads(file.read_text()), **state}))
  return str(path)


def prompt(tokenizer: Tokenizer, question: str = "Who?") -> str:
  segments = [Segment(Author.PROMPT, "question", question)]
  tokenizer.encode_prompt(segments)
  return tokenizer.decode(segments[0].ids)


@pytest.mark.parametrize("template", DATES)
def test_the_day_is_the_same_on_every_day(template):
  before, after = chat_template.frame(template + SAYS, {})
  assert (before, after) == ("Today: 26 Jul 2024<|im_start|>", "<|im_end|>")
  assert str(datetime.date.today().year) not in before


def test_a_prompt_is_as_transformers_writes_it(tmp_path):
  template = (
    "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'user' %}\n"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n  {% endif %}\n"
    "{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ tools | tojson }}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
  )
  tokenizer = Tokenizer.load(folder(tmp_path, template))
  tokenizer.hf.bos_token = "<s>"
  rendered = tokenizer.hf.apply_chat_template(
    [{"role": "user", "content": "Who?"}], tokenize=False, add_generation_prompt=True
  )
  tokenizer = Tokenizer(tokenizer.hf)
  assert prompt(tokenizer) == rendered


def test_a_tag_that_the_template_opens_is_the_policys(tmp_path):
  """DeepSeek-R1 and QwQ prefill the tag; a reply without it would be malformed."""
  template = SAYS + "<|im_start|>assistant\n<think>\n"
  tokenizer = Tokenizer.load(folder(tmp_path, template))
  assert prompt(tokenizer).endswith("<|im_end|><|im_start|>assistant\n")
  # A tag that is closed again may stay: the reply is still complete.
  closed = SAYS + "<think>\n\n</think>\n\n"
  tokenizer.hf.chat_template = closed
  assert "</think>" in prompt(Tokenizer(tokenizer.hf))


BAD = [
  ("{{ 1 }}", "shows the user's message nowhere"),
  (SAYS + SAYS, "shows the user's message 2 times"),
  ("{{ messages[0].content | upper }}", "changes the user's message"),
  ("{{ messages[0].content | e }}", "changes the user's message"),
  ("{% for %}", "is not Jinja: Expected an expression"),
  ("{{ raise_exception('no\nsystem') }}", "no.*system"),
  ("{{ 1 / 0 }}", "ZeroDivisionError"),
  ("{{ x.y }}", "'x' is undefined"),
  ("{{ now() }}" + SAYS, "'now' is undefined"),
  ("{{ [1, 2] | random }}" + SAYS, "No filter named 'random'"),
  ("{{ lipsum() }}" + SAYS, "'lipsum' is undefined"),
  ("{{ raise_exception }}" + SAYS, "does not render the same text twice"),
  ("{{ ''.__class__.__mro__ }}" + SAYS, "SecurityError"),
  ("{% include '/etc/passwd' %}" + SAYS, "cannot be used"),
  ("{{ 'x' * 10 ** 10 }}" + SAYS, "MB of memory"),
  ("{{ 'x' * 2000000 }}" + SAYS, "renders 20000.. characters"),
  ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
  (SAYS + "<think>\nOkay, ", "opens <think>"),
  (SAYS + "<plan>", "opens <plan>"),
  (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "takes more than 3 s",
  ),
]


@pytest.mark.parametrize(("template", "words"), BAD)
def test_a_template_that_gives_no_prompt_is_refused_as_it_is_loaded(
  tmp_path, template, words
):
  path = folder(tmp_path, template)
  with pytest.raises(ValueError, match=words) as e:
    Tokenizer.load(path)
  line = str(e.value)
  assert line.startswith(str(tmp_path)) and "chat template" in line
  assert "\n" not in line and len(line) < 600


def test_a_folder_without_a_template_is_named(tmp_path):
  path = folder(tmp_path, "")
  (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
  tokenizer = Tokenizer.load(path)
  with pytest.raises(ValueError, match=f"{tmp_path}: no chat template"):
    prompt(tokenizer)


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
START = {"SpecialToken": {"id": tokens.IM_START, "type_id": 0}}
PAIR = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]


def processing(*single: dict, **special) -> dict:
  names = {"type": "TemplateProcessing", "special_tokens": special}
  return {**names, "single": list(single), "pair": PAIR}


def replace(old, new: str) -> dict:
  return {"type": "Replace", "pattern": old, "content": new}


NFC = {"type": "NFC"}
LONGER = replace({"String": "e"}, "ee")


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("normalizer", LONGER),
    ("normalizer", {"type": "Sequence", "normalizers": [NFC, *[LONGER] * 40]}),
    ("normalizer", replace({"String": ""}, "")),
    ("normalizer", replace({"Regex": ""}, "x")),
    ("normalizer", {"type": "Prepend", "prepend": "x" * 1000}),
    ("normalizer", {"type": "Nope"}),
    ("normalizer", [NFC]),
    ("post_processor", processing()),
    ("post_processor", processing(TEXT, TEXT)),
    ("post_processor", processing(PAIR[1])),
    ("post_processor", {"type": "Sequence", "processors": [processing(TEXT, TEXT)]}),
    ("post_processor", {"type": "Nope"}),
    ("post_processor", {"type": "TemplateProcessing", "single": "A"}),
    ("post_processor", [1]),
  ],
)
def test_a_tokenizer_that_changes_text_is_refused(tmp_path, field, value):
  path = folder(tmp_path, SAYS, **{field: value})
  began = time.monotonic()
  with pytest.raises(ValueError, match=f"tokenizer.json: field '{field}'") as e:
    Tokenizer.load(path)
  assert "\n" not in str(e.value) and len(str(e.value)) < 500
  assert time.monotonic() - began < 20


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("normalizer", NFC),
    ("normalizer", {"type": "Sequence", "normalizers": []}),
    ("normalizer", replace({"String": "ee"}, "e")),
    (
      "post_processor",
      {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": False,
        "use_regex": True,
      },
    ),
    (
      "post_processor",
      processing(
        START,
        TEXT,
        **{tokens.IM_START: {"id": tokens.IM_START, "ids": [1], "tokens": ["x"]}},
      ),
    ),
  ],
)
def test_a_tokenizer_that_keeps_text_is_read(tmp_path, field, value):
  tokenizer = Tokenizer.load(folder(tmp_path, SAYS, **{field: value}))
  assert tokenizer.decode(tokenizer.encode("Who?")) == "Who?"
  assert prompt(tokenizer) == "<|im_start|>Who?<|im_end|>"


def without(path, *bytes_: str) -> str:
  """Writes a tokenizer folder without some bytes, given in GPT-2's alphabet."""
  written = folder(path, SAYS)
  state = json.loads((path / "tokenizer.json").read_text())
  vocab = state["model"]["vocab"]
  for n, byte in enumerate(bytes_, 2):  # its id goes to an unreachable piece
    vocab["?" * n] = vocab.pop(byte)
  (path / "tokenizer.json").write_text(json.dumps(state))
  return written


def test_a_vocabulary_without_bytes_of_text_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"1 bytes have no token \(the first is 122\)"):
    Tokenizer.load(without(tmp_path, "z", "\u0104"))


def test_characters_that_no_token_spells_become_question_marks(tmp_path):
  """SmolLM2's vocabulary lacks bytes of control characters and empty planes."""
  tokenizer = Tokenizer.load(without(tmp_path, "\u0104", "\u00f1", "\u00f2"))
  text = "a\x04b\U00040000\U000bffff\x05\U0003ffff\U000c0000\u00f1<think>\x04"
  spelt = "a?b??\x05\U0003ffff\U000c0000\u00f1<think>?"
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == spelt
  assert tokenizer.decode(tokenizer.encode_untrusted(text)) == spelt
  # A segment's text is unchanged, and its ids are valid for this tokenizer.
  written = Trajectory("t", [Segment(Author.POLICY, "", text)])
  tokenizer.encode_trajectories([written])
  assert written.segments[0].text == text and written.segments[0].ids == ids
  tokenizer.check_ids(written)
  every = Tokenizer.load(folder(tmp_path, SAYS))
  assert every.decode(every.encode(text)) == text


def test_instructions_stand_inside_the_frame(tmp_path):
  tokenizer = Tokenizer.load(folder(tmp_path, SAYS))
  segments = prompts.prompt_segments(roles.get_variant("mhqa"), "Who?", "full")
  tokenizer.encode_prompt(segments)
  assert tokenizer.decode(segments[0].ids).startswith("<|im_start|>Solve the task")
  assert tokenizer.decode(segments[-1].ids) == "Who?<|im_end|>"
