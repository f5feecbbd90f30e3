"use strict";
/* Small line charts drawn as SVG. Every chart: legend buttons, a guide that lists all series at one x by pointer or arrow
   keys, colours from CSS variables so that themes need no redrawing, distinct markers and dashes beside colour. */
const SVG = "http://www.w3.org/2000/svg";
const SERIES_COLOURS = 8;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const MARKERS = [
  (r) => `M${-r},0A${r},${r} 0 1 1 ${r},0A${r},${r} 0 1 1 ${-r},0Z`,
  (r) => `M${-r * .88},${-r * .88}h${r * 1.76}v${r * 1.76}h${-r * 1.76}Z`,
  (r) => `M0,${-r * 1.2}L${r * 1.1},${r * .8}H${-r * 1.1}Z`,
  (r) => `M0,${-r * 1.3}L${r * 1.3},0L0,${r * 1.3}L${-r * 1.3},0Z`,
  (r) => `M0,${r * 1.2}L${r * 1.1},${-r * .8}H${-r * 1.1}Z`,
  (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
  (r) => `M0,${-r * 1.3}V${r * 1.3}M${-r * 1.3},0H${r * 1.3}`,
  (r) => `M${-r},${-r * 1.1}H${r}L${r * .4},0L${r},${r * 1.1}H${-r}L${-r * .4},0Z`,
];
const OPEN_MARKERS = new Set([5, 6]);

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  return dress(node, attributes, children);
}
function shape(name, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, name), attributes, children);
}
function dress(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/* The look of series i: colour and marker cycle together, the dash changes with each round. */
function look(i) {
  return { colour: `var(--s${i % SERIES_COLOURS})`, marker: i % MARKERS.length, dash: DASHES[Math.floor(i / SERIES_COLOURS) % DASHES.length] };
}
function drawMarker(style, x, y, r = 3.6) {
  const open = OPEN_MARKERS.has(style.marker);
  return shape("path", { d: MARKERS[style.marker](r), transform: `translate(${x},${y})`, fill: open ? "none" : style.colour,
    stroke: open ? style.colour : "var(--card)", "stroke-width": open ? 2 : 1 });
}
function key(i) {
  const style = look(i);
  const svg = shape("svg", { class: "key", viewBox: "0 0 34 14", "aria-hidden": "true" });
  svg.append(shape("line", { x1: 1, x2: 33, y1: 7, y2: 7, stroke: style.colour, "stroke-width": 2, "stroke-dasharray": style.dash }), drawMarker(style, 17, 7, 4));
  return svg;
}

/* One tooltip for the page. Opened by keyboard it is tied to an element and moves with it; by pointer, scrolling closes it. */
const tip = {
  tied: null,
  show(content, x, y, element = null) {
    const box = document.getElementById("tip"), home = element?.getBoundingClientRect();
    this.tied = element && { element, x: x - home.left, y: y - home.top };
    box.replaceChildren(content);
    box.hidden = false;
    this.place(x, y);
  },
  place(x, y) {
    const box = document.getElementById("tip"), { width, height } = box.getBoundingClientRect();
    const left = x + 16 + width > innerWidth - 8 ? x - width - 16 : x + 16;
    box.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    box.style.top = `${Math.max(8, Math.min(y - height / 2, innerHeight - height - 8))}px`;
  },
  scrolled() {
    if (!this.tied) { this.hide(); return; }
    const home = this.tied.element.getBoundingClientRect();
    this.place(home.left + this.tied.x, home.top + this.tied.y);
  },
  hide() { document.getElementById("tip").hidden = true; this.tied = null; },
  say(text) { document.getElementById("live").textContent = text; },
};
addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hide(); });
addEventListener("scroll", () => tip.scrolled(), { passive: true });

function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * .999) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}
function logTicks(low, high, count) {
  for (const steps of [[1], [1, 2, 5], [1, 1.5, 2, 3, 5, 7], [1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9]]) {
    const ticks = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
      for (const s of steps) { const t = +(s * 10 ** p).toPrecision(6); if (t >= low * .9999 && t <= high * 1.0001) ticks.push(t); }
    if (ticks.length >= Math.min(4, count)) return ticks;
  }
  return niceTicks(low, high, count);
}
function short(value, digits = 4) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(digits - 1)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(digits - 1)}k`;
  return `${+value.toPrecision(digits)}`;
}
/* The labels of an axis: as many digits as tell its ticks apart. */
function tickLabels(ticks) {
  for (let digits = 4; digits < 12; digits++) {
    const labels = ticks.map((t) => short(t, digits));
    if (new Set(labels).size === labels.length) return labels;
  }
  return ticks.map(String);
}

/* spec: {series: [{name, style, points: [{x, y, low?, high?}]}], xLabel, yLabel, xLog2, xNames: [label of x = 0, 1, …], yLog, zero, format(p),
   xName(x), label, controls} */
function lineChart(root, spec) {
  const state = { hidden: new Set(), log: Boolean(spec.yLog), at: null };
  const legend = element("div", { class: "legend", role: "group", "aria-label": "Rows shown" });
  const svg = shape("svg", { class: "chart", role: "img", tabindex: "0", "aria-label": `${spec.label}. Arrow keys move through the values.` });
  spec.series.forEach((series, i) => {
    const button = element("button", { type: "button", "aria-pressed": "true", title: "Show or hide this row",
      onclick: () => { state.hidden.has(i) ? state.hidden.delete(i) : state.hidden.add(i); button.setAttribute("aria-pressed", String(!state.hidden.has(i))); draw(); } });
    button.append(key(series.style), series.name);
    for (const [event, only] of [["pointerenter", true], ["focus", true], ["pointerleave", false], ["blur", false]])
      button.addEventListener(event, () => { for (const group of svg.querySelectorAll(".series")) group.classList.toggle("fade", only && group.dataset.name !== series.name); });
    legend.append(button);
  });
  const positive = spec.series.every((s) => s.points.every((p) => (p.low ?? p.y) > 0));
  const bar = spec.controls ?? root.querySelector(".controls");
  if (bar && positive && !spec.zero) {
    const toggle = element("button", { type: "button", "aria-pressed": String(state.log), onclick: () => {
      state.log = !state.log; toggle.setAttribute("aria-pressed", String(state.log)); draw(); } }, "log");
    toggle.title = "Logarithmic vertical axis";
    bar.append(toggle);
  }
  root.append(legend, svg);
  let geometry = null;

  function draw() {
    const width = Math.max(280, root.clientWidth || 600), height = spec.height ?? Math.round(Math.min(340, Math.max(240, width * .56)));
    const margin = { left: 62, right: 14, top: 12, bottom: 42 };
    const shown = spec.series.filter((_, i) => !state.hidden.has(i));
    const xs = [...new Set(spec.series.flatMap((s) => s.points.map((p) => p.x)))].sort((a, b) => a - b);
    const ys = shown.flatMap((s) => s.points.flatMap((p) => [p.low ?? p.y, p.high ?? p.y]));
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    if (!xs.length || !ys.length) { svg.append(shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing to show")); geometry = null; return; }
    const log = state.log && positive;
    const fx = spec.xLog2 ? Math.log2 : (v) => v, fy = log ? Math.log10 : (v) => v;
    let low = Math.min(...ys), high = Math.max(...ys);
    if (spec.zero) { low = Math.min(0, low); high = Math.max(0, high); }
    if (spec.calm) {  // differences within the bars, or below this share of the values, do not fill the height
      const bars = shown.flatMap((s) => s.points.map((p) => (p.high ?? p.y) - (p.low ?? p.y)));
      const lack = Math.max(3 * Math.max(...bars), spec.calm * Math.abs(high + low) / 2) - (high - low);
      if (lack > 0) { low -= lack / 2; high += lack / 2; if (positive && low <= 0) low = Math.min(...ys) * .9; }
    }
    if (low === high) { low -= Math.abs(low) * .05 || .5; high += Math.abs(high) * .05 || .5; }
    const pad = (fy(high) - fy(low)) * .06;
    const [y0, y1] = [fy(low) - pad, fy(high) + pad], [x0, x1] = [fx(xs[0]), fx(xs[xs.length - 1])];
    const inner = { width: width - margin.left - margin.right - (spec.xLog2 ? 16 : 0), height: height - margin.top - margin.bottom };
    const X = (v) => margin.left + (spec.xLog2 ? 8 : 0) + (x1 === x0 ? .5 : (fx(v) - x0) / (x1 - x0)) * inner.width;
    const Y = (v) => margin.top + (1 - (fy(v) - y0) / (y1 - y0)) * inner.height;
    const bottom = margin.top + inner.height;
    const count = Math.max(3, Math.round(inner.height / 44));
    const ticks = log ? logTicks(10 ** y0, 10 ** y1, count) : niceTicks(y0, y1, count);
    const yLabels = tickLabels(ticks);
    for (const [i, t] of ticks.entries()) svg.append(shape("line", { class: "gridline", x1: margin.left, x2: width - margin.right, y1: Y(t), y2: Y(t) }),
      shape("text", { x: margin.left - 8, y: Y(t) + 4, "text-anchor": "end" }, yLabels[i]));
    const xTicks = spec.xLog2 || spec.xNames ? xs : niceTicks(x0, x1, Math.max(3, Math.round(inner.width / 80)));
    const xLabels = tickLabels(xTicks);
    for (const [i, t] of xTicks.entries()) svg.append(shape("line", { class: "axis", x1: X(t), x2: X(t), y1: bottom, y2: bottom + 4 }),
      shape("text", { x: X(t), y: bottom + 17, "text-anchor": "middle" }, spec.xNames ? spec.xNames[t].replace(/^(?:(.)\w* )?layer /, "$1") : spec.xLog2 ? String(t) : xLabels[i]));
    svg.append(shape("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: bottom, y2: bottom }));
    if (spec.zero) svg.append(shape("line", { class: "zero", x1: margin.left, x2: width - margin.right, y1: Y(0), y2: Y(0) }));
    svg.append(shape("text", { x: margin.left + inner.width / 2, y: height - 6, "text-anchor": "middle" }, spec.xLabel),
      shape("text", { transform: `translate(13,${margin.top + inner.height / 2}) rotate(-90)`, "text-anchor": "middle" }, spec.yLabel + (log ? " (log)" : "")));
    for (const series of shown) drawSeries(series, X, Y);
    const guide = shape("g", {});
    svg.append(guide);
    geometry = { xs, X, Y, guide, top: margin.top, bottom, shown };
  }

  function drawSeries(series, X, Y) {
    const style = look(series.style), points = series.points;
    const all = shape("g", { class: "series", "data-name": series.name });
    const group = shape("g", { stroke: style.colour, fill: "none", "stroke-width": 1.9, "stroke-linejoin": "round" });
    const spread = points.filter((p) => p.low !== undefined && p.high > p.low);
    if (spread.length && points.length > 24) {
      const upper = spread.map((p) => `${X(p.x).toFixed(1)},${Y(p.high).toFixed(1)}`), lower = spread.map((p) => `${X(p.x).toFixed(1)},${Y(p.low).toFixed(1)}`).reverse();
      group.append(shape("path", { d: `M${upper.join("L")}L${lower.join("L")}Z`, fill: style.colour, stroke: "none", opacity: .16 }));
    } else for (const p of spread) {
      const x = X(p.x).toFixed(1);
      group.append(shape("path", { d: `M${x},${Y(p.low).toFixed(1)}V${Y(p.high).toFixed(1)}M${x - 4},${Y(p.low).toFixed(1)}h8M${x - 4},${Y(p.high).toFixed(1)}h8`, "stroke-width": 1.3 }));
    }
    group.append(shape("path", { d: "M" + points.map((p) => `${X(p.x).toFixed(1)},${Y(p.y).toFixed(1)}`).join("L"), "stroke-dasharray": style.dash }));
    all.append(group);
    svg.append(all);
    const every = Math.max(1, Math.ceil(points.length / 9)), shift = points.length > 24 ? (series.style * 3) % every : 0;
    points.forEach((p, i) => { if ((i + shift) % every === 0) all.append(drawMarker(style, X(p.x), Y(p.y))); });
  }

  function showAt(index, client) {
    if (!geometry) return;
    const { xs, X, Y, guide, top, bottom, shown } = geometry;
    state.at = Math.max(0, Math.min(xs.length - 1, index));
    const x = xs[state.at], rows = [];
    guide.replaceChildren(shape("line", { class: "guide", x1: X(x), x2: X(x), y1: top, y2: bottom }));
    for (const series of shown) {
      const p = series.points.find((q) => q.x === x);
      if (!p) continue;
      rows.push([series, p]);
      guide.append(drawMarker(look(series.style), X(x), Y(p.y), 5));
    }
    rows.sort((a, b) => a[1].y - b[1].y);
    const body = element("tbody");
    for (const [series, p] of rows) body.append(element("tr", {}, element("td", {}, key(series.style), series.name), element("td", {}, spec.format(p))));
    const name = spec.xName(x);
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    tip.show(element("div", {}, element("b", {}, name), element("table", {}, body)), client?.x ?? box.left + X(x) * scale, client?.y ?? box.top + box.height / 2, client ? null : svg);
    if (!client) tip.say(`${name}: ` + rows.map(([series, p]) => `${series.name} ${spec.format(p)}`).join("; "));
  }
  function clear() { geometry?.guide.replaceChildren(); tip.hide(); }
  svg.addEventListener("pointermove", (event) => {
    if (!geometry) return;
    const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let best = 0;
    geometry.xs.forEach((x, i) => { if (Math.abs(geometry.X(x) - px) < Math.abs(geometry.X(geometry.xs[best]) - px)) best = i; });
    showAt(best, { x: event.clientX, y: event.clientY });
  });
  svg.addEventListener("pointerleave", clear);
  svg.addEventListener("blur", clear);
  svg.addEventListener("keydown", (event) => {
    if (!geometry) return;
    const last = geometry.xs.length - 1, at = state.at ?? -1, jump = Math.max(1, Math.round(last / 30));
    const to = { ArrowRight: at + jump, ArrowLeft: at < 0 ? last : at - jump, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    showAt(to);
  });
  new ResizeObserver(() => { if (root.clientWidth !== state.width) { state.width = root.clientWidth; draw(); } }).observe(root);
  draw();
  return { redraw: draw, replace(series) { spec.series.splice(0, spec.series.length, ...series); draw(); } };
}

/* A group of buttons of which one is pressed. */
function choice(name, options, chosen, onchange) {
  const group = element("div", { class: "switch", role: "group", "aria-label": name }, element("span", { class: "name" }, name));
  const buttons = options.map(([value, label]) => element("button", { type: "button", "data-value": value, "aria-pressed": String(value === chosen), onclick: () => pick(value) }, label));
  function pick(value) { buttons.forEach((b, i) => b.setAttribute("aria-pressed", String(options[i][0] === value))); onchange(value); }
  group.append(...buttons);
  return group;
}
/* The same as a drop-down list, for long options. */
function menu(name, options, chosen, onchange) {
  const select = element("select", { "aria-label": name, onchange: () => onchange(options[select.selectedIndex][0]) });
  for (const [value, label] of options) select.append(element("option", { selected: value === chosen ? "" : null }, label));
  return element("label", { class: "switch" }, element("span", { class: "name" }, name), select);
}
