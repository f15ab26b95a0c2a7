"use strict";
// Text from runs reaches the page only as text nodes and attributes, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const runs = data.runs;
const SVG = "http://www.w3.org/2000/svg";
const SHOWN = 12; // samples at a time
const stored = load();
const state = { hidden: new Set(stored.hidden), x: stored.x || "step", smooth: stored.smooth || 0, log: !!stored.log };
const charts = [];

function load() {
  try { return JSON.parse(sessionStorage.getItem("dovetail")) || {}; } catch { return {}; }
}
function save() {
  try { sessionStorage.setItem("dovetail", JSON.stringify({ ...state, hidden: [...state.hidden] })); } catch { /* a file may have no storage */ }
}
function el(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children.filter((child) => child != null));
  return node;
}
function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const color = (i) => `var(--c${i % 8})`;
function key(i) {
  const node = el("span", { className: "key" });
  node.style.background = color(i);
  return node;
}
function show(value) {
  if (value == null) return "-";
  const size = Math.abs(value);
  if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}

// Scales
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value != null) { low = Math.min(low, value); high = Math.max(high, value); }
  return low > high ? [0, 1] : low < high ? [low, high] : [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
}
function smoothed(values) {
  let mean = null, weight = 0;
  return values.map((value) => {
    if (value == null) return null;
    weight = state.smooth * weight + (1 - state.smooth);
    mean = state.smooth * (mean ?? 0) + (1 - state.smooth) * value;
    return mean / weight;
  });
}

// A chart: axes, then lines or a stack, then what the pointer is at.
function frame(box, xs, ys, label, zero) {
  const width = box.clientWidth || 360, height = 210, left = 64, right = 8, top = 8, bottom = 34;
  let [x0, x1] = extent(xs), [y0, y1] = extent(ys);
  if (zero) {
    y0 = 0;
    y1 = 1.05 * Math.max(0, ...ys.filter((v) => v != null)) || 1;
  }
  else if (!state.log) { const pad = (y1 - y0) * 0.05; y0 -= pad; y1 += pad; }
  const x = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
  const y = (v) => height - bottom - ((v - y0) / (y1 - y0)) * (height - top - bottom);
  const root = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const tick of ticks(y0, y1, 5)) {
    root.append(svg("line", { class: "rule", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    root.append(svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, show(!zero && state.log ? 10 ** tick : tick)));
  }
  for (const tick of ticks(x0, x1, Math.max(2, Math.floor(width / 70)))) {
    if (state.x === "step" && tick % 1) continue;
    root.append(svg("text", { x: x(tick), y: height - bottom + 15, "text-anchor": "middle" }, show(tick)));
  }
  root.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, xName()));
  root.append(svg("text", { transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, label));
  root.append(svg("line", { class: "rule", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  return { root, x, y, left, right: width - right, top, bottom: height - bottom };
}
function unit(name) {
  const known = [["tokens_per_second", "tokens/s"], ["samples_per_second", "samples/s"], ["seconds", "seconds"], ["gib", "GiB"], ["length", "tokens"], ["fraction", "share"]];
  return known.find(([part]) => name.includes(part))?.[1] || name.split("/").pop().slice(0, 28);
}
const xName = () => ({ step: "step", hours: "hours of steps", tokens: "tokens trained" })[state.x];
function path(xs, ys, f) {
  let text = "", pen = "M";
  xs.forEach((x, i) => {
    if (ys[i] == null || x == null) pen = "M";
    else { text += `${pen}${f.x(x).toFixed(1)},${f.y(ys[i]).toFixed(1)}`; pen = "L"; }
  });
  return text;
}
function area(xs, low, high, f) {
  const at = [...xs.keys()].filter((i) => low[i] != null && high[i] != null && xs[i] != null);
  const points = [...at.map((i) => [i, high[i]]), ...at.reverse().map((i) => [i, low[i]])];
  return points.length ? "M" + points.map(([i, v]) => `${f.x(xs[i]).toFixed(1)},${f.y(v).toFixed(1)}`).join("L") + "Z" : "";
}
function lines(box, name) {
  const scale = (values) => (state.log ? values.map((v) => (v > 0 ? Math.log10(v) : null)) : values);
  const drawn = runs.flatMap((run, i) => {
    if (state.hidden.has(i) || !run.series[name]) return [];
    const s = run.series[name];
    const at = [...s.v.keys()].filter((k) => s.v[k] != null && run.x[state.x][k] != null); // metrics of few steps are joined
    const sparse = data.joined.includes(name) || at.length < s.v.length / 3;
    const pick = (values) => values && scale(sparse ? at.map((k) => values[k]) : values);
    const xs = sparse ? at.map((k) => run.x[state.x][k]) : run.x[state.x];
    return [{ i, xs, v: pick(s.v), lo: pick(s.lo), hi: pick(s.hi), raw: sparse ? at.map((k) => s.v[k]) : s.v }];
  });
  const f = frame(box, drawn.flatMap((d) => d.xs), drawn.flatMap((d) => [...d.v, ...(d.lo || []), ...(d.hi || [])]), unit(name), data.zero.includes(name) && !state.log);
  for (const i of drawn.map((d) => d.i)) for (const event of runs[i].events) {
    const at = runs[i].x.step.indexOf(+event.step);
    const x = at < 0 || !event.step ? null : f.x(runs[i].x[state.x][at]);
    if (x != null && x >= f.left && x <= f.right) f.root.append(svg("line", { class: "mark", x1: x, x2: x, y1: f.top, y2: f.bottom }));
  }
  for (const d of drawn) {
    const stroke = color(d.i), plain = { fill: "none", stroke, "stroke-width": 1.6, "stroke-linejoin": "round" };
    if (d.lo) f.root.append(svg("path", { d: area(d.xs, d.lo, d.hi, f), fill: stroke, opacity: drawn.length > 1 ? 0.08 : 0.16 }));
    if (state.smooth) f.root.append(svg("path", { ...plain, d: path(d.xs, d.v, f), opacity: 0.3 }));
    f.root.append(svg("path", { ...plain, d: path(d.xs, state.smooth ? smoothed(d.v) : d.v, f) }));
    d.v.forEach((v, k) => { // without neighbors, or of few
      if (v != null && d.xs[k] != null && (d.v.length < 25 || (d.v[k - 1] == null && d.v[k + 1] == null)))
        f.root.append(svg("circle", { cx: f.x(d.xs[k]), cy: f.y(v), r: 2.2, fill: stroke }));
    });
  }
  pointer(box, f, drawn.map((d) => d.xs), (at) => drawn.map((d, n) =>
    at[n] == null ? null : [d.i, `${runs.length > 1 ? runs[d.i].name + "  " : ""}${show(d.raw[at[n]])}` + (d.lo ? `  (${range(d, at[n])})` : "")]));
}
const range = (d, k) => [d.lo[k], d.hi[k]].map((v) => show(state.log && v != null ? 10 ** v : v)).join(" to ");
function pointer(box, f, columns, describe) {
  const line = svg("line", { class: "hover", y1: f.top, y2: f.bottom, visibility: "hidden" });
  const tip = el("div", { className: "tip", hidden: true });
  f.root.append(line);
  f.root.onpointerleave = () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); };
  f.root.onpointermove = f.root.onpointerdown = (event) => {
    const mouse = event.clientX - f.root.getBoundingClientRect().left;
    const near = columns.map((xs) => xs.reduce((best, x, k) =>
      x != null && (best == null || Math.abs(f.x(x) - mouse) < Math.abs(f.x(xs[best]) - mouse)) ? k : best, null));
    const distances = near.map((k, n) => (k == null ? Infinity : Math.abs(f.x(columns[n][k]) - mouse)));
    const first = distances.indexOf(Math.min(...distances));
    if (first < 0) return;
    const x = columns[first][near[first]];
    const at = near.map((k, n) => (k != null && Math.abs(f.x(columns[n][k]) - f.x(x)) < 6 ? k : null));
    line.setAttribute("x1", f.x(x)); line.setAttribute("x2", f.x(x)); line.setAttribute("visibility", "visible");
    tip.replaceChildren(el("strong", {}, `${xName()} ${show(x)}`), ...describe(at).filter(Boolean).map(([i, text]) => el("div", {}, key(i), text)));
    tip.hidden = false;
    const middle = (f.left + f.right) / 2;
    tip.style.left = f.x(x) < middle ? `${f.x(x) + 10}px` : "auto";
    tip.style.right = f.x(x) < middle ? "auto" : `${f.root.clientWidth - f.x(x) + 10}px`;
  };
  box.replaceChildren(f.root, tip);
}

// Seconds of the phases, one on the other; what no phase claims is "other".
function phasesOf(run) {
  const names = Object.keys(run.phases), count = run.x.step.length;
  const sums = Array.from({ length: count }, (_, k) => names.reduce((sum, name) => sum + (run.phases[name][k] || 0), 0));
  const rest = sums.map((sum, k) => Math.max(0, (run.step_seconds[k] || 0) - sum));
  const parts = names.map((name) => [name, run.phases[name]]);
  const total = (values) => values.reduce((sum, v) => sum + (v || 0), 0);
  if (total(rest) > 0.01 * total(sums)) parts.push(["other", rest]);
  return parts.map(([name, values]) => ({ name, values, total: total(values) }));
}
function stack(box, run, parts) {
  const xs = run.x[state.x], count = xs.length;
  const known = Array.from({ length: count }, (_, k) => parts.some((part) => part.name !== "other" && part.values[k] != null));
  let base = known.map((k) => (k ? 0 : null));
  const layers = parts.map((part) => { const low = base; base = low.map((v, k) => (v == null ? null : v + (part.values[k] || 0))); return [low, base]; });
  const f = frame(box, xs, base, "seconds a step", true);
  layers.forEach(([low, high], i) => f.root.append(svg("path", { d: area(xs, low, high, f), fill: color(phaseColor(parts[i].name)), opacity: 0.85 })));
  pointer(box, f, [xs], ([k]) => (k == null ? [] : parts.map((part) => [phaseColor(part.name), `${part.name}  ${show(part.values[k])} s`])));
}
const phaseNames = [...new Set(runs.flatMap((run) => Object.keys(run.phases)))].concat("other");
const phaseColor = (name) => phaseNames.indexOf(name);
function phases() {
  const cards = runs.filter((run) => Object.keys(run.phases).length).map((run) => {
    const parts = phasesOf(run), all = parts.reduce((sum, part) => sum + part.total, 0) || 1;
    const steps = run.step_seconds.filter((v) => v != null).length || 1;
    const bar = el("div", { className: "share" }, ...parts.map((part) => {
      const piece = el("span", { title: part.name });
      piece.style.background = color(phaseColor(part.name));
      piece.style.width = `${(100 * part.total) / all}%`;
      return piece;
    }));
    const keys = parts.map((part) => el("span", {}, key(phaseColor(part.name)), `${part.name} ${((100 * part.total) / all).toFixed(0)} %, ${show(part.total / steps)} s`));
    const box = el("div", { className: "chart" });
    charts.push(() => stack(box, run, parts));
    return el("div", { className: "card" }, el("h3", {}, run.name), bar, el("div", { className: "keys" }, ...keys), box);
  });
  return section("Where the time goes", "seconds of each phase, mean of the steps; below by step", cards.length && el("div", { className: "grid wide" }, ...cards));
}
// Profiled steps: how each phase was spent, and its longest operators and kernels.
function profiles() {
  const cards = runs.flatMap((run) => run.profiles.map((profile) => profileCard(run.name, profile)));
  return section("Profiles", "computing: the GPU, or operators on a CPU; waiting: in collectives while nothing computes; host: the rest, such as Python and launches",
    cards.length && el("div", { className: "grid wide" }, ...cards));
}
function profileCard(name, profile) {
  const several = profile.ranks > 1 ? "ranks, from the least to the most" : "rank";
  const rows = profile.phases.flatMap((phase) => {
    const host = phase.seconds.map((seconds, i) => Math.max(0, seconds - phase.computing[i] - phase.waiting[i]));
    const parts = [phase.computing, phase.waiting, host].map((part) => shares(part, phase.seconds));
    const below = Object.entries(phase.parts).map(([part, seconds]) => profileRow(`\u00a0\u00a0${part}`, [show(seconds), "", "", "", ""]));
    return [profileRow(phase.name, [spread(phase.seconds), ...parts, phase.peak_gib ? show(phase.peak_gib) : "-"]), ...below];
  });
  const longest = profile.phases.map((phase) => {
    const tables = Object.entries(phase.longest).map(([kind, found]) =>
      table([kind, "seconds", "calls"], found.map(([own, seconds, calls]) => profileRow(own, [show(seconds), calls]))));
    return el("details", {}, el("summary", {}, `${phase.name}: what took longest on rank ${profile.rank}`), ...tables);
  });
  return el("div", { className: "card" }, el("h3", {}, `${name}, step ${profile.step}`),
    el("div", { className: "soft" }, `${profile.ranks} ${several}, ${profile.device}; traces in profile/step-${profile.step}`),
    table(["phase", "seconds", "computing", "waiting", "host", "peak GiB"], rows), ...longest);
}
const profileRow = (name, cells) => el("tr", {}, el("td", {}, name), ...cells.map((cell) => el("td", {}, String(cell))));
function spread(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return show(low) === show(high) ? show(low) : `${show(low)} to ${show(high)}`;
}
const shares = (part, whole) => `${spread(part.map((value, i) => Math.round((100 * value) / (whole[i] || 1))))} %`;

function section(title, about, content) {
  return content ? el("section", { id: title.replaceAll(" ", "-") }, el("h2", {}, title), about && el("div", { className: "soft tools" }, about), content) : null;
}

// Samples
function filtered(words, run, step) {
  return data.samples.filter((s) => (run === "" || s.run === +run) && (step === "" || s.step === +step) && words.every((word) => textOf(s).includes(word)));
}
function textOf(s) {
  return (s.low ??= `${s.id}\n${s.prompt}\n${s.completion}\n${s.answer}`.toLowerCase());
}
function rewardOf(s) {
  const parts = Object.entries(s.parts).map(([name, value]) => `${name} ${show(value)}`).join(", ");
  const node = el("span", { className: "reward" }, `reward ${s.reward == null ? "none" : show(s.reward)}`);
  node.style.color = s.reward == null ? "" : s.reward > 0 ? "var(--good)" : "var(--bad)";
  return el("span", {}, node, parts && ` (${parts})`);
}
function completion(s, named) {
  const facts = [named && `step ${s.step}`, s.kind !== "rollout" && s.kind, s.tokens != null && `${s.tokens} tokens`, s.finish && `finish: ${s.finish}`];
  return el("div", { className: "one" }, el("div", { className: "soft" }, rewardOf(s), " ", facts.filter(Boolean).join(" \u00b7 ")), el("pre", {}, s.completion || "(empty)"));
}
function head(s, withRun) {
  const named = [withRun && runs.length > 1 && runs[s.run].name, s.id && `prompt ${s.id}`].filter(Boolean).join(" \u00b7 ");
  return [el("div", { className: "soft" }, named), el("pre", { className: "prompt" }, s.prompt), s.answer && el("div", { className: "soft" }, `answer: ${s.answer}`)];
}
function one(s) {
  return el("div", { className: "card" }, ...head(s, true), completion(s, true));
}
function pairs(samples) {
  const groups = new Map();
  for (const s of samples) {
    const name = JSON.stringify([s.kind, s.id, s.prompt]);
    groups.set(name, [...(groups.get(name) || []), s]);
  }
  return [...groups.values()].flatMap((group) => {
    const columns = runs.flatMap((_, i) => {
      const of = group.filter((s) => s.run === i), steps = of.map((s) => s.step);
      return [...new Set([Math.min(...steps), Math.max(...steps)])].map((step) => of.filter((s) => s.step === step)).filter((c) => c.length);
    });
    if (columns.length < 2) return [];
    const cells = columns.map((c) => el("div", {}, el("h3", {}, (runs.length > 1 ? `${runs[c[0].run].name}, ` : "") + `step ${c[0].step}`), ...c.slice(0, 4).map((s) => completion(s, false))));
    return [el("div", { className: "card" }, ...head(group[0], false), el("div", { className: "pair" }, ...cells))];
  });
}
function options(all, names) {
  return el("select", {}, el("option", { value: "" }, all), ...names.map(([value, text]) => el("option", { value }, text)));
}
function samples() {
  if (!data.samples.length) return null;
  const search = el("input", { type: "search", id: "search", placeholder: "search prompts and completions" });
  const steps = [...new Set(data.samples.map((s) => s.step))].sort((a, b) => a - b);
  const run = options("all runs", runs.map((r, i) => [i, r.name])), step = options("all steps", steps.map((s) => [s, `step ${s}`]));
  const order = el("select", { id: "order" }, ...[["pairs", "same prompt, old and new"], ["new", "newest first"], ["best", "highest reward first"], ["worst", "lowest reward first"], ["old", "oldest first"]].map(([value, text]) => el("option", { value }, text)));
  const list = el("div", { className: "samples", id: "samples" }), count = el("span", { className: "soft", id: "count" });
  const more = el("button", { type: "button" }, "show more");
  let limit = SHOWN;
  const draw = () => {
    const found = filtered(search.value.toLowerCase().split(/\s+/).filter(Boolean), run.value, step.value);
    const by = { new: (a, b) => b.step - a.step, old: (a, b) => a.step - b.step, best: (a, b) => b.reward - a.reward, worst: (a, b) => a.reward - b.reward }[order.value];
    const ordered = by ? [...(/best|worst/.test(order.value) ? found.filter((s) => s.reward != null) : found)].sort(by) : pairs(found);
    list.replaceChildren(...ordered.slice(0, limit).map((s) => (by ? one(s) : s)));
    count.textContent = by ? `${ordered.length} of ${data.samples.length} samples` : `${ordered.length} prompts at several steps or in several runs`;
    more.hidden = ordered.length <= limit;
  };
  if (!pairs(data.samples).length) order.value = "new";
  for (const control of [search, run, step, order]) control.oninput = () => { limit = SHOWN; draw(); };
  more.onclick = () => { limit += SHOWN; draw(); };
  draw();
  return section("Samples", "a selection from the files in rollouts/ and eval/; long texts are cut in their middle",
    el("div", {}, el("div", { className: "tools" }, search, runs.length > 1 ? run : null, step, order, count), list, el("div", { className: "tools" }, more)));
}

// Tables
function table(heads, rows) {
  return el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((h) => el("th", {}, h)))), el("tbody", {}, ...rows)));
}
function events() {
  const rows = runs.flatMap((run) => run.events.map((event) => {
    const { time, kind, step, ...rest } = event;
    const detail = Object.entries(rest).map(([name, value]) => (name === "cause" ? value : `${name}: ${value}`)).join("; ");
    return el("tr", {}, ...[runs.length > 1 && run.name, time || "", kind || "", step || "", detail].filter((c) => c !== false).map((c) => el("td", {}, c)));
  }));
  return rows.length ? section("Events", "dashed lines in the curves", table([runs.length > 1 && "run", "time", "kind", "step", "what"].filter(Boolean), rows)) : null;
}
function config() {
  if (!data.config.length) return null;
  const all = el("input", { type: "checkbox" }), place = el("div", {});
  const draw = () => {
    const rows = data.config.flatMap(([name, ...cells]) => {
      const known = cells.filter(([value]) => value != null);
      const changed = cells.map(([value, standard]) => value != null && value !== standard);
      if (!all.checked && !changed.includes(true)) return [];
      const standard = [...new Set(cells.map(([, s]) => s).filter((s) => s != null))].join(" or ");
      const differs = new Set(cells.map(([value]) => value)).size > 1;
      return [el("tr", { className: differs ? "differs" : "" }, el("td", {}, name), ...cells.map(([value], i) => el("td", { className: changed[i] ? "changed" : "" }, value ?? "-")), el("td", {}, known.length ? standard : "-"))];
    });
    place.replaceChildren(table(["key", ...(runs.length > 1 ? runs.map((r) => r.name) : ["value"]), "default"], rows));
  };
  all.oninput = draw;
  draw();
  return section("Config", runs.length > 1 ? "keys that are not the default, bold; keys in which the runs differ have a colored row" : "keys that are not the default, bold",
    el("div", {}, el("div", { className: "tools" }, el("label", {}, all, "all keys")), place));
}
function logs() {
  const cards = runs.filter((run) => run.log).map((run) => el("details", { className: "card" }, el("summary", {}, `${run.name}: end of console.log`), el("pre", {}, run.log)));
  return section("Console", "", cards.length ? el("div", { className: "samples" }, ...cards) : null);
}

// The page
function controls() {
  const redraw = () => { save(); draw(); };
  const names = runs.map((run, i) => {
    const box = el("input", { type: "checkbox", checked: !state.hidden.has(i) });
    box.oninput = () => { state.hidden[box.checked ? "delete" : "add"](i); redraw(); };
    return el("label", {}, runs.length > 1 ? box : null, key(i), run.name);
  });
  const x = el("select", {}, ...["step", "hours", "tokens"].map((value) => el("option", { value, selected: value === state.x }, { step: "steps", hours: "hours", tokens: "tokens" }[value])));
  x.oninput = () => { state.x = x.value; redraw(); };
  const smooth = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth });
  smooth.oninput = () => { state.smooth = +smooth.value; redraw(); };
  const log = el("input", { type: "checkbox", checked: state.log });
  log.oninput = () => { state.log = log.checked; redraw(); };
  return el("div", { className: "bar", id: "legend" }, ...names, el("label", {}, "x axis", x), el("label", {}, "smoothing", smooth), el("label", {}, log, "log scale"));
}
function summary(run, i) {
  const facts = Object.entries(run.facts).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  return el("div", { className: "card" }, el("h3", {}, key(i), ` ${run.name} `, el("span", { className: "soft" }, run.state)), el("div", { className: "soft" }, run.path), el("dl", { className: "facts" }, ...facts));
}
function curves([title, names]) {
  const cards = names.map((name) => {
    const box = el("div", { className: "chart" });
    charts.push(() => lines(box, name));
    const band = runs.map((run) => run.series[name]?.band).find(Boolean);
    const legend = band && el("div", { className: "soft band" }, el("span", { className: "key" }), `band: ${band}`);
    return el("div", { className: "card plot" }, el("div", {}, el("h3", {}, name), el("div", { className: "soft" }, data.help[name] || "")), box, legend);
  });
  return section(title, "", el("div", { className: "grid" }, ...cards));
}
function draw() {
  for (const chart of charts) chart();
}
const parts = [
  el("h1", {}, runs.map((run) => run.name).join(", ")),
  el("div", { className: "soft tools" }, `dovetail report, made ${data.made}` + (data.reload ? `; reloads every ${data.reload} s` : "")),
  el("div", { className: "grid wide" }, ...runs.map(summary)),
  data.groups.length ? controls() : el("p", { id: "empty" }, "metrics.jsonl has no step yet."),
];
const [reward, evaluation] = ["Reward", "Evaluation"].map((title) => data.groups.find((group) => group[0] === title));
parts.push(...[reward, evaluation].filter(Boolean).map(curves), phases(), profiles());
parts.push(...data.groups.filter((group) => group !== reward && group !== evaluation).map(curves), samples(), events(), config(), logs());
const jumps = parts.filter((part) => part?.tagName === "SECTION").map((part) => el("a", { href: `#${part.id}` }, part.id.replaceAll("-", " ")));
parts.splice(2, 0, el("nav", { className: "tools" }, ...jumps));
page.replaceChildren(...parts.filter(Boolean));
draw();
page.dataset.milliseconds = Math.round(performance.now()); // since the page was asked for
let size = innerWidth;
addEventListener("resize", () => { if (innerWidth !== size) { size = innerWidth; draw(); } });
if (data.reload) setInterval(() => { // not while somebody reads what a reload would close
  const busy = document.getElementById("search")?.value || String(getSelection()) || document.querySelector("details[open]");
  if (!document.hidden && !busy) location.reload();
}, data.reload * 1000);
