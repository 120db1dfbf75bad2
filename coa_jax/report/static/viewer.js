// The viewer of trajectories: filter, search, sort, open one, compare its group.
//
// Data become text nodes, never markup: the page shows what hostile tools printed. A
// row of the list is cheap; a trajectory is rendered when it is chosen, its tokens when
// a colour is chosen. `viewer.py` says what the data hold.
'use strict';

const data = JSON.parse(document.getElementById('data').textContent);
const rows = data.rows;
const PAGE = 200; // rows of the list that are drawn at once
const BARS = 80; // of a log-prob strip; longer spans show their least likely token
const SVG = 'http://www.w3.org/2000/svg';
const UNKNOWN = -5; // nats, for a log-prob that is not finite
const VERSIONS = ['plan', 'tool', 'answer', 'reflection', 'suggested_answer',
  'observation'];
const bar = document.getElementById('bar');
const list = document.getElementById('list');
const detail = document.getElementById('detail');
let shown = []; // what passes the filters, in order
let drawn = 0; // how many of them the list has drawn
let chosen = null;

function element(tag, name, text, parent) {
  const e = document.createElement(tag);
  if (name) e.className = name;
  if (text !== undefined) e.textContent = text;
  if (parent) parent.append(e);
  return e;
}

const dash = x => x ?? '-';
const rewardOf = r => r.reward === null ? 'ungraded' : String(r.reward);
const kindOf = role => Object.hasOwn(data.kinds, role) ? data.kinds[role] : 'other';
const chip = (role, parent) =>
  element('span', 'chip r-' + kindOf(role), role || 'text', parent);

function toneOf(r) {
  if (r.reward === null) return '';
  return (r.parts.answer ?? r.reward) >= 1 ? ' right' : ' wrong';
}

rows.forEach((r, i) => {
  r.i = i;
  r.roles = [...new Set(r.spans.map(s => s.role))];
});

function textOf(r) {
  r.text ??= [r.task, r.question, ...r.golds, r.family, r.model,
    ...r.spans.map(s => `<${s.role}> ${s.content}`)].join('\n').toLowerCase();
  return r.text;
}

// ---- Controls. A filter is a test that a row passes. ----

const tests = [];

function select(label, options, change) {
  const s = element('select', '', undefined, bar);
  s.title = s.ariaLabel = label;
  for (const [value, text] of options) element('option', '', text, s).value = value;
  s.addEventListener('change', change);
  return s;
}

function facet(name, valuesOf, most = Infinity) {
  const values = [...new Set(rows.flatMap(valuesOf))].filter(v => v !== '');
  if (values.length < 2 || values.length > most) return;
  values.sort((a, b) => a.localeCompare(b, 'en', {numeric: true}));
  const options = values.map((v, i) => [String(i), v]);
  const s = select(name, [['', 'any ' + name], ...options], filter);
  tests.push(r => s.value === '' || valuesOf(r).includes(values[s.value]));
}

function field(kind, label, fits) {
  const e = element('input', '', undefined, bar);
  e.type = kind;
  e.placeholder = e.title = e.ariaLabel = label;
  e.step = 'any';
  tests.push(r => e.value.trim() === '' || fits(r, e.value.trim().toLowerCase()));
  e.addEventListener('input', filter);
}

// An absent number is last, whichever way a list is sorted.
function by(valueOf, sign = 1) {
  const of = r => valueOf(r) ?? sign * Infinity;
  return (a, b) => of(a) === of(b) ? 0 : sign * (of(a) < of(b) ? -1 : 1);
}

const ORDERS = {
  'in order': by(r => r.i),
  'lowest reward first': by(r => r.reward),
  'highest reward first': by(r => r.reward, -1),
  'shortest first': by(r => r.tokens),
  'longest first': by(r => r.tokens, -1),
  'by task': by(r => r.task),
  'least likely token first': by(r => r.low),
  'least likely on average first': by(r => r.mean),
};

facet('file', r => [r.file]);
facet('status', r => [r.status]);
facet('role', r => r.roles);
facet('family', r => [r.family]);
facet('model', r => [r.model]);
facet('reward', r => [rewardOf(r)], 12);
field('number', 'reward from', (r, x) => r.reward !== null && r.reward >= Number(x));
field('number', 'reward to', (r, x) => r.reward !== null && r.reward <= Number(x));
field('number', 'tokens from', (r, x) => r.tokens >= Number(x));
field('number', 'tokens to', (r, x) => r.tokens <= Number(x));
field('search', 'task', (r, x) => r.task.toLowerCase().includes(x));
field('search', 'find text', (r, x) => textOf(r).includes(x));
const order = select('order', Object.keys(ORDERS).map(n => [n, n]), filter);
const colour = select('tokens', [['', 'plain text'], ['logp', 'tokens by log-prob'],
  ['version', 'tokens by version']], show);
const view = select('view', [['group', 'whole group'], ['one', 'one alone'],
  ['all', 'all listed']], show);
const count = element('span', '', '', bar);
count.id = 'count';

const legend = document.getElementById('legend');
const present = new Set(rows.flatMap(r => r.roles));
for (const role of Object.keys(data.kinds)) if (present.has(role)) chip(role, legend);
element('span', '', 'written by', legend);
for (const author of ['policy', 'tool', 'environment'])
  element('b', 'span r-other by-' + author, author, legend);

// ---- The list. ----

function filter() {
  shown = rows.filter(r => tests.every(fits => fits(r))).sort(ORDERS[order.value]);
  const graded = shown.filter(r => r.reward !== null);
  const mean = graded.reduce((sum, r) => sum + r.reward, 0) / graded.length;
  count.textContent = `${shown.length} of ${rows.length}`
    + (graded.length ? `, mean reward ${mean.toFixed(3)}` : '');
  list.replaceChildren();
  list.scrollTop = drawn = 0;
  more();
  if (view.value === 'all') show();
}

function more() {
  list.querySelector('.more')?.remove();
  for (const r of shown.slice(drawn, drawn + PAGE)) {
    const e = element('div', 'row' + toneOf(r), undefined, list);
    e.role = 'option';
    e.ariaSelected = r === chosen;
    e.dataset.i = r.i;
    element('span', 'q', r.question, e);
    const sub = element('span', 'sub', undefined, e);
    element('span', 'tone', rewardOf(r), sub);
    const facts = [r.answer === null ? 'no answer' : r.answer, r.status,
      r.tokens + ' tokens', `${r.task} #${r.sample}`, r.family, r.model];
    for (const x of facts.filter(Boolean)) element('span', '', x, sub);
  }
  drawn = Math.min(drawn + PAGE, shown.length);
  if (drawn < shown.length)
    element('button', 'more', 'show more of ' + shown.length, list)
      .addEventListener('click', more);
}

function choose(r) {
  chosen = r;
  for (const e of list.querySelectorAll('.row'))
    e.ariaSelected = Number(e.dataset.i) === r.i;
  if (view.value === 'all') view.value = 'group';
  show();
  detail.scrollTop = 0;
}

list.addEventListener('click', event => {
  const row = event.target.closest('.row');
  if (row) choose(rows[row.dataset.i]);
});
list.addEventListener('keydown', event => {
  const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (!step || !shown.length) return;
  event.preventDefault();
  const last = shown.length - 1;
  const at = Math.max(0, Math.min(last, shown.indexOf(chosen) + step));
  if (at >= drawn) more();
  choose(shown[at]);
  list.querySelector('[aria-selected=true]')?.scrollIntoView({block: 'nearest'});
});

// ---- What is chosen. ----

function show() {
  detail.replaceChildren();
  if (view.value === 'all') {
    for (const r of shown.slice(0, PAGE)) group(r, [r]);
  } else if (chosen) {
    const whole = rows.filter(o => o.group === chosen.group);
    whole.sort(by(r => r.sample));
    group(chosen, view.value === 'one' ? [chosen] : whole);
  } else {
    element('p', 'prompt', 'Choose a trajectory.', detail);
  }
}

function group(r, samples) {
  element('p', 'question', r.question, detail);
  const golds = 'gold: ' + (r.golds.join(' | ') || '-');
  const size = samples.length > 1 ? 'group of ' + samples.length : '';
  const where = [r.file, r.task, r.family, r.model, golds, size];
  element('div', 'sub', where.filter(Boolean).join('  /  '), detail);
  const prompt = element('details', 'prompt', undefined, detail);
  element('summary', '', 'prompt', prompt);
  element('pre', '', data.prompts[r.prompt], prompt);
  const columns = element('div', 'group', undefined, detail);
  for (const o of samples) sample(o, columns, o === chosen && samples.length > 1);
  const mine = columns.querySelector('.chosen');
  if (mine) columns.scrollLeft = mine.offsetLeft - columns.firstChild.offsetLeft;
}

function sample(r, parent, mark) {
  const e = element('div', 'sample' + toneOf(r) + (mark ? ' chosen' : ''), undefined,
    parent);
  const facts = element('dl', 'facts', undefined, e);
  const fact = (name, value, style) => {
    element('dt', '', name, facts);
    element('dd', style, value, facts);
  };
  fact('Sample', `${r.sample}, ${r.status}`);
  fact('Reward', earned(r), 'tone');
  fact('Answer', dash(r.answer), 'tone');
  if (r.golds.length) fact('Evidence', evidence(r));
  fact('Tokens', `${r.tokens.toLocaleString('en')}: ${r.cost}`);
  fact('Calls', r.calls.join(', ') || '-');
  if (r.mean !== null)
    fact('Log-prob', `mean ${r.mean}, lowest ${r.low} nats per token`);
  if (r.fault) element('p', 'fault', 'Breaks the protocol: ' + r.fault, e);
  r.spans.forEach((s, i) => span(s, i === r.evidence, e));
}

// What earned the reward, or lost it.
function earned(r) {
  if (r.reward === null) return 'none: ' + r.status;
  const parts = Object.entries(r.parts).map(([k, v]) => `${k} ${dash(v)}`).join(', ');
  const text = r.reward + (parts ? ` (${parts})` : '');
  if (r.answer === null) return text + '; it wrote no answer';
  if (!r.matched.length) return text;
  return `${text}; the answer matches gold '${r.matched[0]}' after normalisation`;
}

function evidence(r) {
  if (r.evidence === null) return 'a gold answer stands in no observation';
  const before = r.spans.slice(0, r.evidence);
  const number = before.filter(s => s.role === 'observation').length + 1;
  const tool = before.at(-1)?.role ?? '';
  const after = kindOf(tool) === 'tool' ? `, after ${tool}` : '';
  return `a gold answer first stands in observation ${number}${after}`;
}

function span(s, gold, parent) {
  const style = `span r-${kindOf(s.role)} by-${s.author}`;
  const e = element('div', style, undefined, parent);
  const head = element('div', 'head', undefined, e);
  chip(s.role, head);
  if (gold) element('span', 'gold', 'a gold answer stands here', head);
  if (s.segments) strip(s.segments.flatMap(x => x.logps ?? []), head);
  const tokens = s.tokens ? `, ${s.tokens} tokens` : '';
  element('span', 'who', (s.authors ?? [s.author]).join(' + ') + tokens, head);
  const pre = element('pre', '', undefined, e);
  if (!colour.value || !s.segments) {
    pre.textContent = s.content;
    return;
  }
  for (const segment of s.segments) {
    if (segment.logps) sampled(segment, pre);
    else pre.append(segment.text);
  }
}

// A strip of bars over the sampled tokens: the higher, the less likely one was.
function strip(numbers, parent) {
  const logps = numbers.map(x => x ?? UNKNOWN);
  const out = element('span', 'logp', undefined, parent);
  const mean = logps.reduce((sum, x) => sum + x, 0) / logps.length;
  const lowest = Math.min(...logps);
  out.title = `log-prob per token: mean ${mean.toFixed(2)}, `
    + `lowest ${lowest.toFixed(2)} nats`;
  const size = Math.ceil(logps.length / BARS);
  const heights = [];
  for (let i = 0; i < logps.length; i += size) {
    const low = Math.min(...logps.slice(i, i + size));
    heights.push(Math.max(12 * surprise(low), 1));
  }
  // One path for all bars: a page has tens of thousands of them.
  const svg = document.createElementNS(SVG, 'svg');
  const path = document.createElementNS(SVG, 'path');
  svg.setAttribute('width', 3 * heights.length);
  svg.setAttribute('height', 12);
  path.setAttribute('d', heights.map((h, i) => `M${3 * i} 12v-${h}h2v${h}z`).join(''));
  svg.append(path);
  out.append(svg);
}

// 0 for a certain token, 1 for one of probability 1/e^5 or less.
const surprise = logp => Math.min((logp ?? UNKNOWN) / UNKNOWN, 1);

function sampled(segment, pre) {
  const {ids, logps, versions, pieces} = segment;
  ids.forEach((id, i) => {
    const logp = logps[i];
    const version = versions[versions.length === 1 ? 0 : i] ?? null;
    const e = element('span', pieces ? 't' : 't id', pieces ? pieces[i] : id, pre);
    const p = logp === null ? '' : ` (p ${Math.exp(logp).toFixed(3)})`;
    e.title = `log-prob ${dash(logp)}${p}\nversion ${dash(version)}\nid ${id}`;
    const ink = colour.value === 'logp' ? 'bad'
      : VERSIONS[Math.abs(version ?? 0) % VERSIONS.length];
    const share = colour.value === 'logp' ? surprise(logp) * 75 : 35;
    e.style.background = `color-mix(in srgb, var(--${ink}) ${share}%, transparent)`;
  });
}

filter();
if (shown.length) choose(shown[0]);
else show();
