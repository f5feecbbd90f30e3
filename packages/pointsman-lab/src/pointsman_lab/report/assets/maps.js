"use strict";
/* Heat maps and scatter plots on canvas. Cividis-like ramp: readable without colour vision, monotone in lightness. */
const RAMP = [[0, 32, 77], [0, 51, 111], [57, 72, 107], [87, 93, 109], [112, 113, 115], [138, 134, 120], [166, 157, 117], [196, 181, 108], [228, 207, 91], [255, 234, 70]];
const NO_TOKEN = [200, 30, 60];
const EXPERT_MARKERS = [0, 1, 2, 3];

function ramp(t) {
  const at = Math.max(0, Math.min(1, t)) * (RAMP.length - 1), i = Math.min(RAMP.length - 2, Math.floor(at)), f = at - i;
  return RAMP[i].map((c, j) => Math.round(c + (RAMP[i + 1][j] - c) * f));
}
function rampKey(labels) {
  const stops = RAMP.map((c) => `rgb(${c.join(",")})`).join(",");
  return element("div", { class: "ramp" }, labels[0], element("i", { style: `background:linear-gradient(90deg,${stops})` }), labels[1]);
}
function decode64(text) { return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)); }
async function inflate(text) {
  const stream = new Blob([decode64(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
function cssColour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

/* {rows, columns, value(r, c) in 0..1, tip(r, c) -> text, label, height} -> canvas; the cell under pointer or arrow keys is told. */
function heatMap({ rows, columns, value, tip: describe, label, height }) {
  const canvas = element("canvas", { class: "heat", width: columns, height: rows, tabindex: "0", role: "img", "aria-label": `${label}. Arrow keys move through the cells.`, style: `height:${height}px` });
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) image.data.set([...(value(r, c) === null ? NO_TOKEN : ramp(value(r, c))), 255], 4 * (r * columns + c));
  context.putImageData(image, 0, 0);
  let at = null;
  function show(r, c, x, y, tied = null) {
    at = [r, c];
    const text = describe(r, c);
    tip.show(element("div", {}, text), x, y, tied);
    return text;
  }
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    show(Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows))), Math.min(columns - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * columns))), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => tip.hide());
  canvas.addEventListener("blur", () => tip.hide());
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    const [r, c] = at ? [Math.max(0, Math.min(rows - 1, at[0] + move[0])), Math.max(0, Math.min(columns - 1, at[1] + move[1]))] : [0, 0];
    const box = canvas.getBoundingClientRect();
    tip.say(show(r, c, box.left + (c + .5) / columns * box.width, box.top + (r + .5) / rows * box.height, canvas));
  });
  return canvas;
}

function drawLoads() {
  const root = figure("loads"), all = DATA.inside.heat;
  if (!root || !all.length) return;
  const holder = element("div", { class: "heats" });
  function draw(router) {
    const entry = all.find((e) => e.router === router);
    holder.replaceChildren(...entry.layers.map((layer) => {
      const loads = decode64(layer.load), columns = layer.steps.length;
      const map = heatMap({ rows: layer.experts, columns, label: `Load of every expert of ${layer.label} over training`, height: Math.max(96, Math.min(200, layer.experts * 9)),
        value: (r, c) => loads[r * columns + c] / 255,
        tip: (r, c) => `expert ${r}, around step ${Math.round(layer.steps[c]).toLocaleString("en")}: ${loads[r * columns + c] === 255 ? "at least " : ""}${(loads[r * columns + c] / 85 / layer.experts * 100).toFixed(1)} % of the assignments (${(loads[r * columns + c] / 85).toFixed(2)} of an even share)` });
      return element("div", {}, element("h4", {}, layer.label), map, element("div", { class: "axis" }, element("span", {}, `step ${Math.round(layer.steps[0]).toLocaleString("en")}`), element("span", {}, Math.round(layer.steps[columns - 1]).toLocaleString("en"))));
    }));
  }
  if (all.length > 1) root.querySelector(".controls").append(menu("router", all.map((e) => [e.router, `${e.router} (seed ${e.seed})`]), all[0].router, draw));
  root.append(holder, rampKey(["no token", "three times an even share, or more"]));
  draw(all[0].router);
}

/* The load of every expert of an audited model, of all its text or of a domain: {audit: {layers, of: {domain: shares}}}. */
function drawAuditLoads() {
  const root = figure("audit-loads"), audits = Object.entries(DATA.audits);
  if (!root) return;
  const holder = element("div", { class: "heats" }), domains = [...new Set(audits.flatMap(([, audit]) => Object.keys(audit.of)))];
  function draw(domain) {
    holder.replaceChildren(...audits.filter(([, audit]) => audit.of[domain]).map(([name, { layers, of }]) => {
      const shares = of[domain], columns = Math.max(...shares.map((row) => row.length)), rows = shares.length;
      const map = heatMap({ rows, columns, label: `Load of every expert of ${name}`, height: Math.max(80, Math.min(480, 18 * rows)),
        value: (r, c) => c >= shares[r].length ? .5 : shares[r][c] ? shares[r][c] * shares[r].length / 3 : null,
        tip: (r, c) => c >= shares[r].length ? `${layers[r]} has ${shares[r].length} experts` : `${layers[r]}, expert ${c}: ${(100 * (shares[r][c] ?? 0)).toFixed(1)} % of the choices (${((shares[r][c] ?? 0) * shares[r].length).toFixed(2)} of an even share)` });
      return element("div", {}, ...(audits.length > 1 ? [element("h4", {}, name)] : []), element("div", { class: "axis" }, element("span", {}, `${layers[0]}, expert 0`), element("span", {}, `expert ${columns - 1}`)), map,
        element("div", { class: "axis" }, element("span", {}, layers[rows - 1])));
    }));
  }
  if (domains.length > 1) root.querySelector(".controls").append((domains.length > 8 ? menu : choice)("text", domains.map((name) => [name, name]), "all", draw));
  root.append(holder, rampKey(["little", "three times an even share, or more"]));
  draw("all");
}

/* A scatter of mapped tokens, coloured by expert. Experts repeat the colours with another shape. */
function scatter(entry, layer, label, state) {
  const size = 300, canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": label });
  const [xs, ys] = entry.map.layers[layer], first = entry.map.first[layer];
  function draw() {
    const ratio = devicePixelRatio || 1, width = canvas.parentElement?.clientWidth || size;
    canvas.width = width * ratio; canvas.height = width * .82 * ratio;
    canvas.style.width = `${width}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const colours = Array.from({ length: SERIES_COLOURS }, (_, i) => cssColour(`--s${i}`)), faint = cssColour("--grid");
    const order = xs.map((_, i) => i).sort((a, b) => (first[a] === state.expert) - (first[b] === state.expert));
    for (const i of order) {
      const dim = state.expert !== null && first[i] !== state.expert;
      context.save();
      context.translate(...place(i, width));
      context.globalAlpha = dim ? .6 : .85;
      context.fillStyle = dim ? faint : first[i] === null ? cssColour("--faint") : colours[first[i] % SERIES_COLOURS];
      context.fill(new Path2D(MARKERS[EXPERT_MARKERS[Math.floor(first[i] / SERIES_COLOURS) % EXPERT_MARKERS.length]](3)));
      context.restore();
    }
  }
  function place(i, width) { return [8 + xs[i] / 1000 * (width - 16), 8 + ys[i] / 1000 * (width * .82 - 16)]; }
  function describe(i) { return `${JSON.stringify(entry.map.tokens[i])}: ${first[i] === null ? "no expert" : `expert ${first[i]}`}`; }
  let at = -1;
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), width = box.width;
    let best = -1, least = 144;
    xs.forEach((_, i) => { const [x, y] = place(i, width), d = (x - event.clientX + box.left) ** 2 + (y - event.clientY + box.top) ** 2; if (d < least) { least = d; best = i; } });
    best < 0 ? tip.hide() : tip.show(element("div", {}, describe(best)), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => tip.hide());
  canvas.addEventListener("blur", () => tip.hide());
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    at = (at + move + xs.length) % xs.length;
    const box = canvas.getBoundingClientRect(), [x, y] = place(at, box.width);
    tip.show(element("div", {}, describe(at)), box.left + x, box.top + y, canvas);
    tip.say(describe(at));
  });
  return { canvas, draw };
}

function drawMap() {
  const root = figure("map"), entries = DATA.inside.explorer.routers;
  if (!root || !entries.length) return;
  const holder = element("div", { class: "heats maps" });
  let drawn = [];
  const layers = layerChoices(entries);
  function draw(layer) {
    holder.replaceChildren();
    drawn = entries.filter((entry) => entry.map.layers[layer]).map((entry) => {
      const plot = scatter(entry, layer, `2-D map of ${entry.name}, ${entry.map.method}`, explorerState);
      holder.append(element("div", {}, element("h4", {}, `${entry.name} · ${entry.map.method.toUpperCase()}, k = ${entry.map.top_k}`), plot.canvas));
      plot.draw();
      return plot;
    });
  }
  const redraw = () => drawn.forEach((plot) => plot.draw());
  root.querySelector(".controls").append(choice("layer", layers, layers[0][0], draw));
  root.append(holder);
  draw(layers[0][0]);
  addEventListener("themechange", redraw);
  addEventListener("expertchange", redraw);
  new ResizeObserver(redraw).observe(holder);
}

function layerChoices(entries) {
  const names = new Map();
  for (const entry of entries) for (const [name, label] of entry.layers) names.set(name, label);
  return [...names];
}
