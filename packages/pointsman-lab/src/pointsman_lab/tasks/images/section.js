"use strict";
function drawRobust(part) {
  const shown = [["value", "as measured"], ["drop", "change from clean"]];
  drawChoices(part.id, [["corruption", part.choices, ""], ["shown", shown, "value"]], (corruption, value) => ({
    series: stylish(part.of[value][corruption]), zero: value === "drop", xLabel: "severity", xNames: ["clean", "1", "2", "3", "4", "5"], yLabel: value === "drop" ? "change in accuracy (%)" : "accuracy (%)",
    label: `${part.name}: accuracy against severity`, format: (p) => withSpread(p, 2, value === "drop"), xName: (x) => x ? `severity ${x}` : "clean" }));
}

DATA.robust.forEach(drawRobust);
