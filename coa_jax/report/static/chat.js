// A server's chat page: sends questions, and streams every role in its colour.
//
// Text of the model and its tools becomes text nodes, never markup. Earlier turns are
// sent along only if the server runs with --conversation.
'use strict';

const settings = JSON.parse(document.getElementById('data').textContent);
const TAG = new RegExp(`<(/?)(${Object.keys(settings.kinds).join('|')})>`);
const PART = /<\/?[a-z_]*$/; // an incomplete tag
const talk = document.getElementById('talk');
const form = document.getElementById('ask');
const text = document.getElementById('text');
const send = document.getElementById('send');
const stop = document.getElementById('stop');
const turns = []; // messages of the conversation
let running = null;

function element(tag, name, content, parent) {
  const e = document.createElement(tag);
  if (name) e.className = name;
  if (content !== undefined) e.textContent = content;
  if (parent) parent.append(e);
  return e;
}

const kindOf = role =>
  Object.hasOwn(settings.kinds, role) ? settings.kinds[role] : 'other';

function box(role, parent) {
  const author = role === 'observation' ? 'tool' : 'policy';
  const e = element('div', `span r-${kindOf(role)} by-${author}`, undefined, parent);
  element('span', `chip r-${kindOf(role)}`, role, element('div', 'head', undefined, e));
  return element('pre', '', undefined, e);
}

// An observation's tags were escaped by one level; see `roles.escape`.
const unescapeTags = x => x.replace(
  new RegExp(`&((?:amp;)*)lt;(/?(?:${Object.keys(settings.kinds).join('|')}))>`, 'g'),
  (all, levels, tag) =>
    levels ? `&${levels.slice('amp;'.length)}lt;${tag}>` : `<${tag}>`);

// Cuts streamed text into spans.
class Spans {
  constructor(parent) {
    this.parent = parent;
    this.unread = '';
    this.role = '';
    this.pre = null;
    this.text = '';
  }

  read(more, final = false) {
    this.unread += more;
    for (let m; (m = TAG.exec(this.unread)); ) {
      this.show(this.unread.slice(0, m.index));
      this.unread = this.unread.slice(m.index + m[0].length);
      this.role = m[1] ? '' : m[2];
      this.pre = null;
      this.text = '';
      if (this.role) this.pre = box(this.role, this.parent);
    }
    const part = final ? null : PART.exec(this.unread);
    const end = part ? part.index : this.unread.length;
    this.show(this.unread.slice(0, end));
    this.unread = this.unread.slice(end);
  }

  show(some) {
    if (!this.role && !this.pre && !some.trim()) return; // white space between spans
    this.pre ??= box('text', this.parent);
    this.text += some;
    const whole = this.text.replace(/^\s+/, '');
    this.pre.textContent = this.role === 'observation' ? unescapeTags(whole) : whole;
  }
}

// ---- A question and its answer. ----

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = '';
  for (const reader = response.body.getReader(); ; ) {
    const {value, done} = await reader.read();
    if (done) return;
    rest += decoder.decode(value, {stream: true});
    const whole = rest.split('\n\n');
    rest = whole.pop();
    for (const event of whole) {
      const line = event.replace(/^data: /, '');
      if (line !== '[DONE]') yield JSON.parse(line);
    }
  }
}

async function play(question) {
  const turn = element('section', 'turn', undefined, talk);
  element('p', 'question', question, turn);
  const team = element('details', 'team', undefined, turn);
  team.open = true;
  element('summary', '', 'the team at work', team);
  const spans = new Spans(team);
  const answer = element('div', 'reply', undefined, turn);
  const status = element('p', 'note', 'waiting', turn);
  status.role = 'status';
  scrollTo(0, document.body.scrollHeight); // who asks wants to see the answer
  running = new AbortController();
  send.disabled = true;
  stop.hidden = false;
  const began = performance.now();
  let said = '';
  try {
    const messages = settings.conversation ? turns : [];
    const response = await fetch('v1/chat/completions', {
      method: 'POST',
      headers: {'content-type': 'application/json'},
      body: JSON.stringify({model: settings.model, stream: true,
        temperature: Number(document.getElementById('temperature').value),
        stream_options: {include_usage: true},
        messages: [...messages, {role: 'user', content: question}]}),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    let ending = '';
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const low = innerHeight + scrollY > document.body.scrollHeight - 80;
      const delta = event.choices[0]?.delta;
      if (delta?.reasoning_content) spans.read(delta.reasoning_content);
      if (delta?.content) {
        if (!said) element('span', 'chip r-answer', 'answer', answer);
        said += delta.content;
        (answer.querySelector('pre') ?? element('pre', '', undefined, answer))
          .textContent = said;
      }
      const note = event.choices[0]?.coa;
      if (note) ending = `${note.status}, ${note.tool_calls.length} tool calls`;
      const u = event.usage;
      if (u) ending += `, ${u.completion_tokens} tokens written, `
        + `${u.observation_tokens} observed`;
      const seconds = ((performance.now() - began) / 1000).toFixed(1);
      status.textContent = (ending || 'working') + `, ${seconds} s`;
      if (low) scrollTo(0, document.body.scrollHeight);
    }
    spans.read('', true);
    turns.push({role: 'user', content: question}, {role: 'assistant', content: said});
  } catch (error) {
    status.textContent = error.name === 'AbortError' ? 'stopped'
      : 'error: ' + error.message;
    if (error.name !== 'AbortError') status.className = 'fault';
  }
  running = null;
  send.disabled = false;
  stop.hidden = true;
  text.focus();
}

form.addEventListener('submit', event => {
  event.preventDefault();
  const question = text.value.trim();
  if (!question || running) return;
  text.value = '';
  play(question);
});
text.addEventListener('keydown', event => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
stop.addEventListener('click', () => running?.abort());
text.focus();
