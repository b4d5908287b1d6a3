"use strict";
(() => {
  const { data, colour, make, head, count, duration, say, axis, left, linear, fromZero, ends, isNone, draw, line, along, table,
    finish } = kvarts;
  const section = (id) => document.getElementById(id);
  head(data);
  const colours = { ok: "green", violated: "red", inconclusive: "orange" };
  table(section("rules"), ["rule", "status", "what"], data.rules.map(({ rule, status, what }) => {
    const cell = make("span", { text: status.replace("_", " ") });
    cell.style.color = `var(--${colours[status] || "faint"})`;
    return [rule, cell, what];
  }));

  // A line is given as [label, colour, values, more]; one without values is left out.
  const chart = (parent, title, [x, xForm, xMore], [y, unit], xs, lines, range) => {
    const shown = lines.filter(([, , values]) => ends(values));
    const span = ends(xs) || [0, 0];
    make("h2", { parent, text: title });
    draw(parent, "", 260, [along(x, xForm, span.map(xForm).join(" to ")),
      ...shown.map(([text, name, values, more]) => line(text, name, values, { form: say(unit), ...more }))],
    [xs, ...shown.map(([, , values]) => values)], {
      axes: [axis(x, xMore), left(y, linear(unit))], scales: { x: { time: false }, y: { range } },
    });
  };
  const dots = (name, size = 4) => ({ paths: () => null, points: { show: true, size, fill: () => colour(name) } });
  const rings = { paths: () => null, points: { show: true, size: 8, fill: "transparent" } };
  const flat = (values, value) => values.map(() => value);
  // Latencies of a soak hardly differ: the axis shows a tenth of them at least, so that noise looks like noise.
  const near = (_, low, high) => {
    if (isNone(low)) return [0, 1];
    const middle = (low + high) / 2, half = Math.max((high - low) * 0.6, middle * 0.05);
    return [Math.max(0, middle - half), middle + half];
  };

  const { bytes, turns, slope } = data;
  const time = ["time", duration, linear("ms")], turn = ["turn", count, {}];
  // What is live is drawn over what is expected, which is a ring around it where they agree.
  chart(section("bytes"), "KV memory of a session", time, ["KV memory", "MiB"], bytes.t.map((seconds) => seconds * 1e3), [
    ["bound", "red", flat(bytes.t, bytes.bound_mib), { dash: [6, 3] }],
    ["expected", "orange", bytes.expected_mib, rings],
    ["live", "blue", bytes.live_mib, dots("blue")],
  ], fromZero);
  const first = turns.turn[turns.turn.length - 1] - (slope ? slope.span_x : 0);
  const fitted = (turn) => slope === null || turn < first ? null : 1e3 * (slope.first + slope.per_x * (turn - first));
  chart(section("latency"), "Time between tokens, mean of each turn", turn, ["time", "ms"], turns.turn, [
    ["slope after warm-up", "orange", turns.turn.map(fitted), {}],
    ["time", "blue", turns.itl_ms, dots("blue")],
  ], near);
  chart(section("latency"), "Time to first token", turn, ["time", "ms"], turns.turn,
    [["time", "green", turns.ttft_ms, dots("green")]], near);
  if (ends(turns.rss_mib))
    chart(section("rss"), "Memory of the server", turn, ["resident memory", "MiB"], turns.turn,
      [["resident", "violet", turns.rss_mib, { spanGaps: true }]], near);
  finish();
})();
