"use strict";
/* The sections of the page that are drawn from the data. */
const DATA = JSON.parse(document.getElementById("report-data").textContent);
const styleOf = new Map(DATA.routers.map((router, i) => [router, i]));

function fixed(value, decimals = DATA.metric.decimals, sign = false) {
  if (value === null || value === undefined) return "-";
  const shown = Number(value.toFixed(decimals)) || 0;  // never -0
  return (sign && shown >= 0 ? "+" : "") + shown.toFixed(decimals).replace("-", "−");
}
function withSpread(p, decimals, sign) {
  return fixed(p.y, decimals, sign) + (p.std === null || p.std === undefined ? "" : ` ± ${fixed(p.std, decimals)}`);
}
function figure(id) { return document.getElementById(id); }

function drawQuality() {
  const root = figure("quality");
  if (!root) return;
  const ys = DATA.quality.flatMap((s) => s.points.map((p) => p.y)).filter((y) => y > 0);
  lineChart(root, { series: DATA.quality.map((s) => ({ ...s, style: styleOf.get(s.name) })), xLabel: "experts per token, k", xLog2: true, calm: .02,
    yLabel: DATA.metric.label, yLog: ys.length > 0 && Math.max(...ys) / Math.min(...ys) > 3, label: `${DATA.metric.label} against k`,
    format: (p) => withSpread(p), xName: (x) => `k = ${x}` });
}

function drawDifferences() {
  const root = figure("differences");
  if (!root) return;
  lineChart(root, { series: DATA.differences.map((s) => ({ ...s, style: styleOf.get(s.name) })), xLabel: "experts per token, k", xLog2: true, zero: true,
    yLabel: `difference in ${DATA.metric.label}`, label: `Difference to ${DATA.baseline} against k`, format: (p) => withSpread(p, undefined, true), xName: (x) => `k = ${x}` });
}

function drawLoss() {
  const root = figure("loss");
  if (!root) return;
  const series = DATA.loss.series.map((s) => ({ name: s.name, style: styleOf.get(s.name), points: s.points.map(([x, y, low, high]) => ({ x, y, low, high })) }));
  const ys = series.flatMap((s) => s.points.map((p) => p.y));
  lineChart(root, { series, xLabel: "step", yLabel: DATA.loss.label, yLog: ys.length > 0 && Math.min(...ys) > 0 && Math.max(...ys) / Math.min(...ys) > 3,
    label: "Training loss against step", format: (p) => fixed(p.y, 3), xName: (x) => `around step ${Math.round(x).toLocaleString("en")}` });
}

/* A chart whose series depend on one choice: {choices: [[value, label]], of: {value: series}}. */
function drawChoice(id, data, name, spec) {
  const root = figure(id);
  if (!root || !data.choices.length) return;
  const seriesOf = (value) => data.of[value].map((s) => ({ name: s.name, style: styleOf.get(s.name), points: s.points.map(([x, y, low, high]) => ({ x, y, low, high })) }));
  const holder = element("div");
  const bar = root.querySelector(".controls");
  function draw(value) {
    holder.replaceChildren();
    const controls = element("span");
    logs.replaceChildren(controls);
    const series = seriesOf(value), ys = series.flatMap((s) => s.points.map((p) => p.y));
    lineChart(holder, { ...spec, controls, series, yLog: Math.min(...ys) > 0 && Math.max(...ys) / Math.min(...ys) > 10, format: (p) => fixed(p.y, 3), xName: (x) => `step ${Math.round(x).toLocaleString("en")}` });
  }
  const logs = element("span");
  const first = data.first ?? data.choices[0][0];
  bar.append((data.choices.length > 8 ? menu : choice)(name, data.choices, first, draw), logs);
  root.append(holder);
  draw(first);
}

function drawByLayer(id, data, yLabel, label) {
  const root = figure(id);
  if (!root) return;
  lineChart(root, { series: data.map((s) => ({ name: s.name, style: styleOf.get(s.name), points: s.points.map(([x, y, low, high]) => ({ x, y, low, high })) })), xLabel: "layer", xNames: DATA.inside.layers,
    yLabel, label, calm: .2, format: (p) => fixed(p.y, 3), xName: (x) => DATA.inside.layers[x] });
}

function theme() {
  const root = document.documentElement, button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  function apply() {
    const now = chosen ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now;
    button.setAttribute("aria-pressed", String(now === "dark"));
    button.textContent = now === "dark" ? "☾ dark" : "☀ light";
    dispatchEvent(new Event("themechange"));
  }
  button.addEventListener("click", () => { chosen = root.dataset.theme === "dark" ? "light" : "dark"; apply(); });
  dark.addEventListener("change", apply);
  apply();
}

theme();
for (const place of document.querySelectorAll("[data-key]")) place.replaceWith(key(Number(place.dataset.key)));
drawAuditLoads();
drawQuality();
drawDifferences();
drawLoss();
drawChoice("validation", DATA.validation, "k", { xLabel: "step", yLabel: DATA.metric.label, label: `Validation ${DATA.metric.label} against step` });
const times = { xLabel: "step" };
drawChoice("entropy", DATA.inside.entropy, "layer", { ...times, yLabel: "entropy (nats)", label: "Entropy of the router against step" });
drawChoice("collapse", DATA.inside.collapse, "layer", { ...times, yLabel: "Tr(S_W S_B⁺)", label: "Representation collapse against step" });
drawByLayer("entropy-by-layer", DATA.inside.byLayer.entropy, "entropy (nats)", "Entropy by layer");
drawByLayer("fluctuation", DATA.inside.byLayer.fluctuation, "share of tokens", "Routing fluctuation by layer");
