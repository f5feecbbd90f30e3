"use strict";
function drawAttack(attack) {
  const shown = [["value", "as measured"], ["rise", "change from clean"]], last = attack.ks[attack.ks.length - 1][0];
  drawChoices(attack.id, [["k", attack.ks, last], ["targets", attack.counts, "all"], ["shown", shown, "value"]], (k, count, value) => ({
    series: stylish(attack.of[value][count][k]), zero: value === "rise", xLabel: "share attacked (%)", yLabel: (value === "rise" ? "change in " : "") + attack.label,
    label: `${attack.name}: ${attack.label} against the share attacked`, format: (p) => withSpread(p, attack.decimals, value === "rise"), xName: (x) => x ? `${x} % attacked` : "clean" }));
}

DATA.attacks.forEach(drawAttack);
