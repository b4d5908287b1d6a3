"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colours = ["blue", "orange", "green", "violet"];
  const charts = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const make = (tag, parent, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  };
  const brief = (value) =>
    value === null || value === undefined ? "-" : value.toLocaleString("en-US", { maximumFractionDigits: value < 10 ? 3 : 1 });
  document.getElementById("title").textContent = data.title;
  document.getElementById("subtitle").textContent = data.subtitle;
  document.getElementById("command").textContent = data.command;
  document.title = data.title + " · kvarts plan";

  const options = document.getElementById("options");
  for (const option of data.options) {
    make("h2", options, option.name + ": " + option.what);
    for (const note of option.notes) make("p", options, note);
    make("pre", options, option.command);
  }

  // What was chosen in a chart is shown below it.
  const place = (parent) => {
    const box = make("div", parent, undefined, "chosen");
    const text = make("p", box, "Nothing chosen.", "note");
    const command = make("pre", box, "");
    command.hidden = true;
    return (point) => {
      text.textContent = point.text;
      command.textContent = point.command;
      command.hidden = !point.command;
    };
  };

  const bars = (parent, chart) => {
    const grid = make("div", parent, undefined, "bars");
    const rows = chart.bars.map((bar) => [make("button", grid, bar.label), make("div", grid, undefined, "track"), bar]);
    for (const [button, track, bar] of rows) {
      const filled = make("div", track);
      filled.style.width = (chart.most ? Math.max(0, 100 * bar.value / chart.most) : 0) + "%";
      track.after(make("span", grid, brief(bar.value)));
      button.type = "button";
    }
    make("p", parent, chart.y + (chart.limit ? "; the whole width is the " + chart.limit + ", " + brief(chart.most) : ""), "note");
    const show = place(parent);
    for (const [button, , bar] of rows) button.addEventListener("click", () => show(bar));
  };

  const lines = (parent, chart) => {
    const holder = make("div", parent, undefined, "chart");
    const width = () => Math.max(280, holder.clientWidth);
    const values = uPlot.join(chart.series.map(({ x, y }) => [x, y]));
    const byX = chart.series.map(({ x, points }) => new Map(points.map((point, index) => [x[index], point])));
    const axis = (label, size) => ({
      label, stroke: () => colour("ink"), grid: { stroke: () => colour("line"), width: 1 }, size,
      ticks: { stroke: () => colour("line"), width: 1 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
      values: (_, at) => at.map((value) => (value === null ? "" : brief(value))),
    });
    const plot = new uPlot({
      width: width(), height: 280, axes: [axis(chart.x, 48), axis(chart.y, 74)],
      scales: { x: { time: false, distr: chart.log ? 3 : 1 } },
      cursor: { drag: { x: true, y: false }, focus: { prox: 30 } },
      series: [{ label: chart.x, value: (_, v) => brief(v) }, ...chart.series.map(({ label, points }, index) => ({
        label, stroke: () => colour(colours[index % colours.length]), width: 1.4, spanGaps: true,
        points: { show: points.length > 0, size: 7 }, value: (_, v) => brief(v),
      }))],
    }, values, holder);
    charts.push({ plot, resize: () => plot.setSize({ width: width(), height: 280 }) });
    if (chart.note) make("p", parent, chart.note, "note");
    const show = place(parent);
    const all = [...new Set(byX.flatMap((points) => [...points.keys()]))];
    if (!all.length) return;
    plot.over.addEventListener("click", () => {
      const left = plot.cursor.left;
      const nearest = all.reduce((best, x) =>
        Math.abs(plot.valToPos(x, "x") - left) < Math.abs(plot.valToPos(best, "x") - left) ? x : best);
      show(byX.find((points) => points.has(nearest)).get(nearest));
    });
  };

  const parent = document.getElementById("charts");
  for (const chart of data.charts) {
    const box = make("div", parent);
    make("h2", box, chart.name);
    (chart.kind === "bars" ? bars : lines)(box, chart);
  }
  charts.forEach(({ resize }) => resize());
  addEventListener("resize", () => charts.forEach(({ resize }) => resize()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(({ plot }) => plot.redraw(false, true)));
  document.documentElement.dataset.ready = data.charts.length;
})();
