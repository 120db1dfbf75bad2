"""Converts many systems' recorded conversations to OpenAI chat messages.

A shape locates a row's turns; each turn is then converted to messages by its own form,
so one row may mix forms:

  role, content               OpenAI; Hermes and Qwen (<tool_call> and <tool_response>
                              blocks in text); Anthropic (tool_use, tool_result and
                              thinking parts); LLaMA-Factory v1 (parts with a `value`)
  from, value                 ShareGPT; LLaMA-Factory's function_call and observation
  type                        OpenAI Responses items; LangChain messages (plain, under
                              `data`, or as `dumpd` writes them)
  source, message             ATIF steps (Harbor's interchange format)

The result has `messages` with role, content, reasoning_content, tool_calls and
tool_call_id, and `is_error` for a failed tool. The conversion is idempotent.

budget: one function for each form of a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from coa_jax.data.importers.call_text import (
  CALL_OPEN,
  parse_calls,
  read_value,
  take_blocks,
)
from coa_jax.data.importers.row import RowRefused, are_objects, fields
from coa_jax.protocol import roles

Message = dict[str, Any]

_CALL = "call"  # a turn with only a call
# Speaker -> chat message's role; a call is the assistant's.
_SPEAKERS: Mapping[str, str] = {
  "system": "system",
  "human": "user",
  "humanmessage": "user",
  "user": "user",
  "gpt": "assistant",
  "ai": "assistant",
  "aimessage": "assistant",
  "agent": "assistant",
  "assistant": "assistant",
  "chatgpt": "assistant",
  "bot": "assistant",
  "model": "assistant",
  "function_call": _CALL,
  "tool_call": _CALL,
  "tool_calls": _CALL,
  "observation": "tool",
  "tool": "tool",
  "function": "tool",
  "function_response": "tool",
  "tool_response": "tool",
  "toolmessage": "tool",
  "functionmessage": "tool",
  "systemmessage": "system",
}
_RESULT_OPEN = "<tool_response>"
_RESULT_CLOSE = "</tool_response>"
# Ids, times and counts, which do not affect the trajectory.
_METADATA = fields(
  "type status data kwargs lc example additional_kwargs response_metadata "
  "usage_metadata invalid_tool_calls artifact step_id timestamp model_name metrics "
  "llm_call_count reasoning_effort loss_weight stop_reason stop_sequence usage model "
  "signature cache_control annotations phase"
)


class Shape(NamedTuple):
  """Locates the turns in one kind of row.

  Attributes:
    name: the format's name.
    fields: the shape's row fields, and metadata.
    turns: returns a row's turns; None for another shape.
  """

  name: str
  fields: frozenset[str]
  turns: Callable[[Mapping[str, Any]], Any]


def _chat_turns(row: Mapping[str, Any]) -> Any:
  return row.get("messages") or row.get("conversation")


def _completion_turns(row: Mapping[str, Any]) -> Any:
  prompt = row.get("prompt")
  if isinstance(prompt, str):
    prompt = [{"role": "user", "content": prompt}]
  completion = row.get("completion")
  if not (are_objects(prompt) and are_objects(completion) and completion):
    return None
  return prompt + completion


def _response_turns(row: Mapping[str, Any]) -> Any:
  output = row.get("output")
  if not are_objects(output) or not output:
    return None
  given = row.get("input") or []
  if isinstance(given, str):
    given = [{"role": "user", "content": given}]
  return given + output if are_objects(given) else None


def _atif_turns(row: Mapping[str, Any]) -> Any:
  steps = row.get("steps")
  if not are_objects(steps) or not steps:
    return None
  named = str(row.get("schema_version")).startswith("ATIF")
  return steps if named or all("source" in step for step in steps) else None


# The first shape with turns is used.
SHAPES = (
  Shape(
    "atif",
    fields(
      "steps schema_version session_id trajectory_id agent final_metrics "
      "continued_trajectory_ref"
    ),
    _atif_turns,
  ),
  Shape("chat", fields("messages"), _chat_turns),
  Shape("sharegpt", fields("conversations"), lambda row: row.get("conversations")),
  Shape(
    "verifiers",
    fields("prompt completion example_id reward metrics timing token_usage"),
    _completion_turns,
  ),
  Shape(
    "responses",
    fields("input output object model usage created_at status"),
    _response_turns,
  ),
)
_SYSTEM = ("system", "instructions", "system_prompt")


def shape_of(row: Mapping[str, Any]) -> str:
  """Returns the name of a row's shape; "" for none."""
  return next((shape.name for shape in SHAPES if shape.turns(row)), "")


def as_chat(row: Mapping[str, Any]) -> dict[str, Any]:
  """Converts a row in any shape above to chat format; other fields stay unchanged.

  Raises:
    RowRefused: the row has no turns, or a turn has no form above.
  """
  shape = next((shape for shape in SHAPES if shape.turns(row)), None)
  turns = shape.turns(row) if shape else None
  if shape is None or not are_objects(turns):
    raise RowRefused("no_messages", "the row has no list of messages")

  # --- Turns as messages.
  messages: list[Message] = []
  chat = {key: value for key, value in row.items() if key not in shape.fields}
  for name in _SYSTEM:
    if text := chat.pop(name, None):
      messages.append({"role": "system", "content": text})
  for number, turn in enumerate(turns):
    for message in _messages(turn, f"turn {number}"):
      for plain in _without_blocks(message, f"turn {number}"):
        _add(messages, plain)

  messages = _with_own_results(messages)

  # --- The row in chat format; an empty tool list is often written as text.
  chat["messages"] = messages
  if chat.get("conversation") == turns:
    del chat["conversation"]
  if chat.get("tools") in ("", "[]"):
    del chat["tools"]
  return chat if shape.name == "chat" else {"source": shape.name, **chat}


# One turn as messages.


def _messages(turn: Mapping[str, Any], where: str) -> list[Message]:
  """Converts one turn, in any form, to messages."""
  turn = _unwrapped(turn, where)
  kind = turn.get("type")
  if "source" in turn and "role" not in turn:
    return _of_step(turn, where)
  if "from" in turn and "role" not in turn:
    return _of_sharegpt(turn, where)
  known = not isinstance(kind, str) or _speaker(kind) in _SPEAKERS
  if "role" not in turn and (kind == "function_call" or not known):
    return _of_item(turn, str(kind), where)
  return _of_message(turn, where)


def _speaker(name: str) -> str:
  """Returns a key of `_SPEAKERS`; a streamed LangChain message counts as its class."""
  return name.lower().removesuffix("chunk")


def _unwrapped(turn: Mapping[str, Any], where: str) -> Mapping[str, Any]:
  """Removes a LangChain message's envelope; returns other turns unchanged."""
  inner = turn.get("kwargs" if "lc" in turn else "data")
  if not isinstance(inner, dict) or "role" in turn or "from" in turn:
    return turn
  kind = turn.get("type")
  if "lc" in turn:
    path = turn.get("id")
    if kind != "constructor" or not isinstance(path, list) or not path:
      raise RowRefused("bad_turn", f"{where} is no message that `dumpd` wrote")
    kind = str(path[-1])
  return {**inner, "type": str(kind)}


def _of_message(turn: Mapping[str, Any], where: str) -> list[Message]:
  """Converts a chat message; its parts may be calls, results and thoughts."""
  said = str(turn.get("role") or turn.get("type"))
  role = _SPEAKERS.get(_speaker(said), said)
  content = turn.get("content")
  message = _rest(turn, "role content tool_calls function_call")
  if role == _CALL:
    return [_assistant(_parse(content, where), where, "", message)]
  if role != "assistant":
    message["role"] = role

  # --- Calls next to the content; LangChain repeats the calls from the model's API.
  also = turn.get("additional_kwargs")
  also = also if isinstance(also, dict) else {}
  if turn.get("invalid_tool_calls"):
    raise RowRefused("bad_call", f"{where}: {turn['invalid_tool_calls']!r:.80}")
  calls = turn.get("tool_calls") or also.get("tool_calls") or []
  older = turn.get("function_call") or also.get("function_call")
  if older and not calls:
    calls = [older]
  if also.get("reasoning_content"):
    message.setdefault("reasoning_content", also["reasoning_content"])
  if role == "tool" and turn.get("status") == "error":
    message["is_error"] = True
  if not isinstance(calls, list):
    raise RowRefused("bad_call", f"{where}: tool_calls is {calls!r:.60}")

  # --- The content's parts.
  results: list[Message] = []
  if isinstance(content, list):
    content, in_parts, thoughts, results = _parts(content, where)
    calls = calls or in_parts
    if thoughts:
      before = (
        [message["reasoning_content"]] if message.get("reasoning_content") else []
      )
      message["reasoning_content"] = "\n".join([*before, *thoughts])
  if calls and role != "assistant":
    raise RowRefused("bad_call", f"{where}: a call in a message of {said!r:.40}")
  if calls:
    return [_assistant(calls, where, content, message), *results]
  if results and content in ("", []):
    return results
  return [*results, {"role": role, "content": content, **message}]


def _parts(
  content: list[Any], where: str
) -> tuple[Any, list[Any], list[str], list[Message]]:
  """Splits a message's parts into (content, calls, thoughts, tool messages)."""
  left: list[Any] = []
  calls: list[Any] = []
  thoughts: list[str] = []
  results: list[Message] = []
  for part in content:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("thinking", "reasoning"):
      text = part.get(kind) or part.get("value") or part.get("text")
      if not isinstance(text, str):
        raise RowRefused("bad_content", f"{where}: {part!r:.60}")
      thoughts.append(text)
    elif kind == "tool_use":
      calls.append(part)
    elif kind == "tool_call":
      value = part.get("value")
      calls += [part] if value is None else _parse(value, where)
    elif kind == "tool_result":
      result = {"role": "tool", "tool_call_id": part.get("tool_use_id")}
      result["content"] = part.get("content")
      if part.get("is_error"):
        result["is_error"] = True
      results.append(result)
    elif isinstance(part, dict) and isinstance(part.get("value"), str):
      left.append({"type": kind, "text": part["value"]})
    else:
      left.append(part)
  if not left and (calls or thoughts or results):
    return "", calls, thoughts, results
  return left, calls, thoughts, results


def _of_sharegpt(turn: Mapping[str, Any], where: str) -> list[Message]:
  role = _SPEAKERS.get(str(turn["from"]).lower())
  text = turn.get("value")
  if role is None or not isinstance(text, str):
    raise RowRefused("bad_turn", f"{where} is of {turn['from']!r:.40}: {text!r:.40}")
  rest = _rest(turn, "from value")
  if role == _CALL:
    return [_assistant(_parse(text, where), where, "", rest)]
  return [{"role": role, "content": text, **rest}]


def _of_item(turn: Mapping[str, Any], kind: str, where: str) -> list[Message]:
  """Converts an OpenAI Responses item other than a message."""
  if kind in ("function_call", "custom_tool_call"):
    rest = _rest(turn, "id call_id name arguments input")
    return [_assistant([{**turn, "type": "function"}], where, "", rest)]
  if kind in ("function_call_output", "custom_tool_call_output"):
    rest = _rest(turn, "id call_id output")
    result = {"tool_call_id": turn.get("call_id"), "content": turn.get("output")}
    return [{"role": "tool", **result, **rest}]
  if kind == "reasoning":
    rest = _rest(turn, "id summary content")
    thought = turn.get("content") or turn.get("summary") or ""
    return [{"role": "assistant", "content": "", "reasoning_content": thought, **rest}]
  raise RowRefused("unread_call", f"{where}: an item of type {kind!r:.40} is not read")


def _of_step(turn: Mapping[str, Any], where: str) -> list[Message]:
  """Converts an ATIF step: text, calls and results."""
  role = _SPEAKERS.get(str(turn["source"]).lower())
  if role not in ("system", "user", "assistant"):
    raise RowRefused("bad_turn", f"{where} is of source {turn['source']!r:.40}")
  message = {"role": role, "content": turn.get("message")}
  message |= _rest(turn, "source message tool_calls observation")
  calls = turn.get("tool_calls") or []
  if calls:
    message = _assistant(calls, where, message.pop("content"), message)
    calls = message["tool_calls"]

  # --- Results name their calls, or are in call order.
  observation = turn.get("observation") or {}
  results = observation.get("results") or []
  unnamed = [not result.get("source_call_id") for result in results]
  if results and len(calls) > 1 and any(unnamed) and len(results) != len(calls):
    raise RowRefused(
      "shared_observation", f"{where}: {len(calls)} calls, {len(results)} results"
    )
  out = [message]
  for number, result in enumerate(results):
    key = result.get("source_call_id")
    if not key and number < len(calls):
      key = calls[number]["id"]
    rest = _rest(result, "source_call_id content")
    if not calls:
      raise RowRefused("stray_result", f"{where}: a result without a call")
    content = result.get("content")
    out.append({"role": "tool", "tool_call_id": key, "content": content, **rest})
  return out


def _rest(turn: Mapping[str, Any], read: str) -> Message:
  """Lists a turn's unread fields, except metadata."""
  names = _METADATA | fields(read)
  return {key: value for key, value in turn.items() if key not in names}


# Calls.


def _assistant(
  calls: list[Any], where: str, content: Any, rest: Mapping[str, Any]
) -> Message:
  functions = [_call(call, where) for call in calls]
  return {"role": "assistant", "content": content, "tool_calls": functions, **rest}


def _call(value: Any, where: str) -> dict[str, Any]:
  """Converts one call, from any system, to OpenAI's chat format."""
  if isinstance(value, str):  # verifiers writes each call as JSON
    found = _parse(value, where)
    value = found[0] if len(found) == 1 else None
  if not isinstance(value, dict):
    raise RowRefused("bad_call", f"{where}: {value!r:.80}")
  function = value.get("function")
  inner = function if isinstance(function, dict) else value
  name = inner.get("name") or inner.get("function_name")
  if not isinstance(name, str):
    raise RowRefused("bad_call", f"{where}: {value!r:.80}")
  arguments = None
  for key in ("arguments", "args", "input", "parameters"):
    if inner.get(key) is not None:  # tables fill absent fields with nulls
      arguments = inner[key]
      break
  key = value.get("call_id") or value.get("id") or value.get("tool_call_id")
  call = {"name": name, "arguments": arguments}
  return {"id": key, "type": "function", "function": call}


def _parse(text: Any, where: str) -> list[Any]:
  return _checked(parse_calls, text, where)


def _checked(read: Callable[[str], Any], text: Any, where: str) -> Any:
  """Applies a call parser to a text; refuses the row if the parser fails."""
  try:
    return read(text)
  except (ValueError, AttributeError) as e:  # not a text
    raise RowRefused("bad_call", f"{where}: {e}") from e


# Blocks in text, as Hermes and Qwen write them.


# A raw reply's last token: a control token in text would be trained as one.
_END = re.compile(r"(\s*(<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|</s>))+\s*\Z")


def _without_blocks(message: Message, where: str) -> list[Message]:
  """Moves a message's call and result blocks to fields and separate messages."""
  text = _joined(message.get("content"))
  if text is None:
    return [message]
  role = message.get("role")
  if role == "assistant" and _END.search(text):
    text = _END.sub("", text)
    message = {**message, "content": text}
  if role == "assistant" and CALL_OPEN in text:
    # A call inside a think block is not a call.
    closing = roles.close_tag(roles.THINK)
    head, closed, tail = text.partition(closing)
    if not closed:
      head, tail = "", text
    rest, calls = _checked(take_blocks, tail, where)
    if not calls:
      return [message]
    given = message.get("tool_calls") or []
    found = _assistant(calls, where, (head + closed + rest).strip(), {})
    if given and list(map(_meaning, given)) != list(map(_meaning, found["tool_calls"])):
      raise RowRefused("bad_call", f"{where}: other calls in the text than beside it")
    return [{**message, **found, "tool_calls": given or found["tool_calls"]}]
  if role in ("tool", "user") and text.lstrip().startswith(_RESULT_OPEN):
    return _of_results(message, text, where)
  return [message]


def _joined(content: Any) -> str | None:
  """Returns a message's text; None if it has other parts."""
  if isinstance(content, str):
    return content
  if are_objects(content) and all(isinstance(p.get("text"), str) for p in content):
    return "".join(part["text"] for part in content)
  return None


def _meaning(call: Mapping[str, Any]) -> tuple[str, Any]:
  function = call["function"]
  arguments = function["arguments"]
  if isinstance(arguments, str):
    value = read_value(arguments)
    arguments = arguments if value is None else value
  return function["name"], arguments


def _of_results(message: Message, text: str, where: str) -> list[Message]:
  """Returns a message for each result block, and one for a user's words after them."""
  results = []
  rest = text.strip()
  while rest.startswith(_RESULT_OPEN):
    inside, closed, after = rest[len(_RESULT_OPEN) :].partition(_RESULT_CLOSE)
    if not closed or _RESULT_OPEN in inside:
      raise RowRefused("nested", f"{where}: result blocks inside each other")
    results.append({**message, "role": "tool", "content": inside.strip("\r\n")})
    rest = after.strip()
  if not rest:
    return results
  if message["role"] == "tool":  # text around blocks: all of it is one result
    return [message]
  return [*results, {**message, "content": rest}]


# Messages in one reply.


def _add(messages: list[Message], message: Message) -> None:
  """Adds a message, or merges it into the last one if both are one reply."""
  last = messages[-1] if messages else {}
  if last.get("role") != "assistant" or message.get("role") != "assistant":
    messages.append(message)
    return
  # A text after a text or after calls is a separate reply.
  if _filled(message) and (_filled(last) or last.get("tool_calls")):
    messages.append(message)
    return
  joined = {**last, **message}
  joined["content"] = last.get("content") or message.get("content") or ""
  if message.get("reasoning_content"):  # earlier text comes first
    thoughts = [last.get("reasoning_content"), last.get("content")]
    texts = [_joined(thought) for thought in (*thoughts, message["reasoning_content"])]
    joined["reasoning_content"] = "\n".join(text for text in texts if text)
    joined["content"] = message.get("content") or ""
  calls = [*(last.get("tool_calls") or []), *(message.get("tool_calls") or [])]
  if calls:
    joined["tool_calls"] = calls
  messages[-1] = joined


def _with_own_results(messages: list[Message]) -> list[Message]:
  """Splits a result shared by parallel calls into one result per call.

  LLaMA-Factory has one observation after each turn: a JSON list for several calls.
  """
  out: list[Message] = []
  for number, message in enumerate(messages):
    out.append(message)
    calls = (messages[number - 1].get("tool_calls") or []) if number else []
    after = messages[number + 1].get("role") if number + 1 < len(messages) else None
    if len(calls) < 2 or message.get("role") != "tool" or after == "tool":
      continue
    text = message.get("content")
    values = read_value(text) if isinstance(text, str) else None
    unnamed = not any(call["id"] for call in calls)
    if unnamed and isinstance(values, list) and len(values) == len(calls):
      texts = [v if isinstance(v, str) else json.dumps(v) for v in values]
      out[-1:] = [{**message, "content": text} for text in texts]
  return out


def _filled(message: Message) -> bool:
  content = message.get("content")
  return bool(content.strip() if isinstance(content, str) else content)
