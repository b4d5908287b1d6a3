"use strict";
// A table and charts of lines. A line without values is left out, and so is a chart without lines.
(() => {
  const { data, colour, make, head, say, axis, left, linear, below, fromZero, ends, isNone, draw, line, along, table, finish } = kvarts;
  head(data);
  table(document.getElementById("rows"), data.heads, data.rows);
  const dots = (name) => ({ paths: () => null, points: { show: true, size: 4, fill: () => colour(name) } });
  const styles = {
    line: () => ({ spanGaps: true }),
    dashes: () => ({ dash: [6, 3] }),
    dots,
    rings: () => ({ paths: () => null, points: { show: true, size: 8, fill: "transparent" } }),
  };
  // Of values that hardly differ, the axis shows a tenth of them at least, so that noise looks like noise.
  const near = (_, low, high) => {
    if (isNone(low)) return [0, 1];
    const middle = (low + high) / 2, half = Math.max((high - low) * 0.6, middle * 0.05);
    return [Math.max(0, middle - half), middle + half];
  };
  const parent = document.getElementById("charts");
  for (const { name, x: [x, xUnit], y: [y, yUnit], at, lines, is_near: isNear } of data.charts) {
    const shown = lines.filter(({ values }) => ends(values));
    if (!shown.length) continue;
    make("h2", { parent, text: name });
    draw(parent, "", 260, [along(x, say(xUnit), ends(at).map(say(xUnit)).join(" to ")),
      ...shown.map(({ label, colour: of, values, style }) => line(label, of, values, { form: say(yUnit), ...styles[style](of) }))],
    [at, ...shown.map(({ values }) => values)], {
      axes: [axis(x, below(xUnit)), left(y, linear(yUnit))],
      scales: { x: { time: false }, y: { range: isNear ? near : fromZero } },
    });
  }
  finish();
})();
