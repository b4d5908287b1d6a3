"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = [];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  const make = (tag, { text, parent, ...rest } = {}) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    Object.assign(element, rest);
    if (parent) parent.append(element);
    return element;
  };
  const section = (id) => document.getElementById(id);
  const count = (value) => value.toLocaleString("en-US");
  const share = (part, whole) => (whole ? (100 * part / whole).toFixed(1) + " %" : "-");
  const brief = (value) =>
    value === null || value === undefined ? "-" : value >= 10000 ? count(Math.round(value)) : value.toFixed(2);
  const note = (parent, text) => make("p", { parent, text, className: "note" });

  // Columns come as base64 of little-endian numbers.
  const column = ({ type, base64 }) => {
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return type === "f8" ? new Float64Array(bytes.buffer) : new Int32Array(bytes.buffer);
  };

  const axes = (x, y) => [x, y].map((label, index) => ({
    label, stroke: () => colour("ink"), grid: { stroke: () => colour("line"), width: 1 },
    ticks: { stroke: () => colour("line"), width: 1 }, labelSize: 18, size: index ? 74 : 40, font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    ...(index ? { values: (_, values) => values.map((v) => (v === null ? "" : count(v))) } : {}),
  }));

  const draw = (parent, title, height, series, values, options) => {
    make("h2", { parent, text: title });
    const holder = make("div", { parent, className: "chart" });
    const width = () => Math.max(280, holder.clientWidth);
    const chart = new uPlot({ width: width(), height, series, ...options }, values, holder);
    charts.push({ chart, resize: () => chart.setSize({ width: width(), height }) });
    return chart;
  };
  const line = (label, name, more = {}) => ({
    label, stroke: () => colour(name), width: 1.2, points: { show: false }, value: (_, v) => (v === null ? "-" : count(v)),
    ...more,
  });

  section("title").textContent = data.title;
  section("subtitle").textContent = data.subtitle;
  section("source").textContent = data.source;
  document.title = data.title + " · kvarts report";

  // Facts
  const facts = make("table", { parent: section("facts") });
  for (const [name, value] of data.facts) {
    const row = make("tr", { parent: facts });
    make("th", { parent: row, text: name });
    make("td", { parent: row, text: value });
  }

  // Memory
  const cursor = { sync: { key: "time" }, drag: { x: true, y: false } };
  for (const replica of data.replicas) {
    const time = column(replica.t_s), used = column(replica.used), cached = column(replica.cached);
    const running = column(replica.running), waiting = column(replica.waiting);
    const preempting = column(replica.preempting);
    const resident = new Int32Array(used.length);
    for (let i = 0; i < used.length; i++) resident[i] = used[i] + cached[i];
    const name = data.replicas.length > 1 ? `, replica ${replica.number}` : "";
    const mark = (chart) => {
      const { ctx, bbox } = chart;
      ctx.save();
      ctx.strokeStyle = colour("red");
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      let last = -1;
      for (const row of preempting) {
        const x = Math.round(chart.valToPos(time[row], "x", true));
        if (x === last || x < bbox.left || x > bbox.left + bbox.width) continue;
        last = x;
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + 10 * devicePixelRatio);
      }
      ctx.stroke();
      ctx.restore();
    };
    draw(section("memory"), `KV blocks in use${name}`, 280, [
      { label: "s", value: (_, v) => (v === null ? "-" : v.toFixed(3)) },
      line("used and cached", "grey", { fill: () => colour("sky") + "30" }),
      line("used", "blue", { fill: () => colour("blue") + "40" }),
    ], [time, resident, used], {
      cursor, axes: axes("seconds", "blocks"), hooks: { draw: [mark] },
      scales: { x: { time: false }, y: { range: [0, replica.total_blocks * 1.04] } },
    });
    note(section("memory"), `${count(replica.total_blocks)} blocks of ${replica.block_size_tokens} tokens; ` +
      (preempting.length ? `marks at the top: ${count(preempting.length)} steps that preempted.` : "no step preempted."));
    draw(section("memory"), `Running and waiting${name}`, 190, [
      { label: "s", value: (_, v) => (v === null ? "-" : v.toFixed(3)) },
      line("running", "green"), line("waiting", "orange", { dash: [6, 3] }),
    ], [time, running, waiting], { cursor, axes: axes("seconds", "requests"), scales: { x: { time: false } } });
  }

  // Latency
  for (const { name, ms, share: below } of data.distributions) {
    const parent = make("div", { parent: section("distributions") });
    if (!ms.length) { note(parent, `${name}: no values`); continue; }
    draw(parent, `${name}: share of values up to`, 230, [
      { label: "ms", value: (_, v) => (v === null ? "-" : brief(v)) },
      line("share", "blue", { fill: () => colour("blue") + "30", value: (_, v) => (v === null ? "-" : (100 * v).toFixed(1) + " %") }),
    ], [ms, below], {
      cursor: { drag: { x: true, y: false } },
      axes: [{ ...axes("ms", "")[0], values: (_, values) => values.map((v) => (v === null ? "" : count(v))) },
        { ...axes("", "")[1], size: 50, values: (_, values) => values.map((v) => Math.round(v * 100) + " %") }],
      scales: { x: { time: false, distr: 3 }, y: { range: [0, 1.02] } },
    });
  }

  // Bars
  const bar = (parent, parts, whole) => {
    const outer = make("div", { parent, className: "bar" });
    for (const [label, value, name] of parts) {
      const part = make("div", { parent: outer, title: `${label}: ${count(value)}` });
      part.style.width = whole ? 100 * value / whole + "%" : "0";
      part.style.background = `var(--${name})`;
    }
  };
  const keyed = (parent, parts, whole) => {
    const table = make("table", { parent });
    for (const [label, value, name, more] of parts) {
      const row = make("tr", { parent: table });
      const first = make("td", { parent: row });
      make("span", { parent: first, className: "key" }).style.background = `var(--${name})`;
      first.append(label);
      make("td", { parent: row, className: "number", text: count(value) });
      make("td", { parent: row, className: "number", text: share(value, whole) });
      make("td", { parent: row, text: more || "" });
    }
  };
  if (data.hits) {
    bar(section("hits"), data.hits.parts, data.hits.prompt_tokens);
    keyed(section("hits"), data.hits.parts, data.hits.prompt_tokens);
  } else note(section("hits"), data.no_journal);
  if (data.working_set) {
    const { pages, pool } = data.working_set;
    const largest = Math.max(pages, pool);
    bar(section("working-set"), [["working set", pages, "violet"]], largest);
    bar(section("working-set"), [["pool", pool, "blue"]], largest);
    keyed(section("working-set"), [["pages that would hold everything once", pages, "violet"], ["pages of the pool", pool, "blue"]], pool);
  } else note(section("working-set"), "Unknown: the trace was read as a stream, or the run has no trace.");

  // Waits
  if (data.waits) {
    for (const { name, waited, lines } of data.waits) {
      const entry = make("details", { parent: section("waits") });
      make("summary", { parent: entry, text: `${name}: waited ${waited}` });
      make("pre", { parent: entry, text: lines.join("\n") });
    }
    if (!data.waits.length) note(section("waits"), "No request was admitted.");
  } else note(section("waits"), data.no_journal);

  // Columns get their width when all of them are there.
  charts.forEach(({ resize }) => resize());
  addEventListener("resize", () => charts.forEach(({ resize }) => resize()));
  dark.addEventListener("change", () => charts.forEach(({ chart }) => chart.redraw(false, true)));
  document.documentElement.dataset.ready = charts.length;
})();
