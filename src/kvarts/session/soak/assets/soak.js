"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const section = (id) => document.getElementById(id);
  const make = (tag, parent, text) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  section("title").textContent = data.title;
  section("subtitle").textContent = data.subtitle;
  document.title = data.title + " · kvarts soak";

  const table = make("table", section("rules"));
  for (const { rule, status, what } of data.rules) {
    const row = make("tr", table);
    make("th", row, rule);
    make("td", row, status.replace("_", " ")).style.color =
      { ok: colour("green"), violated: colour("red") }[status] || colour("faint");
    make("td", row, what);
  }

  const draw = (parent, title, x, y, series, values, fromZero = false) => {
    make("h2", parent, title);
    const holder = make("div", parent);
    holder.className = "chart";
    const width = () => Math.max(280, holder.clientWidth);
    const axis = (label, size) => ({
      label, stroke: () => colour("ink"), grid: { stroke: () => colour("line"), width: 1 },
      ticks: { stroke: () => colour("line"), width: 1 }, font: "12px system-ui, sans-serif", size,
      labelFont: "12px system-ui, sans-serif", values: (_, marks) => marks.map((mark) => mark.toLocaleString("en-US")),
    });
    const chart = new uPlot({
      width: width(), height: 260, axes: [axis(x, 50), axis(y, 100)],
      scales: { x: { time: false }, ...(fromZero ? { y: { range: (_, low, high) => [0, 1.05 * high || 1] } } : {}) },
      series: [{ label: x }, ...series],
    }, values, holder);
    addEventListener("resize", () => chart.setSize({ width: width(), height: 260 }));
  };
  const dots = (label, name) => ({
    label, stroke: () => colour(name), paths: () => null, points: { show: true, size: 4, fill: () => colour(name) },
  });
  const line = (label, name, dash) => ({
    label, stroke: () => colour(name), width: 1.4, dash, points: { show: false }, spanGaps: true,
  });
  const flat = (values, value) => values.map(() => value);

  const { bytes, turns, slope } = data;
  draw(section("bytes"), "KV bytes of a session", "seconds", "bytes",
    [dots("live", "blue"), dots("expected", "orange"), line("bound", "red", [6, 3])],
    [bytes.t, bytes.live, bytes.expected, flat(bytes.t, bytes.bound)], true);
  const first = turns.turn[turns.turn.length - 1] - (slope ? slope.span_x : 0);
  const fitted = (turn) => slope === null || turn < first ? null : 1e3 * (slope.first + slope.per_x * (turn - first));
  draw(section("latency"), "Time between tokens, mean of each turn", "turn", "ms",
    [dots("time", "blue"), line("slope after warm-up", "orange")],
    [turns.turn, turns.itl_ms, turns.turn.map(fitted)]);
  draw(section("latency"), "Time to first token", "turn", "ms", [dots("time", "green")], [turns.turn, turns.ttft_ms]);
  if (turns.rss_mb.some((value) => value !== null))
    draw(section("rss"), "Memory of the server", "turn", "MB", [line("resident", "violet")], [turns.turn, turns.rss_mb]);
  document.documentElement.dataset.ready = "yes";
})();
