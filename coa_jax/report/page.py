"""The shell of a report page: style, script, and the policy that keeps it offline."""

from __future__ import annotations

import base64
import hashlib
import html

# Okabe and Ito's hues, which colour-blind readers can tell apart, darkened for a light
# page and lifted for a dark one. Roles also have their name on a chip and authors a
# border style, so colour never tells alone.
_LIGHT = {
  "think": "#767676",
  "plan": "#0072B2",
  "reflection": "#B3488A",
  "suggested_answer": "#B37A00",
  "double_check": "#2A8CBF",
  "answer": "#00795A",
  "tool": "#C24E00",
  "observation": "#8A7F73",
  "other": "#767676",
}
_DARK = {
  "think": "#A5A5A5",
  "plan": "#5BB0E8",
  "reflection": "#E39BC6",
  "suggested_answer": "#F0B73A",
  "double_check": "#7CCBF2",
  "answer": "#3CCB9E",
  "tool": "#FF9552",
  "observation": "#BDB2A4",
  "other": "#A5A5A5",
}


# `plots.COLORS`, lifted.
_DARK_FIGURES = ("#4BA3DB", "#F07B2E", "#2FBF97", "#DE93BC", "#F0B73A", "#7CCBF2")


def _colors(table: dict[str, str]) -> str:
  return "".join(f"--{name}: {color}; " for name, color in table.items())


STYLE = f"""
:root {{ color-scheme: light dark; --bg: #fbfaf8; --card: #fff; --ink: #1d1b19;
  --dim: #6b655e; --line: #e2ddd6; --good: #00795A; --bad: #B3261E; {_colors(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --bg: #161514; --card: #1f1e1c;
  --ink: #ece8e2; --dim: #a39b91; --line: #383531; --good: #3CCB9E; --bad: #FF8A80;
  {_colors(_DARK)}
  {_colors({f"figure-{i}": c for i, c in enumerate(_DARK_FIGURES)})} }} }}
""" + (
  """
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.02em; margin: 0 0 12px; }
h2 { font-size: 19px; letter-spacing: -.01em; margin: 44px 0 14px; }
.intro p { max-width: 74ch; margin: 0 0 10px; color: var(--dim); }
.headline { display: grid; gap: 12px; margin: 26px 0 0;
  grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); }
.headline div { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 14px 16px; }
.headline dt { color: var(--dim); font-size: 13px; }
.headline dd { margin: 2px 0 0; font-size: 25px; font-weight: 650;
  letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
figure { margin: 0 0 20px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 16px 18px; overflow: hidden; }
figcaption { font-weight: 600; margin-bottom: 10px; }
figure svg { display: block; max-width: 100%; height: auto; margin: 0 auto;
  font-family: inherit; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th { text-align: right; color: var(--dim); font-weight: 500; vertical-align: bottom; }
td { text-align: right; }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; }
.note { color: var(--dim); font-size: 13px; margin: 8px 0 0; }
.bar { position: sticky; top: 0; z-index: 2; background: var(--bg); padding: 10px 0;
  display: flex; flex-wrap: wrap; gap: 8px; align-items: center;
  border-bottom: 1px solid var(--line); margin-bottom: 12px; }
.bar select, .bar input, .bar button { font: inherit; font-size: 13.5px; color: inherit;
  background: var(--card); border: 1px solid var(--line); border-radius: 7px;
  padding: 5px 9px; }
.bar input { flex: 1 1 150px; min-width: 110px; }
.bar button { cursor: pointer; }
#shown { color: var(--dim); font-size: 13.5px; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 8px; align-items: center;
  font-size: 13px; color: var(--dim); margin-bottom: 14px; }
.legend b { font-weight: 500; margin-left: 10px; padding-left: 8px; }
.chip { display: inline-block; font: 600 11.5px/1 ui-monospace, SFMono-Regular, Menlo,
  Consolas, monospace; padding: 4px 7px; border-radius: 5px; white-space: nowrap;
  color: var(--c, var(--dim));
  background: color-mix(in srgb, var(--c, var(--dim)) 14%, transparent); }
.tr { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  margin: 0 0 8px; content-visibility: auto; contain-intrinsic-size: auto 64px; }
.tr[hidden] { display: none; }
.tr > summary { list-style: none; cursor: pointer; padding: 11px 16px; display: grid;
  grid-template-columns: 22px minmax(0, 1fr) auto; gap: 4px 12px; align-items: center; }
.tr > summary::-webkit-details-marker { display: none; }
.tr[open] > summary { border-bottom: 1px solid var(--line); }
.tr > summary:focus-visible { outline: 2px solid var(--plan); border-radius: 10px; }
.mark { font-weight: 700; text-align: center; color: var(--dim); }
.right .mark { color: var(--good); } .wrong .mark { color: var(--bad); }
.q { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; font-weight: 550; }
.tr[open] .q { white-space: normal; }
.sub { grid-column: 2; color: var(--dim); font-size: 13px; display: flex;
  flex-wrap: wrap; gap: 2px 14px; }
.num { grid-row: span 2; text-align: right; color: var(--dim); font-size: 13px;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.body { padding: 16px 18px 20px; }
.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr);
  gap: 5px 18px; margin: 0 0 18px; font-size: 14px; }
.facts dt { color: var(--dim); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.facts .right { color: var(--good); font-weight: 600; }
.facts .wrong { color: var(--bad); font-weight: 600; }
.span { --w: 4px; border-left: var(--w) solid var(--c); padding: 8px 14px 9px;
  margin: 0 0 7px; border-radius: 0 7px 7px 0;
  background: color-mix(in srgb, var(--c) 6%, transparent); }
.by-tool { margin-left: 28px; border-left-style: double; --w: 6px;
  background: repeating-linear-gradient(-45deg,
    color-mix(in srgb, var(--c) 11%, transparent) 0 6px,
    color-mix(in srgb, var(--c) 5%, transparent) 6px 12px); }
.by-environment { border-left-style: dotted; }
.head { display: flex; flex-wrap: wrap; gap: 4px 10px; align-items: center;
  color: var(--dim); font-size: 12px; margin-bottom: 4px; }
.head .who { margin-left: auto; }
.span pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: inherit; }
.by-tool pre, .r-tool pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo,
  Consolas, monospace; }
.by-tool pre { max-height: 19em; overflow-y: auto; }
.gold { color: var(--good); font-weight: 600; }
.fault { color: var(--bad); font-size: 14px; margin: 0 0 12px; }
.logp { height: 12px; flex: 0 1 240px; fill: var(--c); opacity: .6; }
.r-tool { --c: var(--tool); } .r-observation { --c: var(--observation); }
.r-think { --c: var(--think); } .r-plan { --c: var(--plan); }
.r-reflection { --c: var(--reflection); } .r-answer { --c: var(--answer); }
.r-suggested_answer { --c: var(--suggested_answer); }
.r-double_check { --c: var(--double_check); } .r-other { --c: var(--other); }
@media (max-width: 640px) { main { padding: 24px 14px 60px; }
  .facts { grid-template-columns: 1fr; } .facts dd { margin-bottom: 8px; }
  .by-tool { margin-left: 10px; } }
"""
)

SCRIPT = """
const all = [...document.querySelectorAll('.tr')];
const fields = [...document.querySelectorAll('.bar [data-field]')];
const find = document.getElementById('find');
function filter() {
  const text = find.value.trim().toLowerCase();
  let shown = 0;
  for (const t of all) {
    const fits = fields.every(f => !f.value || t.dataset[f.dataset.field] === f.value)
      && (!text || t.textContent.toLowerCase().includes(text));
    t.hidden = !fits;
    shown += fits;
  }
  document.getElementById('shown').textContent = shown + ' of ' + all.length;
}
if (find) {
  fields.forEach(f => f.addEventListener('change', filter));
  find.addEventListener('input', filter);
  document.getElementById('toggle').addEventListener('click', () => {
    const open = all.some(t => !t.hidden && !t.open);
    all.forEach(t => { if (!t.hidden) t.open = open; });
  });
  filter();
}
"""


def page(title: str, body: str, script: str = SCRIPT, style: str = "") -> str:
  """A complete, self-contained HTML page around `body` (which is trusted markup).

  The content security policy forbids every request, and every script but the page's
  own, by its hash: text that got past escaping still could not run or call home.

  Args:
    title: plain text.
    body: markup.
    script: the page's own.
    style: what the page adds to STYLE.
  """
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  policy = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    "base-uri 'none'; form-action 'none'"
  )
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>{html.escape(title)}</title><style>{STYLE}{style}</style></head>"
    f"<body><main>{body}</main><script>{script}</script></body></html>\n"
  )
