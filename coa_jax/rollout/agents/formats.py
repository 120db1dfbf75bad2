"""Conversations as tokens: chat messages to segments, sampled text to a reply.

`ChatFormat` writes a conversation by the folder's chat template, for published models.
`TeamFormat` writes the protocol's spans, for models trained on them: a tool span is a
tool call, an observation the tool's message.

In both, a reply is repeated as its sampled ids and never encoded again, and text from
messages never becomes a control token.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from coa_jax.protocol import prompts, roles
from coa_jax.protocol.chat_template import Renderer
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.tool_bodies import (
  FunctionCall,
  number_results,
  parse_function_calls,
  render_function_call,
)
from coa_jax.protocol.tools import FUNCTION_TAG
from coa_jax.protocol.trajectory import Author, Segment
from coa_jax.rollout.agents.types import Message, Reply

# Noncharacters, which no text should contain: they split control tokens in messages,
# and stand for a reply.
_GUARD = "\ufdd0"
_REPLY = "\ufdd1reply\ufdd1"


class Format(Protocol):
  """Converts between chat messages and tokens.

  Attributes:
    stops: texts at which sampling ends.
  """

  stops: tuple[str, ...]

  def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[Segment]:
    """Returns a conversation's segments, with ids.

    Raises:
      ValueError: the conversation can not be written; the message names its field.
    """

  def continuation(
    self,
    messages: Sequence[Message],
    tools: Sequence[Any],
    replied: int,
    reply: Sequence[int],
  ) -> list[Segment]:
    """Returns the segments between a sampled reply and the next one.

    Args:
      messages: the whole conversation.
      tools: as in the earlier request.
      replied: index of the reply's message.
      reply: the reply's ids.
    """

  def parse(self, text: str, tools: Sequence[Any]) -> Reply:
    """Reads a reply's text; what is no call is content."""

  def written(self, call: FunctionCall) -> str:
    """Returns a call's arguments for the record, as the policy writes them."""

  def close(self) -> None:
    """Ends the format's processes."""


class ChatFormat:
  """The folder's chat template; see `Format`.

  Tool calls are read in the formats of Qwen2.5 and Qwen3 (JSON in `<tool_call>`, also
  Hermes's) and of Qwen3.5 (`<function=NAME>` with `<parameter=NAME>`).
  """

  def __init__(self, tokenizer: Tokenizer):
    """Finds where the template ends a reply.

    Raises:
      ValueError: there is no template, or the template writes no replies.
    """
    self._tokenizer = tokenizer
    _ = tokenizer.chat_frame  # refuses an unusable template
    self._render = Renderer(
      tokenizer.hf.get_chat_template(), tokenizer.hf.special_tokens_map
    )
    # --- The end of a reply: the control token after it, e.g. <|im_end|>.
    after = self._after_reply(
      [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}],
      None,
      add_generation_prompt=False,
    )
    ends = [t for t in tokenizer.added.values() if after.lstrip().startswith(t)]
    self._end = max(ends, key=len, default=tokenizer.hf.eos_token or "")
    self.stops = tuple(dict.fromkeys(filter(None, (self._end, tokenizer.hf.eos_token))))
    if not self.stops:
      raise ValueError(
        "the chat template ends a reply by no control token, and the tokenizer has no "
        "eos_token: sampling would never stop"
      )

  def close(self) -> None:
    """Ends the template's process."""
    self._render.close()

  def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[Segment]:
    """Renders a conversation. See `Format`."""
    text = self._render(self._shown(messages), self._guarded(tools) or None)
    return [self._segment(Author.PROMPT, "question", text)]

  def continuation(
    self,
    messages: Sequence[Message],
    tools: Sequence[Any],
    replied: int,
    reply: Sequence[int],
  ) -> list[Segment]:
    """Renders the messages after a reply. See `Format`."""
    shown = self._shown(messages)
    shown[replied] = {"role": "assistant", "content": _REPLY}
    after = self._after_reply(shown, self._guarded(tools) or None)
    # The policy has usually written the end itself.
    if self._end and self._tokenizer.decode(reply).endswith(self._end):
      head, _, tail = after.partition(self._end)
      after = head + tail
    return [self._segment(Author.TOOL, "", after)]

  def _after_reply(
    self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = True
  ) -> str:
    text = self._render(messages, tools, add_generation_prompt)
    if text.count(_REPLY) != 1:
      raise ValueError("the chat template does not write an assistant's message once")
    return text.partition(_REPLY)[2]

  def parse(self, text: str, tools: Sequence[Any]) -> Reply:
    """Reads thoughts, tool calls and content. See `Format`."""
    for stop in self.stops:
      text = text.removesuffix(stop)
    thoughts, closing, rest = text.partition("</think>")
    if not closing:
      thoughts, rest = "", text
    schemas = {}
    for tool in tools:
      function = tool["function"]
      schemas[function["name"]] = function.get("parameters") or {}
    calls = []
    for match in _TOOL_CALL.finditer(rest):
      call = _read_call(match[1], schemas)
      if call is None:  # malformed: the agent sees it as text
        return Reply(rest.strip(), thoughts.removeprefix("<think>").strip())
      calls.append(call)
    content = _TOOL_CALL.sub("", rest) if calls else rest
    return Reply(
      content.strip(), thoughts.removeprefix("<think>").strip(), tuple(calls)
    )

  def written(self, call: FunctionCall) -> str:
    """Returns the arguments as JSON. See `Format`."""
    return json.dumps(dict(call.arguments))

  @functools.cached_property
  def _control(self) -> re.Pattern[str]:
    """Matches a control token."""
    tokens = sorted(self._tokenizer.added.values(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)))

  @functools.cached_property
  def _split_control(self) -> re.Pattern[str]:
    """Matches a control token split by `_guarded`."""
    tokens = sorted(self._tokenizer.added.values(), key=len, reverse=True)
    split = [re.escape(t[0] + _GUARD + t[1:]) for t in tokens]
    return re.compile("(" + "|".join(split) + ")")

  def _shown(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages as a template reads them."""
    plain = [{k: v for k, v in m.items() if k != "calls"} for m in messages]
    return self._guarded(plain)

  def _guarded(self, value: Any) -> Any:
    """Splits every control token in a JSON value's texts."""
    if isinstance(value, str):
      text = re.sub(f"[{_GUARD}{_REPLY[0]}]", "?", value)
      return self._control.sub(lambda m: m[0][0] + _GUARD + m[0][1:], text)
    if isinstance(value, Mapping):
      return {self._guarded(k): self._guarded(v) for k, v in value.items()}
    if isinstance(value, Sequence):
      return [self._guarded(each) for each in value]
    return value

  def _segment(self, author: Author, role: str, text: str) -> Segment:
    """Encodes rendered text; split control tokens are plain text."""
    ids: list[int] = []
    for n, part in enumerate(self._split_control.split(text)):
      if n % 2:
        ids += self._tokenizer.encode_untrusted(part.replace(_GUARD, ""))
      elif part:
        ids += self._tokenizer.encode(part)
    return Segment(author, role, self._tokenizer.decode(ids), ids)


class TeamFormat:
  """The protocol's spans; see `Format`. One conversation is one task."""

  def __init__(self, tokenizer: Tokenizer, variant: Variant, style: str, most: int):
    """Takes the dialect.

    Args:
      tokenizer: the model's.
      variant: the dialect, reduced to the agent's tools.
      style: the prompt's style.
      most: maximum tokens of an observation.
    """
    self._tokenizer = tokenizer
    self._variant = variant
    self._style = style
    self._most = most
    self.stops = variant.yield_tags

  def close(self) -> None:
    """Has nothing to end."""

  def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[Segment]:
    """Writes the task: system messages and the user's. See `Format`."""
    self._check_tools(tools)
    roles_given = [m["role"] for m in messages]
    if "assistant" in roles_given:
      raise ValueError(
        "messages: this trajectory has no such reply; a served team finds its replies "
        "if all requests of a conversation have the same header X-Trajectory"
      )
    if roles_given[-1] != "user" or set(roles_given[:-1]) - {"system", "developer"}:
      raise ValueError(
        "messages: a team's conversation begins with system messages and one user's; "
        f"these have the roles {', '.join(roles_given)}"
      )
    question = "\n\n".join(m["content"] for m in messages if m["content"])
    prompt = prompts.prompt_segments(self._variant, question, self._style)
    self._tokenizer.encode_prompt(prompt)
    return prompt

  def _check_tools(self, tools: Sequence[Any]) -> None:
    known = {*self._variant.tools, *self._variant.functions} - {FUNCTION_TAG}
    for n, tool in enumerate(tools):
      name = tool["function"]["name"]
      if name not in known and FUNCTION_TAG not in self._variant.tools:
        raise ValueError(
          f"tools[{n}].function.name is {name!r}; this team's tools are "
          f"{', '.join(sorted(known)) or 'none'}"
        )

  def continuation(
    self,
    messages: Sequence[Message],
    tools: Sequence[Any],
    replied: int,
    reply: Sequence[int],
  ) -> list[Segment]:
    """Writes the tools' messages as an observation. See `Format`."""
    del tools, reply
    results = messages[replied + 1 :]
    for n, message in enumerate(results, replied + 1):
      if message["role"] != "tool":
        raise ValueError(
          f"messages[{n}].role is {message['role']!r}; after a team's reply come only "
          "its tools' messages"
        )
    texts = [m["content"] for m in results]
    text = number_results(texts) if len(texts) > 1 else texts[0]
    text = self._tokenizer.cut_observation(text, self._most)
    return [self._tokenizer.encode_observation(text)]

  def parse(self, text: str, tools: Sequence[Any]) -> Reply:
    """Reads the answer, or the call that ends the text. See `Format`."""
    for tag in self.stops:
      if text.endswith(tag):
        break
    else:
      return Reply(reasoning=text)
    name = tag[2:-1]
    before, opening, body = text.removesuffix(tag).rpartition(roles.open_tag(name))
    if not opening:
      return Reply(reasoning=text)
    body = body.removeprefix(" ")
    if name == roles.ANSWER:
      return Reply(content=body.strip(), reasoning=before)
    if name == FUNCTION_TAG:
      calls = parse_function_calls(body)
      if calls is None or len(calls) > self._variant.parallel:
        return Reply(reasoning=text)
      renamed = (self._renamed(call, tools) for call in calls)
      return Reply(reasoning=before, calls=tuple(renamed))
    argument = _only_argument(name, tools)
    return Reply(reasoning=before, calls=(FunctionCall(name, {argument: body}),))

  def _renamed(self, call: FunctionCall, tools: Sequence[Any]) -> FunctionCall:
    """Gives a built-in tool's `input` the name that the agent's tool has for it."""
    if call.name in self._variant.tools and call.arguments.keys() == {"input"}:
      name = _only_argument(call.name, tools)
      return FunctionCall(call.name, {name: call.arguments["input"]})
    return call

  def written(self, call: FunctionCall) -> str:
    """Returns the span's content. See `Format`."""
    if call.name in self._variant.tools and len(call.arguments) == 1:
      (content,) = call.arguments.values()
      return str(content)
    return render_function_call(call.name, call.arguments)


# One call; a text of several is read call by call.
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read_call(
  body: str, schemas: Mapping[str, Mapping[str, Any]]
) -> FunctionCall | None:
  """Reads one call; None for another format."""
  calls = parse_function_calls(body)
  if calls is not None:
    return calls[0] if len(calls) == 1 else None
  match = _FUNCTION.fullmatch(body)
  if match is None:
    return None
  name, parameters = match.groups()
  fields = schemas.get(name, {}).get("properties") or {}
  arguments = {}
  for key, text in _PARAMETER.findall(parameters):
    arguments[key] = _typed(text, fields.get(key))
  return FunctionCall(name, arguments)


def _typed(text: str, schema: Any) -> Any:
  """Reads a parameter: JSON unless its schema says, or leaves open, a string."""
  if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
    return text  # a schema may be a bool, too
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return text


def _only_argument(name: str, tools: Sequence[Any]) -> str:
  """Returns the name of a tool's only parameter; "input" by default."""
  for tool in tools:
    function = tool["function"]
    if function["name"] == name:
      fields = (function.get("parameters") or {}).get("properties") or {}
      if len(fields) == 1:
        return next(iter(fields))
  return "input"
