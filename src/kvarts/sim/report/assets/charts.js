"use strict";
// What all pages share: elements, numbers as text, charts of lines, tables, and the point that a click chooses.
const kvarts = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const drawn = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const COLOURS = ["blue", "orange", "green", "violet", "red", "teal", "sky", "grey"];

  const make = (tag, { text, parent, ...rest } = {}) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    Object.assign(element, rest);
    if (parent) parent.append(element);
    return element;
  };
  const note = (parent, text) => make("p", { parent, text, className: "note" });
  const head = ({ title, subtitle = "", command = "" }) => {
    document.title = title + " · kvarts";
    document.getElementById("title").textContent = title;
    document.getElementById("subtitle").textContent = subtitle;
    if (command) document.getElementById("command").textContent = command;
  };

  // Numbers as text ----------------------------------------------------------------------------------------

  const isNone = (value) => value === null || value === undefined;
  const count = (value) => value.toLocaleString("en-US");
  const tidy = (value) => count(parseFloat(value.toPrecision(3)));
  // Short enough for the room beside an axis.
  const short = (value) => {
    for (const [size, name] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]])
      if (Math.abs(value) >= size) return tidy(value / (size === 1e4 ? 1e3 : size)) + name;
    return tidy(value);
  };
  const MS_UNITS = [[864e5, "d"], [36e5, "h"], [6e4, "min"], [1e3, "s"], [1, "ms"], [1e-3, "µs"]];
  const duration = (ms) => {
    if (ms === 0) return "0 ms";
    const [size, name] = MS_UNITS.find(([size]) => ms >= size * 0.9995) || MS_UNITS[MS_UNITS.length - 1];
    if (ms < 6e4 * 0.9995 || ms >= 36e5) return tidy(ms / size) + " " + name;
    const seconds = Math.round(ms / 1e3);
    return Math.floor(seconds / 60) + " min" + (seconds % 60 ? " " + (seconds % 60) + " s" : "");
  };
  // `unit`: what values are in. A percent and a GiB keep one decimal everywhere.
  const FORMS = {
    ms: duration,
    "%": (value) => value.toFixed(1) + " %",
    GiB: (value) => value.toFixed(1) + " GiB",
    MiB: (value) => value.toFixed(2) + " MiB",
  };
  const say = (unit) => FORMS[unit] || ((value) => (Math.abs(value) < 100 ? tidy(value) : count(Math.round(value))));
  // Labels of ticks: no two of one axis have the same text.
  const tickText = (unit) => (_, ticks) => {
    const form = { ms: duration, "%": (value) => short(value) + " %" }[unit] || ((value) => short(value) + (unit ? " " + unit : ""));
    const texts = ticks.map((value) => (isNone(value) ? "" : form(value)));
    const known = texts.filter((text) => text);
    if (new Set(known).size === known.length) return texts;
    const step = Math.min(...ticks.slice(1).map((value, index) => Math.abs(value - ticks[index])).filter((gap) => gap > 0));
    const digits = Math.min(8, Math.max(0, -Math.floor(Math.log10(step))));
    return ticks.map((value) => (isNone(value) ? "" : value.toLocaleString("en-US",
      { minimumFractionDigits: digits, maximumFractionDigits: digits }) + (unit ? " " + unit : "")));
  };

  const largest = (values) => {
    let most = 0;
    for (const value of values) if (value > most) most = value;
    return most;
  };
  const ends = (values) => {
    let low = Infinity, high = -Infinity;
    for (const value of values) if (!isNone(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
    return low <= high ? [low, high] : null;
  };

  // Axes ---------------------------------------------------------------------------------------------------

  const FONT = "12px system-ui, sans-serif";
  const axis = (label, more = {}) => ({
    label, stroke: () => colour("ink"), grid: { stroke: () => colour("line"), width: 1 },
    ticks: { stroke: () => colour("line"), width: 1 }, labelSize: 18, size: 40, font: FONT, labelFont: FONT,
    values: tickText(""), ...more,
  });
  const left = (label, more = {}) => axis(label, { size: 66, ...more });

  // Ticks of a logarithmic axis: powers of ten, or 1, 2 and 5 times these, or even steps, whichever leaves three that
  // are not nearer to one another than a label is wide. Times have their own round values.
  const TEN_TIMES = [], FINE_TIMES = [];
  for (const [size, most] of [[1e-6, 1e3], [1e-3, 1e3], [1, 1e3], [1e3, 60], [6e4, 60], [36e5, 24], [864e5, 1e6]])
    for (let step = 1; step < most; step *= 10) {
      TEN_TIMES.push(step * size);
      for (const part of [1, 2, 5]) if (part * step < most) FINE_TIMES.push(part * step * size);
    }
  // Steps between the ticks of a linear axis of times, as people say them.
  const TIME_STEPS = [0.001, 0.01, 0.1, 1, 10, 100].flatMap((ms) => [ms, 2 * ms, 5 * ms]).concat(
    [1e3, 2e3, 5e3, 1e4, 15e3, 3e4, 6e4, 12e4, 3e5, 6e5, 18e5, 36e5, 72e5, 216e5, 432e5, 864e5]);
  // All in the unit of the longest, so that 70 seconds are not 1.17 minutes.
  const timeText = (_, ticks) => {
    const most = largest(ticks);
    const [size, name] = [[1728e5, 864e5, "d"], [108e5, 36e5, "h"], [6e5, 6e4, "min"], [1e3, 1e3, "s"], [1, 1, "ms"]]
      .find(([least]) => most >= least)?.slice(1) || [1e-3, "µs"];
    return ticks.map((value) => (isNone(value) ? "" : tidy(value / size) + " " + name));
  };
  const linear = (unit) => (unit === "ms" ? { values: timeText, incrs: TIME_STEPS, space: 56 } : { values: tickText(unit) });
  // Texts of an x axis stand side by side.
  const below = (unit) => ({ space: 50 + 6 * (unit || "").length, ...linear(unit) });
  const powers = (digits) => Array.from({ length: 30 }, (_, index) => digits.map((digit) => digit * 10 ** (index - 9))).flat();
  const TENS = powers([1]), FINE = powers([1, 2, 5]);
  // `place`: of a value, in pixels; `room`: that a label takes.
  const logTicks = (unit, low, high, place, room) => {
    const apart = (all) => {
      const out = [];
      let last = -Infinity;
      for (const at of all) {
        if (at < low * 0.9999 || at > high * 1.0001 || Math.abs(place(at) - last) < room) continue;
        out.push(at);
        last = place(at);
      }
      return out;
    };
    const step = 10 ** Math.floor(Math.log10((high - low) / 2));
    const even = Array.from({ length: Math.min(40, Math.floor(high / step) - Math.ceil(low / step) + 1) },
      (_, index) => (Math.ceil(low / step) + index) * step);
    const [tens, fine] = unit === "ms" ? [TEN_TIMES, FINE_TIMES] : [TENS, FINE];
    return [apart(tens), apart(fine), apart(even)].find((found) => found.length >= 3) || apart(even);
  };
  const logarithmic = (scale, unit = "") => ({
    splits: (chart, _, low, high) => logTicks(unit, low, high, (at) => chart.valToPos(at, scale), scale === "x" ? 58 : 24),
    filter: (_, splits) => splits,
    values: tickText(unit),
  });
  // Room on both sides of what is shown; a logarithmic axis has no 0.
  const widened = (isLog) => (_, low, high) => {
    if (isNone(low)) return [1, 10];
    if (!isLog) return low === high ? [low - 1, high + 1] : [low - (high - low) * 0.03, high + (high - low) * 0.03];
    const factor = low === high ? 2 : (high / low) ** 0.04;
    return [low / factor, high * factor];
  };
  const fromZero = (_, low, high) => [0, isNone(high) || high <= 0 ? 1 : high * 1.06];

  // Charts -------------------------------------------------------------------------------------------------

  const draw = (parent, title, height, series, values, options) => {
    if (title) make("h3", { parent, text: title });
    const holder = make("div", { parent, className: "chart" });
    const width = () => Math.max(240, holder.clientWidth);
    const chart = new uPlot({ width: width(), height, series, legend: { markers: { width: 2 } }, ...options }, values, holder);
    drawn.push({ redraw: () => chart.redraw(false, true), resize: () => chart.setSize({ width: width(), height }) });
    return chart;
  };
  // The legend says between which values a line lies until the mouse points at one of them.
  const line = (label, name, values, { form = count, idle, ...more } = {}) => {
    const found = ends(values);
    const texts = found ? [...new Set(found.map(form))] : ["no values"];
    const rest = idle || texts.join(" to ");
    return { label, stroke: () => colour(name), width: 1.4, points: { show: false },
      value: (_, value) => (isNone(value) ? rest : form(value)), ...more };
  };
  const along = (label, form, idle) => ({ label, value: (_, value) => (isNone(value) ? idle : form(value)) });

  // Texts beside points, none over another text or point: each goes where it first fits, right or left of its point.
  // The last is placed first: high percentiles have least room.
  const label = (chart, labels) => {
    const { ctx, bbox } = chart, ratio = devicePixelRatio;
    const taken = labels.map(({ x, y }) => [x - 4 * ratio, y, 8 * ratio]);
    ctx.save();
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    for (const { text, x, y } of [...labels].reverse()) {
      const size = ctx.measureText(text).width + 4 * ratio, tall = 14 * ratio;
      const tries = [];
      for (let row = 0; row < 12; row++)
        for (const side of [x + 7 * ratio, x - size - 7 * ratio])
          for (const sign of row ? [1, -1] : [1]) tries.push([side, y + sign * row * 0.55 * tall]);
      const fits = ([at, middle]) => at >= bbox.left && at + size <= bbox.left + bbox.width &&
        middle - tall / 2 >= bbox.top && middle + tall / 2 <= bbox.top + bbox.height &&
        taken.every(([a, m, s]) => at + size < a || at > a + s || Math.abs(middle - m) >= tall);
      const [first, middle] = tries.find(fits) || tries[0];
      const at = Math.max(bbox.left, Math.min(first, bbox.left + bbox.width - size)); // over a point rather than cut
      taken.push([at, middle, size]);
      ctx.fillStyle = colour("ground");
      ctx.fillRect(at, middle - tall / 2, size, tall);
      ctx.fillStyle = colour("ink");
      ctx.fillText(text, at + 2 * ratio, middle);
    }
    ctx.restore();
  };
  const dot = ({ ctx }, x, y, name) => {
    ctx.save();
    ctx.fillStyle = colour(name);
    ctx.beginPath();
    ctx.arc(x, y, 3.5 * devicePixelRatio, 0, 7);
    ctx.fill();
    ctx.restore();
  };
  // A dashed line across a chart, at a value of its x axis.
  const upright = ({ ctx, bbox }, x, name) => {
    if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) return false;
    ctx.save();
    ctx.strokeStyle = colour(name);
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
    return true;
  };

  // Tables and what is chosen ------------------------------------------------------------------------------

  // `heads`: a text each, one that begins with ">" for numbers. A cell is a text, or an element.
  const table = (parent, heads, rows, { className = "" } = {}) => {
    const scroll = make("div", { parent, className: "scroll" });
    const holder = make("table", { parent: scroll, className: "data " + className });
    const isNumber = heads.map((text) => text.startsWith(">"));
    const top = make("tr", { parent: make("thead", { parent: holder }) });
    heads.forEach((text, index) => make("th", { parent: top, text: text.replace(/^>/, ""), scope: "col",
      className: isNumber[index] ? "number" : "" }));
    const body = make("tbody", { parent: holder });
    for (const row of rows) {
      const line = make("tr", { parent: body });
      row.forEach((cell, index) => {
        const place = make("td", { parent: line, className: isNumber[index] ? "number" : "" });
        place.append(cell === null || cell === undefined ? "-" : cell);
      });
    }
    return holder;
  };
  const pairs = (parent, rows) => {
    const holder = make("table", { parent, className: "facts" });
    for (const [name, value] of rows) {
      const row = make("tr", { parent: holder });
      make("th", { parent: row, text: name, scope: "row" });
      make("td", { parent: row, text: value });
    }
  };
  const LISTED = 8;
  // Where a chart says what the points are that a click chose, each with its command.
  const choice = (parent) => {
    const box = make("div", { parent, className: "chosen" });
    note(box, "Click a point for its command.");
    return (points) => {
      box.replaceChildren();
      for (const { text, command } of points.slice(0, LISTED)) {
        make("p", { parent: box, text });
        if (command) make("pre", { parent: box, text: command });
      }
      if (points.length > LISTED) note(box, `and ${points.length - LISTED} more at the same place`);
    };
  };
  // Call `show` with the point of `points`, {x, y} in values of the axes, that is nearest to a click, and others at its
  // place. Points that are `between` are those of a line: one that stands out nearby goes first.
  const pick = (chart, points, show) => {
    let down = null;
    chart.over.addEventListener("mousedown", (event) => { down = [event.clientX, event.clientY]; });
    chart.over.addEventListener("click", (event) => {
      if (down && Math.hypot(event.clientX - down[0], event.clientY - down[1]) > 4) return; // a drag zooms
      const box = chart.over.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const far = (point) => Math.hypot(chart.valToPos(point.x, "x") - x, chart.valToPos(point.y, "y") - y) + (point.between ? 8 : 0);
      const near = points.map((point) => [far(point), point]).filter(([at]) => Number.isFinite(at));
      if (!near.length) return;
      const [, first] = near.reduce((best, each) => (each[0] < best[0] ? each : best));
      show(points.filter((point) => point.x === first.x && point.y === first.y && !point.between === !first.between));
    });
  };

  // Columns of integers come as differences, deflated, in base64.
  const column = async (base64) => {
    const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const steps = new Float64Array(await new Response(stream).arrayBuffer());
    const out = new Float64Array(steps.length);
    let value = 0;
    for (let i = 0; i < steps.length; i++) out[i] = value += steps[i];
    return out;
  };

  // Charts get their width when all columns of the page are there.
  const finish = () => {
    drawn.forEach(({ resize }) => resize());
    addEventListener("resize", () => drawn.forEach(({ resize }) => resize()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(({ redraw }) => redraw()));
    document.documentElement.dataset.ready = drawn.length;
  };

  return { data, drawn, colour, COLOURS, make, note, head, isNone, count, tidy, short, duration, say, tickText, largest,
    ends, axis, left, logTicks, TIME_STEPS, timeText, linear, below, logarithmic, widened, fromZero, draw, line, along, label, dot, upright, table, pairs,
    choice, pick, column, finish };
})();
