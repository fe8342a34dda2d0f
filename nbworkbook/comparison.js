// The part of outputs/index.html that compares runs: a table, curves, the difference of two runs, and sweeps.
//
// report.py puts the facts of all runs into the page as JSON, and this script draws them. What a run says is foreign:
// it becomes text nodes and values of attributes, never markup. Names of parameters, results and metrics are keys of
// Maps, because a plain object already has a "__proto__".
"use strict";
(() => {
  const data = JSON.parse(document.querySelector('script[type="application/json"]').textContent);
  const place = document.getElementById("compare");
  const runs = data.runs.map((run) => ({
    ...run,
    name: `${run.notebook}/${run.folder}`,
    parameters: new Map(run.parameters),
    results: new Map(run.results),
    environment: new Map(run.environment),
    curves: new Map(run.curves.map(([training, series]) => [training, new Map(series)])),
  }));
  if (!runs.length) return;

  function make(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") node.addEventListener(name, value);
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children); // strings become text nodes
    return node;
  }
  const html = (tag, attributes = {}, ...children) => make(document.createElement(tag), attributes, children);
  const SVG = "http://www.w3.org/2000/svg";
  const svg = (tag, attributes, ...children) => make(document.createElementNS(SVG, tag), attributes, children);
  const unique = (values) => [...new Set(values)];
  const isNumber = (value) => typeof value === "number";
  const INFINITE = new Map([["inf", Infinity], ["-inf", -Infinity]]);
  const numberOf = (value) => (isNumber(value) ? value : INFINITE.get(value));

  function show(value) {
    if (value === undefined || value === null) return "";
    return isNumber(value) && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : String(value);
  }

  const labelled = (label, control, kind = "") =>
    html("label", { class: kind }, ...(kind === "inline" ? [control, label] : [label, control]));

  function choice(redraw) {
    const select = html("select", { change: redraw });
    select.offer = (values, preferred) => {
      const before = values.includes(select.value) ? select.value : preferred;
      select.replaceChildren(...values.map((value) => html("option", { value }, value || "(no name)")));
      select.value = values.includes(before) ? before : (values[0] ?? "");
    };
    return select;
  }

  const dashOf = (k) => [null, "6 3", "2 3", "8 3 2 3"][Math.floor(k / 8) % 4];
  const tick = (redraw, checked = false) => html("input", { type: "checkbox", change: redraw, checked });

  // ---- the table
  // Parameters that differ between the runs of a notebook, or from its defaults.
  const varied = new Map();
  for (const notebook of unique(runs.map((run) => run.notebook))) {
    const group = runs.filter((run) => run.notebook === notebook);
    const differs = (name) =>
      group.some((run) => run.changed.includes(name)) ||
      unique(group.filter((run) => run.parameters.has(name)).map((run) => run.parameters.get(name))).length > 1;
    varied.set(notebook, unique(group.flatMap((run) => [...run.parameters.keys()])).filter(differs));
  }

  const notesOf = (run) => run.notes.map(([time, text]) => (time ? `${time}: ${text}` : text)).join("; ");
  const factsOf = (facts, names) =>
    names.filter((name) => facts.has(name)).map((name) => `${name} ${show(facts.get(name))}`).join(", ");

  // One column for each parameter and result while all rows are of one notebook, else one for all of them together.
  function columnsOf(rows) {
    const notebooks = unique(rows.map((run) => run.notebook));
    const columns = [];
    const add = (name, what, value) =>
      columns.push({ name: columns.some((column) => column.name === name) ? `${name} (${what})` : name, what, value });
    for (const name of ["notebook", "status", "started", "seconds"]) add(name, name, (run) => run[name]);
    if (notebooks.length === 1) {
      const promising = rows.some((run) => run.promised) ? rows.filter((run) => run.promised) : rows;
      for (const name of varied.get(notebooks[0])) add(name, "parameter", (run) => run.parameters.get(name));
      const results = unique(promising.flatMap((run) => run.headline));
      for (const name of results) add(name, "result", (run) => run.results.get(name));
    } else {
      add("parameters", "words", (run) => factsOf(run.parameters, varied.get(run.notebook)));
      add("results", "words", (run) => factsOf(run.results, run.headline));
    }
    add("tags", "of the run", (run) => run.tags.join(", "));
    add("notes", "of the run", notesOf);
    return columns;
  }

  const textOf = new Map(runs.map((run) => [run, [
    run.name, run.status, run.started, ...run.tags, notesOf(run), factsOf(run.results, run.headline),
    factsOf(run.parameters, varied.get(run.notebook))].join(" ").toLowerCase()]));

  function holds(run, term) {
    const [, name, sign, wanted] = /^([^<>=:]+)(<=|>=|[=:<>])(.+)$/.exec(term) ?? [];
    if (sign === ":" && name === "status") return run.status.toLowerCase().startsWith(wanted.toLowerCase());
    if (sign === ":" && name === "tag") return run.tags.includes(wanted);
    if (sign === ":" && name === "notebook") return run.notebook.includes(wanted);
    const is = (value, one = numberOf(value), other = Number(wanted)) =>
      (sign === "=" && show(value) === wanted) || (sign?.includes("=") && one === other) ||
      (sign?.startsWith("<") && one < other) || (sign?.startsWith(">") && one > other);
    const values = [run.parameters.get(name), run.results.get(name), name === "seconds" ? run.seconds : undefined];
    return values.some((value) => is(value)) || textOf.get(run).includes(term.toLowerCase());
  }

  // Numbers by value, then words, then what is missing, whichever way the column is sorted.
  function compare(one, other, down) {
    const rank = (value) => (numberOf(value) !== undefined ? 0 : show(value) === "" || value === "nan" ? 2 : 1);
    if (rank(one) !== rank(other)) return rank(one) - rank(other);
    const order = rank(one) === 0 ? numberOf(one) - numberOf(other) || 0 : show(one).localeCompare(show(other));
    return down ? -order : order;
  }

  const ticked = new Set();
  let sorted = { name: "started", down: true };
  let shown = { rows: [], columns: [] };
  const filter = html("input", { type: "search", input: drawTable, spellcheck: "false",
    placeholder: "words, lr=0.01, loss<4, status:done, tag:night" });
  const notebook = choice(drawTable);
  const [count, table] = [html("span", { class: "muted", role: "status" }), html("table", { "aria-label": "runs" })];
  const ALL = "all notebooks";
  const csv = html("button", { type: "button", click: download }, "Download as CSV");
  const none = html("button", { type: "button", click: () => tickAll(runs, false) }, "Untick all");

  function drawTicked() {
    count.textContent = `${shown.rows.length} of ${runs.length} runs, ${ticked.size} ticked`;
    drawCurves();
    drawDifference();
  }

  function tickAll(rows, isTicked) {
    for (const run of rows) ticked[isTicked ? "add" : "delete"](run);
    drawTable();
    drawTicked();
  }

  function drawTable() {
    const terms = (filter.value.match(/(?:"[^"]*"?|[^\s"])+/g) ?? []).map((term) => term.replaceAll('"', ""));
    const isOf = (run) => notebook.value === ALL || run.notebook === notebook.value;
    const rows = runs.filter((run) => isOf(run) && terms.every((term) => holds(run, term)));
    const columns = columnsOf(rows);
    const by = columns.find((column) => column.name === sorted.name) ?? columns[2];
    rows.sort((one, other) => compare(by.value(one), by.value(other), sorted.down));
    shown = { rows, columns };
    const head = columns.map((column) => {
      const arrow = column === by ? (sorted.down ? " ▼" : " ▲") : "";
      const sort = () => {
        sorted = { name: column.name, down: column === by ? !sorted.down : false };
        drawTable();
        table.querySelectorAll("th button")[columns.indexOf(column)]?.focus();
      };
      const order = column === by ? (sorted.down ? "descending" : "ascending") : "none";
      return html("th", { "aria-sort": order }, html("button", { type: "button", click: sort }, column.name + arrow));
    });
    const all = rows.length > 0 && rows.every((run) => ticked.has(run));
    const box = tick(() => tickAll(rows, box.checked), all);
    box.setAttribute("aria-label", "tick all shown runs");
    table.replaceChildren(html("thead", {}, html("tr", {}, html("th", {}, box), ...head)),
      html("tbody", {}, ...rows.map((run) => rowOf(run, columns))));
    count.textContent = `${rows.length} of ${runs.length} runs, ${ticked.size} ticked`;
  }

  function rowOf(run, columns) {
    const box = tick(() => (ticked[box.checked ? "add" : "delete"](run), drawTicked()), ticked.has(run));
    box.setAttribute("aria-label", `tick ${run.name}`);
    const cells = columns.map(({ what, value }) => {
      const text = what === "seconds" && isNumber(run.seconds) ? run.seconds.toFixed(1) : show(value(run));
      const link = () => html("a", { href: `#${run.address}` }, text || run.folder);
      if (what === "started") return html("td", { class: "date" }, link());
      const looks = numberOf(value(run)) !== undefined ? "number" : text.length > 30 ? "words" : "short";
      return html("td", { class: what === "status" ? `${looks} ${run.kind}` : looks }, text);
    });
    return html("tr", {}, html("td", {}, box), ...cells);
  }

  function download() {
    // A spreadsheet takes a text that starts with one of these signs for a formula: an apostrophe makes it text again.
    const quoted = (value) => {
      const text = isNumber(value) ? String(value) : show(value).replace(/^(?=[=+\-@\t\r])/, "'");
      return `"${text.replaceAll('"', '""')}"`;
    };
    const lines = [["run", ...shown.columns.map((column) => column.name)]];
    for (const run of shown.rows) lines.push([run.name, ...shown.columns.map((column) => column.value(run))]);
    const content = lines.map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n";
    const url = URL.createObjectURL(new Blob([content], { type: "text/csv" }));
    html("a", { href: url, download: "runs.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  // ---- a chart: lines and points over two axes
  function brief(value) {
    const size = Math.abs(value);
    const [unit, sign] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([unit]) => size >= Math.max(unit, 1e4)) ?? [1, ""];
    const isExtreme = size && (size < 1e-3 || size >= 1e12);
    return isExtreme ? Number(value.toPrecision(3)).toExponential() : Number((value / unit).toPrecision(4)) + sign;
  }

  function ticksOf([low, high], log) {
    if (log && high / low >= 10) {
      const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
      const powers = Array.from({ length: last - first + 1 }, (_, k) => 10 ** (first + k));
      const some = powers.filter((_, k) => k % Math.ceil(powers.length / 10) === 0);
      const ticks = some.length > 4 ? some : some.flatMap((power) => [power, 2 * power, 5 * power]);
      return ticks.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    }
    const rough = (high - low) / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5].find((factor) => factor * power >= rough * 0.999) ?? 10);
    const [first, last] = [Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)];
    return Array.from({ length: last - first + 1 }, (_, k) => Number(((first + k) * step).toPrecision(12)));
  }

  function rangeOf(values, log) {
    const low = values.reduce((one, other) => Math.min(one, other), Infinity);
    const high = values.reduce((one, other) => Math.max(one, other), -Infinity);
    const margin = low === high ? Math.abs(low) / 10 || 1 : 0;
    return log && margin ? [low / 1.5, high * 1.5] : [low - margin, high + margin];
  }

  // series: [{name, colour, dash, line: [[x, y]], faint: [[x, y]], dots: [[x, y]]}]; a y of null breaks a line.
  // `words` are what stands for x = 0, 1, 2 where a parameter is no number.
  function chart(box, { series, x, y, logX = false, logY = false, words = null }) {
    const points = series.flatMap((one) => [...one.line, ...one.faint, ...one.dots]).filter((p) => p[1] !== null);
    const legend = series.map((one) => {
      const pen = { "stroke-width": 3, "stroke-dasharray": one.dash };
      const swatch = svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: "currentColor", ...pen });
      const value = html("b");
      const key = svg("svg", { class: `c${one.colour}`, width: 22, height: 10, "aria-hidden": "true" }, swatch);
      return { one, value, item: html("li", {}, key, one.name, value) };
    });
    const list = html("ul", { class: "legend" }, ...legend.map(({ item }) => item));
    if (!points.length) return box.replaceChildren(html("p", { class: "muted" }, "Nothing to draw here."), list);
    const [high, floor, left, right, top] = [340, 294, 66, 14, 12];
    const wide = Math.max(300, Math.min(box.clientWidth, 1150));
    const [rangeX, rangeY] = [rangeOf(points.map((p) => p[0]), logX), rangeOf(points.map((p) => p[1]), logY)];
    const share = (value, [from, to], log) =>
      log ? Math.log(value / from) / Math.log(to / from) : (value - from) / (to - from);
    const atX = (value) => left + 8 + share(value, rangeX, logX) * (wide - left - right - 16);
    const atY = (value) => floor - 8 - share(value, rangeY, logY) * (floor - top - 16);
    const at = ([px, py]) => `${atX(px).toFixed(2)} ${atY(py).toFixed(2)}`;
    const pathOf = (line) =>
      line.map((p, k) => (p[1] === null ? "" : (k && line[k - 1][1] !== null ? "L" : "M") + at(p))).join("");
    const about = `${y} against ${x}, lines: ${series.length}. The arrow keys move the position that is read.`;
    const picture = svg("svg", { width: wide, height: high, role: "img", "aria-label": about, tabindex: "0" });
    for (const value of words ? words.keys() : ticksOf(rangeX, logX)) {
      const place = { class: "x", x: atX(value), y: floor + 16, "text-anchor": "middle", "data-value": value };
      picture.append(svg("line", { class: "grid", x1: atX(value), x2: atX(value), y1: top, y2: floor }));
      picture.append(svg("text", place, words ? words[value].slice(0, 14) : brief(value)));
    }
    for (const value of ticksOf(rangeY, logY)) {
      const place = { class: "y", x: left - 6, y: atY(value) + 4, "text-anchor": "end", "data-value": value };
      picture.append(svg("line", { class: "grid", x1: left, x2: wide - right, y1: atY(value), y2: atY(value) }));
      picture.append(svg("text", place, brief(value)));
    }
    const middle = (top + floor) / 2;
    picture.append(
      svg("path", { class: "axis", fill: "none", d: `M${left} ${top}V${floor}H${wide - right}` }),
      svg("text", { x: (left + wide - right) / 2, y: high - 8, "text-anchor": "middle" }, x),
      svg("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, y),
    );
    for (const one of series) {
      const stroke = { fill: "none", stroke: "currentColor", "stroke-width": 1.6, "stroke-dasharray": one.dash };
      picture.append(svg("g", { class: `c${one.colour}`, "data-name": one.name },
        svg("path", { ...stroke, class: "faint", d: pathOf(one.faint), opacity: 0.3 }),
        svg("path", { ...stroke, class: "line", d: pathOf(one.line) }),
        ...one.dots.map(([px, py]) => svg("circle", { cx: atX(px), cy: atY(py), r: 3, fill: "currentColor" }))));
    }
    const guide = svg("line", { class: "guide", y1: top, y2: floor, visibility: "hidden" });
    let position = left;
    const read = (place) => {
      position = Math.min(Math.max(place, left), wide - right);
      make(guide, { x1: position, x2: position, visibility: "visible" }, []);
      const distance = (point) => Math.abs(atX(point[0]) - position);
      for (const { one, value } of legend) {
        const known = one.line.filter((point) => point[1] !== null);
        const near = known.reduce((p, q) => (distance(q) < distance(p) ? q : p), known[0]);
        value.textContent = near ? `: ${show(near[1])} at ${words ? words[near[0]] : show(near[0])}` : "";
      }
    };
    picture.addEventListener("pointermove", (event) => read(event.clientX - picture.getBoundingClientRect().left));
    picture.addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      event.preventDefault();
      read(position + (event.key === "ArrowLeft" ? -8 : 8));
    });
    picture.append(guide);
    box.replaceChildren(picture, list);
  }

  // ---- curves of the ticked runs
  const UNITS = new Map([["tokens_per_s", "tokens per second"], ["memory_gib", "GiB"], ["lr", "learning rate"],
    ["loss", "per token, all terms"], ["eval_loss", "nats per token"], ["ce", "nats per token"]]);
  const AXES = new Map([["step", "step"], ["tokens", "tokens trained on"], ["seconds", "seconds of training"]]);
  const EVERY = "every training";
  const [metric, training, axis] = [choice(drawCurves), choice(drawCurves), choice(drawCurves)];
  const smooth = html("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, input: drawCurves });
  const [logCurves, smoothness, curvesBox] = [tick(drawCurves), html("output"), html("div", { id: "curves" })];
  axis.offer([...AXES.keys()], "step");

  // The mean of what came before, in which each point counts `weight` times as much as the next one.
  function smoothed(line, weight) {
    let [mean, total] = [0, 0];
    return line.map(([x, y]) => {
      if (y === null) return [x, y];
      [mean, total] = [weight * mean + (1 - weight) * y, weight * total + (1 - weight)];
      return [x, mean / total];
    });
  }

  function drawCurves() {
    const chosen = runs.filter((run) => ticked.has(run));
    training.offer([EVERY, ...unique(chosen.flatMap((run) => [...run.curves.keys()]))], EVERY);
    const curvesOf = (run) => [...run.curves].map(([name, metrics]) => ({ run, name, metrics }));
    const all = chosen.flatMap(curvesOf).filter(({ name }) => [EVERY, name].includes(training.value));
    metric.offer(unique(all.flatMap(({ metrics }) => [...metrics.keys()])), "loss");
    const weight = Number(smooth.value);
    smoothness.textContent = smooth.value;
    if (!all.length) {
      const why = chosen.length ? "The ticked runs logged no metrics." : "Tick runs in the table to see their curves.";
      return curvesBox.replaceChildren(html("p", { class: "muted" }, why));
    }
    const column = [...AXES.keys()].indexOf(axis.value);
    const differs = (name) => unique(chosen.map((run) => show(run.parameters.get(name)))).length > 1;
    const differing = unique(chosen.flatMap((run) => varied.get(run.notebook))).filter(differs);
    const series = all.filter(({ metrics }) => metrics.has(metric.value)).map(({ run, name, metrics }, k) => {
      const points = metrics.get(metric.value).filter((p) => p[column] !== null).sort((p, q) => p[column] - q[column]);
      const numbers = points.filter((point) => isNumber(point[3]));
      const isDrawn = (y) => isNumber(y) && (y > 0 || !logCurves.checked);
      const line = points.map((point) => [point[column], isDrawn(point[3]) ? point[3] : null]);
      const below = numbers.filter((point) => !isDrawn(point[3])).length;
      const label = [name, factsOf(run.parameters, differing), run.name, run.stopped ? run.status : "",
        points.length > numbers.length ? `nan or inf: ${points.length - numbers.length}` : "",
        below ? `not above 0: ${below}` : "", points.length ? "" : `no ${axis.value} recorded`];
      const style = { name: label.filter(Boolean).join(" · "), colour: k % 8, dash: dashOf(k) };
      if (weight) return { ...style, line: smoothed(line, weight), faint: line, dots: [] };
      return { ...style, line, faint: [], dots: line.length < 40 ? line.filter((point) => point[1] !== null) : [] };
    });
    const [x, unit] = [AXES.get(axis.value), UNITS.get(metric.value)];
    const y = `${metric.value}${unit ? `, ${unit}` : ""}${weight ? ", smoothed" : ""}`;
    chart(curvesBox, { series, x, y, logY: logCurves.checked });
  }

  // ---- what differs between two runs
  const [equal, equalLabel] = [tick(drawDifference), html("span")];
  const differenceBox = html("div", { id: "difference", class: "scroll" });

  function drawDifference() {
    const pair = runs.filter((run) => ticked.has(run)).reverse(); // the older one first
    equalLabel.textContent = "show equal rows";
    if (pair.length !== 2) {
      const words = `Tick two runs in the table to see what differs between them; ${pair.length} are ticked.`;
      return differenceBox.replaceChildren(html("p", { class: "muted" }, words));
    }
    const about = (run) => new Map([["status", run.status], ["stopped", run.stopped], ["started", run.started],
      ["seconds", run.seconds], ["command", run.command], ["tags", run.tags.join(", ")], ["notes", notesOf(run)]]);
    const groups = [["run", pair.map(about)], ["parameters", pair.map((run) => run.parameters)],
      ["results", pair.map((run) => run.results)], ["versions, hardware, commit", pair.map((run) => run.environment)]];
    let same = 0;
    const bodies = groups.map(([title, [one, other]]) => {
      const lines = unique([...one.keys(), ...other.keys()]).flatMap((name) => {
        const [a, b] = [one.get(name), other.get(name)];
        const isSame = a === b || (show(a) === "" && show(b) === "");
        same += isSame;
        if (isSame && !equal.checked) return [];
        const gap = isNumber(a) && isNumber(b) && !isSame ? (b > a ? "+" : "") + show(b - a) : "";
        const cells = [name, show(a), show(b), gap].map((text) => html("td", {}, text));
        return [html("tr", { class: isSame ? "muted" : "" }, ...cells)];
      });
      const head = html("th", { colspan: 4 }, lines.length ? title : `${title}: equal`);
      return html("tbody", {}, html("tr", {}, head), ...lines);
    });
    equalLabel.textContent = `show equal rows (${same})`;
    const head = ["", ...pair.map((run) => run.name), "second minus first"].map((text) => html("th", {}, text));
    differenceBox.replaceChildren(html("table", {}, html("thead", {}, html("tr", {}, ...head)), ...bodies));
  }

  // ---- sweeps: a result against a parameter
  const rowOfSweep = ([parameters, results]) => ({ parameters: new Map(parameters), results: new Map(results) });
  const sweeps = new Map(data.sweeps.map((one) => [`${one.notebook}, ${one.name}: ${one.varied.join(", ")}`,
    { ...one, rows: one.rows.map(rowOfSweep) }]));
  const sweep = choice(() => drawSweep(true));
  const [result, parameter] = [choice(() => drawSweep()), choice(() => drawSweep(true))];
  const [logSweepX, logSweepY] = [tick(() => drawSweep()), tick(() => drawSweep())];
  const [sweepBox, sweepLink] = [html("div", { id: "sweep" }), html("a", {}, "table as JSON")];

  function drawSweep(isNew = false) {
    const { rows, varied: names, notebook: of, address } = sweeps.get(sweep.value);
    sweepLink.setAttribute("href", address);
    const numbers = rows.flatMap((row) => [...row.results]).filter(([, value]) => isNumber(value));
    result.offer(unique(numbers.map(([name]) => name)), runs.find((run) => run.notebook === of)?.headline[0]);
    parameter.offer(names, names.find((name) => name !== "seed"));
    const usable = rows.filter((row) => row.parameters.has(parameter.value));
    const values = unique(usable.map((row) => row.parameters.get(parameter.value)));
    const words = values.every(isNumber) ? null : unique(values.map(show));
    const [low, high] = words ? [0, 0] : rangeOf(values);
    logSweepX.disabled = !(low > 0);
    if (isNew) logSweepX.checked = low > 0 && high / low >= 50;
    const others = names.filter((name) => name !== parameter.value && name !== "seed");
    const groups = new Map(); // one line for each combination of the other parameters, over all seeds
    for (const row of usable) {
      const [given, y] = [row.parameters.get(parameter.value), row.results.get(result.value)];
      if (!isNumber(y) || (logSweepY.checked && y <= 0)) continue;
      const key = factsOf(row.parameters, others) || result.value;
      groups.set(key, [...(groups.get(key) ?? []), [words ? words.indexOf(show(given)) : given, y]]);
    }
    const series = [...groups].map(([name, dots], k) => {
      const line = unique(dots.map((dot) => dot[0])).sort((a, b) => a - b).map((x) => {
        const here = dots.filter((dot) => dot[0] === x);
        return [x, here.reduce((sum, dot) => sum + dot[1], 0) / here.length];
      });
      const mean = line.length < dots.length ? ` (points: ${dots.length}, line: their mean)` : "";
      return { name: name + mean, colour: k % 8, dash: dashOf(k), line, faint: [], dots };
    });
    const scales = { logX: logSweepX.checked && low > 0, logY: logSweepY.checked, words };
    chart(sweepBox, { series, x: parameter.value, y: result.value, ...scales });
    const missing = rows.length - [...groups.values()].flat().length;
    if (missing) sweepBox.append(html("p", { class: "muted" }, `Runs without a number here: ${missing}.`));
  }

  // ---- the page
  function openRun() {
    const details = document.getElementById(location.hash.slice(1));
    if (details?.tagName === "DETAILS") details.open = true;
  }

  const tools = (...controls) => html("div", { class: "tools" }, ...controls);
  const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": "table of runs" };
  place.append(html("h2", {}, "Compare"),
    tools(labelled("Filter", filter, "wide"), labelled("Notebook", notebook), csv, none, count),
    html("div", region, table), html("h3", {}, "Curves"),
    tools(labelled("Metric", metric), labelled("Training", training), labelled("Against", axis),
      labelled("log scale", logCurves, "inline"), labelled("Smoothing", html("span", {}, smooth, " ", smoothness))),
    curvesBox, html("p", { class: "muted" }, data.notices.join(" ")), html("h3", {}, "Difference of two runs"),
    tools(labelled(equalLabel, equal, "inline")), differenceBox);
  notebook.offer([ALL, ...varied.keys()], ALL);
  tickAll([], true);
  if (sweeps.size) {
    place.append(html("h3", {}, "Sweeps"), tools(labelled("Sweep", sweep), labelled("Result", result),
      labelled("Parameter", parameter), labelled("log parameter", logSweepX, "inline"),
      labelled("log result", logSweepY, "inline"), sweepLink), sweepBox);
    sweep.offer([...sweeps.keys()]);
    drawSweep(true);
  }
  window.addEventListener("resize", () => (drawCurves(), sweeps.size && drawSweep()));
  window.addEventListener("hashchange", openRun);
  openRun();
})();
