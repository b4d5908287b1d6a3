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
  const short = (value) => new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
  document.getElementById("title").textContent = data.title;
  document.getElementById("subtitle").textContent = data.subtitle;
  document.getElementById("command").textContent = data.command;
  document.title = data.title + " · kvarts plan";

  const options = document.getElementById("options");
  for (const option of data.options) {
    make("h2", options, option.name + ": " + option.what);
    for (const note of [...option.notes, ...option.would_change]) make("p", options, note);
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
      values: (_, at) => at.map((value) => (value === null ? "" : short(value))),
    });
    const plot = new uPlot({
      width: width(), height: 280, axes: [axis(chart.x, 48), axis(chart.y, 74)],
      padding: [null, 20, null, null],
      scales: { x: { time: false, distr: chart.log ? 3 : 1 }, y: { distr: chart.log_y ? 3 : 1 } },
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

  // Round values between two others: 1, 2 and 5 times powers of ten where there is a factor of 8 between them.
  const ticksOf = (low, high, isLog) => {
    const ticks = [];
    if (isLog) {
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
        for (const digit of high / low > 200 ? [1] : [1, 2, 5]) ticks.push(digit * 10 ** power);
    } else {
      const rough = (high - low) / 5 || 1, unit = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 2.5, 5, 10].map((digit) => digit * unit).find((size) => size >= rough);
      for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
    }
    return ticks.filter((tick) => tick >= low && tick <= high);
  };

  const scatter = (parent, chart) => {
    const holder = make("div", parent, undefined, "scatter");
    const show = (chart.note && make("p", parent, chart.note, "note"), place(parent));
    const svgOf = (tag, group, attributes, text) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      if (text !== undefined) element.textContent = text;
      group.append(element);
      return element;
    };
    const scaleOf = (values, from, to) => {
      let low = Math.min(...values), high = Math.max(...values);
      const isLog = low > 0 && high / low > 8;
      const [a, b] = isLog ? [Math.log10(low), Math.log10(high)] : [low, high];
      const pad = (b - a || Math.abs(a) || 1) * 0.05;
      const at = (value) => from + (((isLog ? Math.log10(value) : value) - a + pad) / (b - a + 2 * pad)) * (to - from);
      [low, high] = isLog ? [10 ** (a - pad), 10 ** (b + pad)] : [a - pad, b + pad];
      return { at, ticks: ticksOf(low, high, isLog) };
    };
    const draw = () => {
      holder.replaceChildren();
      const width = Math.max(280, holder.clientWidth), height = 280;
      const svg = svgOf("svg", holder, { width, height, role: "group", "aria-label": chart.name });
      const x = scaleOf(chart.points.map((point) => point.x), 58, width - 10);
      const y = scaleOf(chart.points.map((point) => point.y), height - 44, 10);
      for (const tick of x.ticks) {
        svgOf("line", svg, { x1: x.at(tick), x2: x.at(tick), y1: 10, y2: height - 44, class: "grid" });
        svgOf("text", svg, { x: x.at(tick), y: height - 28, "text-anchor": "middle" }, short(tick));
      }
      for (const tick of y.ticks) {
        svgOf("line", svg, { x1: 58, x2: width - 10, y1: y.at(tick), y2: y.at(tick), class: "grid" });
        svgOf("text", svg, { x: 52, y: y.at(tick) + 4, "text-anchor": "end" }, short(tick));
      }
      svgOf("text", svg, { x: (58 + width) / 2, y: height - 8, "text-anchor": "middle" }, chart.x);
      svgOf("text", svg, { x: 14, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${height / 2})` }, chart.y);
      // The front is drawn last, over all else.
      for (const point of [...chart.points].sort((a, b) => a.is_on_front - b.is_on_front)) {
        const dot = svgOf("circle", svg, { cx: x.at(point.x), cy: y.at(point.y), r: 5, tabindex: 0, role: "button",
          class: point.is_on_front ? "front" : "" });
        svgOf("title", dot, {}, point.text);
        dot.addEventListener("click", () => show(point));
        dot.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && show(point));
      }
    };
    draw();
    charts.push({ plot: { redraw: draw }, resize: draw });
  };

  const parent = document.getElementById("charts");
  for (const chart of data.charts) {
    const box = make("div", parent);
    make("h2", box, chart.name);
    ({ bars, scatter, lines })[chart.kind](box, chart);
  }
  charts.forEach(({ resize }) => resize());
  addEventListener("resize", () => charts.forEach(({ resize }) => resize()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(({ plot }) => plot.redraw(false, true)));
  document.documentElement.dataset.ready = data.charts.length;
})();
