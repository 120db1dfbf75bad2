"""The trajectory browser's markup, style and script; `browser.py` fills in the data.

The script makes every node by hand and puts data into it as text; it never parses
markup. A list row is cheap, a trajectory is rendered when it is chosen, and its tokens
when a colour is asked for.
"""

BODY = """<h1>{title}</h1>
<div class="bar" id="bar"></div>
<div class="panes"><div id="list" tabindex="0"></div><div id="detail"></div></div>
<script type="application/json" id="data">{data}</script>"""

STYLE = """
main { max-width: none; height: 100vh; padding: 14px 20px 0; display: flex;
  flex-direction: column; }
h1 { font-size: 20px; margin: 0 0 4px; overflow-wrap: anywhere; }
.bar { margin-bottom: 0; }
.bar select { max-width: 190px; }
.bar input[type=number] { flex: 0 0 116px; min-width: 0; }
.panes { flex: 1; min-height: 0; display: grid;
  grid-template-columns: minmax(260px, 360px) minmax(0, 1fr); gap: 18px; }
#list, #detail { overflow: auto; padding: 12px 2px 40px; }
#list:focus-visible { outline: 2px solid var(--plan); outline-offset: -2px; }
.row { padding: 7px 10px; border: 1px solid transparent; border-radius: 7px;
  border-bottom-color: var(--line); cursor: pointer; content-visibility: auto;
  contain-intrinsic-size: auto 54px; }
.row:hover { background: var(--card); }
.row.chosen { background: var(--card); border-color: var(--plan); }
.row .q { display: block; font-size: 14px; }
.row .sub { grid-column: auto; font-size: 12.5px; }
.right .tone { color: var(--good); font-weight: 600; }
.wrong .tone { color: var(--bad); font-weight: 600; }
.more { width: 100%; margin-top: 10px; padding: 8px; font: inherit; cursor: pointer;
  color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 7px; }
.question { font-size: 17px; font-weight: 600; margin: 0 0 4px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.group { display: grid; grid-auto-flow: column; gap: 14px; align-items: start;
  grid-auto-columns: minmax(330px, 1fr); overflow-x: auto; padding: 12px 2px; }
.sample { background: var(--card); border: 1px solid var(--line); min-width: 0;
  border-radius: 10px; padding: 12px 14px; }
.sample.chosen { border-color: var(--plan); }
.facts { font-size: 13px; gap: 2px 12px; margin-bottom: 12px; }
.prompt { color: var(--dim); font-size: 13px; margin: 6px 0; }
.prompt pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30em;
  overflow-y: auto; }
.t { border-radius: 2px; } .t:hover { outline: 1px solid var(--ink); }
.t.id { display: inline-block; margin: 1px; padding: 0 3px; font-size: 11.5px;
  border: 1px solid var(--line); }
@media (max-width: 800px) { main { height: auto; padding: 14px 12px; }
  .panes { grid-template-columns: 1fr; } #list { max-height: 40vh; } }
"""

SCRIPT = """
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const rows = data.rows, PAGE = 200;
const PALETTE = ['plan', 'tool', 'answer', 'reflection', 'suggested_answer',
  'observation'];
const list = document.getElementById('list');
const detail = document.getElementById('detail');
let shown = [], drawn = 0, chosen = null;

function el(tag, cls, text, parent) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  if (parent) parent.append(e);
  return e;
}
const say = x => x === null ? '-' : String(x);
const reward = r => r.reward === null ? 'ungraded' : String(r.reward);
const tone = r => r.reward === null ? '' : (r.parts.answer ?? r.reward) >= 1
  ? ' right' : ' wrong';
function once(make) { let value; return () => value ??= make(); }
rows.forEach((r, i) => {
  r.i = i;
  r.roles = new Set(r.segments.map(s => s.role));
  r.all = once(() => [r.task, r.question, ...r.golds, ...r.segments.map(s => s.text)]
    .join('\\n').toLowerCase());
});

// Controls: each is a test that a row passes, but sort, colour and group.
const bar = document.getElementById('bar'), tests = [];
function select(label, options, parent) {
  const s = el('select', '', undefined, parent);
  s.title = label;
  for (const [value, text] of options) el('option', '', text, s).value = value;
  return s;
}
function facet(name, of) {
  const found = [...new Set(rows.flatMap(of))].filter(v => v !== '');
  if (found.length < 2) return;
  found.sort((a, b) => a.localeCompare(b, 'en', {numeric: true}));
  const options = [['', 'any ' + name], ...found.map((v, i) => [String(i), v])];
  const s = select(name, options, bar);
  tests.push(r => s.value === '' || of(r).includes(found[s.value]));
  s.addEventListener('change', filter);
}
function field(kind, label, fits) {
  const e = el('input', '', undefined, bar);
  e.type = kind; e.placeholder = e.title = label; e.step = 'any';
  tests.push(r => e.value.trim() === '' || fits(r, e.value.trim().toLowerCase()));
  e.addEventListener('input', filter);
}
facet('file', r => [r.file]);
facet('status', r => [r.status]);
facet('role', r => [...r.roles]);
facet('family', r => [r.family]);
facet('model', r => [r.model]);
field('number', 'reward from', (r, x) => r.reward !== null && r.reward >= +x);
field('number', 'reward to', (r, x) => r.reward !== null && r.reward <= +x);
field('number', 'tokens from', (r, x) => r.tokens >= +x);
field('number', 'tokens to', (r, x) => r.tokens <= +x);
field('search', 'task', (r, x) => r.task.toLowerCase().includes(x));
field('search', 'find text', (r, x) => r.all().includes(x));
const nulls = (x, worst) => x === null ? worst : x;
const ORDERS = {
  'in order': (a, b) => a.i - b.i,
  'lowest reward first': (a, b) => nulls(a.reward, 1e9) - nulls(b.reward, 1e9),
  'highest reward first': (a, b) => nulls(b.reward, -1e9) - nulls(a.reward, -1e9),
  'shortest first': (a, b) => a.tokens - b.tokens,
  'longest first': (a, b) => b.tokens - a.tokens,
  'by task': (a, b) => a.task < b.task ? -1 : a.task > b.task ? 1 : 0,
  'least likely token first': (a, b) => nulls(a.low, 0) - nulls(b.low, 0),
  'least likely on average first': (a, b) => nulls(a.mean, 0) - nulls(b.mean, 0),
};
const same = names => names.map(n => [n, n]);
const order = select('order', same(Object.keys(ORDERS)), bar);
const colour = select('tokens', [['', 'plain text'], ['logp', 'tokens by log-prob'],
  ['version', 'tokens by version']], bar);
const alone = select('view', [['', 'whole group'], ['1', 'one alone']], bar);
const count = el('span', '', '', bar);
count.id = 'shown';
order.addEventListener('change', filter);
colour.addEventListener('change', show);
alone.addEventListener('change', show);

function filter() {
  shown = rows.filter(r => tests.every(t => t(r))).sort(ORDERS[order.value]);
  const graded = shown.filter(r => r.reward !== null);
  const mean = graded.reduce((a, r) => a + r.reward, 0) / graded.length;
  count.textContent = shown.length + ' of ' + rows.length
    + (graded.length ? ', mean reward ' + mean.toFixed(3) : '');
  list.replaceChildren();
  list.scrollTop = drawn = 0;
  more();
}
function more() {
  list.querySelector('.more')?.remove();
  for (const r of shown.slice(drawn, drawn + PAGE)) {
    const e = el('div', 'row' + tone(r) + (r === chosen ? ' chosen' : ''), '', list);
    e.dataset.i = r.i;
    el('span', 'q', r.question, e);
    const sub = el('span', 'sub', '', e);
    el('span', 'tone', reward(r), sub);
    for (const x of [r.status, r.tokens + ' tokens', r.task, '#' + r.sample])
      el('span', '', x, sub);
  }
  drawn = Math.min(drawn + PAGE, shown.length);
  if (drawn < shown.length)
    el('button', 'more', 'show more of ' + shown.length, list)
      .addEventListener('click', more);
}
function choose(r) {
  chosen = r;
  for (const e of list.querySelectorAll('.row'))
    e.classList.toggle('chosen', +e.dataset.i === r.i);
  show();
  detail.scrollTop = 0;
}
list.addEventListener('click', event => {
  const row = event.target.closest('.row');
  if (row) choose(rows[row.dataset.i]);
});
list.addEventListener('keydown', event => {
  const by = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (!by || !shown.length) return;
  event.preventDefault();
  const at = Math.max(0, Math.min(shown.length - 1, shown.indexOf(chosen) + by));
  if (at >= drawn) more();
  choose(shown[at]);
  list.querySelector('.chosen')?.scrollIntoView({block: 'nearest'});
});

function show() {
  detail.replaceChildren();
  const r = chosen;
  if (!r) { el('p', 'prompt', 'Choose a trajectory.', detail); return; }
  el('p', 'question', r.question, detail);
  const group = rows.filter(o => o.group === r.group);
  group.sort((a, b) => a.sample - b.sample);
  const where = [r.file, r.task, r.family, 'gold: ' + (r.golds.join(' | ') || '-'),
    'group of ' + group.length];
  el('div', 'sub', where.filter(Boolean).join('  /  '), detail);
  const prompt = el('details', 'prompt', '', detail);
  el('summary', '', 'prompt', prompt);
  el('pre', '', data.prompts[r.prompt], prompt);
  const columns = el('div', 'group', '', detail);
  for (const o of alone.value ? [r] : group) sample(o, columns);
  const first = columns.firstChild, mine = columns.querySelector('.chosen');
  columns.scrollLeft = mine.offsetLeft - first.offsetLeft;
}
function sample(r, parent) {
  const e = el('div', 'sample' + tone(r) + (r === chosen ? ' chosen' : ''), '', parent);
  const facts = el('dl', 'facts', '', e);
  const parts = Object.entries(r.parts).map(([k, v]) => k + ' ' + say(v)).join(', ');
  const fact = (k, v, cls) => { el('dt', '', k, facts); el('dd', cls, v, facts); };
  fact('Sample', r.sample + ', ' + r.status);
  fact('Reward', reward(r) + (parts ? ' (' + parts + ')' : ''), 'tone');
  fact('Answer', say(r.answer), 'tone');
  fact('Tokens', r.tokens + ': ' + r.cost);
  fact('Calls', r.calls.join(', ') || '-');
  if (r.mean !== null)
    fact('Log-prob', 'mean ' + r.mean + ', lowest ' + r.low + ' nats per token');
  for (const s of r.segments) if (s.text.trim() || s.tokens) span(s, e);
}
function span(s, parent) {
  const kind = Object.hasOwn(data.kinds, s.role) ? data.kinds[s.role] : 'other';
  const e = el('div', 'span r-' + kind + ' by-' + s.author, '', parent);
  const head = el('div', 'head', '', e);
  el('span', 'chip', s.role || 'text', head);
  el('span', 'who', s.author + (s.tokens ? ', ' + s.tokens + ' tokens' : ''), head);
  const pre = el('pre', '', undefined, e);
  if (colour.value && s.logps) return tokens(s, pre);
  const open = '<' + s.role + '>', close = '</' + s.role + '>', text = s.text.trim();
  const tagged = text.startsWith(open) && text.endsWith(close)
    && text.length >= open.length + close.length;
  pre.textContent = tagged ? text.slice(open.length, -close.length).trim() : text;
}
function tokens(s, pre) {
  const characters = Array.from(s.text);
  let at = 0;
  s.ids.forEach((id, i) => {
    const n = s.lengths ? s.lengths[i] : 0;
    const text = s.lengths ? characters.slice(at, at + n).join('') : String(id);
    at += n;
    const e = el('span', s.lengths ? 't' : 't id', text, pre);
    const logp = s.logps[i], version = s.versions[s.versions.length === 1 ? 0 : i];
    e.title = 'log-prob ' + say(logp)
      + (logp === null ? '' : ' (p ' + Math.exp(logp).toFixed(3) + ')')
      + '\\nversion ' + (version ?? '-') + '\\nid ' + id;
    // A token of probability 1/e^5 or less is of the full colour.
    const by = colour.value === 'logp' ? 'bad'
      : PALETTE[Math.abs(version ?? 0) % PALETTE.length];
    const share = colour.value === 'logp' ? Math.min(-(logp ?? -5) / 5, 1) * 75 : 35;
    e.style.background = `color-mix(in srgb, var(--${by}) ${share}%, transparent)`;
  });
}
filter();
if (shown.length) choose(shown[0]); else show();
"""
