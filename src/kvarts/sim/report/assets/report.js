"use strict";
(async () => {
  const { data, colour, make, note, head, count, tidy, duration, largest, axis, left, logarithmic, fromZero, draw, line,
    along, label, dot, upright, table, pairs, column, finish } = kvarts;
  const share = (part, whole) => (whole ? (100 * part / whole).toFixed(1) + " %" : "-");
  const percent = (value) => (100 * value).toFixed(1) + " %";
  const TIME_UNITS = [[2 * 86400, 86400, "days"], [3 * 3600, 3600, "hours"], [600, 60, "minutes"], [0, 1, "seconds"]];
  const shares = { values: (_, values) => values.map((v) => (v === null ? "" : Math.round(v * 100) + " %")) };
  const paths = uPlot.paths.stepped({ align: 1 });  // a row holds up to the next one

  head(data);
  document.getElementById("source").textContent = data.source;
  if (data.advice) make("p", { parent: document.getElementById("advice"), text: data.advice[0].toUpperCase() + data.advice.slice(1) });

  const bar = (parent, parts, whole) => {
    const outer = make("div", { parent, className: "bar" });
    for (const [text, value, name] of parts) {
      const part = make("div", { parent: outer, title: `${text}: ${count(value)}` });
      part.style.width = whole ? 100 * value / whole + "%" : "0";
      part.style.background = `var(--${name})`;
    }
  };
  const keyed = (parent, heads, parts, whole) => table(parent, heads, parts.map(([text, value, name, more]) => {
    const first = make("span", {});
    make("span", { parent: first, className: "key" }).style.background = `var(--${name})`;
    first.append(text);
    if (more) make("div", { parent: first, text: more, className: "note" });
    return [first, count(value), share(value, whole)];
  }));

  const show = async (part, number) => {
    const root = make("section", { parent: document.getElementById("parts"), className: "part" });
    const section = (id, title) => {
      const element = make("section", { parent: root, className: id });
      if (title) make("h2", { parent: element, text: title });
      return element;
    };
    const { unit } = part;
    if (part.name) make("h2", { parent: root, text: part.name, className: "model" });
    const facts = section("facts");
    pairs(facts, [...part.facts, ...(number ? [] : data.about)]);
    const settings = make("details", { parent: facts });
    make("summary", { parent: settings, text: "Configuration" });
    pairs(settings, part.config);

    // Time: one scale for all charts of the run.
    const replicas = await Promise.all(part.replicas.map(async (replica) => {
      const [time, used, cached, running, waiting, preempting] = await Promise.all(
        ["t_us", "used", "cached", "running", "waiting", "preempting"].map((name) => column(replica[name])));
      const tiers = await Promise.all(replica.tiers.map(async (tier) =>
        ({ name: tier.name, used: await column(tier.used), cached: await column(tier.cached) })));
      return { ...replica, seconds: time.map((us) => us / 1e6), used, cached, running, waiting, preempting, tiers };
    }));
    const ends = replicas.map(({ seconds }) => (seconds.length ? seconds[seconds.length - 1] : 0));
    const last = Math.max(0, ...ends, ...(part.evictions || []).slice(-1).map(([ms]) => ms / 1e3),
      ...part.hit_rates.slice(-1).map(([ms]) => ms / 1e3));
    const [, unitSeconds, unitName] = TIME_UNITS.find(([least]) => last >= least);
    const scaleX = { time: false, range: ({ data: [times] }, low, high) => {
      const isWhole = low === null || (low === times[0] && high === times[times.length - 1]);
      return isWhole ? [0, last / unitSeconds || 1] : low === high ? [low, low + 1] : [low, high];
    } };
    const cursor = { sync: { key: `time ${number}` }, drag: { x: true, y: false } };
    const timed = along("time", (v) => duration(v * unitSeconds * 1e3), "up to " + duration(last * 1e3));
    const inUnits = (seconds) => seconds.map((value) => value / unitSeconds);
    const atMost = (values) => "at most " + count(largest(values));

    // Memory
    const memory = section("memory", "Memory and queues");
    const mostRequests = Math.max(1, ...replicas.map(({ running, waiting }) => Math.max(largest(running), largest(waiting))));
    const mostBlocks = Math.max(...replicas.map((replica) => replica.total_blocks));
    for (const replica of replicas) {
      const { used, cached, running, waiting, preempting } = replica;
      const time = inUnits(replica.seconds);
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
      draw(memory, `KV ${unit} in use${name}`, 280, [
        timed,
        line("used and cached", "grey", resident, { paths, idle: atMost(resident), fill: () => colour("sky") + "30" }),
        line("used", "blue", used, { paths, idle: atMost(used), fill: () => colour("blue") + "40" }),
      ], [time, resident, used], {
        cursor, axes: [axis(unitName), left(unit)], hooks: { draw: [mark] },
        scales: { x: scaleX, y: { range: [0, mostBlocks * 1.04] } },
      });
      const preempted = replica.num_preempting;
      note(memory, `${count(replica.total_blocks)} ${unit} of ${replica.block_size_tokens} tokens; ` +
        (preempted ? `marks at the top: ${count(preempted)} ${preempted === 1 ? "step" : "steps"} that preempted.` : "no step preempted.") +
        (replica.left_out ? ` ${count(replica.left_out)} changes between highs and lows are left out of these charts.` : ""));
      for (const tier of replica.tiers) {
        const held = tier.used.map((value, i) => value + tier.cached[i]);
        draw(memory, `KV ${unit} in ${tier.name}${name}`, 190, [
          timed,
          line("used and cached", "grey", held, { paths, idle: atMost(held), fill: () => colour("teal") + "30" }),
          line("used by transfers", "teal", tier.used, { paths, idle: atMost(tier.used), fill: () => colour("teal") + "60" }),
        ], [time, held, tier.used], { cursor, axes: [axis(unitName), left(unit)], scales: { x: scaleX, y: { range: fromZero } } });
      }
      draw(memory, `Running and waiting${name}`, 190, [
        timed, line("running", "green", running, { paths, idle: atMost(running) }),
        line("waiting", "orange", waiting, { paths, idle: atMost(waiting), dash: [6, 3] }),
      ], [time, running, waiting], {
        cursor, axes: [axis(unitName), left("requests")], scales: { x: scaleX, y: { range: [0, mostRequests * 1.06] } },
      });
    }

    // Over time
    const cache = section("cache", "Prefix cache over time");
    const both = make("div", { parent: cache, className: "columns" });
    const overTime = (title, found, text, options, none) => {
      const parent = make("div", { parent: both });
      const values = (found || []).map(([, value]) => value);
      if (!largest(values)) {
        make("h3", { parent, text: title });
        note(parent, none);
        return;
      }
      const times = found.map(([ms]) => ms / 1e3 / unitSeconds);
      draw(parent, title, 210, [timed, line(text, options.colour, values, {
        form: options.say, idle: "at most " + options.say(largest(values)), fill: () => colour(options.colour) + "30",
        paths: uPlot.paths.stepped({ align: -1 }) })],
      [times, values], { cursor, axes: [axis(unitName), left(options.axis, options.ticks)],
        scales: { x: scaleX, y: { range: options.range || fromZero } } });
    };
    overTime("Prefix hits of requests admitted", part.hit_rates, "hit", {
      colour: "green", say: percent, axis: "of prompt tokens", range: [0, 1.02], ticks: shares,
    }, part.hit_rates.length ? "No prompt token was a hit."
      : part.unknown_hits || "Not recorded: the run has no list of requests.");
    overTime(`KV ${unit} evicted`, part.evictions, "evicted", { colour: "red", say: count, axis: unit, ticks: {} },
      part.evictions ? "Nothing was evicted: everything fits." : part.no_journal);

    // Latency
    const latency = make("div", { parent: section("latency", "Latency"), className: "columns" });
    for (const { name, ms, share: below, marks, slo_ms } of part.curves) {
      const parent = make("div", { parent: latency });
      if (!largest(ms) || ms[ms.length - 1] <= 1e-3) {
        make("h3", { parent, text: name });
        note(parent, ms.length ? "No request waited: all are below 1 µs." : "No values.");
        continue;
      }
      const slo = typeof slo_ms === "number" && slo_ms > 0 ? slo_ms : null;
      const within = slo === null ? 0 : below.reduce((most, part, i) => (ms[i] <= slo ? part : most), 0);
      const percentiles = (chart) => {
        const at = (value, axis) => chart.valToPos(value, axis, true);
        const texts = marks.map(([text, value, part]) => ({ text, x: at(value, "x"), y: at(part, "y") }))
          .filter(({ x }) => x >= chart.bbox.left - 1 && x <= chart.bbox.left + chart.bbox.width + 1);
        for (const { x, y } of texts) dot(chart, x, y, "red");
        if (slo !== null && upright(chart, at(slo, "x"), "violet"))
          texts.push({ text: `SLO ${duration(slo)}: ${percent(within)}`, x: at(slo, "x"), y: at(0.12, "y") });
        label(chart, texts);
      };
      const most = ms[ms.length - 1];
      draw(parent, `${name}: share of values up to`, 230, [
        along("value", duration, "at most " + duration(most)),
        line("share", "blue", below, { form: percent, fill: () => colour("blue") + "30",
          idle: slo === null ? "of all values" : `${percent(within)} within the SLO of ${duration(slo)}` }),
      ], [ms, below], {
        cursor: { drag: { x: true, y: false } }, hooks: { draw: [percentiles] },
        axes: [axis("time, logarithmic", logarithmic("x", "ms")), left("share of values", shares)],
        scales: { x: { time: false, distr: 3, range: (_, low, high) => {
          if (low === null) return [1, 10];
          const isWhole = low === ms[0] && high === most;
          const [a, b] = isWhole && slo !== null ? [Math.min(low, slo), Math.max(high, slo)] : [low, high];
          return a === b ? [a / 2, b * 2] : [a, isWhole ? b * (b / a) ** 0.02 : b];
        } }, y: { range: [0, 1.04] } },
      });
    }

    const hits = section("hits", "Where prompt tokens came from");
    if (part.hits) {
      const parts = part.hits.parts.filter(([, tokens]) => tokens);
      bar(hits, parts, part.hits.prompt_tokens);
      keyed(hits, ["", ">tokens", ">of all"], parts, part.hits.prompt_tokens);
    } else note(hits, part.no_journal);
    for (const text of part.notes) note(hits, "Note: " + text + ".");

    const distinct = section("distinct-pages", "Distinct pages and the pool");
    if (part.distinct) {
      const { pages, pool } = part.distinct;
      if (pages <= pool)
        note(distinct, `Everything fits: all that is ever used takes ${count(pages)} pages, ${share(pages, pool)} of the pool of ${count(pool)}.`);
      else {
        bar(distinct, [["distinct pages", pages, "violet"]], pages);
        bar(distinct, [["pool", pool, "blue"]], pages);
        keyed(distinct, ["", ">pages", ">of the pool"],
          [["all that is ever used, held at once", pages, "violet"], ["the pool", pool, "blue"]], pool);
        note(distinct, `There are ${tidy(pages / pool)} times as many distinct pages as the pool has.`);
      }
    } else note(distinct, "Unknown: the trace was read as a stream, or the run has no trace.");

    const waits = section("waits", "The longest waits, each of another cause or another time");
    if (part.waits) {
      for (const { name, waited, lines } of part.waits) {
        const entry = make("details", { parent: waits });
        make("summary", { parent: entry, text: `${name}: ${waited}` });
        make("pre", { parent: entry, text: lines.join("\n") });
      }
      if (!part.waits.length) note(waits, part.has_admitted ? "No request waited to be admitted." : "No request was admitted.");
    } else note(waits, part.no_journal);
  };
  for (const [number, part] of data.parts.entries()) await show(part, number);
  finish();
})();
