"""The report's style sheet: one set of names, two sets of colours."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5c6675; --line: #dde2ea; --page: #f6f7f9; --card: #ffffff;
  --dot: #3b6fd4; --strong: #c2410c; --good: #18794e; --bad: #c0262d; --warn: #9a6700; --rest: #b4bcc8;
  --c0: #c2410c; --c1: #3b6fd4; --c2: #18794e; --c3: #8b3fb8; --c4: #0e7c86; --c5: #a16207; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e9f0; --soft: #98a2b3; --line: #2c3442; --page: #11151c;
  --card: #1a202b; --dot: #7aa5f8; --strong: #fb923c; --good: #4cc38a; --bad: #ff7b80; --warn: #e2b93d; --rest: #475264;
  --c0: #fb923c; --c1: #7aa5f8; --c2: #4cc38a; --c3: #c792ea; --c4: #4fd1dc; --c5: #e2b93d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 2px; }
section { margin-top: 34px; }
a { color: var(--dot); }
code { overflow-wrap: anywhere; }
code, pre { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 10px 0 0; }
.aside { color: var(--soft); margin: 0; }
.best strong { font-size: 1.15rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px;
  margin-top: 10px; }
figure { margin: 0; padding: 12px; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  max-width: 560px; }
.wide figure { max-width: none; }
.wide .figures { grid-template-columns: minmax(0, 1fr); }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg text.title { fill: var(--ink); }
.grid { stroke: var(--line); }
.axis { stroke: var(--soft); }
.dot { fill: var(--dot); fill-opacity: .75; stroke: var(--card); }
.dot.crowd { fill-opacity: .5; stroke: none; }
.dot.best { fill: var(--strong); fill-opacity: 1; }
polyline { fill: none; }
.trend { stroke: var(--rest); stroke-width: 1.5; }
.front { stroke: var(--strong); stroke-width: 1.5; stroke-dasharray: 4 3; }
.curve { stroke-width: 1.6; stroke-linejoin: round; }
.curve.rest { stroke: var(--rest); stroke-width: 1; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
.legend { list-style: none; margin: 8px 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 20px; }
.swatch { display: inline-block; width: 18px; height: 3px; vertical-align: middle; margin-right: 6px;
  background: var(--rest); }
.s0 { background: var(--c0); } .s1 { background: var(--c1); } .s2 { background: var(--c2); }
.s3 { background: var(--c3); } .s4 { background: var(--c4); } .s5 { background: var(--c5); }
.chip { display: inline-block; border: 1px solid currentColor; border-radius: 999px; padding: 0 9px; font-size: 12.5px;
  margin-right: 6px; color: var(--soft); }
.chip.done { color: var(--good); } .chip.failed, .chip.oom, .chip.lost { color: var(--bad); }
.chip.timeout, .chip.preempted, .chip.cancelled { color: var(--warn); } .chip.running { color: var(--dot); }
.scroll { overflow-x: auto; margin-top: 10px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.long, td.long { white-space: normal; overflow-wrap: anywhere; min-width: 280px; }
td:last-child { white-space: normal; min-width: 240px; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
tr:target { background: color-mix(in srgb, var(--dot) 14%, transparent); }
tbody tr:last-child td { border-bottom: 0; }
.failure { margin-top: 10px; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 8px 12px; }
.failure summary { cursor: pointer; }
.failure strong { font-weight: 500; color: var(--bad); overflow-wrap: anywhere; }
"""
