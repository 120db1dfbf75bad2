// The trajectory viewer: filter, search, sort, open one trajectory, compare its group.
//
// The address keeps filters and selection after `#/`, for reloads, links and the
// browser's history; the rest of the page has ordinary anchors. Data become text nodes,
// never markup, because tool output is hostile. List rows are cheap; a trajectory is
// rendered when selected, its tokens when a colour is selected. `viewer.py` writes the
// data.
'use strict';

const data = JSON.parse(document.getElementById('data').textContent);
const rows = data.rows;
const PAGE = 200; // rows of the list that are drawn at once
const BINS = 20; // of a histogram
const BARS = 80; // of a log-prob strip; longer spans show their least likely token
const SVG = 'http://www.w3.org/2000/svg';
const UNKNOWN = -5; // nats, for a log-prob that is not finite
const VERSIONS = ['plan', 'tool', 'answer', 'reflection', 'suggested_answer',
  'observation'];
const bar = document.getElementById('bar');
const list = document.getElementById('list');
const detail = document.getElementById('detail');
let shown = []; // rows that pass the filters, in order
let drawn = 0; // number of them drawn in the list
let chosen = null;
let hits = []; // marks of the search text
let hit = -1; // index of the current one

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

// A row's name in the address; a repeated sample's name has a number.
const named = new Map();
const groups = new Map();
rows.forEach((r, i) => {
  r.i = i;
  r.roles = [...new Set(r.spans.map(s => s.role))];
  const name = `${r.file ? r.file + ' ' : ''}${r.task} #${r.sample}`;
  r.name = name;
  for (let n = 2; named.has(r.name); n++) r.name = `${name} (${n})`;
  named.set(r.name, r);
  if (!groups.has(r.group)) groups.set(r.group, []);
  groups.get(r.group).push(r);
});
const groupOf = r => groups.get(r.group);

function meanOf(some) {
  const graded = some.filter(r => r.reward !== null);
  if (!graded.length) return null;
  return graded.reduce((sum, r) => sum + r.reward, 0) / graded.length;
}
for (const some of groups.values())
  for (const r of some) r.groupMean = meanOf(some);

function textOf(r) {
  r.text ??= [r.task, r.question, ...r.golds, r.family, r.model,
    ...r.spans.map(s => `<${s.role}> ${s.content}`)].join('\n').toLowerCase();
  return r.text;
}

// ---- Controls. A filter is a test that a row passes. ----

const tests = [];
const controls = new Map(); // name in the address -> the element

function labelled(e, label, parent = bar) {
  const box = element('div', 'control', undefined, parent);
  e.id = 'c-' + controls.size;
  element('label', '', label, box).htmlFor = e.id;
  box.append(e);
  controls.set(label, e);
  return e;
}

function select(label, options, change) {
  const s = labelled(document.createElement('select'), label);
  for (const [value, text] of options) element('option', '', text, s).value = value;
  s.addEventListener('change', change);
  return s;
}

function facet(name, valuesOf, most = Infinity) {
  const values = [...new Set(rows.flatMap(valuesOf))].filter(v => v !== '');
  if (values.length < 2 || values.length > most) return;
  values.sort((a, b) => a.localeCompare(b, 'en', {numeric: true}));
  const options = values.map(v => [v, v]);
  const s = select(name, [['', 'any'], ...options], filter);
  tests.push(r => s.value === '' || valuesOf(r).includes(s.value));
}

function field(kind, label, fits) {
  const e = labelled(document.createElement('input'), label);
  e.type = kind;
  e.step = 'any';
  tests.push(r => e.value.trim() === '' || fits(r, e.value.trim().toLowerCase()));
  e.addEventListener('input', filter);
  return e;
}

function button(text, parent, act, name = '') {
  const b = element('button', name, text, parent);
  b.type = 'button';
  b.addEventListener('click', act);
  return b;
}

// An absent number is last, whichever way a list is sorted.
function by(valueOf, sign = 1) {
  const of = r => valueOf(r) ?? sign * Infinity;
  return (a, b) => of(a) === of(b) ? 0 : sign * (of(a) < of(b) ? -1 : 1);
}

const ORDERS = {
  'in order': by(r => groupOf(r)[0].i),
  'group with the lowest mean first': by(r => r.groupMean),
  'group with the highest mean first': by(r => r.groupMean, -1),
  'by task': by(r => r.task),
  'lowest reward first': by(r => r.reward),
  'highest reward first': by(r => r.reward, -1),
  'shortest first': by(r => r.tokens),
  'longest first': by(r => r.tokens, -1),
  'least likely token first': by(r => r.low),
  'least likely on average first': by(r => r.mean),
};
const GROUPED = Object.keys(ORDERS).slice(0, 4); // keep a group's rows together
const byGroup = by(r => groupOf(r)[0].i);

const find = field('search', 'find text', (r, x) => textOf(r).includes(x));
find.addEventListener('keydown', event => {
  if (event.key === 'Enter') jump(event.shiftKey ? hit - 1 : hit + 1);
});
find.parentElement.classList.add('find');
const jumps = element('div', 'jumps', undefined, find.parentElement);
const where = element('span', '', '', jumps);
where.role = 'status';
button('\u2191', jumps, () => jump(hit - 1)).ariaLabel = 'previous hit';
button('\u2193', jumps, () => jump(hit + 1)).ariaLabel = 'next hit';
field('search', 'task', (r, x) => r.task.toLowerCase().includes(x));
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
const order = select('order', Object.keys(ORDERS).map(n => [n, n]), filter);
const colour = select('tokens', [['', 'plain text'], ['logp', 'tokens by log-prob'],
  ['version', 'tokens by version']], show);
const view = select('view', [['group', 'whole group'], ['one', 'one alone'],
  ['all', 'all listed']], show);
const defaults = new Map([...controls].map(([name, e]) => [name, e.value]));
const reset = button('reset', bar, clear);
const count = element('span', '', '', bar);
count.id = 'count';
count.role = 'status';

const isSet = name => controls.get(name).value !== defaults.get(name);

function clear() {
  for (const [name, e] of controls) e.value = defaults.get(name);
  filter();
}

const legend = document.getElementById('legend');
const present = new Set(rows.flatMap(r => r.roles));
for (const role of Object.keys(data.kinds)) if (present.has(role)) chip(role, legend);
element('span', '', 'written by', legend);
for (const author of ['policy', 'tool', 'carried', 'environment'])
  element('b', 'span r-other by-' + author, author, legend);
if (rows.some(r => r.mean !== null)) {
  const example = element('span', 'example r-other', undefined, legend);
  strip([-.5, -1.2, -.4, -4, -.2, -.8], example);
  element('span', '', 'one bar per token: the higher, the less likely', example);
}

// ---- Marks of the search text. ----

// Appends a text with its hits marked.
function put(text, parent) {
  const sought = find.value.trim();
  if (!sought) {
    parent.append(text);
    return;
  }
  let at = 0;
  for (const [from, to] of hitsIn(text, sought)) {
    parent.append(text.slice(at, from));
    element('mark', '', text.slice(from, to), parent);
    at = to;
  }
  parent.append(text.slice(at));
}

function hitsIn(text, sought) {
  const plain = sought.replace(/[\\^$.*+?()[\]{}|\/]/g, '\\$&');
  return [...text.matchAll(new RegExp(plain, 'giu'))]
    .map(m => [m.index, m.index + m[0].length]);
}

// Scrolls to a hit, cyclically; `far` scrolls the page too, not only its panes.
function jump(to, far = true) {
  hits = find.value.trim() ? [...detail.querySelectorAll('mark, .t.hit')] : [];
  for (const e of detail.querySelectorAll('.at')) e.classList.remove('at');
  hit = hits.length ? (to + hits.length) % hits.length : -1;
  where.textContent = hits.length ? `hit ${hit + 1} of ${hits.length}` : '';
  jumps.hidden = !find.value.trim();
  if (hit < 0) return;
  const e = hits[hit];
  e.classList.add('at');
  for (let p = e.parentElement; p && detail.contains(p); p = p.parentElement) {
    const mark = e.getBoundingClientRect();
    const box = p.getBoundingClientRect();
    if (p.scrollHeight > p.clientHeight)
      p.scrollTop += mark.top - box.top - p.clientHeight / 3;
    const isBeside = mark.right > box.right || mark.left < box.left;
    if (p.scrollWidth > p.clientWidth && isBeside)
      p.scrollLeft += mark.left - box.left - 40;
  }
  if (far) e.scrollIntoView({block: 'nearest', inline: 'nearest'});
}

// ---- The address. ----

let saving = null;

function save() {
  reset.disabled = ![...controls.keys()].some(isSet);
  clearTimeout(saving);
  saving = setTimeout(() => {
    const state = new URLSearchParams();
    for (const [name, e] of controls) if (isSet(name)) state.set(name, e.value);
    if (chosen && chosen !== shown[0]) state.set('open', chosen.name);
    const text = state.toString();
    if (!text && !location.hash.startsWith('#/')) return;
    // A page in a frame, as in a notebook, has no address.
    try { history.replaceState(null, '', '#/' + text); } catch {}
  }, 100);
}

function restore() {
  if (!location.hash.startsWith('#/')) return false;
  const state = new URLSearchParams(location.hash.slice(2));
  for (const [name, e] of controls) {
    e.value = state.get(name) ?? defaults.get(name);
    if (e.selectedIndex === -1) e.value = defaults.get(name);
  }
  chosen = named.get(state.get('open')) ?? null;
  return true;
}

// ---- The list. ----

function filter() {
  shown = rows.filter(r => tests.every(fits => fits(r)));
  const sorted = ORDERS[order.value];
  shown.sort(GROUPED.includes(order.value) ? (a, b) => sorted(a, b) || byGroup(a, b)
    : sorted);
  const mean = meanOf(shown);
  count.textContent = `${shown.length} of ${rows.length}`
    + (mean === null ? '' : `, mean reward ${mean.toFixed(3)}`);
  histograms();
  list.replaceChildren();
  list.scrollTop = drawn = 0;
  if (!shown.length) {
    const none = element('div', 'none', undefined, list);
    element('p', '', 'Nothing found.', none);
    button('reset all filters', none, clear);
  }
  more();
  if (!shown.includes(chosen)) chosen = shown[0] ?? null;
  selectRow();
  show();
}

function more() {
  list.querySelector('.more')?.remove();
  const grouped = GROUPED.includes(order.value);
  for (let i = drawn; i < Math.min(drawn + PAGE, shown.length); i++) {
    const r = shown[i];
    const inGroup = grouped && groupOf(r).length > 1;
    if (inGroup && shown[i - 1]?.group !== r.group) heading(r);
    const kind = 'row' + toneOf(r) + (inGroup ? ' in' : '');
    const e = element('div', kind, undefined, list);
    e.role = 'option';
    e.dataset.i = r.i;
    if (!inGroup) element('span', 'q', r.question, e);
    const sub = element('span', 'sub', undefined, e);
    element('span', 'tone', rewardOf(r), sub);
    const name = inGroup ? '#' + r.sample : `${r.task} #${r.sample}`;
    const facts = [r.answer === null ? 'no answer' : r.answer, r.status,
      r.tokens + ' tokens', name, inGroup ? '' : r.family, r.model];
    for (const x of facts.filter(Boolean)) element('span', '', x, sub);
  }
  drawn = Math.min(drawn + PAGE, shown.length);
  if (drawn < shown.length) button('show more of ' + shown.length, list, more, 'more');
  selectRow();
}

function heading(r) {
  const e = element('div', 'heading', undefined, list);
  e.role = 'presentation';
  element('span', 'q', r.question, e).title = r.question;
  const mean = r.groupMean === null ? 'ungraded' : 'mean ' + r.groupMean.toFixed(3);
  const facts = [r.task, r.family, `${groupOf(r).length} samples`, mean];
  element('span', 'sub', facts.filter(Boolean).join('  /  '), e);
}

function selectRow() {
  for (const e of list.querySelectorAll('.row'))
    e.ariaSelected = Number(e.dataset.i) === chosen?.i;
}

function choose(r) {
  chosen = r;
  selectRow();
  if (view.value === 'all') view.value = 'group';
  detail.scrollTop = 0;
  show();
}

// Draws histograms of the listed rewards and lengths, in front of those of all rows.
function histograms() {
  const charts = document.getElementById('charts');
  charts.replaceChildren();
  if (rows.length < 8) return;
  const figures = [['reward', r => r.reward], ['tokens', r => r.tokens]];
  for (const [name, valueOf] of figures) {
    const all = rows.map(valueOf).filter(x => x !== null);
    const low = Math.min(...all.length ? all : [0]);
    const high = Math.max(...all.length ? all : [0]);
    if (low === high) continue;
    const counts = some => {
      const out = new Array(BINS).fill(0);
      for (const x of some)
        out[Math.min(Math.floor((x - low) / (high - low) * BINS), BINS - 1)]++;
      return out;
    };
    const behind = counts(all);
    const front = counts(shown.map(valueOf).filter(x => x !== null));
    const e = element('div', 'chart', undefined, charts);
    const svg = document.createElementNS(SVG, 'svg');
    svg.setAttribute('viewBox', `0 0 ${6 * BINS} 36`);
    svg.setAttribute('preserveAspectRatio', 'none');
    svg.setAttribute('role', 'img');
    svg.setAttribute('aria-label', `histogram of ${name}, from ${low} to ${high}`);
    const most = Math.max(...behind);
    for (const [style, some] of [['behind', behind], ['', front]]) {
      const path = document.createElementNS(SVG, 'path');
      path.setAttribute('class', style);
      const bars = some.map((n, i) => n && `M${6 * i} 36v-${36 * n / most}h5V36z`);
      path.setAttribute('d', bars.filter(Boolean).join(''));
      svg.append(path);
    }
    e.append(svg);
    const axis = element('div', 'axis', undefined, e);
    for (const x of [low, name, high])
      element('span', '', x.toLocaleString('en'), axis);
  }
}

// Whether the selected trajectory is below the list, not beside it.
const isNarrow = () => detail.offsetTop > list.offsetTop;

list.addEventListener('click', event => {
  const row = event.target.closest('.row');
  if (!row) return;
  choose(rows[row.dataset.i]);
  if (isNarrow()) detail.scrollIntoView();
});
list.addEventListener('keydown', event => {
  const steps = {ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10,
    Home: -Infinity, End: Infinity};
  if (!Object.hasOwn(steps, event.key) || !shown.length) return;
  event.preventDefault();
  const last = shown.length - 1;
  const at = Math.max(0, Math.min(last, shown.indexOf(chosen) + steps[event.key]));
  while (at >= drawn) more();
  choose(shown[at]);
  list.querySelector('[aria-selected=true]')?.scrollIntoView({block: 'nearest'});
});

// ---- The selected trajectory. ----

function show() {
  detail.replaceChildren();
  if (!shown.length) {
    element('p', 'prompt', 'No trajectory passes the filters.', detail);
  } else if (view.value === 'all') {
    for (const r of shown.slice(0, PAGE)) group(r, [r]);
  } else if (chosen) {
    const whole = [...groupOf(chosen)].sort(by(r => r.sample));
    group(chosen, view.value === 'one' ? [chosen] : whole);
  }
  jump(firstHit(), false);
  save();
}

// Finds the selected sample's first hit: other samples of its group may come first.
function firstHit() {
  const all = [...detail.querySelectorAll('mark, .t.hit')];
  return Math.max(0, all.findIndex(e => e.closest('.chosen')));
}

function group(r, samples) {
  put(r.question, element('p', 'question', undefined, detail));
  const golds = 'gold: ' + (r.golds.join(' | ') || '-');
  const size = samples.length > 1 ? 'group of ' + samples.length : '';
  const facts = [r.file, r.task, r.family, r.model, golds, size];
  put(facts.filter(Boolean).join('  /  '), element('div', 'sub', undefined, detail));
  const prompt = element('details', 'prompt', undefined, detail);
  element('summary', '', 'prompt', prompt);
  element('pre', '', data.prompts[r.prompt], prompt);
  const hint = button('', detail, () => columns.scrollBy({left: columns.clientWidth}),
    'hint');
  const columns = element('div', 'group', undefined, detail);
  columns.tabIndex = 0; // so that arrow keys scroll it
  columns.ariaLabel = 'samples of the group';
  columns.role = 'group';
  for (const o of samples) sample(o, columns, o === chosen && samples.length > 1);
  const mine = columns.querySelector('.chosen');
  if (mine) columns.scrollLeft = mine.offsetLeft - columns.firstChild.offsetLeft;
  const fit = columns.clientWidth / (columns.firstChild.offsetWidth + 14);
  hint.hidden = columns.scrollWidth <= columns.clientWidth + 1;
  const whole = Math.max(1, Math.floor(fit));
  const verb = whole > 1 ? 'fit' : 'fits';
  hint.textContent = `${samples.length} samples, ${whole} ${verb}: `
    + 'scroll sideways for the others \u2192';
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

// Describes the reward and its parts.
function earned(r) {
  if (r.reward === null) return 'none: ' + r.status;
  const parts = Object.entries(r.parts).map(([k, v]) => `${k} ${dash(v)}`).join(', ');
  const text = r.reward + (parts ? ` (${parts})` : '');
  if (r.answer === null) return text + '; it wrote no answer';
  if (!r.matched.length) return text;
  return `${text}; the answer matches gold '${r.matched[0]}' after normalisation`;
}

function evidence(r) {
  if (r.evidence === null) return 'no observation has a gold answer';
  const before = r.spans.slice(0, r.evidence);
  const number = before.filter(s => s.role === 'observation').length + 1;
  const tool = before.at(-1)?.role ?? '';
  const after = kindOf(tool) === 'tool' ? `, after ${tool}` : '';
  return `observation ${number} is the first with a gold answer${after}`;
}

function span(s, gold, parent) {
  const style = `span r-${kindOf(s.role)} by-${s.author}`;
  const e = element('div', style, undefined, parent);
  const head = element('div', 'head', undefined, e);
  chip(s.role, head);
  if (gold) element('span', 'gold', 'has a gold answer', head);
  if (s.segments) strip(s.segments.flatMap(x => x.logps ?? []), head);
  const tokens = s.tokens ? `, ${s.tokens} tokens` : '';
  element('span', 'who', (s.authors ?? [s.author]).join(' + ') + tokens, head);
  const pre = element('pre', '', undefined, e);
  if (!colour.value || !s.segments) {
    put(s.content, pre);
    return;
  }
  for (const segment of s.segments) {
    if (segment.logps) sampled(segment, pre);
    else put(segment.text, pre);
  }
}

// Draws one bar per sampled token: the higher, the less likely.
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
function surprise(logp) {
  return Math.min((logp ?? UNKNOWN) / UNKNOWN, 1);
}

function sampled(segment, pre) {
  const {ids, logps, versions, pieces} = segment;
  const sought = find.value.trim();
  const found = pieces && sought ? hitsIn(pieces.join(''), sought) : [];
  let at = 0; // where the token begins
  ids.forEach((id, i) => {
    const logp = logps[i];
    const version = versions[versions.length === 1 ? 0 : i] ?? null;
    const e = element('span', pieces ? 't' : 't id', pieces ? pieces[i] : id, pre);
    const end = at + (pieces ? pieces[i].length : 0);
    if (found.some(([from, to]) => from < end && at < to)) e.classList.add('hit');
    at = end;
    const p = logp === null ? '' : ` (p ${Math.exp(logp).toFixed(3)})`;
    e.title = `log-prob ${dash(logp)}${p}\nversion ${dash(version)}\nid ${id}`;
    const ink = colour.value === 'logp' ? 'bad'
      : VERSIONS[Math.abs(version ?? 0) % VERSIONS.length];
    const share = colour.value === 'logp' ? surprise(logp) * 75 : 35;
    e.style.background = `color-mix(in srgb, var(--${ink}) ${share}%, transparent)`;
  });
}

function begin() {
  const linked = restore();
  const target = chosen && isNarrow() ? detail : document.getElementById('viewer');
  filter();
  const row = list.querySelector('[aria-selected=true]');
  if (row) list.scrollTop = row.offsetTop - list.offsetTop - 60;
  if (linked) target.scrollIntoView();
}

window.addEventListener('hashchange', begin);
begin();
