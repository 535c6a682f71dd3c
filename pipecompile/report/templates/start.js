"use strict";
// Unpacks the data, and begins with the whole step.

async function start() {
  data = await unpacked(document.getElementById("chart-data").textContent);
  for (const canvas of document.querySelectorAll("canvas.timeline")) {
    view.charts.push(new Timeline(canvas, Number(canvas.dataset.timeline)));
  }
  view.charts.push(new MemoryChart(document.querySelector("canvas.memory")));
  const acts = { in: () => view.zoom(0.5), out: () => view.zoom(2), all: () => view.all() };
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", acts[button.dataset.zoom]);
  }
  addEventListener("resize", () => {
    hideHint();
    view.draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.draw());
  view.all();
}

const started = start();
