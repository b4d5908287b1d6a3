"use strict";
const HUES = ["#0072b2", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#6a51a3", "#b2182b"];
const COLUMNS = 96, ROWS = 12, WINDOW_S = 600, LINES = ["--main", "--second"];
const LEFT = 44, BELOW = 18, ABOVE = 6;  /* room of the axes, in pixels of the page */
const engines = new Map();
let key = "";
const $ = id => document.getElementById(id);
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const number = value => value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");

function element(parent, tag, text, of) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (of) made.className = of;
  parent.append(made);
  return made;
}

function card(engine) {
  const section = element($("engines"), "section");
  const it = { rows: [], last: -1, title: element(section, "h2"), numbers: element(section, "div", undefined, "numbers") };
  it.cells = element(section, "canvas", undefined, "cells");
  it.legend = element(section, "div", undefined, "legend");
  it.below = element(section, "div");
  it.notes = element(section, "div", undefined, "note");
  const charts = element(section, "div", undefined, "charts");
  const chart = (title, unit, lines) => {
    const box = element(charts, "div"), head = element(box, "h3", unit ? `${title}, ${unit}` : title);
    const told = Object.keys(lines).map((name, place) => {
      element(head, "span", undefined, "key").style.setProperty("background", `var(${LINES[place]})`);
      return element(head, "span", name, "line");
    });
    return { names: Object.keys(lines), lines: Object.values(lines), told, canvas: element(box, "canvas", undefined, "chart") };
  };
  it.charts = [
    chart("KV", engine.memories[0].unit,
          { "in use": row => row[1], "with cached": row => row[1] === null ? null : row[1] + (row[2] ?? 0) }),
    chart("Requests", "", { running: row => row[3], waiting: row => row[4] }),
    chart("Prefix hits", "%", { "of prompt tokens": row => row[5] ? 100 * row[6] / row[5] : null }),
    chart("Tokens per second", "", { generated: row => row[7] }),
    chart("TTFT", "ms", { median: row => row[9] && row[9][0], p99: row => row[9] && row[9][1] }),
    chart("ITL", "ms", { median: row => row[10] && row[10][0], p99: row => row[10] && row[10][1] }),
    chart("Preemptions", "", { "each second": row => row[8] }),
  ];
  const scroll = element(section, "div", undefined, "scroll");
  it.table = element(scroll, "table");
  return it;
}

function sized(canvas) {
  const scale = devicePixelRatio || 1, wide = Math.round(canvas.clientWidth * scale);
  const high = Math.round(canvas.clientHeight * scale);
  if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, wide, high);
  return [pen, wide, high, scale];
}

/* Stretches of the memory: [colour, number of blocks, label or null]. */
function stretches(engine) {
  const device = engine.memories[0], parts = [];
  let left = device.used - device.reserved;
  const holders = device.unit === "pages" ? engine.holders.filter(one => one.pages) : [];
  holders.forEach((one, place) => {
    const own = Math.min(left, Math.max(0, one.pages - one.shared));
    parts.push([HUES[place % HUES.length], own, null]);
    left -= own;
  });
  parts.unshift([colour("--shared"), Math.max(0, left), holders.length ? "shared, or of requests not listed" : "in use"]);
  if (holders.length) parts.push([HUES[0], 0, "own pages of each request"]);
  parts.push([colour("--reserved"), device.reserved, "sessions"], [colour("--cached"), device.cached, "cached"]);
  return parts;
}

function drawCells(it, engine) {
  const device = engine.memories[0], parts = stretches(engine);
  const total = device.total ?? Math.max(1, device.used + device.cached);
  const [pen, wide, high] = sized(it.cells);
  const num = Math.min(COLUMNS * ROWS, Math.max(1, total)), columns = Math.min(COLUMNS, num);
  const rows = Math.ceil(num / columns), width = wide / columns, height = high / rows;
  let place = 0, before = 0;
  for (const [fill, count] of parts) {
    before += count;
    const end = Math.round(before / total * num);
    pen.fillStyle = fill;
    for (; place < end; place++)
      pen.fillRect(place % columns * width, Math.floor(place / columns) * height, Math.max(1, width - 1), Math.max(1, height - 1));
  }
  it.legend.replaceChildren();
  for (const [fill, count, label] of parts.filter(part => part[2] && (part[1] || part[2] !== "sessions"))) {
    element(it.legend, "span", undefined, "key").style.setProperty("background", fill);
    element(it.legend, "span", count || label !== "own pages of each request" ? `${label} ${number(count)}` : label);
  }
  element(it.legend, "span", ` of ${number(device.total)} ${device.unit}`);
}

const shown = value => value === undefined ? "–" : Number.isInteger(value) || value >= 100 ? number(value) : value.toFixed(value < 10 ? 1 : 0);
const short = value => value.toLocaleString("en", { notation: "compact", maximumFractionDigits: value < 10 ? 2 : 1 });
const ago = seconds => !seconds ? "now" : seconds < 60 ? `−${seconds} s` : `−${seconds / 60} min`;

/* The distance of at most three lines up to `most`: 1, 2 or 5 times a power of ten. */
function stepTo(most) {
  const power = 10 ** Math.floor(Math.log10(most / 3));
  return [1, 2, 5, 10].map(times => times * power).find(step => step >= most / 3 * 0.999);
}

/* Draw lines and labels of both axes; return where times and values are. */
function drawAxes(pen, wide, high, scale, first, span, top, now) {
  const left = LEFT * scale, bottom = high - BELOW * scale, above = ABOVE * scale;
  const x = time => left + (time - first) / span * (wide - left), y = value => bottom - value / top * (bottom - above);
  pen.font = `${11 * scale}px system-ui, sans-serif`;
  pen.fillStyle = colour("--faint");
  pen.strokeStyle = colour("--line");
  pen.lineWidth = scale;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (let value = 0, step = stepTo(top); value <= top * 1.001; value += step) {
    pen.beginPath(); pen.moveTo(left, y(value)); pen.lineTo(wide, y(value)); pen.stroke();
    pen.fillText(short(value), left - 5 * scale, y(value));
  }
  pen.textBaseline = "top";
  const every = [10, 30, 60, 120, 300].find(step => span / step <= 4) ?? 600;
  for (let before = 0; now - before >= first; before += every) {
    pen.textAlign = before ? "center" : "right";
    if (x(now - before) > left + 20 * scale) pen.fillText(ago(before), x(now - before), bottom + 4 * scale);
  }
  return [x, y];
}

function drawChart(chart, rows, now, most) {
  const [pen, wide, high, scale] = sized(chart.canvas);
  const first = Math.max(0, now - WINDOW_S), span = Math.max(30, now - first);
  const values = chart.lines.map(line => rows.map(line));
  const top = most || Math.max(1, ...values.flat().filter(value => value !== null && value !== undefined)) * 1.05;
  values.forEach((line, place) => {
    chart.told[place].textContent = `${chart.names[place]} ${shown(line.findLast(value => value !== null && value !== undefined))}`;
  });
  const [xOf, yOf] = drawAxes(pen, wide, high, scale, first, span, top, now);
  values.forEach((line, place) => {
    pen.strokeStyle = colour(LINES[place]);
    pen.lineWidth = 1.5 * scale;
    pen.beginPath();
    let isOn = false;
    rows.forEach((row, index) => {
      const value = line[index];
      if (value === null || value === undefined) { isOn = false; return; }
      const x = xOf(row[0]), y = yOf(value);
      if (isOn) pen.lineTo(x, y); else { pen.moveTo(x, y); pen.lineTo(x + scale, y); }
      isOn = true;
    });
    pen.stroke();
  });
}

function show(engine) {
  let it = engines.get(engine.name);
  if (!it) engines.set(engine.name, it = card(engine));
  if (engine.now_s < it.last) { it.rows = []; it.last = -1; }
  it.rows.push(...engine.rows.filter(row => row[0] > it.last));
  if (it.rows.length) it.last = it.rows.at(-1)[0];
  while (it.rows.length && it.rows[0][0] < engine.now_s - WINDOW_S) it.rows.shift();
  it.title.textContent = engine.health === "healthy" ? engine.name : `${engine.name} (${engine.health})`;
  it.numbers.replaceChildren();
  for (const [name, value] of Object.entries(engine.totals)) {
    const box = element(it.numbers, "span", `${name} `);
    element(box, "b", number(value));
  }
  drawCells(it, engine);
  it.below.replaceChildren();
  for (const tier of engine.memories.slice(1)) {
    const line = element(it.below, "div", `${tier.name}: ${number(tier.used + tier.cached)} ${tier.unit} `);
    if (tier.total) {
      const bar = element(line, "meter");
      bar.max = tier.total;
      bar.value = tier.used + tier.cached;
      line.append(` of ${number(tier.total)}`);
    }
  }
  it.notes.textContent = engine.notes.join(" ");
  const total = engine.memories[0].total;
  it.charts.forEach((chart, place) => drawChart(chart, it.rows, engine.now_s, place ? place === 2 ? 100 : 0 : total));
  it.table.replaceChildren();
  if (!engine.holders.length && !engine.others) return;
  const head = element(it.table, "tr");
  for (const name of ["request", "owner", "state"]) element(head, "th", name);
  for (const name of ["pages", "of these found", "prompt", "generated"]) element(head, "th", name, "number");
  const isColoured = engine.memories[0].unit === "pages";
  let place = 0;
  for (const one of engine.holders) {
    const row = element(it.table, "tr"), name = element(row, "td");
    if (isColoured && one.pages)
      element(name, "span", undefined, "key").style.setProperty("background", HUES[place++ % HUES.length]);
    name.append(one.name);
    for (const text of [one.owner, one.state]) element(row, "td", text);
    for (const value of [one.pages, one.shared, one.prompt_tokens, one.tokens]) element(row, "td", number(value), "number");
  }
  if (engine.others) {
    const row = element(it.table, "tr");
    for (const text of [`${number(engine.others)} more`, "", ""]) element(row, "td", text);
    element(row, "td", number(engine.other_pages), "number");
  }
}

async function look() {
  const since = Math.min(...[...engines.values()].map(it => it.last), Infinity);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(`live?since=${Number.isFinite(since) ? since : -1}`, { headers, cache: "no-store" });
  $("ask").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(answer.status === 401 ? "an API key is needed" : `the server answers ${answer.status}`);
  for (const engine of await answer.json()) show(engine);
  $("state").textContent = "live";
  document.documentElement.dataset.ready = "yes";
}

async function follow() {
  try {
    if (!document.hidden) await look();
  } catch (error) {
    $("state").textContent = error.message;
    document.documentElement.dataset.ready = "error";
  }
  setTimeout(follow, 1000);
}

$("ask").addEventListener("submit", event => { event.preventDefault(); key = $("key").value; $("key").value = ""; });
follow();
