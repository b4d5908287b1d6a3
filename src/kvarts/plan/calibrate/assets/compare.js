"use strict";
(() => {
  const { data, make, head, say, axis, left, linear, fromZero, ends, draw, line, along, table, pairs, finish } = kvarts;
  head(data);
  const errors = document.getElementById("errors");
  make("p", { parent: errors, text: data.verdict, className: "verdict" });
  table(errors, ["", ">measured", ">replayed", ">error"], data.rows);
  pairs(errors, data.more);

  // Two series on their own x values become one chart: every x of either, and nothing where a series has none.
  const both = (parent, title, theirs, ours, [x, xUnit], [y, yUnit], idle = () => undefined) => {
    const [xForm, yForm] = [say(xUnit), say(yUnit)];
    const values = uPlot.join([theirs, ours]);
    const span = ends(values[0]) || [0, 0];
    draw(parent, title, 260, [along(x, xForm, span.map(xForm).join(" to ")),
      line("measured", "green", theirs[1], { form: yForm, idle: idle(theirs), spanGaps: true }),
      line("replayed", "orange", ours[1], { form: yForm, idle: idle(ours), spanGaps: true, dash: [7, 3] })], values, {
      axes: [axis(x, linear(xUnit)), left(y, linear(yUnit))],
      scales: { x: { time: false }, y: { range: yUnit === "%" ? [0, 103] : fromZero } },
    });
  };
  const median = ([ms, shares]) => "p50 " + say("ms")(ms[shares.findIndex((share) => share >= 50)]);
  const columns = (pairs) => [pairs.map(([ms]) => ms), pairs.map(([, share]) => share)];
  const charts = document.getElementById("charts");
  for (const [metric, [theirs, ours]] of Object.entries(data.distributions)) {
    if (!theirs.length || !ours.length) continue;
    both(make("div", { parent: charts }), metric.toUpperCase(), columns(theirs), columns(ours),
      ["time", "ms"], ["of requests", "%"], median);
  }
  if (data.curves) {
    const parent = document.getElementById("curves");
    const [theirs, ours] = data.curves;
    const ms = (side) => side.t.map((seconds) => seconds * 1e3);
    const drawBoth = (title, name, y) => both(parent, title, [ms(theirs), theirs[name]], [ms(ours), ours[name]], ["time", "ms"], y);
    make("h2", { parent, text: "Over time" });
    if (theirs.kv && ours.kv) drawBoth("KV use", "kv", ["of the pool", "%"]);
    drawBoth("Waiting requests", "waiting", ["requests", ""]);
  }
  finish();
})();
