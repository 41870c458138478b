"use strict";
// Draws what the page's tables say in words. Data stands in #data; see disttrain/report/page.py for its form.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const units = new Map(data.metrics.map(([key, , unit]) => [key, unit]));
  const names = new Map(data.metrics.map(([key, name]) => [key, name]));
  const colour = (index) => `var(--c${index % 12})`;
  const $ = (id) => document.getElementById(id);

  // --- numbers ---------------------------------------------------------------------------------------------------

  const signs = (number, digits = 3) => Number(number.toPrecision(digits)).toLocaleString("en");
  function scaled(number, size, unitNames) {
    let place = 0;
    while (Math.abs(number) >= size * 0.9995 && place < unitNames.length - 1) { number /= size; place += 1; }
    return `${signs(number)}${unitNames[place]}`;
  }
  const bytes = (number) => scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
  function seconds(number) {
    if (number === 0) return "0";
    const size = Math.abs(number);
    if (size < 1e-3) return `${signs(number * 1e6)} µs`;
    if (size < 1) return `${signs(number * 1e3)} ms`;
    if (size < 120) return `${signs(number)} s`;
    return size < 7200 ? `${signs(number / 60)} min` : `${signs(number / 3600)} h`;
  }
  const rate = (number) => scaled(number, 1000, ["", "k", "M", "G", "T"]);
  const written = { bytes, seconds, rate, share: (x) => `${signs(x * 100)}%`, number: (x) => (x === 0 ? "0" : Math.abs(x) >= 1e4 || Math.abs(x) < 1e-3 ? x.toExponential(2) : signs(x, 4)) };
  const unitOf = (key) => units.get(key) || (key.endsWith("bytes") ? "bytes" : key.endsWith("seconds") ? "seconds" : "rate");

  // --- charts ----------------------------------------------------------------------------------------------------

  const base = (place, more) => ({ width: Math.max(300, place.clientWidth), style: { background: "none" }, ...more });
  const ticks = (place) => (place.clientWidth < 480 ? 4 : 7);
  function byteTicks(most, count) {
    const size = 1024 ** Math.max(0, Math.floor(Math.log(most || 1) / Math.log(1024)));
    return d3.ticks(0, most / size, count).map((number) => number * size);
  }
  const tip = (points, options) => Plot.tip(points, Plot.pointer({ fill: "var(--paper)", stroke: "var(--line)", ...options }));

  function smooth(values, weight) {
    let mean = 0, mass = 0;
    return values.map((value) => {
      if (value === null || weight === 0) return value;
      mean = weight * mean + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return mean / mass;
    });
  }

  function series(index, metric, axis, weight) {
    const run = runs[index], curve = run.y[metric];
    if (!curve) return [];
    const values = smooth(curve[1], weight);
    return curve[0].map((at, place) => ({ run: index, x: run.x[axis][at], step: run.x.step[at], y: values[place] }));
  }

  // Curves that lie on each other are drawn as stripes of their colours: that they coincide is to be seen, not to hide them.
  function stripes(visible, points) {
    const values = points.map((point) => point.y).filter((y) => y !== null);
    const near = 0.004 * (d3.max(values) - d3.min(values) || 1);
    const by = new Map(visible.map((index) => [index, new Map(points.filter((p) => p.run === index).map((p) => [p.x, p.y]))]));
    const coincide = (a, b) => {
      return a.size === b.size && a.size > 1 && [...a.keys()].every((x) => b.has(x) && Math.abs(a.get(x) - b.get(x)) <= near);
    };
    const groups = [];
    for (const index of visible) {
      const group = groups.find((some) => coincide(by.get(some[0]), by.get(index)));
      if (group) group.push(index); else groups.push([index]);
    }
    const size = 10, found = new Map();
    for (const group of groups) {
      group.forEach((index, place) => {
        if (group.length > 1) found.set(index, { array: `${size} ${size * (group.length - 1)}`, offset: -size * place });
        else found.set(index, { array: ["none", "6 3", "2 3"][Math.floor(index / 12) % 3], offset: 0 });
      });
    }
    return [found, groups.filter((group) => group.length > 1).length > 0];
  }

  function curves(place) {
    const metric = $("metric").value, axis = document.querySelector("[name=axis]:checked").value;
    const weight = Number($("smooth").value), isLog = $("log").checked;
    const reference = $("reference") ? $("reference").value : "";
    const visible = [...document.querySelectorAll("[name=run]:checked")].map((box) => Number(box.value));
    let points = visible.flatMap((index) => series(index, metric, axis, weight));
    if (reference !== "") {
      const less = new Map(series(Number(reference), metric, axis, weight).map((point) => [point.step, point.y]));
      points = points.filter((point) => less.has(point.step)).map((point) => ({ ...point, y: point.y === null ? null : point.y - less.get(point.step) }));
    }
    const drawn = points.filter((point) => point.y !== null);
    if (isLog) points = points.map((point) => ({ ...point, y: point.y > 0 ? point.y : null }));
    const write = written[unitOf(metric)];
    const label = { step: "steps", tokens: $("curves").querySelector("[value=tokens]").nextSibling.textContent, seconds: "time" }[axis];
    const writeX = axis === "seconds" ? seconds : axis === "tokens" ? rate : (x) => x.toLocaleString("en");
    const less = reference === "" ? "" : `, minus that of ${runs[reference].label}`;
    const said = drawn.length ? `from ${write(d3.min(drawn, (p) => p.y))} to ${write(d3.max(drawn, (p) => p.y))}` : "nothing to draw";
    place.setAttribute("aria-label", `${names.get(metric)}${less} over ${label}, ${visible.length} of ${runs.length} runs: ${said}. Numbers are in the table below.`);
    if (!drawn.length) return note(place, visible.length ? `no ${isLog ? "positive " : ""}${names.get(metric)} in these runs` : "choose a run below");
    const few = new Set(visible.filter((index) => points.filter((point) => point.run === index).length < 12));
    const [dashes, areStriped] = stripes(visible, points);
    $("striped").hidden = !areStriped;
    const chart = Plot.plot(base(place, {
      height: place.clientWidth < 480 ? 300 : 380, marginLeft: 56, marginRight: 16, marginBottom: 40, marginTop: 28,
      x: { label, ticks: ticks(place), tickFormat: writeX, labelArrow: "none" },
      y: { label: `${names.get(metric)}${less}`, type: isLog ? "log" : "linear", grid: true, ticks: 6, tickFormat: write, nice: true, labelArrow: "none" },
      color: { type: "ordinal", domain: d3.range(runs.length), range: d3.range(runs.length).map(colour) },
      marks: [
        reference !== "" ? Plot.ruleY([0], { strokeOpacity: 0.4 }) : null,
        ...visible.map((index) => Plot.line(points.filter((p) => p.run === index), {
          x: "x", y: "y", stroke: colour(index), strokeWidth: 2.25, strokeDasharray: dashes.get(index).array, strokeLinejoin: "round", className: `run-${index}`,
        })),
        Plot.dot(drawn.filter((p) => few.has(p.run)), { x: "x", y: "y", fill: "run", r: 2.5 }),
        Plot.ruleX(drawn, Plot.pointerX({ x: "x", strokeOpacity: 0.25 })),
        tip(drawn, { x: "x", y: "y", title: (p) => `${runs[p.run].label}\n${label === "time" ? seconds(p.x) : `${writeX(p.x)} ${label}`}: ${write(p.y)}` }),
        Plot.dot(drawn, Plot.pointer({ x: "x", y: "y", fill: "run", r: 4, stroke: "var(--paper)" })),
      ],
    }));
    place.replaceChildren(chart);
    curvesPlace.querySelectorAll("[class^=run-]").forEach((line) => line.setAttribute("stroke-dashoffset", dashes.get(Number(line.getAttribute("class").slice(4))).offset));
  }

  function bars(place, metric) {
    const rows = runs.map((run, index) => ({ index, label: run.tiny, spread: run.bars[metric] })).filter((row) => row.spread && row.spread[0] !== null);
    const write = written[unitOf(metric)], most = d3.max(rows, (row) => row.spread[2] || row.spread[0]);
    place.replaceChildren(Plot.plot(base(place, {
      height: 8 + 22 * rows.length, marginLeft: 12 + 7 * d3.max(rows, (row) => row.label.length), marginRight: 66, marginTop: 4, marginBottom: 4,
      x: { axis: null, domain: [0, most] },
      y: { label: null, domain: rows.map((row) => row.label), tickSize: 0 },
      marks: [
        Plot.barX(rows, { x: (row) => row.spread[0], y: "label", fill: (row) => colour(row.index), insetTop: 2, insetBottom: 2, rx2: 3 }),
        Plot.ruleY(rows.filter((row) => row.spread[2] > row.spread[1]), { x1: (row) => row.spread[1], x2: (row) => row.spread[2], y: "label", strokeWidth: 1.5 }),
        Plot.text(rows, { x: (row) => row.spread[2] || row.spread[0], y: "label", text: (row) => write(row.spread[0]), textAnchor: "start", dx: 6 }),
      ],
    })));
  }

  function comm(place) {
    const rows = runs.flatMap((run) => Object.entries(run.comm).map(([axis, kinds]) => ({ label: run.tiny, axis, bytes: d3.sum(Object.values(kinds)), kinds })));
    const labels = runs.filter((run) => Object.keys(run.comm).length).map((run) => run.tiny);
    const axes = [...new Set(rows.map((row) => row.axis))].sort();
    const marginLeft = 12 + 7 * d3.max(labels, (label) => label.length);
    const total = d3.max(d3.rollup(rows, (some) => d3.sum(some, (row) => row.bytes), (row) => row.label).values());
    place.replaceChildren(Plot.plot(base(place, {
      height: 36 + 26 * labels.length, marginLeft, marginRight: 24, marginTop: 4, marginBottom: 26,
      x: { label: null, ticks: byteTicks(total, Math.max(2, Math.floor((place.clientWidth - marginLeft) / 90))), tickFormat: bytes, grid: true, domain: [0, total || 1] },
      y: { label: null, domain: labels, tickSize: 0 },
      color: { type: "ordinal", domain: axes, range: axes.map((_, index) => colour(index)), legend: true, className: "axes" },
      marks: [
        Plot.barX(rows, Plot.stackX({ x: "bytes", y: "label", z: "axis", fill: "axis", order: axes, insetTop: 2, insetBottom: 2, insetRight: 1 })),
        Plot.tip(rows, Plot.pointerY(Plot.stackX({ x: "bytes", y: "label", z: "axis", order: axes, fill: "var(--paper)", stroke: "var(--line)",
          title: (row) => `${row.label}, ${row.axis}: ${bytes(row.bytes)}\n${Object.entries(row.kinds).map(([kind, size]) => `${kind.replaceAll("_", "-")} ${bytes(size)}`).join("\n")}` }))),
      ],
    })));
  }

  function timeline(place, index) {
    const found = runs[index].timeline;
    const rows = found.bars.map(([rank, kind, stage, micro, start, end]) => ({ rank, kind, stage, micro, start, end }));
    const at = new Map(found.ranks);
    const label = (rank) => `rank ${rank}${place.clientWidth > 700 && at.get(rank) ? ` (${at.get(rank)})` : ""}`;
    const wide = d3.max(found.ranks, ([rank]) => label(rank).length) * 7 + 8;
    const width = Math.max(640, place.clientWidth), span = d3.max(rows, (row) => row.end) - d3.min(rows, (row) => row.start);
    const stages = d3.max(rows, (row) => row.stage);
    // A bar is under the pointer over its whole length, not at its middle only: it has an anchor every few pixels.
    const every = span / (width - wide) * 6;
    const anchors = rows.flatMap((row) => {
      const count = Math.max(1, Math.round((row.end - row.start) / every));
      return d3.range(count).map((index) => ({ row, rank: row.rank, at: row.start + (row.end - row.start) * (index + 0.5) / count }));
    });
    place.replaceChildren(Plot.plot({
      width, height: 48 + 26 * found.ranks.length, marginLeft: wide, marginRight: 12, marginTop: 4, marginBottom: 36, style: { background: "none" },
      x: { label: "time in the step", labelArrow: "none", tickFormat: seconds, grid: true, ticks: 6 },
      y: { label: null, domain: found.ranks.map(([rank]) => rank), tickFormat: label, tickSize: 0, padding: 0.12 },
      marks: [
        Plot.barX(rows, { x1: "start", x2: "end", y: "rank", fill: (row) => `var(--k-${row.kind})`, fillOpacity: (row) => 1 - 0.35 * (stages > 0 && row.stage > -1 ? row.stage / (stages + 1) : 0), insetRight: 0.5, rx: 1.5 }),
        Plot.text(rows.filter((row) => row.micro >= 0 && (row.end - row.start) / span * (width - wide) > 15), { x: (row) => (row.start + row.end) / 2, y: "rank", text: "micro", fill: "white", fontSize: 10.5, fontWeight: 600, pointerEvents: "none" }),
        Plot.tip(anchors, Plot.pointer({ x: "at", y: "rank", fill: "var(--paper)", stroke: "var(--line)",
          title: ({ row }) => `rank ${row.rank}: ${data.kinds[row.kind]}${row.stage < 0 ? "" : `\nstage ${row.stage}, micro-batch ${row.micro}`}\n${seconds(row.end - row.start)}, from ${seconds(row.start)}` })),
      ],
    }));
  }

  // Bins of the record are narrow: as many are put together as leave some forty in the middle 98%.
  function coarse(bins) {
    const sorted = [...bins].sort((a, b) => a[0] - b[0]);
    return { low: sorted[0][0], high: sorted[sorted.length - 1][1], sorted };
  }

  function steps(place, index) {
    const found = runs[index].steps;
    const all = found.map(([rank, bins]) => ({ rank, ...coarse(bins) }));
    const weights = d3.sort(all.flatMap((one) => one.sorted.map(([low, high, number]) => [Math.sqrt(low * high), number])), (x) => x[0]);
    const sum = d3.sum(weights, (x) => x[1]);
    const quantile = (share) => { let seen = 0; for (const [at, number] of weights) { seen += number; if (seen >= share * sum) return at; } return weights[weights.length - 1][0]; };
    const low = quantile(0.005) / 1.08, high = quantile(0.99) * 1.12;
    const count = place.clientWidth < 480 ? 28 : 48, ratio = Math.pow(high / low, 1 / count);
    const rows = all.flatMap(({ rank, sorted }) => {
      const total = d3.sum(sorted, (bin) => bin[2]), by = new Map();
      for (const [from, to, number] of sorted) {
        const bin = Math.min(count - 1, Math.max(0, Math.floor(Math.log(Math.sqrt(from * to) / low) / Math.log(ratio))));
        by.set(bin, (by.get(bin) || 0) + number);
      }
      return [...by].map(([bin, number]) => ({ rank, x1: low * ratio ** bin, x2: low * ratio ** (bin + 1), number, share: number / total, isLast: bin === count - 1 }));
    });
    const said = (row) => `rank ${row.rank}\n${seconds(row.x1)} to ${row.isLast ? "the longest" : seconds(row.x2)}: ${row.number} steps (${signs(row.share * 100)}%)`;
    const many = found.length > 16;
    const facet = many ? { y: "rank" } : { fy: "rank", y: "share" };
    const fill = many ? { fill: "share" } : { fill: colour(index) };
    const middle = { x: (row) => Math.sqrt(row.x1 * row.x2) };
    place.replaceChildren(Plot.plot(base(place, {
      height: 44 + (many ? 14 : 40) * found.length, marginLeft: 62, marginRight: 12, marginTop: 6, marginBottom: 36,
      x: { type: "log", domain: [low, high], label: "step time", labelArrow: "none", ticks: ticks(place), tickFormat: seconds },
      y: many ? { type: "band", label: null, tickFormat: (rank) => `rank ${rank}`, tickSize: 0 } : { axis: null, label: null },
      fy: many ? undefined : { label: null, axis: "left", tickFormat: (rank) => `rank ${rank}`, padding: 0.12 },
      color: many ? { scheme: "blues" } : undefined,
      marks: [
        many ? Plot.barX(rows, { x1: "x1", x2: "x2", ...facet, ...fill }) : Plot.rectY(rows, { x1: "x1", x2: "x2", ...facet, ...fill, insetLeft: 0.5, insetRight: 0.5 }),
        many ? null : Plot.ruleY([0], { strokeOpacity: 0.3 }),
        Plot.tip(rows, Plot.pointerX({ ...middle, ...facet, fill: "var(--paper)", stroke: "var(--line)", title: said })),
      ],
    })));
  }

  function note(place, text) {
    const said = document.createElement("p");
    said.className = "note";
    said.textContent = text;
    place.replaceChildren(said);
  }

  const draw = { curves, bars, comm, timeline: (place, run) => timeline(place, Number(run)), steps: (place, run) => steps(place, Number(run)) };
  function render(place) {
    if (!place.clientWidth) return;
    const [kind, ...rest] = place.dataset.chart.split(":");
    draw[kind](place, rest.join(":"));
    place.dataset.width = place.clientWidth;
    place.style.minHeight = "";
    place.querySelectorAll("svg").forEach((svg) => svg.setAttribute("aria-hidden", "true")); // the place itself says it in words
  }
  const places = [...document.querySelectorAll("[data-chart]")];
  const curvesPlace = places.find((place) => place.dataset.chart === "curves");

  // --- what can be clicked -----------------------------------------------------------------------------------------

  if (curvesPlace) {
    for (const [key, name] of data.metrics) $("metric").add(new Option(name, key));
    if ($("reference")) {
      $("reference").add(new Option("none", ""));
      runs.forEach((run, index) => run.y && Object.keys(run.y).length && $("reference").add(new Option(run.label, index)));
    }
    const redraw = () => render(curvesPlace);
    $("curves").addEventListener("input", redraw);
    for (const [id, state] of [["all", true], ["none", false]]) {
      if ($(id)) $(id).addEventListener("click", () => {
        document.querySelectorAll("[name=run]:not(:disabled)").forEach((box) => { box.checked = state; });
        redraw();
      });
    }
    const stand = (label, isOut) => {
      const own = `run-${label.querySelector("input").value}`;
      for (const line of curvesPlace.querySelectorAll("[class^=run-]")) line.style.opacity = isOut && !line.classList.contains(own) ? 0.12 : "";
    };
    for (const label of document.querySelectorAll(".legend .run")) {
      for (const [event, isOut] of [["pointerenter", true], ["pointerleave", false], ["focusin", true], ["focusout", false]]) {
        label.addEventListener(event, () => stand(label, isOut));
      }
    }
  }

  for (const select of document.querySelectorAll(".choose")) {
    const show = () => {
      for (const block of select.closest("section").querySelectorAll(".of-run")) {
        block.hidden = block.dataset.run !== select.value;
        if (!block.hidden) block.querySelectorAll("[data-chart]").forEach(render);
      }
    };
    select.addEventListener("input", show);
    show();
  }

  function compare(a, b) {
    const [x, y] = [a, b].map((value) => (value === "" ? null : Number.isNaN(Number(value)) ? value : Number(value)));
    if (x === null || y === null) return x === y ? 0 : x === null ? Infinity : -Infinity; // what is missing stays last
    return typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
  }
  for (const table of document.querySelectorAll(".sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
      const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.value;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const found = compare(value(a), value(b));
        return Number.isFinite(found) ? way * found : found;
      });
      table.tBodies[0].append(...rows);
    }));
  }

  const themes = ["auto", "light", "dark"];
  function theme(name) {
    document.documentElement.dataset.theme = name;
    $("theme").textContent = `theme: ${name}`;
    try { localStorage.setItem("disttrain-theme", name); } catch { /* pages from disk may have no storage */ }
  }
  let kept = "auto";
  try { kept = localStorage.getItem("disttrain-theme") || "auto"; } catch { /* likewise */ }
  theme(themes.includes(kept) ? kept : "auto");
  $("theme").addEventListener("click", () => theme(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length]));

  const drawAll = () => places.filter((place) => place.clientWidth && Number(place.dataset.width) !== place.clientWidth).forEach(render);
  drawAll();
  let waiting = 0;
  new ResizeObserver(() => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawAll); }).observe(document.body);
  document.documentElement.dataset.ready = "true";
})();
