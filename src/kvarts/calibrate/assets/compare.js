"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const make = (tag, parent, text) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  const brief = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 1 });
  document.getElementById("title").textContent = data.title;
  document.title = data.title + " · kvarts compare";
  const { comparison } = data;
  document.getElementById("subtitle").textContent =
    comparison.num_requests + " requests, replayed beside measured" +
    (comparison.kv_error_points === null ? "" : "; KV use off by " + comparison.kv_error_points.toFixed(2) + " points") +
    (comparison.peak_waiting === null ? "" : "; peak waiting " + comparison.peak_waiting.map(brief).join(" measured, ") + " replayed");

  const table = make("table", document.getElementById("errors"));
  for (const metric of ["ttft", "tpot", "e2e"]) {
    for (const [name, row] of Object.entries(comparison[metric])) {
      const line = make("tr", table);
      make("th", line, metric.toUpperCase() + " " + name);
      make("td", line, brief(row.measured_ms) + " ms");
      make("td", line, brief(row.replayed_ms) + " ms");
      make("td", line, (row.error >= 0 ? "+" : "") + (100 * row.error).toFixed(2) + " %");
    }
  }

  // Two series on their own x values become one chart: every x of either, and nothing where a series has none.
  const merged = (a, b) => uPlot.join([[a.x, a.y], [b.x, b.y]]);
  const draw = (parent, title, values, x, y) => {
    make("h2", parent, title);
    const holder = make("div", parent);
    holder.className = "chart";
    const width = () => Math.max(280, holder.clientWidth);
    const axis = (label) => ({
      label, stroke: () => colour("ink"), grid: { stroke: () => colour("line"), width: 1 },
      ticks: { stroke: () => colour("line"), width: 1 }, font: "12px system-ui, sans-serif", size: 64,
      labelFont: "12px system-ui, sans-serif",
    });
    const series = (label, name) => ({
      label, stroke: () => colour(name), width: 1.4, points: { show: false }, spanGaps: true,
    });
    const chart = new uPlot({
      width: width(), height: 280, scales: { x: { time: false } }, axes: [axis(x), axis(y)],
      series: [{ label: x }, series("measured", "green"), series("replayed", "orange")],
    }, values, holder);
    addEventListener("resize", () => chart.setSize({ width: width(), height: 280 }));
  };
  const shares = (values) => ({ x: values, y: values.map((_, index) => 100 * (index + 1) / values.length) });
  for (const [metric, [theirs, ours]] of Object.entries(data.distributions)) {
    const box = make("div", document.getElementById("charts"));
    draw(box, metric.toUpperCase(), merged(shares(theirs), shares(ours)), "ms", "% of requests");
  }
  if (data.curves) {
    const parent = document.getElementById("curves");
    const [theirs, ours] = data.curves;
    const both = (name) => merged({ x: theirs.t, y: theirs[name] }, { x: ours.t, y: ours[name] });
    if (theirs.kv && ours.kv) draw(parent, "KV use", both("kv"), "s", "% of the pool");
    draw(parent, "Waiting requests", both("waiting"), "s", "requests");
  }
  document.documentElement.dataset.ready = "yes";
})();
