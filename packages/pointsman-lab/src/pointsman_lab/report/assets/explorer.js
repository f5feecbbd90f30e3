"use strict";
/* The routing explorer: real text coloured by expert. */
const TEXTURES = 4;
const explorerState = { router: 0, layer: null, k: null, expert: null, token: null };

/* A router's packed sample as functions of (k, layer). */
async function unpack(entry) {
  const [bytes, usage] = await Promise.all([inflate(entry.routing), inflate(entry.usage)]);
  const E = entry.experts, width = Math.ceil(E / 8), size = E > 255 ? 2 : 1, none = 256 ** size - 1, block = E + size + width;
  const names = entry.layers.map(([name]) => name), ks = entry.topK.length;
  function view(k, layer) {
    const place = names.indexOf(layer) * ks + entry.topK.indexOf(k);
    const start = (t) => (t * names.length * ks + place) * block, prob = (t, e) => (bytes[start(t) + e] / 127) ** 2;
    const firstAt = (t) => bytes[start(t) + E] + (size === 1 ? 0 : 256 * bytes[start(t) + E + 1]);
    return {
      prob,
      probs: (t) => Array.from({ length: E }, (_, e) => prob(t, e)),
      first: (t) => (firstAt(t) === none ? null : firstAt(t)),
      chosen: (t, e) => Boolean(bytes[start(t) + E + size + (e >> 3)] >> (e & 7) & 1),
    };
  }
  return { view, usage: JSON.parse(new TextDecoder().decode(usage)) };
}

function shownToken(token, word) {
  if (token === "\n") return "↵\n";
  if (token === "\t") return "⇥";
  return word ? `${token} ` : token;
}
function swatch(expert) { return element("i", { class: `sw e${expert % SERIES_COLOURS} t${Math.floor(expert / SERIES_COLOURS) % TEXTURES}` }); }
function percent(p) { return p >= .0995 ? `${Math.round(p * 100)} %` : `${(p * 100).toFixed(1)} %`; }

function distribution(view, t, E, tokenText) {
  const probs = view.probs(t), most = Math.max(...probs, 1e-9);
  const rows = [...probs.keys()].sort((a, b) => probs[b] - probs[a]).slice(0, 24);
  const list = element("ol", { class: "bars" });
  for (const e of rows) list.append(element("li", { class: view.chosen(t, e) ? "chosen" : "" }, swatch(e), element("span", { class: "n" }, `${e}`),
    element("span", { class: "bar" }, element("b", { style: `width:${(probs[e] / most * 100).toFixed(1)}%` })), element("span", { class: "p" }, percent(probs[e])), element("span", { class: "c" }, view.chosen(t, e) ? "✓" : "")));
  return element("div", {}, element("p", { class: "which" }, "token ", element("code", {}, JSON.stringify(tokenText)), ` at ${t}`), list);
}

async function drawExplorer() {
  const root = figure("explorer"), { routers, texts } = DATA.inside.explorer;
  if (!root || !routers.length) return;
  if (typeof DecompressionStream === "undefined") { root.append(element("p", { class: "note" }, "This browser is too old for the explorer (it lacks DecompressionStream).")); return; }
  const state = explorerState, cache = new Map();
  const controls = root.querySelector(".controls"), chips = element("div", { class: "chips", role: "group", "aria-label": "Experts" });
  const pane = element("div", { class: "text", tabindex: "0", role: "application", "aria-label": "Text coloured by expert. Arrow keys move from token to token; Escape lets it go." });
  const side = element("div", { class: "side" });
  root.append(chips, element("div", { class: "reader" }, pane, side));
  let spans = [], now = null, current = null;

  async function choose(change) {
    Object.assign(state, change);
    const entry = routers[state.router], names = entry.layers.map(([name]) => name);
    if (!names.includes(state.layer)) state.layer = names[0];
    if (!entry.topK.includes(state.k)) state.k = entry.map.top_k;
    if (state.expert !== null && state.expert >= entry.experts) state.expert = null;
    const tokens = texts[entry.text];
    if (!cache.has(state.router)) cache.set(state.router, unpack(entry));
    const loaded = await cache.get(state.router);
    if (entry !== routers[state.router]) return;  // another one was chosen meanwhile
    now = { entry, tokens, loaded, view: loaded.view(state.k, state.layer) };
    paintControls();
    paintText();
    paintChips();
    paintSide();
    dispatchEvent(new Event("expertchange"));
  }
  function paintControls() {
    const { entry } = now;
    const nameOf = (one) => `${one.dataset.value ?? ""} ${one.closest("[aria-label]").getAttribute("aria-label")}`;
    const focus = document.activeElement?.closest?.("#explorer .controls") ? nameOf(document.activeElement) : null;
    controls.replaceChildren(
      ...(routers.length > 1 ? [menu("router", routers.map((r, i) => [i, r.name]), state.router, (router) => choose({ router }))] : []),
      (entry.layers.length > 8 ? menu : choice)("layer", entry.layers, state.layer, (layer) => choose({ layer })),
      choice("k", entry.topK.map((k) => [k, String(k)]), state.k, (k) => choose({ k })));
    if (focus) [...controls.querySelectorAll("button, select")].find((one) => nameOf(one) === focus)?.focus();
  }
  function paintText() {
    const { entry, tokens, view } = now;
    if (pane.dataset.text !== String(entry.text)) {
      pane.dataset.text = String(entry.text);
      spans = tokens.map((token, t) => { const span = element("span", { id: `tok-${t}` }, shownToken(token, entry.word)); span.dataset.t = t; return span; });
      pane.replaceChildren(...spans);
    }
    spans.forEach((span, t) => {
      const e = view.first(t), inside = state.expert === null || view.chosen(t, state.expert);
      span.className = `tok ${e === null ? "none" : `e${e % SERIES_COLOURS} t${Math.floor(e / SERIES_COLOURS) % TEXTURES}`}${inside ? "" : " dim"}${t === state.token ? " kept" : ""}`;
    });
  }
  function paintChips() {
    const { entry, tokens, view } = now;
    const focused = document.activeElement?.parentElement === chips ? document.activeElement.dataset.expert : null;
    const taken = new Array(entry.experts).fill(0);
    let all = 0;
    for (let t = 0; t < tokens.length; t++) for (let e = 0; e < entry.experts; e++) if (view.chosen(t, e)) { taken[e]++; all++; }
    chips.replaceChildren(...taken.map((n, e) => element("button", { type: "button", "data-expert": e, "aria-pressed": String(state.expert === e), title: `Show the tokens that expert ${e} takes`,
      onclick: () => choose({ expert: state.expert === e ? null : e, token: null }) }, swatch(e), `${e}`, element("span", { class: "share" }, percent(all ? n / all : 0)))));
    if (focused !== null) chips.querySelector(`[data-expert="${focused}"]`)?.focus();
  }
  function paintSide(token = state.token) {
    const { entry, loaded, tokens, view } = now;
    if (token !== null && token < tokens.length) { side.replaceChildren(distribution(view, token, entry.experts, tokens[token])); return; }
    if (state.expert === null) { side.replaceChildren(element("p", { class: "note" }, "Point at a token, or move to it with the arrow keys, for its full distribution. Click an expert above for the tokens it takes most.")); return; }
    const best = loaded.usage[String(state.k)][state.layer][state.expert];
    const body = element("tbody", {}, ...best.map(([text, count, share]) => element("tr", {}, element("td", {}, element("code", {}, JSON.stringify(text))), element("td", {}, count.toLocaleString("en")), element("td", {}, percent(share)))));
    side.replaceChildren(element("p", { class: "which" }, swatch(state.expert), ` Tokens that expert ${state.expert} takes most`),
      best.length ? element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, "token"), element("th", {}, "taken"), element("th", {}, "of its occurrences"))), body) : element("p", { class: "note" }, "none in this sample"),
      element("p", { class: "note" }, `In the ${entry.sampled.toLocaleString("en")} tokens sampled from seed ${entry.seed}.`));
  }
  function say(t) {
    const probs = now.view.probs(t), order = [...probs.keys()].sort((a, b) => probs[b] - probs[a]).slice(0, 3);
    tip.say(`${JSON.stringify(now.tokens[t])}: ${order.map((e) => `expert ${e} ${percent(probs[e])}`).join(", ")}`);
  }
  pane.addEventListener("pointerover", (event) => { const t = event.target.dataset?.t; if (t !== undefined) paintSide(Number(t)); });
  pane.addEventListener("pointerleave", () => now && paintSide());
  pane.addEventListener("click", (event) => { const t = event.target.dataset?.t; if (t !== undefined) { state.token = state.token === Number(t) ? null : Number(t); paintText(); paintSide(); } });
  pane.addEventListener("keydown", (event) => {
    if (!now) return;
    const last = now.tokens.length - 1, at = current ?? state.token ?? -1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last, ArrowDown: line(at, 1), ArrowUp: line(at, -1) }[event.key];
    if (event.key === "Escape") { state.token = current = null; paintText(); paintSide(); return; }
    if (to === undefined) return;
    event.preventDefault();
    current = state.token = Math.max(0, Math.min(last, to));
    paintText();
    paintSide();
    say(current);
    spans[current].scrollIntoView({ block: "nearest" });
  });
  function line(at, way) {
    if (at < 0) return 0;
    const top = spans[at].offsetTop, left = spans[at].offsetLeft;
    let best = at, seen = null;
    for (let t = at + way; t >= 0 && t < spans.length; t += way) {
      if (spans[t].offsetTop === top) continue;
      seen ??= spans[t].offsetTop;
      if (spans[t].offsetTop !== seen) break;
      if (best === at || Math.abs(spans[t].offsetLeft - left) < Math.abs(spans[best].offsetLeft - left)) best = t;
    }
    return best;
  }
  await choose({});
  root.dataset.ready = "true";
}

/* Token-by-expert maps of one stretch, for every router (rows) and layer (columns). */
async function drawTokenMaps() {
  const root = figure("token-maps"), { routers, texts } = DATA.inside.explorer;
  if (!root || !routers.length || typeof DecompressionStream === "undefined") return;
  const loaded = await Promise.all(routers.map((entry) => unpack(entry)));
  const holder = element("div"), ks = [...new Set(routers.flatMap((r) => r.topK))].sort((a, b) => a - b), span = 48;
  function draw(k) {
    holder.replaceChildren(...routers.flatMap((entry, i) => {
      if (!entry.topK.includes(k)) return [];
      const tokens = texts[entry.text], columns = Math.min(span, tokens.length);
      const maps = entry.layers.map(([layer, label]) => {
        const view = loaded[i].view(k, layer);
        return element("div", {}, element("h4", {}, label), heatMap({ rows: entry.experts, columns, height: Math.max(72, Math.min(160, entry.experts * 7)), label: `Probability of every expert for ${columns} tokens, ${entry.name}, ${label}`,
          value: (e, t) => Math.sqrt(view.prob(t, e)), tip: (e, t) => `token ${JSON.stringify(tokens[t])}, expert ${e}: ${percent(view.prob(t, e))}${view.chosen(t, e) ? ", chosen" : ""}` }));
      });
      return [element("h3", { class: "row-name" }, key(styleOf.get(entry.name)), element("code", {}, entry.name)), element("div", { class: "heats" }, ...maps)];
    }));
  }
  const middle = routers[0].map.top_k;
  root.querySelector(".controls").append(choice("k", ks.map((k) => [k, String(k)]), middle, draw));
  root.append(holder, rampKey(["0", "probability 1 (colour by its square root)"]));
  draw(middle);
}

drawLoads();
drawMap();
drawTokenMaps();
drawExplorer();
