// The part of outputs/index.html that compares runs: a table, curves, the difference of two runs, and sweeps.
//
// report.py puts the facts of all runs into the page as JSON, and this script draws them. What a run says is foreign: it
// becomes text nodes and values of attributes, never markup. Names of parameters, results and metrics are keys of Maps,
// because a plain object already has a "__proto__".
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

  // ---- small things

  function make(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") node.addEventListener(name, value);
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children); // strings become text nodes
    return node;
  }
  const html = (tag, attributes = {}, ...children) => make(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) =>
    make(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const unique = (values) => [...new Set(values)];
  const isNumber = (value) => typeof value === "number";
  const infinite = new Map([["inf", Infinity], ["-inf", -Infinity]]);
  const numberOf = (value) => (isNumber(value) ? value : infinite.get(value));

  function show(value) {
    if (value === undefined || value === null) return "";
    return isNumber(value) && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : String(value);
  }

  function labelled(label, control, kind = "") {
    return html("label", { class: kind }, ...(kind === "inline" ? [control, label] : [label, control]));
  }

  function choice(redraw) {
    const select = html("select", { change: redraw });
    select.offer = (values, preferred) => {
      const before = values.includes(select.value) ? select.value : preferred;
      select.replaceChildren(...values.map((value) => html("option", { value }, value || "(no name)")));
      select.value = values.includes(before) ? before : (values[0] ?? "");
    };
    return select;
  }

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
    const columns = [
      { name: "notebook", value: (run) => run.notebook },
      { name: "status", value: (run) => run.status },
      { name: "started", value: (run) => run.started },
      { name: "seconds", value: (run) => run.seconds },
    ];
    if (notebooks.length === 1) {
      const names = varied.get(notebooks[0]);
      for (const name of names) columns.push({ name, value: (run) => run.parameters.get(name) });
      for (const name of unique(rows.flatMap((run) => run.headline))) {
        const taken = columns.some((column) => column.name === name);
        columns.push({ name: taken ? `${name} (result)` : name, value: (run) => run.results.get(name) });
      }
    } else {
      columns.push({ name: "parameters", value: (run) => factsOf(run.parameters, varied.get(run.notebook)) });
      columns.push({ name: "results", value: (run) => factsOf(run.results, run.headline) });
    }
    columns.push({ name: "tags", value: (run) => run.tags.join(", ") }, { name: "notes", value: notesOf });
    return columns;
  }

  const textOf = new Map();
  for (const run of runs) {
    const parts = [run.name, run.status, run.started, ...run.tags, notesOf(run), factsOf(run.results, run.headline)];
    parts.push(factsOf(run.parameters, varied.get(run.notebook)));
    textOf.set(run, parts.join(" ").toLowerCase());
  }

  function holds(run, term) {
    const [, name, sign, wanted] = /^([^<>=:]+)(<=|>=|[=:<>])(.+)$/.exec(term) ?? [];
    if (sign === ":" && name === "status") return run.status.toLowerCase().startsWith(wanted.toLowerCase());
    if (sign === ":" && name === "tag") return run.tags.includes(wanted);
    if (sign === ":" && name === "notebook") return run.notebook.includes(wanted);
    if (sign && sign !== ":") {
      const values = [run.parameters.get(name), run.results.get(name), name === "seconds" ? run.seconds : undefined];
      const is = (value) => {
        const [one, other] = [numberOf(value), Number(wanted)];
        if (sign === "=") return show(value) === wanted || (one !== undefined && one === other);
        return one !== undefined && ((sign[0] === "<" ? one < other : one > other) || (sign[1] === "=" && one === other));
      };
      if (values.some((value) => value !== undefined && value !== null && is(value))) return true;
    }
    return textOf.get(run).includes(term.toLowerCase());
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
  const help = "words, lr=0.01, loss<4, status:done, tag:night";
  const filter = html("input", { type: "search", placeholder: help, input: drawTable, spellcheck: "false" });
  const notebook = choice(drawTable);
  const count = html("span", { class: "muted", role: "status" });
  const table = html("table", { "aria-label": "runs" });
  const ALL = "all notebooks";
  const csv = html("button", { type: "button", click: download }, "Download as CSV");
  const none = html("button", { type: "button", click: () => redrawTicks(() => ticked.clear()) }, "Untick all");

  function redrawTicks(change) {
    change();
    drawTable();
    drawCurves();
    drawDifference();
  }

  function drawTable() {
    const terms = (filter.value.match(/(?:"[^"]*"?|[^\s"])+/g) ?? []).map((term) => term.replaceAll('"', ""));
    const rows = runs.filter(
      (run) => (notebook.value === ALL || run.notebook === notebook.value) && terms.every((term) => holds(run, term)),
    );
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
    const tickAll = tick(() => redrawTicks(() => rows.forEach((run) => ticked[all ? "delete" : "add"](run))), all);
    tickAll.setAttribute("aria-label", "tick all shown runs");
    table.replaceChildren(
      html("thead", {}, html("tr", {}, html("th", {}, tickAll), ...head)),
      html("tbody", {}, ...rows.map((run) => rowOf(run, columns))),
    );
    count.textContent = `${rows.length} of ${runs.length} runs, ${ticked.size} ticked`;
  }

  function rowOf(run, columns) {
    const box = tick(() => {
      redrawTicks(() => ticked[box.checked ? "add" : "delete"](run));
      table.querySelectorAll("tbody input")[shown.rows.indexOf(run)]?.focus();
    }, ticked.has(run));
    box.setAttribute("aria-label", `tick ${run.name}`);
    const cells = columns.map(({ name, value }) => {
      const [found, words] = [value(run), name === "seconds" && isNumber(run.seconds) ? run.seconds.toFixed(1) : null];
      const text = words ?? show(found);
      if (name === "started") return html("td", {}, html("a", { href: `#${run.address}` }, text || run.folder));
      return html("td", { class: name === "status" ? run.kind : numberOf(found) === undefined ? "" : "number" }, text);
    });
    return html("tr", {}, html("td", {}, box), ...cells);
  }

  function download() {
    // A spreadsheet takes a text that starts with one of these signs for a formula: an apostrophe makes it text again.
    const quoted = (value) => {
      const text = isNumber(value) ? String(value) : show(value);
      return `"${(isNumber(value) || !/^[=+\-@\t\r]/.test(text) ? text : `'${text}`).replaceAll('"', '""')}"`;
    };
    const lines = [["run", ...shown.columns.map((column) => column.name)]];
    for (const run of shown.rows) lines.push([run.name, ...shown.columns.map((column) => column.value(run))]);
    const content = lines.map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n";
    const url = URL.createObjectURL(new Blob([content], { type: "text/csv" }));
    html("a", { href: url, download: "runs.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  // ---- a chart: lines and points over two axes

  const brief = (value) => {
    const size = Math.abs(value);
    for (const [unit, sign] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= unit && size < 1e12) return `${Number((value / (unit === 1e4 ? 1e3 : unit)).toPrecision(4))}${sign}`;
    }
    return size && (size < 1e-3 || size >= 1e12) ? Number(value.toPrecision(3)).toExponential() : show(value);
  };

  function ticksOf([low, high], log) {
    if (log && high / low >= 10) {
      const powers = [];
      for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++) powers.push(10 ** k);
      const ticks = powers.length > 4 ? powers : powers.flatMap((power) => [power, 2 * power, 5 * power]);
      return ticks.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    }
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5].find((factor) => factor * power >= rough * 0.999) ?? 10);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(Number((k * step).toPrecision(12)));
    return ticks;
  }

  function rangeOf(values, log) {
    const low = values.reduce((one, other) => Math.min(one, other), Infinity);
    const high = values.reduce((one, other) => Math.max(one, other), -Infinity);
    if (low === high) return log ? [low / 1.5, high * 1.5] : [low - (Math.abs(low) / 10 || 1), high + (Math.abs(low) / 10 || 1)];
    return [low, high];
  }

  // series: [{name, colour, line: [[x, y]], faint: [[x, y]], dots: [[x, y]]}]; a y of null breaks the line.
  function chart(box, { series, x, y, logX = false, logY = false, words = null }) {
    const points = series.flatMap((one) => [...one.line, ...one.faint, ...one.dots]).filter(([, value]) => value !== null);
    box.replaceChildren();
    if (!points.length) return box.append(html("p", { class: "muted" }, "Nothing to draw: no number of this name."));
    const [wide, high, left, right, top, bottom] = [Math.max(300, Math.min(box.clientWidth, 1150)), 340, 66, 14, 12, 46];
    const [rangeX, rangeY] = [rangeOf(points.map((p) => p[0]), logX), rangeOf(points.map((p) => p[1]), logY)];
    const share = (value, [from, to], log) =>
      log ? Math.log(value / from) / Math.log(to / from) : (value - from) / (to - from);
    const atX = (value) => left + 8 + share(value, rangeX, logX) * (wide - left - right - 16);
    const atY = (value) => high - bottom - 8 - share(value, rangeY, logY) * (high - top - bottom - 16);
    const pathOf = (line) =>
      line.map(([px, py], k) =>
        py === null ? "" : `${k && line[k - 1][1] !== null ? "L" : "M"}${atX(px).toFixed(2)} ${atY(py).toFixed(2)}`).join("");
    const label = `${series.length} lines: ${y} against ${x}. The arrow keys move the position that is read.`;
    const picture = svg("svg", { width: wide, height: high, role: "img", "aria-label": label, tabindex: "0" });
    const ticksX = words ? words.map((_, k) => k) : ticksOf(rangeX, logX);
    for (const value of ticksX) {
      picture.append(
        svg("line", { class: "grid", x1: atX(value), x2: atX(value), y1: top, y2: high - bottom }),
        svg("text", { class: "x", x: atX(value), y: high - bottom + 16, "text-anchor": "middle", "data-value": value },
          words ? words[value] : brief(value)),
      );
    }
    for (const value of ticksOf(rangeY, logY)) {
      picture.append(
        svg("line", { class: "grid", x1: left, x2: wide - right, y1: atY(value), y2: atY(value) }),
        svg("text", { class: "y", x: left - 6, y: atY(value) + 4, "text-anchor": "end", "data-value": value }, brief(value)),
      );
    }
    picture.append(
      svg("path", { class: "axis", fill: "none", d: `M${left} ${top}V${high - bottom}H${wide - right}` }),
      svg("text", { x: (left + wide - right) / 2, y: high - 8, "text-anchor": "middle" }, x),
      svg("text", { x: 12, y: (high - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(high - bottom) / 2})` }, y),
    );
    series.forEach((one) => {
      const stroke = { fill: "none", stroke: "currentColor", "stroke-width": 1.6, "stroke-dasharray": one.dash };
      const group = svg("g", { class: `c${one.colour}`, "data-name": one.name });
      if (one.faint.length) group.append(svg("path", { ...stroke, class: "faint", d: pathOf(one.faint), opacity: 0.3 }));
      group.append(svg("path", { ...stroke, class: "line", d: pathOf(one.line) }));
      for (const [px, py] of one.dots) {
        group.append(svg("circle", { cx: atX(px).toFixed(2), cy: atY(py).toFixed(2), r: 3, fill: "currentColor" }));
      }
      picture.append(group);
    });
    const guide = svg("line", { class: "guide", y1: top, y2: high - bottom, visibility: "hidden" });
    const legend = series.map((one) => {
      const swatch = svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: "currentColor", "stroke-width": 3, "stroke-dasharray": one.dash });
      const value = html("b", {});
      const item = html("li", {}, svg("svg", { class: `c${one.colour}`, width: 22, height: 10, "aria-hidden": "true" }, swatch), one.name, value);
      return { one, value, item };
    });
    let position = null;
    const read = (at) => {
      position = Math.min(Math.max(at, left), wide - right);
      for (const [name, value] of [["x1", position], ["x2", position], ["visibility", "visible"]]) guide.setAttribute(name, value);
      for (const { one, value } of legend) {
        const near = [...(one.line.length ? one.line : one.dots)].filter((point) => point[1] !== null)
          .sort((p, q) => Math.abs(atX(p[0]) - position) - Math.abs(atX(q[0]) - position))[0];
        value.textContent = near ? `: ${show(near[1])} at ${words ? words[near[0]] : show(near[0])}` : "";
      }
    };
    picture.addEventListener("pointermove", (event) => read(event.clientX - picture.getBoundingClientRect().left));
    picture.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
      if (move) event.preventDefault(), read((position ?? left) + move);
    });
    picture.append(guide);
    box.append(picture, html("ul", { class: "legend" }, ...legend.map((each) => each.item)));
  }

  // ---- curves of the ticked runs

  const UNITS = new Map([["tokens_per_s", "tokens per second"], ["memory_gib", "GiB"], ["eval_loss", "nats per token"],
    ["ce", "nats per token"], ["loss", "per token, all terms"], ["lr", "learning rate"]]);
  const AXES = ["step", "tokens", "seconds"];
  const AXIS_NAMES = ["step", "tokens trained on", "seconds of training"];
  const EVERY = "every training";
  const [metric, training, axis] = [choice(drawCurves), choice(drawCurves), choice(drawCurves)];
  const logCurves = tick(drawCurves);
  const smooth = html("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, input: drawCurves });
  const smoothness = html("output", {}, "0");
  const curvesBox = html("div", { id: "curves" });
  axis.offer(AXES, "step");

  // The mean of what came before, in which each step back counts `weight` times as much.
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
    const trainings = unique(chosen.flatMap((run) => [...run.curves.keys()]));
    training.offer([EVERY, ...trainings], EVERY);
    const use = (name) => training.value === EVERY || training.value === name;
    const pairs = chosen.flatMap((run) => [...run.curves].filter(([name]) => use(name)).map(([name, all]) => ({ run, name, all })));
    metric.offer(unique(pairs.flatMap(({ all }) => [...all.keys()])), "loss");
    smoothness.textContent = smooth.value;
    if (!pairs.length) {
      const why = chosen.length ? "The ticked runs logged no metrics." : "Tick runs in the table to see their curves.";
      return curvesBox.replaceChildren(html("p", { class: "muted" }, why));
    }
    const [log, weight, at] = [logCurves.checked, Number(smooth.value), AXES.indexOf(axis.value)];
    const differs = [...new Set(chosen.flatMap((run) => varied.get(run.notebook)))].filter(
      (name) => unique(chosen.map((run) => show(run.parameters.get(name)))).length > 1);
    const series = pairs.filter(({ all }) => all.has(metric.value)).map(({ run, name, all }, k) => {
      const points = all.get(metric.value).filter((point) => point[at] !== null).sort((p, q) => p[at] - q[at]);
      const line = points.map((point) => [point[at], isNumber(point[3]) && !(log && point[3] <= 0) ? point[3] : null]);
      const broken = points.filter((point) => !isNumber(point[3])).length;
      const below = line.filter(([, y]) => y === null).length - broken;
      const label = [name, factsOf(run.parameters, differs), run.name, run.kind === "stopped" ? run.status : "",
        broken ? `${broken} values are nan or inf` : "", below ? `${below} values are not above 0` : "",
        points.length ? "" : `no ${axis.value} recorded`].filter(Boolean).join(" · ");
      const marks = line.length < 40 ? line.filter(([, y]) => y !== null) : [];
      const dash = k < 8 ? null : ["6 3", "2 3", "8 3 2 3"][Math.floor(k / 8 - 1) % 3];
      return weight
        ? { name: label, colour: k % 8, dash, line: smoothed(line, weight), faint: line, dots: [] }
        : { name: label, colour: k % 8, dash, line, faint: [], dots: marks };
    });
    const unit = UNITS.get(metric.value);
    const y = `${metric.value}${unit ? `, ${unit}` : ""}${weight ? ", smoothed" : ""}`;
    chart(curvesBox, { series, x: AXIS_NAMES[at], y, logY: log });
  }

  // ---- what differs between two runs

  const equal = tick(drawDifference);
  const equalLabel = html("span");
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
      const lines = unique([...one.keys(), ...other.keys()]).map((name) => {
        const [a, b] = [one.get(name), other.get(name)];
        const isSame = show(a) === show(b);
        same += isSame;
        if (isSame && !equal.checked) return null;
        const gap = isNumber(a) && isNumber(b) && !isSame ? show(b - a).replace(/^(?=\d)/, "+") : "";
        return html("tr", { class: isSame ? "muted" : "" }, ...[name, show(a), show(b), gap].map((text) => html("td", {}, text)));
      }).filter(Boolean);
      return html("tbody", {}, html("tr", {}, html("th", { colspan: 4 }, lines.length ? title : `${title}: equal`)), ...lines);
    });
    equalLabel.textContent = `show ${same} equal rows`;
    const head = ["", ...pair.map((run) => run.name), "second minus first"].map((text) => html("th", {}, text));
    differenceBox.replaceChildren(html("table", {}, html("thead", {}, html("tr", {}, ...head)), ...bodies));
  }

  // ---- sweeps: a result against a parameter

  const sweeps = new Map(data.sweeps.map((sweep) => [`${sweep.notebook}, ${sweep.name}: ${sweep.varied.join(", ")}`, {
    ...sweep, rows: sweep.rows.map(([parameters, results]) => ({ parameters: new Map(parameters), results: new Map(results) })),
  }]));
  const sweep = choice(() => drawSweep(true));
  const [result, parameter] = [choice(() => drawSweep()), choice(() => drawSweep(true))];
  const [logSweepX, logSweepY] = [tick(() => drawSweep()), tick(() => drawSweep())];
  const sweepBox = html("div", { id: "sweep" });

  function drawSweep(isNew = false) {
    const { rows, varied: names } = sweeps.get(sweep.value);
    const first = runs.find((run) => run.notebook === sweeps.get(sweep.value).notebook)?.headline[0];
    const all = unique(rows.flatMap((row) => [...row.results].filter(([, value]) => isNumber(value)).map(([name]) => name)));
    result.offer(all, first);
    parameter.offer(names, names.find((name) => name !== "seed"));
    const values = unique(rows.map((row) => row.parameters.get(parameter.value)));
    const areNumbers = values.every(isNumber);
    const [low, high] = areNumbers ? rangeOf(values) : [0, 0];
    if (isNew) logSweepX.checked = low > 0 && high / low >= 50;
    logSweepX.disabled = !(low > 0);
    const words = areNumbers ? null : values.map(show);
    const groups = new Map(); // one line for each combination of the other parameters, over all seeds
    let missing = 0;
    for (const row of rows) {
      const [given, y] = [row.parameters.get(parameter.value), row.results.get(result.value)];
      if (!isNumber(y) || (logSweepY.checked && y <= 0)) missing += 1;
      else {
        const others = names.filter((name) => name !== parameter.value && name !== "seed");
        const key = factsOf(row.parameters, others) || result.value;
        if (!groups.has(key)) groups.set(key, []);
        groups.get(key).push([areNumbers ? given : words.indexOf(show(given)), y]);
      }
    }
    const series = [...groups].map(([name, dots], k) => {
      const line = unique(dots.map(([x]) => x)).sort((a, b) => a - b).map((x) => {
        const here = dots.filter((dot) => dot[0] === x);
        return [x, here.reduce((sum, dot) => sum + dot[1], 0) / here.length];
      });
      const mean = line.length < dots.length ? ` (line: mean; ${dots.length} runs)` : "";
      return { name: name + mean, colour: k % 8, dash: k < 8 ? null : "6 3", line, faint: [], dots };
    });
    const isLog = logSweepX.checked && !logSweepX.disabled;
    chart(sweepBox, { series, x: parameter.value, y: result.value, logX: isLog, logY: logSweepY.checked, words });
    if (missing) sweepBox.append(html("p", { class: "muted" }, `${missing} runs have no number here.`));
  }

  // ---- the page

  function open() {
    const details = document.getElementById(location.hash.slice(1));
    if (details?.tagName === "DETAILS") details.open = true;
  }

  const tools = (...controls) => html("div", { class: "tools" }, ...controls);
  place.append(
    html("h2", {}, "Compare"),
    tools(labelled("Filter", filter, "wide"), labelled("Notebook", notebook), csv, none, count),
    html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table of runs" }, table),
    html("h3", {}, "Curves"),
    tools(labelled("Metric", metric), labelled("Training", training), labelled("Against", axis),
      labelled("log scale", logCurves, "inline"), labelled("Smoothing", html("span", {}, smooth, " ", smoothness))),
    curvesBox,
    html("p", { class: "muted" }, data.notices.join(" ")),
    html("h3", {}, "Difference of two runs"),
    tools(labelled(equalLabel, equal, "inline")),
    differenceBox,
  );
  if (sweeps.size) {
    place.append(html("h3", {}, "Sweeps"), tools(labelled("Sweep", sweep), labelled("Result", result), labelled("Parameter", parameter),
      labelled("log parameter", logSweepX, "inline"), labelled("log result", logSweepY, "inline")), sweepBox);
    sweep.offer([...sweeps.keys()]);
  }
  notebook.offer([ALL, ...varied.keys()], ALL);
  const draw = () => (drawCurves(), sweeps.size && drawSweep());
  redrawTicks(() => {});
  if (sweeps.size) drawSweep(true);
  window.addEventListener("resize", draw);
  window.addEventListener("hashchange", open);
  open();
})();
