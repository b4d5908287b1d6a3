"use strict";
(() => {
  const { data, drawn, colour, COLOURS, make, note, head, isNone, say, tickText, ends, axis, left, logTicks, TIME_STEPS, timeText, linear, below, logarithmic,
    widened, fromZero, draw, line, along, label, upright, table, choice, pick, finish } = kvarts;
  head(data);

  // What is recommended: a table, and for each row its reasons and its command.
  const options = document.getElementById("options");
  if (data.verdict) make("p", { parent: options, text: data.verdict, className: "verdict" });
  if (data.options.length) {
    table(options, data.option_heads, data.options.map(({ cells }) => cells));
    data.options.forEach(({ name, what, reasons, command }, index) => {
      const entry = make("details", { parent: options, open: index === 0 });
      make("summary", { parent: entry, text: `${name}: ${what}` });
      const list = make("ul", { parent: entry });
      for (const reason of reasons) make("li", { parent: list, text: reason });
      make("pre", { parent: entry, text: command, className: "command" });
    });
  }

  const bars = (parent, chart) => {
    const grid = make("div", { parent, className: "bars" });
    const form = say(chart.y_unit);
    const show = [];
    for (const bar of chart.bars) {
      const button = make("button", { parent: grid, text: bar.label, type: "button" });
      button.addEventListener("click", () => show[0]([bar]));
      const filled = make("div", { parent: make("div", { parent: grid, className: "track" }) });
      filled.style.width = (chart.most ? Math.max(0, 100 * bar.value / chart.most) : 0) + "%";
      make("span", { parent: grid, text: form(bar.value) });
    }
    note(parent, chart.y + (chart.limit ? `; the whole width is the ${chart.limit}, ${form(chart.most)}` : ""));
    show.push(choice(parent));
  };

  const lines = (parent, chart) => {
    const xForm = say(chart.x_unit), yForm = say(chart.y_unit);
    const values = uPlot.join(chart.series.map(({ x, y }) => [x, y]));
    const series = chart.series.map(({ label: text, y, style }, index) => {
      const name = style === "limit" ? "violet" : COLOURS[index % COLOURS.length];
      const styles = {
        line: {},
        points: { points: { show: true, size: 7 } },
        dots: { paths: () => null, points: { show: true, size: 9, fill: () => colour(name) } },
        limit: { dash: [5, 4], spanGaps: true },
      };
      return line(text, name, y, { form: yForm, spanGaps: true, ...styles[style] });
    });
    const span = ends(values[0]) || [0, 0];
    const marks = chart.marks || [];
    const plot = draw(parent, "", 280, [along(chart.x, xForm, span.map(xForm).join(" to ")), ...series], values, {
      axes: [axis(chart.x, chart.log ? logarithmic("x", chart.x_unit) : below(chart.x_unit)),
        left(chart.y, chart.log_y ? logarithmic("y", chart.y_unit) : linear(chart.y_unit))],
      padding: [12, 20, null, null],
      scales: {
        x: { time: false, distr: chart.log ? 3 : 1, range: widened(chart.log) },
        y: { distr: chart.log_y ? 3 : 1, range: chart.log_y ? widened(true) : chart.y_unit === "%" ? (_, low, high) =>
          [0, isNone(high) ? 100 : Math.min(103, Math.max(high * 1.08, 1))] : fromZero },
      },
      cursor: { drag: { x: true, y: false }, focus: { prox: 30 } },
      hooks: { draw: [(chart) => {
        const texts = marks.map(({ x, text }) => ({ text, x: chart.valToPos(x, "x", true), y: chart.bbox.top + chart.bbox.height * 0.9 }))
          .filter(({ x }) => upright(chart, x, "violet"));
        label(chart, texts);
      }] },
    });
    if (chart.note) note(parent, chart.note);
    // A line that has a command for each of its values has `at`, with places for both.
    const filled = (text, x, y) => text.replaceAll("{x}", String(x)).replaceAll("{X}", xForm(x)).replaceAll("{Y}", yForm(y));
    const points = chart.series.flatMap(({ x, y, points: of, at }) => x.map((value, index) => ({ x: value, y: y[index],
      ...(at ? { between: true, text: filled(at.text, value, y[index]), command: filled(at.command, value, y[index]) } : of[index]) })))
      .filter(({ text, y }) => text && !isNone(y));
    if (points.length) {
      const show = choice(parent);
      pick(plot, points, (near) => show([...new Map(near.map((point) => [point.text, point])).values()]));
    }
  };

  const scatter = (parent, chart) => {
    const holder = make("div", { parent, className: "scatter" });
    if (chart.note) note(parent, chart.note);
    const show = choice(parent);
    const svgOf = (tag, group, attributes, text) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      if (text !== undefined) element.textContent = text;
      group.append(element);
      return element;
    };
    const scaleOf = (values, unit, isLog, zero, from, to, room) => {
      const [low, high] = ends(values);
      const log = isLog && low > 0 && high / low > 8;
      const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [zero ? 0 : low, high];
      const pad = (b - a || Math.abs(a) || 1) * 0.05;
      const [start, end] = [zero ? 0 : a - pad, b + pad];
      const at = (value) => from + (((log ? Math.log10(value) : value) - start) / (end - start)) * (to - from);
      if (log) return { at, isLog: true, ticks: logTicks(unit, 10 ** start, 10 ** end, at, room) };
      const rough = (end - start) / 5, size = 10 ** Math.floor(Math.log10(rough));
      const steps = unit === "ms" ? TIME_STEPS : [1, 2, 2.5, 5, 10].map((digit) => digit * size);
      const step = steps.find((each) => each >= rough * 0.999) || rough;
      return { at, isLog: false, ticks: Array.from({ length: 12 }, (_, i) => (Math.ceil(start / step) + i) * step).filter((tick) => tick <= end) };
    };
    // Points at one place are one circle.
    const places = new Map();
    for (const point of chart.points) {
      const key = point.x + " " + point.y;
      if (!places.has(key)) places.set(key, []);
      places.get(key).push(point);
    }
    const isOnFront = (points) => points.some((point) => point.is_on_front);
    const paint = () => {
      holder.replaceChildren();
      const width = Math.max(280, holder.clientWidth), height = 300, bottom = height - 44, start = 72;
      const svg = svgOf("svg", holder, { width, height, role: "group", "aria-label": chart.name });
      const x = scaleOf(chart.points.map((point) => point.x), chart.x_unit, true, false, start, width - 14, 58);
      const ys = [...chart.points.flatMap((point) => [point.y, ...(point.error || [])]), ...(isNone(chart.limit) ? [] : [chart.limit.y])];
      const y = scaleOf(ys, chart.y_unit, chart.y_unit !== "%", chart.y_unit !== "ms", bottom, 10, 24);
      const texts = ({ isLog, ticks }, unit) => (unit === "ms" && !isLog ? timeText : tickText(unit))(null, ticks);
      const xTexts = texts(x, chart.x_unit), yTexts = texts(y, chart.y_unit);
      x.ticks.forEach((tick, index) => {
        svgOf("line", svg, { x1: x.at(tick), x2: x.at(tick), y1: 10, y2: bottom, class: "grid" });
        svgOf("text", svg, { x: x.at(tick), y: height - 28, "text-anchor": "middle" }, xTexts[index]);
      });
      y.ticks.forEach((tick, index) => {
        svgOf("line", svg, { x1: start, x2: width - 14, y1: y.at(tick), y2: y.at(tick), class: "grid" });
        svgOf("text", svg, { x: start - 6, y: y.at(tick) + 4, "text-anchor": "end" }, yTexts[index]);
      });
      svgOf("text", svg, { x: (start + width) / 2, y: height - 8, "text-anchor": "middle" }, chart.x);
      svgOf("text", svg, { x: 14, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${height / 2})` }, chart.y);
      if (!isNone(chart.limit)) {
        svgOf("line", svg, { x1: start, x2: width - 14, y1: y.at(chart.limit.y), y2: y.at(chart.limit.y), class: "limit" });
        // Its text stands where no point does: at either end, or in the middle.
        const level = y.at(chart.limit.y), wide = 7 * chart.limit.text.length;
        const isFree = ([at, , share]) => !chart.points.some((point) => Math.abs(x.at(point.x) - at + wide * (share - 0.5)) < wide / 2 + 8
          && y.at(point.y) > level - 24 && y.at(point.y) < level + 8);
        const spots = [[width - 16, "end", 1], [start + 4, "start", 0], [(start + width) / 2, "middle", 0.5]];
        const [at, anchor] = spots.find(isFree) || spots[0];
        svgOf("text", svg, { x: at, y: level - 5, "text-anchor": anchor }, chart.limit.text);
      }
      // Labels stand right or left of their points where they cover no other; those of the front come first.
      const taken = [];
      const label = (points) => {
        const { x: atX, y: atY, label: text } = points[0], wide = 6.2 * (text || "").length;
        if (!text) return;
        for (const [from, anchor, side] of [[8, "start", 0], [-8, "end", 1]]) {
          const left = x.at(atX) + from - side * wide, top = y.at(atY) + 2;
          const covers = (other) => left < other[0] + other[2] && other[0] < left + wide && Math.abs(top - other[1]) < 13;
          if (left < start || left + wide > width || top + 14 > bottom || taken.some(covers)) continue;
          taken.push([left, top, wide]);
          svgOf("text", svg, { x: x.at(atX) + from, y: y.at(atY) + 15, "text-anchor": anchor, class: "many" }, text);
          return;
        }
      };
      [...places.values()].sort((a, b) => isOnFront(b) - isOnFront(a)).forEach(label);
      for (const { x: atX, error } of chart.points.filter((point) => point.error)) {
        const [low, high] = error.map(y.at), middle = x.at(atX);
        for (const [x1, x2, y1, y2] of [[middle, middle, low, high], [middle - 5, middle + 5, low, low], [middle - 5, middle + 5, high, high]])
          svgOf("line", svg, { x1, x2, y1, y2, class: "error" });
      }
      // The front is drawn last, over all else.
      for (const points of [...places.values()].sort((a, b) => isOnFront(a) - isOnFront(b))) {
        const [{ x: atX, y: atY }] = points, shade = `var(--${shadeOf(points)})`;
        const circle = svgOf("circle", svg, { cx: x.at(atX), cy: y.at(atY), r: 6, tabindex: 0, role: "button",
          fill: isOnFront(points) ? shade : "transparent", stroke: shade, class: isOnFront(points) ? "front" : "" });
        svgOf("title", circle, {}, points.map(({ text }) => text).join("\n"));
        if (points.length > 1) svgOf("text", svg, { x: x.at(atX) + 8, y: y.at(atY) - 6, class: "many" }, "× " + points.length);
        circle.addEventListener("click", () => show(points));
        circle.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && show(points));
      }
    };
    paint();
    scatters.push(paint);
    drawn.push({ redraw: paint, resize: paint });
  };

  // Points of a sweep have the colour of one of their settings, which the reader chooses.
  const scatters = [], sweep = data.sweep;
  const valuesOf = new Map((sweep ? sweep.keys : []).map((key) =>
    [key, [...new Set(sweep.points.flatMap((point) => point.settings[key] || []))]]));
  let chosen = sweep ? sweep.colour_by : null;
  const shadeOf = (points) => {
    const found = [...new Set(points.flatMap(({ settings }) => (settings && settings[chosen]) || []))];
    return found.length === 1 ? COLOURS[valuesOf.get(chosen).indexOf(found[0]) % COLOURS.length] : "grey";
  };
  const paintKeys = (holder) => {
    while (holder.children.length > 1) holder.lastChild.remove();
    const values = chosen === null ? [] : valuesOf.get(chosen);
    const mixed = sweep.points.some((point) => (point.settings[chosen] || []).length > 1);
    for (const [index, value] of [...values, ...(mixed ? ["several of these"] : [])].entries()) {
      const each = make("span", { parent: holder });
      make("span", { parent: each, className: "key" }).style.background =
        `var(--${index < values.length ? COLOURS[index % COLOURS.length] : "grey"})`;
      each.append(value);
    }
  };
  if (sweep && sweep.keys.length) {
    const holder = make("div", { parent: options, className: "keys" });
    const asked = make("label", { parent: holder, text: "Colour by " });
    const select = make("select", { parent: asked });
    for (const key of sweep.keys) make("option", { parent: select, text: key, value: key, selected: key === chosen });
    select.addEventListener("change", () => {
      chosen = select.value;
      paintKeys(holder);
      scatters.forEach((paint) => paint());
    });
    paintKeys(holder);
  }

  const parent = document.getElementById("charts");
  for (const chart of data.charts) {
    const box = make("div", { parent });
    make("h2", { parent: box, text: chart.name });
    if (chart.kind === "note") note(box, chart.note);
    else ({ bars, scatter, lines })[chart.kind](box, chart);
  }

  if (sweep) {
    const section = document.getElementById("points");
    make("h2", { parent: section, text: "Points" });
    const show = choice(section);
    const rows = table(section, sweep.heads, sweep.points.map(({ cells }) => cells)).tBodies[0].rows;
    [...rows].forEach((row, index) => {
      row.className = "picks";
      row.tabIndex = 0;
      const pickRow = () => {
        for (const other of rows) other.classList.toggle("picked", other === row);
        show([sweep.points[index]]);
      };
      row.addEventListener("click", pickRow);
      row.addEventListener("keydown", (event) => event.key === "Enter" && pickRow());
    });
    if (sweep.left_out) note(section, `${sweep.left_out.toLocaleString("en-US")} more points are in points.json.`);
  }
  finish();
})();
