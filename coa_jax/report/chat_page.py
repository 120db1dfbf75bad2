"""A server's chat page: one HTML file, inert towards model and tool text.

`viewer.py` describes the walls between hostile text and the browser. This page may also
send requests, but only to its own server.
"""

from __future__ import annotations

import html

from coa_jax.report.page import inert_json, page_html, role_kinds, static_text

_BODY = """<main><h1>{name}</h1>
<p class="note">One model that plays a team: it plans, calls tools and checks itself.
{memory} API: <code>/v1</code>, numbers: <code>/metrics</code>.</p>
<div id="talk"></div></main>
<form id="ask"><div>
<textarea id="text" rows="2" required aria-label="question"
 placeholder="Ask; Enter sends, Shift+Enter begins a line"></textarea>
<label for="temperature">temperature</label>
<input id="temperature" type="number" min="0" max="2" step="0.1" value="0">
<button id="stop" type="button" hidden>stop</button>
<button id="send">ask</button></div></form>
<script type="application/json" id="data">{data}</script>
"""


def chat_page(model: str, conversation: bool) -> str:
  """Returns the page; with `conversation`, a question is sent with earlier turns."""
  memory = "A question knows nothing of those before it."
  if conversation:
    memory = "A question knows the turns before it."
  kinds = role_kinds()
  data = {"model": model, "conversation": conversation, "kinds": kinds}
  body = _BODY.format(name=html.escape(model), memory=memory, data=inert_json(data))
  script = static_text("chat.js")
  style = static_text("chat.css")
  return page_html(model, body, script, "chat", style, connect="'self'")
