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
  const count = (value) => value.toLocaleString("en-US");
  const share = (part, whole) => (whole ? (100 * part / whole).toFixed(1) + " %" : "-");
  const percent = (value) => (100 * value).toFixed(1) + " %";
  const note = (parent, text) => make("p", { parent, text, className: "note" });
  const tidy = (value) => count(parseFloat(value.toPrecision(3)));
  // Short enough for the room beside an axis.
  const short = (value) => {
    for (const [size, name] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]])
      if (Math.abs(value) >= size) return tidy(value / (size === 1e4 ? 1e3 : size)) + name;
    return tidy(value);
  };
  const UNITS = [[864e5, "d"], [36e5, "h"], [6e4, "min"], [1e3, "s"], [1, "ms"], [1e-3, "µs"]];
  const duration = (ms) => {
    const [size, name] = UNITS.find(([size]) => ms >= size) || UNITS[UNITS.length - 1];
    return tidy(ms / size) + " " + name;
  };
  const TIME_UNITS = [[2 * 86400, 86400, "days"], [3 * 3600, 3600, "hours"], [600, 60, "minutes"], [0, 1, "seconds"]];

  // Columns come as base64 of little-endian numbers.
  const column = (base64) => {
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return new Float64Array(bytes.buffer);
  };
  const largest = (values) => {
    let most = 0;
    for (const value of values) if (value > most) most = value;
    return most;
  };

  const FONT = "12px system-ui, sans-serif";
  const axis = (label, more = {}) => ({
    label, stroke: () => colour("ink"), grid: { stroke: () => colour("line"), width: 1 },
    ticks: { stroke: () => colour("line"), width: 1 }, labelSize: 18, size: 40, font: FONT, labelFont: FONT,
    values: (_, values) => values.map((v) => (v === null ? "" : short(v))), ...more,
  });
  const left = (label, more = {}) => axis(label, { size: 56, ...more });
  const shares = { values: (_, values) => values.map((v) => (v === null ? "" : Math.round(v * 100) + " %")) };

  // Ticks of a logarithmic axis of times, as people say them; none nearer to the last than a label is wide.
  const TENS = [], FINE = [];
  for (const [size, most] of [[1e-6, 1e3], [1e-3, 1e3], [1, 1e3], [1e3, 60], [6e4, 60], [36e5, 24], [864e5, 1e6]])
    for (let step = 1; step < most; step *= 10) {
      TENS.push(step * size);
      for (const part of [1, 2, 5]) if (part * step < most) FINE.push(part * step * size);
    }
  const ticks = (chart, _, low, high) => {
    const far = (all) => {
      const out = [];
      let lastX = -Infinity;
      for (const at of all) {
        const x = chart.valToPos(at, "x");
        if (at < low * 0.9999 || at > high * 1.0001 || x - lastX < 58) continue;
        out.push(at);
        lastX = x;
      }
      return out;
    };
    const step = 10 ** Math.floor(Math.log10((high - low) / 2));
    const even = Array.from({ length: Math.min(40, Math.floor(high / step) - Math.ceil(low / step) + 1) },
      (_, index) => (Math.ceil(low / step) + index) * step);
    return [far(TENS), far(FINE), far(even)].find((found) => found.length >= 3) || far(FINE.length ? even : FINE);
  };

  const draw = (parent, title, height, series, values, options) => {
    make("h3", { parent, text: title });
    const holder = make("div", { parent, className: "chart" });
    const width = () => Math.max(240, holder.clientWidth);
    const chart = new uPlot({ width: width(), height, series, ...options }, values, holder);
    charts.push({ chart, resize: () => chart.setSize({ width: width(), height }) });
    return chart;
  };
  // The legend says the largest value until the mouse points at one.
  const line = (label, name, values, { say = count, idle, ...more } = {}) => {
    const most = idle || (values.length ? "at most " + say(largest(values)) : "");
    return { label, stroke: () => colour(name), width: 1.2, points: { show: false },
      value: (_, v) => (v === null || v === undefined ? most : say(v)), ...more };
  };
  const paths = uPlot.paths.stepped({ align: 1 });  // a row holds up to the next one
  const legend = { markers: { width: 2 } };

  document.getElementById("title").textContent = data.title;
  document.getElementById("subtitle").textContent = data.subtitle;
  document.getElementById("source").textContent = data.source;
  document.title = data.title + " · kvarts report";

  const table = (parent, rows) => {
    const holder = make("table", { parent, className: "facts" });
    for (const [name, value] of rows) {
      const row = make("tr", { parent: holder });
      make("th", { parent: row, text: name });
      make("td", { parent: row, text: value });
    }
  };
  const bar = (parent, parts, whole) => {
    const outer = make("div", { parent, className: "bar" });
    for (const [label, value, name] of parts) {
      const part = make("div", { parent: outer, title: `${label}: ${count(value)}` });
      part.style.width = whole ? 100 * value / whole + "%" : "0";
      part.style.background = `var(--${name})`;
    }
  };
  const keyed = (parent, parts, whole) => {
    const holder = make("table", { parent });
    for (const [label, value, name, more] of parts) {
      const row = make("tr", { parent: holder });
      const first = make("td", { parent: row });
      make("span", { parent: first, className: "key" }).style.background = `var(--${name})`;
      first.append(label);
      make("td", { parent: row, className: "number", text: count(value) });
      make("td", { parent: row, className: "number", text: share(value, whole) });
      make("td", { parent: row, text: more || "" });
    }
  };

  const show = (part, number) => {
    const root = make("section", { parent: document.getElementById("parts"), className: "part" });
    const section = (id, title) => {
      const element = make("section", { parent: root, className: id });
      if (title) make("h2", { parent: element, text: title });
      return element;
    };
    if (part.name) make("h2", { parent: root, text: part.name, className: "model" });
    const facts = section("facts");
    table(facts, [...part.facts, ...(number ? [] : data.about)]);
    const settings = make("details", { parent: facts });
    make("summary", { parent: settings, text: "Configuration" });
    table(settings, part.config);

    // Time: one scale for all charts of the run.
    const replicas = part.replicas.map((replica) => ({ ...replica, seconds: column(replica.t_s) }));
    const ends = replicas.map(({ seconds }) => (seconds.length ? seconds[seconds.length - 1] : 0));
    const last = Math.max(0, ...ends, ...(part.evictions || []).slice(-1).map(([ms]) => ms / 1e3),
      ...part.hit_rates.slice(-1).map(([ms]) => ms / 1e3));
    const [, unit, unitName] = TIME_UNITS.find(([least]) => last >= least);
    const scaleX = { time: false, range: ({ data: [times] }, low, high) => {
      const isWhole = low === null || (low === times[0] && high === times[times.length - 1]);
      return isWhole ? [0, last / unit || 1] : low === high ? [low, low + 1] : [low, high];
    } };
    const cursor = { sync: { key: `time ${number}` }, drag: { x: true, y: false } };
    const timed = { label: "time",
      value: (_, v) => (v === null || v === undefined ? "up to " + duration(last * 1e3) : duration(v * unit * 1e3)) };
    const inUnits = (seconds) => seconds.map((value) => value / unit);
    const whole = (values) => [0, Math.max(1, largest(values)) * 1.06];

    // Memory
    const memory = section("memory", "Memory and queues");
    const loads = replicas.map(({ running, waiting }) => ({ running: column(running), waiting: column(waiting) }));
    const mostRequests = Math.max(1, ...loads.map(({ running, waiting }) => Math.max(largest(running), largest(waiting))));
    const mostBlocks = Math.max(...replicas.map((replica) => replica.total_blocks));
    const ofTime = { cursor, legend };
    replicas.forEach((replica, index) => {
      const time = inUnits(replica.seconds), used = column(replica.used), cached = column(replica.cached);
      const { running, waiting } = loads[index];
      const preempting = column(replica.preempting);
      const resident = used.map((value, i) => value + cached[i]);
      const name = replicas.length > 1 ? `, replica ${replica.number}` : "";
      const mark = (chart) => {
        const { ctx, bbox } = chart;
        ctx.save();
        ctx.strokeStyle = colour("red");
        ctx.lineWidth = devicePixelRatio;
        ctx.beginPath();
        let lastX = -1;
        for (const row of preempting) {
          const x = Math.round(chart.valToPos(time[row], "x", true));
          if (x === lastX || x < bbox.left || x > bbox.left + bbox.width) continue;
          lastX = x;
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + 10 * devicePixelRatio);
        }
        ctx.stroke();
        ctx.restore();
      };
      draw(memory, `KV blocks in use${name}`, 280, [
        timed,
        line("used and cached", "grey", resident, { paths, fill: () => colour("sky") + "30" }),
        line("used", "blue", used, { paths, fill: () => colour("blue") + "40" }),
      ], [time, resident, used], {
        ...ofTime, axes: [axis(unitName), left("blocks")], hooks: { draw: [mark] },
        scales: { x: scaleX, y: { range: [0, mostBlocks * 1.04] } },
      });
      note(memory, `${count(replica.total_blocks)} blocks of ${replica.block_size_tokens} tokens; ` +
        (preempting.length ? `marks at the top: ${count(preempting.length)} ${preempting.length === 1 ? "step" : "steps"} that preempted.` : "no step preempted."));
      for (const tier of replica.tiers) {
        const tierUsed = column(tier.used), tierCached = column(tier.cached);
        const held = tierUsed.map((value, i) => value + tierCached[i]);
        draw(memory, `Blocks in ${tier.name}${name}`, 190, [
          timed,
          line("used and cached", "grey", held, { paths, fill: () => colour("teal") + "30" }),
          line("used by transfers", "teal", tierUsed, { paths, fill: () => colour("teal") + "60" }),
        ], [time, held, tierUsed], {
          ...ofTime, axes: [axis(unitName), left("blocks")], scales: { x: scaleX, y: { range: whole(held) } },
        });
      }
      draw(memory, `Running and waiting${name}`, 190, [
        timed, line("running", "green", running, { paths }), line("waiting", "orange", waiting, { paths, dash: [6, 3] }),
      ], [time, running, waiting], {
        ...ofTime, axes: [axis(unitName), left("requests")], scales: { x: scaleX, y: { range: [0, mostRequests * 1.06] } },
      });
    });

    // Over time
    const cache = section("cache", "Prefix cache over time");
    const both = make("div", { parent: cache, className: "columns" });
    const overTime = (title, pairs, label, options, none) => {
      const parent = make("div", { parent: both });
      if (!pairs || !pairs.length) {
        make("h3", { parent, text: title });
        note(parent, none);
        return;
      }
      const times = pairs.map(([ms]) => ms / 1e3 / unit), values = pairs.map(([, value]) => value);
      draw(parent, title, 210, [timed, line(label, options.colour, values, {
        say: options.say, fill: () => colour(options.colour) + "30", paths: uPlot.paths.stepped({ align: -1 }) })],
      [times, values], { ...ofTime, axes: [axis(unitName), left(options.axis, options.ticks)],
        scales: { x: scaleX, y: { range: options.range || whole(values) } } });
    };
    overTime("Prefix hits of requests admitted", part.hit_rates, "hit", {
      colour: "green", say: percent, axis: "of prompt tokens", range: [0, 1.02], ticks: shares,
    }, "Not recorded: the run has no list of requests.");
    overTime("KV blocks evicted", part.evictions, "evicted", { colour: "red", say: count, axis: "blocks", ticks: {} },
      part.evictions ? "None was evicted." : part.no_journal);

    // Latency
    const latency = make("div", { parent: section("latency", "Latency"), className: "columns" });
    for (const { name, ms, share: below, marks } of part.curves) {
      const parent = make("div", { parent: latency });
      if (!ms.length) {
        make("h3", { parent, text: name });
        note(parent, "No values.");
        continue;
      }
      const percentiles = (chart) => {
        const { ctx, bbox } = chart, ratio = devicePixelRatio;
        ctx.save();
        ctx.textAlign = "left";
        ctx.textBaseline = "alphabetic";
        ctx.font = `${11 * ratio}px system-ui, sans-serif`;
        for (const [text, at, part] of marks) {
          const x = chart.valToPos(at, "x", true), y = chart.valToPos(part, "y", true);
          if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
          ctx.fillStyle = colour("red");
          ctx.beginPath();
          ctx.arc(x, y, 3.5 * ratio, 0, 7);
          ctx.fill();
          const size = ctx.measureText(text).width;
          const right = x + size + 10 * ratio < bbox.left + bbox.width;
          const start = right ? x + 8 * ratio : x - size - 8 * ratio;
          const base = y + (right ? 12 : part > 0.95 ? 2 : 10) * ratio;
          ctx.fillStyle = colour("ground");
          ctx.fillRect(start - 2 * ratio, base - 10 * ratio, size + 4 * ratio, 13 * ratio);
          ctx.fillStyle = colour("ink");
          ctx.fillText(text, start, base);
        }
        ctx.restore();
      };
      draw(parent, `${name}: share of values up to`, 230, [
        { label: "value", value: (_, v) => (v === null || v === undefined ? "at most " + duration(ms[ms.length - 1]) : duration(v)) },
        line("share", "blue", below, { say: percent, idle: "of all values", fill: () => colour("blue") + "30" }),
      ], [ms, below], {
        cursor: { drag: { x: true, y: false } }, legend, hooks: { draw: [percentiles] },
        axes: [axis("time, logarithmic", { splits: ticks, filter: (_, splits) => splits,
          values: (_, values) => values.map((v) => (v === null ? "" : duration(v))) }),
        left("share of values", shares)],
        scales: { x: { time: false, distr: 3,
          range: (_, low, high) => (low === null ? [1, 10] : low === high ? [low / 2, high * 2] : [low, high]) },
        y: { range: [0, 1.04] } },
      });
    }

    const hits = section("hits", "Where prompt tokens came from");
    if (part.hits) {
      bar(hits, part.hits.parts, part.hits.prompt_tokens);
      keyed(hits, part.hits.parts, part.hits.prompt_tokens);
    } else note(hits, part.no_journal);
    for (const text of part.notes) note(hits, "Note: " + text + ".");

    const working = section("working-set", "Working set against pool");
    if (part.working_set) {
      const { pages, pool } = part.working_set;
      const most = Math.max(pages, pool);
      bar(working, [["working set", pages, "violet"]], most);
      bar(working, [["pool", pool, "blue"]], most);
      keyed(working, [["pages that would hold everything once", pages, "violet"], ["pages of the pool", pool, "blue"]], pool);
    } else note(working, "Unknown: the trace was read as a stream, or the run has no trace.");

    const waits = section("waits", "The longest waits, each of another cause or another time");
    if (part.waits) {
      for (const { name, waited, lines } of part.waits) {
        const entry = make("details", { parent: waits });
        make("summary", { parent: entry, text: `${name}: ${waited}` });
        make("pre", { parent: entry, text: lines.join("\n") });
      }
      if (!part.waits.length) note(waits, "No request was admitted.");
    } else note(waits, part.no_journal);
  };
  data.parts.forEach(show);

  // Columns get their width when all of them are there.
  charts.forEach(({ resize }) => resize());
  addEventListener("resize", () => charts.forEach(({ resize }) => resize()));
  dark.addEventListener("change", () => charts.forEach(({ chart }) => chart.redraw(false, true)));
  document.documentElement.dataset.ready = charts.length;
})();
