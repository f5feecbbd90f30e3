"use strict";
/* Images with the expert of each patch, loads beside the uniform line, and the patches that each expert likes best. */
function expertColour(expert) { return cssColour(`--s${expert % SERIES_COLOURS}`); }

function loadImage(png) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = reject;
    image.src = `data:image/png;base64,${png}`;
  });
}

/* An image with the expert of every patch over it; patches of other experts than `only` stay dark. */
function paintPatches(canvas, image, experts, grid, only, plain) {
  const context = canvas.getContext("2d"), size = canvas.width, cell = size / grid;
  context.imageSmoothingEnabled = false;
  context.clearRect(0, 0, size, size);
  context.drawImage(image, 0, 0, size, size);
  if (plain) return;
  context.font = `600 ${Math.round(cell * .42)}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  experts.forEach((expert, i) => {
    const x = i % grid * cell, y = Math.floor(i / grid) * cell, hidden = expert === null || (only !== null && expert !== only);
    context.globalAlpha = hidden ? .72 : .46;
    context.fillStyle = hidden ? "#101214" : expertColour(expert);
    context.fillRect(x, y, cell, cell);
    context.globalAlpha = 1;
    if (hidden || cell < 16) return;
    context.lineWidth = 3;
    context.strokeStyle = "rgba(0, 0, 0, .55)";
    context.fillStyle = "#fff";
    context.strokeText(String(expert), x + cell / 2, y + cell / 2);
    context.fillText(String(expert), x + cell / 2, y + cell / 2);
  });
}

/* Share of each expert as a bar, with a line at 1 / E. */
function loadBars(shares) {
  const width = 560, height = 170, left = 44, bottom = 22, most = Math.max(...shares, 2 / shares.length) * 1.05, even = 1 / shares.length;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, class: "load-bars", role: "img", "aria-label": `Load of ${shares.length} experts: ${shares.map((s, e) => `${e}: ${percent(s)}`).join(", ")}` });
  const y = (share) => 8 + (height - bottom - 8) * (1 - share / most), step = (width - left - 74) / shares.length;
  shares.forEach((share, e) => {
    const bar = shape("rect", { x: left + e * step + step * .12, width: step * .76, y: y(share), height: Math.max(0, y(0) - y(share)), fill: `var(--s${e % SERIES_COLOURS})` });
    bar.append(shape("title", {}, `expert ${e}: ${percent(share)}`));
    svg.append(bar);
    if (step > 16) svg.append(shape("text", { x: left + (e + .5) * step, y: height - 6, "text-anchor": "middle" }, String(e)));
  });
  for (const tick of niceTicks(0, most, 3)) if (tick <= most) svg.append(shape("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, percent(tick)));
  svg.append(shape("line", { x1: left, x2: width - 70, y1: y(even), y2: y(even), stroke: "var(--ink)", "stroke-dasharray": "6 4", "stroke-width": 1.5 }),
    shape("text", { x: width - 66, y: y(even) + 4 }, `even: 1/${shares.length}`));
  return svg;
}

async function drawPictures() {
  const root = figure("pictures"), data = DATA.pictures;
  if (!root || !data.routers) return;
  const controls = root.querySelector(".controls"), chips = element("div", { class: "chips", role: "group", "aria-label": "Experts" });
  const gallery = element("div", { class: "gallery" }), bars = figure("picture-loads"), best = figure("picture-best");
  const barsHolder = element("div"), bestHolder = element("div", { class: "best" });
  root.append(chips, gallery);
  bars.append(barsHolder);
  best.append(bestHolder);
  const state = { router: 0, layer: null, k: null, expert: null, shown: "experts" };
  const sets = await Promise.all(data.sets.map((one) => Promise.all(one.images.map(loadImage))));
  const sheets = new Map();

  /* The expert of every patch of an image; null = none. */
  function experts(entry, image) {
    const words = (entry.words ??= new Uint16Array(decode64(entry.first).buffer)), cells = entry.grid ** 2, images = data.sets[entry.set].images.length;
    const layer = entry.layers.findIndex(([name]) => name === state.layer), k = entry.topK.indexOf(state.k);
    const start = ((k * entry.layers.length + layer) * images + image) * cells;
    return Array.from(words.subarray(start, start + cells), (e) => e === 65535 ? null : e);
  }
  function choose(change) {
    Object.assign(state, change);
    const entry = data.routers[state.router], names = entry.layers.map(([name]) => name);
    if (!names.includes(state.layer)) state.layer = names[0];
    if (!entry.topK.includes(state.k)) state.k = entry.k;
    if (state.expert !== null && state.expert >= entry.experts) state.expert = null;
    const focus = document.activeElement?.closest?.("#pictures .controls") ? [document.activeElement.dataset.value, document.activeElement.parentElement.getAttribute("aria-label")] : null;
    controls.replaceChildren(
      ...(data.routers.length > 1 ? [menu("router", data.routers.map((r, i) => [i, r.name]), state.router, (router) => choose({ router }))] : []),
      (entry.layers.length > 8 ? menu : choice)("layer", entry.layers, state.layer, (layer) => choose({ layer })),
      choice("k", entry.topK.map((k) => [k, String(k)]), state.k, (k) => choose({ k })),
      choice("shown", [["experts", "experts"], ["image", "image"]], state.shown, (shown) => choose({ shown })));
    if (focus) [...controls.querySelectorAll("button")].find((b) => b.dataset.value === focus[0] && b.parentElement.getAttribute("aria-label") === focus[1])?.focus();
    paint(entry);
  }
  function paint(entry) {
    const loads = entry.loads[String(state.k)]?.[state.layer];
    const focused = document.activeElement?.parentElement === chips ? document.activeElement.dataset.expert : null;
    chips.replaceChildren(...Array.from({ length: entry.experts }, (_, e) => element("button", { type: "button", "data-expert": e, "aria-pressed": String(state.expert === e), title: `Show the patches that expert ${e} takes first`,
      onclick: () => choose({ expert: state.expert === e ? null : e }) }, element("i", { class: "sw", style: `background: var(--s${e % SERIES_COLOURS})` }), `${e}`, loads ? element("span", { class: "share" }, percent(loads[e])) : null)));
    if (focused !== null) chips.querySelector(`[data-expert="${focused}"]`)?.focus();
    const { names } = data.sets[entry.set];
    gallery.replaceChildren(...sets[entry.set].map((image, i) => {
      const canvas = element("canvas", { width: 288, height: 288, role: "img", "aria-label": `${names[i]}, patches coloured by expert` });
      paintPatches(canvas, image, experts(entry, i), entry.grid, state.expert, state.shown === "image");
      const said = entry.found[String(state.k)][i];
      return element("div", {}, canvas, element("span", { class: "said" }, said === names[i] ? `✓ ${names[i]}` : `✗ ${names[i]}, taken for ${said}`));
    }));
    barsHolder.replaceChildren(loads ? loadBars(loads) : element("p", { class: "note" }, "This k was not evaluated on the whole part."));
    paintBest(entry);
  }
  async function paintBest(entry) {
    const sheet = entry.best[state.layer], wanted = `${state.router} ${state.layer}`;
    if (!sheets.has(wanted)) sheets.set(wanted, await loadImage(sheet.png));
    if (wanted !== `${state.router} ${state.layer}`) return;
    const image = sheets.get(wanted);
    bestHolder.replaceChildren(...sheet.counts.map((count, e) => {
      const row = element("div", { class: "strip" }, element("span", { class: "n" }, element("i", { class: "sw", style: `background: var(--s${e % SERIES_COLOURS})` }), `${e}`));
      for (let c = 0; c < count; c++) {
        const canvas = element("canvas", { width: 96, height: 96, role: "img", "aria-label": `patch ${c + 1} of expert ${e}` }), context = canvas.getContext("2d");
        context.imageSmoothingEnabled = false;
        context.drawImage(image, c * sheet.side, e * sheet.side, sheet.side, sheet.side, 0, 0, 96, 96);
        context.lineWidth = 2;
        context.strokeStyle = "#fff";
        context.strokeRect(32, 32, 32, 32);
        row.append(canvas);
      }
      if (!count) row.append(element("span", { class: "said" }, "takes no patch of the sample"));
      return row;
    }));
  }
  addEventListener("themechange", () => paint(data.routers[state.router]));
  choose({});
  root.dataset.ready = "true";
}

function drawRobust(part) {
  const shown = [["value", "as measured"], ["drop", "change from clean"]];
  drawChoices(part.id, [["corruption", part.choices, ""], ["shown", shown, "value"]], (corruption, value) => ({
    series: stylish(part.of[value][corruption]), zero: value === "drop", xLabel: "severity", xNames: ["clean", "1", "2", "3", "4", "5"], yLabel: value === "drop" ? "change in accuracy (%)" : "accuracy (%)",
    label: `${part.name}: accuracy against severity`, format: (p) => withSpread(p, 2, value === "drop"), xName: (x) => x ? `severity ${x}` : "clean" }));
}

drawPictures();
DATA.robust.forEach(drawRobust);
